"""Tensors rounded to 8 bits, and attention by way of them."""

import flashcore
from harness import cases, need_torch, raises

SHAPES = {"tensor": (1,), "head": (2, 2), "block": (2, 4, 3), "channel": (2, 4, 64)}


def spread(torch, narrow, per, rows):
    """The factor of every element of a 2 x 4 x 70 x 64 tensor."""
    factors = narrow.factors
    if per == "head":
        return factors.repeat_interleave(2, 1)[:, :, None, None]
    if per == "block":
        return factors.repeat_interleave(rows, 2)[:, :, :70, None]
    return factors[:, :, None] if per == "channel" else factors


@cases(per=list(SHAPES), name=["float32", "bfloat16", "float16"], dtype=["e4m3", "e5m2"])
def test_floats_times_their_factors_are_near(per, name, dtype):
    torch = need_torch()
    torch.manual_seed(3)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(2, 70, 4, 64, device=device, dtype=getattr(torch, name)).transpose(1, 2)
    narrow = flashcore.quantise(x, dtype, per=per, rows=32, group=2 if per == "head" else 1)
    assert narrow.values.dtype == getattr(torch, {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[dtype])
    assert narrow.values.stride() == x.stride() and narrow.factors.shape == SHAPES[per] and narrow.means is None
    near = narrow.values.float() * spread(torch, narrow, per, 32)
    step, least = (1 / 16, 2**-10) if dtype == "e4m3" else (1 / 8, 2**-17)
    bound = (x.float().abs() * step).maximum(spread(torch, narrow, per, 32) * least) * 1.0001
    assert ((near - x.float()).abs() <= bound).all()


def test_what_cannot_be_rounded_saturates_or_stays():
    torch = need_torch()
    x = torch.zeros(1, 1, 4, 8)
    assert torch.isfinite(flashcore.quantise(x).factors).all()
    x[0, 0, 0, :3] = torch.tensor([float("inf"), float("nan"), 3.0])
    narrow = flashcore.quantise(x)
    assert narrow.values.float()[0, 0, 0, 0] == 448 and torch.isnan(narrow.values.float()[0, 0, 0, 1])
    assert abs(narrow.factors.item() - 3 / 448) < 1e-8


def test_centred_tensors_come_with_their_means_and_unused_rows_are_zeros():
    torch = need_torch()
    x = torch.randn(2, 3, 50, 16) + 5
    x[1, :, 20:] = float("nan")
    narrow = flashcore.quantise(x, per="block", centred=True, lengths=[50, 20])
    assert torch.allclose(narrow.means[0], x[0].mean(1), atol=1e-4)
    assert torch.allclose(narrow.means[1], x[1, :, :20].mean(1), atol=1e-4)
    assert (narrow.values[1, :, 20:].float() == 0).all() and narrow.factors.max() < 5 / 448


def test_means_whose_sums_overflow_are_finite():
    torch = need_torch()
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        x = torch.full((200, 16), 3e38, device=device)
        narrow = flashcore.quantise(x, centred=True)
        assert torch.allclose(narrow.means, x[:1], rtol=1e-5)
        assert ((narrow.values.float() * narrow.factors).abs() <= 1e-4 * 3e38).all()
        largest = torch.finfo(torch.float32).max
        assert torch.isfinite(flashcore.quantise(torch.full_like(x, largest), centred=True).means).all()


@cases(dtype=["e4m3", "e5m2"])
def test_factors_have_a_floor(dtype):
    torch = need_torch()
    least = {"e4m3": 3e-18, "e5m2": 2.5e-20}[dtype]
    for size, kept in ((least, False), (2 * least, True)):
        narrow = flashcore.quantise(torch.full((4, 16), size), dtype)
        assert narrow.factors.item() == 2.0**-48 and (narrow.values.float() > 0).all() == kept


def test_numpy_has_floats_of_ml_dtypes():
    import numpy

    try:
        import ml_dtypes
    except ImportError:
        return
    x = numpy.linspace(-2, 2, 64, dtype="float32").reshape(1, 8, 8)
    narrow = flashcore.quantise(x, per="head")
    assert narrow.values.dtype == ml_dtypes.float8_e4m3fn and narrow.factors.shape == (1, 1)
    assert numpy.allclose(narrow.values.astype("float32") * narrow.factors[0, 0], x, rtol=1 / 16, atol=1e-5)


@cases(layout=["bhsd", "bshd"], causal=[False, True], options=[{}, {"softcap": 20.0}, {"key_lengths": [300, 140]}])
def test_attention_by_way_of_8_bits_is_near(layout, causal, options):
    torch = need_torch()
    torch.manual_seed(7)
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    shapes = ((2, 4, 200, 64), (2, 2, 300, 64), (2, 2, 300, 64))
    q, k, v = (torch.randn(shape, device="cuda" if hopper else "cpu", dtype=torch.bfloat16) for shape in shapes)
    k = k + 3 * torch.randn(64, device=k.device, dtype=k.dtype)
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    given = {"causal": causal, "layout": layout, "return_lse": True} | options
    expected, expected_lse = (x.float() for x in flashcore.attention(q, k, v, **given))
    out, lse = flashcore.attention(q, k, v, quantise="e4m3", **given)
    assert out.dtype == q.dtype and out.shape == q.shape
    cosine = torch.nn.functional.cosine_similarity(out.float().flatten(), expected.flatten(), 0)
    assert cosine >= 0.994, cosine
    seen = torch.isfinite(expected_lse)
    # Keys beside a softcap keep their mean, and large scores are off by a share of themselves.
    bound = 1.0 if "softcap" in options else 0.2
    assert (seen == torch.isfinite(lse)).all() and (lse - expected_lse)[seen].abs().max() < bound


def test_factors_of_blocks_may_be_given():
    torch = need_torch()
    q, k, v = (torch.randn(1, 2, 130, 32) for _ in range(3))
    q8, k8 = (flashcore.quantise(x, per="block", rows=32) for x in (q, k))
    v8 = flashcore.quantise(v, per="channel")
    narrow, factors = zip(*((x.values, x.factors) for x in (q8, k8, v8)))
    out = flashcore.attention(*narrow, factors=factors, blocks=(32, 32))
    assert (out.float() - flashcore.attention(q, k, v)).abs().max() < 0.1
    with raises(ValueError, "q have 10 entries but 18 are needed"):
        flashcore.attention(*narrow, factors=factors, blocks=(16, 32))


@cases(layout=["bhsd", "bshd"], keys=[70, 256])
def test_turned_values_give_the_same(layout, keys):
    torch = need_torch()
    torch.manual_seed(5)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (2, 2, keys, 64) if layout == "bhsd" else (2, keys, 2, 64)
    q, k, v = (torch.randn(shape, device=device) for _ in range(3))
    lengths = torch.tensor([keys, 33], device=device)
    values = [flashcore.quantise(x, layout=layout).values for x in (q, k)]
    plain, turned = (
        flashcore.quantise(v, per="head", lengths=lengths, layout=layout, turned=turned) for turned in (False, True)
    )
    assert turned.values.shape == (2, 2, 72, -(-keys // 128) * 128) and torch.equal(plain.factors, turned.factors)
    given = dict(key_lengths=lengths, layout=layout, return_lse=True)
    expected = flashcore.attention(*values, plain.values, **given)
    got = flashcore.attention(*values, turned.values, turned=True, **given)
    assert all(torch.equal(x, y) for x, y in zip(got, expected)) and got[0].shape == q.shape


def test_mistakes_are_told():
    torch = need_torch()
    x = torch.randn(1, 2, 8, 16)
    with raises(ValueError, "use \"e4m3\" or \"e5m2\""):
        flashcore.quantise(x, "int8")
    with raises(ValueError, "per is `row`"):
        flashcore.quantise(x, per="row")
    with raises(ValueError, "at least one row"):
        flashcore.quantise(x, per="block", rows=0)
    with raises(ValueError, "quantising does not support e4m3"):
        flashcore.quantise(x.to(torch.float8_e4m3fn))
    with raises(ValueError, "attention supports \"e4m3\""):
        flashcore.attention(x, x, x, quantise="e5m2")
    with raises(ValueError, "cannot be combined with"):
        flashcore.attention(x, x, x, quantise="e4m3", key_mask=torch.ones(1, 8, dtype=torch.bool))
    with raises(NotImplementedError, "no backward pass"):
        flashcore.attention(x.requires_grad_(), x, x, quantise="e4m3")
