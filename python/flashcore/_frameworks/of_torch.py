"""torch: tensors by its exchange API where it has one, else by DLPack's capsules; what its transforms and autograd refuse."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .._native import Options, Values, append, exchanges, forward, grouped_mm, merge, moe, quantise
from .base import LEGACY_STREAM, Framework, demand, each_tensor, given, rows, seed_number

NO_MASK_GRADIENTS = "masks have no gradient; detach the mask, or pass learned logits as sinks"
NO_SLOPE_GRADIENTS = "slopes have no gradient; detach them"
NO_OUT_GRADIENTS = "out= cannot be combined with gradients; omit it, or call under torch.no_grad()"
NO_APPEND_GRADIENTS = "a cache has no backward pass; call this under torch.no_grad() or detach the tensors"
NO_FORWARD_GRADIENTS = "attention has no forward-mode gradients; use reverse mode, as torch.func.vjp or backward()"
NO_SECOND_GRADIENTS = "attention has no second-order gradients; detach what is differentiated twice, or use torch's own attention"
NEGATED = "a tensor has torch's negative bit, whose memory holds other numbers than it; pass x.resolve_neg()"
NO_GRADIENTS = "accumulate has no backward pass; use merge, call it under torch.no_grad() or detach its tensors"


class Torch(Framework):
    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.exchanges = exchanges(torch.empty(0))
        on_any = getattr(torch._C, "_is_any_autocast_enabled", None)
        self.is_autocast_enabled = on_any or (lambda: torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled())
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
        first = parts[0]
        if self.torch.compiler.is_dynamo_compiling() or self.records(*parts, *lses) or self.transforms(*parts, *lses):
            from .._merge import by_operations

            result = by_operations(self.torch, self.torch.detach, self.torch.as_tensor, parts, lses, layout, return_lse)
            if out is None:
                return result
            if self.records(out, *parts, *lses):
                raise RuntimeError(NO_OUT_GRADIENTS)
            merged, lse = result if return_lse else (result, None)
            return (out.copy_(merged), lse) if return_lse else out.copy_(merged)
        out = self.empty(first, first) if out is None else out
        lse = self.empty_lse(first, layout) if return_lse else None
        if self.exchanges:
            merge(parts, lses, out, lse, layout)
        else:
            export = self.export
            merge([*map(export, parts)], [*map(export, lses)], export(out), export(lse), layout, self.stream_of(first))
        return (out, lse) if return_lse else out

    def moe(self, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
        if self.records(*given(tensors)):
            from .._torch_moe import differentiable

            return differentiable(tensors, options)
        x = tensors["x"]
        out = tensors["out"] = self.torch.empty_like(x) if tensors["out"] is None else tensors["out"]
        if self.exchanges:
            moe(tensors, options)
        else:
            moe(each_tensor(tensors, self.export), options, self.stream_of(x))
        return self.written(out)

    def grouped_mm(self, a: Any, b: Any, offs: Any, shape: tuple[int, ...]) -> Any:
        if self.records(a, b):
            from .._torch_moe import GroupedMm

            return GroupedMm.apply(a, b, offs, shape)
        out = a.new_empty(shape)
        if self.exchanges:
            grouped_mm(a, b, out, offs)
        else:
            grouped_mm(*map(self.export, (a, b, out, offs)), self.stream_of(a))
        return out

    def append(self, tensors: dict[str, Any], options: dict[str, bool]) -> None:
        if self.records(*given(tensors)):
            raise NotImplementedError(NO_APPEND_GRADIENTS)
        if self.exchanges:
            append(tensors, options)
        else:
            append(each_tensor(tensors, self.export), options, self.stream_of(tensors["k"]))
        for name in ("k_cache", "v_cache"):
            self.written(tensors[name])

    def e4m3(self, cache: Any) -> Any:
        return cache.view(self.torch.float8_e4m3fn) if cache.dtype == self.torch.uint8 else cache

    def quantise(
        self, x: Any, dtype: str, shapes: tuple[Any, Any, Any], lengths: Any, options: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        torch, x = self.torch, x.detach()
        of_out, *of_rest = shapes
        out = torch.empty_like(x, dtype=torch.uint8) if of_out is None else x.new_empty(of_out, dtype=torch.uint8)
        factors, means = (None if shape is None else x.new_empty(shape, dtype=torch.float32) for shape in of_rest)
        flat = None if means is None else means.view(-1)
        tensors = {"x": x, "out": out, "factors": factors.view(-1), "means": flat, "lengths": lengths}
        if self.exchanges:
            quantise(tensors, options)
        else:
            quantise(each_tensor(tensors, self.export), options, self.stream_of(x))
        return out.view(getattr(torch, dtype)), factors, means

    def numbers_to(self, end: int, q: Any) -> Any:
        return self.torch.arange(end, device=q.device)

    def accumulate(self, tensors: tuple[Any, ...], options: Options, values: Values) -> None:
        if self.records(*tensors):
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
        if self.is_array(out) and not out.is_inference():
            self.torch.autograd.graph.increment_version(out)
        return out

    def transforms(self, *tensors: Any) -> bool:
        if without_memory(self.torch, tensors[0]):
            return True
        duals = self.torch.autograd.forward_ad
        if duals._current_level >= 0 and any(duals.unpack_dual(tensor).tangent is not None for tensor in tensors):
            raise NotImplementedError(NO_FORWARD_GRADIENTS)
        return False

    def autocast(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        return autocast(self.torch, q, k, v)

    def stream_of(self, q: Any) -> int | None:
        return self.torch.cuda.current_stream(q.device).cuda_stream or LEGACY_STREAM if q.is_cuda else None

    def by_capsule(self, tensors: list[Any], options: Options, values: Values | None) -> None:
        """For torch before 2.10, which has no exchange API."""
        forward(*map(self.export, tensors), options, values, self.stream_of(tensors[0]))

    def export(self, tensor: Any) -> Any:
        """A tensor's capsule; one of bytes beside the name of their type where that has 8 bits, which torch then does not export."""
        if tensor is None:
            return None
        torch, tensor = self.torch, tensor.detach()
        if tensor.is_neg():
            raise ValueError(NEGATED)
        narrow = tensor.is_floating_point() and tensor.element_size() == 1
        capsule = torch.utils.dlpack.to_dlpack(tensor.view(torch.uint8) if narrow else tensor)
        return (capsule, str(tensor.dtype).removeprefix("torch.")) if narrow else capsule

    def empty(self, q: Any, v: Any) -> Any:
        same = q.shape[-1] == v.shape[-1]
        if same and q.element_size() > 1:
            return self.torch.empty_like(q)
        # A result of 8 bits would lose precision.
        dtype = self.torch.bfloat16 if q.element_size() == 1 else q.dtype
        if same:
            return self.torch.empty_like(q, dtype=dtype)
        shape, dim = q.shape, v.shape[-1]
        if q.dim() == 4 and q.stride(1) < q.stride(2):  # memory in the other order: the result too
            return q.new_empty((shape[0], shape[2], shape[1], dim), dtype=dtype).transpose(1, 2)
        return q.new_empty((*shape[:-1], dim), dtype=dtype)

    def recipe(self, made: str, q: Any, v: Any, layout: str) -> tuple[Any, tuple[Any, ...], dict[str, Any] | None]:
        """A function with its arguments and keywords that makes tensors like `empty(q, v)`, `empty_lse(q, layout)` or q.

        torch's compiler makes its tensors with functions that go to the allocator directly, in half the time of
        `torch.empty`. They know no number of a GPU, so they serve where there is but one.
        """
        torch = self.torch
        if made == "result":
            model = self.empty(q, v)
        else:
            model = self.empty_lse(q, layout) if made == "lse" else torch.empty_like(q)
        shape, strides, kind = tuple(model.shape), model.stride(), model.device.type
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
        straight = getattr(guards, f"_empty_strided_{kind}", None)
        if straight is not None and (kind == "cpu" or (kind == "cuda" and torch.cuda.device_count() == 1)):
            return straight, (shape, strides, model.dtype), None
        return torch.empty_strided, (shape, strides), {"dtype": model.dtype, "device": model.device}

    def empty_lse(self, q: Any, layout: str) -> Any:
        return q.new_empty(rows(q, layout), dtype=self.torch.float32)

    def indices(self, name: str, values: Any, q: Any) -> Any:
        torch = self.torch
        if not self.is_array(values):
            return super().indices(name, values, q)
        if values.layout != torch.strided or values.is_quantized or values.dim() != 1:
            demand(**{name: values})
            raise ValueError(f"{name} has {values.dim()} dimensions but must have one; give one number per sequence")
        if values.is_floating_point() or values.is_complex():
            raise TypeError(f"{name} is {str(values.dtype).removeprefix('torch.')}; convert it to int32 by {name}.int()")
        kept = values.dtype in (torch.int32, torch.int64)
        return values.detach().to(q.device, values.dtype if kept else torch.int32).contiguous()

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

    def seed(self, given: Any, q: Any) -> Any:
        torch = self.torch
        if given is None:  # of torch's own generator, which checkpoints, compiled functions and graphs look after
            return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
        if not self.is_array(given):
            # Written by a kernel where q is, so that a graph may hold it.
            return torch.full((1,), seed_number("dropout_seed", given), dtype=torch.int64, device=q.device)
        if given.numel() != 1:
            raise ValueError(f"dropout_seed has the shape {tuple(given.shape)}; pass one integer")
        if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            dtype = str(given.dtype).removeprefix("torch.")
            raise TypeError(f"dropout_seed is {dtype}; convert it to int64 by dropout_seed.long()")
        given = given.view(torch.int64) if given.dtype == torch.uint64 else given
        return given.detach().to(q.device, torch.int64).reshape(1)

    def factor(self, given: Any, q: Any, flat: bool) -> Any:
        if not self.is_array(given):
            return super().factor(given, q, flat)
        given = given.detach().to(q.device, self.torch.float32)
        if flat:
            return given.reshape(-1).contiguous()
        return given.reshape(1) if given.dim() == 0 else given

    def memory(self, array: Any) -> tuple[int, tuple[int, ...], int, Any] | None:
        if self.by_operator or without_memory(self.torch, array):
            return None
        return array.data_ptr(), array.stride(), 1, array.untyped_storage().data_ptr()

    def strided(self, array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return array.as_strided(shape, strides)

    def bfloat16(self, x: Any) -> Any:
        return x.bfloat16()

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


def without_memory(torch: Any, q: Any) -> bool:
    """Whether tensors only stand for others: inside of `torch.func`, or on the device `meta`."""
    return torch._C._functorch.peek_interpreter_stack() is not None or q.is_meta


def autocast(torch: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """torch's autocast, as its own attention has it: inside of it float32 tensors are computed in fewer bits."""
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    wide = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point() and 1 < x.element_size() < 8
    return tuple(x.to(dtype) if wide(x) else x for x in (q, k, v))
