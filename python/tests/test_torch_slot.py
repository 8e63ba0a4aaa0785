"""PyTorch's place for flash attention: the operators on CPU tensors, and `scaled_dot_product_attention` on a GPU."""

import flashcore
from harness import Skip, cases, has_cuda, raises


def slot():
    try:
        import torch
    except ImportError as error:
        raise Skip("torch is not installed") from error
    import flashcore.integrations.torch as module

    return torch, module


def reference(torch, q, k, v, d_out, causal, left=None, factors=1.0):
    """Output and gradients in float64, bhsd, masks aligned to the last key; weights are multiplied by factors."""
    tensors = [x.detach().double().requires_grad_() for x in (q, k, v)]
    queries, keys = q.shape[2], k.shape[2]
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    hidden = (distance > 0) & causal | (distance < -(keys if left is None else left))
    scores = (tensors[0] @ tensors[1].transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(hidden.to(q.device), -torch.inf)
    out = torch.softmax(scores, -1) * factors @ tensors[2]
    out.backward(d_out.double())
    return out.detach(), *(x.grad for x in tensors)


def close(torch, found, wanted, tolerance):
    for got, want in zip(found, wanted):
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@cases(causal=[False, True], flipped=[False, True], dropout=[0.0, 0.3])
def test_operators_compute_and_differentiate(causal, flipped, dropout):
    torch, module = slot()
    torch.manual_seed(1)
    make = lambda tokens: torch.randn(2, tokens, 3, 16).transpose(1, 2) if flipped else torch.randn(2, 3, tokens, 16)
    q, k, v, d_out = make(20), make(30), make(30), make(20)
    operators = module.OPERATORS
    out, lse, _, _, most_q, most_k, *state = operators["_scaled_dot_product_flash_attention"](q, k, v, dropout, causal)
    assert out.stride() == q.stride() and lse.shape == (2, 3, 20) and (most_q, most_k) == (20, 30)
    grads = operators["_scaled_dot_product_flash_attention_backward"](
        d_out, q, k, v, out, lse, None, None, most_q, most_k, dropout, causal, *state[:2]
    )
    factors = kept(torch, dropout, state[0], 2, 3, 20, 30)
    close(torch, (out, *grads), reference(torch, q, k, v, d_out, causal, factors=factors), 1e-5)


def kept(torch, dropout, state, *extents):
    """What weights are multiplied by, given what forward said of random numbers."""
    return torch.tensor(flashcore.dropout_mask(dropout, state.view(torch.int64)[0], *extents)) / (1 - dropout)


@cases(dropout=[0.0, 0.3])
def test_packed_sequences_with_a_window(dropout):
    torch, module = slot()
    torch.manual_seed(2)
    q, k, v, d_out = (torch.randn(25, 2, 16) for _ in range(4))
    offsets = torch.tensor([0, 9, 25], dtype=torch.int32)
    packed = (offsets, offsets, 16, 16, dropout, True)
    out, lse, *state = module.OPERATORS["_flash_attention_forward"](q, k, v, *packed, False, window_size_left=4)
    grads = module.OPERATORS["_flash_attention_backward"](
        d_out, q, k, v, out, lse, *packed, *state[:2], window_size_left=4
    )
    factors = kept(torch, dropout, state[0], 2, 2, 16, 16)
    for n, (a, b) in enumerate(((0, 9), (9, 25))):
        part = lambda x: x[None, a:b].transpose(1, 2)
        wanted = reference(torch, *(part(x) for x in (q, k, v, d_out)), True, 4, factors[n, :, : b - a, : b - a])
        close(torch, [part(x) for x in (out, *grads)], wanted, 1e-5)


def torch_ring():
    """The flash operator, called as by the ring of `context_parallel`, by whose name torch's ring is found."""
    from importlib import import_module

    _, module = slot()
    for place in ("_context_parallel._attention", "_attention"):  # as versions of torch have it
        try:
            theirs = getattr(import_module(f"torch.distributed.tensor.experimental.{place}"), module.RING)
        except ModuleNotFoundError:
            continue
        calls = {"operator": module.OPERATORS["_scaled_dot_product_flash_attention"]}
        exec(f"def {theirs.__name__}(*arguments): return operator(*arguments)", calls)
        return calls[theirs.__name__]
    raise Skip("this torch has no ring")


def test_what_it_cannot_do_is_said():
    torch, module = slot()
    x = torch.randn(1, 2, 8, 16)
    with raises(NotImplementedError, "return_debug_mask=False"):
        module.OPERATORS["_scaled_dot_product_flash_attention"](x, x, x, 0.1, False, True)
    ring = torch_ring()
    with raises(NotImplementedError, "dropout in context_parallel"):
        ring(x, x, x, 0.1)
    with raises(NotImplementedError, "ALiBi"):
        y = x.transpose(1, 2)
        module.OPERATORS["_flash_attention_forward"](y, y, y, None, None, 8, 8, 0.0, False, False, alibi_slopes=x)


def test_it_is_activated_and_removed():
    torch, module = slot()
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        with raises(NotImplementedError, "activate"):
            module.register()
        return module.activate().remove()
    module.register()
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):  # torch 2.10, which keeps what it was given
        return module.activate().remove()
    torch.nn.attention.activate_flash_attention_impl(module.NAME)
    assert torch.nn.attention.current_flash_attention_impl() == module.NAME
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.nn.attention.current_flash_attention_impl() is None


@cases(dropout=[0.0, 0.3])
def test_scaled_dot_product_attention_runs_on_it(dropout):
    torch, module = slot()
    if not has_cuda("torch"):
        raise Skip("no GPU")
    torch.manual_seed(3)
    q, k, v, d_out = (torch.randn(2, 4, 100, 64, device="cuda", dtype=torch.float16) for _ in range(4))
    tensors = [x.clone().requires_grad_() for x in (q, k, v)]
    handle, calls = module.activate(), []
    try:
        attend = module._attend
        module._attend = lambda *arguments: calls.append(arguments[-1].seed) or attend(*arguments)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*tensors, dropout_p=dropout, is_causal=True)
        out.backward(d_out)
    finally:
        module._attend = attend
        handle.remove()
    assert calls, "another implementation computed"
    factors = kept(torch, dropout, calls[0], 2, 4, 100, 100).cuda() if dropout else 1.0
    close(torch, (out, *(x.grad for x in tensors)), reference(torch, q, k, v, d_out, True, factors=factors), 5e-3)
