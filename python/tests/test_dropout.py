"""Dropout beside an explicit reference with the mask that `flashcore.dropout_mask` gives: results, gradients, seeds."""

import warnings

import flashcore
import numpy as np
from harness import ALL, JAX, NUMPY, TORCH, Skip, band_mask, cases, check_close, check_lse, need_torch, normal, raises, reference

P, SEED = 0.3, 0x1234_5678_9ABC_DEF0
TOLERANCE = {"float32": 4e-5, "float16": 2e-2, "bfloat16": 1e-1}


def kept(*extents, seed=SEED, p=P):
    """What weights are multiplied by: sequences x heads x queries x keys."""
    return flashcore.dropout_mask(p, seed, *extents) / (1 - p)


def expected(q, k, v, factors, mask=True):
    """Attention with dropout in float64, batch x heads x sequence x dim."""
    q, k, v = (np.asarray(x, "float64") for x in (q, k, v))
    k, v = (x.repeat(q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = np.where(mask, q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) * factors @ v


def plain(torch, q, k, v, factors, mask=True, softcap=None, sinks=None, bias=None):
    """The same by operations that torch differentiates."""
    dtype, device = torch.float64, q.device
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + torch.as_tensor(bias, dtype=dtype, device=device)
    scores = scores.masked_fill(~torch.as_tensor(mask, device=device).expand(scores.shape), -torch.inf)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights * torch.as_tensor(factors, dtype=dtype, device=device)) @ v


def leaves(torch, *shapes, dtype="float32", device="cpu"):
    tensors = (torch.tensor(normal(*shape, seed=n)) for n, shape in enumerate(shapes))
    return [tensor.to(device, getattr(torch, dtype)).requires_grad_() for tensor in tensors]


def check_gradients(torch, ours, theirs, inputs, dtype="float32"):
    """Both have the same values, and the same gradients, given one at random."""
    given = torch.tensor(normal(*ours.shape, seed=9)).to(ours)
    got = (ours, *torch.autograd.grad(ours, inputs, given))
    wanted = (theirs, *torch.autograd.grad(theirs, inputs, given.double()))
    for got, wanted in zip(got, wanted):
        error = (got.double() - wanted.double()).abs().max().item()
        scale = max(1.0, wanted.abs().max().item())
        assert error <= TOLERANCE[dtype] * scale, f"off by {error:.2e}"


@cases(framework=ALL, causal=[False, True], layout=["bhsd", "bshd"])
def test_results_are_those_of_the_mask(framework, causal, layout):
    framework.need()
    dtype = framework.dtypes[-1]
    turn = framework.transpose if layout == "bshd" else (lambda x: x)
    q, k, v = (framework.make(normal(2, h, s, 16, seed=s + h), dtype) for h, s in ((4, 30), (2, 70), (2, 70)))
    exact = [framework.read(x) for x in (q, k, v)]
    out, lse = flashcore.attention(
        *map(turn, (q, k, v)), causal=causal, layout=layout, dropout=P, dropout_seed=SEED, return_lse=True
    )
    assert framework.is_mine(out)
    mask = band_mask(30, 70, right=0) if causal else True
    check_close(framework.read(turn(out)), expected(*exact, kept(2, 4, 30, 70), mask), dtype)
    check_lse(framework.read(lse), reference(*exact, mask=mask if causal else None)[1])


@cases(framework=ALL)
def test_packed_sequences_are_numbered(framework):
    framework.need()
    dtype = framework.dtypes[-1]
    q, k, v = (framework.make(normal(30, h, 16, seed=h), dtype) for h in (4, 2, 2))
    offsets = [0, 11, 30]
    out = flashcore.packed_attention(q, k, v, offsets, offsets, causal=True, dropout=P, dropout_seed=SEED)
    exact, factors = [framework.read(x) for x in (q, k, v)], kept(2, 4, 19, 19)
    for n, (start, end) in enumerate(zip(offsets, offsets[1:])):
        part, length = (x[None, start:end].swapaxes(1, 2) for x in exact), end - start
        wanted = expected(*part, factors[n, :, :length, :length], band_mask(length, length, right=0))
        check_close(framework.read(out)[start:end], wanted[0].swapaxes(0, 1), dtype)


SHAPES = ((2, 4, 24, 16), (2, 2, 40, 16), (2, 2, 40, 16))
HOW = dict(dropout=P, dropout_seed=SEED)
LEFT = np.arange(40) >= np.array([0, 11])[:, None]
HOLES = np.random.default_rng(0).random((2, 1, 24, 40)) < 0.7
CALLS = {
    "causal": (lambda q, k, v: flashcore.attention(q, k, v, causal=True, **HOW), dict(mask=band_mask(24, 40, right=0))),
    "window and cap": (
        lambda q, k, v: flashcore.attention(q, k, v, window=(9, 3), softcap=1.5, **HOW),
        dict(mask=band_mask(24, 40, 9, 3), softcap=1.5),
    ),
    "key lengths": (
        lambda q, k, v: flashcore.attention(q, k, v, key_lengths=[40, 7], **HOW),
        dict(mask=np.arange(40) < np.array([40, 7])[:, None, None, None]),
    ),
    "padding on the left": (
        lambda q, k, v: flashcore.attention(q, k, v, key_mask=LEFT, **HOW),
        dict(mask=LEFT[:, None, None]),
    ),
    "sdpa": (
        lambda q, k, v: flashcore.scaled_dot_product_attention(
            q, k, v, dropout_p=P, is_causal=True, enable_gqa=True, dropout_seed=SEED
        ),
        dict(mask=band_mask(24, 40, right=0, top_left=True)),
    ),
    "sdpa with a mask": (
        lambda q, k, v: flashcore.scaled_dot_product_attention(q, k, v, HOLES, P, enable_gqa=True, dropout_seed=SEED),
        dict(mask=HOLES),
    ),
    "flash_attn": (
        lambda q, k, v: flashcore.flash_attn_func(
            *(x.transpose(1, 2) for x in (q, k, v)), P, causal=True, dropout_seed=SEED
        ).transpose(1, 2),
        dict(mask=band_mask(24, 40, right=0)),
    ),
    "slopes": (
        lambda q, k, v: flashcore.flash_attn_func(
            *(x.transpose(1, 2) for x in (q, k, v)), P, alibi_slopes=np.full(4, 0.1, "float32"), dropout_seed=SEED
        ).transpose(1, 2),
        dict(bias=-0.1 * np.abs(np.arange(40) - np.arange(24)[:, None] - 16)),
    ),
}


@cases(name=list(CALLS), dtype=list(TOLERANCE), device=["cpu", "cuda"])
def test_gradients_are_those_of_the_mask(name, dtype, device):
    torch = need_torch(device)
    if device == "cuda" and dtype == "float32":
        raise Skip("gradients on a GPU are those of 16-bit tensors")
    inputs = leaves(torch, *SHAPES, dtype=dtype, device=device)
    ours, how = CALLS[name]
    check_gradients(torch, ours(*inputs), plain(torch, *inputs, kept(2, 4, 24, 40), **how), inputs, dtype)


@cases(device=["cpu", "cuda"], packed=["q, k, v", "kv", "qkv"])
def test_packed_sequences_have_gradients(device, packed):
    torch = need_torch(device)
    dtype = "float32" if device == "cpu" else "float16"
    heads = (4, 4, 4) if packed == "qkv" else (4, 2, 2)
    q, k, v = leaves(torch, *((30, n, 16) for n in heads), dtype=dtype, device=device)
    offsets, how = torch.tensor([0, 11, 30], dtype=torch.int32, device=device), dict(causal=True, dropout_seed=SEED)
    if packed == "qkv":
        ours = flashcore.flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), offsets, 19, P, **how)
    elif packed == "kv":
        ours = flashcore.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), offsets, offsets, 19, 19, P, **how)
    else:
        ours = flashcore.flash_attn_varlen_func(q, k, v, offsets, offsets, 19, 19, P, **how)
    pieces, factors = [], kept(2, 4, 19, 19)
    for n, (start, end) in enumerate(((0, 11), (11, 30))):
        part, length = (x[start:end].transpose(0, 1)[None] for x in (q, k, v)), end - start
        piece = plain(torch, *part, factors[n, :, :length, :length], band_mask(length, length, right=0))
        pieces.append(piece[0].transpose(0, 1))
    check_gradients(torch, ours, torch.cat(pieces), (q, k, v), dtype)


