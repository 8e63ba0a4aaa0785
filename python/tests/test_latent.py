"""Queries in two parts, as latent attention has them: over caches of one row, in pages, packed, with new keys, of 8 bits."""

from __future__ import annotations

import flashcore
import numpy as np
from flashcore import _latent
from flashcore.flash_attn import flash_attn_3 as three
from harness import JAX, NUMPY, TORCH, TORCH_CUDA, band_mask, cases, check_close, check_lse, need_torch, normal, raises, reference

ROPE, LATENT, HEADS = 16, 64, 4
LENGTHS = (37, 1, 0, 20)
PLACES = ["values first", "keys first", "apart"]


def kind_of(framework):
    return "float16" if framework.device == "cuda" else "float32"


class Cache:
    """Rows of latents and rotated keys, a padded cache or pages in an order of chance, and the same sequence by sequence."""

    def __init__(self, framework, place, size=None, heads=1, rows=40):
        self.framework, self.kind = framework, kind_of(framework)
        pages = len(LENGTHS) if size is None else len(LENGTHS) * -(-rows // size)
        size = rows if size is None else size
        pool = normal(pages, size, heads, ROPE + LATENT, seed=1)
        order = np.random.default_rng(2).permutation(pages).reshape(len(LENGTHS), -1)
        keys, values = pool[..., :ROPE], pool[..., ROPE:]
        if place == "apart":
            self.k, self.v = (framework.make(x.copy(), self.kind) for x in (keys, values))
        elif place == "keys first":
            self.row = framework.make(pool, self.kind)
            self.k, self.v = self.row[..., :ROPE], self.row[..., ROPE:]
        else:
            self.row = framework.make(np.concatenate([values, keys], -1), self.kind)
            self.k, self.v = self.row[..., LATENT:], self.row[..., :LATENT]
        self.table = framework.numbers(order, "int32")
        self.lengths = framework.numbers(LENGTHS, "int32")
        self.own = [[framework.read(x)[pages].reshape(-1, heads, x.shape[-1]) for x in (self.k, self.v)] for pages in order]

    def expected(self, q, qv, n, end=None, start=0, **mask):
        """What one sequence should give: queries x heads x dim, and the log-sum-exp."""
        k, v = (x[start : LENGTHS[n] if end is None else end] for x in self.own[n])
        both = [np.concatenate(parts, -1).swapaxes(0, 1)[None] for parts in ((q, qv), (k, v))]
        seen = band_mask(len(q), len(k), **mask) if mask else None
        out, lse = reference(*both, v.swapaxes(0, 1)[None], seen)
        return out[0].swapaxes(0, 1), lse[0]


def queries_of(framework, *shape):
    return [framework.make(normal(*shape, HEADS, dim, seed=dim), kind_of(framework)) for dim in (ROPE, LATENT)]


@cases(framework=[NUMPY, JAX, TORCH, TORCH_CUDA], place=PLACES, size=[None, 1, 16])
def test_single_queries(framework, place, size):
    framework.need()
    cache = Cache(framework, place, size)
    q, qv = queries_of(framework, len(LENGTHS), 1)
    where = {} if size is None else {"page_table": cache.table}
    if size is None:
        cache.own = [[framework.read(x)[n] for x in (cache.k, cache.v)] for n in range(len(LENGTHS))]
    out, lse = flashcore.flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=cache.lengths, qv=qv, causal=True, return_softmax_lse=True, **where
    )
    rows = [cache.expected(framework.read(q)[n], framework.read(qv)[n], n) for n in range(len(LENGTHS))]
    check_close(framework.read(out), np.stack([out for out, _ in rows]), kind_of(framework))
    check_lse(framework.read(lse), np.stack([lse for _, lse in rows]))
    same = three.flash_attn_with_kvcache(q, cache.k, cache.v, qv=qv, cache_seqlens=cache.lengths, causal=True, **where)
    assert (framework.read(same) == framework.read(out)).all()


