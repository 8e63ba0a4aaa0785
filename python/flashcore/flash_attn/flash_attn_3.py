"""FlashAttention-3's functions, in the order of its arguments; its callers import them from ``flash_attn_interface``."""

from __future__ import annotations

from typing import Any

from .. import _flash_attn, _frameworks, _kvcache
from .._merge import merge

Window = tuple[int | None, int | None]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any | None = None,
    q_descale: Any | None = None,
    k_descale: Any | None = None,
    v_descale: Any | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention over batch x sequence x heads x dim; with ``return_attn_probs`` also the log-sum-exp."""
    descales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk, qv=qv)
    result = _flash_attn.flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs, **descales
    )
    return result[:2] if return_attn_probs else result


def flash_attn_qkvpacked_func(
    qkv: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Any | None = None,
    k_descale: Any | None = None,
    v_descale: Any | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` over batch x sequence x 3 x heads x dim, or x all heads x dim with ``num_heads_q``."""
    if num_heads_q is None:
        parts = [qkv[:, :, part] for part in range(3)]
    else:
        heads = (_frameworks.shape("qkv", qkv)[2] - num_heads_q) // 2
        parts = [qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads], qkv[:, :, num_heads_q + heads :]]
    descales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return flash_attn_func(
        *parts, softmax_scale, causal, **descales, window_size=window_size, attention_chunk=attention_chunk,
        softcap=softcap, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any | None = None,
    seqused_k: Any | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any | None = None,
    q_descale: Any | None = None,
    k_descale: Any | None = None,
    v_descale: Any | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Any | None = None,
) -> Any:
    """Attention over packed sequences; with ``return_attn_probs`` also the log-sum-exp."""
    return _flash_attn.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, window_size,
        softcap, seqused_k=seqused_k, seqused_q=seqused_q, attention_chunk=attention_chunk, return_softmax_lse=return_attn_probs, s_aux=s_aux, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, qv=qv,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any | None = None,
    v: Any | None = None,
    qv: Any | None = None,
    rotary_cos: Any | None = None,
    rotary_sin: Any | None = None,
    cache_seqlens: Any | None = None,
    cache_batch_idx: Any | None = None,
    cache_leftpad: Any | None = None,
    page_table: Any | None = None,
    cu_seqlens_q: Any | None = None,
    cu_seqlens_k_new: Any | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any | None = None,
    q_descale: Any | None = None,
    k_descale: Any | None = None,
    v_descale: Any | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Any | None = None,
    out: Any | None = None,
) -> Any:
    """`flashcore.flash_attn_with_kvcache`; the log-sum-exp is followed by the parts of split rows, of which there are none."""
    result = _kvcache.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, None,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, None, num_splits, return_softmax_lse,
        page_table=page_table, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        attention_chunk=attention_chunk, scheduler_metadata=scheduler_metadata, s_aux=s_aux, out=out,
    )  # fmt: skip
    return (*result, None, None) if return_softmax_lse else result


def flash_attn_combine(out_partial: Any, lse_partial: Any, out: Any | None = None, out_dtype: Any | None = None) -> Any:
    """Partial results, parts x batch x sequence x heads x dim in float32, put together by their log-sum-exps.

    Those are parts x batch x sequence x heads, as FlashAttention-3 has them here, and so is the one that is returned.
    """
    lse_partial = lse_partial.transpose(-1, -2).contiguous()
    whole, lse = merge(out_partial, lse_partial, layout="bshd", return_lse=True)
    lse = lse.transpose(-1, -2)
    if out is not None:
        return out.copy_(whole), lse
    return whole if out_dtype is None else whole.to(out_dtype), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Any,
    qkv_dtype: Any | None = None,
    headdim_v: int | None = None,
    cu_seqlens_q: Any | None = None,
    cu_seqlens_k_new: Any | None = None,
    cache_leftpad: Any | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> None:
    """None: kernels read lengths when they run, so that there is nothing to plan before and nothing that goes stale."""
