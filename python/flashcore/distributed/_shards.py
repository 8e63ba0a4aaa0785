"""Who holds which tokens: a shard is some sections of a sequence, and two sections see each other through a band."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

LAYOUTS = ("zigzag", "striped", "contiguous")


class Piece(NamedTuple):
    """Every `step`-th token of a sequence, from the token `first` on."""

    first: int
    count: int
    step: int = 1


class Section(NamedTuple):
    """A piece and where it starts in the tensor of the rank that has it."""

    start: int
    piece: Piece


class Band(NamedTuple):
    """Which keys of a piece the queries of another see: those from `i + shift - left` to `i + shift + right`."""

    left: int | None
    right: int | None
    shift: int


ALL = Band(None, None, 0)


def check_layout(layout: Any) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; use one of {', '.join(map(repr, LAYOUTS))}")


def pieces(length: int, world: int, rank: int, layout: str) -> list[Piece]:
    """The tokens of a sequence that a rank holds, in the order it holds them; lengths need not divide."""
    if layout == "striped":
        found = [Piece(rank, len(range(rank, length, world)), world)]
    elif layout == "contiguous":
        found = [_chunk(length, world, rank)]
    else:
        # An early and a late chunk each, so that all ranks see as many keys under a causal mask.
        found = [_chunk(length, 2 * world, chunk) for chunk in (rank, 2 * world - 1 - rank)]
        if sum(found[0][:2]) == found[1].first:
            found = [Piece(found[0].first, found[0].count + found[1].count)]
    return [piece for piece in found if piece.count]


def _chunk(length: int, chunks: int, chunk: int) -> Piece:
    first, end = (length * n // chunks for n in (chunk, chunk + 1))
    return Piece(first, end - first)


def sections(lengths: list[int], world: int, rank: int, layout: str) -> list[list[Section]]:
    """The sections of every sequence that a rank holds, one after another in its tensor."""
    start, found = 0, []
    for length in lengths:
        found.append([])
        for piece in pieces(length, world, rank, layout):
            found[-1].append(Section(start, piece))
            start += piece.count
    return found


def natural(lengths: list[int]) -> list[list[Section]]:
    """The sections of sequences that are whole."""
    return sections(lengths, 1, 0, "contiguous")


def positions(lengths: list[int], world: int, rank: int, layout: str) -> Tensor:
    """The tokens that a rank holds, counted through all sequences."""
    found, base = [torch.empty(0, dtype=torch.int64)], 0
    for length, sequence in zip(lengths, sections(lengths, world, rank, layout)):
        found += [torch.arange(count) * step + first + base for _, (first, count, step) in sequence]
        base += length
    return torch.cat(found)


def order(lengths: list[int], world: int, layout: str) -> Tensor:
    """Where each token lies among the shards of all ranks, one after another."""
    return torch.cat([positions(lengths, world, rank, layout) for rank in range(world)]).argsort()


def rows(of: list[list[Section]]) -> int:
    """How many tokens sections have."""
    return sum(section.piece.count for sequence in of for section in sequence)


def band(q: Piece, k: Piece, left: int | None, right: int | None, diagonal: int) -> Band | None:
    """What queries see of keys where a query at position p sees those from `p + diagonal - left` to `p + diagonal + right`;
    None where that is nothing."""
    gap = q.first + diagonal - k.first
    # Positions are `step` apart in both, so that bounds are divided by it, rounded to what is inside.
    last = None if right is None else (gap + right) // q.step
    first = None if left is None else -((left - gap) // q.step)
    if last is not None and (last + q.count <= 0 or (first is not None and first > last)):
        return None
    if first is not None and first >= k.count:
        return None
    if last is not None and last >= k.count - 1:
        last = None
    if first is not None and first + q.count <= 1:
        first = None
    if last is not None:
        return Band(None if first is None else last - first, 0, last)
    return ALL if first is None else Band(0, None, first)
