"""Tensors of 8 bits with factors, by torch."""

import flashcore
from harness import cases, need_torch, raises


def drawn(torch, dtype, device="cpu"):
    """q, k and v of batch x sequence x heads x dim, quantised, their factors, and what they stand for."""
    torch.manual_seed(5)
    shapes = ((2, 70, 4, 64), (2, 150, 2, 64), (2, 150, 2, 64))
    values = [torch.randn(shape, device=device) for shape in shapes]
    factors = [x.reshape(2, x.shape[1], 2, -1).abs().amax(dim=(1, 3)) / torch.finfo(dtype).max for x in values]
    each = [f.repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None] for x, f in zip(values, factors)]
    narrow = [(x / f).to(dtype) for x, f in zip(values, each)]
    return narrow, factors, [x.float() * f for x, f in zip(narrow, each)]


def device_of(torch, dtype):
    """The GPU where it takes such tensors."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return "cuda" if hopper and dtype == torch.float8_e4m3fn else "cpu"


@cases(name=["float8_e4m3fn", "float8_e5m2"], causal=[False, True])
def test_narrow_tensors_are_multiplied_by_their_factors(name, causal):
    torch = need_torch()
    dtype = getattr(torch, name)
    narrow, factors, wide = drawn(torch, dtype, device_of(torch, dtype))
    expected, expected_lse = flashcore.attention(*wide, causal=causal, layout="bshd", return_lse=True)
    out, lse = flashcore.attention(*narrow, factors=factors, causal=causal, layout="bshd", return_lse=True)
    assert out.dtype == torch.bfloat16 and (out.float() - expected).abs().max() < 0.06
    assert (lse - expected_lse).abs().max() < 5e-3
    q, k, v = factors
    by_name = flashcore.flash_attn_func(*narrow, causal=causal, q_descale=q, k_descale=k, v_descale=v)
    assert torch.equal(by_name, out)


def test_narrow_tensors_need_no_factors_and_may_share_one():
    torch = need_torch()
    narrow, _, _ = drawn(torch, torch.float8_e4m3fn)
    wide = [x.float() * f for x, f in zip(narrow, (0.01, 0.02, 3.0))]
    out = torch.empty(narrow[0].shape, dtype=torch.float32)
    flashcore.attention(*narrow, factors=(0.01, 0.02, 3.0), layout="bshd", out=out)
    expected = flashcore.attention(*wide, layout="bshd")
    assert (out - expected).abs().max() <= 1e-3 * expected.abs().max()
    plain = flashcore.attention(*narrow, layout="bshd", scale=1e-4)
    assert plain.dtype == torch.bfloat16 and torch.isfinite(plain).all()


@cases(function=["flash_attn_func", "flash_attn_varlen_func"])
def test_gradients_of_8_bits_are_refused_when_they_are_wanted(function):
    """As FlashAttention-3 has it, whose tests give such tensors that ask for gradients."""
    torch = need_torch()
    narrow, factors, _ = drawn(torch, torch.float8_e4m3fn)
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), factors))
    more, flat = (), lambda x: x
    if function == "flash_attn_varlen_func":
        ends = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (70, 150)]
        more, flat = (*ends, 70, 150), lambda x: x.flatten(0, 1)
    call = lambda tensors: getattr(flashcore, function)(*tensors, *more, **descales)
    wanted = call([flat(x) for x in narrow])
    out = call([flat(x).detach().requires_grad_() for x in narrow])
    assert torch.equal(out, wanted) and out.requires_grad
    with raises(NotImplementedError, "8-bit tensors have no gradients"):
        out.float().sum().backward()


def test_mistakes_with_factors_are_told():
    torch = need_torch()
    narrow, factors, wide = drawn(torch, torch.float8_e4m3fn)
    with raises(ValueError, "f32 tensors have no factors"):
        flashcore.attention(*wide, factors=factors, layout="bshd")
    with raises(ValueError, "pass three factors"):
        flashcore.attention(*narrow, factors=factors[:2], layout="bshd")
    with raises(ValueError, "3 factors of k for a batch of 2 with 2 key heads"):
        flashcore.attention(*narrow, factors=(factors[0], torch.ones(3), factors[2]), layout="bshd")
    with raises(ValueError, "would lose precision"):
        flashcore.attention(*narrow, factors=factors, layout="bshd", out=torch.empty_like(narrow[0]))
