"""`append` as an operator of torch, for torch.compile; imported when the first traced call needs it."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from . import _frameworks


@torch.library.custom_op("flashcore::append", mutates_args=("k_cache", "v_cache"))
def operator(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Optional[Tensor],
    slots: Optional[Tensor],
    table: Optional[Tensor],
    cos: Optional[Tensor],
    sin: Optional[Tensor],
    q: Optional[Tensor],
    k_factor: Optional[Tensor],
    v_factor: Optional[Tensor],
    interleaved: bool,
    together: bool,
) -> Tensor:
    """Writes into the caches; the turned queries, or a tensor without elements where there are none."""
    turned = k.new_empty(0) if q is None else torch.empty_like(q)
    tensors = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "lengths": lengths, "slots": slots, "table": table}
    tensors["rotary"] = None if cos is None else (cos, sin)
    tensors["q"] = None if q is None else (q, turned)
    tensors["factors"] = None if k_factor is None else (k_factor, v_factor)
    with torch.no_grad():
        _frameworks.of(k).append(tensors, {"interleaved": interleaved, "together": together})
    return turned


@operator.register_fake
def _(k, v, k_cache, v_cache, lengths, slots, table, cos, sin, q, *rest):
    return k.new_empty(0) if q is None else torch.empty_like(q)


def call(tensors: dict[str, Any], options: dict[str, bool]) -> Optional[Tensor]:
    """`append` of a framework as a call of the operator; the turned queries where there are some."""
    pairs = [*(tensors["rotary"] or (None, None))], [*(tensors["factors"] or (None, None))]
    names = ("k", "v", "k_cache", "v_cache", "lengths", "slots", "table")
    queries = None if tensors["q"] is None else tensors["q"][0]
    rest = (*pairs[0], queries, *pairs[1], options["interleaved"], options["together"])
    turned = operator(*(tensors[name] for name in names), *rest)
    return None if queries is None else turned
