"""``flashcore.sim.triton``: a Triton kernel, compiled for a target without a GPU, and run in the simulator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# Types of pointers and tensors, by NumPy's names for elements.
_TYPES = {
    "bool": "i1", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16",
    "uint32": "u32", "uint64": "u64", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
}  # fmt: skip
# Options of Triton's compiler that a call may give, as a launch on a GPU may.
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "debug")
# Options of the simulator.
_HOW = ("schedule", "seed", "check", "max_steps")


def triton(kernel: Any, *, target: int = 90, **options: Any) -> _Kernel:
    """A ``@triton.jit`` function that runs in the simulator: ``triton(kernel)[grid](*args, BLOCK=128)``.

    ``target`` is the compute capability that Triton compiles for (75, 80, 89, 90). Arguments are NumPy arrays and
    numbers; ``tl.constexpr`` parameters, compiler options (``num_warps`` …) and ``schedule``, ``seed``, ``check``,
    ``max_steps`` of :func:`flashcore.sim.run` come by name. The result's findings name lines of the Triton source.
    """
    return _Kernel(kernel, target, options)


class _Kernel:
    """A Triton kernel for one target."""

    def __init__(self, kernel: Any, target: int, options: dict[str, Any]) -> None:
        self._kernel = kernel
        self._target = target
        self._options = options

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.launch, grid)

    def launch(self, grid: Any, /, *args: Any, **named: Any) -> Any:
        """Compiles for these arguments and runs."""
        from .sim import run, unwritten

        settings = self._options | {key: named.pop(key) for key in (*_OPTIONS, *_HOW) if key in named}
        how = {key: settings.pop(key) for key in _HOW if key in settings}
        values = dict(zip(self._kernel.arg_names, args, strict=False)) | named
        missing = [name for name in self._kernel.arg_names if name not in values]
        if missing:
            raise TypeError(f"no argument for {', '.join(missing)} of `{self._kernel.__name__}`")
        plain = {name: value.array if isinstance(value, unwritten) else value for name, value in values.items()}
        compiled, passed = self._compile(plain, settings)
        shape = grid(plain) if callable(grid) else grid
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        meta = compiled.metadata
        ctas = getattr(meta, "num_ctas", 1)
        scratch = self._scratch(meta, shape)
        pairs = _expanded([(name, values[name]) for name in passed], meta)
        return run(
            compiled.asm["ptx"],
            (shape[0] * ctas, *shape[1:]),
            args=[*(value for _, value in pairs), *scratch],
            names=[*(name for name, _ in pairs), *("scratch memory" for _ in scratch)],
            cluster=ctas if ctas > 1 else None,
            smem=meta.shared,
            name=self._kernel.__name__,
            **how,
        )

    def _compile(self, values: dict[str, Any], options: dict[str, Any]) -> tuple[Any, list[str]]:
        """The compiled kernel, and the names of the arguments that it takes."""
        import triton as compiler
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        constants = {p.name for p in self._kernel.params if p.is_constexpr}
        signature, fixed, facts = {}, {}, {}
        for index, name in enumerate(self._kernel.arg_names):
            value = values[name]
            # As Triton does: what is None or 1 becomes part of the program.
            if name in constants or value is None or (type(value) is int and value == 1):
                signature[name] = "constexpr"
                fixed[(index,)] = value
                continue
            signature[name] = _type(name, value)
            if signature[name].startswith("*") or (type(value) is int and value % 16 == 0):
                facts[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self._kernel, signature, fixed, facts)
        compiled = compiler.compile(source, target=GPUTarget("cuda", self._target, 32), options=options)
        return compiled, [name for name, kind in signature.items() if kind != "constexpr"]

    @staticmethod
    def _scratch(meta: Any, shape: tuple[int, ...]) -> list[Any]:
        """Memory that Triton's kernels take besides their arguments: for themselves, and for profiles."""
        import math

        import numpy

        def memory(kind: str) -> Any:
            size = getattr(meta, f"{kind}_scratch_size", None) or 0
            return numpy.zeros(size * math.prod(shape), "uint8") if size else None

        return [memory("global"), memory("profile")]


def _is_descriptor(value: Any) -> bool:
    """Whether a value is a ``TensorDescriptor`` of Triton, or looks like one."""
    return all(hasattr(value, part) for part in ("base", "shape", "strides", "block_shape"))


def _expanded(values: list[tuple[str, Any]], meta: Any) -> list[tuple[str, Any]]:
    """Arguments as the kernel takes them: a tensor descriptor is a tensor map, then extents, then strides."""
    from .sim import TensorMap

    described = iter(getattr(meta, "tensordesc_meta", None) or [])
    args: list[tuple[str, Any]] = []
    for name, value in values:
        if not _is_descriptor(value):
            args.append((name, value))
            continue
        facts = next(described)
        bytes_of = [stride * facts["elem_size"] for stride in value.strides[:-1]]
        box, dims = list(facts["block_size"])[::-1], list(value.shape)[::-1]
        swizzle = (0, 32, 64, 128)[facts["swizzle"]]
        described_as = TensorMap(value.base, box=box, dims=dims, strides=bytes_of[::-1], swizzle=swizzle)
        args += [(name, part) for part in (described_as, *value.shape, *value.strides)]
    return args


def _type(name: str, value: Any) -> str:
    """A value's type in Triton's words."""
    if _is_descriptor(value):
        block = ",".join(str(extent) for extent in value.block_shape)
        return f"tensordesc<{_type(name, value.base)[1:]}[{block}]>"
    if getattr(value, "ndim", 0) > 0:
        import numpy

        dtype = numpy.asarray(value).dtype.name
        if dtype in _TYPES:
            return f"*{_TYPES[dtype]}"
    elif isinstance(value, bool):
        return "i1"
    elif isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    elif isinstance(value, float):
        return "fp32"
    elif hasattr(value, "dtype") and value.dtype.name in _TYPES:
        return _TYPES[value.dtype.name]
    raise TypeError(f"{name} is a {type(value).__name__}; pass a NumPy array or a number")
