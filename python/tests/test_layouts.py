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
    with raises(ValueError, "make positions share memory"):
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
