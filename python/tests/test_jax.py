"""JAX's transformations: jit, grad, vmap, shard_map, scan and checkpoint, by XLA's foreign function interface."""

import flashcore
import numpy as np
from harness import JAX, Skip, band_mask, cases, need_torch, normal, raises, reference

TOLERANCE = {"float32": 3e-5, "float16": 1e-2, "bfloat16": 6e-2}
SHAPES = {"bhsd": (2, 4, 24, 16), "bshd": (2, 24, 4, 16)}
CALLS = {
    "causal": dict(causal=True),
    "window and cap": dict(window=(9, 3), softcap=1.5),
    "lengths": dict(key_lengths=[24, 7], query_lengths=[20, 24]),
    "padding on the left": dict(key_mask=np.arange(24) >= np.array([0, 11])[:, None]),
    "gaps": dict(key_mask=np.arange(48).reshape(2, 24) % 3 > 0),
}


def need():
    JAX.need()
    import jax

    return jax


def three(layout="bhsd", dtype="float32"):
    """q, k and v, two heads of q for one of k."""
    batch, *shape = SHAPES[layout]
    heads = shape.index(4)
    shapes = [(batch, *shape), *[(batch, *shape[:heads], 2, *shape[heads + 1 :])] * 2]
    return [JAX.make(normal(*shape, seed=n), dtype) for n, shape in enumerate(shapes)]


def definition(jax, q, k, v, mask=None, sinks=None):
    """Attention over batch x heads x sequence x dim in float32, by operations of JAX's."""
    space, group = jax.numpy, q.shape[1] // k.shape[1]
    q, k, v = q.astype("float32"), *(space.repeat(x.astype("float32"), group, 1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    scores = scores if mask is None else space.where(mask, scores, -space.inf)
    if sinks is not None:
        scores = space.concatenate([scores, space.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))], -1)
    weights = jax.nn.softmax(scores)
    return (weights if sinks is None else weights[..., :-1]) @ v


def same(got, expected, tolerance=1e-6):
    import jax

    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    assert len(got) == len(expected)
    for one, other in zip(got, expected):
        assert one.shape == other.shape and one.dtype == other.dtype
        one, other = (np.nan_to_num(JAX.read(x), neginf=-1e3) for x in (one, other))
        off = np.abs(one - other).max(initial=0.0)
        assert off <= tolerance * max(1.0, np.abs(other).max(initial=0.0)), f"off by {off:.1e}"


@cases(name=list(CALLS), dtype=list(TOLERANCE), layout=list(SHAPES))
def test_compiled_calls_are_eager_ones(name, dtype, layout):
    """Forward by `jit` gives the bits of a plain call, gradients those of a plain `grad`; the log-sum-exp included."""
    jax = need()
    tensors = three(layout, dtype)
    call = lambda *x: flashcore.attention(*x, layout=layout, return_lse=True, **CALLS[name])
    same(jax.jit(call)(*tensors), call(*tensors), 0)
    loss = lambda *x: (call(*x)[0].astype("float32") ** 2).sum()
    plain = jax.grad(loss, (0, 1, 2))(*tensors)
    same(jax.jit(jax.grad(loss, (0, 1, 2)))(*tensors), plain, 1e-6)


@cases(dtype=list(TOLERANCE))
def test_gradients_are_those_of_the_definition(dtype):
    jax = need()
    (q, k, v), sinks = three(dtype=dtype), JAX.make(normal(4, seed=5), "float32")
    mask = band_mask(24, 24, right=0)
    ours = lambda *x: (flashcore.attention(*x[:3], causal=True, sinks=x[3]).astype("float32") ** 2).sum()
    theirs = lambda *x: (definition(jax, *x[:3], mask, x[3]) ** 2).sum()
    got, expected = (jax.jit(jax.grad(f, (0, 1, 2, 3)))(q, k, v, sinks) for f in (ours, theirs))
    same(got, expected, TOLERANCE[dtype])


