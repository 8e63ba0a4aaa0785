"""Parts of sequences that see each other: chunks, rows that are not used, packed keys on their way into a cache."""

import flashcore
import numpy as np
from harness import NUMPY, TORCH, TORCH_CUDA, band_mask, cases, check_close, check_lse, need_torch, normal, raises, reference


def chunk_mask(queries, keys, chunk, causal, window):
    """Which keys each query sees in its own chunk; chunks are counted from the first key."""
    own = (np.arange(queries) + keys - queries)[:, None] // chunk == np.arange(keys)[None] // chunk
    left, right = (None if side < 0 else side for side in window)
    return own & band_mask(queries, keys, left, 0 if causal else right)


SHAPES = {"equal": (33, 33, 8), "fewer queries": (9, 40, 7), "more queries": (40, 9, 4), "one chunk": (20, 30, 100), "single": (5, 7, 1)}


@cases(framework=[NUMPY, TORCH, TORCH_CUDA], shape=list(SHAPES), causal=[False, True])
def test_chunks_of_a_batch(framework, shape, causal):
    framework.need()
    queries, keys, chunk = SHAPES[shape]
    dtype, window = "float32" if framework.device == "cpu" else "float16", (-1, -1) if causal else (3, 5)
    q, k, v = (framework.make(normal(2, n, h, 16, seed=h), dtype) for n, h in ((queries, 4), (keys, 2), (keys, 2)))
    mask = chunk_mask(queries, keys, chunk, causal, window)
    wanted, sums = reference(*(framework.read(x).swapaxes(1, 2) for x in (q, k, v)), mask=mask)
    options = dict(causal=causal, window_size=window, attention_chunk=chunk)
    out, lse, _ = flashcore.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    check_close(framework.read(out).swapaxes(1, 2), wanted, dtype)
    check_lse(framework.read(lse), sums)


@cases(device=["cpu", "cuda"], chunk=[0, 6])
def test_used_rows_of_packed_sequences(device, chunk):
    """Rows that are not used, NaN among them, reach nothing and become zeros, and so do their gradients."""
    torch = need_torch(device)
    from flashcore.flash_attn import flash_attn_3 as three

    dtype = torch.float32 if device == "cpu" else torch.float16
    offsets_q, offsets_k = [0, 12, 12, 30], [0, 20, 25, 49]
    used_q, used_k = [9, 0, 18], [20, 3, 11]
    make = lambda rows, heads, seed: torch.tensor(normal(rows, heads, 32, seed=seed)).to(device, dtype)
    q, k, v, d_out = make(30, 4, 0), make(49, 2, 1), make(49, 2, 2), make(30, 4, 3)
    for tensor, offsets, used in ((q, offsets_q, used_q), (k, offsets_k, used_k), (v, offsets_k, used_k)):
        for n, rows in enumerate(used):
            tensor[offsets[n] + rows : offsets[n + 1]] = torch.nan
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    whole = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=device)
    out = three.flash_attn_varlen_func(
        q, k, v, whole(offsets_q), whole(offsets_k), 18, 24, whole(used_q), whole(used_k), causal=True, attention_chunk=chunk
    )
    grads = torch.autograd.grad(out, (q, k, v), d_out)
    wanted, zeros = torch.zeros_like(out), [torch.zeros_like(x) for x in (q, k, v)]
    for n, (rows, keys) in enumerate(zip(used_q, used_k)):
        own = slice(offsets_q[n], offsets_q[n] + rows), slice(offsets_k[n], offsets_k[n] + keys)
        alone = [x[at].detach()[None].requires_grad_() for x, at in zip((q, k, v), (own[0], own[1], own[1]))]
        if not rows:
            continue
        part = flashcore.flash_attn_func(*alone, causal=True, attention_chunk=chunk)
        wanted[own[0]] = part[0]
        for into, at, grad in zip(zeros, (own[0], own[1], own[1]), torch.autograd.grad(part, alone, d_out[own[0]][None])):
            into[at] = grad[0]
    close = dict(atol=1e-5 if device == "cpu" else 4e-3, rtol=0)
    torch.testing.assert_close(out, wanted.detach(), **close)
    for got, want in zip(grads, zeros):
        torch.testing.assert_close(got, want, **close)


