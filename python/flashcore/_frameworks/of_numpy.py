"""NumPy: arrays on the host, bfloat16 and floats of 8 bits as ml_dtypes has them."""

from __future__ import annotations

from typing import Any

from .._native import Options, Values, append, forward, grouped_mm, merge, moe, quantise
from .base import Framework, each_tensor, rows, seed_number


class Numpy(Framework):
    def __init__(self) -> None:
        import numpy

        self.numpy = numpy

    def attention(
        self, q: Any, k: Any, v: Any, out: Any, layout: str, return_lse: bool, options: Options, values: Values | None
    ) -> Any:
        out = self.empty(q, v) if out is None else out
        lse = self.numpy.empty(rows(q, layout), "float32") if return_lse else None
        tensors, bits = zip(*(exportable(self.numpy, tensor) for tensor in (q, k, v, out)))
        forward(*tensors, lse, options, values, bits_are_bf16=bits)
        return (out, lse) if return_lse else out

    def indices(self, name: str, values: Any, q: Any) -> Any:
        if isinstance(values, self.numpy.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
            return self.numpy.ascontiguousarray(values, values.dtype if values.dtype.name == "int64" else "int32")
        return super().indices(name, values, q)

    def table(self, values: Any, q: Any) -> Any:
        if isinstance(values, self.numpy.ndarray) and values.dtype.kind in "iu":
            return self.numpy.ascontiguousarray(values, "int32")
        return super().table(values, q)

    def floats(self, name: str, values: Any, q: Any) -> Any:
        if isinstance(values, self.numpy.ndarray) and values.ndim == 1:
            return self.numpy.ascontiguousarray(values, "float32")
        return super().floats(name, values, q)

    def seed(self, given: Any, q: Any) -> Any:
        return super().seed(None if given is None else seed_number("dropout_seed", given), q)

    def array(self, values: tuple[Any, ...], dtype: str, q: Any) -> Any:
        return self.numpy.asarray(values, dtype)

    def accumulate(self, tensors: tuple[Any, ...], options: Options, values: Values) -> None:
        *tensors, lse = tensors
        tensors, bits = zip(*(exportable(self.numpy, tensor) for tensor in tensors))
        forward(*tensors, lse, options, values, bits_are_bf16=bits)

    def merge(self, parts: list[Any], lses: list[Any], out: Any, layout: str, return_lse: bool) -> Any:
        out = self.empty(parts[0], parts[0]) if out is None else out
        lse = self.numpy.empty(rows(parts[0], layout), "float32") if return_lse else None
        (*tensors, into), (*bits, bits_of_out) = zip(*(exportable(self.numpy, tensor) for tensor in (*parts, out)))
        merge(tensors, lses, into, lse, layout, bits_are_bf16=(bits[0], bits_of_out))
        return (out, lse) if return_lse else out

    def moe(self, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
        x = tensors["x"]
        out = tensors["out"] = self.empty(x, x) if tensors["out"] is None else tensors["out"]
        bits = exportable(self.numpy, x)[1]
        moe(each_tensor(tensors, lambda tensor: exportable(self.numpy, tensor)[0]), options, bits_are_bf16=bits)
        return out

    def grouped_mm(self, a: Any, b: Any, offs: Any, shape: tuple[int, ...]) -> Any:
        out = self.numpy.empty(shape, a.dtype)
        (left, bits), right, to = (exportable(self.numpy, array) for array in (a, b, out))
        grouped_mm(left, right[0], to[0], offs, bits_are_bf16=bits)
        return out

    def append(self, tensors: dict[str, Any], options: dict[str, bool]) -> None:
        bits = exportable(self.numpy, tensors["k"])[1]
        append(each_tensor(tensors, lambda tensor: exportable(self.numpy, tensor)[0]), options, bits_are_bf16=bits)

    def quantise(
        self, x: Any, dtype: str, shapes: tuple[Any, Any, Any], lengths: Any, options: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        try:
            import ml_dtypes
        except ImportError:
            raise ImportError("NumPy has no floats of 8 bits by itself; install ml_dtypes") from None
        tensor, bits = exportable(self.numpy, x)
        of_out, *of_rest = shapes
        out = self.numpy.empty(x.shape if of_out is None else of_out, "uint8")
        factors, means = (None if shape is None else self.numpy.empty(shape, "float32") for shape in of_rest)
        flat = None if means is None else means.reshape(-1)
        tensors = {"x": tensor, "out": out, "factors": factors.reshape(-1), "means": flat, "lengths": lengths}
        quantise(tensors, options, bits_are_bf16=bits)
        return out.view(getattr(ml_dtypes, dtype)), factors, means

    def numbers_to(self, end: int, q: Any) -> Any:
        return self.numpy.arange(end)

    def memory(self, array: Any) -> tuple[int, tuple[int, ...], int, Any] | None:
        return array.__array_interface__["data"][0], array.strides, array.itemsize, None

    def strided(self, array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return self.numpy.lib.stride_tricks.as_strided(array, shape, strides)

    def empty(self, q: Any, v: Any) -> Any:
        return empty_like(self.numpy, q, v)


def exportable(numpy: Any, array: Any) -> tuple[Any, bool]:
    """The array as NumPy exports it, and whether as 16-bit integers: NumPy does not have bfloat16 among its types."""
    as_bits = isinstance(array, numpy.ndarray) and array.dtype.name == "bfloat16"
    return (array.view("uint16"), True) if as_bits else (array, False)


def empty_like(numpy: Any, q: Any, v: Any) -> Any:
    """A new array with the dim of v, in memory ordered as q where that keeps features together."""
    shape = (*q.shape[:-1], *v.shape[-1:])
    if 0 not in q.strides:
        made = numpy.empty_like(q, shape=shape)
        if made.strides[-1:] == (made.itemsize,):
            return made
    return numpy.empty(shape, q.dtype)