@cases(axes=[(0, 0, 0), (0, None, None), (None, 0, 0), (1, 1, 1)], dimensions=[2, 3, 4])
def test_mapped_calls(axes, dimensions):
    """`vmap` over one, two and three dimensions; over all tensors or over some; forward and backward."""
    jax = need()
    shape = {2: (24, 16), 3: (4, 24, 16), 4: (2, 4, 24, 16)}[dimensions]

    def make(axis, seed):
        one = JAX.make(normal(3, *shape, seed=seed) if axis is not None else normal(*shape, seed=seed), "float32")
        return one if not axis else one.swapaxes(0, axis)

    tensors = [make(axis, seed) for seed, axis in enumerate(axes)]
    call = lambda q, k, v: flashcore.attention(q, k, v, causal=True)
    each = [call(*(x if axis is None else x.take(n, axis) for x, axis in zip(tensors, axes))) for n in range(3)]
    expected = jax.numpy.stack(each)
    same(jax.vmap(call, axes)(*tensors), expected, 0)
    loss = lambda q, k, v: (call(q, k, v) ** 2).sum()
    got = jax.jit(jax.grad(lambda *x: jax.vmap(loss, axes)(*x).sum(), (0, 1, 2)))(*tensors)
    one = jax.grad(lambda *x: sum(loss(*(y if a is None else y.take(n, a) for y, a in zip(x, axes))) for n in range(3)), (0, 1, 2))
    same(got, one(*tensors), 1e-5)


def test_values_are_mapped_too():
    """Lengths go into the batch; sinks that are mapped are those of calls of their own; gradients of each example."""
    jax = need()
    q, k, v = three()
    lengths, sinks = JAX.make(np.array([24, 7]), "int32"), JAX.make(normal(2, 4), "float32")
    one = lambda q, k, v, n, s: flashcore.attention(q, k, v, key_lengths=n[None], sinks=s)
    got = jax.vmap(one)(q, k, v, lengths, sinks)
    expected = [flashcore.attention(q[n], k[n], v[n], key_lengths=[int(lengths[n])], sinks=sinks[n]) for n in range(2)]
    same(got, jax.numpy.stack(expected), 0)
    loss = lambda s, q, k, v: (flashcore.attention(q, k, v, sinks=s) ** 2).sum()
    each = jax.vmap(jax.grad(loss), (None, 0, 0, 0))(sinks[0], q, k, v)
    same(each, jax.numpy.stack([jax.grad(loss)(sinks[0], q[n], k[n], v[n]) for n in range(2)]), 1e-5)
    twice = jax.vmap(jax.vmap(lambda q, k, v: flashcore.attention(q, k, v)))(*(x[None] for x in (q, k, v)))
    same(twice[0], flashcore.attention(q, k, v), 0)


def test_lengths_masks_and_tables_may_be_traced():
    jax = need()
    (q, k, v), lengths = three(), JAX.make(np.array([24, 7]), "int32")
    expected = flashcore.attention(q, k, v, key_lengths=[24, 7])
    same(jax.jit(lambda n: flashcore.attention(q, k, v, key_lengths=n))(lengths), expected, 0)
    mask = JAX.make(np.arange(24) < np.array([24, 7])[:, None], "bool")
    same(jax.jit(lambda m: flashcore.attention(q, k, v, key_mask=m))(mask), expected, 1e-6)
    packed = JAX.make(normal(30, 4, 16), "float32")
    offsets = JAX.make(np.array([0, 11, 30]), "int32")
    call = lambda x, n: flashcore.packed_attention(x, x, x, n, n, longest_query=19, longest_key=19, causal=True)
    same(jax.jit(call)(packed, offsets), call(packed, offsets), 0)
    loss = lambda x, n: (call(x, n) ** 2).sum()
    same(jax.jit(jax.grad(loss))(packed, offsets), jax.grad(loss)(packed, offsets), 1e-6)
    pages, table = JAX.make(normal(6, 2, 8, 16), "float32"), JAX.make(np.array([[5, 0, 2], [4, 1, 3]]), "int32")
    call = lambda t, n: flashcore.attention(q, pages, pages, page_table=t, key_lengths=n)
    same(jax.jit(call)(table, lengths), call(table, lengths), 0)


def test_other_transformations():
    """`scan` over layers, `checkpoint`, arrays of NumPy's among JAX's."""
    jax = need()
    q, k, v = three()
    layer = jax.checkpoint(lambda x, _: (x + flashcore.attention(x, k, v, causal=True), None))
    through = lambda x: (jax.lax.scan(layer, x, None, length=3)[0] ** 2).sum()

    def plain(x):
        for _ in range(3):
            x = x + definition(jax, x, k, v, band_mask(24, 24, right=0))
        return (x**2).sum()

    same(jax.jit(jax.grad(through))(q), jax.grad(plain)(q), 1e-4)
    keys, queries = np.asarray(k), np.asarray(q)
    same(jax.grad(lambda x: flashcore.attention(x, keys, keys).sum())(q), jax.grad(lambda x: flashcore.attention(x, k, k).sum())(q), 0)
    same(jax.jit(lambda x: flashcore.attention(queries, x, x))(k), flashcore.attention(q, k, k), 0)


