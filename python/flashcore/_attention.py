"""``attention``: options become one ``Options`` value, tensors go to the extension as they are."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from . import _bias, _frameworks, _masks, _native, _options, _quantise
from ._arguments import bound, flag, number, pair
from ._dropout import seed_of
from ._options import NONE, Options, Values
from ._widen import widened
from ._words import retell


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any | None = None,
    key_lengths: Any | None = None,
    query_lengths: Any | None = None,
    key_mask: Any | None = None,
    page_table: Any | None = None,
    factors: Any | None = None,
    blocks: tuple[int, int] | None = None,
    quantise: str | None = None,
    turned: bool = False,
    batch_invariant: bool = False,
    dropout: float = 0.0,
    dropout_seed: Any | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Any | None = None,
) -> Any:
    """Attention: ``softmax(scale * q @ k.T + mask) @ v`` for each head, in memory linear in the sequence length.

    Args:
        q, k, v: float16, bfloat16 or float32 tensors with 4 dimensions in the order of ``layout``; with 3 for one
            batch entry, with 2 (sequence, dim) for one head of it. The heads of ``q`` are a multiple of those of ``k``
            and ``v`` (grouped heads); ``v`` may have another dim.
        causal: a query sees the keys up to its own position. The last query is aligned with the last key.
        window: a query sees this many keys before its position, and as many after it unless ``causal``; or a pair of
            both numbers, where None means no limit.
        scale: factor on the scores; 1/sqrt(dim) if None.
        softcap: replaces each score by ``softcap * tanh(score / softcap)``.
        sinks: one logit per query head that takes part in the softmax and adds nothing to the output.
        key_lengths: how many keys each batch entry uses: int32 or int64, one number per entry. The last query is aligned
            with the last key in use.
        query_lengths: how many queries each batch entry uses; the other rows are set to zero.
        key_mask: which keys take part, bool, batch x keys (or keys, for one entry). Padding on the left or on the right
            costs nothing; masks with gaps are computed as a bias.
        page_table: which pages hold the keys of each batch entry: int32, batch x pages. ``k`` and ``v`` are then pages, a
            batch entry each, of any size and strides, and ``key_lengths`` says how many keys there are. Table entries
            beyond them are not read; a length below 0 counts as 0.
        factors: scale factors of 8-bit q, k and v (torch.float8_e4m3fn, float8_e5m2): three numbers, or three
            float32 tensors of batch x key heads. The result is bfloat16, or the type of ``out``. With 16-bit q,
            k and v may be float8_e4m3fn, with two factors: numbers, or float32 tensors of key heads or of batch x key heads,
            of any strides.
        blocks: rows of q and of k that share a factor. ``factors`` are then batch x heads x blocks for q and for k, and
            batch x heads x dim for v, as `quantise` gives them.
        quantise: ``"e4m3"`` to quantise q, k and v to 8 bits first, q and k by blocks of rows and v by features, after
            subtracting the keys' mean: faster on Hopper, and off by a few percent. For torch, without gradients.
        turned: v is transposed as ``quantise(v, turned=True)`` writes it, which saves doing so in every call on Hopper.
            For torch.
        batch_invariant: the bits of a row depend only on its own queries and keys, whatever else is in the batch and
            however long other sequences are; some calls are a few percent slower.
        dropout: the probability with which weights are dropped, as in training; the others are multiplied by
            ``1 / (1 - dropout)``. The log-sum-exp is that of all weights. Not for ``page_table``, ``factors``
            or ``quantise``.
        dropout_seed: decides, together with the positions of weights, which are dropped (`flashcore.dropout_mask`): a
            64-bit integer, a tensor with one, or a JAX key. If None, torch's generator draws one, so that
            ``torch.manual_seed`` reproduces it; other frameworks need one. A tensor is read by the kernel when it runs.
        layout: ``"bhsd"`` for batch, heads, sequence, dim; ``"bshd"`` for batch, sequence, heads, dim. Without a batch,
            the same order without it.
        return_lse: also return the log-sum-exp of each row's scores, float32, batch x heads x sequence, as far as ``q``
            has these.
        out: where to write the result; a new tensor if None. It may be float32 even if the others are not. It cannot be
            combined with gradients.

    Returns:
        The result, a tensor of q's framework, order and number of dimensions; with ``return_lse`` a pair. Rows that see no key are zeros
        with a log-sum-exp of minus infinity.

    On a GPU the call returns as soon as the kernel is queued on the current stream. ``sinks``, ``key_lengths``,
    ``query_lengths`` and ``page_table`` that are GPU tensors are read by the kernel when it runs: nothing waits, and a
    captured CUDA graph uses the values it finds when replayed (numbers out of range are clamped). ``key_mask`` is needed
    on the host: if it is a GPU tensor, reading it waits for the GPU, once for as long as the tensor is unchanged.

    torch's autograd and ``jax.grad`` differentiate the call: q, k, v, the log-sum-exp and the sinks.

    >>> import numpy
    >>> q = numpy.ones((2, 4, 16, 8), "float32")
    >>> k = numpy.ones((2, 2, 32, 8), "float32")                     # two query heads share a key head
    >>> out, lse = attention(q, k, k, window=(7, 0), return_lse=True)
    >>> out.shape, lse.shape
    ((2, 4, 16, 8), (2, 4, 16))
    >>> out = attention(q, k, k, causal=True, key_lengths=[32, 20])  # the second entry uses 20 keys
    >>> attention(q[0], k[0], k[0]).shape, attention(q[0, 0], k[0, 0], k[0, 0]).shape  # one entry, one head
    ((4, 16, 8), (16, 8))
    >>> pages = numpy.ones((10, 2, 16, 8), "float32")                # 10 pages of 16 keys
    >>> attention(q, pages, pages, page_table=[[7, 2], [0, -1]], key_lengths=[32, 9]).shape
    (2, 4, 16, 8)
    """
    try:
        dropout = number("dropout", dropout)
        if quantise is not None:
            if dropout:
                raise ValueError("dropout cannot be combined with quantise; omit one of them")
            given = {"causal": causal, "window": window, "scale": scale, "softcap": softcap, "sinks": sinks}
            given |= {"key_lengths": key_lengths, "query_lengths": query_lengths, "key_mask": key_mask}
            given |= {"page_table": page_table, "factors": factors, "layout": layout}
            given |= {"batch_invariant": batch_invariant}
            return _quantise.attention_by(quantise, q, k, v, given, return_lse, out)
        turned = flag("turned", turned)
        if blocks is not None:
            blocks = pair("blocks", blocks, "pass a pair: the rows of q and of k that share a factor")
        if turned:
            out = _quantise.out_of_turned(q, v) if out is None else out
        if page_table is not None:
            q, factors = widened(q, k, factors)
        plain = window is None and key_mask is None and factors is None and not turned and not return_lse and not dropout
        tried = plain and not _frameworks.is_traced()
        if tried:
            # As `run`, with fewer steps: this is the call that counts.
            try:
                options = _options.known.get((causal, None, scale, softcap, layout, False, batch_invariant, 0.0))
            except TypeError:  # a scale that is no number, which is told below
                options = None
            if options is not None:
                result = straight(q, k, v, out, options, query_lengths, key_lengths, sinks, None, page_table)
                if result is not None:
                    return result
            tried = options is not None
        if "float" in str(getattr(key_mask, "dtype", "")):
            instead = "pass bool, or numbers to add to scores to scaled_dot_product_attention"
            raise TypeError(f"key_mask is {key_mask.dtype}; {instead}")
        options = _options.options(causal, window, scale, softcap, layout, batch_invariant=batch_invariant, dropout=dropout)
        seed = seed_of(q, k, v, dropout_seed) if dropout else None
        given = (sinks, key_lengths, query_lengths, key_mask, page_table, factors, seed)
        values = NONE
        if turned or any(one is not None for one in given):
            values = Values(query_lengths, key_lengths, sinks, key_mask, None, page_table, None, factors, blocks, turned, seed)
        return (by_long_way if tried else run)(q, k, v, options, values, return_lse, out)
    except Exception as error:
        retell(error, queries="query_lengths", keys="key_lengths", table="page_table", mask="key_mask", seed="dropout_seed")
        raise


def packed_attention(
    q: Any,
    k: Any,
    v: Any,
    query_offsets: Any,
    key_offsets: Any | None = None,
    *,
    key_lengths: Any | None = None,
    page_table: Any | None = None,
    longest_query: int | None = None,
    longest_key: int | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any | None = None,
    factors: Any | None = None,
    batch_invariant: bool = False,
    dropout: float = 0.0,
    dropout_seed: Any | None = None,
    return_lse: bool = False,
    out: Any | None = None,
) -> Any:
    """Attention over packed sequences of different lengths.

    Args:
        q, k, v: sequence x heads x dim, all sequences one after another.
        query_offsets, key_offsets: where each sequence starts in q, and in k and v: int32 or int64, one more number than
            there are sequences, from 0 to the number of rows.
        longest_query, longest_key: upper bounds on the queries and keys of a sequence. Needed for speed on a GPU, where
            only the kernel reads offsets.

    With ``page_table`` (int32, sequences x pages) k and v are pages x rows of a page x heads x dim, with any strides, and
    ``key_lengths`` takes the place of ``key_offsets``: prompts, parts of prompts and single queries in one call.

    Other arguments are those of `attention`; the log-sum-exp is heads x sequence.

    >>> import numpy
    >>> q = numpy.ones((12, 4, 8), "float32")
    >>> packed_attention(q, q, q, [0, 5, 12], [0, 5, 12], causal=True).shape
    (12, 4, 8)
    >>> pages = numpy.ones((10, 16, 2, 8), "float32")
    >>> packed_attention(q, pages, pages, [0, 1, 12], key_lengths=[30, 11], page_table=[[3, 9], [4, -1]]).shape
    (12, 4, 8)
    """
    if (page_table is None) != (key_offsets is not None) or (page_table is None) != (key_lengths is None):
        raise ValueError("pass key_offsets, or page_table and key_lengths for keys in pages")
    try:
        dropout = number("dropout", dropout)
        options = _options.options(causal, window, scale, softcap, "packed", batch_invariant=batch_invariant, dropout=dropout)
        longest = None
        if longest_query is not None or longest_key is not None:
            rows_q, rows_k = (_frameworks.shape(name, tensor)[0] for name, tensor in (("q", q), ("k", k)))
            rows_k = rows_k if page_table is None else _UNBOUNDED
            longest = (
                rows_q if longest_query is None else bound("longest_query", longest_query),
                rows_k if longest_key is None else bound("longest_key", longest_key),
            )
        keys = key_offsets if page_table is None else key_lengths
        q, factors = widened(q, k, factors)
        seed = seed_of(q, k, v, dropout_seed) if dropout else None
        values = Values(query_offsets, keys, sinks, None, longest, page_table, factors=factors, seed=seed)
        return run(q, k, v, options, values, return_lse, out)
    except Exception as error:
        keys = "key_offsets" if page_table is None else "key_lengths"
        retell(error, queries="query_offsets", keys=keys, table="page_table", seed="dropout_seed")
        raise


def accumulate(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any | None = None,
    key_lengths: Any | None = None,
    query_lengths: Any | None = None,
    layout: str = "bhsd",
) -> None:
    """Accumulates attention over more keys into ``out`` and ``lse``, both float32.

    A log-sum-exp of minus infinity means that ``out`` holds nothing yet, whatever its memory. Other arguments are those of
    `attention`. Use it part after part for split keys and rings of GPUs.

    >>> import numpy
    >>> q, k = numpy.ones((1, 2, 3, 8), "float32"), numpy.ones((1, 2, 10, 8), "float32")
    >>> out, lse = numpy.empty_like(q), numpy.full((1, 2, 3), -numpy.inf, "float32")
    >>> for part in (k[:, :, :4], k[:, :, 4:]):
    ...     accumulate(q, part, part, out, lse)
    >>> bool(numpy.allclose(out, attention(q, k, k)))
    True
    """
    try:
        left, right = _options.band(causal, window)
        options = Options(left, right, False, scale, softcap, layout, accumulate=True)
        _frameworks.demand(q=q, k=k, v=v, out=out, lse=lse)
        framework = _frameworks.of(q)
        options, bound = _bound(framework, q, k, options, Values(query_lengths, key_lengths, sinks))
        framework.accumulate((q, k, v, out, lse), options.native, bound)
    except Exception as error:
        retell(error, queries="query_lengths", keys="key_lengths")
        raise


def straight(
    q: Any,
    k: Any,
    v: Any,
    out: Any | None,
    options: Options,
    queries: Any = None,
    keys: Any = None,
    sinks: Any = None,
    longest: tuple[int, int] | None = None,
    table: Any = None,
    factors: Any = None,
) -> Any | None:
    """Attention by the framework's short way; None where it has none for these tensors, or where something watches the call."""
    if _frameworks.is_traced() or _frameworks.duals._current_level >= 0:
        return None
    kind = type(q)
    shortcut = _shortcuts.get(kind)
    if shortcut is None:
        return None
    # The extension takes tensors of the same kind as they are.
    if (
        not (keys is None or type(keys) is kind)
        or not (queries is None or type(queries) is kind)
        or not (sinks is None or type(sinks) is kind)
        or not (table is None or type(table) is kind)
        or not (factors is None or _are_pair(kind, factors))
    ):
        return None
    try:
        result = shortcut(q, k, v, out, options.ready or options.native, queries, keys, sinks, longest, table, factors)
        if result is False:
            result = (_recorded or _learn_recorded())(q, k, v, options, queries, keys, sinks, longest)
    except (RuntimeError, IndexError):
        _frameworks.demand(q=q, k=k, v=v)
        result = _transformed(q)
    except ValueError:  # FlashAttention's functions take features with gaps, at the price of a copy
        if not any(map(has_gaps, (q, k, v))):
            raise
        result = None
    return result if out is None or result is None else _frameworks.of(q).written(out)


