"""JAX: arrays that cannot be written, ordered by values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from .._native import Launched, Options, Values, forward, grouped_mm, merge, moe, own_stream
from .base import CUDA, Framework, given, key_words, rows, seed_number
from .of_numpy import exportable


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
        arrays = () if values is None else (values.lengths_q, values.lengths_kv, values.sinks, values.table, values.bias, values.seed)
        if self.traces(q, k, v, *arrays):
            from .._jit import attention

            return attention(self, q, k, v, layout, return_lse, options, values)
        shapes = [(*q.shape[:-1], *v.shape[-1:]), rows(q, layout)]
        return self.compute(q, shapes, return_lse, lambda *to, **how: forward(q, k, v, *to, options, values, **how))

    def accumulate(self, tensors: tuple[Any, ...], options: Options, values: Values) -> None:
        raise TypeError("JAX arrays cannot be written; use flashcore.merge on the parts")

    def merge(self, parts: list[Any], lses: list[Any], out: Any, layout: str, return_lse: bool) -> Any:
        if out is not None:
            raise TypeError("JAX arrays cannot be written; omit `out`")
        first = parts[0]
        if self.traces(*parts, *lses):
            from .._merge import by_operations

            space = self.jax.numpy
            return by_operations(space, self.jax.lax.stop_gradient, space.asarray, parts, lses, layout, return_lse)

        def launch(to: Any, lse: Any, bits_are_bf16: Any = (False,) * 4, **how: Any) -> Any:
            return merge(parts, lses, to, lse, layout, bits_are_bf16=(False, bits_are_bf16[3]), **how)

        return self.compute(first, [first.shape, rows(first, layout)], return_lse, launch)

    def moe(self, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
        if tensors["out"] is not None:
            raise TypeError("JAX arrays cannot be written; omit `out`")
        if self.traces(*given(tensors)):
            raise NotImplementedError("moe cannot be traced; call it outside jax.jit, jax.vmap and jax.grad")
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
        return any(isinstance(tensor, self.jax.core.Tracer) for tensor in tensors)

    def is_array(self, values: Any) -> bool:
        return isinstance(values, self.jax.Array)

    def seed(self, given: Any, q: Any) -> Any:
        """Two words of 32 bits, the low one first: JAX has no others as a rule."""
        jax, space = self.jax, self.jax.numpy
        if not self.is_array(given):
            number = super().seed(None, q) if given is None else seed_number("dropout_seed", given)
            words = self.numpy.asarray([number], "int64").view("uint32")
        elif space.issubdtype(given.dtype, jax.dtypes.prng_key):
            words = key_words(jax, "dropout_seed", given)
        elif given.dtype == "uint32" and given.shape == (2,):  # words, or a key as older programs have it
            words = given
        elif given.size != 1 or given.dtype.kind not in "iu":
            what = f"{given.dtype} of the shape {given.shape}"
            raise TypeError(f"dropout_seed is {what}; pass one of jax.random.key, or a whole number")
        elif given.dtype.itemsize == 8:
            words = jax.lax.bitcast_convert_type(given.reshape(()), "uint32")
        else:
            low = given.reshape(())
            words = space.stack([low.astype("uint32"), space.where(low < 0, space.uint32(2**32 - 1), space.uint32(0))])
        return self.beside(space.asarray(words), q)

    def array(self, values: tuple[Any, ...], dtype: str, q: Any) -> Any:
        if self.traces(q):
            return self.numpy.asarray(values, dtype)
        (device,) = q.devices()
        return self.jax.device_put(self.numpy.asarray(values, dtype), device)

    def beside(self, array: Any, q: Any) -> Any:
        if self.traces(array, q) or not self.is_array(q):
            return array
        (device,) = q.devices()
        return self.jax.device_put(array, device)

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
