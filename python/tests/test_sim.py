"""`flashcore.sim`: PTX and Triton kernels on NumPy arrays, judged."""

import re
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from flashcore import sim

REVERSE = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry reverse(.param .u64 pin, .param .u64 pout, .param .f32 pscale)
{
    .shared .align 4 .b8 tile[256];
    .reg .b32 %t, %a, %b; .reg .f32 %x, %s; .reg .b64 %in, %out, %o;
    mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 4;
    ld.param.u64 %in, [pin]; add.u64 %in, %in, %o; ld.global.f32 %x, [%in];
    mov.u32 %a, tile; mad.lo.u32 %b, %t, 4, %a; st.shared.f32 [%b], %x;
    BARRIER
    xor.b32 %t, %t, 63; mad.lo.u32 %b, %t, 4, %a; ld.shared.f32 %x, [%b];
    ld.param.f32 %s, [pscale]; mul.f32 %x, %x, %s;
    ld.param.u64 %out, [pout]; add.u64 %out, %out, %o; st.global.f32 [%out], %x;
    ret;
}
"""


def reverse(barrier, **how):
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    result = sim.run(REVERSE.replace("BARRIER", barrier), 1, 64, [x, sim.unwritten(y), 0.5], **how)
    return x, y, result


def test_a_clean_kernel_writes_its_arrays():
    for how in ({}, {"schedule": "random", "seed": 3}):
        x, y, result = reverse("bar.sync 0;", **how)
        assert result.require_clean() is result and result.findings == []
        np.testing.assert_array_equal(y, x[::-1] / 2)
        assert result.counters["instructions"] > 0 and result.seconds > 0


def test_a_race_is_found_and_raised():
    _, _, result = reverse("")
    assert "SharedRace" in {finding.kind for finding in result.errors}
    with pytest.raises(sim.Findings, match="without order between") as raised:
        result.require_clean()
    assert all(finding.fix for finding in raised.value.findings)


def test_findings_name_the_argument():
    x, y = np.zeros(64, np.float32), np.zeros(32, np.float32)
    text = REVERSE.replace("BARRIER", "bar.sync 0;")
    assert [param["name"] for param in sim.kernels(text)[0]["params"]] == ["pin", "pout", "pscale"]
    (finding,) = sim.run(text, 1, 64, [x, y, 1.0]).errors
    assert finding.kind == "OutOfBounds" and "of argument 1 (pout), which has 128" in finding.message
    (finding,) = sim.run(text, 1, 64, [x, y, 1.0], names=["x", "y", "scale"]).errors
    assert "of argument 1 (y), which has 128" in finding.message


def test_what_is_unknown_is_refused_where_it_is_executed():
    x, y = np.zeros(64, np.float32), np.zeros(64, np.float32)
    odd = "setp.eq.u32 %p, %t, 99; @%p frob.u32 %a, %b; bar.sync 0;"
    text = REVERSE.replace("BARRIER", odd).replace("%o;", "%o; .reg .pred %p;", 1)
    result = sim.run(text, 1, 64, [x, y, 1.0])
    assert result.clean and [finding.kind for finding in result.findings] == ["NotJudged"]
    with pytest.raises(ValueError, match="`frob.u32 %a, %b`, which `reverse` executed"):
        sim.run(text.replace("99", "9"), 1, 64, [x, y, 1.0])


SCALED = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry scaled(.param .align 8 .b8 given[32], .param .u64 pout)
{
    .reg .b32 %t, %n; .reg .f32 %x, %s; .reg .b64 %in, %out, %o; .reg .pred %p;
    mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 4; ld.param.u32 %n, [given]; setp.ge.u32 %p, %t, %n; @%p ret;
    ld.param.u64 %in, [given+8]; add.u64 %in, %in, %o; ld.global.f32 %x, [%in];
    ld.param.f32 %s, [given+20]; mul.f32 %x, %x, %s;
    ld.param.u64 %out, [pout]; add.u64 %out, %out, %o; st.global.f32 [%out], %x;
    ret;
}
"""