def has_gaps(tensor: Any) -> bool:
    """Whether the features of a tensor of torch do not lie side by side."""
    return getattr(tensor, "ndim", 0) > 0 and hasattr(tensor, "stride") and tensor.shape[-1] > 1 and tensor.stride(-1) != 1


def run(q: Any, k: Any, v: Any, options: Options, values: Values, return_lse: bool, out: Any | None) -> Any:
    """Attention; all public functions end here."""
    queries, keys, sinks, mask, longest, table, slopes, factors, _, turned, seed = values
    if not return_lse and mask is None and slopes is None and not turned and seed is None:
        result = straight(q, k, v, out, options, queries, keys, sinks, longest, table, factors)
        if result is not None:
            return result
    return by_long_way(q, k, v, options, values, return_lse, out)


def by_long_way(q: Any, k: Any, v: Any, options: Options, values: Values, return_lse: bool, out: Any | None) -> Any:
    """`run` where the short way was not taken."""
    if _is_compiling():
        from ._torch_operator import call

        return call(q, k, v, options, values, return_lse, out)
    return eager(q, k, v, options, values, return_lse, out)


def eager(q: Any, k: Any, v: Any, options: Options, values: Values, return_lse: bool, out: Any | None) -> Any:
    """`run` outside of tracing."""
    try:
        return _eager(q, k, v, options, values, return_lse, out)
    except _frameworks.UNTOLD:
        _frameworks.demand(q=q, k=k, v=v)
        raise