def test_sinks_count_among_all_weights():
    torch = need_torch()
    *inputs, sinks = leaves(torch, *SHAPES, (4,))
    ours = flashcore.attention(*inputs, sinks=sinks, **HOW)
    check_gradients(torch, ours, plain(torch, *inputs, kept(2, 4, 24, 40), sinks=sinks), (*inputs, sinks))


def test_gradcheck():
    """torch's own check by finite differences, the log-sum-exp and the sinks included."""
    torch = need_torch()
    inputs = leaves(torch, (1, 2, 5, 4), (1, 1, 6, 4), (1, 1, 6, 4), (2,))
    call = lambda q, k, v, sinks: flashcore.attention(q, k, v, causal=True, sinks=sinks, return_lse=True, **HOW)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # float32 needs steps and tolerances of its own
        assert torch.autograd.gradcheck(call, inputs, eps=1e-2, atol=2e-3, rtol=1e-2)


@cases(framework=[NUMPY, JAX, TORCH])
def test_seeds_of_every_form(framework):
    framework.need()
    q = framework.make(normal(1, 2, 20, 16), "float32")
    call = lambda seed, **how: framework.read(flashcore.attention(q, q, q, dropout=0.5, dropout_seed=seed, **how))
    wanted = call(7)
    for seed in (7, np.int64(7), np.array([7]), np.array(7), framework.numbers(7, "int32"), framework.numbers([7], "int32")):
        assert (call(seed) == wanted).all(), type(seed)
    assert (call(-1) == call(2**64 - 1)).all() and (call(framework.numbers([-1], "int32")) == call(-1)).all()
    assert (call(1 << 40) != wanted).any() and (call(8) != wanted).any()
    plain = framework.read(flashcore.attention(q, q, q))
    none = framework.read(flashcore.attention(q, q, q, dropout=0.0, dropout_seed=7))
    assert (none == plain).all() and (plain != wanted).any()


