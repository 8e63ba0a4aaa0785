"""FlashAttention's functions, computed by FlashCore: tensors are batch x sequence x heads x dim."""

from __future__ import annotations

from typing import Any

from . import _frameworks
from ._arguments import whole
from ._attention import run
from ._options import NONE, Options, Values
from ._options import options as found


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
) -> Any:
    """``flash_attn.flash_attn_func`` by its signature and meaning, for tensors of any framework.

    With ``causal`` or ``window_size`` the last query stands at the last key. Results are always deterministic. With
    ``return_attn_probs`` the log-sum-exp comes along (out, log-sum-exp, None): FlashAttention's probabilities are for its
    own tests, and without dropout it returns none either. Dropout and ALiBi raise NotImplementedError, and so do gradients
    of tensors on a GPU.

    >>> import numpy
    >>> q = numpy.ones((2, 16, 4, 8), "float32")
    >>> flash_attn_func(q, q, q, causal=True, window_size=(7, 0)).shape
    (2, 16, 4, 8)
    """
    if dropout_p or alibi_slopes is not None:
        _refuse(dropout_p)
    options = _asked(causal, window_size, softmax_scale, softcap, "bshd")
    result = run(q, k, v, options, NONE, return_attn_probs, None)
    return (*result, None) if return_attn_probs else result


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
) -> Any:
    """``flash_attn.flash_attn_varlen_func`` by its signature and meaning: sequences packed one after another.

    Tensors are sequence x heads x dim. Offsets on a GPU are read by the kernel: nothing waits for them. Page tables,
    dropout and ALiBi raise NotImplementedError, and so do gradients of tensors on a GPU.

    >>> import numpy
    >>> q = numpy.ones((12, 4, 8), "float32")
    >>> flash_attn_varlen_func(q, q, q, [0, 5, 12], [0, 5, 12], 7, 7, causal=True).shape
    (12, 4, 8)
    """
    if dropout_p or alibi_slopes is not None:
        _refuse(dropout_p)
    if block_table is not None:
        raise NotImplementedError("page tables are not supported; pass packed keys and values and block_table=None")
    options = _asked(causal, window_size, softmax_scale, softcap, "packed")
    values = Values(cu_seqlens_q, cu_seqlens_k, longest=(int(max_seqlen_q), int(max_seqlen_k)))
    result = run(q, k, v, options, values, return_attn_probs, None)
    return (*result, None) if return_attn_probs else result


def _refuse(dropout_p: float) -> None:
    if dropout_p:
        raise NotImplementedError("dropout is not supported; pass dropout_p=0.0")
    raise NotImplementedError("ALiBi is not supported; pass alibi_slopes=None")


def _asked(causal: bool, window_size: Any, scale: float | None, softcap: float, layout: str) -> Options:
    unlimited = type(window_size) is tuple and window_size == (-1, -1)
    window = None if unlimited else _sides(window_size)
    # FlashAttention says 0.0 where None is meant.
    return found(causal, window, scale, softcap or None, layout, name="window_size")


def _sides(window_size: Any) -> tuple[int | None, ...]:
    """How many keys before and after its position a query sees; FlashAttention says -1 where None is meant."""
    try:
        sides = tuple(window_size)
    except TypeError:
        instead = "pass a pair: how many keys before, how many after"
        raise TypeError(f"window_size is {window_size!r}; {instead}") from None
    return tuple(None if side is None or whole("window_size", side) < 0 else side for side in sides)


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
) -> Any:
    """`flash_attn_func` with keys and values in one tensor, batch x sequence x 2 x heads x dim."""
    k, v = (kv[:, :, part] for part in range(_packed("kv", kv, 2)))
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *rest)


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
) -> Any:
    """`flash_attn_func` with queries, keys and values in one tensor, batch x sequence x 3 x heads x dim."""
    q, k, v = (qkv[:, :, part] for part in range(_packed("qkv", qkv, 3)))
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *rest)


def _packed(name: str, tensor: Any, parts: int) -> int:
    shape = _frameworks.shape(name, tensor)
    if len(shape) != 5 or shape[2] != parts:
        raise ValueError(f"{name} is {shape} but must be batch x sequence x {parts} x heads x dim")
    return parts
