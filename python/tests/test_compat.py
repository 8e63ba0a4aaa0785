"""Other libraries' functions: their signatures, their meaning."""

import inspect

import flashcore
import numpy as np
from flashcore import _sdpa
from harness import ALL, JAX, NUMPY, TORCH, band_mask, cases, check_close, check_lse, need_torch, normal, raises, reference

SDPA = {
    "plain": ((2, 4, 20, 16), (2, 4, 20, 16), {}),
    "causal": ((2, 4, 20, 16), (2, 4, 20, 16), {"is_causal": True}),
    "causal, more keys": ((2, 4, 9, 16), (2, 4, 20, 16), {"is_causal": True}),
    "causal, fewer keys": ((2, 4, 20, 16), (2, 4, 9, 16), {"is_causal": True}),
    "grouped": ((2, 4, 20, 16), (2, 2, 20, 16), {"enable_gqa": True}),
    "scale": ((2, 4, 20, 16), (2, 4, 20, 16), {"scale": 0.5}),
    "without heads": ((3, 20, 16), (3, 20, 16), {"is_causal": True}),
    "heads alone": ((4, 20, 16), (2, 20, 16), {"enable_gqa": True}),
    "one matrix": ((20, 16), (20, 16), {}),
    "two batch dimensions": ((2, 3, 4, 20, 16), (2, 3, 4, 9, 16), {"is_causal": True}),
    "three batch dimensions": ((2, 1, 3, 4, 20, 16), (2, 1, 3, 2, 20, 16), {"enable_gqa": True}),
    "no batch": ((2, 0, 4, 20, 16), (2, 0, 4, 20, 16), {}),
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


@cases(made=["by torch", "by NumPy"], argument=["attn_mask", "key_mask"])
def test_masks_may_change_between_calls(made, argument):
    """Also by writes that torch's version of a tensor does not count."""
    torch = need_torch()
    numbers = np.ones((2, 12), bool)
    mask = torch.from_numpy(numbers) if made == "by NumPy" else torch.ones(2, 12, dtype=torch.bool)
    q = torch.tensor(normal(2, 2, 12, 16))
    for used in (12, 5, 9):
        if made == "by NumPy":
            numbers[:] = np.arange(12) < used
        else:
            mask.data[:] = torch.arange(12) < used
        if argument == "key_mask":
            ours = flashcore.attention(q, q, q, key_mask=mask)
        else:
            ours = flashcore.scaled_dot_product_attention(q, q, q, mask.view(2, 1, 1, 12))
        check_close(ours.numpy(), flashcore.attention(q[:, :, :], q[:, :, :used], q[:, :, :used]).numpy(), "float32")


@cases(shape=[(2, 20), (3, 2, 20), (2, 3, 2, 20), (2, 1, 3, 2, 20)], order=["dense", "turned", "torn"])
def test_sdpa_of_any_dimensions(shape, order):
    """Every number of dimensions is that many calls with four, whatever the strides."""
    q, k, v = (normal(*shape, dim, seed=dim) for dim in (16, 16, 8))
    expected, _ = reference(*(x.reshape(1, -1, *x.shape[-2:]) for x in (q, k, v)))
    if order == "turned":
        q, k, v = (np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2) if x.ndim > 2 else x for x in (q, k, v))
    elif order == "torn":  # no strides reach the batch dimensions as one
        q, k, v = (np.asfortranarray(x.swapaxes(-1, 0)).swapaxes(-1, 0) for x in (q, k, v))
    out = flashcore.scaled_dot_product_attention(q, k, v)
    assert out.shape == (*shape, 8)
    check_close(out.reshape(expected.shape).astype("float64"), expected, "float32")


MASKS = {
    "of all": ((3, 20, 16), (20, 20), False),
    "of each batch entry": ((3, 20, 16), (3, 1, 20), False),
    "of heads": ((4, 20, 16), (1, 1, 20), True),
    "of two batch dimensions": ((2, 3, 4, 20, 16), (2, 3, 1, 1, 20), False),
    "of the first of them": ((2, 3, 4, 20, 16), (2, 1, 1, 1, 20), False),
    "of the second": ((2, 3, 4, 20, 16), (3, 1, 1, 20), False),
    "of none of them": ((2, 3, 4, 20, 16), (1, 1, 1, 1, 20), False),
}


@cases(framework=[NUMPY, JAX, TORCH], name=list(MASKS))
def test_sdpa_masks_of_any_dimensions(framework, name):
    framework.need()
    q_shape, mask_shape, grouped = MASKS[name]
    values = normal(*q_shape)
    first = np.random.default_rng(5).integers(0, 19, (*mask_shape[:-2], 1, 1))
    mask = np.broadcast_to(np.arange(20) >= first, mask_shape)  # padding on the left
    scores = np.broadcast_to(mask, (*q_shape[:-1], 20))
    four = values.reshape(1, -1, 20, 16)
    expected, _ = reference(four, four, four, mask=scores.reshape(1, -1, 20, 20))
    q, keep = framework.make(values, "float32"), framework.make(mask, "bool")
    out = flashcore.scaled_dot_product_attention(q, q, q, attn_mask=keep, enable_gqa=grouped)
    check_close(framework.read(out), expected.reshape(q_shape), "float32")


def test_sdpa_flattens_without_copies():
    q = normal(2, 3, 4, 20, 16)
    turned = np.ascontiguousarray(q.swapaxes(2, 3)).swapaxes(2, 3)
    for tensor in (q, turned):
        assert np.shares_memory(_sdpa._reshape(tensor, _sdpa._four(tensor.shape, False)), tensor)


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


