"""Attention as an operator of torch, for what traces calls: torch.compile, torch.export, tensor subclasses.

Plain calls do not come here: they go to the extension directly, which is several microseconds faster. Imported when the
first traced call needs it.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from . import _attention, _frameworks


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
    sinks: Optional[Tensor],
    key_lengths: Optional[Tensor],
    mask: Optional[Tensor],
    layout: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """The result, and the log-sum-exp or, where that is not wanted, a tensor without elements."""
    settings = (left, right, top_left, scale, softcap, sinks, key_lengths, mask, layout)
    with torch.no_grad():
        result = _attention.eager(q, k, v, settings, return_lse, None)
    return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))


@operator.register_fake
def _(q, k, v, left, right, top_left, scale, softcap, sinks, key_lengths, mask, layout, return_lse):
    make = _frameworks.Torch()
    rows = make.empty_lse(q, layout) if return_lse else q.new_empty(0, dtype=torch.float32)
    return make.empty(q, v), rows


def call(q: Tensor, k: Tensor, v: Tensor, settings: Any, return_lse: bool, out: Optional[Tensor]) -> Any:
    """`_attention.run` as a call of the operator."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise NotImplementedError(_frameworks.NO_GRADIENTS)
    left, right, top_left, scale, softcap, sinks, key_lengths, mask, layout = settings
    sinks, key_lengths, mask = _tensor(sinks), _tensor(key_lengths), _tensor(mask)
    result, lse = operator(q, k, v, left, right, top_left, scale, softcap, sinks, key_lengths, mask, layout, return_lse)
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def _tensor(values: Any) -> Optional[Tensor]:
    return values if values is None or isinstance(values, Tensor) else torch.tensor(values)