SEEDS = {
    "array": lambda jax, torch: np.array(7),
    "words": lambda jax, torch: np.array([7, 5], "uint32"),
    "of torch": lambda jax, torch: torch.tensor([7]),
    "of JAX": lambda jax, torch: jax.numpy.int32(7),
    "key": lambda jax, torch: jax.random.key(7),
    "old key": lambda jax, torch: jax.random.PRNGKey(7),
}


@cases(framework=[NUMPY, JAX, TORCH], form=list(SEEDS))
def test_the_mask_and_calls_take_seeds_of_any_framework(framework, form):
    JAX.need()
    import jax

    seed = SEEDS[form](jax, need_torch())
    exact = [normal(1, 2, 20, 16, seed=n) for n in range(3)]
    out = flashcore.attention(*(framework.make(x, "float32") for x in exact), dropout=P, dropout_seed=seed)
    assert framework.is_mine(out)
    check_close(framework.read(out), expected(*exact, kept(1, 2, 20, 20, seed=seed)), "float32")


@cases(several=["numbers", "floats", "keys"])
def test_the_mask_refuses_what_is_no_seed(several):
    JAX.need()
    import jax

    seed, kind, words = {
        "numbers": (np.arange(2), ValueError, r"^seed has the shape \(2,\); pass one integer"),
        "floats": (np.zeros(1), TypeError, "^seed is 0.0, which is not an int"),
        "keys": (jax.random.split(jax.random.key(1)), ValueError, r"^seed is an array of keys of shape \(2,\); pass one of them"),
    }[several]
    with raises(kind, words):
        flashcore.dropout_mask(P, seed, 1, 1, 4, 4)


