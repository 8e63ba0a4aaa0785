"""Gradients: torch's autograd, compile and checkpointing, JAX's grad, a small model that learns."""

import importlib.util
import warnings

import flashcore
import numpy as np
from harness import JAX, Skip, band_mask, cases, need_torch, normal, raises
from test_torch import llama, words

TOLERANCE = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 6e-2}


def leaves(torch, *shapes, dtype="float32", device="cpu"):
    tensors = (torch.tensor(normal(*shape, seed=n)) for n, shape in enumerate(shapes))
    return [tensor.to(device, getattr(torch, dtype)).requires_grad_() for tensor in tensors]


def plain(torch, q, k, v, mask=None, softcap=None, sinks=None):
    """Attention in float64, by operations that torch differentiates; rows that see nothing are zeros."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.ones_like(scores, dtype=torch.bool) if mask is None else torch.as_tensor(mask, device=q.device).expand(scores.shape)
    scores = scores.masked_fill(~seen, -1e30)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1).masked_fill(~seen, 0.0) @ v


def check(torch, ours, theirs, inputs, dtype="float32"):
    """Both outputs have the same gradients, given one at random."""
    given = torch.tensor(normal(*ours.shape, seed=9)).to(ours)
    got = torch.autograd.grad(ours, inputs, given)
    expected = torch.autograd.grad(theirs, inputs, given.double())
    for tensor, got, expected in zip(inputs, got, expected):
        assert got.shape == tensor.shape and got.dtype == tensor.dtype
        error = (got.double() - expected.double()).abs().max().item()
        scale = max(1.0, expected.abs().max().item())
        assert error <= TOLERANCE[dtype] * scale, f"off by {error:.2e}"


CALLS = {
    "causal": (
        lambda q, k, v: flashcore.attention(q, k, v, causal=True),
        lambda torch, q, k, v: plain(torch, q, k, v, band_mask(24, 40, right=0)),
    ),
    "window and cap": (
        lambda q, k, v: flashcore.attention(q, k, v, window=(9, 3), softcap=1.5),
        lambda torch, q, k, v: plain(torch, q, k, v, band_mask(24, 40, 9, 3), softcap=1.5),
    ),
    "key lengths": (
        lambda q, k, v: flashcore.attention(q, k, v, key_lengths=[40, 7]),
        lambda torch, q, k, v: plain(torch, q, k, v, np.arange(40) < np.array([40, 7])[:, None, None, None]),
    ),
    "padding on the left": (
        lambda q, k, v: flashcore.attention(q, k, v, key_mask=np.arange(40) >= np.array([0, 11])[:, None]),
        lambda torch, q, k, v: plain(torch, q, k, v, np.arange(40) >= np.array([0, 11])[:, None, None, None]),
    ),
    "sdpa": (
        lambda q, k, v: flashcore.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        lambda torch, q, k, v: plain(torch, q, k, v, band_mask(24, 40, right=0, top_left=True)),
    ),
    "flash_attn": (
        lambda q, k, v: flashcore.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2),
        lambda torch, q, k, v: plain(torch, q, k, v, band_mask(24, 40, right=0)),
    ),
}


@cases(name=list(CALLS), dtype=list(TOLERANCE), device=["cpu", "cuda"])
def test_gradients_are_those_of_the_definition(name, dtype, device):
    torch = need_torch(device)
    q, k, v = leaves(torch, (2, 4, 24, 16), (2, 2, 40, 16), (2, 2, 40, 16), dtype=dtype, device=device)
    ours, theirs = CALLS[name]
    check(torch, ours(q, k, v), theirs(torch, q, k, v), (q, k, v), dtype)


@cases(dimensions=[2, 3], layout=["bhsd", "bshd"])
def test_one_entry_and_one_head_have_gradients(dimensions, layout):
    """Without a batch, or without batch and heads; the log-sum-exp and sinks included."""
    torch = need_torch()
    shape, heads = ((24, 16), 1) if dimensions == 2 else ((4, 24, 16), 4)
    if dimensions == 3 and layout == "bshd":
        shape = (24, 4, 16)
    *inputs, sinks = leaves(torch, shape, shape, shape, (heads,))
    whole = [x[None, None] if dimensions == 2 else x[None] for x in inputs]
    got, expected = (
        flashcore.attention(*tensors, causal=True, layout=order, sinks=sinks, return_lse=True)
        for tensors, order in ((inputs, layout), (whole, "bhsd" if dimensions == 2 else layout))
    )
    got, expected = (
        torch.autograd.grad(out.square().sum() + lse.sin().sum(), (*inputs, sinks)) for out, lse in (got, expected)
    )
    for got, expected in zip(got, expected):
        torch.testing.assert_close(got, expected)


def test_packed_sequences_have_gradients():
    torch = need_torch()
    q, k, v = leaves(torch, (30, 4, 16), (30, 2, 16), (30, 2, 16))
    offsets = [0, 11, 30]
    ours = flashcore.flash_attn_varlen_func(q, k, v, offsets, offsets, 19, 19, causal=True)
    pieces = []
    for start, end in zip(offsets, offsets[1:]):
        part = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        pieces.append(plain(torch, *part, band_mask(end - start, end - start, right=0))[0].transpose(0, 1))
    check(torch, ours, torch.cat(pieces), (q, k, v))


def test_sinks_have_gradients():
    torch = need_torch()
    q, k, v, sinks = leaves(torch, (2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16), (4,))
    ours = flashcore.attention(q, k, v, causal=True, sinks=sinks)
    theirs = plain(torch, q, k, v, band_mask(24, 24, right=0), sinks=sinks)
    check(torch, ours, theirs, (q, k, v, sinks))
    alone = flashcore.attention(*(x.detach() for x in (q, k, v)), sinks=sinks)
    assert alone.requires_grad


def test_gradcheck():
    """torch's own check by finite differences, the log-sum-exp and the sinks included."""
    torch = need_torch()
    inputs = leaves(torch, (1, 2, 5, 4), (1, 1, 6, 4), (1, 1, 6, 4), (2,))
    call = lambda q, k, v, sinks: flashcore.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # float32 needs steps and tolerances of its own
        assert torch.autograd.gradcheck(call, inputs, eps=1e-2, atol=2e-3, rtol=1e-2)


