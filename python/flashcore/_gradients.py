"""Gradients: what torch and JAX each do beside calling the extension. Imported when the first call needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._frameworks import CUDA, exportable
from ._native import Options, Values, backward, own_stream

if TYPE_CHECKING:
    from ._frameworks import Jax, Torch

Three = tuple[Any, Any, Any]


def of_torch(
    framework: Torch,
    inputs: Three,
    out: Any,
    sums: Any | None,
    lse: Any,
    d_out: Any,
    has_sinks: bool,
    options: Options,
    values: Values | None,
) -> tuple[Any, ...]:
    """The gradients of q, k, v and, where there are any, of the sinks."""
    torch = framework.torch
    # A gradient may repeat one number, as that of a sum does.
    d_out = d_out if d_out.stride(-1) == 1 or d_out.size(-1) == 1 else d_out.contiguous()
    # Keys before and after those that a mask leaves are not written.
    make = torch.empty_like if values is None else torch.zeros_like
    grads = [make(tensor) for tensor in inputs]
    heads = lse.shape[-2] if lse.dim() > 1 else 1
    # On a GPU each launch has a row of its own.
    rows = [lse.shape[0] if lse.dim() > 2 else 1] if lse.is_cuda else []
    d_sinks = lse.new_zeros(*rows, heads) if has_sinks else None
    _write(framework, [*inputs, None if sums is not None else out, sums, lse, d_out, *grads, d_sinks], options, values)
    return (*grads, d_sinks.sum(0) if rows and has_sinks else d_sinks)


def add_of_torch(
    framework: Torch, inputs: Three, sums: Any, lse: Any, d_out: Any, grads: Three, options: Options, values: Values | None
) -> None:
    """Adds gradients of some keys to `grads`, which are float32, given the sums and the log-sum-exp over all keys."""
    _write(framework, [*inputs, None, sums, lse, d_out, *grads, None], options, values)


def _write(framework: Torch, tensors: list[Any], options: Options, values: Values | None) -> None:
    if framework.exchanges:
        backward(*tensors, options, values)
    else:
        export = framework.torch.utils.dlpack.to_dlpack
        capsules = [None if tensor is None else export(tensor.detach()) for tensor in tensors]
        backward(*capsules, options, values, stream=framework.stream_of(tensors[0]))


def differentiable(
    framework: Jax, layout: str, return_lse: bool, options: Options, values: Values | None
) -> Any:
    """Attention with gradients, for `jax.grad`, which traces arrays whose values are known."""

    @framework.jax.custom_vjp
    def attend(q: Any, k: Any, v: Any) -> Any:
        return framework.concrete(q, k, v, layout, return_lse, options, values)

    def keep(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        out, lse = framework.concrete(q, k, v, layout, True, options, values)
        return (out, lse) if return_lse else out, ((q, k, v), out, lse)

    def differentiate(kept: Any, given: Any) -> tuple[Any, ...]:
        inputs, out, lse = kept
        d_out, sums = given, None
        if return_lse:
            d_out, d_lse = given
            products = (d_out.astype("float32") * out.astype("float32")).sum(-1)
            # The gradient of the log-sum-exp is the weights: it counts like a row sum of the other sign.
            sums = (products if layout == "bhsd" or products.ndim < 2 else products.swapaxes(-1, -2)) - d_lse
        return _of_jax(framework, inputs, out, sums, lse, d_out, options, values)

    attend.defvjp(keep, differentiate)
    return attend


def _of_jax(
    framework: Jax,
    inputs: Three,
    out: Any,
    sums: Any | None,
    lse: Any,
    d_out: Any,
    options: Options,
    values: Values | None,
) -> tuple[Any, ...]:
    given = (*inputs, out if sums is None else None, sums, lse, d_out)
    if framework.traces(*(tensor for tensor in given if tensor is not None)):
        from ._jit import gradients

        return gradients(framework, given, options, values)
    kind, index = lse.__dlpack_device__()
    if kind == CUDA:
        wanted = [(tensor.shape, tensor.dtype) for tensor in inputs]
        (device,) = lse.devices()
        return framework.on_gpu(
            wanted, device, own_stream(int(index)), lambda *to, **how: backward(*given, *to, None, options, values, **how)
        )
    numpy = framework.numpy
    # Keys before and after those that a mask leaves are not written.
    arrays = [numpy.zeros(tensor.shape, tensor.dtype) for tensor in inputs]
    grads = [exportable(numpy, array)[0] for array in arrays]
    backward(*given, *grads, None, options, values, bits_are_bf16=True)
    return tuple(framework.jax.device_put(grad, *like.devices()) for grad, like in zip(arrays, inputs))
