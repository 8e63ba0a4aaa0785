"""Dropout: the seed of a call, and which weights a seed leaves out."""

from __future__ import annotations

from typing import Any

from . import _frameworks, _native
from ._arguments import count, probability as checked
from ._frameworks import seed_number
from ._words import retell


def seed_of(q: Any, k: Any, v: Any, given: Any) -> Any:
    """The seed of a call with these tensors, where they are; torch draws one where none is given."""
    return _frameworks.of_all(q, k, v).seed(given, q)


def dropout_mask(probability: float, seed: Any, sequences: int, heads: int, queries: int, keys: int) -> Any:
    """Which weights stay, as a NumPy array of bool: sequences x query heads x queries x keys.

    Whether a weight stays depends on the seed and its position: the number of its sequence (its batch entry), query head,
    query and key within the sequence. So the mask of a long sequence begins with that of a short one, and hidden keys have
    entries too. `attention` with ``dropout=probability`` and ``dropout_seed=seed`` multiplies what stays by
    ``1 / (1 - probability)``. ``seed`` may be whatever ``dropout_seed`` may be.

    >>> mask = dropout_mask(0.25, 7, sequences=1, heads=2, queries=3, keys=4)
    >>> mask.shape, mask.dtype
    ((1, 2, 3, 4), dtype('bool'))
    >>> bool((mask == dropout_mask(0.25, 7, 1, 2, 9, 9)[:, :, :3, :4]).all())
    True
    """
    import numpy

    instead = "pass how many there are"
    named = {"sequences": sequences, "heads": heads, "queries": queries, "keys": keys}
    extents = [count(name, value, instead) for name, value in named.items()]
    probability, bits = checked("probability", probability), seed_number("seed", seed) % 2**64
    try:
        mask = _native.dropout_mask(probability, bits, extents)
    except ValueError as error:
        retell(error, dropout="probability")
        raise
    return numpy.frombuffer(mask, bool).reshape(extents)
