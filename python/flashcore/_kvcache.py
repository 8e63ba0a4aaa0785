"""``flash_attn_with_kvcache`` in FlashAttention-2's and FlashAttention-3's dialects, computed by FlashCore."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _frameworks, _latent, _sequences
from ._arguments import bound, count, whole
from ._attention import run, straight
from ._flash_attn import DESCALES, asked, descales, logits, name_of_sinks
from ._new_keys import NewKeys, is_number
from ._options import NONE, Values
from ._widen import widened
from ._words import retell

WORDS = {"queries": "cu_seqlens_q", "keys": "cache_seqlens", "table": "block_table", "scale": "softmax_scale", "factors": DESCALES}
WORDS |= {"rows": "k_cache", "slopes": "alibi_slopes", "rotary": "rotary_cos and rotary_sin"}
"""What the function calls its arguments."""


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

    New keys ``k`` and ``v``, batch x sequence x heads x dim, are written into the cache first, behind ``cache_seqlens`` keys
    of each sequence, and seen by the queries; ``cache_seqlens`` stays as it is. ``rotary_cos`` and ``rotary_sin`` turn them
    and the queries by their positions, counted from ``rotary_seqlens`` where that is given; they have a row for every
    position of the cache at least. With ``cu_seqlens_q`` new keys are packed too, by ``cu_seqlens_k_new``. ``cache_leftpad``
    says how many rows at the start of each sequence are no keys. With ``attention_chunk`` a query sees the keys of its own
    chunk of so many, counted from the first.

    ``qv`` is a second part of the queries, which meets the values: scores are ``q @ k.T + qv @ v.T``, by default over the
    square root of the features of both parts. Rotary embedding turns q alone. A cache of latents has keys and values in one
    row; where ``k_cache`` and ``v_cache`` are such views, side by side in either order, that row is taken as it lies.
    Elsewhere both are copied into one, the whole cache in every call.

    A cache of float8_e4m3fn goes with q of float16 or bfloat16. ``k_descale`` and ``v_descale``, float32, batch x key heads or
    what expands to it, say what it is multiplied by (with ``qv`` one tensor for both); new keys and values are divided by them
    and rounded. q of 8 bits, with a ``q_descale``, is widened first and gives a result of bfloat16; new keys of 8 bits go in as
    they are.

    Lengths and tables on a GPU are read by the kernel when it runs, so that a captured graph stays right while they
    change. With ``return_softmax_lse`` the log-sum-exp comes along, batch x heads x sequence or heads x sequence.

    >>> import numpy
    >>> q, cache = numpy.ones((2, 1, 4, 8), "float32"), numpy.ones((2, 64, 2, 8), "float32")
    >>> flash_attn_with_kvcache(q, cache, cache, cache_seqlens=[30, 7], causal=True).shape
    (2, 1, 4, 8)
    """
    try:
        q, factors = widened(q, k_cache, descales(q, q_descale, k_descale, v_descale))
        if qv is not None:
            _latent.check_factors(k_descale, v_descale)
            qv, softmax_scale = widened(qv, k_cache, None)[0], _latent.scale_of(q, qv, softmax_scale)
            if k is None:
                q, k_cache = _latent.joined(q, qv, k_cache, v_cache)
        layout = "bshd" if cu_seqlens_q is None else "packed"
        options = asked(causal, window_size, softmax_scale, softcap, layout, batch_invariant)
        table = block_table if page_table is None else page_table
        logit = logits(sinks, s_aux, learnable_sink)
        # As below, with fewer steps: this is the call of every token.
        plain = k is None and rotary_cos is None and cu_seqlens_q is None and cache_batch_idx is None and cache_leftpad is None
        if plain and alibi_slopes is None and not attention_chunk and not return_softmax_lse:
            sized = getattr(cache_seqlens, "ndim", 0) == 1
            result = straight(q, k_cache, v_cache, out, options, None, cache_seqlens, logit, None, table, factors) if sized else None
            if result is not None:
                return result
        sequences = _number(q, cu_seqlens_q)
        table = _table(q, table, cache_batch_idx, cu_seqlens_q, sequences)
        if k is not None:
            if (rotary_cos is None) != (rotary_sin is None):
                raise ValueError("rotary embedding needs rotary_cos and rotary_sin; pass both")
            rotary = None if rotary_cos is None else (rotary_cos, rotary_sin)
            if rotary is not None:
                _check_positions(rotary_cos, k_cache, table)
            together = not causal and all(bound in (None, -1) for bound in window_size)
            elsewhere = None if rotary_seqlens is cache_seqlens else rotary_seqlens
            held = descales(None, None, k_descale, v_descale)  # without that of the queries
            new = NewKeys(k, v, rotary, rotary_interleaved, together, held, elsewhere).widened()
            if cu_seqlens_q is None:
                q, cache_seqlens = new.write(q, k_cache, v_cache, cache_seqlens, table)
            else:
                q, cache_seqlens = new.write_packed(q, k_cache, v_cache, cache_seqlens, table, cu_seqlens_q, cu_seqlens_k_new)
            if qv is not None:
                q, k_cache = _latent.joined(q, qv, k_cache, v_cache)
        elif rotary_cos is not None:
            raise ValueError("rotary embedding turns new keys and queries together; pass k and v")
        lengths = _lengths(cache_seqlens, k_cache, table, sequences)
        if attention_chunk:
            if out is not None or getattr(alibi_slopes, "ndim", 1) > 1:
                given = "alibi_slopes of each sequence" if out is None else "out"
                raise NotImplementedError(f"attention_chunk does not go with {given}; pass attention_chunk=0, or omit it")
            chunk = count("attention_chunk", attention_chunk, "pass 0 for one chunk")
            packed = asked(causal, window_size, softmax_scale, softcap, "packed", batch_invariant)
            how = (packed, logit, alibi_slopes, factors, return_softmax_lse)
            call = _Chunks(chunk, table, cache_leftpad, cu_seqlens_q, max_seqlen_q, *how)
            return _chunked(q, k_cache, v_cache, lengths, call)
        if cache_leftpad is not None:
            k_cache, v_cache, table, lengths = _shifted(q, k_cache, v_cache, table, lengths, cache_leftpad)
        bounds = None
        if cu_seqlens_q is not None and max_seqlen_q is not None:
            bounds = (bound("max_seqlen_q", max_seqlen_q), 1 << 30 if max_seqlen_k is None else bound("max_seqlen_k", max_seqlen_k))
        values = Values(cu_seqlens_q, lengths, logit, None, bounds, table, alibi_slopes, factors)
        values = NONE if all(value is None for value in values) else values
        return run(q, k_cache, v_cache, options, values, return_softmax_lse, out)
    except Exception as error:
        new = {} if k is None or v is None else {"k": k, "v": v}
        _tell(error, {"q": q, "k_cache": k_cache, "v_cache": v_cache} | new)
        caches = {"k": "k_cache", "v": "v_cache"} if k is None else {}
        given = name_of_sinks(sinks, s_aux, learnable_sink)
        retell(error, sinks=given, **WORDS | caches | ({} if page_table is None else {"table": "page_table"}))
        raise


