"""``quantise``: tensors rounded to 8 bits with factors, and attention by way of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _frameworks
from ._arguments import whole

BLOCK_ROWS = (64, 128)
"""Rows of q and of k that share a factor where attention quantises: as many as kernels have together anyway."""

COUNT_ROWS, TURNED_KEYS = 8, 128
"""Rows of turned values behind their features, and keys whose multiples they have."""

_TYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


class Quantised(NamedTuple):
    """An 8-bit tensor and its scale factors."""

    values: Any
    """The floats, shaped as the tensor was."""
    factors: Any
    """float32: 1; batch x heads; batch x heads x blocks; or batch x heads x dim."""
    means: Any = None
    """float32, batch x heads x dim: what was subtracted, where the tensor was centred."""


def quantise(
    x: Any,
    dtype: str = "e4m3",
    *,
    per: str = "tensor",
    rows: int = 128,
    group: int = 1,
    centred: bool = False,
    lengths: Any | None = None,
    turned: bool = False,
    layout: str = "bhsd",
) -> Quantised:
    """Quantises a tensor to 8-bit floats; each float times its factor approximates the number it was.

    A factor maps the largest magnitude among its numbers to the largest float (448 or 57344). No factor is below 2**-48, so
    that tensors of numbers below about 3e-18 (3e-20 in e5m2) become zeros: multiply such tensors first. Infinities become the
    largest float and NaN stays NaN; neither affects factors.

    Args:
        x: a torch tensor or a NumPy array (with ml_dtypes) of float16, bfloat16 or float32, with 2 to 4 dimensions in the
            order of ``layout``, as in `attention`.
        dtype: ``"e4m3"`` or ``"e5m2"``.
        per: which numbers share a factor: ``"tensor"`` (all), ``"head"`` (those of a batch entry and head), ``"block"``
            (those of ``rows`` rows of it) or ``"channel"`` (those of a feature of it).
        rows: rows of a block.
        group: how many neighbouring heads share a factor per head; for queries, the query heads of a key head.
        centred: subtract each head's mean over its rows first. Attention over such keys is the same except for its
            log-sum-exp, which lacks ``scale * q @ mean``. A number whose distance from the mean float32 cannot hold counts
            as infinite.
        lengths: how many rows each batch entry uses; the others are not read and become zeros.
        turned: write values transposed, as `attention` with ``turned=True`` reads them: batch x heads x (dim + 8) x rows,
            padded to a multiple of 128, whatever the layout, in a private order. For e4m3, a dim that is a multiple of
            16, and factors
            per tensor, head or channel.

    >>> import torch
    >>> x = torch.randn(1, 2, 100, 64)
    >>> narrow = quantise(x, per="channel")
    >>> near = narrow.values.float() * narrow.factors[:, :, None]
    >>> bool(((near - x).abs() <= x.abs() / 16 + 1e-3).all())
    True
    """
    if dtype not in _TYPES:
        raise ValueError(f"dtype is {dtype!r}; use \"e4m3\" or \"e5m2\"")
    framework = _frameworks.of(x)
    if framework.records(x):
        raise NotImplementedError("quantise has no backward pass; call it under torch.no_grad() or detach the tensor")
    rows, group = whole("rows", rows), whole("group", group)
    batch, heads, sequence, dim = extents(x, layout)
    shapes = {
        "tensor": (1,),
        "head": (batch, heads // max(group, 1)),
        "block": (batch, heads, -(-sequence // max(rows, 1))),
        "channel": (batch, heads, dim),
    }
    means = (batch, heads, dim) if centred else None
    options = {"layout": layout, "wide_range": dtype == "e5m2", "per": per, "rows": rows, "group": group, "turned": turned}
    shape = (batch, heads, dim + COUNT_ROWS, -(-sequence // TURNED_KEYS) * TURNED_KEYS) if turned else None
    lengths = framework.indices("lengths", lengths, x)
    shapes_of_rest = (shapes.get(per, (1,)), means)
    return Quantised(*framework.quantise(x, _TYPES[dtype], (shape, *shapes_of_rest), lengths, options))


def extents(x: Any, layout: str) -> tuple[int, int, int, int]:
    """Batch, heads, sequence, dim; the extension refuses tensors that it does not take."""
    shape = _frameworks.shape("x", x)
    if len(shape) == 2:
        return 1, 1, *shape
    *batch, first, second, dim = shape if len(shape) in (3, 4) else (1, 1, 1, 1)
    heads, sequence = (first, second) if layout == "bhsd" else (second, first)
    return batch[0] if batch else 1, heads, sequence, dim


def attention_by(dtype: str, q: Any, k: Any, v: Any, given: dict[str, Any], return_lse: bool, out: Any | None) -> Any:
    """`attention` with the other arguments of `given`, by way of tensors of 8 bits."""
    from ._attention import attention

    framework, layout = _frameworks.of(q), given["layout"]
    if dtype != "e4m3":
        raise ValueError(f"quantise is {dtype!r}; attention supports \"e4m3\"")
    if not isinstance(framework, _frameworks.Torch):
        raise TypeError("attention quantises torch tensors only; for others call flashcore.quantise first")
    if framework.records(q, k, v, given["sinks"]):
        raise NotImplementedError("8-bit attention has no backward pass; call this under torch.no_grad() or detach the tensors")
    if given["page_table"] is not None or given["key_mask"] is not None or given["factors"] is not None:
        raise ValueError("quantise cannot be combined with page_table, key_mask or factors")
    # What compares scores with what is no score of these keys needs the keys as they are.
    centred = given["sinks"] is None and given["softcap"] is None
    rows_q, rows_k = BLOCK_ROWS
    queries, keys = given["query_lengths"], given["key_lengths"]
    q8 = quantise(q, per="block", rows=rows_q, lengths=queries, layout=layout)
    k8 = quantise(k, per="block", rows=rows_k, centred=centred, lengths=keys, layout=layout)
    turned = _turns(v)
    v8 = quantise(v, per="channel", lengths=keys, turned=turned, layout=layout)
    out = framework.empty(q, v) if out is None else out
    factors = (q8.factors, k8.factors, v8.factors)
    given = given | {"factors": factors, "blocks": BLOCK_ROWS, "turned": turned}
    result = attention(q8.values, k8.values, v8.values, return_lse=return_lse, out=out, **given)
    if not return_lse or not centred:
        return result
    out, lse = result
    return out, lse + _moved(q, k8.means, given["scale"], layout).reshape(lse.shape)


def _turns(v: Any) -> bool:
    """Whether values are turned when they are quantised: on a GPU they would be turned afterwards."""
    return v.is_cuda and v.dim() == 4 and v.shape[-1] % 16 == 0 and v.shape[-1] <= 256 and v.data_ptr() % 16 == 0


def out_of_turned(q: Any, v: Any) -> Any:
    """A new tensor for the result of attention over turned values."""
    framework = _frameworks.of(q)
    if not isinstance(framework, _frameworks.Torch):
        raise TypeError("turned values must be torch tensors; for others pass values as they are")
    if v.dim() != 4 or v.shape[-2] <= COUNT_ROWS:
        raise ValueError(f"v has the shape {tuple(v.shape)}; turned values are batch x heads x (dim + 8) x keys")
    return framework.empty(q, v.transpose(-1, -2)[..., :-COUNT_ROWS])


def _moved(q: Any, means: Any, scale: float | None, layout: str) -> Any:
    """What the means of the keys would have added to each query's scores: batch x heads x sequence."""
    batch, heads, sequence, dim = extents(q, layout)
    if layout == "bhsd" or q.dim() == 2:
        q = q.reshape(batch, heads, sequence, dim)
    else:
        q = q.reshape(batch, sequence, heads, dim).transpose(1, 2)
    scale = dim**-0.5 if scale is None else scale
    means = means.repeat_interleave(heads // means.shape[1], 1)
    moved = scale * (q.float() * means[:, :, None]).sum(-1)
    # Rows that are not used may hold anything, and have no scores.
    return moved.nan_to_num(0.0)
