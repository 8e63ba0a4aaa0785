"""Masks that are numbers to be added to scores, beside torch's own: broadcast, strided, compiled, differentiated."""

import contextlib
import re
import warnings

import flashcore
from harness import cases, need_torch

SHAPES = {
    "everything": (2, 4, 20, 33),
    "of heads": (1, 4, 20, 33),
    "of batch entries": (2, 1, 20, 33),
    "of queries": (20, 33),
    "of keys": (2, 1, 1, 33),
    "of queries alone": (2, 4, 20, 1),
}


def made(torch, device, dtype, requires_grad=False):
    torch.manual_seed(0)
    shapes = ((2, 4, 20, 16), (2, 2, 33, 16), (2, 2, 33, 16))
    return [torch.randn(s, device=device, dtype=dtype, requires_grad=requires_grad) for s in shapes]


def theirs(torch, *tensors, **options):
    """torch's own function by its definition: some of its kernels fail on masks of one key."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True, **options)


def close(torch, got, wanted, dtype):
    tolerance = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(got.float(), wanted.float(), atol=tolerance, rtol=tolerance)


@cases(name=list(SHAPES), form=["bool", "float32", "as q", "strided"], device=["cpu", "cuda"])
def test_masks_are_torchs(name, form, device):
    torch = need_torch(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = made(torch, device, dtype)
    mask = 2 * torch.randn(SHAPES[name], device=device)
    if form == "bool":
        mask = mask > -1
        mask[..., 0] = True  # torch gives NaN where a row sees nothing
    elif form == "as q":
        mask = mask.to(dtype)
    elif form == "strided":
        mask = torch.stack([mask, mask], -1)[..., 0]
    ours = flashcore.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    given = mask if mask.dtype in (torch.bool, dtype) else mask.to(dtype)
    close(torch, ours, theirs(torch, q, k, v, attn_mask=given), dtype)


@cases(device=["cpu", "cuda"], compiled=[False, True])
def test_gradients_are_torchs(device, compiled):
    torch = need_torch(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    ours, others = (made(torch, device, dtype, True) for _ in range(2))
    mask, d_out = torch.randn(4, 20, 33, device=device, dtype=dtype), torch.randn(2, 4, 20, 16, device=device, dtype=dtype)
    call = lambda q, k, v: flashcore.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    call(*ours).backward(d_out)
    theirs(torch, *others, attn_mask=mask).backward(d_out)
    for got, wanted in zip(ours, others):
        close(torch, got.grad, wanted.grad, dtype)


@cases(device=["cpu", "cuda"], compiled=[False, True])
def test_learned_masks_have_torchs_gradient(device, compiled):
    """torch computes a call whose mask is learned, and a warning says so."""
    torch = need_torch(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    ours, others = (made(torch, device, dtype, True) for _ in range(2))
    biases = [torch.linspace(-1, 1, 4 * 20 * 33, device=device, dtype=dtype).reshape(4, 20, 33).requires_grad_() for _ in range(2)]
    call = lambda q, k, v, bias: flashcore.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    told = contextlib.nullcontext() if compiled else warns(UserWarning, "attn_mask requires a gradient.*torch's own")
    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    with told:
        call(*ours, biases[0]).square().sum().backward()
    theirs(torch, *others, attn_mask=biases[1]).square().sum().backward()
    for got, wanted in zip((*ours, biases[0]), (*others, biases[1])):
        close(torch, got.grad / 8, wanted.grad / 8, dtype)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        close(torch, call(*ours, biases[0]), theirs(torch, *others, attn_mask=biases[1]), dtype)


def test_learned_masks_go_to_torch_where_its_function_is_replaced():
    torch = need_torch()
    q, k, v = made(torch, "cpu", torch.float32)
    bias, functions = torch.zeros(20, 33, requires_grad=True), torch.nn.functional
    expected = theirs(torch, q, k, v, attn_mask=bias)
    kept, functions.scaled_dot_product_attention = functions.scaled_dot_product_attention, flashcore.scaled_dot_product_attention
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = functions.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    finally:
        functions.scaled_dot_product_attention = kept
    close(torch, out, expected, torch.float32)


@contextlib.contextmanager
def warns(kind, pattern):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    assert any(issubclass(one.category, kind) and re.search(pattern, str(one.message)) for one in seen), seen


def test_rows_that_see_nothing_are_zeros():
    torch = need_torch()
    q, k, v = made(torch, "cpu", torch.float32)
    mask = torch.rand(20, 33) > 0.3
    mask[7] = False
    out = flashcore.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    assert (out[:, :, 7] == 0).all() and out.isfinite().all()
