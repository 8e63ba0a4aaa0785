"""``grouped_mm``: matrix products, one for each group, with the arguments and the meaning of torch's."""

from __future__ import annotations

from typing import Any

from . import _frameworks
from ._words import retell


def grouped_mm(mat_a: Any, mat_b: Any, *, offs: Any | None = None, bias: Any | None = None, out_dtype: Any | None = None) -> Any:
    """Matrix products of groups, as ``torch.nn.functional.grouped_mm``: float16, bfloat16 or float32, summed in float32.

    ============================== ============================= ================ =======================
    mat_a                          mat_b                         offs divide      result
    ============================== ============================= ================ =======================
    rows x depth                   groups x depth x columns      the rows         rows x columns
    groups x rows x depth          depth x columns               the columns      rows x columns
    rows x depth                   depth x columns               the depth        groups x rows x columns
    groups x rows x depth          groups x depth x columns      nothing          groups x rows x columns
    ============================== ============================= ================ =======================

    Args:
        mat_a: the left operand. Either of its last two dimensions is contiguous; other strides are free.
        mat_b: the right operand, likewise.
        offs: int32, the end of each group. Numbers are not trusted: an end beyond the divided dimension is clamped to
            it, one before an earlier end makes an empty group. What belongs to no group is 0 in the result.
        bias: not supported, as in torch.
        out_dtype: the operands' type, if given.

    On a GPU operands are float16 or bfloat16, rows in memory are multiples of 16 bytes, and the dimension that offsets
    divide is not the contiguous one. Offsets stay on the device: nothing waits for them.

    >>> import numpy
    >>> x, weights = numpy.ones((5, 8), "float32"), numpy.ones((2, 8, 3), "float32")
    >>> grouped_mm(x, weights, offs=numpy.array([2, 5], "int32")).shape
    (5, 3)
    """
    try:
        if bias is not None:
            raise NotImplementedError("bias is not supported; add it to the result")
        a, b = (_frameworks.shape(name, tensor) for name, tensor in (("mat_a", mat_a), ("mat_b", mat_b)))
        for name, shape in (("mat_a", a), ("mat_b", b)):
            if len(shape) not in (2, 3):
                raise ValueError(f"{name} has {len(shape)} dimensions but 2 or 3 are needed: rows, columns, or groups before them")
        if out_dtype is not None and out_dtype != mat_a.dtype:
            raise NotImplementedError(f"out_dtype {out_dtype} is not supported; it must be that of mat_a, {mat_a.dtype}")
        if (len(a) == len(b) == 3) != (offs is None):
            what = "3-D operands have a matrix for each group; omit offs" if offs is not None else "give offs, the end of each group"
            raise ValueError(what)
        shape = (a[-2], b[-1])
        if len(a) == len(b):
            shape = (a[0] if offs is None else _frameworks.shape("offs", offs)[0], *shape)
        return _frameworks.of(mat_a).grouped_mm(mat_a, mat_b, offs, shape)
    except Exception as error:
        retell(error, offsets="offs")
        raise