def _tell(error: Exception, tensors: dict[str, Any]) -> None:
    """Raises what says more about an argument than an error of a framework's."""
    if not isinstance(error, (*_frameworks.UNTOLD, OverflowError)):
        return
    _frameworks.demand(**tensors)
    if isinstance(error, (IndexError, OverflowError)):
        raise ValueError(f"cache_seqlens, cache_leftpad, cache_batch_idx or block_table do not fit the cache: {error}") from None


def _shifted(q: Any, k_cache: Any, v_cache: Any, table: Any, lengths: Any, leftpad: Any) -> tuple[Any, ...]:
    """The cache in pages of one row, so that each sequence may start at any: caches, table and lengths."""
    framework = _frameworks.of(q)
    numbers, size, lengths = _pages(framework, q, k_cache, table, lengths)
    leftpad = _leftpad(framework, leftpad, q)
    rows = framework.numbers_to(numbers.shape[1] * size, q).reshape(1, -1) + leftpad.reshape(-1, 1)
    return *_rows(k_cache, v_cache), _sequences.physical(framework, q, numbers, size, rows), lengths - leftpad


def _leftpad(framework: Any, leftpad: Any, q: Any) -> Any:
    """Rows before the first key of each sequence; where only a kernel reads them, what is below 0 counts as 0."""
    given = framework.indices("cache_leftpad", leftpad, q)
    known = not _frameworks.is_traced() and not framework.traces(given) and _frameworks.is_on_host(given)
    if known and bool((given < 0).any()):
        raise ValueError(f"cache_leftpad has {int(given.min())}; pass 0 or more rows for each sequence")
    return given * (given > 0)


