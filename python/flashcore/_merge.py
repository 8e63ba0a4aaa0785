"""``merge``: partial results of attention, put together by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _frameworks
from ._arguments import several, text
from ._words import retell


def merge(
    parts: Sequence[Any] | Any,
    lses: Sequence[Any] | Any,
    *,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Any | None = None,
) -> Any:
    """Attention over all keys from attention over parts of them: rows weighted by ``exp(lse_part - lse)``.

    Args:
        parts: results of `attention` over different keys, as a list or stacked along a first dimension: float16,
            bfloat16 or float32, all alike. More than 16 must be stacked.
        lses: the log-sum-exp of each part. A part whose log-sum-exp is minus infinity is ignored,
            whatever its rows hold.
        layout: the order of the parts' dimensions, as in `attention`; ``"packed"`` for sequence, heads, dim.
        return_lse: also return the log-sum-exp over all parts.
        out: where to write the result, of any of the types; a new tensor like the parts if None.

    >>> import numpy
    >>> from flashcore import attention
    >>> q, k = numpy.ones((1, 2, 3, 8), "float32"), numpy.ones((1, 2, 10, 8), "float32")
    >>> left, right = (attention(q, keys, keys, return_lse=True) for keys in (k[:, :, :4], k[:, :, 4:]))
    >>> merge([left[0], right[0]], [left[1], right[1]]).shape
    (1, 2, 3, 8)
    """
    try:
        instead = "pass a list, or a tensor stacked along its first dimension"
        parts, lses = several("parts", parts, instead), several("lses", lses, instead)
        layout = text("layout", layout, 'pass "bhsd", "bshd" or "packed"')
        if not parts:
            raise ValueError("there is nothing to merge; give at least one part")
        return _frameworks.of(parts[0]).merge(parts, lses, out, layout, return_lse)
    except Exception as error:
        retell(error, q="the first part", lses="lses")
        raise


def by_operations(
    space: Any, detach: Any, convert: Any, parts: list[Any], lses: list[Any], layout: str, return_lse: bool
) -> Any:
    """The same by operations of torch's or JAX's own, for what they trace and differentiate."""
    shape, dtype = _frameworks.rows(parts[0], layout), parts[0].dtype
    shapes = {tuple(part.shape) for part in parts}, {tuple(lse.shape) for lse in lses}
    if len(parts) != len(lses) or shapes != ({tuple(parts[0].shape)}, {tuple(shape)}):
        raise ValueError(f"all parts must have one shape, and each a log-sum-exp of {tuple(shape)}")
    lses = space.stack(lses)
    top = detach(space.amax(lses, 0))
    top = space.where(space.isfinite(top), top, 0.0)
    weights = space.exp(lses - top)
    total = weights.sum(0)
    safe = space.where(total > 0, total, 1.0)
    turned = layout != "bhsd" and len(shape) > 1
    out = 0.0
    for part, share in zip(parts, weights / safe):
        share = (share.swapaxes(-1, -2) if turned else share)[..., None]
        # Rows that count for nothing may hold anything.
        out = out + space.where(share > 0, convert(part, dtype=space.float32), 0.0) * share
    out = convert(out, dtype=dtype)
    return (out, space.where(total > 0, space.log(safe) + top, float("-inf"))) if return_lse else out
