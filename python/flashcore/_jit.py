"""Attention inside of what JAX traces, `jax.jit` and `jax.vmap`: a call back to the host when the compiled program runs.

On the CPU arrays are handed over where they lie. On a GPU they would be copied to the host and computed there, which nobody
wants who has a GPU, so that such calls are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._frameworks import Numpy, exportable, rows
from ._native import Options, Values, backward

if TYPE_CHECKING:
    from ._frameworks import Jax


def attention(
    framework: Jax, q: Any, k: Any, v: Any, layout: str, return_lse: bool, options: Options, values: Values | None
) -> Any:
    """Attention over arrays that get their values later."""
    _refuse(framework)
    out = _like((*q.shape[:-1], *v.shape[-1:]), q.dtype, framework)
    wanted = (out, _like(rows(q, layout), "float32", framework)) if return_lse else out
    host = Numpy()

    def compute(*tensors: Any) -> Any:
        arrays = [framework.numpy.asarray(tensor) for tensor in tensors]
        return host.attention(*arrays, None, layout, return_lse, options, values)

    return framework.jax.pure_callback(compute, wanted, q, k, v, vmap_method="sequential")


def gradients(framework: Jax, given: tuple[Any, ...], options: Options, values: Values | None) -> tuple[Any, ...]:
    """Gradients of q, k and v; `given` is what the extension takes up to the output's gradient, where some may be None."""
    _refuse(framework)
    numpy, wanted = framework.numpy, tuple(_like(x.shape, x.dtype, framework) for x in given[:3])
    there = [n for n, tensor in enumerate(given) if tensor is not None]

    def compute(*tensors: Any) -> Any:
        arrays: list[Any] = [None] * len(given)
        for n, tensor in zip(there, tensors):
            arrays[n] = exportable(numpy, numpy.asarray(tensor))[0]
        # Keys before and after those that a mask leaves are not written.
        grads = [numpy.zeros(like.shape, like.dtype) for like in wanted]
        backward(*arrays, *(exportable(numpy, grad)[0] for grad in grads), None, options, values, bits_are_bf16=True)
        return tuple(grads)

    tensors = [given[n] for n in there]
    return framework.jax.pure_callback(compute, wanted, *tensors, vmap_method="sequential")


def _like(shape: tuple[int, ...], dtype: Any, framework: Jax) -> Any:
    return framework.jax.ShapeDtypeStruct(shape, dtype)


def _refuse(framework: Jax) -> None:
    backend = framework.jax.default_backend()
    if backend != "cpu":
        raise TypeError(f"q is being traced for {backend}; call flashcore outside of jax.jit and jax.vmap there")