def _eager(q: Any, k: Any, v: Any, options: Options, values: Values, return_lse: bool, out: Any | None) -> Any:
    framework = _frameworks.of_all(q, k, v)
    q, k, v = framework.autocast(q, k, v)
    if framework.by_operator or framework.records(q, k, v, values.sinks) or framework.transforms(q, k, v):
        from ._torch_operator import call

        return call(q, k, v, options, values, return_lse, out)
    if framework.records(values.mask):
        raise NotImplementedError(_frameworks.NO_MASK_GRADIENTS)
    if framework.records(values.slopes):
        raise NotImplementedError(_frameworks.NO_SLOPE_GRADIENTS)
    if out is not None and type(_frameworks.of(out)) is _frameworks.Jax is not type(framework):
        raise TypeError("JAX arrays cannot be written; omit `out`")
    if framework.records(out):
        raise RuntimeError(_frameworks.NO_OUT_GRADIENTS)
    return by_framework(framework, q, k, v, options, values, return_lse, out)


def by_framework(
    framework: Any, q: Any, k: Any, v: Any, options: Options, values: Values, return_lse: bool, out: Any | None
) -> Any:
    """Attention of tensors that nobody records or traces."""
    options, bound = _bound(framework, q, k, options, values)
    result = framework.attention(q, k, v, out, options.layout, return_lse, options.native, bound)
    if out is not None:
        framework.written(out)
    return result


