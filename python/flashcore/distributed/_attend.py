"""Attention between sections: partial results in f32, accumulated by the kernel, and their gradients likewise."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _frameworks, _native
from .._gradients import add_of_torch
from .._options import Options
from ._shards import ALL, Section, band


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

    def options(self, seen: Any) -> _native.Options:
        left, right, shift = seen
        options = Options(left, right, True, self.scale, self.softcap, self.layout, accumulate=True, shift=shift)
        return options.native

    def cut(self, tensor: Tensor, section: Section) -> Tensor:
        return tensor.narrow(self.axis, section.start, section.piece.count)


class Lengths(NamedTuple):
    """Tokens of every whole sequence."""

    queries: list[int]
    keys: list[int]

    def diagonals(self) -> list[int]:
        """How much later than a query's position its diagonal is: the last query stands at the last key."""
        return [keys - queries for queries, keys in zip(self.queries, self.keys)]


class Partial(NamedTuple):
    """Queries of one section with what is known of their result."""

    sequence: int
    section: Section
    q: Tensor
    out: Tensor
    """float32."""
    lse: Tensor


def begin(q: Tensor, dim_v: int, of: list[list[Section]], how: How) -> list[Partial]:
    """Nothing is known yet."""
    begun = []
    for n, sequence in enumerate(of):
        for section in sequence:
            part = how.cut(q, section)
            batch, heads, count = part.shape[0], part.shape[3 - how.axis], section.piece.count
            out = part.new_empty((*part.shape[:3], dim_v), dtype=torch.float32)
            lse = part.new_full((batch, heads, count), -torch.inf, dtype=torch.float32)
            begun.append(Partial(n, section, part, out, lse))
    return begun


def spans(queries: Section, keys: list[Section], mask: Mask, diagonal: int) -> list[tuple[Section, Any]]:
    """The keys that a section of queries sees and through which band; neighbours that it sees whole are one span."""
    found: list[tuple[Section, Any]] = []
    for section in keys:
        seen = band(queries.piece, section.piece, *mask, diagonal)
        if seen is None:
            continue
        last, through = found[-1] if found else (None, None)
        if last is not None and seen == through == ALL and last.start + last.piece.count == section.start:
            piece = last.piece._replace(count=last.piece.count + section.piece.count)
            found[-1] = (Section(last.start, piece), ALL)
        else:
            found.append((section, seen))
    return found


def attend(parts: list[Partial], k: Tensor, v: Tensor, of: list[list[Section]], diagonals: list[int], how: How) -> None:
    """Adds what these keys say to partial results."""
    for part in parts:
        for section, seen in spans(part.section, of[part.sequence], how.mask, diagonals[part.sequence]):
            tensors = (part.q, how.cut(k, section), how.cut(v, section), part.out, part.lse)
            _frameworks.of(k).accumulate(tensors, how.options(seen), None)


def finish(parts: list[Partial], sinks: Tensor | None, like: Tensor, dim_v: int, how: How) -> tuple[Tensor, Tensor]:
    """The result in the type of `like`, and its log-sum-exp: batch x heads x tokens."""
    outs, lses = [], []
    for part in parts:
        out, lse = part.out, part.lse
        seen = lse != -torch.inf
        if sinks is not None:
            with_sinks = torch.where(seen, torch.logaddexp(lse, sinks.float()[:, None]), lse)
            out = out * _along(torch.where(seen, lse - with_sinks, 0.0).exp(), how)
            lse = with_sinks
        # Where nothing was seen, nothing was written.
        outs.append(torch.where(_along(seen, how), out, 0.0).to(like.dtype))
        lses.append(lse)
    if not parts:
        batch, heads = like.shape[0], like.shape[3 - how.axis]
        return like.new_empty((*like.shape[:3], dim_v)), like.new_empty((batch, heads, 0), dtype=torch.float32)
    return torch.cat(outs, how.axis), torch.cat(lses, 2)


def _along(rows: Tensor, how: How) -> Tensor:
    """One number for each row, batch x heads x tokens, as the tensors have their dimensions."""
    return (rows if how.layout == "bhsd" else rows.transpose(1, 2)).unsqueeze(-1)


class Part(NamedTuple):
    """Queries of one section with what gradients need, and their own gradient."""

    sequence: int
    section: Section
    q: Tensor
    d_out: Tensor
    lse: Tensor
    sums: Tensor
    dq: Tensor


def differentiate(
    q: Tensor, d_out: Tensor, sums: Tensor, lse: Tensor, of: list[list[Section]], how: How
) -> list[Part]:
    """Gradients of queries that no keys have been asked about yet."""
    begun = []
    for n, sequence in enumerate(of):
        for section in sequence:
            part, d_part = how.cut(q, section), how.cut(d_out, section)
            rows = [x.narrow(2, section.start, section.piece.count).contiguous() for x in (lse, sums)]
            dq = torch.zeros(part.shape, dtype=torch.float32, device=part.device)
            begun.append(Part(n, section, part, d_part, *rows, dq))
    return begun


def add_gradients(
    parts: list[Part],
    kv: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    of: list[list[Section]],
    diagonals: list[int],
    how: How,
) -> None:
    """Adds the gradients that come from these keys and values to theirs, and to those of the queries."""
    for part in parts:
        for section, seen in spans(part.section, of[part.sequence], how.mask, diagonals[part.sequence]):
            k, v, dk, dv = (how.cut(tensor, section) for tensor in (*kv, *grads))
            inputs, into = (part.q, k, v), (part.dq, dk, dv)
            add_of_torch(_frameworks.of(k), inputs, part.sums, part.lse, part.d_out, into, how.options(seen), None)


def row_sums(d_out: Tensor, out: Tensor, d_lse: Tensor | None, how: How) -> Tensor:
    """The sums of d_out times out over each row, batch x heads x tokens."""
    sums = (d_out.float() * out.float()).sum(-1)
    sums = sums if how.layout == "bhsd" else sums.transpose(1, 2)
    return sums if d_lse is None else sums - d_lse


def sink_gradients(sinks: Tensor, lse: Tensor, sums: Tensor) -> Tensor:
    """What this rank's queries say about the sinks."""
    seen = lse != -torch.inf
    weights = torch.where(seen, sinks.float()[:, None] - lse, -torch.inf).exp()
    return -(weights * torch.where(seen, sums, 0.0)).sum((0, 2)).to(sinks.dtype)