def test_structs_hold_numbers_and_addresses():
    """As C lays out `struct { int n; float* in; char tag; float scale; void* unused; }`."""
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    given = (np.int32(48), x, np.int8(1), np.float32(0.5), None)
    sim.run(SCALED, 1, 64, [given, y]).require_clean()
    np.testing.assert_array_equal(y, np.where(np.arange(64) < 48, x / 2, 0))
    (finding,) = sim.run(SCALED, 1, 64, [(np.int32(48), x[:32].copy(), *given[2:]), y]).errors
    assert finding.kind == "OutOfBounds" and "of argument 0 (given), which has 128" in finding.message
    with pytest.raises(TypeError, match="numpy.int32"):
        sim.run(SCALED, 1, 64, [(48, *given[1:]), y])
    with pytest.raises(ValueError, match="16 bytes for a parameter of 32"):
        sim.run(SCALED, 1, 64, [given[:2], y])


def test_arguments_are_checked():
    x = np.zeros(64, np.float32)
    with pytest.raises(ValueError, match="has 3 parameters, but 1"):
        sim.run(REVERSE.replace("BARRIER", ""), 1, 64, [x])
    with pytest.raises(ValueError, match="unknown instruction"):
        sim.run(REVERSE.replace("BARRIER", "frob;"), 1, 64, [x, x, 1.0])
    with pytest.raises(TypeError, match="C-contiguous"):
        sim.run(REVERSE.replace("BARRIER", ""), 1, 64, [np.zeros((8, 8), np.float32).T, x, 1.0])
    with pytest.raises(TypeError, match="pass a number, an array"):
        sim.run(REVERSE.replace("BARRIER", ""), 1, 64, [x, x, "1"])
    with pytest.raises(TypeError, match="pass a whole number"):
        sim.run(REVERSE.replace("BARRIER", ""), 1, 64, [5.0, x, 1.0])
    with pytest.raises(ValueError, match="does not fit"):
        sim.run(REVERSE.replace("BARRIER", ""), 1, 64, [1 << 64, x, 1.0])
    with pytest.raises(ValueError, match="name one of them"):
        sim.run(REVERSE.replace("BARRIER", ""), 1, 64, [], entry="forward")


COPY = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry copy(.param .u64 pin, .param .u64 pout)
{
    .reg .b32 %t; .reg .b64 %in, %out, %o;
    mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 4;
    ld.param.u64 %in, [pin]; add.u64 %in, %in, %o; ld.global.b32 %t, [%in];
    ld.param.u64 %out, [pout]; add.u64 %out, %out, %o; st.global.b32 [%out], %t;
    ret;
}
"""
SETTINGS = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry settings(.param .align 64 .b8 map[128], .param .f32 scale, .param .u32 count) { ret; }
"""


def test_arrays_that_kernels_do_not_take_are_refused():
    x, y = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    for wrong in (x.astype(">u4"), *(np.zeros(32, kind) for kind in ("O", "S4", "V4", "M8[s]", "c8", "c16", "i2,i2"))):
        for args, at in (([wrong, y], 0), ([x, wrong], 1)):
            words = f"^argument {at} .*elements of type .*(astype|convert to one of)"
            with pytest.raises(TypeError, match=words):
                sim.run(COPY, 1, 32, args)
    with pytest.raises(TypeError, match="argument 1 .*C-contiguous"):
        sim.run(COPY, 1, 32, [x, np.zeros((32, 2), np.uint32)[:, 0]])
    for kind in ("?", "V1", "V2", "i1", "f2", "u8"):
        sim.run(COPY, 1, 4, [np.zeros(64, kind), y]).require_clean()


def test_types_of_ml_dtypes_are_bound():
    types = pytest.importorskip("ml_dtypes")
    x, y = np.arange(64).astype(types.bfloat16), np.zeros(64, types.float8_e4m3fn)
    sim.run(COPY, 1, 16, [x, y]).require_clean()
    assert y.tobytes() == x.tobytes()[:64]


def test_numbers_that_are_no_numbers_are_refused():
    x = np.zeros((8, 16), np.float32)
    for wrong in (np.array(1.5, ">f4"), np.array(None), np.array("a")):
        with pytest.raises((TypeError, ValueError), match="^argument 1 "):
            sim.run(SETTINGS, 1, 1, [sim.TensorMap(x, box=[16, 8]), wrong, 1])


