"""Keys in pages: right values for every size and order of pages, whatever lies where no key is."""

from __future__ import annotations

import flashcore
import numpy as np
from harness import ALL, TORCH, TORCH_CUDA, band_mask, cases, check_close, check_lse, normal, raises, reference

GARBAGE = (-1, 2**31 - 1, -(2**31))


def kind_of(framework):
    return "float16" if framework.device == "cuda" else "float32"


class Cache:
    """Keys and values of sequences in pages of a pool, in an order of chance; everything else is NaN."""

    def __init__(self, framework, lengths, size, heads=2, dim=64, dtype=None, seed=3):
        rng = np.random.default_rng(seed)
        needed = [-(-max(n, 0) // size) for n in lengths]
        pages, columns = sum(needed) + 2, max(needed) + 1
        free = iter(rng.permutation(pages))
        dtype = dtype or kind_of(framework)
        self.pools = [np.full((pages, size, heads, dim), np.nan, "float32") for _ in range(2)]
        table = np.array([[GARBAGE[n % 3] for n in range(columns)] for _ in lengths]).reshape(len(lengths), columns)
        self.keys = []
        for row, (length, count) in enumerate(zip(lengths, needed)):
            table[row, :count] = [next(free) for _ in range(count)]
            rows = normal(2, max(length, 0), heads, dim, seed=seed + row)
            rows = framework.read(framework.make(rows, dtype)).astype("float32")
            for key in range(max(length, 0)):
                for pool, values in zip(self.pools, rows):
                    pool[table[row, key // size], key % size] = values[key]
            self.keys.append(rows)
        self.k, self.v = (framework.make(pool, dtype) for pool in self.pools)
        self.table = framework.numbers(table, "int32")
        self.lengths = framework.numbers(lengths, "int32")

    def expected(self, queries, **mask):
        """Attention of each sequence's queries (sequence x heads x dim) over its own keys, with the log-sum-exp."""
        outs, lses = [], []
        for q, (k, v) in zip(queries, self.keys):
            if not len(q) or not len(k):
                outs.append(np.zeros(q.shape))
                lses.append(np.full(q.shape[:2][::-1], -np.inf))
                continue
            seen = band_mask(len(q), len(k), **mask) if mask else None
            out, lse = reference(*(x.swapaxes(0, 1)[None].astype("float64") for x in (q, k, v)), seen)
            outs.append(out[0].swapaxes(0, 1))
            lses.append(lse[0])
        return outs, lses


def queries_of(framework, lengths, heads=4, dim=64):
    """Queries of each sequence as the framework rounds them, and all of them packed."""
    packed = framework.make(normal(sum(lengths), heads, dim, seed=9), kind_of(framework))
    rows = framework.read(packed)
    ends = np.cumsum([0, *lengths])
    return [rows[a:b] for a, b in zip(ends, ends[1:])], packed, framework.numbers(ends, "int32")


@cases(framework=ALL, size=[1, 3, 16, 64])
def test_decode_over_pages(framework, size):
    framework.need()
    lengths = [70, 1, 0, 33]
    cache = Cache(framework, lengths, size)
    q = framework.make(normal(4, 1, 4, 64), kind_of(framework))
    outs, lses = cache.expected(framework.read(q), right=0)
    values = {"key_lengths": cache.lengths, "page_table": cache.table}
    got, lse = flashcore.attention(q, cache.k, cache.v, causal=True, layout="bshd", return_lse=True, **values)
    check_close(framework.read(got), np.stack(outs), kind_of(framework))
    check_lse(framework.read(lse), np.stack(lses))
    turned = [framework.transpose(x) for x in (q, cache.k, cache.v)]
    got = flashcore.attention(*turned, causal=True, **values)
    check_close(framework.read(framework.transpose(got)), np.stack(outs), kind_of(framework))
    got = flashcore.flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=cache.lengths, block_table=cache.table, causal=True
    )
    check_close(framework.read(got), np.stack(outs), kind_of(framework))


@cases(framework=ALL, size=[1, 16, 128], mask=[{}, {"right": 0}, {"left": 9, "right": 0}])
def test_mixed_batches_of_packed_queries(framework, size, mask):
    framework.need()
    queries, lengths = [1, 40, 0, 7, 1], [130, 40, 20, 64, 0]
    cache = Cache(framework, lengths, size)
    rows, q, offsets = queries_of(framework, queries)
    outs, lses = cache.expected(rows, **mask)
    options = {"causal": "right" in mask, "window": (mask["left"], 0) if "left" in mask else None}
    got, lse = flashcore.packed_attention(
        q, cache.k, cache.v, offsets, key_lengths=cache.lengths, page_table=cache.table, return_lse=True, **options
    )
    check_close(framework.read(got), np.concatenate(outs), kind_of(framework))
    check_lse(framework.read(lse), np.concatenate(lses, axis=1))
    window = (mask.get("left", -1), -1)
    asked = {"causal": options["causal"], "window_size": window}
    got = flashcore.flash_attn_varlen_func(
        q, cache.k, cache.v, offsets, None, 40, 200, block_table=cache.table, seqused_k=cache.lengths, **asked
    )
    check_close(framework.read(got), np.concatenate(outs), kind_of(framework))
    got = flashcore.flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=cache.lengths, page_table=cache.table, cu_seqlens_q=offsets,
        max_seqlen_q=40, **asked,
    )
    check_close(framework.read(got), np.concatenate(outs), kind_of(framework))


@cases(framework=ALL)
def test_lengths_below_zero_are_empty(framework):
    framework.need()
    cache = Cache(framework, [30, -1, 0], 16)
    q = framework.make(normal(3, 2, 4, 64), kind_of(framework))
    got, lse = flashcore.attention(
        q, cache.k, cache.v, layout="bshd", key_lengths=cache.lengths, page_table=cache.table, return_lse=True
    )
    assert not framework.read(got)[1:].any()
    assert np.isneginf(framework.read(lse)[1:]).all()
    outs, _ = cache.expected(framework.read(q))
    check_close(framework.read(got)[:1], outs[0][None], kind_of(framework))


@cases(framework=[TORCH, TORCH_CUDA])
def test_strides_of_the_engines(framework):
    """vLLM keeps a token's keys and values side by side, or heads before tokens; tables are slices of larger ones."""
    framework.need()
    import torch

    cache = Cache(framework, [70, 5], 16)
    q = framework.make(normal(2, 1, 4, 64), kind_of(framework))
    outs, _ = cache.expected(framework.read(q), right=0)
    both = torch.cat([cache.k, cache.v], -1)
    heads_first = torch.stack([cache.k, cache.v]).transpose(2, 3).contiguous().transpose(2, 3)
    wide = torch.full((2, 50), -7, dtype=torch.int32, device=cache.table.device)
    wide[:, : cache.table.shape[1]] = cache.table
    for k, v in (both.split(64, -1), heads_first.unbind(0)):
        got = flashcore.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=cache.lengths, block_table=wide[:, : cache.table.shape[1]], causal=True
        )
        check_close(framework.read(got), np.stack(outs), kind_of(framework))


@cases(framework=ALL)
def test_padded_caches(framework):
    """Entries of a cache without pages: used lengths, one length for all, and entries picked by number."""
    framework.need()
    dtype = kind_of(framework)
    k, v = (framework.make(normal(5, 40, 2, 64, seed=seed), dtype) for seed in (1, 2))
    q = framework.make(normal(3, 2, 4, 64), dtype)
    rows, keys, values = (framework.read(x) for x in (q, k, v))
    for picks, lengths in (([0, 1, 2], [40, 3, 17]), ([4, 0, 4], [9, 9, 9])):
        expected = np.zeros(rows.shape)
        for n, (pick, length) in enumerate(zip(picks, lengths)):
            one = (rows[n], keys[pick, :length], values[pick, :length])
            out, _ = reference(*(x.swapaxes(0, 1)[None] for x in one), band_mask(2, length, right=0))
            expected[n] = out[0].swapaxes(0, 1)
        if picks == [0, 1, 2]:
            got = flashcore.flash_attn_with_kvcache(q, k[:3], v[:3], cache_seqlens=framework.numbers(lengths, "int32"), causal=True)
        else:
            got = flashcore.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=9, cache_batch_idx=framework.numbers(picks, "int32"), causal=True
            )
        check_close(framework.read(got), expected, dtype)


