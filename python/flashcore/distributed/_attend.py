"""Attention between shards: partial results in f32, accumulated by the kernel, and their gradients likewise."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _frameworks, _native
from .._gradients import add_of_torch
from .._options import Options
from ._shards import Band, Cell, Section, Span, cells, count, covered


class Mask(NamedTuple):
    """Which keys a query sees, by how far they are from its diagonal in the whole sequence."""

    left: int | None
    right: int | None


class How(NamedTuple):
    """What all calls of one attention share."""

    mask: Mask
    scale: float
    softcap: float | None
    layout: str
    """Order of the tensors' dimensions."""

    @property
    def axis(self) -> int:
        """The dimension of tokens."""
        return 2 if self.layout == "bhsd" else 1

    @property
    def heads(self) -> int:
        """The dimension of heads."""
        return 3 - self.axis

    def cut(self, tensor: Tensor, span: Span) -> Tensor:
        return tensor.narrow(self.axis, *span)

    def rows(self, tensor: Tensor) -> tuple[int, int, int]:
        """Batch, heads and tokens."""
        return tensor.shape[0], tensor.shape[self.heads], tensor.shape[self.axis]


@functools.lru_cache(1024)
def _options(how: How, seen: Band, accumulate: bool) -> _native.Options:
    left, right, shift = seen
    return Options(left, right, True, how.scale, how.softcap, how.layout, accumulate=accumulate, shift=shift).native


class Lengths(NamedTuple):
    """Tokens of every whole sequence."""

    queries: list[int]
    keys: list[int]

    def diagonals(self) -> list[int]:
        """How much later than a query's position its diagonal is: the last query stands at the last key."""
        return [keys - queries for queries, keys in zip(self.queries, self.keys)]


class Numbers:
    """One number for each row of a shard, batch x heads x tokens.

    Kernels want those of neighbouring queries dense. A ring asks for all of them, then for the later ones only, so that the
    dense part of the last call is kept."""

    def __init__(self, whole: Tensor) -> None:
        self.whole, self.part, self.span = whole, whole, Span(0, whole.shape[2])

    def of(self, span: Span) -> Tensor:
        if span != self.span:
            self.settle()
            self.part, self.span = self.whole.narrow(2, *span).contiguous(), span
        return self.part

    def settle(self) -> Tensor:
        """All of them, those that a kernel has changed in the dense part included."""
        if self.part is not self.whole:
            self.whole.narrow(2, *self.span).copy_(self.part)
        self.part, self.span = self.whole, Span(0, self.whole.shape[2])
        return self.whole


@dataclass
class Partial:
    """Queries of one sequence with what is known of their result."""

    sections: list[Section]
    q: Tensor
    out: Tensor
    """float32."""
    lse: Numbers
    begun: bool = False

    def clear(self) -> None:
        """No key has been seen."""
        self.out.zero_()
        self.lse.whole.fill_(-torch.inf)
        self.begun = True


class Results(NamedTuple):
    """The queries of a rank with what is known of their result."""

    out: Tensor
    parts: list[Partial]


def begin(q: Tensor, dim_v: int, of: list[list[Section]], how: How) -> Results:
    """Nothing is known yet."""
    out = q.new_empty((*q.shape[:3], dim_v), dtype=torch.float32)
    parts = []
    for sections in of:
        span = covered(sections)
        batch, heads, _ = how.rows(q)
        lse = q.new_empty((batch, heads, span.count), dtype=torch.float32)
        parts.append(Partial(sections, how.cut(q, span), how.cut(out, span), Numbers(lse)))
    return Results(out, parts)


def attend(results: Results, k: Tensor, v: Tensor, of: list[list[Section]], diagonals: list[int], how: How) -> None:
    """Adds what these keys say to partial results."""
    for part, keys, diagonal in zip(results.parts, of, diagonals):
        for cell in cells(part.sections, keys, how.mask, diagonal):
            # The first keys that all queries are asked about need nothing to be added to.
            first = not part.begun and cell.queries.count == part.q.shape[how.axis]
            if not part.begun and not first:
                part.clear()
            q, out = (how.cut(tensor, cell.queries) for tensor in (part.q, part.out))
            tensors = (q, how.cut(k, cell.keys), how.cut(v, cell.keys), out, part.lse.of(cell.queries))
            _frameworks.of(k).accumulate(tensors, _options(how, cell.seen, not first), None)
            part.begun = True