def test_gradients_of_a_sum_and_of_views():
    """The gradient of a sum repeats one number; inputs may be parts of one tensor."""
    torch = need_torch()
    (qkv,) = leaves(torch, (2, 16, 3, 4, 8))
    out = flashcore.flash_attn_qkvpacked_func(qkv, causal=True)
    (got,) = torch.autograd.grad(out.sum(), qkv)
    three = [part.transpose(1, 2) for part in qkv.unbind(2)]
    (expected,) = torch.autograd.grad(plain(torch, *three, band_mask(16, 16, right=0)).sum(), qkv)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_compiled_calls_have_gradients():
    torch = need_torch()
    torch._dynamo.reset()
    call = lambda q, k, v: flashcore.attention(q, k, v, causal=True) * 2
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    inputs = leaves(torch, (2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16))
    given = torch.tensor(normal(2, 4, 24, 16, seed=9))
    got, expected = (torch.autograd.grad(f(*inputs), inputs, given) for f in (compiled, call))
    for got, expected in zip(got, expected):
        assert torch.equal(got, expected)


def test_checkpointing_computes_again():
    torch = need_torch()
    from torch.utils.checkpoint import checkpoint

    inputs = leaves(torch, (2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16))
    call = lambda q, k, v: flashcore.attention(q * 2, k, v, causal=True)
    plain_grads = torch.autograd.grad(call(*inputs).square().sum(), inputs)
    again = torch.autograd.grad(checkpoint(call, *inputs, use_reentrant=False).square().sum(), inputs)
    for got, expected in zip(again, plain_grads):
        assert torch.equal(got, expected)


def test_backward_operator_is_sound():
    """The fake implementation agrees with the real one in shapes, strides and types."""
    torch = need_torch()
    from flashcore._torch_operator import backward_operator

    q = torch.randn(2, 16, 4, 8).transpose(1, 2)
    out, lse = flashcore.attention(q, q, q, return_lse=True)
    arguments = (q, out, None, lse, q, q, q, None, 0, False, None, None, "bhsd", None, None, None, torch.zeros(4), None, None, None, None)
    torch.library.opcheck(backward_operator, arguments)


def test_what_has_no_gradients_says_so():
    torch = need_torch()
    q, lse = torch.randn(1, 2, 8, 16, requires_grad=True), torch.zeros(1, 2, 8)
    with raises(NotImplementedError, "accumulate has no backward pass"):
        flashcore.accumulate(q, q, q, torch.zeros(1, 2, 8, 16), lse)
    with torch.no_grad():
        assert not flashcore.attention(q, q, q).requires_grad
    (first,) = torch.autograd.grad(flashcore.attention(q, q, q).sum(), q, create_graph=True)
    with raises(NotImplementedError, "no second-order gradients"):
        first.sum().backward()


@cases(dtype=list(TOLERANCE), lse=[False, True])
def test_jax_differentiates(dtype, lse):
    JAX.need()
    import jax
    from jax import numpy as jnp

    q, k, v = (JAX.make(normal(*s, seed=n), dtype) for n, s in enumerate([(2, 4, 24, 16), *[(2, 2, 24, 16)] * 2]))
    given, given_lse = jnp.asarray(normal(2, 4, 24, 16, seed=9)), jnp.asarray(normal(2, 4, 24, seed=8))

    def loss(results):
        out, of_rows = results if lse else (results, 0.0)
        return (out.astype("float32") * given).sum() + (jnp.asarray(of_rows) * given_lse).sum()

    def definition(q, k, v):
        q, k, v = q.astype("float32"), *(jnp.repeat(x.astype("float32"), 2, 1) for x in (k, v))
        scores = jnp.where(band_mask(24, 24, right=0), q @ k.swapaxes(-1, -2) / 4, -jnp.inf)
        out = jax.nn.softmax(scores) @ v
        return (out, jax.nn.logsumexp(scores, -1)) if lse else out

    ours = lambda *x: loss(flashcore.attention(*x, causal=True, return_lse=lse))
    got = jax.grad(ours, (0, 1, 2))(q, k, v)
    expected = jax.grad(lambda *x: loss(definition(*x)), (0, 1, 2))(q, k, v)
    for got, expected in zip(got, expected):
        assert got.dtype == q.dtype
        got, expected = JAX.read(got), JAX.read(expected)
        assert np.abs(got - expected).max() <= TOLERANCE[dtype] * max(1.0, np.abs(expected).max())


