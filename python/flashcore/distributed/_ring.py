"""Keys and values go round the ring of ranks; in the backward pass their gradients go with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import _attend
from ._agree import Call
from ._exchange import Kind
from ._shards import Span, rows


class Ring(torch.autograd.Function):
    """Attention of this rank's queries over the keys of all ranks; returns output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = forward(call, q, k, v, sinks)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        sums = _attend.row_sums(d_out, out, d_lse, ctx.call.how)
        d_sinks = None if sinks is None else _attend.sink_gradients(sinks, lse, sums)
        return None, *backward(ctx.call, q, k, v, lse, sums, d_out.contiguous()), d_sinks


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of this rank's queries."""
    results = _attend.begin(q, v.shape[3], call.sections("queries"), call.how)
    diagonals = call.lengths.diagonals()
    for source, keys, values in _round(call, k, v):
        _attend.attend(results, keys, values, call.sections("keys", source), diagonals, call.how)
    return _attend.finish(results, sinks, q, call.how)


def backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, sums: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's queries, keys and values.

    Gradients of keys and values travel in two halves of their heads: while one half is multiplied and added to, the
    other is on its way."""
    how, of = call.how, call.sections("queries")
    dq = torch.empty_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
    dense = torch.stack([lse, sums])
    halves = _halves(call, k)
    parts = []
    for half in halves:
        heads = _of_queries(half, q.shape[how.heads] // k.shape[how.heads])
        tensors = (tensor.narrow(how.heads, *heads) for tensor in (q, d_out, dq))
        q_half, d_half, dq_half = tensors
        parts.append(_attend.differentiate(q_half, d_half, dense.narrow(2, *heads), dq_half, of, how))
    dk, dv = (torch.empty_like(tensor) for tensor in (k, v))
    for half, sums_of_half in zip(halves, _sums(call, parts, halves, k, v)):
        for grad, total in zip((dk, dv), sums_of_half):
            grad.narrow(how.heads, *half).copy_(total)
    return dq.to(q.dtype), dk, dv


def _halves(call: Call, k: Tensor) -> list[Span]:
    """The key heads whose gradients travel together."""
    heads = k.shape[call.how.heads]
    cuts = [0, heads // 2, heads] if call.group.world > 1 and heads > 1 else [0, heads]
    return [Span(a, b - a) for a, b in zip(cuts, cuts[1:])]


def _of_queries(heads: Span, group: int) -> Span:
    """The query heads of some key heads."""
    return Span(heads.start * group, heads.count * group)


def _kinds(call: Call, k: Tensor, v: Tensor, source: int, heads: Span | None = None) -> list[Kind]:
    """The kinds of another rank's keys and values, or of the gradients of some of their heads."""
    how, count = call.how, rows(call.sections("keys", source))
    kinds = []
    for x in (k, v):
        extents = {how.axis: count} if heads is None else {how.axis: count, how.heads: heads.count}
        shape = tuple(extents.get(n, extent) for n, extent in enumerate(x.shape))
        kinds.append((shape, x.dtype if heads is None else torch.float32))
    return kinds


def _round(call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every rank's keys and values in turn, this rank's first; the next are on their way meanwhile."""
    group, held = call.group, [k.contiguous(), v.contiguous()]
    for step in range(group.world):
        source = (group.rank - step) % group.world
        last = step + 1 == group.world
        moving = None if last else group.pass_on(held, _kinds(call, k, v, (source - 1) % group.world))
        yield source, held[0], held[1]
        held = held if moving is None else moving.wait()


def _sums(call: Call, parts: list[Any], halves: list[Span], k: Tensor, v: Tensor) -> list[list[Tensor]]:
    """The gradients of this rank's keys and values, float32, one pair for each half; adds to those of all others what these
    parts say, in the buffers that go round."""
    group, how, diagonals = call.group, call.how, call.lengths.diagonals()
    moving: list[Any] = [None] * len(halves)
    for source, keys, values in _round(call, k, v):
        for n, half in enumerate(halves):
            first = moving[n] is None
            kinds = _kinds(call, k, v, source, half)
            grads = [k.new_empty(shape, dtype=dtype) for shape, dtype in kinds] if first else moving[n].wait()
            kv = keys.narrow(how.heads, *half), values.narrow(how.heads, *half)
            of = call.sections("keys", source)
            _attend.add_gradients(parts[n], kv, tuple(grads), of, diagonals, how, first)
            if group.world == 1:
                return [grads]
            moving[n] = group.pass_on(grads, _kinds(call, k, v, (source - 1) % group.world, half))
    return [half.wait() for half in moving]
