"""Lengths, padding, and masks that other libraries make."""

import flashcore
import numpy as np
from harness import ALL, NUMPY, band_mask, cases, check_close, check_lse, normal, raises, reference

PADDING = {
    "left": [(0, 24), (5, 24), (23, 24), (24, 24)],
    "right": [(0, 24), (0, 19), (0, 1), (0, 0)],
    "none": [(0, 24)] * 4,
    "inside": [(3, 20), (3, 20), (0, 24), (7, 8)],
}


def keep(padding, keys=24):
    position = np.arange(keys)
    return np.stack([(position >= start) & (position < end) for start, end in PADDING[padding]])


def tensors(framework, queries=24, keys=24, dtype=None):
    framework.need()
    dtype = dtype or framework.dtypes[-1]
    shapes = ((4, 4, queries, 32), (4, 2, keys, 32), (4, 2, keys, 32))
    return dtype, [framework.make(normal(*shape, seed=n), dtype) for n, shape in enumerate(shapes)]


def poison(framework, values, padding):
    """Puts NaN where keys take no part."""
    exact = framework.read(values)
    exact[~np.broadcast_to(keep(padding)[:, None, :, None], exact.shape)] = np.nan
    return exact


@cases(framework=ALL, padding=["left", "right", "none", "inside"], queries=[24, 1])
def test_key_mask(framework, padding, queries):
    dtype, (q, k, v) = tensors(framework, queries)
    expected, expected_lse = reference(*map(framework.read, (q, k, v)), mask=keep(padding)[:, None, None, :])
    k, v = (framework.make(poison(framework, x, padding).astype("float32"), dtype) for x in (k, v))
    mask = keep(padding) if framework.module != "torch" else framework.make(keep(padding), "bool")
    out, lse = flashcore.attention(q, k, v, key_mask=mask, return_lse=True)
    check_close(framework.read(out), expected, dtype)
    check_lse(framework.read(lse), expected_lse)


@cases(framework=ALL, padding=["left", "right", "none"], window=[None, 6])
def test_causal_key_mask(framework, padding, window):
    dtype, (q, k, v) = tensors(framework)
    seen = band_mask(24, 24, window, 0) & keep(padding)[:, None, None, :]
    expected, _ = reference(*map(framework.read, (q, k, v)), mask=seen)
    out = flashcore.attention(q, k, v, causal=True, window=window, key_mask=keep(padding))
    check_close(framework.read(out), expected, dtype)


@cases(framework=ALL)
def test_causal_left_padding_with_fewer_queries(framework):
    dtype, (q, k, v) = tensors(framework, queries=7)
    seen = band_mask(7, 24, None, 0) & keep("left")[:, None, None, :]
    expected, _ = reference(*map(framework.read, (q, k, v)), mask=seen)
    check_close(framework.read(flashcore.attention(q, k, v, causal=True, key_mask=keep("left"))), expected, dtype)


@cases(framework=ALL, causal=[False, True])
def test_key_lengths(framework, causal):
    dtype, (q, k, v) = tensors(framework, queries=3)
    lengths = [24, 10, 3, 0]
    seen = np.stack([np.pad(band_mask(3, n, None, 0 if causal else None), ((0, 0), (0, 24 - n))) for n in lengths])
    expected, _ = reference(*map(framework.read, (q, k, v)), mask=seen[:, None])
    given = np.array(lengths) if framework is NUMPY else lengths
    check_close(framework.read(flashcore.attention(q, k, v, causal=causal, key_lengths=given)), expected, dtype)


WHOLE = {
    "causal": band_mask(24, 24, None, 0)[None, None],
    "causal, fewer queries": band_mask(9, 24, None, 0)[None, None],
    "top left, fewer queries": band_mask(9, 24, None, 0, top_left=True)[None, None],
    "window": band_mask(24, 24, 4, 3)[None, None],
    "causal and left": band_mask(24, 24, None, 0) & keep("left")[:, None, None, :],
    "causal and right": band_mask(24, 24, None, 0) & keep("right")[:, None, None, :],
    "window and left": band_mask(24, 24, 6, 0) & keep("left")[:, None, None, :],
    "padding for every query": np.broadcast_to(keep("left")[:, None, None, :], (4, 1, 24, 24)),
    "all": np.ones((1, 1, 24, 24), bool),
}


