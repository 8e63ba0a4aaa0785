"""Queries in two parts, ``scores = q @ k.T + qv @ v.T``, as latent attention has them: the second part meets the values.

Such scores are those of one longer row for each query and key. Where k and v lie side by side in memory, as views of one
cache row in either order, that row is taken as it is; elsewhere k and v are copied into one. Queries are copied, which are few.
"""

from __future__ import annotations

from typing import Any

from . import _frameworks
from ._arguments import number
from ._sequences import space_of

ONE_FACTOR = (
    "qv meets the values, so that keys and values of 8 bits need one factor; pass the same tensor as k_descale and v_descale"
)


def scale_of(q: Any, qv: Any, scale: float | None) -> float | None:
    """The scale that is given, or that of as many features as both parts have."""
    if qv is None or scale is not None:
        return scale
    return (_frameworks.shape("q", q)[-1] + _frameworks.shape("qv", qv)[-1]) ** -0.5


def check_factors(k_descale: Any, v_descale: Any) -> None:
    """Refuses factors that one longer row cannot have."""
    if k_descale is v_descale:
        return
    if any(hasattr(one, "shape") or one is None for one in (k_descale, v_descale)) or (
        number("k_descale", k_descale) != number("v_descale", v_descale)
    ):
        raise NotImplementedError(ONE_FACTOR)


def with_second_part(q: Any, qv: Any, k: Any, v: Any, scale: float | None, descales: tuple[Any, Any]) -> tuple[Any, Any, Any]:
    """Queries and keys with both parts, and their scale."""
    check_factors(*descales)
    return *joined(q, qv, k, v), scale_of(q, qv, scale)


def joined(q: Any, qv: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Queries and keys with both parts, in the order in which a row of the keys holds them."""
    _check(q, qv, v)
    space, framework = space_of(q), _frameworks.of(k)
    if not _frameworks.is_traced() and not framework.records(k, v):
        row = _row(framework, v, k)
        if row is not None:
            return space.concat([qv, q], axis=-1), row
        row = _row(framework, k, v)
        if row is not None:
            return space.concat([q, qv], axis=-1), row
    return space.concat([q, qv], axis=-1), space.concat([k, v], axis=-1)


def _check(q: Any, qv: Any, v: Any) -> None:
    of_q, of_qv, of_v = (_frameworks.shape(name, x) for name, x in (("q", q), ("qv", qv), ("v", v)))
    if of_qv[-1:] != of_v[-1:]:
        raise ValueError(f"qv has {of_qv[-1]} features but v {of_v[-1]}; give them as many")
    if of_qv[:-1] != of_q[:-1]:
        raise ValueError(f"qv is {of_qv} but q {of_q}; give them the same dimensions, apart from their features")
    if qv.dtype != q.dtype:
        raise TypeError(f"qv is {qv.dtype} but q {q.dtype}; give them one element type")


def _row(framework: Any, left: Any, right: Any) -> Any | None:
    """The tensor whose rows hold those of `left` and right behind them those of `right`; None where memory holds no such rows."""
    first, second = framework.memory(left), framework.memory(right)
    if first is None or second is None:
        return None
    (begin, strides, unit, owner), (behind, others, _, other) = first, second
    features = left.shape[-1]
    if begin + features * left.itemsize != behind or owner != other or left.dtype != right.dtype:
        return None
    outer = left.shape[:-1]
    if outer != right.shape[:-1] or strides[-1] != unit or not _are_alike(strides, others, (*outer, features)):
        return None
    return framework.strided(left, (*outer, features + right.shape[-1]), strides)


def _are_alike(strides: Any, others: Any, extents: tuple[int, ...]) -> bool:
    """Whether steps are the same; where an extent is 1, a step may be anything."""
    return strides == others or all(own == its for own, its, extent in zip(strides, others, extents) if extent > 1)
