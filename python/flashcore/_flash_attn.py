"""FlashAttention's functions, computed by FlashCore: tensors are batch x sequence x heads x dim."""

from __future__ import annotations

from typing import Any

from . import _frameworks, _latent, _probabilities, _sequences
from ._arguments import bound, count, number, whole
from ._attention import has_gaps, run, straight
from ._dropout import seed_of
from ._options import NONE, Options, Values
from ._options import options as made
from ._widen import widened
from ._words import retell

OF_DROPOUT = {"dropout": "dropout_p", "seed": "dropout_seed"}
"""What it calls the arguments of dropout."""
DESCALES = "k_descale and v_descale"
"""What it calls factors."""
WORDS = {"queries": "cu_seqlens_q", "table": "block_table", "scale": "softmax_scale", "slopes": "alibi_slopes"} | OF_DROPOUT
WORDS |= {"factors": DESCALES}
"""What FlashAttention calls arguments over packed sequences."""


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    q_descale: Any | None = None,
    k_descale: Any | None = None,
    v_descale: Any | None = None,
    attention_chunk: int = 0,
    dropout_seed: Any | None = None,
    qv: Any | None = None,
) -> Any:
    """``flash_attn.flash_attn_func`` by its signature and meaning, for tensors of any framework.

    With ``causal`` or ``window_size`` the last query stands at the last key. Results are always deterministic. With
    ``return_attn_probs`` the log-sum-exp comes along, and FlashAttention's weights, for tests: (out, log-sum-exp, None), with
    dropout batch x heads x queries x keys in place of None. Which weights ``dropout_p`` leaves out, `flashcore.dropout_mask`
    says; ``dropout_seed`` is `attention`'s. ``alibi_slopes``, one for each query head or for each batch entry and head, take
    slope times distance from the scores. FlashAttention-3's ``q_descale``, ``k_descale`` and ``v_descale``, float32, batch x
    key heads, go with tensors of 8 bits, whose result is bfloat16; with its ``attention_chunk`` a query sees the keys of its
    own chunk of so many. Its ``qv`` is a second part of the queries, which meets the values: scores are ``q @ k.T + qv @ v.T``.

    >>> import numpy
    >>> q = numpy.ones((2, 16, 4, 8), "float32")
    >>> flash_attn_func(q, q, q, causal=True, window_size=(7, 0)).shape
    (2, 16, 4, 8)
    """
    try:
        dropout_p = number("dropout_p", dropout_p)
        if qv is not None:
            q, k, softmax_scale = _latent.with_second_part(q, qv, k, v, softmax_scale, (k_descale, v_descale))
        if attention_chunk:
            _frameworks.demand(q=q, k=k, v=v)
            rest = dict(dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap)
            rest |= dict(alibi_slopes=alibi_slopes, dropout_seed=dropout_seed)
            chunk = count("attention_chunk", attention_chunk, "pass 0 for one chunk")
            return _in_chunks(q, k, v, chunk, rest, return_attn_probs, (q_descale, k_descale, v_descale))
        options = asked(causal, window_size, softmax_scale, softcap, "bshd", dropout=dropout_p)
        factors = descales(q, q_descale, k_descale, v_descale)
        plain = alibi_slopes is None and factors is None and not dropout_p
        if plain and not return_attn_probs:
            result = straight(q, k, v, None, options)
            if result is not None:
                return result
        seed = seed_of(q, k, v, dropout_seed) if dropout_p else None
        values = NONE if plain else Values(slopes=alibi_slopes, factors=factors, seed=seed)
        result = run(*tidied(q, k, v), options, values, return_attn_probs, None)
        return (*result, _probabilities.of_batch(q, k, options, alibi_slopes, seed)) if return_attn_probs else result
    except Exception as error:
        retell(error, scale="softmax_scale", slopes="alibi_slopes", factors=DESCALES, **OF_DROPOUT)
        raise


def descales(q: Any, q_descale: Any, k_descale: Any, v_descale: Any) -> tuple[Any, ...] | None:
    """The factors of q, k and v, or of k and v alone, where q has more bits; None where nothing is multiplied."""
    if q_descale is None and k_descale is None and v_descale is None:
        return None
    given = (q_descale, k_descale, v_descale)
    if "float8" in str(getattr(q, "dtype", "")):
        return _alike(given)
    if q_descale is not None:
        raise ValueError("q_descale is for queries of 8 bits; pass None")
    return tuple(one.reshape(1) if getattr(one, "ndim", None) == 0 else one for one in _alike(given[1:]))