def gradients(
    inputs: tuple[Any, Any, Any], out: Any, sums: Any | None, lse: Any, d_out: Any, options: Options, values: Values
) -> tuple[Any, ...]:
    """The gradients of q, k, v and the sinks (None without sinks) of a call of torch's with that result."""
    from ._gradients import of_torch

    q, k, _ = inputs
    framework = _frameworks.of(q)
    options, bound = _bound(framework, q, k, options, values)
    used = options.layout != "packed" and (values.query_lengths is not None or values.key_lengths is not None)
    whole = values.mask is None and not used
    return of_torch(framework, inputs, out, sums, lse, d_out, values.sinks is not None, options.native, bound, whole)


_shortcuts = _frameworks.shortcuts
_recorded: Any = None
"""`_torch_operator.recorded`, once a call needed it."""


def _learn_recorded() -> Any:
    global _recorded
    from ._torch_operator import recorded as _recorded

    return _recorded


_UNBOUNDED = 1 << 30
"""More keys than a sequence has: what its pages hold is the bound then."""


def _are_pair(kind: type, factors: Any) -> bool:
    """Whether factors are those of a cache, tensors of that kind."""
    return type(factors) in (tuple, list) and len(factors) == 2 and all(type(one) is kind and one.ndim > 0 for one in factors)


