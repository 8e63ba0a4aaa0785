"""Every rank gets the keys and values of all; their gradients come back, to be summed in the order of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _attend
from ._agree import Call
from ._exchange import Kind
from ._shards import Section, natural, rows


class Gathered(torch.autograd.Function):
    """Attention of this rank's queries over the keys of all ranks; returns output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        results = _attend.begin(q, v.shape[3], call.sections("queries"), call.how)
        keys, values, of = _everything(call, k, v)
        _attend.attend(results, keys, values, of, call.lengths.diagonals(), call.how)
        out, lse = _attend.finish(results, sinks, q, call.how)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        call, (q, k, v, sinks, out, lse) = ctx.call, ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out.contiguous()
        sums = _attend.row_sums(d_out, out, d_lse, call.how)
        dq = torch.empty_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
        parts = _attend.differentiate(q, d_out, torch.stack([lse, sums]), dq, call.sections("queries"), call.how)
        keys, values, of = _everything(call, k, v)
        grads = tuple(torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (keys, values))
        _attend.add_gradients(parts, (keys, values), grads, of, call.lengths.diagonals(), call.how, True)
        dk, dv = _returned(call, grads, (k, v))
        d_sinks = None if sinks is None else _attend.sink_gradients(sinks, lse, sums)
        return None, dq.to(q.dtype), dk, dv, d_sinks


def _kinds(call: Call, like: Tensor) -> list[Kind]:
    """The kinds of all ranks' keys or values."""
    axis = call.how.axis
    return [((*like.shape[:axis], count, *like.shape[axis + 1 :]), like.dtype) for count in call.counts("keys")]


def _everything(call: Call, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[list[Section]]]:
    """The keys and values of all ranks, and which tokens they are."""
    axis, world = call.how.axis, call.group.world
    found = call.group.swap([[k, v]] * world, list(zip(_kinds(call, k), _kinds(call, v))))
    whole = [torch.cat(parts, axis) for parts in zip(*found)]
    if call.layout != "striped":
        order = call.order("keys", k.device)
        return *(x.index_select(axis, order) for x in whole), natural(call.lengths.keys)
    # Striped queries see the stripes of each rank through a band, but not whole sequences.
    found, start = [[] for _ in call.lengths.keys], 0
    for rank in range(world):
        of = call.sections("keys", rank)
        for n, sequence in enumerate(of):
            found[n] += [Section(section.start + start, section.piece) for section in sequence]
        start += rows(of)
    return *whole, found


def _returned(call: Call, grads: tuple[Tensor, Tensor], like: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The gradients of this rank's shard: what all ranks found, summed in their order."""
    axis, group = call.how.axis, call.group
    if call.layout != "striped":
        order = call.order("keys", grads[0].device)
        grads = tuple(torch.empty_like(grad).index_copy_(axis, order, grad) for grad in grads)
    parts = zip(*(grad.split(call.counts("keys"), axis) for grad in grads))
    kinds = [(x.shape, torch.float32) for x in like]
    found = group.swap([list(part) for part in parts], [kinds] * group.world)
    return [_sum(of).to(x.dtype) for of, x in zip(zip(*found), like)]


def _sum(parts: tuple[Tensor, ...]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