def _check_positions(rotary_cos: Any, k_cache: Any, table: Any) -> None:
    """Demands tables of cosines and sines for every position that the cache has, as FlashAttention does."""
    positions, rows = _frameworks.shape("rotary_cos", rotary_cos)[0], _frameworks.shape("k_cache", k_cache)[1]
    if table is not None:
        rows *= table.shape[1] if hasattr(table, "shape") else max(map(len, table), default=0)
    if positions < rows:
        raise ValueError(f"rotary_cos and rotary_sin have {positions} positions but the cache {rows}; give them as many or more")


def _chunked(q: Any, k_cache: Any, v_cache: Any, lengths: Any, call: _Chunks) -> Any:
    """Queries that see their own chunk of the cache, as packed sequences over pages of one row."""
    framework = _frameworks.of(q)
    numbers, size, lengths = _pages(framework, q, k_cache, call.table, lengths)
    starts = lengths * 0 if call.leftpad is None else _leftpad(framework, call.leftpad, q)
    shape, offsets, longest = _frameworks.shape("q", q), call.offsets, call.longest
    if offsets is None:
        flat, longest = q.reshape(-1, *shape[2:]), shape[1]
        offsets = framework.numbers_to(shape[0] + 1, q) * longest
    else:
        flat, longest = q, shape[0] if longest is None else min(bound("max_seqlen_q", longest), shape[0])
    pages = _sequences.cut_cache(flat, offsets, longest, lengths - starts, starts, numbers, size, call.chunk)
    factors = _sequences.of_parts(q, call.factors, numbers.shape[0], pages.table.shape[0] // max(numbers.shape[0], 1))
    values = Values(pages.query_offsets, pages.key_lengths, call.sinks, None, pages.longest, pages.table, call.slopes, factors)
    result = run(flat, *_rows(k_cache, v_cache), call.options, values, call.return_lse, None)
    if call.offsets is not None:
        return result
    out, lse = result if call.return_lse else (result, None)
    out = out.reshape(*shape[:-1], out.shape[-1])
    if lse is None:
        return out
    return out, _sequences.space_of(out).moveaxis(lse.reshape(shape[2], *shape[:2]), 0, 1)


class _Chunks(NamedTuple):
    """What a call in chunks asks for."""

    chunk: int
    table: Any
    leftpad: Any
    offsets: Any
    longest: int | None
    options: Any
    sinks: Any
    slopes: Any
    factors: Any
    return_lse: bool


def _pages(framework: Any, q: Any, cache: Any, table: Any, lengths: Any) -> tuple[Any, int, Any]:
    """The pages of each sequence, their rows, and the keys of each sequence; a padded cache is a page for each."""
    entries, size, *_ = _frameworks.shape("k_cache", cache)
    numbers = framework.numbers_to(entries, q).reshape(-1, 1) if table is None else framework.table(table, q)
    if lengths is None:
        lengths = (numbers.shape[1] * size,) * numbers.shape[0]
    return numbers, size, framework.indices("cache_seqlens", lengths, q)


def _rows(*caches: Any) -> list[Any]:
    return [cache.reshape(-1, 1, *cache.shape[2:]) for cache in caches]


def _number(q: Any, cu_seqlens_q: Any) -> int:
    if cu_seqlens_q is None:
        return _frameworks.shape("q", q)[0]
    offsets = getattr(cu_seqlens_q, "shape", None)
    return (len(cu_seqlens_q) if offsets is None else int(offsets[0])) - 1


def _table(q: Any, table: Any, cache_batch_idx: Any, cu_seqlens_q: Any, sequences: int) -> Any:
    """The table of a paged cache; a cache entry that a sequence picks is a page of its own."""
    if table is not None:
        if cache_batch_idx is None:
            return table
        framework = _frameworks.of(q)
        return framework.table(table, q)[framework.indices("cache_batch_idx", cache_batch_idx, q)]
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
    if is_number(cache_seqlens):
        return (max(whole("cache_seqlens", cache_seqlens), 0),) * sequences
    return cache_seqlens
