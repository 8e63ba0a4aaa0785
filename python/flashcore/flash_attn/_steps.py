"""The two halves of FlashAttention's autograd functions, which libraries that split sequences call by themselves.

Forward returns the result, its log-sum-exp, the weights of ``return_softmax`` (FlashAttention's, for its own tests; without
dropout a tensor without elements) and ``rng_state``, whose first number is the seed of dropout. Backward needs that, writes
gradients into the tensors that it is given and returns the sums of ``dout * out`` over each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .. import _probabilities
from .._attention import gradients, run
from .._arguments import bound, number
from .._dropout import seed_of
from .._flash_attn import WORDS, _keys, asked
from .._options import Options, Values
from .._words import retell


def _flash_attn_forward(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Any | None = None,
    return_softmax: bool = False,
) -> tuple[Any, Any, Any, Any]:
    options = _options(dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, "bshd")
    return _forward(q, k, v, options, Values(slopes=alibi_slopes), return_softmax)


def _flash_attn_varlen_forward(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Any | None = None,
    return_softmax: bool = False,
    block_table: Any | None = None,
    leftpad_k: Any | None = None,
    seqused_k: Any | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Any, Any, Any, Any]:
    if leftpad_k is not None:
        raise NotImplementedError("leftpad_k is not supported; pass flash_attn_with_kvcache's cache_leftpad")
    if num_splits > 1:  # as FlashAttention says it
        raise RuntimeError("num_splits > 1 is not supported here; pass 0")
    options = _options(dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, "packed")
    keys = _keys(cu_seqlens_k, seqused_k, block_table)
    longest = (bound("max_seqlen_q", max_seqlen_q), bound("max_seqlen_k", max_seqlen_k))
    return _forward(q, k, v, options, Values(cu_seqlens_q, keys, None, None, longest, block_table, alibi_slopes), return_softmax)


def _flash_attn_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any | None,
    dk: Any | None,
    dv: Any | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Any | None = None,
    deterministic: bool = False,
    rng_state: Any | None = None,
) -> Any:
    options = _options(dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, "bshd")
    values = Values(slopes=alibi_slopes, seed=_seed(options, rng_state))
    return _backward(dout, (q, k, v), out, softmax_lse, (dq, dk, dv), options, values)


def _flash_attn_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any | None,
    dk: Any | None,
    dv: Any | None,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Any | None = None,
    deterministic: bool = False,
    rng_state: Any | None = None,
    zero_tensors: bool = False,
) -> Any:
    options = _options(dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, "packed")
    longest = (bound("max_seqlen_q", max_seqlen_q), bound("max_seqlen_k", max_seqlen_k))
    values = Values(cu_seqlens_q, cu_seqlens_k, None, None, longest, slopes=alibi_slopes, seed=_seed(options, rng_state))
    return _backward(dout, (q, k, v), out, softmax_lse, (dq, dk, dv), options, values)


def _options(
    dropout_p: float, scale: float | None, causal: bool, window: tuple[int, int], softcap: float, layout: str
) -> Options:
    with _told():
        return asked(causal, window, scale, softcap, layout, dropout=number("dropout_p", dropout_p))


def _seed(options: Options, rng_state: Any | None) -> Any | None:
    """The seed that forward drew."""
    if options.dropout is None:
        return None
    if not hasattr(rng_state, "__getitem__"):
        raise ValueError("with dropout_p pass the rng_state that forward returned, so that backward drops the same weights")
    return rng_state[:1]


def _forward(
    q: Any, k: Any, v: Any, options: Options, values: Values, return_softmax: bool
) -> tuple[Any, Any, Any, Any]:
    import torch

    rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if options.dropout is not None:
        rng_state[:1] = seed_of(q, k, v, None)
    values = values._replace(seed=_seed(options, rng_state))
    with torch.no_grad(), _told():
        out, lse = run(q, k, v, options, values, True, None)
    weights = _weights(q, k, options, values) if return_softmax else None
    return out, lse, q.new_empty(0) if weights is None else weights, rng_state


def _weights(q: Any, k: Any, options: Options, values: Values) -> Any | None:
    """FlashAttention's weights, where there is dropout."""
    if values.longest is None:
        return _probabilities.of_batch(q, k, options, values.slopes, values.seed)
    offsets = (values.query_lengths, values.key_lengths)
    return _probabilities.of_packed(q, k, offsets, values.longest, options, values.slopes, values.seed)


def _backward(dout: Any, inputs: tuple[Any, Any, Any], out: Any, lse: Any, into: Any, options: Options, values: Values) -> Any:
    import torch

    with torch.no_grad(), _told():
        dout = dout.contiguous()
        computed = gradients(inputs, out, None, lse.contiguous(), dout, options, values)
        for given, own in zip(into, computed):
            if given is not None:
                given.copy_(own)
        return (dout.float() * out.float()).sum(-1).transpose(-1, -2).contiguous()


@contextmanager
def _told() -> Iterator[None]:
    """Errors in FlashAttention's words."""
    try:
        yield
    except Exception as error:
        retell(error, **WORDS | {"keys": "cu_seqlens_k", "seed": "rng_state"})
        raise
