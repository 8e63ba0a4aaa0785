"""The two halves of FlashAttention's autograd functions, which libraries that split sequences call by themselves.

Forward returns the result, its log-sum-exp, and two tensors that only dropout would fill. Backward writes gradients into the
tensors that it is given and returns the sums of ``dout * out`` over each row.
"""

from __future__ import annotations

from typing import Any

from .._attention import gradients, run
from .._arguments import bound
from .._flash_attn import _keys, asked, refuse_dropout
from .._options import Options, Values


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
    return _forward(q, k, v, options, Values(slopes=alibi_slopes))


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
    keys, longest = _keys(cu_seqlens_k, seqused_k, block_table), (bound("max_seqlen_q", max_seqlen_q), bound("max_seqlen_k", max_seqlen_k))
    return _forward(q, k, v, options, Values(cu_seqlens_q, keys, None, None, longest, block_table, alibi_slopes))


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
    return _backward(dout, (q, k, v), out, softmax_lse, (dq, dk, dv), options, Values(slopes=alibi_slopes))


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
    values = Values(cu_seqlens_q, cu_seqlens_k, None, None, longest, slopes=alibi_slopes)
    return _backward(dout, (q, k, v), out, softmax_lse, (dq, dk, dv), options, values)


def _options(
    dropout_p: float, scale: float | None, causal: bool, window: tuple[int, int], softcap: float, layout: str
) -> Options:
    if dropout_p:
        refuse_dropout()
    return asked(causal, window, scale, softcap, layout)


def _forward(q: Any, k: Any, v: Any, options: Options, values: Values) -> tuple[Any, Any, Any, Any]:
    import torch

    with torch.no_grad():
        out, lse = run(q, k, v, options, values, True, None)
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device)


def _backward(dout: Any, inputs: tuple[Any, Any, Any], out: Any, lse: Any, into: Any, options: Options, values: Values) -> Any:
    import torch

    with torch.no_grad():
        dout = dout.contiguous()
        computed = gradients(inputs, out, None, lse.contiguous(), dout, options, values)
        for given, own in zip(into, computed):
            if given is not None:
                given.copy_(own)
        return (dout.float() * out.float()).sum(-1).transpose(-1, -2).contiguous()
