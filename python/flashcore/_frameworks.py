"""What is particular to each framework: how to make a tensor, which stream is current, when memory may go.

`of` finds the framework of a tensor by its type; `attention` of that framework calls the extension.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ._arguments import count, each, real, whole
from ._native import (
    Direct,
    Launched,
    Options,
    Values,
    append,
    exchanges,
    forward,
    grouped_mm,
    merge,
    moe,
    own_stream,
    quantise,
)

CUDA = 2
"""DLPack's number of CUDA devices."""
_LEGACY_STREAM = 1
"""DLPack's number of CUDA's legacy default stream."""


class Framework:
    """A framework that implements the array API standard; others differ from it by what they override."""

    by_operator = False
    """Whether calls go through torch's operator instead of to the extension."""

    def attention(
        self, q: Any, k: Any, v: Any, out: Any, layout: str, return_lse: bool, options: Options, values: Values | None
    ) -> Any:
        out = self.empty(q, v) if out is None else out
        lse = self.empty_lse(q, layout) if return_lse else None
        stream = self.stream(q)
        launched = forward(q, k, v, out, lse, options, values, stream, stream is not None)
        if launched is not None:
            # Nobody knows in which order an unknown framework would use the result.
            launched.wait()
        return (out, lse) if return_lse else out

    def records(self, *tensors: Any) -> bool:
        """Whether the framework records a call with these tensors for a backward pass of its own."""
        return False

    def written(self, out: Any) -> Any:
        """Tells the framework that a tensor of its was written; returns it."""
        return out

    def accumulate(self, tensors: tuple[Any, ...], options: Options, values: Values) -> None:
        stream = self.stream(tensors[0])
        launched = forward(*tensors, options, values, stream, stream is not None)
        if launched is not None:
            launched.wait()

    def merge(self, parts: list[Any], lses: list[Any], out: Any, layout: str, return_lse: bool) -> Any:
        first = parts[0]
        out = self.empty(first, first) if out is None else out
        lse = self.empty_lse(first, layout) if return_lse else None
        stream = self.stream(first)
        launched = merge(parts, lses, out, lse, layout, stream, stream is not None)
        if launched is not None:
            launched.wait()
        return (out, lse) if return_lse else out

    def moe(self, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
        x = tensors["x"]
        out = tensors["out"] = self.empty(x, x) if tensors["out"] is None else tensors["out"]
        stream = self.stream(x)
        launched = moe(tensors, options, stream, stream is not None)
        if launched is not None:
            launched.wait()
        return out

    def grouped_mm(self, a: Any, b: Any, offs: Any, shape: tuple[int, ...]) -> Any:
        """Grouped products of that shape."""
        out, stream = self.namespace(a).empty(shape, dtype=a.dtype, device=a.device), self.stream(a)
        launched = grouped_mm(a, b, out, offs, stream, stream is not None)
        if launched is not None:
            launched.wait()
        return out

    def quantise(
        self, x: Any, dtype: str, shapes: tuple[Any, Any], lengths: Any, options: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        """A tensor rounded to 8 bits, its factors, and its means where these have a shape."""
        raise TypeError("quantise takes tensors of torch and NumPy; convert them by DLPack")

    def append(self, tensors: dict[str, Any], options: dict[str, bool]) -> None:
        """Writes new keys and values into a cache."""
        stream = self.stream(tensors["k"])
        launched = append(tensors, options, stream, stream is not None)
        if launched is not None:
            launched.wait()

    def numbers_to(self, end: int, q: Any) -> Any:
        """The 64-bit whole numbers below `end`, where q is."""
        space = self.namespace(q)
        return space.arange(end, dtype=space.int64, device=q.device)

    def empty(self, q: Any, v: Any) -> Any:
        """A new tensor for the result."""
        space = self.namespace(q)
        return space.empty((*q.shape[:-1], *v.shape[-1:]), dtype=q.dtype, device=q.device)

    def empty_lse(self, q: Any, layout: str) -> Any:
        """A new tensor for the log-sum-exp of each row."""
        space = self.namespace(q)
        return space.empty(rows(q, layout), dtype=space.float32, device=q.device)

    def indices(self, name: str, values: Any, q: Any) -> Any:
        """Lengths or offsets where q is, as int32 or int64; a tensor of the framework's own stays what it is."""
        if values is None or self.is_array(values):
            return values
        return self.array(_whole_numbers(name, values), "int32", q)

    def table(self, values: Any, q: Any) -> Any:
        """Page numbers where q is, as int32; a tensor of the framework's own stays what it is."""
        if values is None or self.is_array(values):
            return values
        instead = "give a row of page numbers for each sequence"
        rows = each("page_table", values, lambda name, row: each(name, row, whole, instead), instead)
        return self.array(rows, "int32", q)

    def floats(self, name: str, values: Any, q: Any) -> Any:
        """Logits where q is."""
        if values is None or self.is_array(values):
            return values
        return self.array(each(name, values, real, "give one logit per query head"), "float32", q)

    def factors(self, given: Any, q: Any) -> list[Any]:
        """The factors of q, k and v where q is, in one dimension each; those of a cache, k and v alone, as they lie."""
        if given is None:
            return []
        try:
            given = tuple(given)
        except TypeError:
            given = ()
        if len(given) not in (2, 3):
            raise ValueError("pass three factors: those of q, of k and of v, or the last two where q has more bits")
        return [self.factor(factor, q, flat=len(given) == 3) for factor in given]

    def factor(self, given: Any, q: Any, flat: bool) -> Any:
        """The factors of one tensor; 1 where it has none."""
        if not flat and self.is_array(given):
            return given
        if hasattr(given, "__dlpack__") and not flat:  # one number, which stays where it is
            return self.namespace(given).reshape(given, (1,))
        if given is None or not self.is_array(given):
            given = 1.0 if given is None else given
            return self.array((real("factors", given),) if not hasattr(given, "__len__") else tuple(given), "float32", q)
        return self.namespace(given).reshape(given, (-1,))

    def e4m3(self, cache: Any) -> Any:
        """A cache of 8-bit floats, which may come as bytes."""
        if str(cache.dtype).endswith("uint8"):
            raise TypeError("only torch has bytes that are read as float8_e4m3fn; pass a cache of that type")
        return cache

    def is_array(self, values: Any) -> bool:
        return hasattr(values, "__dlpack__") and getattr(values, "ndim", 1) > 0

    def array(self, values: tuple[Any, ...], dtype: str, q: Any) -> Any:
        """A new array of these numbers, where q is."""
        space = self.namespace(q)
        return space.asarray(values, dtype=getattr(space, dtype), device=q.device)

    def namespace(self, q: Any) -> Any:
        try:
            return q.__array_namespace__()
        except AttributeError:
            kind = type(q).__name__
            raise TypeError(f"cannot make a tensor like a {kind}; pass one as `out`, without return_lse") from None

    def stream(self, q: Any) -> int | None:
        """The stream to launch on, as DLPack numbers it; None for host tensors."""
        device = getattr(q, "__dlpack_device__", None)
        return _LEGACY_STREAM if device is not None and device()[0] == CUDA else None


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
        self, x: Any, dtype: str, shapes: tuple[Any, Any], lengths: Any, options: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        try:
            import ml_dtypes
        except ImportError:
            raise ImportError("NumPy has no floats of 8 bits by itself; install ml_dtypes") from None
        tensor, bits = exportable(self.numpy, x)
        out = self.numpy.empty(x.shape, "uint8")
        factors, means = (None if shape is None else self.numpy.empty(shape, "float32") for shape in shapes)
        flat = None if means is None else means.reshape(-1)
        tensors = {"x": tensor, "out": out, "factors": factors.reshape(-1), "means": flat, "lengths": lengths}
        quantise(tensors, options, bits_are_bf16=bits)
        return out.view(getattr(ml_dtypes, dtype)), factors, means

    def numbers_to(self, end: int, q: Any) -> Any:
        return self.numpy.arange(end)

    def empty(self, q: Any, v: Any) -> Any:
        return empty_like(self.numpy, q, v)


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
            forward(q, k, v, out, lse, options, values, cupy.cuda.get_current_stream().ptr or _LEGACY_STREAM)
        return (out, lse) if return_lse else out

    def accumulate(self, tensors: tuple[Any, ...], options: Options, values: Values) -> None:
        with tensors[0].device:
            forward(*tensors, options, values, self.cupy.cuda.get_current_stream().ptr or _LEGACY_STREAM)

    def merge(self, parts: list[Any], lses: list[Any], out: Any, layout: str, return_lse: bool) -> Any:
        cupy, first = self.cupy, parts[0]
        with first.device:
            out = self.empty(first, first) if out is None else out
            lse = cupy.empty(rows(first, layout), "float32") if return_lse else None
            merge(parts, lses, out, lse, layout, cupy.cuda.get_current_stream().ptr or _LEGACY_STREAM)
        return (out, lse) if return_lse else out

    def moe(self, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
        x = tensors["x"]
        with x.device:
            out = tensors["out"] = self.empty(x, x) if tensors["out"] is None else tensors["out"]
            moe(tensors, options, self.cupy.cuda.get_current_stream().ptr or _LEGACY_STREAM)
        return out

    def grouped_mm(self, a: Any, b: Any, offs: Any, shape: tuple[int, ...]) -> Any:
        with a.device:
            out = self.cupy.empty(shape, a.dtype)
            grouped_mm(a, b, out, offs, self.cupy.cuda.get_current_stream().ptr or _LEGACY_STREAM)
        return out

    def append(self, tensors: dict[str, Any], options: dict[str, bool]) -> None:
        with tensors["k"].device:
            append(tensors, options, self.cupy.cuda.get_current_stream().ptr or _LEGACY_STREAM)

    def numbers_to(self, end: int, q: Any) -> Any:
        with q.device:
            return self.cupy.arange(end)

    def empty(self, q: Any, v: Any) -> Any:
        return empty_like(self.cupy, q, v)

    def is_array(self, values: Any) -> bool:
        return isinstance(values, self.cupy.ndarray)

    def array(self, values: tuple[Any, ...], dtype: str, q: Any) -> Any:
        with q.device:
            return self.cupy.asarray(values, dtype)


class Jax(Framework):
    """JAX orders work by values, not by streams, and its arrays cannot be written.

    On the CPU the result is made in memory of NumPy's. On a GPU it is made in a new array that nobody has seen, and
    handed over as another one that waits for the launch.
    """

    def __init__(self) -> None:
        import jax
        import numpy

        self.jax, self.numpy = jax, numpy
        self.under_way: deque[Launched] = deque()

    def attention(
        self, q: Any, k: Any, v: Any, out: Any, layout: str, return_lse: bool, options: Options, values: Values | None
    ) -> Any:
        if out is not None:
            raise TypeError("JAX arrays cannot be written; omit `out`")
        if self.traces(q, k, v):
            from ._gradients import differentiable

            return differentiable(self, layout, return_lse, options, values)(q, k, v)
        return self.concrete(q, k, v, layout, return_lse, options, values)

    def concrete(
        self, q: Any, k: Any, v: Any, layout: str, return_lse: bool, options: Options, values: Values | None
    ) -> Any:
        """Attention over arrays that have values, or will have them where the caller is being traced."""
        if self.traces(q, k, v):
            from ._jit import attention

            return attention(self, q, k, v, layout, return_lse, options, values)
        shapes = [(*q.shape[:-1], *v.shape[-1:]), rows(q, layout)]
        return self.compute(q, shapes, return_lse, lambda *to, **how: forward(q, k, v, *to, options, values, **how))

    def accumulate(self, tensors: tuple[Any, ...], options: Options, values: Values) -> None:
        raise TypeError("JAX arrays cannot be written; use flashcore.merge on the parts")

    def merge(self, parts: list[Any], lses: list[Any], out: Any, layout: str, return_lse: bool) -> Any:
        if out is not None:
            raise TypeError("JAX arrays cannot be written; omit `out`")
        first = parts[0]

        def launch(to: Any, lse: Any, bits_are_bf16: Any = (False,) * 4, **how: Any) -> Any:
            return merge(parts, lses, to, lse, layout, bits_are_bf16=(False, bits_are_bf16[3]), **how)

        return self.compute(first, [first.shape, rows(first, layout)], return_lse, launch)

    def moe(self, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
        if tensors["out"] is not None:
            raise TypeError("JAX arrays cannot be written; omit `out`")
        x = tensors["x"]

        def launch(to: Any, _: Any, bits_are_bf16: Any = (False,), **how: Any) -> Any:
            return moe(tensors | {"out": to}, options, bits_are_bf16=bits_are_bf16[-1], **how)

        return self.compute(x, [x.shape], False, launch)

    def grouped_mm(self, a: Any, b: Any, offs: Any, shape: tuple[int, ...]) -> Any:
        def launch(to: Any, _: Any, bits_are_bf16: Any = (False,), **how: Any) -> Any:
            return grouped_mm(a, b, to, offs, bits_are_bf16=bits_are_bf16[-1], **how)

        return self.compute(a, [shape], False, launch)

    def append(self, tensors: dict[str, Any], options: dict[str, bool]) -> None:
        raise TypeError("JAX arrays cannot be written; update the cache by k_cache.at[...].set(k)")

    def compute(self, like: Any, shapes: list[Any], return_lse: bool, launch: Callable[..., Any]) -> Any:
        """New arrays for a result and its log-sum-exp, written by `launch`."""
        kind, index = like.__dlpack_device__()
        wanted = list(zip(shapes, (like.dtype, "float32")))[: 2 if return_lse else 1]
        (device,) = like.devices()
        if kind == CUDA:
            both = lambda out, lse=None, **how: launch(out, lse, **how)
            results = self.on_gpu(wanted, device, own_stream(int(index)), both)
        else:
            results = self.on_cpu(wanted, device, launch)
        return results if return_lse else results[0]

    def traces(self, *tensors: Any) -> bool:
        """Whether some of these get their values later."""
        return any(isinstance(tensor, self.jax.core.Tracer) for tensor in tensors)

    def is_array(self, values: Any) -> bool:
        if self.traces(values):
            raise TypeError("lengths, offsets, tables and sinks must have values; close over them instead of tracing them")
        return isinstance(values, self.jax.Array)

    def array(self, values: tuple[Any, ...], dtype: str, q: Any) -> Any:
        if self.traces(q):
            return self.numpy.asarray(values, dtype)
        (device,) = q.devices()
        return self.jax.device_put(self.numpy.asarray(values, dtype), device)

    def on_cpu(self, wanted: list[Any], device: Any, launch: Callable[..., Any]) -> tuple[Any, ...]:
        arrays = [self.numpy.empty(shape, dtype) for shape, dtype in wanted]
        out, bits = exportable(self.numpy, arrays[0])
        launch(out, arrays[1] if len(arrays) > 1 else None, bits_are_bf16=(False, False, False, bits))
        return tuple(self.jax.device_put(array, device) for array in arrays)

    def on_gpu(self, wanted: list[Any], device: Any, stream: int, launch: Callable[..., Any]) -> tuple[Any, ...]:
        # Not every row of a gradient is written, and XLA has no memory without values anyway.
        arrays = [self.jax.numpy.zeros(shape, dtype, device=device) for shape, dtype in wanted]
        # A capsule from before DLPack 1.0 does not say "read-only".
        capsules = [array.__dlpack__(stream=stream) for array in arrays]
        launched = launch(*capsules, stream=stream, record=True)
        self.hold(launched)
        return tuple(self.jax.dlpack.from_dlpack(_After(launched, array)) for array in arrays)

    def hold(self, launched: Launched) -> None:
        """Keeps inputs until they have been read: JAX does not know of our stream."""
        self.under_way.append(launched)
        while self.under_way and self.under_way[0].is_done():
            self.under_way.popleft()


class _After:
    """An array whose values are there after a launch."""

    def __init__(self, launched: Launched, array: Any) -> None:
        self.launched, self.array = launched, array

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        self.launched.wait(stream)
        return self.array.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class Torch(Framework):
    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.exchanges = exchanges(torch.empty(0))
        # The same numbers are the same array: a model passes its mask to every layer.
        self.made = lru_cache(maxsize=256)(self.make)
        self.captured: list[Any] = []

    def attention(
        self, q: Any, k: Any, v: Any, out: Any, layout: str, return_lse: bool, options: Options, values: Values | None
    ) -> Any:
        out = self.empty(q, v) if out is None else out
        lse = self.empty_lse(q, layout) if return_lse else None
        if self.exchanges:
            forward(q, k, v, out, lse, options, values)
        else:
            self.by_capsule([q, k, v, out, lse], options, values)
        return (out, lse) if return_lse else out

    def merge(self, parts: list[Any], lses: list[Any], out: Any, layout: str, return_lse: bool) -> Any:
        if self.torch.is_grad_enabled() and any(part.requires_grad for part in parts):
            raise NotImplementedError(NO_GRADIENTS)
        first = parts[0]
        out = self.empty(first, first) if out is None else out
        lse = self.empty_lse(first, layout) if return_lse else None
        if self.exchanges:
            merge(parts, lses, out, lse, layout)
        else:
            export = lambda tensor: self.torch.utils.dlpack.to_dlpack(tensor.detach())
            into = [export(out), None if lse is None else export(lse)]
            merge([*map(export, parts)], [*map(export, lses)], *into, layout, self.stream_of(first))
        return (out, lse) if return_lse else out

    def moe(self, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
        if self.records(*given(tensors)):
            from ._torch_moe import differentiable

            return differentiable(tensors, options)
        x = tensors["x"]
        out = tensors["out"] = self.torch.empty_like(x) if tensors["out"] is None else tensors["out"]
        if self.exchanges:
            moe(tensors, options)
        else:
            export = self.torch.utils.dlpack.to_dlpack
            moe(each_tensor(tensors, lambda tensor: export(tensor.detach())), options, self.stream_of(x))
        return self.written(out)

    def grouped_mm(self, a: Any, b: Any, offs: Any, shape: tuple[int, ...]) -> Any:
        if self.records(a, b):
            from ._torch_moe import GroupedMm

            return GroupedMm.apply(a, b, offs, shape)
        out = a.new_empty(shape)
        if self.exchanges:
            grouped_mm(a, b, out, offs)
        else:
            export = lambda tensor: None if tensor is None else self.torch.utils.dlpack.to_dlpack(tensor.detach())
            grouped_mm(*map(export, (a, b, out, offs)), self.stream_of(a))
        return out

    def append(self, tensors: dict[str, Any], options: dict[str, bool]) -> None:
        if self.torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given(tensors)):
            raise NotImplementedError(NO_APPEND_GRADIENTS)
        if self.exchanges:
            append(tensors, options)
        else:
            export = self.torch.utils.dlpack.to_dlpack
            append(each_tensor(tensors, lambda tensor: export(tensor.detach())), options, self.stream_of(tensors["k"]))
        for name in ("k_cache", "v_cache"):
            self.written(tensors[name])

    def e4m3(self, cache: Any) -> Any:
        return cache.view(self.torch.float8_e4m3fn) if cache.dtype == self.torch.uint8 else cache

    def quantise(
        self, x: Any, dtype: str, shapes: tuple[Any, Any], lengths: Any, options: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        torch, x = self.torch, x.detach()
        out = torch.empty_like(x, dtype=torch.uint8)
        factors, means = (None if shape is None else x.new_empty(shape, dtype=torch.float32) for shape in shapes)
        flat = None if means is None else means.view(-1)
        tensors = {"x": x, "out": out, "factors": factors.view(-1), "means": flat, "lengths": lengths}
        if self.exchanges:
            quantise(tensors, options)
        else:
            quantise(each_tensor(tensors, torch.utils.dlpack.to_dlpack), options, self.stream_of(x))
        return out.view(getattr(torch, dtype)), factors, means

    def numbers_to(self, end: int, q: Any) -> Any:
        return self.torch.arange(end, device=q.device)

    def accumulate(self, tensors: tuple[Any, ...], options: Options, values: Values) -> None:
        if self.torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise NotImplementedError(NO_GRADIENTS)
        if self.exchanges:
            forward(*tensors, options, values)
        else:
            self.by_capsule(list(tensors), options, values)

    def records(self, *tensors: Any) -> bool:
        if not self.torch.is_grad_enabled():
            return False
        return any(self.is_array(tensor) and tensor.requires_grad for tensor in tensors)

    def written(self, out: Any) -> Any:
        # So that a backward pass that kept it as it was fails instead of using what it is now.
        if not out.is_inference():
            self.torch.autograd.graph.increment_version(out)
        return out

    def stream_of(self, q: Any) -> int | None:
        return self.torch.cuda.current_stream(q.device).cuda_stream or _LEGACY_STREAM if q.is_cuda else None

    def by_capsule(self, tensors: list[Any], options: Options, values: Values | None) -> None:
        """For torch before 2.10, which has no exchange API."""
        q = tensors[0]
        export = self.torch.utils.dlpack.to_dlpack
        stream = self.stream_of(q)
        forward(*(None if t is None else export(t.detach()) for t in tensors), options, values, stream)

    def empty(self, q: Any, v: Any) -> Any:
        # A result of 8 bits would lose what was computed.
        dtype = self.torch.bfloat16 if q.element_size() == 1 else q.dtype
        if q.size(-1) == v.size(-1):
            return self.torch.empty_like(q, dtype=dtype)
        shape, dim = q.shape, v.size(-1)
        if q.dim() == 4 and q.stride(1) < q.stride(2):  # memory in the other order: the result too
            return q.new_empty((shape[0], shape[2], shape[1], dim), dtype=dtype).transpose(1, 2)
        return q.new_empty((*shape[:-1], dim), dtype=dtype)

    def recipe(self, q: Any, v: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any] | None]:
        """A function with its arguments and keywords that makes tensors like `empty(q, v)`, again and again.

        torch's compiler makes its tensors with functions that go to the allocator directly, in half the time of
        `torch.empty`. They know no number of a GPU, so they serve where there is but one.
        """
        torch = self.torch
        made = self.empty(q, v)
        shape, strides, kind = tuple(made.shape), made.stride(), made.device.type
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
        straight = getattr(guards, f"_empty_strided_{kind}", None)
        if straight is not None and (kind == "cpu" or (kind == "cuda" and torch.cuda.device_count() == 1)):
            return straight, (shape, strides, made.dtype), None
        return torch.empty_strided, (shape, strides), {"dtype": made.dtype, "device": made.device}

    def empty_lse(self, q: Any, layout: str) -> Any:
        return q.new_empty(rows(q, layout), dtype=self.torch.float32)

    def indices(self, name: str, values: Any, q: Any) -> Any:
        torch = self.torch
        if not self.is_array(values):
            return super().indices(name, values, q)
        whole = not values.is_floating_point() and values.dtype not in (torch.int32, torch.int64)
        return values.detach().to(q.device, torch.int32 if whole else values.dtype).contiguous()

    def table(self, values: Any, q: Any) -> Any:
        if not self.is_array(values) or values.is_floating_point():
            return super().table(values, q)
        values = values.detach().to(q.device, self.torch.int32)
        return values if values.dim() != 2 or values.stride(1) == 1 else values.contiguous()

    def floats(self, name: str, values: Any, q: Any) -> Any:
        if not self.is_array(values):
            return super().floats(name, values, q)
        taken = values.dtype in (self.torch.float16, self.torch.bfloat16, self.torch.float32)
        return values.detach().to(q.device, values.dtype if taken else self.torch.float32).contiguous()

    def factor(self, given: Any, q: Any, flat: bool) -> Any:
        if not self.is_array(given):
            return super().factor(given, q, flat)
        given = given.detach().to(q.device, self.torch.float32)
        if flat:
            return given.reshape(-1).contiguous()
        return given.reshape(1) if given.dim() == 0 else given

    def is_array(self, values: Any) -> bool:
        return isinstance(values, self.torch.Tensor)

    def array(self, values: tuple[Any, ...], dtype: str, q: Any) -> Any:
        made = self.made(values, dtype, q.device)
        if q.is_cuda and self.torch.cuda.is_current_stream_capturing():
            self.captured.append(made)  # a graph reads it in every replay, and nobody tells us when it ends
        return made

    def make(self, values: tuple[Any, ...], dtype: str, device: Any) -> Any:
        return self.torch.tensor(values, dtype=getattr(self.torch, dtype), device=device)


class TorchSubclass(Torch):
    """Tensors that stand for others (fake, distributed, ...): torch has to see an operator."""

    by_operator = True


NO_MASK_GRADIENTS = "masks have no gradient; detach the mask, or pass what is learned as sinks"
NO_SLOPE_GRADIENTS = "slopes have no gradient; detach them"
NO_OUT_GRADIENTS = "out= does not go with gradients; omit it, or call under torch.no_grad()"
NO_APPEND_GRADIENTS = "a cache has no backward pass; call this under torch.no_grad() or detach the tensors"
NO_GRADIENTS = "merge and accumulate have no backward pass; call them under torch.no_grad() or detach their tensors"


def each_tensor(tensors: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The same tensors, alone or in pairs, each changed."""

    def changed(value: Any) -> Any:
        return None if value is None else [change(one) for one in value] if isinstance(value, (tuple, list)) else change(value)

    return {name: changed(value) for name, value in tensors.items()}


def given(tensors: dict[str, Any]) -> list[Any]:
    """All tensors that there are."""
    found: list[Any] = []
    each_tensor(tensors, found.append)
    return found


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


def _whole_numbers(name: str, values: Any) -> tuple[int, ...]:
    rows = "keys" if "key" in name else "queries"
    instead = f"give how many {rows} each batch entry uses"
    if "offsets" in name:
        instead = f"give where the {rows} of each sequence start, and where the last end"
    return each(name, values, lambda place, item: count(place, item, instead), instead)


def rows(q: Any, layout: str) -> tuple[int, ...]:
    """Batch, heads, sequence, as far as q has them; the extension refuses tensors that it does not take."""
    extents = tuple(q.shape[:-1])
    if layout == "bhsd" or len(extents) < 2:
        return extents
    *batch, sequence, heads = extents
    return (*batch, heads, sequence)


def shape(name: str, tensor: Any) -> tuple[int, ...]:
    """The extents of a tensor."""
    try:
        return tuple(tensor.shape)
    except AttributeError:
        raise no_tensor(name, tensor) from None


def no_tensor(name: str, value: Any) -> TypeError:
    kind = type(value).__name__
    return TypeError(
        f"{name} is a {kind}, which does not speak DLPack; pass a tensor of torch, JAX, CuPy, NumPy or the like"
    )


def is_traced() -> bool:
    """Whether torch.compile follows the caller; torch's own function takes this one's place once torch is met."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


shortcuts: dict[type, Callable[..., Any]] = {}
"""`Direct.attention` for the types of tensors that have it."""
_known: dict[type, Framework] = {}
_made: dict[type[Framework], Framework] = {}


def of(tensor: Any) -> Framework:
    """The framework of a tensor."""
    return _known.get(type(tensor)) or _learn(tensor)


def _learn(tensor: Any) -> Framework:
    kind = type(tensor)
    modules = [base.__module__.partition(".")[0] for base in kind.__mro__]
    maker = next((_MAKERS[name] for name in modules if name in _MAKERS), None)
    if maker is None and not hasattr(kind, "__dlpack__"):
        raise no_tensor("q", tensor)
    maker = maker or Framework
    if maker is Torch and kind not in (sys.modules["torch"].Tensor, sys.modules["torch"].nn.Parameter):
        maker = TorchSubclass
    # Two threads that come here at once may both make one; either will do.
    framework = _made.get(maker) or _made.setdefault(maker, maker())
    _known[kind] = framework
    if isinstance(framework, Torch) and framework.exchanges and not framework.by_operator:
        global is_traced
        is_traced = framework.torch.compiler.is_dynamo_compiling
        shortcuts[kind] = Direct(framework.torch.is_grad_enabled, framework.recipe).attention
    return framework


_MAKERS: dict[str, type[Framework]] = {
    "torch": Torch,
    "numpy": Numpy,
    "cupy": Cupy,
    "jax": Jax,
    "jaxlib": Jax,
}
