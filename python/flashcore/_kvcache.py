"""``flash_attn_with_kvcache`` in FlashAttention-2's and FlashAttention-3's dialects, computed by FlashCore."""

from __future__ import annotations

from typing import Any

from . import _frameworks
from ._arguments import whole
from ._attention import run
from ._flash_attn import asked, logits
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
    out: Any | None = None,
) -> Any:
    """``flash_attn_with_kvcache`` by its meaning: attention of new queries over the keys that a cache holds.

    ``k_cache`` and ``v_cache`` are batch x sequence x heads x dim, or pages x rows of a page x heads x dim with a table of
    page numbers, ``block_table`` or ``page_table``; pages may have any size and strides. ``cache_seqlens`` says how many
    keys there are, one number or one per sequence; a length of 0 or less is an empty sequence. With ``cu_seqlens_q`` the
    queries are packed, sequence x heads x dim. The positional arguments are those of FlashAttention-2; what
    FlashAttention-3 and the engines add goes by name. ``num_splits``, ``scheduler_metadata``, ``pack_gqa`` and
    ``sm_margin`` say how others compute it and are not looked at.

    Lengths and tables on a GPU are read by the kernel when it runs, so that a captured graph stays right while they
    change. With ``return_softmax_lse`` the log-sum-exp comes along, batch x heads x sequence or heads x sequence.

    >>> import numpy
    >>> q, cache = numpy.ones((2, 1, 4, 8), "float32"), numpy.ones((2, 64, 2, 8), "float32")
    >>> flash_attn_with_kvcache(q, cache, cache, cache_seqlens=[30, 7], causal=True).shape
    (2, 1, 4, 8)
    """
    _refuse(k, rotary_cos, cache_leftpad, alibi_slopes, qv, (q_descale, k_descale, v_descale), attention_chunk)
    layout = "bshd" if cu_seqlens_q is None else "packed"
    options = asked(causal, window_size, softmax_scale, softcap, layout)
    sequences = _sequences(q, cu_seqlens_q)
    table = _table(q, block_table if page_table is None else page_table, cache_batch_idx, cu_seqlens_q, sequences)
    lengths = _lengths(cache_seqlens, k_cache, table, sequences)
    bounds = None
    if cu_seqlens_q is not None and max_seqlen_q is not None:
        bounds = (int(max_seqlen_q), 1 << 30 if max_seqlen_k is None else int(max_seqlen_k))
    values = Values(cu_seqlens_q, lengths, logits(sinks, s_aux, learnable_sink), None, bounds, table)
    values = NONE if all(value is None for value in values) else values
    return run(q, k_cache, v_cache, options, values, return_softmax_lse, out)


def _refuse(
    k: Any, rotary_cos: Any, leftpad: Any, alibi_slopes: Any, qv: Any, descales: tuple[Any, ...], chunk: int
) -> None:
    if k is not None or rotary_cos is not None:
        raise NotImplementedError("new keys are not appended here; write them into the cache first and pass k=None")
    if leftpad is not None:
        raise NotImplementedError("padding on the left is not supported; pass cache_leftpad=None")
    if alibi_slopes is not None:
        raise NotImplementedError("ALiBi is not supported; pass alibi_slopes=None")
    if qv is not None:
        raise NotImplementedError("a second part of the queries is not supported; pass qv=None")
    if any(scale is not None for scale in descales):
        raise NotImplementedError("8-bit tensors are not supported; pass q_descale=k_descale=v_descale=None")
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
    if getattr(cache_seqlens, "ndim", 0) == 0 and not isinstance(cache_seqlens, (list, tuple)):
        return (max(whole("cache_seqlens", cache_seqlens), 0),) * sequences
    return cache_seqlens