def test_an_empty_array_is_bound():
    y = np.zeros(32, np.uint32)
    (finding,) = sim.run(COPY, 1, 32, [np.zeros((32, 0), np.uint32), y]).errors
    assert finding.kind == "OutOfBounds" and "of argument 0 (pin), which has 0" in finding.message


def test_a_read_only_array_may_be_read():
    x, y = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    x.setflags(write=False)
    sim.run(COPY, 1, 32, [x, y]).require_clean()
    np.testing.assert_array_equal(y, x)
    x, y = y + 1, x
    with pytest.raises(ValueError, match=r"argument 1 \(pout\): the kernel wrote to this array, which is read-only"):
        sim.run(COPY, 1, 32, [x, y])


def test_messages_name_what_is_wrong():
    x, y = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    for how, kind in (
        ({"grid": -1}, ValueError),
        ({"grid": 1.5}, TypeError),
        ({"grid": (1, "2")}, TypeError),
        ({"block": 1 << 40}, ValueError),
        ({"cluster": (1, -2)}, ValueError),
        ({"smem": -1}, ValueError),
        ({"smem": 1 << 70}, ValueError),
        ({"seed": -1}, ValueError),
        ({"max_steps": -1}, ValueError),
        ({"max_steps": 1e3}, TypeError),
    ):
        (name,) = how
        with pytest.raises(kind, match=f"^`{name}` is "):
            sim.run(COPY, **({"grid": 1, "block": 32, "args": [x, y]} | how))
    with pytest.raises(ValueError, match="2 parameters, but 1 names"):
        sim.run(COPY, 1, 32, [x, y], names=["x"])
    with pytest.raises(ValueError, match="`3` is not a schedule"):
        sim.run(COPY, 1, 32, [x, y], schedule=3)
    sim.run(COPY, np.int64(1), np.array([32, 1]), [x, y], smem=np.int32(0)).require_clean()


def test_messages_name_the_argument():
    x = np.zeros((8, 16), np.float32)
    for more, kind in (
        ({"box": [-1, 8]}, ValueError),
        ({"box": 16}, TypeError),
        ({"strides": [10**30]}, ValueError),
        ({"dims": [1.5, 8]}, TypeError),
        ({"swizzle": -1}, ValueError),
    ):
        (name,) = more
        with pytest.raises(kind, match=rf"^argument 0 \(map\): `{name}` is "):
            sim.run(SETTINGS, 1, 1, [sim.TensorMap(x, **{"box": [16, 8]} | more), 1.0, 1])
    whole = sim.TensorMap(x, box=np.array([16, 8]), swizzle=np.int64(0))
    sim.run(SETTINGS, 1, 1, [whole, 1.0, 1]).require_clean()
    for scale in (1e300, 10**400):
        with pytest.raises(ValueError, match=r"^argument 1 \(scale\): .* does not fit in a parameter of type f32"):
            sim.run(SETTINGS, 1, 1, [whole, scale, 1])
    with pytest.raises(TypeError, match=r"^argument 2 \(count\): .*pass a whole number"):
        sim.run(SETTINGS, 1, 1, [whole, 1.0, 1.5])


