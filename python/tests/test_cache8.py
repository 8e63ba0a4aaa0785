"""Queries of 16 bits over keys and values of 8, by torch: pages, padded caches, packed sequences, appends."""

import flashcore
from harness import cases, need_torch, raises

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
KEYS = (40, 0, 17)


def device_of(torch):
    return "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0) else "cpu"


def cache(torch, kind, device):
    """A pool of pages, its scales, its table, and the keys and values of each sequence as they are meant."""
    torch.manual_seed(3)
    pool = torch.randn(2, 8, PAGE, KV_HEADS, DIM, device=device)
    scales = {
        "number": torch.full((1,), 0.011, device=device).expand(len(KEYS), KV_HEADS),
        "heads": torch.tensor([0.01, 0.02], device=device).expand(len(KEYS), KV_HEADS),
        "sequences": torch.linspace(0.01, 0.03, len(KEYS) * KV_HEADS, device=device).view(len(KEYS), KV_HEADS),
    }[kind]
    narrow = (pool / 0.0125).to(torch.float8_e4m3fn)
    table = torch.tensor([[5, 2, 7], [-1, -1, -1], [0, 3, -1]], dtype=torch.int32, device=device)
    own = []
    for n, keys in enumerate(KEYS):
        pages = table[n, : -(-keys // PAGE)].long()
        own.append([x.float()[pages].flatten(0, 1)[:keys] * scales[n][:, None] for x in narrow])
    return narrow, scales, table, own


def attend(torch, q, own):
    """One sequence, plainly: queries x heads x dim, the last at the last key."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in own)
    if not len(k):
        return torch.zeros_like(q, dtype=torch.float32)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) / DIM**0.5
    past = torch.arange(len(k), device=q.device)[None] - (torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(past > 0, -torch.inf).softmax(-1), v)


@cases(kind=["number", "heads", "sequences"], dtype=["float16", "bfloat16"])
def test_decode_over_pages(kind, dtype):
    torch = need_torch()
    device = device_of(torch)
    narrow, scales, table, own = cache(torch, kind, device)
    q = torch.randn(len(KEYS), 1, HEADS, DIM, device=device).to(getattr(torch, dtype))
    lengths = torch.tensor(KEYS, dtype=torch.int32, device=device)
    out = flashcore.flash_attn_with_kvcache(
        q, *narrow, cache_seqlens=lengths, block_table=table, causal=True, k_descale=scales, v_descale=scales
    )
    wanted = torch.stack([attend(torch, rows, one) for rows, one in zip(q, own)])
    assert out.dtype == q.dtype
    torch.testing.assert_close(out.float(), wanted, atol=0.02, rtol=0.01)


@cases(kind=["number", "sequences"])
def test_prompts_and_single_queries_over_pages(kind):
    torch = need_torch()
    device = device_of(torch)
    narrow, scales, table, own = cache(torch, kind, device)
    counts = (30, 0, 1)
    q = torch.randn(sum(counts), HEADS, DIM, device=device).bfloat16()
    offsets = torch.tensor([0, 30, 30, 31], dtype=torch.int32, device=device)
    lengths = torch.tensor(KEYS, dtype=torch.int32, device=device)
    wanted = torch.cat([attend(torch, rows, one) for rows, one in zip(q.split(counts), own)])
    out = flashcore.flash_attn_varlen_func(
        q, *narrow, offsets, None, 30, 48, causal=True, block_table=table, seqused_k=lengths, k_descale=scales, v_descale=scales
    )
    torch.testing.assert_close(out.float(), wanted, atol=0.02, rtol=0.01)
    same = flashcore.packed_attention(
        q, *narrow, offsets, key_lengths=lengths, page_table=table, causal=True, factors=(scales, scales)
    )
    assert torch.equal(out, same)


@cases(kind=["number", "heads", "sequences", "none", "key alone"], packed=[False, True])
def test_queries_of_8_bits_over_pages(kind, packed):
    """FlashAttention-3's way with caches of 8 bits: queries have as many, and a factor for each sequence and key head."""
    torch = need_torch()
    device = device_of(torch)
    narrow, scales, table, own = cache(torch, "number" if kind == "none" else kind.replace("key alone", "heads"), device)
    of_q = torch.linspace(0.01, 0.04, len(KEYS) * KV_HEADS, device=device).view(len(KEYS), KV_HEADS)
    counts = (30, 0, 1) if packed else (2, 2, 2)
    q = (torch.randn(sum(counts), HEADS, DIM, device=device) * 40).to(torch.float8_e4m3fn)
    given = dict(q_descale=of_q, k_descale=scales, v_descale=scales)
    if kind == "none":
        given, of_q = {}, torch.ones_like(of_q)
        own = [[x / scales[n][:, None] for x in one] for n, one in enumerate(own)]
    elif kind == "key alone":
        given, of_q = dict(k_descale=scales), torch.ones_like(of_q)
        own = [[k, v / scales[n][:, None]] for n, (k, v) in enumerate(own)]
    lengths = torch.tensor(KEYS, dtype=torch.int32, device=device)
    meant = [rows.float() * of_q[n].repeat_interleave(HEADS // KV_HEADS)[:, None] for n, rows in enumerate(q.split(counts))]
    wanted = torch.cat([attend(torch, rows, one) for rows, one in zip(meant, own)])
    where = dict(cache_seqlens=lengths, page_table=table, causal=True)
    if packed:
        offsets = torch.tensor([0, 30, 30, 31], dtype=torch.int32, device=device)
        out = flashcore.flash_attn_with_kvcache(q, *narrow, cu_seqlens_q=offsets, max_seqlen_q=30, **where, **given)
        same = flashcore.flash_attn_varlen_func(
            q, *narrow, offsets, None, 30, 48, causal=True, block_table=table, seqused_k=lengths, **given
        )
        assert torch.equal(out, same)
    else:
        out = flashcore.flash_attn_with_kvcache(q.view(len(KEYS), 2, HEADS, DIM), *narrow, **where, **given).flatten(0, 1)
    assert out.dtype == torch.bfloat16
    size = wanted.abs().max().item()
    torch.testing.assert_close(out.float() / size, wanted / size, atol=0.01, rtol=0.01)


@cases(seqused=[False, True], chunk=[0, 8])
def test_queries_of_8_bits_over_packed_sequences(seqused, chunk):
    torch = need_torch()
    from flashcore.flash_attn import flash_attn_3 as three

    device = device_of(torch)
    ends, used = [0, 17, 17, 40], [17, 0, 20] if seqused else [17, 0, 23]
    torch.manual_seed(5)
    q, k, v = ((torch.randn(40, heads, DIM, device=device) * 40).to(torch.float8_e4m3fn) for heads in (HEADS, KV_HEADS, KV_HEADS))
    factors = [torch.linspace(0.01, 0.01 * n, 3 * KV_HEADS, device=device).view(3, KV_HEADS) for n in (3, 4, 5)]
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    more = dict(seqused_k=torch.tensor(used, dtype=torch.int32, device=device)) if seqused else {}
    out = three.flash_attn_varlen_func(
        q, k, v, offsets, offsets, 23, 23, causal=True, q_descale=factors[0], k_descale=factors[1], v_descale=factors[2],
        attention_chunk=chunk, **more,
    )  # fmt: skip
    assert out.dtype == torch.bfloat16
    for n in range(3):
        rows, keys = slice(ends[n], ends[n + 1]), slice(ends[n], ends[n] + used[n])
        of_q, of_k, of_v = (one[n][:, None] for one in factors)
        meant = q[rows].float() * of_q.repeat_interleave(HEADS // KV_HEADS, 0)
        own = k[keys].float() * of_k, v[keys].float() * of_v
        ahead, wanted = used[n] - (ends[n + 1] - ends[n]), torch.zeros_like(meant)
        for first in range(0, max(used[n], 1), chunk or 64):
            queries = slice(max(first - ahead, 0), max(min(first + (chunk or 64) - ahead, len(meant)), 0))
            part = [x[first : first + (chunk or 64)] for x in own]
            # Queries before the first key see nothing.
            seen = meant[queries][: max(queries.stop - queries.start, 0)]
            wanted[queries] = attend(torch, seen, part) if len(seen) else seen
        if ahead < 0:
            wanted[:-ahead] = 0
        torch.testing.assert_close(out[rows].float(), wanted, atol=0.02, rtol=0.01)


def test_new_keys_are_not_divided_by_what_queries_are_multiplied_by():
    torch = need_torch()
    device = device_of(torch)
    narrow, scales, table, _ = cache(torch, "heads", device)
    q = (torch.randn(3, 2, HEADS, DIM, device=device) * 40).to(torch.float8_e4m3fn)
    k, v = (torch.randn(3, 2, KV_HEADS, DIM, device=device).bfloat16() for _ in range(2))
    lengths = torch.tensor([38, -1, 15], dtype=torch.int32, device=device)
    given = dict(k_descale=scales, v_descale=scales)
    apart = [x.clone() for x in narrow]
    flashcore.flash_attn_with_kvcache(q, *narrow, k, v, cache_seqlens=lengths, block_table=table, q_descale=scales * 3, **given)
    flashcore.flash_attn_with_kvcache(q.bfloat16(), *apart, k, v, cache_seqlens=lengths, block_table=table, **given)
    for x, y in zip(narrow, apart):
        assert torch.equal(x.float(), y.float())


@cases(call=["batch", "cache", "cache under 16 bits"])
def test_chunks_of_8_bits(call):
    """Each part of a cut sequence has the factors of its sequence."""
    torch = need_torch()
    device = device_of(torch)
    torch.manual_seed(6)
    q, k, v = ((torch.randn(3, 20, n, DIM, device=device) * 40).to(torch.float8_e4m3fn) for n in (HEADS, KV_HEADS, KV_HEADS))
    of_q, of_k, of_v = (torch.linspace(0.01, 0.01 * n, 3 * KV_HEADS, device=device).view(3, KV_HEADS) for n in (3, 4, 5))
    wide = call == "cache under 16 bits"
    q, of_q = (q.bfloat16() * 0.02, torch.ones_like(of_q)) if wide else (q, of_q)
    spread = lambda factor, heads: factor.repeat_interleave(heads // KV_HEADS, 1)[:, None, :, None]
    meant = [x.float() * spread(factor, x.shape[2]) for x, factor in ((q, of_q), (k, of_k), (v, of_v))]
    given = dict(k_descale=of_k, v_descale=of_v, attention_chunk=8, causal=True) | ({} if wide else dict(q_descale=of_q))
    lengths = torch.tensor([20, 9, 13], dtype=torch.int32, device=device)
    over_cache = lambda *tensors, **more: flashcore.flash_attn_with_kvcache(*tensors, cache_seqlens=lengths, **more)
    function = flashcore.flash_attn_func if call == "batch" else over_cache
    out, wanted = function(q, k, v, **given), function(*meant, attention_chunk=8, causal=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, atol=0.03, rtol=0.01)


@cases(turned=[False, True])
def test_new_keys_of_8_bits_go_in_as_they_are(turned):
    torch = need_torch()
    device = device_of(torch)
    narrow, scales, table, _ = cache(torch, "heads", device)
    q, k, v = ((torch.randn(3, 2, n, DIM, device=device) * 40).to(torch.float8_e4m3fn) for n in (HEADS, KV_HEADS, KV_HEADS))
    lengths = torch.tensor([38, -1, 15], dtype=torch.int32, device=device)
    given = dict(k_descale=scales, v_descale=scales, q_descale=scales * 3)
    key, queries = k, q
    if turned:  # quarters of a turn, which are exact, in 8 bits as FlashAttention-3 has them
        quarters = torch.arange(48, device=device)[:, None].expand(48, DIM // 2) * torch.pi / 2
        rotary = [f(quarters).round() for f in (torch.cos, torch.sin)]
        given |= dict(zip(("rotary_cos", "rotary_sin"), (x.to(torch.float8_e4m3fn) for x in rotary)))
        key, queries = k.float(), q.float()
        for x in (key, queries):
            for n in (0, 2):
                cos, sin = (part[int(lengths[n]) : int(lengths[n]) + 2, None] for part in rotary)
                even, odd = x[n, ..., ::2].clone(), x[n, ..., 1::2].clone()
                x[n, ..., ::2], x[n, ..., 1::2] = even * cos - odd * sin, odd * cos + even * sin
        queries = queries.to(torch.float8_e4m3fn)
    out = flashcore.flash_attn_with_kvcache(q, *narrow, k, v, cache_seqlens=lengths, block_table=table, causal=True, **given)
    for n in (0, 2):
        for at in range(2):
            row = int(lengths[n]) + at
            for x, stored in zip((key, v), narrow):
                assert torch.equal(stored.float()[int(table[n, row // PAGE]), row % PAGE], x[n, at].float())
    after = lengths + 2 * (lengths >= 0)
    given = {name: x for name, x in given.items() if "rotary" not in name}
    again = flashcore.flash_attn_with_kvcache(queries, *narrow, cache_seqlens=after, block_table=table, causal=True, **given)
    assert torch.equal(out, again)


def test_packed_keys_are_rounded_into_the_cache():
    torch = need_torch()
    device = device_of(torch)
    narrow, scales, table, _ = cache(torch, "sequences", device)
    q, k, v = (torch.randn(3, 2, heads, DIM, device=device).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    lengths = torch.tensor([38, 0, 15], dtype=torch.int32, device=device)
    table[1, 0] = 4
    rest = dict(cache_seqlens=lengths, block_table=table, causal=True, k_descale=scales, v_descale=scales)
    apart = [x.clone() for x in narrow]
    wanted = flashcore.flash_attn_with_kvcache(q, *apart, k, v, **rest)
    offsets = torch.arange(4, dtype=torch.int32, device=device) * 2
    out = flashcore.flash_attn_with_kvcache(
        *(x.flatten(0, 1) if x is q else x for x in (q, *narrow)), k.flatten(0, 1), v.flatten(0, 1),
        cu_seqlens_q=offsets, cu_seqlens_k_new=offsets, max_seqlen_q=2, **rest,
    )  # fmt: skip
    for x, y in zip(narrow, apart):
        assert torch.equal(x.float(), y.float())
    torch.testing.assert_close(out.view(wanted.shape), wanted, atol=0.02, rtol=0.01)


def test_new_keys_are_rounded_into_the_cache():
    torch = need_torch()
    device = device_of(torch)
    narrow, scales, table, own = cache(torch, "sequences", device)
    lengths = torch.tensor([38, -1, 15], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(3, 2, heads, DIM, device=device).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    k[0, 0, 0, 0] = 1e6  # far beyond what 8 bits hold
    out = flashcore.flash_attn_with_kvcache(
        q, *narrow, k, v, cache_seqlens=lengths, block_table=table, causal=True, k_descale=scales, v_descale=scales
    )
    assert narrow[0].float()[7, 6, 0, 0] == 448
    for n in (0, 2):
        row = int(lengths[n])
        new = [(x[n].float() / scales[n][:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).float() for x in (k, v)]
        for at in range(2):
            page, place = int(table[n, (row + at) // PAGE]), (row + at) % PAGE
            for x, stored in zip(new, narrow):
                assert torch.equal(stored.float()[page, place], x[at])
        both = [torch.cat([x[:row], y * scales[n][:, None]]) for x, y in zip(own[n], new)]
        torch.testing.assert_close(out[n].float(), attend(torch, q[n], both), atol=0.02, rtol=0.01)


def test_slots_of_a_cache_of_bytes():
    torch = need_torch()
    device = device_of(torch)
    key, value = (torch.randn(5, KV_HEADS, DIM, device=device).bfloat16() for _ in range(2))
    caches = torch.zeros(2, 4, PAGE, KV_HEADS, DIM, dtype=torch.uint8, device=device)
    slots = torch.tensor([3, -1, 40, 17], device=device)
    scales = torch.tensor(0.02, device=device), torch.tensor(0.03, device=device)
    flashcore.reshape_and_cache_flash(key, value, *caches, slots, "fp8", *scales)
    stored = [x.view(torch.float8_e4m3fn).float().flatten(0, 1) for x in caches]
    for x, cache_rows, scale in zip((key, value), stored, scales):
        for token in (0, 2, 3):
            expected = (x[token].float() / scale).to(torch.float8_e4m3fn).float()
            assert torch.equal(cache_rows[slots[token]], expected)
        assert int((cache_rows != 0).any(-1).any(-1).sum()) == 3


def test_mistakes_with_caches_are_told():
    torch = need_torch()
    narrow, scales, _, _ = cache(torch, "number", "cpu")
    q = torch.randn(8, 1, HEADS, DIM).bfloat16()
    with raises(ValueError, "two: those of k and of v"):
        flashcore.attention(q, *narrow, factors=(1.0, 1.0, 1.0), layout="bshd")
    with raises(ValueError, "q_descale is for queries of 8 bits"):
        flashcore.flash_attn_with_kvcache(q, *narrow, q_descale=scales, k_descale=scales)
    with raises(TypeError, "^k_cache and v_cache are e5m2 but q is bf16"):
        flashcore.flash_attn_with_kvcache(q, *(x.to(torch.bfloat16).to(torch.float8_e5m2) for x in narrow))
    with raises(TypeError, "16-bit queries over an e4m3 cache"):
        flashcore.attention(q.float(), *narrow, layout="bshd")
    with raises(ValueError, "factors of k for a batch of 8 with 2 key heads"):
        flashcore.attention(q, *narrow, factors=(torch.ones(3), torch.ones(3)), layout="bshd")
    with raises(NotImplementedError, "a cache of fp8_e5m2 is not supported"):
        flashcore.reshape_and_cache_flash(q, q, *narrow, torch.zeros(1), "fp8_e5m2")
