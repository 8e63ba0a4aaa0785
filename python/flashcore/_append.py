"""``append`` and ``reshape_and_cache_flash``: new keys and values into a cache, padded or in pages."""

from __future__ import annotations

from typing import Any

from . import _frameworks
from ._words import retell


def append(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    lengths: Any,
    *,
    page_table: Any | None = None,
    rotary: tuple[Any, Any] | None = None,
    interleaved: bool = True,
    q: Any | None = None,
    together: bool = False,
    factors: tuple[Any, Any] | None = None,
) -> Any:
    """Appends new keys and values to a cache; returns the rotated queries if there are any.

    On a GPU nothing is read back, so a captured graph works for whatever lengths and pages it finds. Rows without a
    place (a length below 0, a position beyond the cache, a page that does not exist) are not written.

    Args:
        k: new keys, batch x sequence x heads x dim: float16, bfloat16 or float32.
        v: new values.
        k_cache: batch x sequence x heads x dim, or pages x rows of a page x heads x dim with a page table; any strides.
        v_cache: the same of values.
        lengths: how many keys each sequence already has, int32 or int64; new ones follow. The caller updates them.
        page_table: int32 page numbers, a row for each sequence, if the cache is paged.
        rotary: cosines and sines, positions x half of the rotated features, in k's type: keys are rotated by their
            positions.
        interleaved: rotate neighbouring features as pairs, the default, as in FlashAttention; otherwise halves of the features.
        q: queries to rotate too, batch x sequence x heads x dim; returned as a new tensor.
        together: all queries of a sequence have the position of its first new key.
        factors: scale factors of a float8_e4m3fn cache, by which keys and values are divided: two numbers, or two float32
            tensors of key heads or of batch x key heads. Numbers that are too large saturate.

    >>> import numpy
    >>> cache = numpy.zeros((2, 2, 16, 1, 8), "float32")
    >>> new = numpy.ones((2, 1, 1, 8), "float32")
    >>> append(new, new, cache[0], cache[1], [3, 0])
    >>> int(cache[0].sum()), int(cache[0][0, 3].sum())
    (16, 8)
    """
    try:
        return _append(k, v, k_cache, v_cache, lengths, page_table, rotary, interleaved, q, together, factors)
    except Exception as error:
        if isinstance(error, _frameworks.UNTOLD):
            _frameworks.demand(k=k, v=v, k_cache=k_cache, v_cache=v_cache, **({} if q is None else {"q": q}))
        retell(error, keys="lengths", table="page_table", rotary="rotary", rows="k_cache")
        raise


def _append(
    k: Any, v: Any, k_cache: Any, v_cache: Any, lengths: Any, page_table: Any, rotary: Any, interleaved: bool, q: Any,
    together: bool, factors: Any,
) -> Any:  # fmt: skip
    framework = _frameworks.of(k)
    turned = None if q is None else framework.empty(q, q)
    tensors = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": None, "rotary": rotary}
    tensors |= {"lengths": _lengths(framework, lengths, k), "table": framework.table(page_table, k)}
    tensors["q"] = None if q is None else (q, turned)
    tensors["factors"] = _factors(framework, factors, k)
    options = {"interleaved": interleaved, "together": together}
    if _frameworks.is_traced():
        from ._torch_append import call

        return call(tensors, options)
    framework.append(tensors, options)
    return turned


def reshape_and_cache_flash(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str = "auto",
    k_scale: Any | None = None,
    v_scale: Any | None = None,
) -> None:
    """Writes new keys and values, tokens x heads x dim, to slots of a cache, pages x rows of a page x heads x dim.

    The arguments are those of vLLM's operator of this name. A slot is the page number times the rows of a page, plus the
    row; tokens whose slot is below 0 and tokens beyond the given slots are not written. With "fp8" (or "fp8_e4m3") the
    cache is float8_e4m3fn, or bytes viewed as such, and holds values divided by the scales, one number or one per head.
    """
    try:
        if kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3"):
            raise NotImplementedError(f"a cache of {kv_cache_dtype} is not supported; use \"auto\" or \"fp8\"")
        framework = _frameworks.of(key)
        factors = None
        if kv_cache_dtype.startswith("fp8"):
            key_cache, value_cache = (framework.e4m3(cache) for cache in (key_cache, value_cache))
            if k_scale is not None or v_scale is not None:
                factors = _factors(framework, (k_scale, v_scale), key)
        count = int(_frameworks.shape("slot_mapping", slot_mapping)[0])
        tensors = {"k": key[:count], "v": value[:count], "k_cache": key_cache, "v_cache": value_cache}
        tensors |= {"lengths": None, "slots": slot_mapping, "table": None, "rotary": None, "q": None, "factors": factors}
        options = {"interleaved": False, "together": False}
        if _frameworks.is_traced():
            from ._torch_append import call

            call(tensors, options)
        else:
            framework.append(tensors, options)
    except Exception as error:
        retell(error, k="key", v="value", slots="slot_mapping", k_cache="key_cache", v_cache="value_cache")
        raise


def _factors(framework: Any, factors: Any, k: Any) -> Any:
    """Factors of keys and values where k is."""
    if factors is None:
        return None
    try:
        of_keys, of_values = factors
    except (TypeError, ValueError):
        raise ValueError("pass two factors: those of keys and of values") from None
    return tuple(framework.factor(factor, k, flat=False) for factor in (of_keys, of_values))


def _lengths(framework: Any, lengths: Any, k: Any) -> Any:
    """Lengths where k is; those below 0 stand for sequences that are none."""
    if framework.is_array(lengths):
        return framework.indices("lengths", lengths, k)
    return framework.array(tuple(int(length) for length in lengths), "int32", k)
