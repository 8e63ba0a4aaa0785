"""Lengths, offsets and sinks where the tensors are: right values, whatever is in the tensor when the kernel runs."""

from __future__ import annotations

import flashcore
import numpy as np
from harness import ALL, Skip, band_mask, cases, check_close, check_lse, normal, raises, reference


def draw(*shape, seed=0):
    return normal(*shape, seed=seed)


def causal_reference(q, k, v, causal):
    """Attention of one sequence, batch x heads x sequence x dim."""
    mask = band_mask(q.shape[2], k.shape[2], right=0) if causal else None
    return reference(q, k, v, mask)[0]


def kind_of(framework):
    return "float16" if framework.device == "cuda" else "float32"


def used(q, k, v, lengths_q, lengths_k, causal):
    """Every batch entry for itself; rows that are not used are zeros."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    for entry, (queries, keys) in enumerate(zip(lengths_q, lengths_k)):
        if queries and keys:
            one = (q[entry : entry + 1, :, :queries], k[entry : entry + 1, :, :keys], v[entry : entry + 1, :, :keys])
            out[entry : entry + 1, :, :queries] = causal_reference(*one, causal)
    return out


@cases(framework=ALL, index=["int32", "int64"], causal=[False, True])
def test_lengths_are_arrays_of_the_framework(framework, index, causal):
    framework.need()
    dtype = kind_of(framework)
    q, k, v = draw(3, 4, 20, 64), draw(3, 2, 70, 64), draw(3, 2, 70, 64)
    tensors = [framework.make(x, dtype) for x in (q, k, v)]
    q, k, v = (framework.read(x) for x in tensors)
    lengths_q, lengths_k = [20, 7, 0], [70, 33, 1]
    arrays = [framework.numbers(x, index) for x in (lengths_q, lengths_k)]
    got = flashcore.attention(*tensors, causal=causal, query_lengths=arrays[0], key_lengths=arrays[1])
    check_close(framework.read(got), used(q, k, v, lengths_q, lengths_k, causal), dtype)
    got = flashcore.attention(*tensors, causal=causal, key_lengths=arrays[1])
    check_close(framework.read(got), used(q, k, v, [20] * 3, lengths_k, causal), dtype)


@cases(framework=ALL, index=["int32", "int64"])
def test_packed_sequences_equal_single_ones(framework, index):
    framework.need()
    dtype = kind_of(framework)
    lengths_q, lengths_k = [5, 0, 70, 1], [9, 3, 40, 130]
    offsets = [np.cumsum([0, *lengths]) for lengths in (lengths_q, lengths_k)]
    q, k, v = (draw(sum(n), heads, 64) for n, heads in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2)))
    tensors = [framework.make(x, dtype) for x in (q, k, v)]
    q, k, v = (framework.read(x) for x in tensors)
    expected = np.zeros_like(q)
    for (a, b), (c, d) in zip(zip(offsets[0], offsets[0][1:]), zip(offsets[1], offsets[1][1:])):
        if b > a and d > c:
            one = (x.swapaxes(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
            expected[a:b] = causal_reference(*one, True)[0].swapaxes(0, 1)
    arrays = [framework.numbers(x.tolist(), index) for x in offsets]
    longest = {"longest_query": 70, "longest_key": 130}
    got, lse = flashcore.packed_attention(*tensors, *arrays, causal=True, return_lse=True, **longest)
    check_close(framework.read(got), expected, dtype)
    assert tuple(lse.shape) == (4, len(q))
    got = flashcore.flash_attn_varlen_func(*tensors, *arrays, 70, 130, causal=True)
    check_close(framework.read(got), expected, dtype)
    got = flashcore.packed_attention(*tensors, *(x.tolist() for x in offsets), causal=True)
    check_close(framework.read(got), expected, dtype)


@cases(framework=ALL, dtype=["float32", "float16", "bfloat16"])
def test_sinks_are_arrays_of_any_float(framework, dtype):
    framework.need()
    if dtype not in framework.dtypes and framework.name == "cupy":
        raise Skip("CuPy has no such type")
    tensors = [framework.make(draw(1, 2, 9, 32, seed=seed), kind_of(framework)) for seed in range(3)]
    sinks = np.array([0.5, -1.0], "float32")
    expected = framework.read(flashcore.attention(*tensors, sinks=sinks.tolist()))
    got = framework.read(flashcore.attention(*tensors, sinks=framework.make(sinks, dtype)))
    np.testing.assert_array_equal(got, expected)


@cases(framework=ALL)
def test_merged_parts_equal_the_whole(framework):
    framework.need()
    dtype = kind_of(framework)
    tensors = [framework.make(draw(2, 2, n, 64), dtype) for n in (5, 60, 60)]
    whole, lse = flashcore.attention(*tensors, return_lse=True)
    q, k, v = tensors
    cuts = [slice(0, 20), slice(20, 21), slice(21, 60)]
    parts = [flashcore.attention(q, k[:, :, cut], v[:, :, cut], return_lse=True) for cut in cuts]
    out, merged = flashcore.merge([part[0] for part in parts], [part[1] for part in parts], return_lse=True)
    check_close(framework.read(out), framework.read(whole), dtype)
    check_lse(framework.read(merged), framework.read(lse))


@cases(framework=[one for one in ALL if one.module != "jax"])
def test_results_in_float32_are_not_rounded(framework):
    framework.need()
    q, k, v = (framework.make(draw(1, 2, n, 64, seed=n), "float16") for n in (7, 90, 90))
    rounded = framework.read(flashcore.attention(q, k, v))
    out = framework.make(np.zeros((1, 2, 7, 64)), "float32")
    got = framework.read(flashcore.attention(q, k, v, out=out))
    exact = reference(*(framework.read(x) for x in (q, k, v)))[0]
    assert np.abs(got - exact).max() <= np.abs(rounded - exact).max() + 1e-6
    check_close(got, rounded, "float16")
    wrong = framework.make(np.zeros((1, 2, 7, 64)), "float16")
    with raises(TypeError, "the output is f16 but q is f32; give it q's type or f32"):
        flashcore.attention(*(framework.make(framework.read(x), "float32") for x in (q, k, v)), out=wrong)


@cases(framework=[one for one in ALL if one.module != "jax"], causal=[False, True])
def test_accumulated_parts_equal_the_whole(framework, causal):
    framework.need()
    dtype = kind_of(framework)
    q, k, v = (framework.make(draw(2, 4, n, 64, seed=n), dtype) for n in (33, 150, 150))
    whole, whole_lse = flashcore.attention(q, k, v, causal=causal, return_lse=True)
    out = framework.make(np.full((2, 4, 33, 64), np.nan), "float32")
    lse = framework.make(np.full((2, 4, 33), -np.inf), "float32")
    cuts = [slice(0, 64), slice(64, 65), slice(65, 150)]
    for cut in cuts[:-1]:
        flashcore.accumulate(q, k[:, :, cut], v[:, :, cut], out, lse)
    # The diagonal lies within the last part: its last query stands at its last key.
    flashcore.accumulate(q, k[:, :, cuts[-1]], v[:, :, cuts[-1]], out, lse, causal=causal)
    check_close(framework.read(out), framework.read(whole), dtype)
    check_lse(framework.read(lse), framework.read(whole_lse))


def test_many_parts_are_stacked():
    parts, lses = draw(40, 1, 2, 3, 8), draw(40, 1, 2, 3)
    weights = np.exp(lses.astype("float64"))
    expected = (parts * weights[..., None]).sum(0) / weights.sum(0)[..., None]
    np.testing.assert_allclose(flashcore.merge(parts, lses), expected, atol=1e-5)
    with raises(ValueError, "1 to 16"):
        flashcore.merge([x.copy() for x in parts], [x.copy() for x in lses])


def test_wrong_numbers_are_told():
    q = np.ones((2, 2, 8, 8), "float32")
    packed = np.ones((8, 2, 8), "float32")
    with raises(TypeError, "key_lengths are float32.*int32"):
        flashcore.attention(q, q, q, key_lengths=np.ones(2, "float32"))
    with raises(ValueError, "key_lengths has 3 numbers but a batch of 2"):
        flashcore.attention(q, q, q, key_lengths=[1, 2, 3])
    with raises(ValueError, "batch entry 1 uses 9 rows of q"):
        flashcore.attention(q, q, q, query_lengths=[1, 9])
    with raises(ValueError, r"query_offsets\[1\] is wrong"):
        flashcore.packed_attention(packed, packed, packed, [0, 9], [0, 8])
    with raises(ValueError, "one dimension"):
        flashcore.attention(q, q, q, key_lengths=np.ones((2, 2), "int32"))


def cuda_torch():
    try:
        import torch
    except ImportError:
        raise Skip("torch is not installed") from None
    if not torch.cuda.is_available():
        raise Skip("torch has no GPU")
    return torch


def _serving_step(torch, kind, index):
    """Tensors, the numbers that change from step to step, the call, and what it should give."""
    g = torch.Generator("cuda").manual_seed(7)
    make = lambda *shape: torch.randn(shape, generator=g, device="cuda", dtype=torch.bfloat16)
    batch, heads, kv, keys, dim = 6, 8, 2, 300, 128
    if kind == "packed":
        q, k, v = make(batch * 8, heads, dim), make(batch * keys, kv, dim), make(batch * keys, kv, dim)
        numbers = [torch.zeros(batch + 1, dtype=index, device="cuda") for _ in range(2)]
        call = lambda: flashcore.flash_attn_varlen_func(q, k, v, *numbers, 8, keys, causal=True)
    else:
        queries = 1 if kind == "keys" else 8
        q, k, v = make(batch, heads, queries, dim), make(batch, kv, keys, dim), make(batch, kv, keys, dim)
        numbers = [torch.zeros(batch, dtype=index, device="cuda") for _ in range(1 if kind == "keys" else 2)]
        lengths = {"key_lengths": numbers[-1]} | ({"query_lengths": numbers[0]} if kind == "both" else {})
        call = lambda: flashcore.attention(q, k, v, causal=True, **lengths)
    return (q, k, v), numbers, call


def _draw(torch, kind, numbers, step):
    """New numbers on the host, and on the device where the call reads them."""
    rng = np.random.default_rng(step)
    batch = len(numbers[0]) - (kind == "packed")
    keys = rng.integers(0, 301, batch)
    queries = rng.integers(0, 9, batch) if kind != "keys" else np.ones(batch, int)
    host = [queries, keys] if kind != "keys" else [keys]
    for to, lengths in zip(numbers, host):
        values = np.cumsum([0, *lengths]) if kind == "packed" else lengths
        to.copy_(torch.tensor(values), non_blocking=True)
    return queries, keys


def _expected(torch, kind, tensors, queries, keys):
    """f32 attention by torch over each sequence alone."""
    q, k, v = (x.float() for x in tensors)
    group = 4
    outs = []
    starts_q, starts_k = np.cumsum([0, *queries]), np.cumsum([0, *keys])
    for n, (a, b) in enumerate(zip(queries, keys)):
        if kind == "packed":
            rows, cols = slice(starts_q[n], starts_q[n] + a), slice(starts_k[n], starts_k[n] + b)
            one = [x[part].transpose(0, 1) for x, part in ((q, rows), (k, cols), (v, cols))]
        else:
            one = [q[n, :, :a], k[n, :, :b], v[n, :, :b]]
        scores = one[0] @ one[1].repeat_interleave(group, 0).transpose(1, 2) / 128**0.5
        seen = torch.ones(a, b, device="cuda", dtype=torch.bool).tril(int(b) - int(a))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
        out = weights @ one[2].repeat_interleave(group, 0)
        outs.append(out.transpose(0, 1) if kind == "packed" else out)
    return outs


def _check(torch, kind, got, outs, queries):
    starts = np.cumsum([0, *queries])
    for n, expected in enumerate(outs):
        rows = got[starts[n] : starts[n + 1]] if kind == "packed" else got[n, :, : queries[n]]
        assert torch.allclose(rows.float(), expected, atol=3e-2, rtol=3e-2), f"sequence {n}"
        if kind == "both":
            assert not got[n, :, queries[n] :].any(), "rows that are not used are zeros"


@cases(kind=["keys", "both", "packed"], index=["int32", "int64"])
def test_a_thousand_steps_with_new_lengths(kind, index):
    """Eager and by one captured graph, right each time, without waiting."""
    torch = cuda_torch()
    tensors, numbers, call = _serving_step(torch, kind, getattr(torch, index))
    _draw(torch, kind, numbers, 0)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call()
    for step in range(1000):
        queries, keys = _draw(torch, kind, numbers, step)
        held = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        eager = call()
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_allocated() - held <= eager.untyped_storage().nbytes() + 512, "only the output is new"
        outs = _expected(torch, kind, tensors, queries, keys)
        _check(torch, kind, eager, outs, queries)
        _check(torch, kind, replayed, outs, queries)
        if kind != "packed":
            assert torch.equal(eager, replayed)


def test_lengths_out_of_range_are_brought_into_it():
    torch = cuda_torch()
    q = torch.randn(3, 2, 8, 64, device="cuda", dtype=torch.float16)
    lengths = torch.tensor([-1, 2**31 - 1, 5], device="cuda")
    got = flashcore.attention(q, q, q, key_lengths=lengths)
    assert not got[0].any()
    torch.testing.assert_close(got[1:2], flashcore.attention(q[1:2], q[1:2], q[1:2]))
