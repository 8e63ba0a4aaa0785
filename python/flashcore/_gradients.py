"""Gradients of torch: what is done beside calling the extension. Imported when the first call needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._native import Options, Values, backward

if TYPE_CHECKING:
    from ._frameworks import Torch

Three = tuple[Any, Any, Any]


def of_torch(
    framework: Torch,
    inputs: Three,
    out: Any,
    sums: Any | None,
    lse: Any,
    d_out: Any,
    has_sinks: bool,
    options: Options,
    values: Values | None,
    whole: bool,
) -> tuple[Any, ...]:
    """The gradients of q, k, v and, where there are any, of the sinks; `whole` where every row of every tensor is written."""
    torch = framework.torch
    # A gradient may repeat one number, as that of a sum does.
    d_out = d_out if d_out.stride(-1) == 1 or d_out.size(-1) == 1 else d_out.contiguous()
    # Keys before and after those that a mask leaves are not written.
    make = torch.empty_like if whole else torch.zeros_like
    q, k, v = inputs
    grads = (make(q), make(k), make(v))
    d_sinks = _of_sinks(lse) if has_sinks else None
    _write(framework, (q, k, v, None if sums is not None else out, sums, lse, d_out, *grads, d_sinks), options, values)
    return (*grads, d_sinks.sum(0) if has_sinks and lse.is_cuda else d_sinks)


def _of_sinks(lse: Any) -> Any:
    """Where gradients of sinks are added up; on a GPU each launch has a row of its own."""
    heads = lse.shape[-2] if lse.dim() > 1 else 1
    rows = [lse.shape[0] if lse.dim() > 2 else 1] if lse.is_cuda else []
    return lse.new_zeros(*rows, heads)


def add_of_torch(
    framework: Torch, inputs: Three, sums: Any, lse: Any, d_out: Any, grads: Three, options: Options, values: Values | None
) -> None:
    """Adds gradients of some keys to `grads`, which are float32, given the sums and the log-sum-exp over all keys."""
    _write(framework, (*inputs, None, sums, lse, d_out, *grads, None), options, values)


def _write(framework: Torch, tensors: tuple[Any, ...], options: Options, values: Values | None) -> None:
    if framework.exchanges:
        backward(*tensors, options, values)
    else:
        backward(*map(framework.export, tensors), options, values, stream=framework.stream_of(tensors[0]))
