"""Kernels of any compiler on the CPU, with every check on: races, bounds, barriers, uninitialised values.

>>> from flashcore import sim
>>> result = sim.run(ptx, grid=8, block=128, args=[x, y, 1024])        # doctest: +SKIP
>>> print(result)                                                       # doctest: +SKIP

``run`` takes PTX text, as nvcc, Triton or anybody else makes it, and NumPy arrays, which the kernel reads and writes
where they lie. ``triton`` compiles a Triton kernel for a target, without a GPU, and runs what comes out:

>>> result = sim.triton(kernel)[(8,)](x, y, 1024, BLOCK=128)            # doctest: +SKIP

Neither needs a GPU. What the kernel did wrong is in ``result.findings``, with the line of the source that did it;
``result.require_clean()`` raises if there is any.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from . import _native
from ._triton import triton

__all__ = ["Finding", "Findings", "Result", "TensorMap", "kernels", "run", "triton", "unwritten"]

# Element types of arrays, by NumPy's names for them.
_ELEMENTS = {
    "uint8": "u8", "int8": "s8", "uint16": "u16", "int16": "s16", "uint32": "u32", "int32": "s32",
    "uint64": "u64", "int64": "s64", "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64",
    # Booleans, and what files make of numbers that NumPy has no name for.
    "bool": "u8", "void8": "u8", "void16": "bf16",
}  # fmt: skip
# Types that other libraries add to NumPy, such as ml_dtypes' float8, by their size.
_ADDED = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
# How numbers become the bytes of a parameter, by its type and size.
_FLOATS = {2: "<e", 4: "<f", 8: "<d"}


class Findings(Exception):
    """A kernel did something wrong; ``findings`` say what."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(str(finding) for finding in findings))
        self.findings = findings


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that a kernel did that is wrong or worth a look."""

    kind: str
    severity: str
    message: str
    fix: str
    instruction: str | None
    source: str | None
    function: str | None
    cta: tuple[int, int, int]
    warp: int
    lane: int
    count: int

    def __str__(self) -> str:
        place = f"  from {self.source}\n" if self.source else ""
        where = f"CTA {self.cta} warp {self.warp} lane {self.lane}, {self.count} times"
        return (
            f"{self.severity}: {self.kind}: {self.message}\n"
            f"  at   {self.instruction}\n{place}  in   {where}\n  fix  {self.fix}"
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a launch."""

    kernel: str
    findings: list[Finding]
    counters: dict[str, Any]
    printed: str
    halted: bool
    """Whether a finding ended the launch: then arrays are as they were."""
    seconds: float

    @property
    def errors(self) -> list[Finding]:
        """The findings that are wrong; the others are notes."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def clean(self) -> bool:
        """Whether nothing was wrong."""
        return not self.errors

    def require_clean(self) -> Result:
        """Raises :class:`Findings` if anything was wrong."""
        if self.errors:
            raise Findings(self.errors)
        return self

    def __str__(self) -> str:
        faults = len(self.errors)
        verdict = "clean" if self.clean else f"{faults} kind{'s' if faults > 1 else ''} of fault"
        lines = [f"{self.kernel}: {verdict}, {self.counters['instructions']} warp instructions"]
        return "\n".join(lines + [str(finding) for finding in self.findings])


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """An argument: a tensor map over an array, as ``cuTensorMapEncodeTiled`` makes it.

    ``box`` and ``dims`` count from the innermost dimension; ``dims`` and ``strides`` (bytes, from dimension 1 on) are
    those of the array unless they are given.
    """

    array: Any
    box: Sequence[int]
    dims: Sequence[int] | None = None
    strides: Sequence[int] | None = None
    swizzle: int = 0
    element: str | None = None


@dataclasses.dataclass(frozen=True)
class unwritten:  # noqa: N801 - reads as a word in a list of arguments
    """An argument: an array whose contents are undefined until the kernel writes them."""

    array: Any


def kernels(ptx: str) -> list[dict[str, Any]]:
    """The kernels of a PTX text, each with its parameters."""
    return json.loads(_native.kernels(ptx))


def run(
    ptx: str,
    grid: int | Sequence[int],
    block: int | Sequence[int] | None = None,
    args: Sequence[Any] = (),
    *,
    entry: str | None = None,
    cluster: int | Sequence[int] | None = None,
    smem: int = 0,
    schedule: str | None = None,
    seed: int = 0,
    check: str = "all",
    max_steps: int | None = None,
    name: str = "<ptx>",
    names: Sequence[str] | None = None,
) -> Result:
    """Runs one kernel of a PTX text and checks it.

    ``args`` are in the order of the parameters: arrays (anything that NumPy sees as a C-contiguous array of the
    host's memory), numbers, ``None`` for a null pointer, :class:`TensorMap`, :class:`unwritten`; for structs a tuple of
    such members, with NumPy's numbers (``numpy.int32(7)``) where it holds numbers, or their ``bytes``.
    ``block`` and ``cluster`` may be omitted if the kernel declares them. ``schedule`` is the order of the warps:
    None for in turn and not hostile, or ``"random"``, ``"round-robin"``, ``"producer-first"``, ``"consumer-first"``,
    ``"apart"``, with asynchronous operations as hostile as the ISA allows, by ``seed``. A launch is stopped after
    ``max_steps`` warp instructions (100 million by default) and by Ctrl-C. Findings call arguments by
    ``names``, or by the names of the parameters.
    """
    known = kernels(ptx)
    named = [kernel for kernel in known if entry in (None, kernel["name"])]
    if len(named) != 1:
        names = ", ".join(kernel["name"] for kernel in known) or "none"
        raise ValueError(f"the PTX has the kernels {names}; name one of them as `entry`")
    arrays = _Arrays()
    params = named[0]["params"]
    if len(params) != len(args):
        raise ValueError(f"`{named[0]['name']}` has {len(params)} parameters, but {len(args)} arguments were given")
    labels = [f"argument {at} ({called})" for at, called in enumerate(names or [param["name"] for param in params])]
    if len(labels) != len(params):
        raise ValueError(f"`{named[0]['name']}` has {len(params)} parameters, but {len(labels)} names were given")
    launch = {
        "entry": named[0]["name"],
        "grid": _triple(grid, "grid"),
        "block": None if block is None else _triple(block, "block"),
        "cluster": None if cluster is None else _triple(cluster, "cluster"),
        "smem": _whole(smem, "smem", 32),
        "args": [arrays.argument(*each) for each in zip(args, params, labels, strict=True)],
    }
    how = {
        "schedule": None if schedule is None else str(schedule),
        "seed": _whole(seed, "seed", 64),
        "check": str(check),
        "max_steps": None if max_steps is None else _whole(max_steps, "max_steps", 64),
    }
    request = {"ptx": ptx, "name": name, "arrays": arrays.described, "launches": [launch], "how": how}
    answer, contents = _native.simulate(json.dumps(request), arrays.contents())
    result = _result(json.loads(answer)[0])
    if not result.halted:
        arrays.store(contents)
    return result


def _whole(value: Any, what: str, bits: int) -> int:
    """A number that is not negative and fits in that many bits."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"`{what}` is {value!r}; pass a whole number") from None
    if not 0 <= number < 1 << bits:
        raise ValueError(f"`{what}` is {number}; pass a number from 0 to {(1 << bits) - 1}")
    return number


def _wholes(values: Any, what: str, bits: int) -> list[int]:
    if not isinstance(values, Iterable):
        raise TypeError(f"`{what}` is {values!r}; pass whole numbers")
    return [_whole(value, what, bits) for value in values]


def _triple(value: int | Sequence[int], what: str) -> list[int]:
    extents = value if isinstance(value, Sequence) or getattr(value, "ndim", 0) else [value]
    return _wholes(extents, what, 32)


def _result(told: dict[str, Any]) -> Result:
    fields = [field.name for field in dataclasses.fields(Finding)]

    def finding(found: dict[str, Any]) -> Finding:
        values = {name: found[name] for name in fields}
        return Finding(**values | {"cta": tuple(found["cta"])})

    findings = [finding(found) for found in told["findings"]]
    return Result(
        kernel=told["kernel"],
        findings=findings,
        counters=told["counters"],
        printed=told["printed"],
        halted=told["halted"],
        seconds=told["stats"]["seconds"],
    )


class _Arrays:
    """The arrays among the arguments of a launch; one that is given twice is one."""

    def __init__(self) -> None:
        self.described: list[dict[str, Any]] = []
        self._views: list[Any] = []
        self._given: list[Any] = []

    def argument(self, arg: Any, param: dict[str, Any], label: str) -> dict[str, Any]:
        """An argument as the simulator takes it; what is wrong with it is said with its name."""
        try:
            return self._argument(arg, param, label)
        except TypeError as error:
            raise TypeError(f"{label}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None

    def _argument(self, arg: Any, param: dict[str, Any], label: str) -> dict[str, Any]:
        if isinstance(arg, tuple):
            return {"struct": [self._member(member, label) for member in arg]}
        if isinstance(arg, TensorMap):
            return {"tensormap": {"array": self._named(arg.array, True, label)} | _settings(arg)}
        if isinstance(arg, unwritten):
            return {"array": self._named(arg.array, False, label)}
        if arg is None or isinstance(arg, bytes):
            return {"bytes": (arg or bytes(param["bytes"])).hex()}
        if hasattr(arg, "__array__") and getattr(arg, "ndim", 0) > 0:
            return {"array": self._named(arg, True, label)}
        return {"bytes": _number(arg, param).hex()}

    def _member(self, member: Any, label: str) -> dict[str, Any]:
        """A member of a struct; a number must say its own type, since no parameter does."""
        if getattr(member, "shape", None) == ():
            content = _content(member)
            wide = {4: "u32", 8: "u64"}.get(len(content))
            if wide:
                return {wide: int.from_bytes(content, "little")}
            if len(content) == 1:
                return {"bytes": content.hex()}
        elif not isinstance(member, (int, float)):
            return self._argument(member, {"type": "b64", "bytes": 8}, label)
        raise TypeError(
            f"{member!r} cannot be a member of a struct: write numpy.int32(…), or bytes with the padding before them"
        )

    def _named(self, array: Any, initialised: bool, label: str) -> str:
        import numpy

        for at, given in enumerate(self._given):
            if given is array:
                return str(at)
        view = numpy.asarray(array)
        element = _element(view.dtype)
        if not view.flags.c_contiguous:
            raise TypeError("the array is not C-contiguous; pass numpy.ascontiguousarray of it")
        if view.size and not numpy.shares_memory(view, numpy.asarray(array)):
            raise TypeError(f"{type(array).__name__} does not give NumPy its own memory; pass a NumPy array")
        name = str(len(self._given))
        facts = {"element": element, "shape": list(view.shape), "initialised": initialised}
        self.described.append({"name": name, "label": label} | facts)
        self._views.append(view)
        self._given.append(array)
        return name

    def contents(self) -> list[bytes]:
        """The bytes of each array."""
        return [view.tobytes() for view in self._views]

    def store(self, contents: list[bytes]) -> None:
        """Puts results where the arrays lie; those that did not change may be read-only."""
        arrays = zip(self._views, contents, self.described, strict=True)
        changed = [each for each in arrays if each[0].tobytes() != each[1]]
        for view, _, about in changed:
            if not view.flags.writeable:
                raise ValueError(f"{about['label']}: the kernel wrote to this array, which is read-only; pass a copy")
        for view, content, _ in changed:
            flat = view.reshape(-1).view("uint8")
            flat[:] = memoryview(content)


def _element(dtype: Any) -> str:
    """What the simulator calls the elements of an array."""
    if not dtype.isnative:
        raise TypeError(f"elements of type {dtype.str} are big-endian; pass x.astype(x.dtype.newbyteorder('='))")
    # User-defined types are numbers; NumPy's own that have no name here are not: objects, text, dates, records.
    element = _ADDED.get(dtype.itemsize) if dtype.isbuiltin == 2 else None
    element = _ELEMENTS.get(dtype.name, element)
    if element is None or dtype.names is not None:
        names = ", ".join(name for name in _ELEMENTS if not name.startswith("void"))
        raise TypeError(f"elements of type {dtype} cannot be bound; convert to one of: {names}")
    return element


def _settings(tensor_map: TensorMap) -> dict[str, Any]:
    """What a tensor map says besides its array."""
    settings: dict[str, Any] = {
        key: _wholes(getattr(tensor_map, key), key, 64)
        for key in ("box", "dims", "strides")
        if getattr(tensor_map, key) is not None
    }
    if tensor_map.element is not None:
        settings["element"] = str(tensor_map.element)
    return settings | {"swizzle": _whole(tensor_map.swizzle, "swizzle", 64)}


def _content(value: Any) -> bytes:
    """The bytes of a number that has NumPy's type."""
    if getattr(value.dtype, "isbuiltin", None) is not None:
        _element(value.dtype)
    return value.tobytes()


def _number(value: Any, param: dict[str, Any]) -> bytes:
    """A number as the bytes of a parameter: its type decides, or the number's own where the type is plain bits."""
    size = param["bytes"]
    if hasattr(value, "dtype"):
        if value.dtype.itemsize != size:
            raise ValueError(f"a {value.dtype} was given for a parameter of {size} bytes")
        return _content(value)
    kind = param["type"]
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} was given for a parameter of type {kind}; pass a number, an array, bytes or None")
    if kind.startswith("f") or (kind.startswith("b") and isinstance(value, float)):
        if size not in _FLOATS:
            raise ValueError(f"{value!r} was given for a parameter of {size} bytes")
        try:
            return struct.pack(_FLOATS[size], float(value))
        except OverflowError:
            raise ValueError(f"{value!r} does not fit in a parameter of type {kind}") from None
    if isinstance(value, float):
        raise TypeError(f"{value!r} was given for a parameter of type {kind}; pass a whole number")
    if not -(1 << (8 * size - 1)) <= value < 1 << (8 * size):
        raise ValueError(f"{value} does not fit in a parameter of type {kind}")
    return (value % (1 << (8 * size))).to_bytes(size, "little")