def test_gradients_through_scan_are_exact():
    """They have the bits of a plain loop, and are near float64 although layers multiply what each rounds."""
    jax, torch = need(), need_torch()
    x, causal = normal(2, 4, 10, 16), torch.ones(10, 10, dtype=torch.bool).tril()
    layer = lambda x: flashcore.attention(x, x, x, causal=True) * 0.9 + x
    of_scan = lambda x: (jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=4)[0] ** 2).sum()
    of_loop = lambda x: (layer(layer(layer(layer(x)))) ** 2).sum()
    got, plain = (jax.jit(jax.grad(f))(JAX.make(x, "float32")) for f in (of_scan, of_loop))
    same(got, plain, 1e-6)
    exact = torch.tensor(x.astype("float32")).double().requires_grad_()
    y = exact
    for _ in range(4):
        weights = (y @ y.mT / 4).masked_fill(~causal, float("-inf")).softmax(-1)
        y = weights @ y * 0.9 + y
    y.square().sum().backward()
    wanted = exact.grad.numpy()
    assert np.abs(JAX.read(got) - wanted).max() <= 1e-4 * np.abs(wanted).max()


def test_what_has_no_gradients_says_so():
    """Forward mode and second-order gradients: errors of JAX's."""
    jax = need()
    q = three()[0]
    call = lambda x: flashcore.attention(x, x, x, causal=True)
    with raises(TypeError, "forward-mode.*custom_vjp"):
        jax.jvp(call, (q,), (q,))
    if hasattr(jax, "ffi"):
        with raises(ValueError, "FFI call.*cannot be differentiated"):
            jax.grad(lambda x: jax.grad(lambda x: call(x).sum())(x).sum())(q)


def test_lengths_out_of_range_are_told_when_the_program_runs():
    jax = need()
    q, k, v = three()
    compiled = jax.jit(lambda n: flashcore.attention(q, k, v, key_lengths=n))
    with raises(jax.errors.JaxRuntimeError, "uses 99 rows of k, which has 24"):
        jax.block_until_ready(compiled(JAX.make(np.array([24, 99]), "int32")))


def test_shard_map():
    """Heads over a mesh, with sinks that all devices share."""
    jax = need()
    if not hasattr(jax, "shard_map"):
        return
    (q, k, v), sinks = three(), JAX.make(normal(4), "float32")
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("heads",)), jax.P(None, "heads")
    call = jax.shard_map(
        lambda q, k, v, s: flashcore.attention(q, k, v, sinks=s), mesh=mesh, in_specs=(spec, spec, spec, jax.P()), out_specs=spec
    )
    ours, theirs = (lambda *x, f=f: (f(*x) ** 2).sum() for f in (call, lambda q, k, v, s: flashcore.attention(q, k, v, sinks=s)))
    for run in (call, jax.jit(call)):
        same(run(q, k, v, sinks), flashcore.attention(q, k, v, sinks=sinks), 0)
    got, expected = (jax.jit(jax.grad(f, (0, 3)))(q, k, v, sinks) for f in (ours, theirs))
    same(got, expected, 1e-6)


def test_a_call_for_a_gpu_is_one_of_the_interface():
    """What would run on a GPU is lowered here: a typed call, and no call back to the host."""
    jax = need()
    q, k, v = three(dtype="bfloat16")
    step = jax.jit(jax.grad(lambda q: flashcore.attention(q, k, v, causal=True).astype("float32").sum()))
    checks = [jax.export.DisabledSafetyCheck.custom_call(f"flashcore_attention{end}") for end in ("", "_backward")]
    text = jax.export.export(step, platforms=["cuda"], disabled_checks=checks)(q).mlir_module()
    for target in ("@flashcore_attention(", "@flashcore_attention_backward("):
        assert target in text, text
    assert "callback" not in text


