"""FlashAttention's functions, computed by FlashCore: tensors are batch x sequence x heads x dim."""

from __future__ import annotations

from typing import Any

from . import _frameworks
from ._arguments import whole
from ._attention import band, run


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

    With ``causal`` or ``window_size`` the last query stands at the last key. Results are always deterministic. Dropout,
    ALiBi, attention probabilities and gradients raise NotImplementedError.

    >>> import numpy
    >>> q = numpy.ones((2, 16, 4, 8), "float32")
    >>> flash_attn_func(q, q, q, causal=True, window_size=(7, 0)).shape
    (2, 16, 4, 8)
    """
    if dropout_p:
        raise NotImplementedError("dropout is not supported; pass dropout_p=0.0")
    if alibi_slopes is not None:
        raise NotImplementedError("ALiBi is not supported; pass alibi_slopes=None")
    if return_attn_probs:
        raise NotImplementedError(
            "attention probabilities are not kept; for the log-sum-exp use flashcore.attention(..., return_lse=True)"
        )
    unlimited = type(window_size) is tuple and window_size == (-1, -1)
    left, right = band(causal, None if unlimited else _sides(window_size), "window_size")
    # FlashAttention says 0.0 where None is meant.
    settings = (left, right, False, softmax_scale, softcap or None, None, None, None, "bshd")
    return run(q, k, v, settings, False, None)


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