def test_numbers_of_the_mask():
    mask = flashcore.dropout_mask(0.25, 3, 2, 3, 100, 100)
    assert mask.dtype == bool and abs(mask.mean() - 0.75) < 0.02
    assert (mask[:, :, :7, :9] == flashcore.dropout_mask(0.25, np.int64(3), 2, 3, 7, 9)).all()
    assert (mask[0] != mask[1]).any() and (mask[0, 0] != mask[0, 1]).any()
    assert flashcore.dropout_mask(0.0, 3, 1, 1, 4, 4).all() and flashcore.dropout_mask(0.5, 3, 0, 1, 4, 4).size == 0
    with raises(ValueError, "probability 1 must be at least 0 and below 1"):
        flashcore.dropout_mask(1.0, 3, 1, 1, 4, 4)
    with raises(MemoryError, ""):
        flashcore.dropout_mask(0.5, 3, *[2**32 - 1] * 4)


def test_the_result_stays_the_same_on_average():
    q, k, v = (normal(1, 2, 8, 16, seed=n) for n in range(3))
    mean = sum(flashcore.attention(q, k, v, dropout=P, dropout_seed=seed) for seed in range(2000)) / 2000
    assert np.abs(mean - flashcore.attention(q, k, v)).max() < 0.06


@cases(call=["attention", "packed", "sdpa", "flash", "module"], device=["cpu", "cuda"])
def test_torch_draws_the_seed(call, device):
    torch = need_torch(device)
    q = torch.randn(1, 20, 20, 32, device=device, dtype=torch.float16, requires_grad=True)
    offsets = torch.tensor([0, 20], device=device)
    functions = {
        "attention": lambda: flashcore.attention(q, q, q, dropout=P),
        "packed": lambda: flashcore.packed_attention(q[0], q[0], q[0], offsets, offsets, dropout=P),
        "sdpa": lambda: flashcore.scaled_dot_product_attention(q, q, q, dropout_p=P),
        "flash": lambda: flashcore.flash_attn_func(q, q, q, P),
        "module": lambda: flashcore.scaled_dot_product_attention(q[0], q[0], q[0], dropout_p=P),
    }
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        first, second = functions[call](), functions[call]()
        assert not torch.equal(first, second)
        runs.append((first, second, *torch.autograd.grad(first.sum() + second.sum(), q)))
    again = [torch.equal(a, b) for a, b in zip(*runs[:2])]
    assert all(again) and not any(torch.equal(a, b) for a, b in zip(runs[0], runs[2]))


@cases(reentrant=[False, True], device=["cpu", "cuda"])
def test_checkpoints_leave_out_the_same_weights(reentrant, device):
    torch = need_torch(device)
    from torch.utils.checkpoint import checkpoint

    inputs = leaves(torch, *SHAPES, dtype="float16", device=device)
    call = lambda q, k, v: flashcore.attention(q * 2, k, v, causal=True, dropout=P)
    grads = []
    for run in (call, lambda *tensors: checkpoint(call, *tensors, use_reentrant=reentrant)):
        torch.manual_seed(5)
        for tensor in inputs:
            tensor.grad = None
        run(*inputs).square().sum().backward()
        grads.append([tensor.grad for tensor in inputs])
    assert all(torch.equal(got, wanted) for got, wanted in zip(*grads))


@cases(seed=["drawn", "given"], device=["cpu", "cuda"])
def test_compiled_calls_leave_out_the_same_weights(seed, device):
    torch = need_torch(device)
    torch._dynamo.reset()
    given = None if seed == "drawn" else torch.tensor([SEED], device=device)
    call = lambda q, k, v, seed: flashcore.attention(q, k, v, causal=True, dropout=P, dropout_seed=seed) * 2
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    inputs = leaves(torch, *SHAPES, dtype="float16", device=device)
    runs = []
    for run in (call, compiled):
        torch.manual_seed(5)
        out = run(*inputs, given)
        runs.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    assert all(torch.equal(got, wanted) for got, wanted in zip(*runs))