ENDLESS = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry endless(.param .u64 p)
{
    .reg .b64 %p; .reg .b32 %x;
    ld.param.u64 %p, [p]; mov.u32 %x, 0;
again:
    add.u32 %x, %x, 1; st.global.u32 [%p], %x;
    bra again;
}
"""


def test_an_endless_kernel_ends():
    with pytest.raises(ValueError, match="without ending.*max_steps"):
        sim.run(ENDLESS, 1, 1, [np.zeros(1, np.uint32)], max_steps=10_000)


def test_ctrl_c_ends_a_launch():
    # Programs that a shell starts in the background ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            sim.run(ENDLESS, 1, 1, [np.zeros(1, np.uint32)], max_steps=1 << 30)
    finally:
        signal.signal(signal.SIGINT, before)


def test_kernels_are_described():
    (kernel,) = sim.kernels(REVERSE.replace("BARRIER", ""))
    assert kernel["name"] == "reverse" and [p["type"] for p in kernel["params"]] == ["u64", "u64", "f32"]


@pytest.fixture
def kernels():
    pytest.importorskip("triton", minversion="3.6")
    folder = Path(__file__).parents[2] / "tests" / "ptx" / "triton"
    sys.path.insert(0, str(folder))
    import kernels

    return kernels


@pytest.mark.parametrize("target", [75, 80, 90])
def test_triton_tutorials(kernels, target):
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 300)).astype(np.float32)
    out = np.zeros_like(x)
    add = sim.triton(kernels.vector_add, target=target)
    add[lambda meta: (-(-300 // meta["BLOCK"]),)](x, y, sim.unwritten(out), 300, BLOCK=128).require_clean()
    np.testing.assert_array_equal(out, x + y)

    rows = x.reshape(3, 100)
    out = np.zeros_like(rows)
    sim.triton(kernels.softmax, target=target)[(3,)](rows, sim.unwritten(out), 100, BLOCK=128).require_clean()
    power = np.exp(rows - rows.max(1, keepdims=True))
    np.testing.assert_allclose(out, power / power.sum(1, keepdims=True), rtol=1e-5)

    weight, bias = rng.standard_normal((2, 100)).astype(np.float32)
    norm = sim.triton(kernels.layer_norm, target=target)
    norm[(3,)](rows, weight, bias, sim.unwritten(out), 100, 1e-5, BLOCK=128).require_clean()
    centred = rows - rows.mean(1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * weight + bias
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", [75, 80, 90])
def test_triton_matmul_and_attention(kernels, target):
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((70, 80)).astype(np.float16), rng.standard_normal((80, 64)).astype(np.float16)
    c = np.zeros((70, 64), np.float16)
    grid = lambda meta: (-(-70 // meta["BM"]), -(-64 // meta["BN"]))  # noqa: E731
    product = sim.triton(kernels.matmul, target=target)[grid]
    product(a, b, sim.unwritten(c), 70, 64, 80, BM=64, BN=32, BK=32, num_warps=4).require_clean()
    np.testing.assert_allclose(c, a.astype(np.float32) @ b.astype(np.float32), rtol=2e-3, atol=2e-2)

    q, k, v = rng.standard_normal((3, 50, 32)).astype(np.float16)
    out = np.zeros_like(q)
    attend = sim.triton(kernels.attention, target=target)[(1,)]
    attend(q, k, v, sim.unwritten(out), 50, 32**-0.5, D=32, BM=64, BN=32, schedule="random", seed=4).require_clean()
    score = q.astype(np.float64) @ k.astype(np.float64).T * 32**-0.5
    power = np.exp(score - score.max(1, keepdims=True))
    np.testing.assert_allclose(out, power @ v / power.sum(1, keepdims=True), rtol=5e-3, atol=5e-3)


def test_triton_tensor_descriptors(kernels):
    class Descriptor:
        def __init__(self, base, block_shape):
            self.base, self.shape, self.block_shape = base, base.shape, block_shape
            self.strides = [stride // base.itemsize for stride in base.strides]

    rng = np.random.default_rng(3)
    a, b = rng.integers(-4, 5, (2, 128, 128)).astype(np.float16)
    c = np.zeros((128, 128), np.float16)
    described = [Descriptor(array, [64, 64]) for array in (a, b, c)]
    product = sim.triton(kernels.matmul_described)[(2, 2)]
    product(*described, 128, BM=64, BN=64, BK=64, schedule="random", seed=5).require_clean()
    np.testing.assert_array_equal(c, (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16))


def test_triton_findings_name_lines_of_the_source(kernels):
    x = np.zeros(200, np.float32)
    result = sim.triton(kernels.vector_add_outside)[(2,)](x, x.copy(), x.copy(), BLOCK=128)
    (finding,) = result.errors
    assert finding.kind == "OutOfBounds" and result.halted
    assert re.search(r"of argument \d \([a-z_]+\), which has", finding.message), finding.message
    source = Path(kernels.__file__).read_text().splitlines()
    file, line = finding.source.rsplit(":", 1)
    assert file.endswith("kernels.py") and "tl.load(x + i) + tl.load(y + i)" in source[int(line) - 1]
