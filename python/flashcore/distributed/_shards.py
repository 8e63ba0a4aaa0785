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


class Span(NamedTuple):
    """Neighbouring tokens of a tensor."""

    start: int
    count: int


class Section(NamedTuple):
    """A piece and where it starts in the tensor of the rank that has it."""

    start: int
    piece: Piece

    @property
    def span(self) -> Span:
        return Span(self.start, self.piece.count)


class Band(NamedTuple):
    """Which keys of a piece the queries of another see: those from `i + shift - left` to `i + shift + right`."""

    left: int | None
    right: int | None
    shift: int


ALL = Band(None, None, 0)
CAUSAL = Band(None, 0, 0)


class Cell(NamedTuple):
    """What one call computes: queries, counted from the first of their sequence in a shard, keys, and what is seen."""

    queries: Span
    keys: Span
    seen: Band

    @property
    def extent(self) -> tuple[int, int]:
        return self.queries.count, self.keys.count

    def join(self, other: Cell) -> Cell | None:
        """Both at once, where all is seen and they share an edge."""
        if not self.seen == other.seen == ALL:
            return None
        if self.queries == other.queries and self.keys.start + self.keys.count == other.keys.start:
            return self._replace(keys=Span(self.keys.start, self.keys.count + other.keys.count))
        if self.keys == other.keys and self.queries.start + self.queries.count == other.queries.start:
            return self._replace(queries=Span(self.queries.start, self.queries.count + other.queries.count))
        return None


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


def count(of: list[Section]) -> int:
    """How many tokens sections of one sequence have."""
    return sum(section.piece.count for section in of)


def covered(of: list[Section]) -> Span:
    """The sections of one sequence, which lie side by side."""
    return Span(of[0].start if of else 0, count(of))


def rows(of: list[list[Section]]) -> int:
    """How many tokens sections have."""
    return sum(map(count, of))


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


def cells(queries: list[Section], keys: list[Section], mask: tuple[Any, Any], diagonal: int) -> list[Cell]:
    """The fewest calls that compute what these queries of a sequence see of these keys."""
    if not queries or not keys:
        return []
    if tuple(mask) == (None, 0) and diagonal == 0 and [q.piece for q in queries] == [k.piece for k in keys]:
        # Shards keep the order of their sequence, so that its causal mask is that of a shard by itself.
        return [Cell(Span(0, count(queries)), covered(keys), CAUSAL)]
    found: list[Cell] = []
    for q in queries:
        row: list[Cell] = []
        for k in keys:
            seen = band(q.piece, k.piece, *mask, diagonal)
            if seen is not None:
                _add(row, Cell(Span(q.start - queries[0].start, q.piece.count), k.span, seen))
        for cell in row:
            _add(found, cell)
    return found


def _add(found: list[Cell], cell: Cell) -> None:
    """Joins a cell to one that was found before, where that is possible."""
    for n, other in enumerate(found):
        both = other.join(cell)
        if both is not None:
            found[n] = both
            return
    found.append(cell)