@cases(framework=ALL, dim=[1, 59, 111, 320])
def test_flash_attn_func_takes_any_head_dim(framework, dim):
    framework.need()
    dtype = framework.dtypes[-1]
    q, k, v = (framework.make(normal(2, s, h, dim, seed=s + h), dtype) for s, h in ((17, 4), (29, 2), (29, 2)))
    exact = [framework.read(x).swapaxes(1, 2) for x in (q, k, v)]
    expected, _ = reference(*exact, mask=band_mask(17, 29, None, 0))
    out = flashcore.flash_attn_func(q, k, v, causal=True)
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
        flashcore.flash_attn_func: f"q k v {flash} q_descale k_descale v_descale attention_chunk dropout_seed qv",
        flashcore.flash_attn_kvpacked_func: f"q kv {flash} dropout_seed",
        flashcore.flash_attn_qkvpacked_func: f"qkv {flash} dropout_seed",
        flashcore.scaled_dot_product_attention: "query key value attn_mask dropout_p is_causal scale enable_gqa dropout_seed",
    }
    for function, names in expected.items():
        assert list(inspect.signature(function).parameters) == names.split(), function.__name__


def test_what_is_missing_is_said():
    q = normal(1, 8, 2, 16)
    with raises(ValueError, "slopes must be float32, dense, 2"):
        flashcore.flash_attn_func(q, q, q, alibi_slopes=np.ones(3))
    with raises(ValueError, "enable_gqa"):
        flashcore.scaled_dot_product_attention(q, q[:, :4], q[:, :4])
    with raises(ValueError, "attn_mask or is_causal"):
        flashcore.scaled_dot_product_attention(q, q, q, attn_mask=np.ones((2, 2), bool), is_causal=True)
    with raises(ValueError, "qkv is .* batch x sequence x 3 x heads x dim"):
        flashcore.flash_attn_qkvpacked_func(q)
    assert NUMPY.is_mine(flashcore.flash_attn_func(q, q, q, deterministic=True))


X = normal(2, 3, 8, 2, 16)
flash, sdpa = flashcore.flash_attn_func, flashcore.scaled_dot_product_attention

MISTAKES = {
    "dimensions": (lambda: flash(X[0, 0], X[0], X[0]), ValueError, "q has 3.*batch, sequence, heads, dim$"),
    "more": (lambda: flash(X[0], X, X[0]), ValueError, "k has 5.*batch, sequence, heads, dim$"),
    "keys": (
        lambda: flash(X[0], X[0], X[0][:, :5]),
        ValueError,
        r"v has sequence 5 but 8 is needed.*\(k 3x8x2x16, v 3x5x2x16\); pass tensors as batch x sequence x heads x dim",
    ),
    "no heads": (lambda: flash(*[X[0][:, :, :0]] * 3), ValueError, "q is 3x8x0x16: heads and dim"),
    "window": (lambda: flash(*[X[0]] * 3, window_size=3), TypeError, "window_size is 3; pass a pair"),
    "fraction": (lambda: flash(*[X[0]] * 3, window_size=(0.5, 0)), TypeError, "window_size is 0.5"),
    "endless": (lambda: flash(*[X[0]] * 3, window_size=(2**40, 0)), ValueError, "window_size is 109"),
    "no tensor": (lambda: flashcore.flash_attn_kvpacked_func(X[0], [1]), TypeError, "kv is a list, which does not"),
    "no query": (lambda: sdpa([1], X, X), TypeError, "query is a list, which does"),
    "no key": (lambda: sdpa(X, [1], X), TypeError, "key is a list, which does not"),
    "no mask": (lambda: sdpa(*[X] * 3, [[1]]), TypeError, "attn_mask is a list"),
    "a vector": (lambda: sdpa(*[X[0, 0, 0, 0]] * 3), ValueError, "2 dimensions or more"),
    "fewer": (lambda: sdpa(X, X[0], X), ValueError, "key is .* same number of dimen"),
    "fewer than four": (lambda: sdpa(X[0], X[0, 0, 0], X[0]), ValueError, "key is .* same number of dimen"),
    "batch": (lambda: sdpa(X, X.swapaxes(0, 1), X), ValueError, "key is .*expand it"),
    "mask": (lambda: sdpa(*[X[0, 0]] * 3, X[0] > 0), ValueError, "no more dimensions"),
    "negative scale": (lambda: sdpa(X, X, X, scale=-1.0), ValueError, "scale -1 must be"),
}


@cases(name=list(MISTAKES))
def test_mistakes_are_told_in_the_words_of_the_function(name):
    call, kind, words = MISTAKES[name]
    with raises(kind, words):
        call()


def test_flash_attention_gives_the_log_sum_exp():
    q, k = normal(2, 9, 4, 16), normal(2, 20, 2, 16)
    out, lse, probabilities = flashcore.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    turned = [x.swapaxes(1, 2) for x in (q, k, k)]
    expected, expected_lse = reference(*turned, band_mask(9, 20, right=0))
    check_close(out.swapaxes(1, 2), expected, "float32")
    check_lse(lse, expected_lse)
    assert probabilities is None
    offsets = [0, 9]
    packed = (q[0], k[0], k[0], offsets, [0, 20], 9, 20)
    one, one_lse, _ = flashcore.flash_attn_varlen_func(*packed, causal=True, return_attn_probs=True)
    np.testing.assert_array_equal(one, out[0])
    np.testing.assert_array_equal(one_lse, lse[0])
