"""Values: every framework, every element type, every option, against float64."""

import flashcore
from harness import ALL, NUMPY, Skip, band_mask, cases, check_close, check_lse, normal, reference

SHAPES = {
    "square": ((2, 4, 33, 32), (2, 4, 33, 32)),
    "grouped": ((1, 6, 40, 64), (1, 2, 70, 64)),
    "decode": ((3, 8, 1, 128), (3, 1, 100, 128)),
    "few keys": ((1, 2, 70, 16), (1, 2, 9, 16)),
    "no keys": ((1, 2, 5, 16), (1, 2, 0, 16)),
    "no queries": ((1, 2, 0, 16), (1, 2, 5, 16)),
    "no batch": ((0, 2, 4, 16), (0, 2, 4, 16)),
}

OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"right": 0}),
    "window": ({"window": (5, 2)}, {"left": 5, "right": 2}),
    "causal window": ({"causal": True, "window": 7}, {"left": 7, "right": 0}),
    "half open": ({"window": (3, None)}, {"left": 3}),
    "scale": ({"scale": 0.3}, {"scale": 0.3}),
    "softcap": ({"softcap": 2.0, "causal": True}, {"softcap": 2.0, "right": 0}),
    "sinks": ({"sinks": "per head"}, {"sinks": "per head"}),
}


def check(framework, dtype, shapes, option, layout):
    framework.need()
    if dtype not in framework.dtypes:
        raise Skip(f"{framework} has no {dtype} kernels here")
    q_shape, k_shape = SHAPES[shapes]
    given, meant = map(dict, OPTIONS[option])
    if "sinks" in given:
        given["sinks"] = meant["sinks"] = [0.5 * head - 1.0 for head in range(q_shape[1])]
    tensors = [framework.make(normal(*shape, seed=n), dtype) for n, shape in enumerate((q_shape, k_shape, k_shape))]
    exact = [framework.read(tensor) for tensor in tensors]
    band = band_mask(q_shape[2], k_shape[2], meant.pop("left", None), meant.pop("right", None))
    expected, expected_lse = reference(*exact, mask=band, **meant)
    if layout == "bshd":
        tensors = [framework.transpose(tensor) for tensor in tensors]
        expected = expected.swapaxes(1, 2)
    out, lse = flashcore.attention(*tensors, **given, layout=layout, return_lse=True)
    assert framework.is_mine(out) and framework.is_mine(lse), f"{type(out)} is not of {framework}"
    assert out.dtype == tensors[0].dtype and "float32" in str(lse.dtype)
    check_close(framework.read(out), expected, dtype)
    check_lse(framework.read(lse), expected_lse)


@cases(framework=ALL, dtype=["float32", "float16", "bfloat16"], shapes=list(SHAPES))
def test_shapes(framework, dtype, shapes):
    check(framework, dtype, shapes, "plain", "bhsd")


@cases(framework=ALL, dtype=["float32", "float16"], option=list(OPTIONS))
def test_options(framework, dtype, option):
    check(framework, dtype, "grouped", option, "bshd")


@cases(framework=ALL)
def test_same_bits_every_time(framework):
    framework.need()
    dtype = framework.dtypes[-1]
    q = framework.make(normal(2, 4, 65, 64), dtype)
    first = framework.read(flashcore.attention(q, q, q, causal=True))
    for _ in range(5):
        assert (framework.read(flashcore.attention(q, q, q, causal=True)) == first).all()


def test_value_dim_of_its_own():
    for framework in ALL:
        try:
            framework.need()
        except Skip:
            continue
        dtype = framework.dtypes[-1]
        q, k, v = (framework.make(normal(2, 2, 20, dim), dtype) for dim in (32, 32, 64))
        expected, _ = reference(*map(framework.read, (q, k, v)))
        check_close(framework.read(flashcore.attention(q, k, v)), expected, dtype)


def test_anything_with_dlpack():
    """An array of nobody's framework, which only exports and makes its like."""
    import numpy as np

    class Namespace:
        float32 = np.float32

        @staticmethod
        def empty(shape, dtype, device):
            assert device == "here"
            return Mine(np.empty(shape, dtype))

    class Mine:
        device = "here"

        def __init__(self, array):
            self.array, self.shape, self.dtype = array, array.shape, array.dtype

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

        def __array_namespace__(self):
            return Namespace

    values = normal(1, 2, 9, 8)
    out, lse = flashcore.attention(Mine(values), Mine(values), Mine(values), return_lse=True)
    assert type(out) is Mine and type(lse) is Mine
    check_close(NUMPY.read(out.array), reference(values, values, values)[0], "float32")
