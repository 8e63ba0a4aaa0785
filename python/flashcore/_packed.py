"""FlashAttention's functions over tensors that hold keys and values, or queries too, side by side."""

from __future__ import annotations

from typing import Any

from . import _frameworks
from ._flash_attn import flash_attn_func, flash_attn_varlen_func


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_seed: Any | None = None,
) -> Any:
    """`flash_attn_func` with keys and values in one tensor, batch x sequence x 2 x heads x dim."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, *_parts("kv", kv, 2, 2), *rest, dropout_seed=dropout_seed)


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_seed: Any | None = None,
) -> Any:
    """`flash_attn_func` with queries, keys and values in one tensor, batch x sequence x 3 x heads x dim."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(*_parts("qkv", qkv, 3, 2), *rest, dropout_seed=dropout_seed)


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
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
    *,
    dropout_seed: Any | None = None,
) -> Any:
    """`flash_attn_varlen_func` with keys and values in one tensor, sequence x 2 x heads x dim."""
    sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, *_parts("kv", kv, 2, 1), *sequences, *rest, dropout_seed=dropout_seed)


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_seed: Any | None = None,
) -> Any:
    """`flash_attn_varlen_func` with queries, keys and values in one tensor, sequence x 3 x heads x dim."""
    sequences = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(*_parts("qkv", qkv, 3, 1), *sequences, *rest, dropout_seed=dropout_seed)


def _parts(name: str, tensor: Any, parts: int, at: int) -> list[Any]:
    """The tensors that lie side by side along dimension `at`."""
    shape = _frameworks.shape(name, tensor)
    if len(shape) != at + 3 or shape[at] != parts:
        before = "batch x sequence" if at == 2 else "sequence"
        raise ValueError(f"{name} is {shape} but must be {before} x {parts} x heads x dim")
    return [tensor[(slice(None),) * at + (part,)] for part in range(parts)]