def _alike(descale: tuple[Any, ...]) -> tuple[Any, ...]:
    """Factors of all tensors: ones like the others where a tensor has none."""
    given = next(factors for factors in descale if factors is not None)
    if not hasattr(given, "dtype") and not isinstance(given, (int, float)):
        raise TypeError(f"descales are {given!r}; pass float32 tensors of batch x key heads")
    return tuple(given * 0 + 1 if factors is None else factors for factors in descale)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any | None = None,
    *,
    seqused_k: Any | None = None,
    seqused_q: Any | None = None,
    attention_chunk: int = 0,
    return_softmax_lse: bool = False,
    s_aux: Any | None = None,
    sinks: Any | None = None,
    learnable_sink: Any | None = None,
    num_splits: int = 0,
    q_descale: Any | None = None,
    k_descale: Any | None = None,
    v_descale: Any | None = None,
    batch_invariant: bool = False,
    dropout_seed: Any | None = None,
    qv: Any | None = None,
    q_v: Any | None = None,
    out: Any | None = None,
) -> Any:
    """``flash_attn.flash_attn_varlen_func`` by its signature and meaning: sequences packed one after another.

    Tensors are sequence x heads x dim. Offsets on a GPU are read by the kernel: nothing waits for them. With
    ``block_table``, sequences x pages, k and v are pages x rows of a page x heads x dim, of any size and strides, and
    ``seqused_k`` says how many keys each sequence has (``cu_seqlens_k`` where it does not). Without pages ``seqused_q`` and
    ``seqused_k`` say how many rows of each sequence are used; the others become zeros. With ``attention_chunk`` a query sees
    the keys of its own chunk of so many, counted from the first. What the engines add goes by
    name: sinks, under any of their names, and ``return_softmax_lse``, which returns (out, log-sum-exp). Keys and values may
    be float8_e4m3fn, with ``k_descale`` and ``v_descale``, float32, sequences x key heads or what expands to it. q then has 16
    bits, or 8 as they have, with a ``q_descale``: it is widened, and the result is bfloat16. ``qv``, which vLLM calls ``q_v``,
    is a second part of the queries, which meets the values: scores are ``q @ k.T + qv @ v.T``. ``batch_invariant`` and
    ``dropout_seed`` are `attention`'s; where sequences are cut (``seqused_q``,
    ``seqused_k``, ``attention_chunk``), dropout numbers their parts. Gradients through pages raise NotImplementedError.

    >>> import numpy
    >>> q = numpy.ones((12, 4, 8), "float32")
    >>> flash_attn_varlen_func(q, q, q, [0, 5, 12], [0, 5, 12], 7, 7, causal=True).shape
    (12, 4, 8)
    """
    try:
        dropout_p = number("dropout_p", dropout_p)
        qv = q_v if qv is None else qv
        if qv is not None:
            q, k, softmax_scale = _latent.with_second_part(q, qv, k, v, softmax_scale, (k_descale, v_descale))
        q, factors = widened(q, k, descales(q, q_descale, k_descale, v_descale))
        options = asked(causal, window_size, softmax_scale, softcap, "packed", batch_invariant, dropout_p)
        bounds = (bound("max_seqlen_q", max_seqlen_q), bound("max_seqlen_k", max_seqlen_k))
        if seqused_q is not None or attention_chunk or (seqused_k is not None and block_table is None):
            _frameworks.demand(q=q, k=k, v=v)
            chunk = count("attention_chunk", attention_chunk, "pass 0 for one chunk")
            # Chunks are counted up to the longest sequence: no bound may be beyond what there is.
            rows = [_frameworks.shape(name, x)[0] for name, x in (("q", q), ("k", k))]
            packed = _sequences.Packed(cu_seqlens_q, cu_seqlens_k, tuple(map(min, bounds, rows)))
            cu_seqlens_q, cu_seqlens_k, bounds = _parts(q, packed, seqused_q, seqused_k, chunk, block_table, alibi_slopes)
            sequences = len(packed.query_offsets) - 1
            factors = _sequences.of_parts(q, factors, sequences, (len(cu_seqlens_q) - 1) // max(sequences, 1))
            seqused_k = None
        keys = cu_seqlens_k if seqused_k is None and block_table is None else _keys(cu_seqlens_k, seqused_k, block_table)
        logit = logits(sinks, s_aux, learnable_sink)
        if alibi_slopes is None and not return_attn_probs and not return_softmax_lse and not dropout_p:
            result = straight(q, k, v, out, options, cu_seqlens_q, keys, logit, bounds, block_table, factors)
            if result is not None:
                return result
        seed = seed_of(q, k, v, dropout_seed) if dropout_p else None
        values = Values(cu_seqlens_q, keys, logit, None, bounds, block_table, alibi_slopes, factors, seed=seed)
        result = run(*tidied(q, k, v), options, values, return_attn_probs or return_softmax_lse, out)
        if not return_attn_probs:
            return result
        return *result, _probabilities.of_packed(q, k, (cu_seqlens_q, keys), bounds, options, alibi_slopes, seed)
    except Exception as error:
        of_keys = "cu_seqlens_k" if seqused_k is None or block_table is None else "seqused_k"
        retell(error, keys=of_keys, sinks=name_of_sinks(sinks, s_aux, learnable_sink), **WORDS)
        raise


def _keys(offsets: Any, lengths: Any, block_table: Any) -> Any:
    """Offsets of packed keys, or lengths of those in pages."""
    if block_table is None:
        return offsets
    if lengths is not None:
        return lengths
    if offsets is None:
        raise ValueError("keys in pages need their number; pass seqused_k, one per sequence")
    return offsets[1:] - offsets[:-1] if hasattr(offsets, "shape") else [b - a for a, b in zip(offsets, offsets[1:])]


def tidied(*tensors: Any) -> tuple[Any, ...]:
    """Tensors of torch whose features lie side by side: FlashAttention, too, copies others."""
    return tuple(x.contiguous() if has_gaps(x) else x for x in tensors)


def _parts(q: Any, packed: Any, used_q: Any, used_k: Any, chunk: int, block_table: Any, slopes: Any) -> Any:
    """Packed sequences cut into the parts that see each other."""
    if block_table is not None:
        instead = "use flash_attn_with_kvcache for chunks"
        raise NotImplementedError(f"seqused_q and attention_chunk do not go with keys in pages; {instead}")
    if getattr(slopes, "ndim", 1) > 1:
        asked = (("seqused_q", used_q is not None), ("seqused_k", used_k is not None), ("attention_chunk", chunk))
        given = " and ".join(name for name, there in asked if there)
        raise NotImplementedError(f"slopes of each sequence cannot be combined with {given}; pass one per head")
    if packed.query_offsets is None or packed.key_offsets is None:
        raise ValueError("packed sequences need cu_seqlens_q and cu_seqlens_k; pass both")
    return _sequences.cut(q, packed, used_q, used_k, chunk)


def _in_chunks(q: Any, k: Any, v: Any, chunk: int, rest: dict[str, Any], lse: bool, descale: Any) -> Any:
    """A batch, batch x sequence x heads x dim, whose queries see their own chunk of keys."""
    (batch, queries, heads, _), (_, keys, _, _) = (_frameworks.shape(name, x) for name, x in (("q", q), ("k", k)))
    packed = _sequences.equal(q, batch, queries, keys)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    rest |= dict(zip(("q_descale", "k_descale", "v_descale"), descale))
    result = flash_attn_varlen_func(
        *flat, *packed[:2], *packed.longest, **rest, attention_chunk=chunk, return_softmax_lse=lse
    )
    out, sums = result if lse else (result, None)
    out = out.reshape(batch, queries, heads, out.shape[-1])
    if not lse:
        return out
    return out, _sequences.space_of(out).moveaxis(sums.reshape(heads, batch, queries), 0, 1), None


def logits(sinks: Any, s_aux: Any, learnable_sink: Any) -> Any:
    """The sinks, by whichever name a caller gives them."""
    if sinks is not None:
        return sinks
    return learnable_sink if s_aux is None else s_aux


def name_of_sinks(sinks: Any, s_aux: Any, learnable_sink: Any) -> str:
    """The name by which a caller gives the sinks, for messages."""
    if sinks is not None:
        return "sinks"
    return "learnable_sink" if s_aux is None else "s_aux"


def asked(
    causal: bool, window_size: Any, scale: float | None, softcap: float, layout: str, batch_invariant: bool = False,
    dropout: float = 0.0,
) -> Options:  # fmt: skip
    """Options as FlashAttention's callers give them."""
    key = (causal, window_size, scale, softcap, layout, batch_invariant, dropout)
    # What traces a call must not see the cache; numbers in a tensor may change.
    if _frameworks.is_traced() or type(window_size) is not tuple or len(window_size) != 2:
        return _asked(*key)
    try:
        found = _known.get(key)
    except TypeError:  # a scale that is no number, which is told below
        found = None
    return found or _remember(key, _asked(*key))


_known: dict[tuple[Any, ...], Options] = {}
"""Options by what FlashAttention's callers say, so that a call finds them."""


def _remember(key: tuple[Any, ...], options: Options) -> Options:
    if not all(type(side) is int for side in key[1]):
        return options
    if len(_known) >= 1024:  # a program that never asks the same twice
        _known.clear()
    return _known.setdefault(key, options)


def _asked(
    causal: bool, window_size: Any, scale: float | None, softcap: float, layout: str, batch_invariant: bool, dropout: float
) -> Options:
    unlimited = window_size is None or (type(window_size) is tuple and window_size == (-1, -1))
    window = None if unlimited else _sides(window_size)
    # FlashAttention says 0.0 where None is meant.
    return made(causal, window, scale, softcap or None, layout, False, "window_size", batch_invariant, dropout)


def _sides(window_size: Any) -> tuple[int | None, ...]:
    """How many keys before and after its position a query sees; FlashAttention says -1 where None is meant."""
    try:
        sides = tuple(window_size)
    except TypeError:
        instead = "pass a pair: how many keys before, how many after"
        raise TypeError(f"window_size is {window_size!r}; {instead}") from None
    numbers = [None if side is None else whole("window_size", side) for side in sides]
    return tuple(None if side is None or side < 0 else side for side in numbers)