def test_operators_are_sound():
    """The fake implementations agree with the real ones, and backward is registered as torch wants it."""
    torch = need_torch()
    from flashcore._torch_operator import operator

    q, k, v = leaves(torch, *SHAPES)
    options = (None, 0, False, None, None, "bhsd", P, False)
    torch.library.opcheck(operator, (q, k, v, *options, *(None,) * 6, torch.tensor([SEED]), None, True))


def test_vmap_calls_are_as_if_each_were_alone():
    torch = need_torch()
    x = torch.randn(3, 2, 20, 16)
    call = lambda x: flashcore.attention(x, x, x, dropout=P, dropout_seed=SEED)
    assert torch.equal(torch.func.vmap(call)(x), torch.stack([call(one) for one in x]))


def test_graphs_draw_again_in_every_replay():
    torch = need_torch("cuda")
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.float16)
    call = lambda: flashcore.attention(q, q, q, dropout=P)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)


def test_both_steps_of_flash_attention():
    torch = need_torch()
    from flashcore.flash_attn import flash_attn_interface as interface

    q, k, v = (x.detach() for x in leaves(torch, *((2, n, h, 16) for n, h in ((24, 4), (40, 2), (40, 2)))))
    dout = torch.tensor(normal(2, 24, 4, 16, seed=9))
    out, lse, _, state = interface._flash_attn_forward(q, k, v, P, 0.25, True)
    dq, dk, dv = map(torch.empty_like, (q, k, v))
    steps = (dout, q, k, v, out, lse, dq, dk, dv, P, 0.25, True)
    interface._flash_attn_backward(*steps, rng_state=state)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    whole = flashcore.flash_attn_func(*inputs, P, 0.25, True, dropout_seed=state[0])
    assert torch.equal(whole, out)
    for got, wanted in zip((dq, dk, dv), torch.autograd.grad(whole, inputs, dout)):
        assert torch.equal(got, wanted)
    for state, kind, words in (
        (None, ValueError, "pass the rng_state that forward returned"),
        (3, ValueError, "pass the rng_state that forward returned"),
        (state.float(), TypeError, "rng_state is float32; convert it to int64"),
        (state[:0], ValueError, "rng_state must be one 64-bit"),
    ):
        with raises(kind, words):
            interface._flash_attn_backward(*steps, rng_state=state)
    with raises(ValueError, "dropout_p 1.5 must be at least 0"):
        interface._flash_attn_forward(q, k, v, 1.5, 0.25, True)


def test_the_forward_step_returns_weights():
    """``return_softmax`` gives what the whole function gives with ``return_attn_probs``, and nothing without dropout."""
    torch = need_torch()
    from flashcore.flash_attn import flash_attn_interface as interface

    q, k, v = (torch.tensor(normal(12, h, 16, seed=h)) for h in (4, 2, 2))
    batch = q[None], k[None], v[None]
    packed = q, k, v, *(torch.tensor([0, 5, 12], dtype=torch.int32),) * 2, 7, 7
    for step, whole, tensors in (
        (interface._flash_attn_forward, flashcore.flash_attn_func, batch),
        (interface._flash_attn_varlen_forward, flashcore.flash_attn_varlen_func, packed),
    ):
        _, _, weights, state = step(*tensors, P, 0.25, True, return_softmax=True)
        wanted = whole(*tensors, P, 0.25, True, return_attn_probs=True, dropout_seed=state[0])
        assert torch.equal(weights, wanted[2]) and (weights < 0).any()
        assert step(*tensors, P, 0.25, True)[2].numel() == 0
        assert step(*tensors, 0.0, 0.25, True, return_softmax=True)[2].numel() == 0


