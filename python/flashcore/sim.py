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
import struct
from collections.abc import Sequence
from typing import Any

from . import _native
from ._triton import triton

__all__ = ["Finding", "Findings", "Result", "TensorMap", "kernels", "run", "triton", "unwritten"]

# Element types of arrays, by NumPy's names for them.
_ELEMENTS = {
    "uint8": "u8", "int8": "s8", "uint16": "u16", "int16": "s16", "uint32": "u32", "int32": "s32",
    "uint64": "u64", "int64": "s64", "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64",
}  # fmt: skip
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
    launch = {
        "entry": named[0]["name"],
        "grid": _triple(grid),
        "block": None if block is None else _triple(block),
        "cluster": None if cluster is None else _triple(cluster),
        "smem": smem,
        "args": [arrays.argument(*each) for each in zip(args, params, labels, strict=True)],
    }
    how = {"schedule": schedule, "seed": seed, "check": check, "max_steps": max_steps}
    request = {"ptx": ptx, "name": name, "arrays": arrays.described, "launches": [launch], "how": how}
    answer, contents = _native.simulate(json.dumps(request), arrays.contents())
    result = _result(json.loads(answer)[0])
    if not result.halted:
        arrays.store(contents)
    return result


def _triple(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else [int(extent) for extent in value]


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
        """An argument as the simulator takes it."""
        if isinstance(arg, tuple):
            return {"struct": [self._member(member, label) for member in arg]}
        if isinstance(arg, TensorMap):
            settings = {"box": arg.box, "swizzle": arg.swizzle, "element": arg.element}
            settings |= {"dims": arg.dims, "strides": arg.strides}
            kept = {key: value for key, value in settings.items() if value is not None}
            return {"tensormap": {"array": self._named(arg.array, True, label)} | kept}
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
            content = member.tobytes()
            wide = {4: "u32", 8: "u64"}.get(len(content))
            if wide:
                return {wide: int.from_bytes(content, "little")}
            if len(content) == 1:
                return {"bytes": content.hex()}
        elif not isinstance(member, (int, float)):
            return self.argument(member, {"type": "b64", "bytes": 8}, label)
        raise TypeError(
            f"{member!r} cannot be a member of a struct: write numpy.int32(…), or bytes with the padding before them"
        )

    def _named(self, array: Any, initialised: bool, label: str) -> str:
        import numpy

        for at, given in enumerate(self._given):
            if given is array:
                return str(at)
        view = numpy.asarray(array)
        element = _ELEMENTS.get(view.dtype.name, {1: "u8", 2: "u16", 4: "u32", 8: "u64"}.get(view.dtype.itemsize))
        if element is None or not view.flags.c_contiguous or not numpy.shares_memory(view, numpy.asarray(array)):
            raise TypeError(f"an array of {view.dtype} cannot be bound; pass a C-contiguous one of a plain type")
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
        for view, content in zip(self._views, contents, strict=True):
            if view.tobytes() != content:
                flat = view.reshape(-1).view("uint8")
                flat[:] = memoryview(content)


def _number(value: Any, param: dict[str, Any]) -> bytes:
    """A number as the bytes of a parameter: its type decides, or the number's own where the type is plain bits."""
    size = param["bytes"]
    if hasattr(value, "dtype"):
        if value.dtype.itemsize != size:
            raise ValueError(f"a {value.dtype} was given for a parameter of {size} bytes")
        return value.tobytes()
    kind = param["type"]
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} was given for a parameter of type {kind}; pass a number, an array, bytes or None")
    if kind.startswith("f") or (kind.startswith("b") and isinstance(value, float)):
        if size not in _FLOATS:
            raise ValueError(f"{value!r} was given for a parameter of {size} bytes")
        return struct.pack(_FLOATS[size], float(value))
    if isinstance(value, float):
        raise TypeError(f"{value!r} was given for a parameter of type {kind}; pass a whole number")
    if not -(1 << (8 * size - 1)) <= value < 1 << (8 * size):
        raise ValueError(f"{value} does not fit in a parameter of type {kind}")
    return (value % (1 << (8 * size))).to_bytes(size, "little")