@cases(name=list(WHOLE), form=["bool", "float"])
def test_whole_masks(name, form):
    mask = WHOLE[name]
    _, (q, k, v) = tensors(NUMPY, queries=mask.shape[2], dtype="float32")
    given = mask if form == "bool" else np.where(mask, 0.0, -np.inf).astype("float32")
    expected, _ = reference(q, k, v, mask=mask)
    out = flashcore.scaled_dot_product_attention(q, k, v, attn_mask=given, enable_gqa=True)
    check_close(NUMPY.read(out), expected, "float32")


OTHERS = {
    "gaps": (np.arange(24) % 3 > 0)[None, None, None, :],
    "at random": np.random.default_rng(0).random((4, 1, 24, 24)) > 0.4,
    "one for each head": np.random.default_rng(0).random((4, 4, 24, 24)) > 0.4,
    "blocks": np.kron(np.eye(3), np.ones((8, 8))).astype(bool)[None, None],
    "added numbers": np.linspace(0, 1, 24 * 24, dtype="float32").reshape(1, 1, 24, 24),
}


@cases(name=list(OTHERS), framework=ALL)
def test_other_masks_are_added_to_scores(name, framework):
    framework.need()
    mask, dtype = OTHERS[name], "float32" if framework.device == "cpu" else "float16"
    _, (q, k, v) = tensors(framework, dtype=dtype)
    exact = [framework.read(x) for x in (q, k, v)]
    seen = mask if mask.dtype == bool else np.ones_like(mask, bool)
    given = framework.numbers(mask, "bool") if mask.dtype == bool else framework.make(mask, "float32")
    expected, _ = reference(*exact, mask=seen, bias=None if mask.dtype == bool else mask)
    out = flashcore.scaled_dot_product_attention(q, k, v, attn_mask=given, enable_gqa=True)
    check_close(framework.read(out), expected, dtype)


def test_misuse_is_explained():
    _, (q, k, v) = tensors(NUMPY, dtype="float32")
    with raises(ValueError, "key_lengths or key_mask"):
        flashcore.attention(q, k, v, key_lengths=[1, 2, 3, 4], key_mask=keep("left"))
    with raises(ValueError, r"key_mask is \(4, 23\)"):
        flashcore.attention(q, k, v, key_mask=keep("left", 23))
    with raises(ValueError, "key_lengths has 3 numbers but a batch of 4"):
        flashcore.attention(q, k, v, key_lengths=[1, 2, 3])
    with raises(ValueError, "batch entry 1 uses 25 rows of k, which has 24"):
        flashcore.attention(q, k, v, key_lengths=[1, 25, 3, 4])
    with raises(ValueError, "attn_mask has sequence 3 but 24 or 1 is needed"):
        flashcore.scaled_dot_product_attention(q, k, v, np.ones((3, 24), "float32"), enable_gqa=True)


def test_causal_beside_padding_that_is_no_range():
    _, (q, k, v) = tensors(NUMPY, dtype="float32")
    expected, _ = reference(q[:, :, :5], k, v, mask=keep("right")[:, None, None] & band_mask(5, 24, right=0))
    out = flashcore.attention(q[:, :, :5], k, v, causal=True, key_mask=keep("right"))
    check_close(NUMPY.read(out), expected, "float32")


def test_a_mask_is_read_once():
    from flashcore import _masks
    from harness import need_torch

    torch = need_torch()
    q, read, seen = torch.randn(1, 1, 4, 8), _masks._host, []
    whole, keys = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(), torch.ones(1, 4, dtype=torch.bool)
    _masks._host = lambda mask: seen.append(mask) or read(mask)
    try:
        for _ in range(3):
            flashcore.scaled_dot_product_attention(q, q, q, attn_mask=whole)
            flashcore.attention(q, q, q, key_mask=keys)
    finally:
        _masks._host = read
    assert len(seen) == 2, f"two masks were read {len(seen)} times"


def test_a_mask_is_read_again_when_it_changes():
    from harness import need_torch

    torch = need_torch()
    q = torch.randn(1, 1, 4, 8)
    mask = torch.ones(1, 4, dtype=torch.bool)
    whole = flashcore.attention(q, q, q, key_mask=mask)
    mask[0, 0] = False
    assert not torch.equal(flashcore.attention(q, q, q, key_mask=mask), whole)