@cases(framework=[NUMPY, TORCH, TORCH_CUDA], place=PLACES, mask=[{}, {"right": 0}, {"left": 7, "right": 0}])
def test_prompts_and_single_queries_together(framework, place, mask):
    """As SGLang's and vLLM's backends call it."""
    framework.need()
    cache, counts = Cache(framework, place, 8), (30, 1, 0, 3)
    q, qv = queries_of(framework, sum(counts))
    ends = np.cumsum([0, *counts])
    offsets = framework.numbers(ends, "int32")
    both = [[framework.read(x)[a:b] for x in (q, qv)] for a, b in zip(ends, ends[1:])]
    wanted = np.concatenate([cache.expected(*parts, n, **mask)[0] for n, parts in enumerate(both)])
    asked = dict(causal="right" in mask, window_size=(mask.get("left", -1), -1))
    where = dict(page_table=cache.table, cache_seqlens=cache.lengths, cu_seqlens_q=offsets, max_seqlen_q=30)
    out = flashcore.flash_attn_with_kvcache(q, cache.k, cache.v, qv=qv, **where, **asked)
    check_close(framework.read(out), wanted, kind_of(framework))
    for name in ("qv", "q_v"):
        same = flashcore.flash_attn_varlen_func(
            q, cache.k, cache.v, offsets, None, 30, 40, block_table=cache.table, seqused_k=cache.lengths, **{name: qv}, **asked
        )
        assert (framework.read(same) == framework.read(out)).all()


@cases(framework=[NUMPY, TORCH, TORCH_CUDA], place=PLACES, heads=[1, 2])
def test_one_row_is_not_copied(framework, place, heads):
    framework.need()
    cache = Cache(framework, place, 8, heads)
    q, qv = queries_of(framework, 3)
    both, row = _latent.joined(q, qv, cache.k, cache.v)
    assert row.shape == (*cache.k.shape[:-1], ROPE + LATENT)
    at = lambda x: x.__array_interface__["data"][0] if framework is NUMPY else x.data_ptr()
    assert (at(row) in (at(cache.k), at(cache.v))) == (place != "apart")
    parts = (qv, q) if place == "values first" else (q, qv)
    assert (framework.read(both) == np.concatenate([framework.read(x) for x in parts], -1)).all()
    if place != "apart":
        assert (framework.read(row) == framework.read(cache.row)).all()


def test_what_only_looks_like_one_row_is_copied():
    """Neighbours with other strides, with a gap, or in the wrong rows."""
    torch = need_torch()
    q, qv, row = torch.zeros(2, 4, 8), torch.zeros(2, 4, 24), torch.randn(6, 1, 40)
    looks = {
        "gap": (row[..., 32:], row[..., :24]),
        "overlap": (row[..., 16:24], row[..., :24]),
        "other rows": (row[1:, :, 24:32], row[:-1, :, :24]),
        "other steps": (row[::2, :, 24:32], row[:3, :, :24]),
        "expanded": (row[:1, :, 24:32].expand(6, 1, 8), row[..., :24]),
    }
    for name, (k, v) in looks.items():
        assert torch.equal(_latent.joined(q, qv, k, v)[1], torch.cat([k, v], -1)), name
    # An extent of 1 has any stride: vLLM's one key head.
    k, v = row[..., 0, 24:32].unsqueeze(-2), row[..., 0, :24].unsqueeze(-2)
    joined = _latent.joined(q, qv, k, v)[1]
    assert joined.data_ptr() == row.data_ptr() and torch.equal(joined, row[..., :32])


