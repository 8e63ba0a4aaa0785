"""Attention inside of what JAX traces: `jax.jit`, `jax.grad`, `jax.vmap`, `jax.shard_map`.

A call becomes one of XLA's foreign function interface, whose handlers are in the extension: on a GPU they launch on XLA's
stream, in XLA's memory. Versions of JAX without that interface call back to the host instead (`_callback`).
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._frameworks import NO_MASK_GRADIENTS, rows
from ._native import Options, Values, xla_check, xla_handlers

if TYPE_CHECKING:
    from ._frameworks import Jax

Arrays = dict[str, Any]
"""Arrays by the names that the extension knows."""
NO_FACTORS = "tensors with factors cannot be traced; make the call outside jax.jit and jax.grad"
NO_PAGE_GRADIENTS = "keys in pages have no gradients; gather keys and values first"


def attention(
    framework: Jax, q: Any, k: Any, v: Any, layout: str, return_lse: bool, options: Options, values: Values | None
) -> Any:
    """Attention over arrays of which some get their values later, with gradients."""
    given = {"q": q, "k": k, "v": v} | arrays_of(values)
    if values is not None and values.factors:
        raise NotImplementedError(NO_FACTORS)
    given = _alike(framework, {name: _array(framework, array) for name, array in given.items()})
    return _Call(framework, tuple(given), layout, options, values).differentiable(return_lse)(*given.values())


def arrays_of(values: Values | None) -> Arrays:
    """The arrays among lengths, sinks, table, bias and seed."""
    if values is None:
        return {}
    names = ("lengths_q", "lengths_kv", "sinks", "table", "bias", "seed")
    return {name: getattr(values, name) for name in names if getattr(values, name) is not None}


class _Call:
    """One call of attention, whose arrays come in the order of `names`."""

    def __init__(
        self, framework: Jax, names: tuple[str, ...], layout: str, options: Options, values: Values | None
    ) -> None:
        self.framework, self.names, self.layout, self.options = framework, names, layout, options
        self.longest = None if values is None else values.longest
        self.ranges = None if values is None else values.ranges

    def differentiable(self, return_lse: bool) -> Any:
        attend = self.framework.jax.custom_vjp(lambda *arrays: self.forward(self.named(arrays), return_lse))
        # Gradients which nobody has are told from those that nobody wants, where that matters: shard_map cannot do that.
        told = return_lse or "bias" in self.names

        def keep(*arrays: Any) -> tuple[Any, Any]:
            given = self.named([a.value for a in arrays] if told else arrays)
            if "bias" in given and self.named(arrays)["bias"].perturbed:
                raise NotImplementedError(NO_MASK_GRADIENTS)
            if "table" in given:
                raise NotImplementedError(NO_PAGE_GRADIENTS)
            out, lse = self.forward(given, True)
            return (out, lse) if return_lse else out, (tuple(given.values()), out, lse)

        def differentiate(kept: Any, given: Any) -> tuple[Any, ...]:
            arrays, out, lse = kept
            d_out, d_lse = given if return_lse else (given, None)
            grads = self.backward(self.named(arrays), out, lse, self.dense(d_out), self.dense(d_lse))
            return tuple(grads.get(name) for name in self.names)

        attend.defvjp(keep, differentiate, symbolic_zeros=told)
        return attend

    def named(self, arrays: Any) -> Arrays:
        return dict(zip(self.names, arrays))

    def dense(self, given: Any) -> Any:
        """A gradient of the result, or None where that does not matter."""
        return None if isinstance(given, self.framework.jax.custom_derivatives.SymbolicZero) else given

    def forward(self, arrays: Arrays, return_lse: bool) -> Any:
        q, v = arrays["q"], arrays["v"]
        results = {"out": ((*q.shape[:-1], *v.shape[-1:]), q.dtype)}
        if return_lse:
            results["lse"] = (rows(q, self.layout), "float32")
        results = self.run("flashcore_attention", arrays, results)
        return tuple(results) if return_lse else results[0]

    def backward(self, arrays: Arrays, out: Any, lse: Any, d_out: Any, d_lse: Any) -> Arrays:
        """Gradients by the names of what they are the gradients of."""
        numpy = self.framework.jax.numpy
        d_out = numpy.zeros_like(out) if d_out is None else d_out
        arrays = arrays | {"lse": lse, "d_out": d_out}
        if d_lse is None:
            arrays["out"] = out
        else:
            products = (d_out.astype("float32") * out.astype("float32")).sum(-1)
            # The gradient of the log-sum-exp is the weights: it counts like a row sum of the other sign.
            turned = self.layout != "bhsd" and products.ndim > 1
            arrays["sums"] = (products.swapaxes(-1, -2) if turned else products) - d_lse
        q, sinks = arrays["q"], arrays.get("sinks")
        results = {f"d{name}": (arrays[name].shape, arrays[name].dtype) for name in "qkv"}
        if sinks is not None:
            batch = q.shape[0] if q.ndim == 4 else 1
            results["d_sinks"] = ((batch, lse.shape[-2] if lse.ndim > 1 else 1), "float32")
        dq, dk, dv, *rest = self.run("flashcore_attention_backward", arrays, results)
        return {"q": dq, "k": dk, "v": dv} | {"sinks": d_sinks.sum(0).astype(sinks.dtype) for d_sinks in rest}

    def run(self, target: str, arrays: Arrays, results: dict[str, tuple[Any, Any]]) -> Any:
        """Calls the extension, now or when the program runs."""
        jax, numpy = self.framework.jax, self.framework.numpy
        described = [(name, a.dtype.name, a.shape) for name, a in arrays.items()]
        described += [(name, numpy.dtype(dtype).name, shape) for name, (shape, dtype) in results.items()]
        xla_check(described, self.options, self.longest, self.ranges)
        wanted = tuple(_like(self.framework, arrays["q"], shape, dtype) for shape, dtype in results.values())
        if not registered(self.framework):
            from ._callback import call_back

            return call_back(self.framework, self.options, self.longest, self.ranges, arrays, list(results), wanted)
        call = jax.ffi.ffi_call(target, wanted, vmap_method="expand_dims")
        return call(*arrays.values(), arrays=" ".join((*arrays, *results)), **self.attributes(arrays["q"].ndim))

    def attributes(self, dimensions: int) -> dict[str, Any]:
        """What the handler has to know beside the arrays; mapped dimensions are those before these of q."""
        numpy = self.framework.numpy
        found = self.options.attributes() | {"mapped_from": dimensions}
        if self.longest is not None:
            found |= dict(zip(("longest_q", "longest_kv"), self.longest))
        typed = {int: numpy.int64, float: numpy.float32, str: str}
        found = {name: typed[type(value)](value) for name, value in found.items()}
        if self.ranges is not None:
            found |= {name: numpy.asarray(keys, "int64") for name, keys in zip(("starts", "ends"), self.ranges)}
        return found


@lru_cache
def registered(framework: Jax) -> bool:
    """Registers the handlers with XLA; false where this JAX has no such interface."""
    ffi = getattr(framework.jax, "ffi", None)
    if ffi is None:
        return False
    header = Path(ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    version = re.search(r"XLA_FFI_API_MINOR\s+(\d+)", header.read_text()) if header.is_file() else None
    handlers = xla_handlers(int(version[1]) if version else 0)
    for (target, platform), handler in handlers.items():
        ffi.register_ffi_target(target, handler, platform=platform)
    return True


def _array(framework: Jax, array: Any) -> Any:
    """An array of JAX's or NumPy's, with integers as XLA has them."""
    if isinstance(array, framework.jax.Array):
        return array
    array = framework.numpy.asarray(array)
    return array.astype("int32") if array.dtype.kind in "iu" else array


def _alike(framework: Jax, arrays: Arrays) -> Arrays:
    """Inside of `jax.shard_map`: arrays that all vary along the same axes of the mesh, as XLA wants them."""
    jax = framework.jax
    axes = {name: _axes(jax, array) for name, array in arrays.items()}
    every = frozenset().union(*axes.values())

    def varying(array: Any, missing: tuple[Any, ...]) -> Any:
        return jax.lax.pcast(array, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(array, missing)

    return {n: varying(a, tuple(every - axes[n])) if axes[n] != every else a for n, a in arrays.items()}


def _axes(jax: Any, array: Any) -> frozenset[Any]:
    """Along which axes of a mesh an array varies."""
    kind = jax.typeof(array) if hasattr(jax, "typeof") else None
    of_manual = getattr(kind, "manual_axis_type", None)
    return getattr(kind, "vma", frozenset()) if of_manual is None else of_manual.varying


def _like(framework: Jax, q: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """What a result is, which varies along the axes that q varies along."""
    jax, how = framework.jax, {}
    if _axes(jax, q):
        kind = jax.typeof(q)
        name = "manual_axis_type" if hasattr(kind, "manual_axis_type") else "vma"  # as versions of JAX call it
        how = {name: getattr(kind, name)}
        if name != "vma":
            how["sharding"] = jax.sharding.NamedSharding(kind.sharding.mesh, jax.P())
    return jax.ShapeDtypeStruct(shape, framework.numpy.dtype(dtype), **how)