def finish(results: Results, sinks: Tensor | None, like: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """The result in the type of `like`, and its log-sum-exp: batch x heads x tokens."""
    for part in results.parts:
        part.begun or part.clear()
    lse = joined([part.lse.settle() for part in results.parts], 2)
    if sinks is None:
        return results.out.to(like.dtype), lse
    seen = lse != -torch.inf
    with_sinks = torch.where(seen, torch.logaddexp(lse, sinks.float()[:, None]), lse)
    share = torch.where(seen, lse - with_sinks, 0.0).exp()
    share = (share if how.layout == "bhsd" else share.transpose(1, 2)).unsqueeze(-1)
    return (results.out * share).to(like.dtype), with_sinks


def joined(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


@dataclass
class Part:
    """Queries of one sequence with what gradients need, and their own gradient."""

    sections: list[Section]
    q: Tensor
    d_out: Tensor
    rows: Tensor
    """Log-sum-exps and sums: 2 x batch x heads x tokens."""
    dq: Tensor
    """float32."""
    dense: dict[Span, Tensor] = field(default_factory=dict)

    def rows_of(self, span: Span) -> Tensor:
        if span not in self.dense:
            self.dense[span] = self.rows.narrow(3, *span).contiguous()
        return self.dense[span]


def differentiate(q: Tensor, d_out: Tensor, rows: Tensor, dq: Tensor, of: list[list[Section]], how: How) -> list[Part]:
    """Gradients of queries that no keys have been asked about yet."""
    parts = []
    for sections in of:
        span = covered(sections)
        q_part, d_part, dq_part = (how.cut(tensor, span) for tensor in (q, d_out, dq))
        parts.append(Part(sections, q_part, d_part, rows.narrow(3, *span), dq_part))
    return parts


def add_gradients(
    parts: list[Part],
    kv: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    of: list[list[Section]],
    diagonals: list[int],
    how: How,
    first: bool,
) -> None:
    """Adds the gradients that come from these keys and values to theirs, and to those of the queries; where they are the
    first, neither holds anything yet."""
    for part, keys, diagonal in zip(parts, of, diagonals):
        found = cells(part.sections, keys, how.mask, diagonal)
        written = first and [cell.extent for cell in found] == [(count(part.sections), count(keys))]
        if first and not written:
            part.dq.zero_()
            for grad, section in itertools.product(grads, keys):
                how.cut(grad, section.span).zero_()
        for cell in found:
            _add(part, kv, grads, cell, _options(how, cell.seen, not written), how)


def _add(part: Part, kv: Any, grads: Any, cell: Cell, options: _native.Options, how: How) -> None:
    q, d_out, dq = (how.cut(tensor, cell.queries) for tensor in (part.q, part.d_out, part.dq))
    k, v, dk, dv = (how.cut(tensor, cell.keys) for tensor in (*kv, *grads))
    lse, sums = part.rows_of(cell.queries)
    add_of_torch(_frameworks.of(k), (q, k, v), sums, lse, d_out, (dq, dk, dv), options, None)


def row_sums(d_out: Tensor, out: Tensor, d_lse: Tensor | None, how: How) -> Tensor:
    """The sums of d_out times out over each row, batch x heads x tokens."""
    sums = (d_out.float() * out).sum(-1)
    sums = sums if how.layout == "bhsd" else sums.transpose(1, 2)
    return sums if d_lse is None else sums - d_lse


def sink_gradients(sinks: Tensor, lse: Tensor, sums: Tensor) -> Tensor:
    """What this rank's queries say about the sinks."""
    seen = lse != -torch.inf
    weights = torch.where(seen, sinks.float()[:, None] - lse, -torch.inf).exp()
    return -(weights * torch.where(seen, sums, 0.0)).sum((0, 2)).to(sinks.dtype)
