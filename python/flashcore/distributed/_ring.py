"""Keys and values go round the ring of ranks; in the backward pass their gradients go with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _attend
from ._agree import Call
from ._exchange import bytes_of, pack, unpack
from ._shards import rows


class Ring(torch.autograd.Function):
    """Attention of this rank's queries over the keys of all ranks; returns output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        parts = _attend.begin(q, v.shape[3], call.sections("queries"), call.how)
        diagonals = call.lengths.diagonals()
        for source, keys, values in _round(call, k, v):
            _attend.attend(parts, keys, values, call.sections("keys", source), diagonals, call.how)
        out, lse = _attend.finish(parts, sinks, q, v.shape[3], call.how)
        ctx.call = call
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
        call, (q, k, v, sinks, out, lse) = ctx.call, ctx.saved_tensors
        sums = _attend.row_sums(d_out, out, d_lse, call.how)
        parts = _attend.differentiate(q, d_out.contiguous(), sums, lse, call.sections("queries"), call.how)
        dk, dv = _gradients(call, parts, k, v)
        dq = torch.cat([part.dq for part in parts], call.how.axis).to(q.dtype) if parts else torch.zeros_like(q)
        d_sinks = None if sinks is None else _attend.sink_gradients(sinks, lse, sums)
        return None, dq, dk.to(k.dtype), dv.to(v.dtype), d_sinks


def _kinds(call: Call, k: Tensor, v: Tensor, source: int, dtype: torch.dtype) -> list[tuple[Any, torch.dtype]]:
    """The shapes of another rank's keys and values."""
    count, axis = rows(call.sections("keys", source)), call.how.axis
    return [((*x.shape[:axis], count, *x.shape[axis + 1 :]), dtype) for x in (k, v)]


def _round(call: Call, k: Tensor, v: Tensor) -> Any:
    """Every rank's keys and values in turn, this rank's first; the next are on their way meanwhile."""
    group = call.group
    buffer, moving = pack([k, v]), []
    for step in range(group.world):
        source = (group.rank - step) % group.world
        kinds = _kinds(call, k, v, source, k.dtype)
        if step + 1 < group.world:
            following = _kinds(call, k, v, (source - 1) % group.world, k.dtype)
            arriving, moving = group.pass_on(buffer, sum(bytes_of(*kind) for kind in following))
        yield source, *unpack(buffer, kinds)
        if step + 1 < group.world:
            group.wait(*moving)
            buffer = arriving


def _gradients(call: Call, parts: list[Any], k: Tensor, v: Tensor) -> list[Tensor]:
    """The gradients of this rank's keys and values, float32, and all that these parts add to those of others."""
    group, diagonals = call.group, call.lengths.diagonals()
    sums, moving = None, []
    for source, keys, values in _round(call, k, v):
        kinds = _kinds(call, k, v, source, torch.float32)
        own = torch.zeros(sum(bytes_of(*kind) for kind in kinds) // 4, dtype=torch.float32, device=k.device)
        grads = unpack(own.view(torch.uint8), kinds)
        _attend.add_gradients(parts, (keys, values), tuple(grads), call.sections("keys", source), diagonals, call.how)
        # What the ranks before have summed came while this was computed.
        group.wait(*moving)
        sums = own if sums is None else sums.view(torch.float32).add_(own)
        following = _kinds(call, k, v, (source - 1) % group.world, torch.float32)
        if group.world > 1:
            sums, moving = group.pass_on(sums.view(torch.uint8), sum(bytes_of(*kind) for kind in following))
    group.wait(*moving)
    kinds = _kinds(call, k, v, group.rank, torch.float32)
    return unpack(sums.view(torch.uint8), kinds)