@cases(how=["plain", "lengths", "mask", "log-sum-exp"])
def test_jax_compiles_and_differentiates(how):
    JAX.need()
    import jax

    dtype = "bfloat16" if how == "plain" else "float32"
    q, k, v = (JAX.make(normal(2, heads, 12, 16, seed=n), dtype) for n, heads in enumerate((4, 2, 2)))
    options = {"lengths": dict(key_lengths=[12, 7]), "mask": dict(key_mask=np.arange(24).reshape(2, 12) % 3 > 0)}.get(how, {})

    def loss(q, k, v):
        out = flashcore.attention(q, k, v, causal=True, return_lse=how == "log-sum-exp", **options)
        out, lse = out if how == "log-sum-exp" else (out, 0 * out)
        return (out.astype("float32") ** 2).sum() + lse.astype("float32").sum()

    for change in (lambda f: f, lambda f: jax.grad(f, (0, 1, 2))):
        eager, compiled = (jax.tree.leaves(f(q, k, v)) for f in (change(loss), jax.jit(change(loss))))
        for got, expected in zip(compiled, eager):
            assert np.allclose(JAX.read(got), JAX.read(expected), rtol=1e-5, atol=1e-6)
    one = jax.vmap(lambda q, k, v: flashcore.attention(q, k, v))(q, k, v)
    assert np.array_equal(JAX.read(one), JAX.read(flashcore.attention(q, k, v)))


def block(torch, attend):
    """One causal layer of a model that predicts the next of 32 symbols."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.symbols, self.places = torch.nn.Embedding(32, 64), torch.nn.Embedding(48, 64)
            self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 32)

        def forward(self, ids):
            x = self.symbols(ids) + self.places.weight[: ids.shape[1]]
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).unbind(2)
            return self.out(x + attend(*(y.transpose(1, 2) for y in (q, k, v))).transpose(1, 2).flatten(2))

    torch.manual_seed(5)
    return Block()


def losses(torch, model, ids, steps, rate=1e-2):
    """Losses of training on the next symbol of the same text."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    found = []
    for _ in range(steps):
        logits = model(ids[:, :-1])
        logits = getattr(logits, "logits", logits)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_small_model_learns_as_with_sdpa():
    torch = need_torch()
    ids = torch.randint(0, 32, (8, 40), generator=torch.Generator().manual_seed(1))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    ours, theirs = (
        losses(torch, block(torch, attend), ids, 60)
        for attend in (lambda *x: flashcore.attention(*x, causal=True), lambda *x: sdpa(*x, is_causal=True))
    )
    assert ours[-1] < 0.5 * ours[0], "the model did not learn"
    assert np.allclose(ours, theirs, rtol=2e-2), "losses differ"


def test_llama_trains():
    torch = need_torch()
    if importlib.util.find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    from flashcore.integrations import transformers

    transformers.register()
    ids, _ = words(torch, "cpu", "none", (24,) * 4)
    ours, theirs = (
        losses(torch, llama(torch, "cpu", name).train(), ids, 120, rate=1e-3) for name in ("flashcore", "sdpa")
    )
    assert ours[-1] < 0.01 * ours[0] and np.allclose(ours, theirs, rtol=1e-3)


def test_what_has_no_gradient_is_refused():
    torch = need_torch()
    q, leaf = torch.zeros(1, 2, 6, 8), torch.zeros(1, 2, 6, 8, requires_grad=True)
    with raises(TypeError, "key_mask is torch.float32; pass bool"):
        flashcore.attention(leaf, q, q, key_mask=torch.zeros(1, 6, requires_grad=True))
    for inputs, out in (((leaf, q, q), torch.empty_like(q)), ((q, q, q), leaf)):
        with raises(RuntimeError, "out= cannot be combined with gradients"):
            flashcore.attention(*inputs, out=out)
    with torch.no_grad():
        assert flashcore.attention(leaf, q, q, out=torch.empty_like(q)).shape == q.shape


def test_outputs_that_autograd_kept_are_known_to_have_changed():
    torch = need_torch()
    q, out, leaf = torch.ones(1, 2, 6, 8), torch.ones(1, 2, 6, 8), torch.ones(1, 2, 6, 8, requires_grad=True)
    for options in ({}, {"return_lse": True}):
        product = (leaf * out).sum()
        flashcore.attention(q, q, q, out=out, **options)
        with raises(RuntimeError, "modified by an inplace operation"):
            product.backward()
    with torch.inference_mode():
        inferred = torch.empty_like(q)
        assert flashcore.attention(q, q, q, out=inferred) is inferred