def test_graph_stays_right_while_lengths_and_tables_change():
    TORCH_CUDA.need()
    import torch

    size, pages, batch, longest = 16, 64, 4, 256
    k, v = (torch.tensor(normal(pages, size, 2, 64, seed=seed), device="cuda").half() for seed in (1, 2))
    q = torch.tensor(normal(batch, 1, 4, 64), device="cuda").half()
    table = torch.zeros((batch, longest // size), dtype=torch.int32, device="cuda")
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")

    def step():
        return flashcore.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, causal=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    rng = np.random.default_rng(5)
    for _ in range(200):
        now = rng.integers(-1, longest + 1, batch)
        numbers = np.stack([rng.permutation(pages)[: longest // size] for _ in range(batch)])
        for row, length in zip(numbers, now):
            row[-(-max(length, 0) // size) :] = rng.choice([-1, 2**31 - 1])
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        table.copy_(torch.tensor(numbers, dtype=torch.int32))
        graph.replay()
        for n, length in enumerate(now):
            if length <= 0:
                assert not out[n].any()
                continue
            rows = torch.tensor(numbers[n][: -(-length // size)], device="cuda")
            one = [x[rows].reshape(-1, 2, 64)[:length].transpose(0, 1).float().repeat_interleave(2, 0) for x in (k, v)]
            weights = (q[n].transpose(0, 1).float() @ one[0].transpose(1, 2) / 8).softmax(-1)
            assert (out[n].float() - (weights @ one[1]).transpose(0, 1)).abs().max() < 4e-3


def test_mistakes_are_told():
    q, pages = np.ones((2, 1, 4, 8), "float32"), np.ones((6, 16, 2, 8), "float32")
    table, lengths = np.zeros((2, 3), "int32"), [5, 48]
    call = lambda q=q, k=pages, **values: flashcore.attention(q, k, k, layout="bshd", **values)
    call(page_table=table, key_lengths=lengths)
    with raises(ValueError, "need key_lengths"):
        call(page_table=table)
    with raises(ValueError, "1 rows|3 rows|holds 9 numbers"):
        call(page_table=np.zeros((3, 3), "int32"), key_lengths=lengths)
    with raises(ValueError, "which has 48"):
        call(page_table=table, key_lengths=[5, 49])
    with raises(ValueError, "keys in page 6"):
        call(page_table=table + 6, key_lengths=lengths)
    with raises(TypeError, "page_table is float"):
        call(page_table=table.astype("float32"), key_lengths=lengths)
    with raises(ValueError, "sequences x pages"):
        call(page_table=table[0], key_lengths=lengths)
    with raises(ValueError, "k has 3 dimensions but with page_table 4"):
        call(k=pages[0], page_table=table, key_lengths=lengths)
    with raises(ValueError, "key_mask"):
        call(page_table=table, key_mask=np.ones((2, 48), bool))
    packed = np.ones((3, 4, 8), "float32")
    with raises(ValueError, "pass key_offsets, or page_table"):
        flashcore.packed_attention(packed, pages, pages, [0, 1, 3], page_table=table)


def test_gradients_through_pages_are_refused():
    TORCH.need()
    import torch

    q = torch.ones((2, 1, 4, 8), requires_grad=True)
    pages = torch.ones((6, 16, 2, 8))
    values = {"key_lengths": torch.tensor([5, 9]), "page_table": torch.zeros((2, 3), dtype=torch.int32)}
    with raises(NotImplementedError, "keys in pages have no gradients"):
        flashcore.attention(q, pages, pages, layout="bshd", **values)
    with torch.no_grad():
        assert flashcore.attention(q, pages, pages, layout="bshd", **values).shape == q.shape


@cases(framework=ALL, size=[16, 64])
def test_a_row_has_its_bits_in_every_batch(framework, size):
    framework.need()
    lengths = [700, 3, 1300, 911]
    cache = Cache(framework, lengths, size)
    rows = framework.make(normal(4, 1, 4, 64, seed=9), kind_of(framework))

    def run(at, invariant):
        table, used = cache.table[at], cache.lengths[at]
        how = {"causal": True, "layout": "bshd", "batch_invariant": invariant}
        return framework.read(flashcore.attention(rows[at], cache.k, cache.v, page_table=table, key_lengths=used, **how))

    together = run(slice(0, 4), True)
    for n in range(4):
        assert (run(slice(n, n + 1), True)[0] == together[n]).all()
    expected, _ = cache.expected(framework.read(rows))
    check_close(together, np.stack(expected), kind_of(framework))
    check_close(run(slice(0, 4), False), np.stack(expected), kind_of(framework))


@cases(framework=ALL, size=[16, 64])
def test_a_prompt_has_its_bits_in_chunks(framework, size):
    framework.need()
    cache = Cache(framework, [700], size)
    rows = framework.make(normal(1, 700, 4, 64, seed=9), kind_of(framework))

    def run(start, end):
        values = {"page_table": cache.table, "key_lengths": cache.lengths - 700 + end}
        how = {"causal": True, "layout": "bshd", "batch_invariant": True}
        return framework.read(flashcore.attention(rows[:, start:end], cache.k, cache.v, **values, **how))

    whole = run(0, 700)
    for start, end in [(0, 200), (200, 333), (333, 700)]:
        assert (run(start, end) == whole[:, start:end]).all()
