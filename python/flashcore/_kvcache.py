"""``flash_attn_with_kvcache`` in FlashAttention-2's and FlashAttention-3's dialects, computed by FlashCore."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _frameworks
from ._append import append
from ._arguments import whole
from ._attention import run, straight
from ._flash_attn import asked, descales, logits
from ._options import NONE, Values


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any | None = None,
    v: Any | None = None,
    rotary_cos: Any | None = None,
    rotary_sin: Any | None = None,
    cache_seqlens: Any | None = None,
    cache_batch_idx: Any | None = None,
    cache_leftpad: Any | None = None,
    block_table: Any | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Any | None = None,
    cu_seqlens_q: Any | None = None,
    cu_seqlens_k_new: Any | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    rotary_seqlens: Any | None = None,
    qv: Any | None = None,
    q_descale: Any | None = None,
    k_descale: Any | None = None,
    v_descale: Any | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: Any | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Any | None = None,
    sinks: Any | None = None,
    learnable_sink: Any | None = None,
    batch_invariant: bool = False,
    out: Any | None = None,
) -> Any:
    """``flash_attn_with_kvcache`` by its meaning: attention of new queries over the keys that a cache holds.

    ``k_cache`` and ``v_cache`` are batch x sequence x heads x dim, or pages x rows of a page x heads x dim with a table of
    page numbers, ``block_table`` or ``page_table``; pages may have any size and strides. ``cache_seqlens`` says how many
    keys there are, one number or one per sequence; a length of 0 or less is an empty sequence. With ``cu_seqlens_q`` the
    queries are packed, sequence x heads x dim. The positional arguments are those of FlashAttention-2; what
    FlashAttention-3 and the engines add goes by name. ``num_splits``, ``scheduler_metadata``, ``pack_gqa`` and
    ``sm_margin`` say how others compute it and are not looked at; ``batch_invariant`` is `attention`'s.

    New keys ``k`` and ``v``, batch x sequence x heads x dim, are written into the cache first, behind ``cache_seqlens``
    keys of each sequence, and seen by the queries; ``cache_seqlens`` stays as it is. ``rotary_cos`` and ``rotary_sin`` turn
    them and the queries by their positions. ``cache_leftpad`` says how many rows at the start of each sequence are no keys.

    A cache of float8_e4m3fn goes with q of float16 or bfloat16. ``k_descale`` and ``v_descale``, float32, batch x key heads or
    what expands to it, say what it is multiplied by; new keys and values are divided by them and rounded.

    Lengths and tables on a GPU are read by the kernel when it runs, so that a captured graph stays right while they
    change. With ``return_softmax_lse`` the log-sum-exp comes along, batch x heads x sequence or heads x sequence.

    >>> import numpy
    >>> q, cache = numpy.ones((2, 1, 4, 8), "float32"), numpy.ones((2, 64, 2, 8), "float32")
    >>> flash_attn_with_kvcache(q, cache, cache, cache_seqlens=[30, 7], causal=True).shape
    (2, 1, 4, 8)
    """
    if rotary_seqlens is not None or qv is not None or attention_chunk:
        # Those of the cache itself are where new keys go anyway, and without rotary embedding nobody asks.
        elsewhere = rotary_cos is not None and rotary_seqlens is not cache_seqlens
        _refuse(rotary_seqlens if elsewhere else None, qv, attention_chunk)
    factors = descales(q, q_descale, k_descale, v_descale)
    layout = "bshd" if cu_seqlens_q is None else "packed"
    options = asked(causal, window_size, softmax_scale, softcap, layout, batch_invariant)
    table = block_table if page_table is None else page_table
    sinks = logits(sinks, s_aux, learnable_sink)
    if k is None and rotary_cos is None and cu_seqlens_q is None and cache_batch_idx is None and cache_leftpad is None:
        # As below, with fewer steps: this is the call of every token.
        sized = alibi_slopes is None and not return_softmax_lse and getattr(cache_seqlens, "ndim", 0) == 1
        result = straight(q, k_cache, v_cache, out, options, None, cache_seqlens, sinks, None, table, factors) if sized else None
        if result is not None:
            return result
    sequences = _sequences(q, cu_seqlens_q)
    table = _table(q, table, cache_batch_idx, cu_seqlens_q, sequences)
    if k is not None:
        rotary = None if rotary_cos is None else (rotary_cos, rotary_sin)
        together = not causal and all(bound in (None, -1) for bound in window_size)
        new = _New(k, v, rotary, rotary_interleaved, together, factors)
        q, cache_seqlens = new.write(q, k_cache, v_cache, cache_seqlens, table, packed=cu_seqlens_q is not None)
    elif rotary_cos is not None:
        raise ValueError("rotary embedding turns new keys and queries together; pass k and v")
    lengths = _lengths(cache_seqlens, k_cache, table, sequences)
    if cache_leftpad is not None:
        k_cache, v_cache, table, lengths = _shifted(q, k_cache, v_cache, table, lengths, cache_leftpad)
    bounds = None
    if cu_seqlens_q is not None and max_seqlen_q is not None:
        bounds = (int(max_seqlen_q), 1 << 30 if max_seqlen_k is None else int(max_seqlen_k))
    values = Values(cu_seqlens_q, lengths, sinks, None, bounds, table, alibi_slopes, factors)
    values = NONE if all(value is None for value in values) else values
    return run(q, k_cache, v_cache, options, values, return_softmax_lse, out)


class _New(NamedTuple):
    """New keys and values, and how they are turned."""

    k: Any
    v: Any
    rotary: tuple[Any, Any] | None
    interleaved: bool
    together: bool
    factors: tuple[Any, ...] | None
    """What those of a cache of 8 bits are divided by."""

    def write(self, q: Any, k_cache: Any, v_cache: Any, lengths: Any, table: Any, packed: bool) -> tuple[Any, Any]:
        """Writes them into the cache; returns the queries, turned where asked to, and the lengths that there are then."""
        if self.v is None or lengths is None:
            raise ValueError("new keys need v and cache_seqlens; pass both")
        if packed:
            raise NotImplementedError("new keys of packed queries are not appended here; call flashcore.append first")
        shape = _frameworks.shape("k", self.k)
        if _is_number(lengths):
            lengths = (whole("cache_seqlens", lengths),) * shape[0]
        turned = append(
            self.k,
            self.v,
            k_cache,
            v_cache,
            lengths,
            page_table=table,
            rotary=self.rotary,
            interleaved=self.interleaved,
            q=None if self.rotary is None else q,
            together=self.together,
            factors=self.factors,
        )
        # A sequence that is none, below 0, stays none.
        if hasattr(lengths, "shape"):
            lengths = (lengths + shape[1]) * (lengths >= 0)
        else:
            lengths = tuple((length + shape[1]) * (length >= 0) for length in lengths)
        return q if turned is None else turned, lengths


def _shifted(q: Any, k_cache: Any, v_cache: Any, table: Any, lengths: Any, leftpad: Any) -> tuple[Any, ...]:
    """The cache in pages of one row, so that each sequence may start at any: caches, table and lengths."""
    framework = _frameworks.of(q)
    entries, size, heads, _ = _frameworks.shape("k_cache", k_cache)
    leftpad = framework.indices("cache_leftpad", leftpad, q)
    if table is None:
        numbers = framework.numbers_to(entries, q).reshape(-1, 1)
    else:
        numbers = framework.table(table, q)
    rows = framework.numbers_to(numbers.shape[1] * size, q).reshape(1, -1) + leftpad.reshape(-1, 1)
    # Rows beyond the cache are beyond every length too.
    column = (rows // size) % numbers.shape[1]
    sequence = framework.numbers_to(numbers.shape[0], q).reshape(-1, 1)
    table = numbers[sequence, column] * size + rows % size
    if lengths is None:
        lengths = (numbers.shape[1] * size,) * numbers.shape[0]
    lengths = framework.indices("cache_seqlens", lengths, q) - leftpad
    caches = [cache.reshape(-1, 1, heads, cache.shape[-1]) for cache in (k_cache, v_cache)]
    return *caches, table, lengths


def _refuse(rotary_seqlens: Any, qv: Any, chunk: int) -> None:
    if rotary_seqlens is not None:
        raise NotImplementedError("positions are those behind the cache; pass rotary_seqlens=None, or cache_seqlens itself")
    if qv is not None:
        raise NotImplementedError("a second part of the queries is not supported; pass qv=None")
    if chunk:
        raise NotImplementedError("attention in chunks is not supported; pass attention_chunk=0")


def _sequences(q: Any, cu_seqlens_q: Any) -> int:
    if cu_seqlens_q is None:
        return _frameworks.shape("q", q)[0]
    offsets = getattr(cu_seqlens_q, "shape", None)
    return (len(cu_seqlens_q) if offsets is None else int(offsets[0])) - 1


def _table(q: Any, table: Any, cache_batch_idx: Any, cu_seqlens_q: Any, sequences: int) -> Any:
    """The table of a paged cache; a cache entry that a sequence picks is a page of its own."""
    if table is not None:
        if cache_batch_idx is not None:
            raise NotImplementedError("a page table says where keys lie; pass cache_batch_idx=None with it")
        return table
    if cache_batch_idx is not None:
        entries = cache_batch_idx if hasattr(cache_batch_idx, "reshape") else tuple(cache_batch_idx)
        return entries.reshape(-1, 1) if hasattr(entries, "reshape") else tuple((entry,) for entry in entries)
    return None if cu_seqlens_q is None else tuple((entry,) for entry in range(sequences))


def _lengths(cache_seqlens: Any, k_cache: Any, table: Any, sequences: int) -> Any:
    """The keys of each sequence; all that its cache holds where nobody says."""
    if cache_seqlens is None:
        if table is None:
            return None
        columns = table.shape[1] if hasattr(table, "shape") else len(table[0]) if table else 0
        return (columns * _frameworks.shape("k_cache", k_cache)[1],) * sequences
    if _is_number(cache_seqlens):
        return (max(whole("cache_seqlens", cache_seqlens), 0),) * sequences
    return cache_seqlens


def _is_number(lengths: Any) -> bool:
    return getattr(lengths, "ndim", 0) == 0 and not isinstance(lengths, (list, tuple))