def test_without_the_interface_the_host_is_called_back():
    jax = need()
    if jax.default_backend() != "cpu":
        raise Skip("programs for a GPU do not call back to the host")
    from flashcore import _jit

    registered, _jit.registered = _jit.registered, lambda framework: False
    try:
        for dtype in TOLERANCE:
            (q, k, v), sinks = three(dtype=dtype), JAX.make(normal(4), dtype)
            call = lambda q, k, v, s: flashcore.attention(q, k, v, causal=True, key_lengths=[24, 7], sinks=s)
            loss = lambda *x: (call(*x).astype("float32") ** 2).sum()
            changed = [jax.jit(call), jax.jit(jax.grad(loss, (0, 1, 2, 3)))]
            called_back = [f(q, k, v, sinks) for f in changed]
            _jit.registered = registered
            changed = [jax.jit(call), jax.jit(jax.grad(loss, (0, 1, 2, 3)))]
            same(called_back, [f(q, k, v, sinks) for f in changed], 1e-6)
            _jit.registered = lambda framework: False
    finally:
        _jit.registered = registered


def test_merge_is_traced():
    jax = need()
    q, k, v = three()
    keys = [slice(0, 9), slice(9, 24)]

    def merged(q, k, v):
        parts = [flashcore.attention(q, k[:, :, own], v[:, :, own], return_lse=True) for own in keys]
        return flashcore.merge([out for out, _ in parts], [lse for _, lse in parts], return_lse=True)

    same(jax.jit(merged)(q, k, v), flashcore.attention(q, k, v, return_lse=True), 1e-5)
    loss = lambda f: lambda *x: (f(*x)[0] ** 2).sum() + f(*x)[1].sum()
    whole = lambda q, k, v: flashcore.attention(q, k, v, return_lse=True)
    same(jax.grad(loss(merged), (0, 1, 2))(q, k, v), jax.grad(loss(whole), (0, 1, 2))(q, k, v), 1e-4)
    empty = JAX.make(np.full(q.shape, np.nan), "float32"), JAX.make(np.full(q.shape[:3], -np.inf), "float32")
    join = jax.jit(lambda out, lse: flashcore.merge([out, empty[0]], [lse, empty[1]]))
    same(join(*whole(q, k, v)), whole(q, k, v)[0], 1e-6)


def test_mistakes_are_told_when_a_call_is_traced():
    jax = need()
    q, k, v = three()
    with raises(ValueError, "k has dim 8 but 16 is needed"):
        jax.jit(lambda q: flashcore.attention(q, k[..., :8], v))(q)
    with raises(ValueError, "3 sinks for 4 query heads"):
        jax.jit(lambda s: flashcore.attention(q, k, v, sinks=s))(jax.numpy.zeros(3))
    with raises(TypeError, "key_lengths are float32; convert them to int32"):
        jax.jit(lambda n: flashcore.attention(q, k, v, key_lengths=n))(jax.numpy.ones(2))
    with raises(TypeError, "k is int32; convert it to float16"):
        jax.jit(lambda x: flashcore.attention(q, x, v))(k.astype("int32"))
    with raises(NotImplementedError, "masks have no gradient"):
        jax.grad(lambda m: flashcore.scaled_dot_product_attention(q, k, v, m, enable_gqa=True).sum())(jax.numpy.ones((20, 24)))
    with raises(NotImplementedError, "keys in pages have no gradients"):
        jax.grad(lambda q: flashcore.attention(q, k, v, page_table=[[0], [1]], key_lengths=[24, 7]).sum())(q)
    with raises(ValueError, "each a log-sum-exp"):
        jax.jit(lambda x: flashcore.merge([x, x], [x, x]))(q)


def test_mistakes_that_only_values_show_are_told_when_it_runs():
    jax = need()
    q, k, v = three()
    try:
        jax.block_until_ready(jax.jit(lambda n: flashcore.attention(q, k, v, key_lengths=n))(JAX.make(np.array([24, 70]), "int32")))
    except jax.errors.JaxRuntimeError as error:
        assert "INVALID_ARGUMENT: batch entry 1 uses 70 rows of k, which has 24" in str(error)
    else:
        raise AssertionError("70 keys of 24 were taken")


def test_eager_and_definition_agree():
    jax = need()
    q, k, v = three()
    got = jax.jit(lambda *x: flashcore.attention(*x, causal=True))(q, k, v)
    expected, _ = reference(*(JAX.read(x) for x in (q, k, v)), band_mask(24, 24, right=0))
    assert np.abs(JAX.read(got) - expected).max() < 1e-5