def _bound(
    framework: Any, q: Any, k: Any, options: Options, values: Values
) -> tuple[Options, _native.Values | None]:
    """Lengths, sinks and masks as the extension takes them; a mask may be a band, which the options then have."""
    if values is NONE:
        return options, None
    keys, ranges, bias = values.key_lengths, None, _bias.slopes(framework, values.slopes, q)
    if values.mask is not None and (keys is not None or values.table is not None):
        raise ValueError("pass key_lengths or key_mask, not both")
    extents = None if values.mask is None else _extents(q, k, options.layout)
    # A mask that gets its values later is added to scores.
    unread = extents is None or framework.traces(values.mask)
    reduced = None if unread else _masks.reduce(values.mask, _masks.band_of(options), *extents)
    if reduced is not None and reduced[1] is not None and (values.seed is not None or values.query_lengths is not None):
        reduced = None  # dropout counts the keys of whole sequences, not of their parts, and ranges go with no lengths
    if reduced is not None:
        (left, right, top_left), starts, keys = reduced
        options = replace(options, left=left, right=right, top_left=top_left)
        if starts is not None:
            keys, ranges = None, (starts, keys or (extents[2],) * extents[0])
    elif extents is not None:
        bias = _both(bias, _bias.additive(framework, values.mask, q, extents[2]))
    packed = options.layout == "packed"
    offsets = packed and values.table is None
    names = ("query_offsets" if packed else "query_lengths", "key_offsets" if offsets else "key_lengths")
    lengths = [framework.indices(name, given, q) for name, given in zip(names, (values.query_lengths, keys))]
    sinks = framework.floats("sinks", values.sinks, q)
    table = framework.table(values.table, q)
    factors = framework.factors(values.factors, q)
    more = (values.blocks, values.turned, values.seed)
    return options, _native.Values(*lengths, sinks, values.longest, ranges, table, bias, factors, *more)


def _both(slopes: Any, mask: Any) -> Any:
    if slopes is not None:
        raise NotImplementedError("slopes can only be combined with masks that are padding or a band; pass one of them")
    return mask


def _extents(q: Any, k: Any, layout: str) -> tuple[int, int, int] | None:
    """Batch entries, queries and keys, by which masks are read; None for tensors that the extension refuses."""
    of_q, of_k = (tuple(getattr(tensor, "shape", ())) for tensor in (q, k))
    if len(of_q) != len(of_k) or len(of_q) not in (2, 3, 4):
        return None
    sequence = -2 if layout == "bhsd" or len(of_q) == 2 else -3
    return of_q[0] if len(of_q) == 4 else 1, of_q[sequence], of_k[sequence]


def _transformed(q: Any) -> None:
    """Nothing for tensors without memory, so that the long way is taken; else the error that is being handled."""
    if not _frameworks.without_memory(sys.modules["torch"], q):
        raise  # noqa: PLE0704


def _is_compiling() -> bool:
    """Whether torch is tracing the caller, so that it needs an operator of its own."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()
