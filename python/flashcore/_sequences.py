"""Sequences cut into smaller ones: chunks that see nothing of each other, and rows that are not used.

Packed sequences lie one after another, so that a cut is one more offset. A part without queries or without keys costs nothing:
its rows become zeros, and so do their gradients.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from . import _frameworks


class Packed(NamedTuple):
    """Where packed sequences start, and bounds on their lengths."""

    query_offsets: Any
    key_offsets: Any
    longest: tuple[int, int]


def cut(q: Any, packed: Packed, used_queries: Any, used_keys: Any, chunk: int) -> Packed:
    """The parts of sequences that see each other: of each only the first rows, those that are used, and these in chunks.

    The last used query stands at the last used key; chunks are counted from the first key.
    """
    framework = _frameworks.of(q)
    of_q, of_k = (
        _rows(framework, q, name, offsets, used)
        for name, offsets, used in (("q", packed.query_offsets, used_queries), ("k", packed.key_offsets, used_keys))
    )
    longest_q, longest_k = packed.longest
    space, ahead = space_of(of_q.begin), of_k.used - of_q.used
    queries, keys = [of_q.begin], [of_k.begin]
    if chunk:
        # What stands before the first key sees nothing; then come the chunks.
        edges = range(0, max(longest_k, 1), chunk)
        queries += [of_q.begin + _within(space, edge - ahead, of_q.used) for edge in edges]
        keys += [of_k.begin + _within(space, edge + ahead * 0, of_k.used) for edge in edges]
        longest_k = min(longest_k, chunk)
    if used_queries is not None or used_keys is not None:
        queries += [of_q.begin + of_q.used, of_q.end]
        keys += [of_k.begin + of_k.used] * 2
    joined = [_joined(space, marks, rows.end[-1:]) for marks, rows in ((queries, of_q), (keys, of_k))]
    return Packed(*joined, (longest_q, longest_k))


def equal(q: Any, sequences: int, queries: int, keys: int) -> Packed:
    """Sequences of the same lengths, those of a batch whose entries are looked at as packed."""
    numbers = _frameworks.of(q).numbers_to(sequences + 1, q)
    return Packed(numbers * queries, numbers * keys, (queries, keys))


class Pages(NamedTuple):
    """Keys in pages of one row, each with its place in a table, for packed queries."""

    query_offsets: Any
    key_lengths: Any
    table: Any
    longest: tuple[int, int]


def cut_cache(q: Any, offsets: Any, longest: int, lengths: Any, starts: Any, table: Any, size: int, chunk: int) -> Pages:
    """The chunks of a cache that its newest queries see. `table` has pages of `size` rows, sequences start at row `starts`."""
    framework = _frameworks.of(q)
    of_q, space = _rows(framework, q, "q", offsets, None), space_of(table)
    held = table.shape[1] * size
    # The first query stands so far into the keys, in the chunk of that number.
    first = (lengths - of_q.used) // chunk
    parts = range((max(longest, 1) - 1) // chunk + 2)
    edges = [(first + part) * chunk for part in [*parts, len(parts)]]
    begins = [_within(space, edge, lengths) for edge in edges]
    queries = [of_q.begin + _within(space, edge - lengths + of_q.used, of_q.used) for edge in edges[:-1]]
    used = [end - begin for begin, end in zip(begins, begins[1:])]
    width = min(chunk, held)
    rows = framework.numbers_to(width, q).reshape(1, -1)
    tables = [physical(framework, q, table, size, (starts + begin).reshape(-1, 1) + rows) for begin in begins[:-1]]
    return Pages(
        _joined(space, queries, of_q.end[-1:]),
        space.stack(used, 1).reshape(-1),
        space.stack(tables, 1).reshape(-1, width),
        (min(longest, chunk), width),
    )


def physical(framework: Any, q: Any, table: Any, size: int, rows: Any) -> Any:
    """Where rows of each sequence lie in the cache; those beyond it are beyond every length too."""
    column = (rows // size) % table.shape[1]
    sequence = framework.numbers_to(table.shape[0], q).reshape(-1, 1)
    return table[sequence, column] * size + rows % size


def of_parts(q: Any, factors: tuple[Any, ...] | None, sequences: int, parts: int) -> tuple[Any, ...] | None:
    """Factors of k and v for sequences that were cut into `parts` each."""
    if factors is None:
        return None
    sequence = _frameworks.of(q).numbers_to(sequences * parts, q) // parts
    each = lambda x: getattr(x, "ndim", 0) == 2 and x.shape[0] > 1
    return tuple(x[sequence] if each(x) else x for x in factors)


class _Rows(NamedTuple):
    begin: Any
    end: Any
    used: Any


def _rows(framework: Any, q: Any, name: str, offsets: Any, used: Any) -> _Rows:
    offsets = framework.indices(f"cu_seqlens_{name}", offsets, q)
    begin, end = offsets[:-1], offsets[1:]
    if used is None:
        return _Rows(begin, end, end - begin)
    used = framework.indices(f"seqused_{name}", used, q)
    if tuple(used.shape) != tuple(begin.shape):
        raise ValueError(f"seqused_{name} is {tuple(used.shape)} but there are {begin.shape[0]} sequences; give one number per sequence")
    return _Rows(begin, end, _within(space_of(begin), used, end - begin))


def space_of(array: Any) -> Any:
    """The functions of an array's framework."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else array.__array_namespace__()


def _within(space: Any, numbers: Any, most: Any) -> Any:
    """Numbers from 0 to `most`."""
    return space.maximum(space.minimum(numbers, most), most * 0)


def _joined(space: Any, marks: list[Any], end: Any) -> Any:
    return space.concat([space.stack(marks, 1).reshape(-1), end])
