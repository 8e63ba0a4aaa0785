"""FlashCore in PyTorch's own place for flash attention: what calls `scaled_dot_product_attention` then runs on it.

>>> import flashcore.integrations.torch as flashcore_torch
>>> flashcore_torch.register()
>>> import torch
>>> torch.nn.attention.activate_flash_attention_impl("FLASHCORE")
>>> torch.nn.attention.restore_flash_attention_impl()

From then on PyTorch's *flash* backend is FlashCore, forward and backward, for tensors on a GPU: in
`torch.nn.functional.scaled_dot_product_attention`, in `varlen_attn`, and in `context_parallel`, whose ring is made of the
same operators. Which calls the flash backend gets is decided by PyTorch as before (``sdpa_kernel(SDPBackend.FLASH_ATTENTION)``
demands it). Dropout raises NotImplementedError: use another backend for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _attention
from .._options import NONE, Options, Values

NAME = "FLASHCORE"


class Handle:
    """Operators that FlashCore has taken; `remove` gives them back."""

    def __init__(self) -> None:
        self.library: Any = torch.library.Library("aten", "IMPL")
        for name, operator in OPERATORS.items():
            self.library.impl(name, operator, "CUDA")

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
        self.library = None


def register() -> None:
    """Makes the name "FLASHCORE" known to `torch.nn.attention.activate_flash_attention_impl`."""
    offer = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if offer is None:
        raise NotImplementedError(
            f"torch {torch.__version__} has no place for other implementations; use `handle = activate()` instead"
        )
    offer(NAME, register_fn=Handle)


def activate() -> Handle:
    """FlashCore instead of PyTorch's flash attention, in any version; `remove()` of what it returns ends that."""
    return Handle()


def _options(causal: bool, scale: float | None, layout: str, left: int | None = None, right: int | None = None) -> Options:
    left, right = (None if side is None or side < 0 else side for side in (left, right))
    return Options(left, 0 if causal else right, False, scale, None, layout)


def _check(dropout_p: float, return_debug_mask: bool = False) -> None:
    if dropout_p:
        raise NotImplementedError("FlashCore has no dropout; pass dropout_p=0, or use another backend of torch")
    if return_debug_mask:
        raise NotImplementedError("FlashCore never has the matrix of weights; pass return_debug_mask=False")


def _unused(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """State of random numbers that nobody drew, and a mask that nobody asked for."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return state, torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _attend(query: Tensor, key: Tensor, value: Tensor, options: Options, values: Values) -> tuple[Tensor, Tensor]:
    # As torch has it: the output lies in memory as the queries do.
    out = torch.empty_like(query) if query.shape[-1] == value.shape[-1] else None
    with torch.no_grad():
        return _attention.eager(query, key, value, options, values, True, out)


def _dense(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    _check(dropout_p, return_debug_mask)
    out, lse = _attend(query, key, value, _options(is_causal, scale, "bhsd"), NONE)
    return out, lse, None, None, query.shape[2], key.shape[2], *_unused(query)


def _dense_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Any, philox_offset: Any, *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check(dropout_p)
    options = _options(is_causal, scale, "bhsd")
    return _attention.gradients((query, key, value), out, None, logsumexp, grad_out, options, NONE)[:3]


def _sequences(cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, seqused_k: Any = None) -> tuple[str, Values]:
    """How tensors lie, and the lengths of their sequences."""
    if cum_seq_q is None:
        return "bshd", NONE if seqused_k is None else Values(key_lengths=seqused_k)
    if seqused_k is not None:
        raise NotImplementedError("FlashCore takes offsets or used lengths of keys, not both; pass one of them")
    return "packed", Values(cum_seq_q, cum_seq_k, longest=(max_q, max_k))


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Any = None, alibi_slopes: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    _check(dropout_p, return_debug_mask)
    if alibi_slopes is not None:
        raise NotImplementedError("FlashCore has no ALiBi; use another backend of torch")
    layout, values = _sequences(cum_seq_q, cum_seq_k, max_q, max_k, seqused_k)
    options = _options(is_causal, scale, layout, window_size_left, window_size_right)
    out, lse = _attend(query, key, value, options, values)
    return out, lse, *_unused(query)


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Any, unused: Any, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check(dropout_p)
    layout, values = _sequences(cum_seq_q, cum_seq_k, max_q, max_k)
    options = _options(is_causal, scale, layout, window_size_left, window_size_right)
    return _attention.gradients((query, key, value), out, None, logsumexp, grad_out, options, values)[:3]


OPERATORS = {
    "_scaled_dot_product_flash_attention": _dense,
    "_scaled_dot_product_flash_attention_backward": _dense_backward,
    "_flash_attention_forward": _forward,
    "_flash_attention_backward": _backward,
}