@cases(device=["cpu", "cuda"], kind=["padded", "pages", "leftpad", "packed"])
def test_chunks_of_a_cache(device, kind):
    torch = need_torch(device)
    dtype = "float32" if device == "cpu" else "float16"
    make = lambda *shape, seed: torch.tensor(normal(*shape, seed=seed)).to(device, getattr(torch, dtype))
    queries, chunk, lengths, left = 5, 8, [29, 3, 16], [3, 0, 9]
    q, k, v = make(3, queries, 4, 32, seed=0), make(3, 32, 2, 32, seed=1), make(3, 32, 2, 32, seed=2)
    whole = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=device)
    options = dict(cache_seqlens=whole(lengths), causal=True, attention_chunk=chunk, return_softmax_lse=True)
    caches, given = [k, v], q
    if kind == "pages":
        order = whole([[7, 0], [3, 5], [1, 6]])
        caches = [torch.zeros(8, 16, 2, 32, device=device, dtype=q.dtype) for _ in range(2)]
        for cache, whole_cache in zip(caches, (k, v)):
            cache[order.long()] = whole_cache.reshape(3, 2, 16, 2, 32)
        options["block_table"] = order
    elif kind == "leftpad":
        options["cache_leftpad"] = whole(left)
    elif kind == "packed":
        given, options["cu_seqlens_q"] = q.flatten(0, 1), whole([0, 5, 10, 15])
    out, lse = flashcore.flash_attn_with_kvcache(given, *caches, **options)
    if kind == "packed":
        out, lse = out.reshape(q.shape), lse.reshape(4, 3, queries).transpose(0, 1)
    for n, end in enumerate(lengths):
        own = slice(left[n] if kind == "leftpad" else 0, end)
        mask = chunk_mask(queries, end - own.start, chunk, True, (-1, -1))
        exact = [x.double().cpu().numpy()[None].swapaxes(1, 2) for x in (q[n], k[n, own], v[n, own])]
        wanted, sums = reference(*exact, mask=mask)
        check_close(out[n : n + 1].double().cpu().numpy().swapaxes(1, 2), wanted, dtype)
        check_lse(lse[n : n + 1].double().cpu().numpy(), sums)


@cases(device=["cpu", "cuda"], rotary=[False, True], causal=[False, True])
def test_packed_keys_are_appended(device, rotary, causal):
    """Packed queries with packed new keys give what each sequence gives by itself."""
    torch = need_torch(device)
    dtype = torch.float32 if device == "cpu" else torch.float16
    make = lambda *shape, seed: torch.tensor(normal(*shape, seed=seed)).to(device, dtype)
    whole = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=device)
    offsets_q, offsets_k, lengths = [0, 4, 4, 10], [0, 2, 3, 9], [7, 0, 12]
    q, k, v = make(10, 4, 32, seed=0), make(9, 2, 32, seed=1), make(9, 2, 32, seed=2)
    caches = [make(3, 24, 2, 32, seed=n) for n in (3, 4)]
    turn = [f(make(24, 8, seed=5)) for f in (torch.cos, torch.sin)] if rotary else [None, None]
    apart = [cache.clone() for cache in caches]
    out = flashcore.flash_attn_with_kvcache(
        q, *caches, k, v, *turn, whole(lengths), causal=causal, cu_seqlens_q=whole(offsets_q), cu_seqlens_k_new=whole(offsets_k),
        max_seqlen_q=6,
    )  # fmt: skip
    for n, length in enumerate(lengths):
        queries, keys = (slice(offsets[n], offsets[n + 1]) for offsets in (offsets_q, offsets_k))
        own = [cache[n : n + 1] for cache in apart]
        alone = flashcore.flash_attn_with_kvcache(q[None, queries], *own, k[None, keys], v[None, keys], *turn, [length], causal=causal)
        torch.testing.assert_close(out[queries], alone[0], atol=1e-5 if device == "cpu" else 4e-3, rtol=0)
    for cache, wanted in zip(caches, apart):
        assert torch.equal(cache, wanted)


