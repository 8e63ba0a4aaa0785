"""New keys and values in a cache: they land where they belong and nowhere else, turned by their positions."""

from __future__ import annotations

import flashcore
import numpy as np
from harness import CUPY, NUMPY, TORCH, TORCH_CUDA, band_mask, cases, check_close, normal, raises, reference

WRITABLE = [NUMPY, TORCH, TORCH_CUDA, CUPY]
BATCH, NEW, HEADS, DIM = 3, 2, 2, 32


def kind_of(framework):
    return "float16" if framework.device == "cuda" else "float32"


def turned(rows, positions, cos, sin, interleaved):
    """Rows (batch x sequence x heads x dim) turned by their positions (batch x sequence), in f64."""
    half = cos.shape[1]
    first, second = (np.arange(half) * 2, np.arange(half) * 2 + 1) if interleaved else (np.arange(half), np.arange(half) + half)
    rows, c, s = rows.astype("float64"), cos[positions][:, :, None], sin[positions][:, :, None]
    out = rows.copy()
    out[..., first] = rows[..., first] * c - rows[..., second] * s
    out[..., second] = rows[..., second] * c + rows[..., first] * s
    return out


class Paged:
    """Caches in pages, of chance; tables that name each page once."""

    def __init__(self, framework, size, columns):
        self.size, pages = size, BATCH * columns + 1
        rng = np.random.default_rng(size)
        dtype = kind_of(framework)
        self.k, self.v = (framework.make(normal(pages, size, HEADS, DIM, seed=seed), dtype) for seed in (4, 5))
        self.numbers = rng.permutation(pages)[: BATCH * columns].reshape(BATCH, columns)
        self.table = framework.numbers(self.numbers, "int32")

    def place(self, sequence, position):
        return self.numbers[sequence, position // self.size], position % self.size


class Padded:
    """Caches with an entry for each sequence."""

    table = None

    def __init__(self, framework, rows):
        dtype = kind_of(framework)
        self.k, self.v = (framework.make(normal(BATCH, rows, HEADS, DIM, seed=seed), dtype) for seed in (4, 5))

    def place(self, sequence, position):
        return sequence, position


def new_rows(framework):
    return [framework.make(normal(BATCH, NEW, HEADS, DIM, seed=seed), kind_of(framework)) for seed in (6, 7)]


@cases(framework=WRITABLE, size=[None, 1, 3, 16])
def test_new_rows_follow_the_old(framework, size):
    framework.need()
    cache = Padded(framework, 24) if size is None else Paged(framework, size, -(-24 // size))
    k, v = new_rows(framework)
    lengths = [5, -1, 23]
    expected = [framework.read(x).copy() for x in (cache.k, cache.v)]
    for sequence, length in enumerate(lengths):
        for row in range(NEW):
            # The second sequence is none, and the last row of the third has no place.
            room = 24 if size is None else cache.numbers.shape[1] * size
            if length >= 0 and length + row < room:
                for to, rows in zip(expected, (k, v)):
                    to[cache.place(sequence, length + row)] = framework.read(rows)[sequence, row]
    numbers = framework.numbers(lengths, "int32")
    assert flashcore.append(k, v, cache.k, cache.v, numbers, page_table=cache.table) is None
    for got, wanted in zip((cache.k, cache.v), expected):
        assert np.array_equal(framework.read(got), wanted)


@cases(framework=WRITABLE)
def test_slots(framework):
    framework.need()
    cache = Paged(framework, 4, 2)
    k, v = (framework.make(normal(7, HEADS, DIM, seed=seed), kind_of(framework)) for seed in (6, 7))
    slots = [9, -1, 0, 27, 13]
    expected = [framework.read(x).copy() for x in (cache.k, cache.v)]
    for row, slot in enumerate(slots):
        if slot >= 0:
            for to, rows in zip(expected, (k, v)):
                to[slot // 4, slot % 4] = framework.read(rows)[row]
    flashcore.reshape_and_cache_flash(k, v, cache.k, cache.v, framework.numbers(slots, "int64"), "auto", None, None)
    for got, wanted in zip((cache.k, cache.v), expected):
        assert np.array_equal(framework.read(got), wanted)


@cases(framework=WRITABLE, interleaved=[True, False], causal=[True, False], size=[None, 16])
def test_attention_over_old_and_new(framework, interleaved, causal, size):
    """`flash_attn_with_kvcache` with new keys: written, turned, seen; the caller's lengths stay as they are."""
    framework.need()
    dtype, positions = kind_of(framework), 40
    cache = Padded(framework, 32) if size is None else Paged(framework, size, 2)
    k, v = new_rows(framework)
    q = framework.make(normal(BATCH, NEW, 4, DIM, seed=8), dtype)
    angles = normal(positions, 8, seed=9)
    cos, sin = (framework.make(f(angles), dtype) for f in (np.cos, np.sin))
    lengths = np.array([5, 0, 30])
    at = lengths[:, None] + np.arange(NEW)
    tables = [framework.read(x).astype("float64") for x in (cos, sin)]
    keys = turned(framework.read(k), at, *tables, interleaved)
    rows = turned(framework.read(q), at if causal else at[:, :1] + np.zeros_like(at), *tables, interleaved)
    old = [framework.read(x).astype("float64") for x in (cache.k, cache.v)]
    numbers = framework.numbers(lengths, "int32")
    got = flashcore.flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, cos, sin, cache_seqlens=numbers, block_table=cache.table, causal=causal,
        rotary_interleaved=interleaved,
    )
    assert list(framework.read(numbers)) == list(lengths)
    for n, length in enumerate(lengths):
        places = [cache.place(n, position) for position in range(length)]
        of = lambda x: np.array([x[place] for place in places]).reshape(length, HEADS, DIM)
        both = [np.concatenate([of(old[0]), keys[n]]), np.concatenate([of(old[1]), framework.read(v)[n]])]
        seen = band_mask(NEW, length + NEW, right=0) if causal else None
        out, _ = reference(*(x.swapaxes(0, 1)[None].astype("float64") for x in (rows[n], *both)), seen)
        check_close(framework.read(got)[n], out[0].swapaxes(0, 1), dtype)
        for row in range(NEW):
            check_close(framework.read(cache.k)[cache.place(n, length + row)], keys[n, row], dtype)


@cases(framework=[NUMPY, TORCH, TORCH_CUDA], size=[None, 8])
def test_padding_on_the_left(framework, size):
    framework.need()
    dtype = kind_of(framework)
    cache = Padded(framework, 32) if size is None else Paged(framework, size, 4)
    q = framework.make(normal(BATCH, 1, 4, DIM, seed=8), dtype)
    lengths, pads = [32, 9, 20], [3, 0, 17]
    got = flashcore.flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=framework.numbers(lengths, "int32"),
        cache_leftpad=framework.numbers(pads, "int32"), block_table=cache.table, causal=True,
    )
    for n, (length, pad) in enumerate(zip(lengths, pads)):
        places = [cache.place(n, position) for position in range(pad, length)]
        both = [np.array([framework.read(x)[place] for place in places]) for x in (cache.k, cache.v)]
        out, _ = reference(*(x.swapaxes(0, 1)[None].astype("float64") for x in (framework.read(q)[n], *both)))
        check_close(framework.read(got)[n], out[0].swapaxes(0, 1), dtype)


@cases(framework=[NUMPY, TORCH, TORCH_CUDA])
def test_entries_that_sequences_pick(framework):
    framework.need()
    dtype = kind_of(framework)
    k_cache, v_cache = (framework.make(normal(5, 16, HEADS, DIM, seed=seed), dtype) for seed in (4, 5))
    before = framework.read(k_cache).copy()
    k, v = new_rows(framework)
    q = framework.make(normal(BATCH, 1, 4, DIM), dtype)
    picks = [4, 1, 2]
    flashcore.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=7, cache_batch_idx=framework.numbers(picks, "int32"), causal=True
    )
    for n, pick in enumerate(picks):
        before[pick, 7 : 7 + NEW] = framework.read(k)[n]
    assert np.array_equal(framework.read(k_cache), before)


def test_mistakes_are_told():
    new, cache = np.ones((2, 1, 2, 8), "float32"), np.zeros((2, 16, 2, 8), "float32")
    other = np.zeros((2, 16, 2, 8), "float32")
    with raises(ValueError, "have 3 entries but 2 are needed: one for each sequence"):
        flashcore.append(new, new, cache, other, [1, 2, 3])
    with raises(ValueError, "shares memory with"):
        flashcore.append(new, new, cache, cache, [1, 2])
    with raises(TypeError, "convert them to one element type"):
        flashcore.append(new.astype("float16"), new, cache, other, [1, 2])
    with raises(ValueError, "rotary must be"):
        flashcore.append(new, new, cache, other, [1, 2], rotary=(np.ones((9, 4), "float32"), np.ones((9, 2), "float32")))
    with raises(ValueError, "convert them to int64"):
        flashcore.reshape_and_cache_flash(new[0], new[0], cache, other, np.zeros(1, "int32"))
    with raises(ValueError, "pass k and v"):
        flashcore.flash_attn_with_kvcache(new, cache, other, rotary_cos=np.ones((9, 4), "float32"), cache_seqlens=3)
    with raises(ValueError, "new keys need v and cache_seqlens"):
        flashcore.flash_attn_with_kvcache(new, cache, other, new, new)
