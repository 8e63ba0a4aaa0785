"""CuPy: work on the current stream of its device."""

from __future__ import annotations

from typing import Any

from .._native import Options, Values, append, forward, grouped_mm, merge, moe
from .base import LEGACY_STREAM, Framework, rows
from .of_numpy import empty_like


class Cupy(Framework):
    def __init__(self) -> None:
        import cupy

        self.cupy = cupy

    def attention(
        self, q: Any, k: Any, v: Any, out: Any, layout: str, return_lse: bool, options: Options, values: Values | None
    ) -> Any:
        cupy = self.cupy
        with q.device:
            out = self.empty(q, v) if out is None else out
            lse = cupy.empty(rows(q, layout), "float32") if return_lse else None
            forward(q, k, v, out, lse, options, values, cupy.cuda.get_current_stream().ptr or LEGACY_STREAM)
        return (out, lse) if return_lse else out

    def accumulate(self, tensors: tuple[Any, ...], options: Options, values: Values) -> None:
        with tensors[0].device:
            forward(*tensors, options, values, self.cupy.cuda.get_current_stream().ptr or LEGACY_STREAM)

    def merge(self, parts: list[Any], lses: list[Any], out: Any, layout: str, return_lse: bool) -> Any:
        cupy, first = self.cupy, parts[0]
        with first.device:
            out = self.empty(first, first) if out is None else out
            lse = cupy.empty(rows(first, layout), "float32") if return_lse else None
            merge(parts, lses, out, lse, layout, cupy.cuda.get_current_stream().ptr or LEGACY_STREAM)
        return (out, lse) if return_lse else out

    def moe(self, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
        x = tensors["x"]
        with x.device:
            out = tensors["out"] = self.empty(x, x) if tensors["out"] is None else tensors["out"]
            moe(tensors, options, self.cupy.cuda.get_current_stream().ptr or LEGACY_STREAM)
        return out

    def grouped_mm(self, a: Any, b: Any, offs: Any, shape: tuple[int, ...]) -> Any:
        with a.device:
            out = self.cupy.empty(shape, a.dtype)
            grouped_mm(a, b, out, offs, self.cupy.cuda.get_current_stream().ptr or LEGACY_STREAM)
        return out

    def append(self, tensors: dict[str, Any], options: dict[str, bool]) -> None:
        with tensors["k"].device:
            append(tensors, options, self.cupy.cuda.get_current_stream().ptr or LEGACY_STREAM)

    def numbers_to(self, end: int, q: Any) -> Any:
        with q.device:
            return self.cupy.arange(end)

    def memory(self, array: Any) -> tuple[int, tuple[int, ...], int, Any] | None:
        return array.data.ptr, array.strides, array.itemsize, array.data.mem.ptr

    def strided(self, array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return self.cupy.lib.stride_tricks.as_strided(array, shape, strides)

    def empty(self, q: Any, v: Any) -> Any:
        return empty_like(self.cupy, q, v)

    def is_array(self, values: Any) -> bool:
        return isinstance(values, self.cupy.ndarray)

    def array(self, values: tuple[Any, ...], dtype: str, q: Any) -> Any:
        with q.device:
            return self.cupy.asarray(values, dtype)
