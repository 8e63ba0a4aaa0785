"""Memory: any strides, either order, outputs of the caller's, no copies."""

import flashcore
import numpy as np
from harness import ALL, NUMPY, Skip, band_mask, cases, check_close, normal, raises, reference


def torch_or_numpy(framework):
    framework.need()
    if framework.module not in ("numpy", "torch"):
        raise Skip(f"{framework} makes no views")
    return framework, framework.dtypes[-1] if framework.module == "torch" else "float32"


VIEWS = {
    "transposed": lambda x: x.swapaxes(1, 2),
    "every other batch entry": lambda x: np.repeat(x, 2, axis=0)[::2],
    "every other row": lambda x: np.repeat(x, 2, axis=2)[:, :, ::2],
    "inside padding": lambda x: np.pad(x, ((0, 0), (0, 1), (2, 3), (0, 8)), constant_values=np.nan)[:, :-1, 2:-3, :-8],
    "one head for all": lambda x: np.broadcast_to(x[:, :1], x.shape),
}


@cases(framework=ALL, view=list(VIEWS))
def test_inputs_are_read_where_they_lie(framework, view):
    framework, dtype = torch_or_numpy(framework)
    values = VIEWS[view](normal(2, 2, 24, 16))
    if view == "transposed":
        values = np.ascontiguousarray(values)
    if framework.module == "numpy":
        tensor = values
    else:
        import torch

        base = values if values.base is None else values.base
        whole = torch.tensor(np.asarray(base)).to(framework.device, getattr(torch, dtype))
        start = (values.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // 4
        tensor = whole.as_strided(values.shape, [stride // 4 for stride in values.strides], start)
    exact = framework.read(tensor)
    check_close(framework.read(flashcore.attention(tensor, tensor, tensor)), reference(exact, exact, exact)[0], dtype)


@cases(framework=ALL)
def test_orders_agree(framework):
    framework.need()
    dtype = framework.dtypes[-1]
    q, k = (framework.make(normal(2, heads, 30, 32, seed=heads), dtype) for heads in (4, 2))
    one = flashcore.attention(q, k, k, causal=True)
    turned = flashcore.attention(*map(framework.transpose, (q, k, k)), causal=True, layout="bshd")
    assert (framework.read(framework.transpose(turned)) == framework.read(one)).all()


@cases(framework=ALL)
def test_result_keeps_the_order_of_memory(framework):
    framework, dtype = torch_or_numpy(framework)
    q = framework.transpose(framework.make(normal(2, 30, 4, 32), dtype))
    out = flashcore.attention(q, q, q)
    strides = out.stride() if framework.module == "torch" else tuple(s // 4 for s in out.strides)
    assert strides == (30 * 4 * 32, 32, 4 * 32, 1), strides


@cases(framework=ALL)
def test_result_of_another_dim_keeps_the_order_of_memory(framework):
    framework, dtype = torch_or_numpy(framework)
    q, v = (framework.transpose(framework.make(normal(2, 30, 4, dim), dtype)) for dim in (32, 16))
    out = flashcore.attention(q, q, v)
    strides = out.stride() if framework.module == "torch" else tuple(s // 4 for s in out.strides)
    assert strides == (30 * 4 * 16, 16, 4 * 16, 1), strides


@cases(framework=ALL)
def test_writes_into_out(framework):
    framework, dtype = torch_or_numpy(framework)
    q = framework.make(normal(2, 2, 17, 16), dtype)
    whole = framework.make(np.full((2, 3, 20, 16), 7.0, "float32"), dtype)
    out = whole[:, :2, 1:18]
    result = flashcore.attention(q, q, q, causal=True, out=out)
    assert result is out
    exact = framework.read(q)
    check_close(framework.read(out), reference(exact, exact, exact, band_mask(17, 17, right=0))[0], dtype)
    around = framework.read(whole)
    assert (around[:, 2] == 7).all() and (around[:, :, 0] == 7).all() and (around[:, :, 18:] == 7).all()


def test_out_must_be_usable():
    q = normal(1, 2, 8, 16)
    frozen = np.empty_like(q)
    frozen.flags.writeable = False
    with raises(BufferError, "out is read-only"):
        flashcore.attention(q, q, q, out=frozen)
    with raises(ValueError, "q shares memory with out"):
        flashcore.attention(q, q.copy(), q.copy(), out=q)
    with raises(ValueError, "overlap in memory"):
        one = np.lib.stride_tricks.as_strided(np.zeros(16, "float32"), q.shape, (0, 0, 0, 4))
        flashcore.attention(q, q, q, out=one)
    with raises(ValueError, "out has sequence 9 but 8 is needed"):
        flashcore.attention(q, q, q, out=np.empty((1, 2, 9, 16), "float32"))
    with raises(TypeError, "output is f16 but q is f32; give it q's type or f32"):
        flashcore.attention(q, q, q, out=np.empty(q.shape, "float16"))


def test_read_only_inputs_are_fine():
    q = normal(1, 2, 8, 16)
    q.flags.writeable = False
    check_close(NUMPY.read(flashcore.attention(q, q, q)), reference(q, q, q)[0], "float32")


def test_nothing_is_copied():
    """Changing the caller's memory changes the next result."""
    q = normal(1, 1, 4, 8)
    before = flashcore.attention(q, q, q)
    q[...] = 1.0
    assert (flashcore.attention(q, q, q) == 1.0).all() and not (before == 1.0).all()


@cases(framework=ALL, layout=["bhsd", "bshd"], dimensions=[2, 3])
def test_tensors_without_batch_or_heads(framework, layout, dimensions):
    """The same numbers as with dimensions of 1 in their place."""
    framework.need()
    dtype = framework.dtypes[-1]
    heads = {2: (1, 1), 3: (4, 2)}[dimensions]
    q, k, v = (framework.make(normal(1, h, s, d), dtype) for h, s, d in zip((heads[0], *heads[1:] * 2), (30, 50, 50), (32, 32, 16)))
    four = [q, k, v] if layout == "bhsd" else [*map(framework.transpose, (q, k, v))]
    few = [x[0] if dimensions == 3 else framework.transpose(x)[0, :, 0] if layout == "bhsd" else x[0, :, 0] for x in four]
    options = dict(causal=True, layout=layout, return_lse=True, key_lengths=[40])
    (out, lse), (wanted, wanted_lse) = (flashcore.attention(*tensors, **options) for tensors in (few, four))
    out, lse, wanted, wanted_lse = map(framework.read, (out, lse, wanted, wanted_lse))
    assert out.shape == (*few[0].shape[:-1], 16), out.shape
    assert lse.shape == ((4, 30) if dimensions == 3 else (30,)), lse.shape
    assert (out == wanted.reshape(out.shape)).all() and (lse == wanted_lse.reshape(lse.shape)).all()
    plain = framework.read(flashcore.attention(*few, layout=layout))
    assert (plain == framework.read(flashcore.attention(*four, layout=layout)).reshape(plain.shape)).all()


@cases(shape=[(2, 24, 16), (24, 16)])
def test_masks_and_outputs_without_a_batch(shape):
    q = normal(*shape)
    keep = np.arange(24) >= 5
    out = np.empty_like(q)
    assert flashcore.attention(q, q, q, key_mask=keep, out=out) is out
    whole = q.reshape(1, -1, 24, 16)
    check_close(out.reshape(whole.shape), reference(whole, whole, whole, keep)[0], "float32")
    assert (flashcore.attention(q, q, q, key_mask=keep[None]) == out).all()


def test_parts_without_a_batch_are_merged():
    q, k = normal(2, 10, 16), normal(2, 30, 16)
    parts, lses = zip(*(flashcore.attention(q, part, part, return_lse=True) for part in (k[:, :12], k[:, 12:])))
    merged = flashcore.merge(list(parts), list(lses))
    check_close(merged, reference(q[None], k[None], k[None])[0][0], "float32")
    out, lse = np.empty_like(q), np.full((2, 10), -np.inf, "float32")
    flashcore.accumulate(q, k, k, out, lse)
    check_close(out, merged.astype("float64"), "float32")
