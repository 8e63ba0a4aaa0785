"""FlashCore in PyTorch's own place for flash attention: what calls `scaled_dot_product_attention` then runs on it.

>>> import flashcore.integrations.torch as flashcore_torch
>>> flashcore_torch.register()
>>> import torch
>>> torch.nn.attention.activate_flash_attention_impl("FLASHCORE")
>>> torch.nn.attention.restore_flash_attention_impl()

From then on PyTorch's *flash* backend is FlashCore, forward and backward, for tensors on a GPU: in
`torch.nn.functional.scaled_dot_product_attention`, in `varlen_attn`, and in `context_parallel`, whose ring is made of the
same operators. Which calls the flash backend gets is decided by PyTorch as before (``sdpa_kernel(SDPBackend.FLASH_ATTENTION)``
demands it). Dropout leaves out other weights than PyTorch's own kernels do, as often; it raises NotImplementedError in
`context_parallel`, whose backward pass knows the random state of its first step alone.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from .. import _attention
from .._dropout import seed_of
from .._options import NONE, Options, Values

NAME = "FLASHCORE"
RING = "_templated_ring_attention"
"""The function of torch's that goes round the ring of `context_parallel`."""


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


def _options(
    dropout_p: float, causal: bool, scale: float | None, layout: str, left: int | None = None, right: int | None = None
) -> Options:
    left, right = (None if side is None or side < 0 else side for side in (left, right))
    return Options(left, 0 if causal else right, False, scale, None, layout, dropout=dropout_p or None)


def _check(return_debug_mask: bool) -> None:
    if return_debug_mask:
        raise NotImplementedError("FlashCore never has the matrix of weights; pass return_debug_mask=False")


def _state(query: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """What backward gets of random numbers (two of them, the first the seed of dropout, and one that means nothing), and a
    mask that nobody asked for."""
    state = torch.zeros(2, dtype=torch.int64, device=query.device)
    if options.dropout is not None:
        _refuse_ring()
        state[:1] = seed_of(query, query, query, None)
    return state.view(torch.uint64), torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _refuse_ring() -> None:
    """Refuses dropout in torch's ring, which is found among the callers: it says nothing of itself to the operators."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == RING:
            raise NotImplementedError("dropout in context_parallel has no right gradients; pass dropout_p=0")
        frame = frame.f_back


def _seeded(values: Values, options: Options, state: Tensor) -> Values:
    """The values with the seed of forward."""
    return values if options.dropout is None else values._replace(seed=state.view(torch.int64)[:1])


def _attend(query: Tensor, key: Tensor, value: Tensor, options: Options, values: Values) -> tuple[Tensor, Tensor]:
    # As torch has it: the output lies in memory as the queries do.
    out = torch.empty_like(query) if query.shape[-1] == value.shape[-1] else None
    with torch.no_grad():
        return _attention.eager(query, key, value, options, values, True, out)


def _dense(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    _check(return_debug_mask)
    options = _options(dropout_p, is_causal, scale, "bhsd")
    state = _state(query, options)
    out, lse = _attend(query, key, value, options, _seeded(NONE, options, state[0]))
    return out, lse, None, None, query.shape[2], key.shape[2], *state


def _dense_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Any, philox_offset: Any, *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = _options(dropout_p, is_causal, scale, "bhsd")
    values = _seeded(NONE, options, philox_seed)
    return _attention.gradients((query, key, value), out, None, logsumexp, grad_out, options, values)[:3]


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
    _check(return_debug_mask)
    if alibi_slopes is not None:
        raise NotImplementedError("FlashCore has no ALiBi; use another backend of torch")
    layout, values = _sequences(cum_seq_q, cum_seq_k, max_q, max_k, seqused_k)
    options = _options(dropout_p, is_causal, scale, layout, window_size_left, window_size_right)
    state = _state(query, options)
    out, lse = _attend(query, key, value, options, _seeded(values, options, state[0]))
    return out, lse, *state


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Any, unused: Any, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    layout, values = _sequences(cum_seq_q, cum_seq_k, max_q, max_k)
    options = _options(dropout_p, is_causal, scale, layout, window_size_left, window_size_right)
    values = _seeded(values, options, rng_state)
    return _attention.gradients((query, key, value), out, None, logsumexp, grad_out, options, values)[:3]


OPERATORS = {
    "_scaled_dot_product_flash_attention": _dense,
    "_scaled_dot_product_flash_attention_backward": _dense_backward,
    "_flash_attention_forward": _forward,
    "_flash_attention_backward": _backward,
}
