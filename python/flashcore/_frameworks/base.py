"""What frameworks have in common, and how one is called that is not known."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any

from .._arguments import count, each, real, whole
from .._native import Options, Values, append, forward, grouped_mm, merge, moe

CPU, CUDA = 1, 2
"""DLPack's numbers of the CPU and of CUDA devices."""
NO_NESTED = "nested tensors are not supported; pass their values() and offsets() to flashcore.packed_attention"
LEGACY_STREAM = 1
"""DLPack's number of CUDA's legacy default stream."""

NO_SEED = (
    "dropout needs a seed here; pass dropout_seed, a new integer for every call "
    "(with JAX a key, from jax.random.split)"
)


UNTOLD = (AttributeError, IndexError, RuntimeError)
"""What frameworks raise about arguments that are no tensors, or tensors of a kind that nobody takes: `demand` says more."""


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

    def traces(self, *tensors: Any) -> bool:
        """Whether some of these get their values later."""
        return False

    def transforms(self, *tensors: Any) -> bool:
        """Whether functions of these tensors are being transformed, as by `torch.func`."""
        return False

    def autocast(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """The tensors in the type in which the framework computes at present."""
        return q, k, v

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
        self, x: Any, dtype: str, shapes: tuple[Any, Any, Any], lengths: Any, options: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        """A tensor rounded to 8 bits, shaped as it was unless a shape is given, its factors, and its means where these have one."""
        raise TypeError("quantise takes torch and NumPy tensors; convert them by DLPack")

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
        return self.array(whole_numbers(name, values), "int32", q)

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

    def seed(self, given: Any, q: Any) -> Any:
        """The seed of dropout, 64 bits where q is; a tensor of the framework's own stays what it is."""
        if given is None:
            raise ValueError(NO_SEED)
        if hasattr(given, "__dlpack__"):
            return given if getattr(given, "ndim", 1) else self.namespace(given).reshape(given, (1,))
        return self.array((seed_number("dropout_seed", given),), "int64", q)

    def factors(self, given: Any, q: Any) -> list[Any]:
        """The factors of q, k and v where q is, in one dimension each; those of a cache, k and v alone, as they lie."""
        if given is None:
            return []
        try:
            given = tuple(given)
        except TypeError:
            given = ()
        if len(given) not in (2, 3):
            raise ValueError("pass three factors, for q, k and v, or the last two if q is not 8-bit")
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
            raise TypeError("only torch can view bytes as float8_e4m3fn; pass a cache of that type")
        return cache

    def memory(self, array: Any) -> tuple[int, tuple[int, ...], int, Any] | None:
        """Where an array lies: its address, its strides and the one of neighbours, and whose memory that is. What says so has
        `strided` too, which makes another view from there; None elsewhere."""
        return None

    def bfloat16(self, x: Any) -> Any:
        """The same numbers as bfloat16."""
        return x.astype("bfloat16")

    def is_array(self, values: Any) -> bool:
        return hasattr(values, "__dlpack__") and getattr(values, "ndim", 1) > 0

    def array(self, values: tuple[Any, ...], dtype: str, q: Any) -> Any:
        """A new array of these numbers, where q is."""
        space = self.namespace(q)
        return space.asarray(values, dtype=getattr(space, dtype), device=q.device)

    def beside(self, array: Any, q: Any) -> Any:
        """The array where q is."""
        return array

    def namespace(self, q: Any) -> Any:
        try:
            return q.__array_namespace__()
        except AttributeError:
            kind = type(q).__name__
            raise TypeError(f"cannot make a tensor like a {kind}; pass one as `out`, without return_lse") from None

    def stream(self, q: Any) -> int | None:
        """The stream to launch on, as DLPack numbers it; None for host tensors."""
        device = getattr(q, "__dlpack_device__", None)
        return LEGACY_STREAM if device is not None and device()[0] == CUDA else None


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


def whole_numbers(name: str, values: Any) -> tuple[int, ...]:
    rows = "keys" if "key" in name else "queries"
    instead = f"give how many {rows} each batch entry uses"
    if "offsets" in name:
        instead = f"give where the {rows} of each sequence start, and where the last end"
    return each(name, values, lambda place, item: count(place, item, instead), instead)


def seed_number(name: str, value: Any) -> int:
    """A seed as a number of 64 bits with a sign: those from -2**63 to 2**64 - 1 stand for 64 bits each."""
    if type(value) is not int:
        value = whole(name, _held(name, value))
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{name} is {value} but must fit in 64 bits: from -2**63 to 2**64 - 1")
    return value - 2**64 if value >= 2**63 else value


def _held(name: str, seed: Any) -> Any:
    """The number in an array of any framework: its only one, two words with the low one first, or what a key of JAX's stands
    for. What is no array stays as it is."""
    shape = getattr(seed, "shape", None)
    if shape is None:
        return seed
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(seed, jax.Array) and jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = key_words(jax, name, seed)
    elif prod(shape) == 1:
        return seed.item()
    if tuple(seed.shape) != (2,) or not str(seed.dtype).endswith("uint32"):
        raise ValueError(f"{name} has the shape {tuple(shape)}; pass one integer")
    low, high = seed.tolist()
    return low | high << 32


def key_words(jax: Any, name: str, key: Any) -> Any:
    """The seed that a key of JAX's stands for, as two words."""
    if key.ndim:
        raise ValueError(f"{name} is an array of keys of shape {key.shape}; pass one of them, or map the call with jax.vmap")
    return jax.random.bits(key, (2,), "uint32")


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
    except RuntimeError:  # nested tensors have none
        return ()
    except (AttributeError, TypeError):
        raise no_tensor(name, tensor) from None


def demand(**tensors: Any) -> None:
    """Refuses what is no tensor, and tensors whose elements do not lie in memory; the first says where they must be."""
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        extents = shape(name, tensor)
        if not hasattr(tensor, "__dlpack__"):
            raise no_tensor(name, tensor)
        if not extents and not getattr(tensor, "is_nested", False):
            raise ValueError(f"{name} has no dimensions; pass a tensor of heads")
        if getattr(tensor, "is_nested", False):
            raise NotImplementedError(f"{name} is nested; {NO_NESTED}")
        if getattr(tensor, "is_quantized", False):
            raise TypeError(f"{name} is quantised; pass {name}.dequantize()")
        if str(getattr(tensor, "layout", "torch.strided")) not in ("torch.strided", "torch.jagged") and hasattr(tensor, "to_dense"):
            raise TypeError(f"{name} is sparse; pass {name}.to_dense()")
        if getattr(tensor, "is_meta", False) != getattr(first, "is_meta", False):
            raise ValueError(f"{name} is on {tensor.device} but {next(iter(tensors))} on {first.device}; move it there")


def no_tensor(name: str, value: Any) -> TypeError:
    kind = type(value).__name__
    return TypeError(
        f"{name} is a {kind}, which does not support DLPack; pass a tensor of torch, JAX, CuPy, NumPy or the like"
    )
