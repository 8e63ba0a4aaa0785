"""Attention as an operator of torch, for what traces calls: torch.compile, torch.export, tensor subclasses.

Plain calls do not come here: they go to the extension directly, which is several microseconds faster. Imported when the
first traced call needs it.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from . import _attention, _frameworks
from ._options import Options, Values


@torch.library.custom_op("flashcore::attention", mutates_args=())
def operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: Optional[int],
    right: Optional[int],
    top_left: bool,
    scale: Optional[float],
    softcap: Optional[float],
    layout: str,
    query_lengths: Optional[Tensor],
    key_lengths: Optional[Tensor],
    sinks: Optional[Tensor],
    mask: Optional[Tensor],
    longest: Optional[list[int]],
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """The result, and the log-sum-exp or, where that is not wanted, a tensor without elements."""
    options = Options(left, right, top_left, scale, softcap, layout)
    bounds = None if longest is None else (longest[0], longest[1])
    values = Values(query_lengths, key_lengths, sinks, mask, bounds)
    with torch.no_grad():
        result = _attention.eager(q, k, v, options, values, return_lse, None)
    return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))


@operator.register_fake
def _(q, k, v, left, right, top_left, scale, softcap, layout, *values_and_lse):
    make, return_lse = _frameworks.Torch(), values_and_lse[-1]
    rows = make.empty_lse(q, layout) if return_lse else q.new_empty(0, dtype=torch.float32)
    return make.empty(q, v), rows


def call(
    q: Tensor, k: Tensor, v: Tensor, options: Options, values: Values, return_lse: bool, out: Optional[Tensor]
) -> Any:
    """`_attention.run` as a call of the operator."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise NotImplementedError(_frameworks.NO_GRADIENTS)
    result, lse = operator(
        q,
        k,
        v,
        options.left,
        options.right,
        options.top_left,
        options.scale,
        options.softcap,
        options.layout,
        *(_tensor(given) for given in (values.query_lengths, values.key_lengths, values.sinks, values.mask)),
        None if values.longest is None else list(values.longest),
        return_lse,
    )
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def _tensor(values: Any) -> Optional[Tensor]:
    return values if values is None or isinstance(values, Tensor) else torch.tensor(values)
