"""Arguments that are numbers: checked under their names, so that a mistake is told in the caller's words."""

from __future__ import annotations

import operator
from collections.abc import Callable
from numbers import Real
from typing import Any

MOST = 2**32 - 1
"""Largest number of keys that the extension takes."""


def whole(name: str, value: Any) -> int:
    """An int, or what Python takes for one; a fraction is refused, not cut off."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, which is not an int; pass one") from None


def count(name: str, value: Any, instead: str) -> int:
    """A number of keys; `instead` says what to do where it is none."""
    number = whole(name, value)
    if not 0 <= number <= MOST:
        raise ValueError(f"{name} is {number} but must be from 0 to {MOST}; {instead}")
    return number


def bound(name: str, value: Any) -> int:
    """A bound on the lengths of sequences: an int, be it in a tensor with one."""
    return count(name, value, "pass the most rows that any sequence has")


def flag(name: str, value: Any) -> bool:
    """What is true or false."""
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} is {value!r}, which is not a bool; pass True or False") from None


def text(name: str, value: Any, instead: str) -> str:
    """A name of something."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, which is not a string; {instead}")
    return value


def pair(name: str, value: Any, instead: str) -> tuple[int, int]:
    """Two whole numbers."""
    numbers = each(name, value, lambda place, item: count(place, item, instead), instead)
    if len(numbers) != 2:
        raise ValueError(f"{name} is {value!r}; {instead}")
    return numbers


def several(name: str, values: Any, instead: str) -> list[Any]:
    """What a sequence, or a tensor along its first dimension, has."""
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{name} is {values!r}, which is not a sequence; {instead}") from None


def number(name: str, value: Any) -> float:
    """A number, not a tensor with one: options are found again by their values, and a tensor's may change."""
    if not isinstance(value, (float, Real)):
        raise TypeError(f"{name} is {value!r}, which is not a number; pass a float")
    return float(value)


def single(name: str, value: Any) -> float:
    """A number that float32 can hold; others are told as the caller wrote them, not as float32 has them."""
    given = number(name, value)
    if 0 < abs(given) <= 2.0**-150 or 2.0**128 - 2.0**103 <= abs(given) < float("inf"):
        raise ValueError(f"{name} {given} does not fit in float32; give a magnitude from 1e-45 to 3.4e38")
    return given


def probability(name: str, value: Any) -> float:
    """A number that is not 1 in float32 unless it is 1; what is no probability is told where it is used."""
    given = number(name, value)
    if given != 1 and 1 - 2.0**-25 <= given <= 1 + 2.0**-24:
        raise ValueError(f"{name} {given} is 1 in float32 but must be below: the probability that a weight is dropped")
    return given


def real(name: str, value: Any) -> float:
    """A number, be it in a tensor with one."""
    try:
        return float(None if isinstance(value, str) else value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}, which is not a number; pass a float") from None


def each(name: str, values: Any, read: Callable[[str, Any], Any], instead: str) -> tuple[Any, ...]:
    """Every item of a sequence or of a tensor with one dimension; one that is wrong is named by its place."""
    try:
        items = list(values.tolist() if hasattr(values, "tolist") else values)
    except TypeError:
        raise TypeError(f"{name} is {values!r}, which is not a sequence; {instead}") from None
    try:
        return tuple([read(name, item) for item in items])
    except (TypeError, ValueError):
        return tuple(read(f"{name}[{at}]", item) for at, item in enumerate(items))