JAX_SHAPES = ((2, 4, 24, 16), (2, 2, 40, 16), (2, 2, 40, 16))


@cases(seed=["number", "array", "key", "old key"])
def test_jax_compiles_and_differentiates(seed):
    JAX.need()
    import jax

    given = {"number": 7, "array": jax.numpy.int32(7), "key": jax.random.key(7), "old key": jax.random.PRNGKey(7)}[seed]
    words = np.asarray(jax.random.bits(given, (2,)) if seed == "key" else given)
    number = int(words.view("uint64")[0]) if words.dtype == "uint32" else int(words)
    factors = jax.numpy.asarray(kept(2, 4, 24, 40, seed=number), "float32")
    q, k, v = (JAX.make(normal(*shape, seed=n), "float32") for n, shape in enumerate(JAX_SHAPES))

    def ours(q, k, v, seed):
        return flashcore.attention(q, k, v, dropout=P, dropout_seed=seed)

    def theirs(q, k, v):
        k, v = (x.repeat(2, 1) for x in (k, v))
        return (jax.nn.softmax(q @ k.swapaxes(-1, -2) / 4) * factors) @ v

    loss = lambda *tensors: (ours(*tensors) ** 2).sum()
    wanted = jax.grad(lambda *tensors: (theirs(*tensors) ** 2).sum(), (0, 1, 2))(q, k, v)
    np.testing.assert_allclose(ours(q, k, v, given), theirs(q, k, v), atol=2e-5)
    for grad in (jax.grad(loss, (0, 1, 2)), jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3 if seed == "number" else ())):
        for got, one in zip(grad(q, k, v, given), wanted):
            np.testing.assert_allclose(got, one, atol=2e-4)


def test_jax_maps_calls_as_if_each_were_alone():
    JAX.need()
    import jax

    x = JAX.make(normal(3, 2, 2, 20, 16), "float32")
    call = lambda x, seed: flashcore.attention(x, x, x, dropout=P, dropout_seed=seed)
    keys = jax.random.split(jax.random.key(1), 3)
    shared = jax.vmap(call, (0, None))(x, 5)
    apart = jax.vmap(call)(x, keys)
    for n in range(3):
        np.testing.assert_array_equal(shared[n], call(x[n], 5))
        np.testing.assert_array_equal(apart[n], call(x[n], keys[n]))


X = normal(1, 2, 8, 16)
attention = flashcore.attention
MISTAKES = {
    "no seed": (lambda: attention(X, X, X, dropout=P), ValueError, "pass dropout_seed"),
    "no seed for flash": (lambda: flashcore.flash_attn_func(X, X, X, P), ValueError, "pass dropout_seed"),
    "no seed for sdpa": (lambda: flashcore.scaled_dot_product_attention(X, X, X, None, P), ValueError, "pass dropout_seed"),
    "always": (lambda: attention(X, X, X, dropout=1.0, dropout_seed=1), ValueError, "dropout 1 must be"),
    "never": (lambda: attention(X, X, X, dropout=-0.1, dropout_seed=1), ValueError, "dropout -0.1 must be"),
    "always, flash": (lambda: flashcore.flash_attn_func(X, X, X, 1, dropout_seed=1), ValueError, "dropout_p 1 must be"),
    "no number": (lambda: attention(X, X, X, dropout="x"), TypeError, "dropout is 'x', which is not a number"),
    "fraction": (lambda: attention(X, X, X, dropout=P, dropout_seed=0.5), TypeError, "dropout_seed is 0.5, which is not an int"),
    "too large": (lambda: attention(X, X, X, dropout=P, dropout_seed=2**64), ValueError, "dropout_seed is .* 64 bits"),
    "floats": (
        lambda: attention(X, X, X, dropout=P, dropout_seed=X[0, 0, 0, :1]),
        TypeError,
        "dropout_seed is .*, which is not an int",
    ),
    "several": (
        lambda: attention(X, X, X, dropout=P, dropout_seed=np.arange(2)),
        ValueError,
        r"dropout_seed has the shape \(2,\); pass one integer",
    ),
    "pages": (
        lambda: attention(X, X, X, dropout=P, dropout_seed=1, page_table=[[0]], key_lengths=[8]),
        ValueError,
        "dropout cannot be combined with keys in pages",
    ),
    "quantise": (
        lambda: attention(X, X, X, dropout=P, dropout_seed=1, quantise="e4m3"),
        ValueError,
        "dropout cannot be combined with quantise",
    ),
}


