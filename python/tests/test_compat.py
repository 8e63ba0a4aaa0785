"""Other libraries' functions: their signatures, their meaning."""

import inspect

import flashcore
import numpy as np
from harness import ALL, NUMPY, band_mask, cases, check_close, need_torch, normal, raises, reference

SDPA = {
    "plain": ((2, 4, 20, 16), (2, 4, 20, 16), {}),
    "causal": ((2, 4, 20, 16), (2, 4, 20, 16), {"is_causal": True}),
    "causal, more keys": ((2, 4, 9, 16), (2, 4, 20, 16), {"is_causal": True}),
    "causal, fewer keys": ((2, 4, 20, 16), (2, 4, 9, 16), {"is_causal": True}),
    "grouped": ((2, 4, 20, 16), (2, 2, 20, 16), {"enable_gqa": True}),
    "scale": ((2, 4, 20, 16), (2, 4, 20, 16), {"scale": 0.5}),
    "without heads": ((3, 20, 16), (3, 20, 16), {"is_causal": True}),
    "one matrix": ((20, 16), (20, 16), {}),
}


@cases(name=list(SDPA), device=["cpu", "cuda"])
def test_sdpa_is_torchs(name, device):
    torch = need_torch(device)
    q_shape, k_shape, options = SDPA[name]
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = (torch.tensor(normal(*s, seed=n)).to(device, dtype) for n, s in enumerate((q_shape, k_shape, k_shape)))
    ours = flashcore.scaled_dot_product_attention(q, k, v, **options)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    check_close(ours.double().cpu().numpy(), theirs.double().cpu().numpy(), str(dtype).removeprefix("torch."))


@cases(dimensions=[2, 3, 4], form=["bool", "float"])
def test_sdpa_masks_are_torchs(dimensions, form):
    torch = need_torch()
    q = torch.tensor(normal(3, 2, 12, 16))
    keep = torch.ones((12, 12), dtype=torch.bool).tril()
    if dimensions > 2:
        keep = keep.expand(*(1,) * (dimensions - 2), 12, 12)
    mask = keep if form == "bool" else torch.zeros(keep.shape).masked_fill(~keep, float("-inf"))
    ours = flashcore.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    check_close(ours.double().numpy(), theirs.double().numpy(), "float32")


FLASH = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"right": 0}),
    "window": ({"window_size": (5, 2)}, {"left": 5, "right": 2}),
    "causal window": ({"causal": True, "window_size": (5, -1)}, {"left": 5, "right": 0}),
    "one side": ({"window_size": (-1, 3)}, {"right": 3}),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}),
    "scale": ({"softmax_scale": 0.5}, {"scale": 0.5}),
}


@cases(framework=ALL, name=list(FLASH))
def test_flash_attn_func(framework, name):
    framework.need()
    dtype = framework.dtypes[-1]
    given, meant = FLASH[name][0], dict(FLASH[name][1])
    q, k, v = (framework.make(normal(2, s, h, 32, seed=s + h), dtype) for s, h in ((17, 4), (29, 2), (29, 2)))
    band = band_mask(17, 29, meant.pop("left", None), meant.pop("right", None))
    exact = [framework.read(x).swapaxes(1, 2) for x in (q, k, v)]
    expected, _ = reference(*exact, mask=band, **meant)
    out = flashcore.flash_attn_func(q, k, v, **given)
    check_close(framework.read(out), expected.swapaxes(1, 2), dtype)


@cases(framework=ALL)
def test_packed(framework):
    framework.need()
    dtype = framework.dtypes[-1]
    qkv = framework.make(normal(2, 19, 3, 4, 32), dtype)
    q, k, v = (qkv[:, :, n] for n in range(3))
    expected = framework.read(flashcore.flash_attn_func(q, k, v, causal=True))
    for out in (
        flashcore.flash_attn_qkvpacked_func(qkv, causal=True),
        flashcore.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True),
    ):
        assert (framework.read(out) == expected).all()


def test_signatures():
    flash = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
    expected = {
        flashcore.flash_attn_func: f"q k v {flash}",
        flashcore.flash_attn_kvpacked_func: f"q kv {flash}",
        flashcore.flash_attn_qkvpacked_func: f"qkv {flash}",
        flashcore.scaled_dot_product_attention: "query key value attn_mask dropout_p is_causal scale enable_gqa",
    }
    for function, names in expected.items():
        assert list(inspect.signature(function).parameters) == names.split(), function.__name__


def test_what_is_missing_is_said():
    q = normal(1, 8, 2, 16)
    for options, words in (
        ({"dropout_p": 0.1}, "dropout"),
        ({"alibi_slopes": np.ones(2)}, "ALiBi"),
        ({"return_attn_probs": True}, "return_lse"),
    ):
        with raises(NotImplementedError, words):
            flashcore.flash_attn_func(q, q, q, **options)
    with raises(NotImplementedError, "dropout"):
        flashcore.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    with raises(ValueError, "enable_gqa"):
        flashcore.scaled_dot_product_attention(q, q[:, :4], q[:, :4])
    with raises(ValueError, "attn_mask or is_causal"):
        flashcore.scaled_dot_product_attention(q, q, q, attn_mask=np.ones((2, 2), bool), is_causal=True)
    with raises(ValueError, "qkv is .* batch x sequence x 3 x heads x dim"):
        flashcore.flash_attn_qkvpacked_func(q)
    assert NUMPY.is_mine(flashcore.flash_attn_func(q, q, q, deterministic=True))
