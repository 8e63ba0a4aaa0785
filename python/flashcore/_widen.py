"""Queries of 8 bits over packed keys, pages and caches: as bfloat16, which holds their numbers exactly.

Kernels multiply 16-bit queries there and widen keys and values themselves; what queries are multiplied by goes into the
scores together with what keys are multiplied by.
"""

from __future__ import annotations

from typing import Any

from . import _frameworks
from ._sequences import space_of


def widened(q: Any, k: Any, factors: Any) -> tuple[Any, Any]:
    """Queries in 16 bits, and the factors of k and v alone, where q and k have 8; others as they are."""
    if getattr(q, "itemsize", 0) != 1 or not _is_e4m3(k) or "float8" not in str(q.dtype):
        return q, factors
    if factors is None:
        return _frameworks.of(q).bfloat16(q), None
    if not isinstance(factors, (tuple, list)) or len(factors) != 3:
        return q, factors
    return _frameworks.of(q).bfloat16(q), _folded(*(1.0 if one is None else one for one in factors))


def _is_e4m3(k: Any) -> bool:
    return str(getattr(k, "dtype", "")).endswith("float8_e4m3fn")


def _folded(of_q: Any, of_k: Any, of_v: Any) -> tuple[Any, Any]:
    """The factors of k and v, as many as all three have and in one memory, so that they lie alike."""
    of_k = of_q * of_k
    of_v = of_v * (of_k * 0 + 1)
    if not hasattr(of_k, "shape"):
        return of_k, of_v
    both = space_of(of_k).stack([of_k, of_v])
    return tuple(one.reshape(1) if one.ndim == 0 else one for one in (both[0], both[1]))