@cases(name=list(MISTAKES))
def test_mistakes_say_what_to_do(name):
    call, kind, words = MISTAKES[name]
    with raises(kind, words):
        call()


def test_mistakes_of_torch_say_what_to_do():
    torch = need_torch()
    x = torch.randn(1, 2, 8, 16)
    for seed, kind, words in (
        (torch.zeros(2, dtype=torch.int64), ValueError, r"dropout_seed has the shape \(2,\)"),
        (torch.zeros(1), TypeError, "dropout_seed is float32; convert it to int64"),
        ("x", TypeError, "dropout_seed is 'x'"),
    ):
        with raises(kind, words):
            flashcore.attention(x, x, x, dropout=P, dropout_seed=seed)


@cases(packed=[False, True], slopes=[None, "heads", "sequences"])
def test_weights_of_flash_attention(packed, slopes):
    """What `return_attn_probs` returns, normalised as FlashAttention's tests do it, is what the result is made of."""
    torch = need_torch()
    lengths, heads = ([(70, 130), (33, 90)] if packed else [(70, 130)] * 2), 4
    q, k, v = (torch.tensor(normal(2, rows, h, 64, seed=rows + h)) for rows, h in ((70, heads), (130, 2), (130, 1)))
    v = v.expand(2, 130, 2, 64)
    alibi = {None: None, "heads": torch.rand(heads), "sequences": torch.rand(2, heads)}[slopes]
    how = dict(dropout_p=P, window_size=(60, 3), softcap=9.0, alibi_slopes=alibi, return_attn_probs=True)
    if packed:
        flat = [torch.cat([x[n, : of[side]] for n, of in enumerate(lengths)]) for x, side in ((q, 0), (k, 1), (v, 1))]
        offsets = [torch.tensor([0, *np.cumsum([of[side] for of in lengths])], dtype=torch.int32) for side in (0, 1)]
        out, _, weights = flashcore.flash_attn_varlen_func(*flat, *offsets, 70, 130, **how)
        out = out.split([of[0] for of in lengths])
    else:
        out, _, weights = flashcore.flash_attn_func(q, k, v, **how)
    assert weights.shape == (2, heads, 70, 130)
    for n, (queries, keys) in enumerate(lengths):
        own, at = weights[n, :, :queries, :keys], torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
        scores = torch.einsum("thd,shd->hts", q[n, :queries], k[n, :keys].repeat_interleave(2, 1)) / 8
        scores = 9 * torch.tanh(scores / 9)
        if alibi is not None:
            scores = scores - alibi.expand(2, heads)[n, :, None, None] * at.abs()
        scores = scores.masked_fill((at < -60) | (at > 3), -torch.inf)
        # Each block of 64 keys was measured from the largest score in it and behind it.
        met = [scores[..., start:].amax(-1, keepdim=True).expand(-1, -1, 64) for start in range(0, keys, 64)]
        factors = (torch.cat(met, -1)[..., :keys] - scores.logsumexp(-1, keepdim=True)).exp().nan_to_num()
        torch.testing.assert_close((own * factors).abs(), scores.softmax(-1), atol=1e-5, rtol=1e-3)
        kept = (own * factors).clamp(min=0) / (1 - P)
        result = torch.einsum("hts,shd->thd", kept, v[n, :keys].repeat_interleave(2, 1))
        torch.testing.assert_close(out[n], result, atol=1e-4, rtol=1e-3)
