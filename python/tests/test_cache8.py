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
    with raises(TypeError, "16-bit queries over an e4m3 cache"):
        flashcore.attention(q.float(), *narrow, layout="bshd")
    with raises(ValueError, "factors of k for a batch of 8 with 2 key heads"):
        flashcore.attention(q, *narrow, factors=(torch.ones(3), torch.ones(3)), layout="bshd")
    with raises(NotImplementedError, "a cache of fp8_e5m2 is not supported"):
        flashcore.reshape_and_cache_flash(q, q, *narrow, torch.zeros(1), "fp8_e5m2")