@cases(device=["cpu", "cuda"], packed=[False, True], causal=[False, True], bits=[8, 16])
def test_positions_of_their_own(device, packed, causal, bits):
    """With rotary_seqlens keys go behind the cache, and are turned as if they stood elsewhere."""
    torch = need_torch(device)
    from flashcore.flash_attn import flash_attn_3 as three
    from flashcore.flash_attn.layers.rotary import apply_rotary_emb

    make = lambda *shape, seed: torch.tensor(normal(*shape, seed=seed)).to(device, torch.bfloat16)
    whole = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=device)
    q, k, v = make(2, 3, 4, 32, seed=0), make(2, 3, 2, 32, seed=1), make(2, 3, 2, 32, seed=2)
    caches, lengths, positions = [make(2, 16, 2, 32, seed=n) for n in (3, 4)], [7, 0], [11, 5]
    caches = [x.to(torch.float8_e4m3fn) for x in caches] if bits == 8 else caches
    turn, table = [f(make(20, 8, seed=5)) for f in (torch.cos, torch.sin)], whole([[1, 0], [3, 2]])
    apart, given, more = [x.clone() for x in caches], [q, k, v], {}
    pages = [x.view(4, 8, 2, 32) for x in caches]
    if packed:
        given, offsets = [x.flatten(0, 1) for x in given], whole([0, 3, 6])
        more = dict(cu_seqlens_q=offsets, cu_seqlens_k_new=offsets, max_seqlen_q=3)
    more |= dict(page_table=table, rotary_seqlens=whole(positions), causal=causal)
    out = three.flash_attn_with_kvcache(given[0], *pages, *given[1:], None, *turn, whole(lengths), **more)
    for n, (length, position) in enumerate(zip(lengths, positions)):
        at = [part[position : position + 3] for part in turn]
        key = apply_rotary_emb(k[n : n + 1], *at, interleaved=True)
        query = apply_rotary_emb(q[n : n + 1], *(at if causal else [part[:1].expand(3, 8) for part in at]), interleaved=True)
        own = [x.view(2, 2, 8, 2, 32)[n].flip(0).reshape(16, 2, 32) for x in apart]
        for rows, new in zip(own, (key[0], v[n])):
            rows[length : length + 3] = new.to(rows.dtype)
        wanted = flashcore.flash_attn_with_kvcache(query, *(x[None] for x in own), cache_seqlens=[length + 3], causal=causal)
        torch.testing.assert_close(out.view(2, 3, 4, 32)[n], wanted[0], atol=0.02, rtol=0.01)
        for rows, cache in zip(own, caches):
            got = cache.view(2, 2, 8, 2, 32)[n].flip(0).reshape(16, 2, 32)
            torch.testing.assert_close(got.float(), rows.float(), atol=0.02, rtol=0.07 if bits == 8 else 0.01)


def test_entries_of_a_table_are_picked():
    torch = need_torch()
    q, pages = torch.randn(2, 1, 4, 16), torch.randn(6, 8, 2, 16)
    table, picked = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    rest = dict(cache_seqlens=torch.tensor([11, 16], dtype=torch.int32), causal=True)
    out = flashcore.flash_attn_with_kvcache(q, pages, pages, page_table=table, cache_batch_idx=picked, **rest)
    assert torch.equal(out, flashcore.flash_attn_with_kvcache(q, pages, pages, page_table=table[[2, 0]], **rest))


def test_what_does_not_go_with_chunks():
    torch = need_torch()
    q, offsets = torch.randn(8, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
    with raises(NotImplementedError, "do not go with keys in pages"):
        flashcore.flash_attn_varlen_func(
            q, q[None], q[None], offsets, None, 8, 8, block_table=[[0]], seqused_k=[8], attention_chunk=4
        )
    with raises(NotImplementedError, "one per head"):
        flashcore.flash_attn_varlen_func(q, q, q, offsets, offsets, 8, 8, attention_chunk=4, alibi_slopes=torch.rand(1, 2))
    with raises(ValueError, "cu_seqlens_k_new"):
        flashcore.flash_attn_with_kvcache(q, q[None], q[None], q, q, cache_seqlens=[0], cu_seqlens_q=offsets)