@cases(device=["cpu", "cuda"], place=PLACES, packed=[False, True])
def test_new_keys_and_rotary_embedding(device, place, packed):
    """New keys go into both caches first; the first part alone is turned."""
    torch = need_torch(device)
    framework = TORCH if device == "cpu" else TORCH_CUDA
    cache, lengths, new = Cache(framework, place, 8), (35, 0, 0, 12), 2
    make = lambda *shape, seed: framework.make(normal(*shape, seed=seed), cache.kind)
    q, qv = make(4, new, HEADS, ROPE, seed=3), make(4, new, HEADS, LATENT, seed=4)
    k, v = make(4, new, 1, ROPE, seed=5), make(4, new, 1, LATENT, seed=6)
    turn = [f(make(48, ROPE // 2, seed=7)) for f in (torch.cos, torch.sin)]
    given, of_pack = [q, k, v, qv], {}
    if packed:
        offsets = torch.arange(5, dtype=torch.int32, device=device) * new
        given, of_pack = [x.flatten(0, 1) for x in given], dict(cu_seqlens_q=offsets, cu_seqlens_k_new=offsets, max_seqlen_q=new)
    call = lambda: flashcore.flash_attn_with_kvcache(
        given[0], cache.k, cache.v, *given[1:3], *turn, framework.numbers(lengths, "int32"), causal=True, page_table=cache.table,
        qv=given[3], **of_pack,
    )  # fmt: skip
    if device == "cpu" and place != "apart":  # the host's code may not borrow one memory twice
        with raises(ValueError, "v_cache shares memory with k_cache; copy one of them"):
            call()
        return
    out = call()
    out = out.reshape(4, new, HEADS, LATENT)
    from flashcore.flash_attn.layers.rotary import apply_rotary_emb

    for n, length in enumerate(lengths):
        rows = slice(length, length + new)
        turned, key = (apply_rotary_emb(x[n : n + 1], *(part[rows] for part in turn), interleaved=True)[0] for x in (q, k))
        cache.own[n][0][rows], cache.own[n][1][rows] = framework.read(key), framework.read(v[n])
        wanted, _ = cache.expected(framework.read(turned), framework.read(qv[n]), n, length + new, right=0)
        check_close(framework.read(out[n]), wanted, cache.kind)
        pages = cache.table[n].long()
        check_close(framework.read(cache.v[pages].flatten(0, 1)[rows]), framework.read(v[n]), cache.kind)
        check_close(framework.read(cache.k[pages].flatten(0, 1)[rows]), framework.read(key), cache.kind)


@cases(framework=[NUMPY, TORCH, TORCH_CUDA], place=PLACES, kind=["leftpad", "picked", "chunks", "number"])
def test_what_goes_with_it(framework, place, kind):
    framework.need()
    cache, starts, queries = Cache(framework, place), [0] * 4, 2
    cache.own = [[framework.read(x)[n] for x in (cache.k, cache.v)] for n in range(4)]
    q, qv = queries_of(framework, 4, queries)
    lengths, options = [30, 9, 2, 20], dict(causal=True)
    if kind == "leftpad":
        starts, options["cache_leftpad"] = [4, 0, 0, 11], framework.numbers([4, 0, 0, 11], "int32")
    elif kind == "picked":
        options["cache_batch_idx"] = framework.numbers([3, 1, 0, 2], "int32")
        cache.own = [cache.own[n] for n in (3, 1, 0, 2)]
    elif kind == "chunks":
        options["attention_chunk"] = 100  # one chunk: which keys are seen is tested elsewhere
    else:
        lengths = [17] * 4
    given = 17 if kind == "number" else framework.numbers(lengths, "int32")
    out = flashcore.flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=given, qv=qv, **options)
    for n in range(4):
        parts = [framework.read(x)[n] for x in (q, qv)]
        wanted, _ = cache.expected(*parts, n, lengths[n], starts[n], right=0)
        check_close(framework.read(out)[n], wanted, cache.kind)


@cases(place=PLACES, packed=[False, True])
def test_a_cache_of_8_bits(place, packed):
    torch = need_torch()
    cache = Cache(TORCH, place, 16)
    narrow = torch.cat([cache.k, cache.v], -1) if place == "apart" else cache.row
    narrow = (narrow / 0.02).to(torch.float8_e4m3fn)
    if place == "values first":
        v, k = narrow[..., :LATENT], narrow[..., LATENT:]
    else:
        k, v = narrow[..., :ROPE], narrow[..., ROPE:]
        k, v = (k.contiguous(), v.contiguous()) if place == "apart" else (k, v)
    factor = torch.tensor([0.02])
    cache.own = [[(x.float() * factor)[pages].flatten(0, 1).numpy() for x in (k, v)] for pages in cache.table.long()]
    q, qv = (x.bfloat16() for x in queries_of(TORCH, 4, 1))
    where, of_pack = dict(page_table=cache.table, cache_seqlens=cache.lengths), {}
    if packed:
        q, qv, of_pack = q[:, 0], qv[:, 0], dict(cu_seqlens_q=torch.arange(5, dtype=torch.int32), max_seqlen_q=1)
    out = flashcore.flash_attn_with_kvcache(q, k, v, qv=qv, k_descale=factor, v_descale=factor, **where, **of_pack)
    out = out.reshape(4, 1, HEADS, LATENT)
    for n in range(4):
        parts = [TORCH.read(x.reshape(4, 1, HEADS, -1)[n]) for x in (q, qv)]
        check_close(TORCH.read(out[n]), cache.expected(*parts, n)[0], "bfloat16")
    with raises(NotImplementedError, "pass the same tensor as k_descale and v_descale"):
        flashcore.flash_attn_with_kvcache(q, k, v, qv=qv, k_descale=factor, v_descale=factor.clone(), **where, **of_pack)


@cases(device=["cpu", "cuda"], place=PLACES)
def test_latents_of_deepseek_are_seen_by_their_features(device, place):
    """512 features of values, 64 of positions: what engines have."""
    torch = need_torch(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    make = lambda *shape, seed: torch.tensor(normal(*shape, seed=seed)).to(device, dtype)
    q, qv, row = make(2, 3, 8, 64, seed=0), make(2, 3, 8, 512, seed=1), make(9, 4, 1, 576, seed=2)
    k, v = (row[..., 512:], row[..., :512]) if place != "keys first" else (row[..., :64], row[..., 64:])
    k, v = (k.contiguous(), v.contiguous()) if place == "apart" else (k, v)
    table = torch.tensor([[3, 8, 1], [0, 5, -1]], dtype=torch.int32, device=device)
    lengths = torch.tensor([11, 6], dtype=torch.int32, device=device)
    out = three.flash_attn_with_kvcache(q, k, v, qv=qv, page_table=table, cache_seqlens=lengths, causal=True)
    for n, length in enumerate((11, 6)):
        keys, values = (x[table[n].clamp(0).long()].flatten(0, 1)[:length] for x in (k, v))
        both = [torch.cat(parts, -1) for parts in ((q[n], qv[n]), (keys, values))]
        exact = [x.double().cpu().numpy()[None].swapaxes(1, 2) for x in (*both, values)]
        wanted, _ = reference(*exact, mask=band_mask(3, length, right=0))
        check_close(out[n : n + 1].double().cpu().numpy().swapaxes(1, 2), wanted, "float32" if device == "cpu" else "bfloat16")


def test_gradients_of_both_parts():
    """Views of one row have gradients of their own, so that nothing is taken in place then."""
    torch = need_torch()
    row = torch.randn(20, 1, ROPE + LATENT, requires_grad=True)
    q, qv = (torch.randn(12, HEADS, dim, requires_grad=True) for dim in (ROPE, LATENT))
    offsets = torch.tensor([0, 12], dtype=torch.int32), torch.tensor([0, 20], dtype=torch.int32)
    v, k = row[..., :LATENT], row[..., LATENT:]
    out = flashcore.flash_attn_varlen_func(q, k, v, *offsets, 12, 20, causal=True, qv=qv)
    whole = flashcore.flash_attn_varlen_func(torch.cat([qv, q], -1), row, v, *offsets, 12, 20, causal=True)
    d_out = torch.randn_like(out)
    for got, wanted in zip(*(torch.autograd.grad(x, (q, qv, row), d_out) for x in (out, whole))):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


def test_it_is_compiled():
    torch = need_torch()
    cache = Cache(TORCH, "values first", 16)
    q, qv = queries_of(TORCH, 4, 1)
    call = lambda q, qv, k, v: flashcore.flash_attn_with_kvcache(
        q, k, v, qv=qv, cache_seqlens=cache.lengths, page_table=cache.table, causal=True
    )
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, qv, cache.k, cache.v), call(q, qv, cache.k, cache.v), atol=1e-5, rtol=0)


def test_mistakes_are_told():
    torch = need_torch()
    cache = Cache(TORCH, "apart", 16)
    q, qv = queries_of(TORCH, 4, 1)
    where = dict(cache_seqlens=cache.lengths, page_table=cache.table)
    call = lambda q, qv: flashcore.flash_attn_with_kvcache(q, cache.k, cache.v, qv=qv, **where)
    with raises(ValueError, f"qv has {ROPE} features but v_cache {LATENT}; give them as many"):
        call(q, q)
    with raises(ValueError, "qv is .* but q .*; give them the same dimensions"):
        call(q, qv[:2])
    with raises(TypeError, "qv is torch.float16 but q torch.float32; give them one element type"):
        call(q, qv.half())
    with raises(TypeError, "qv is a str, which does not support DLPack"):
        call(q, "qv")
