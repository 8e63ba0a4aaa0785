"""Compiles the kernels of this folder with Triton to the PTX tests beside them, without a GPU.

    python3 make.py

Needs `triton` (3.9 made what is checked in) and NumPy. Each test is one kernel for one target, with arguments and
answers from NumPy in its comments, in the form of all PTX tests.
"""

import pathlib
import re

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels

FOLDER = pathlib.Path(__file__).parent
WIDTH = 118
TYPES = {"float32": "fp32", "float16": "fp16", "int32": "i32", "int8": "i8"}
RNG = np.random.default_rng(7)


def number(value):
    if isinstance(value, np.floating):
        return f"0x{int(value.view({2: np.uint16, 4: np.uint32}[value.itemsize])):0{2 * value.itemsize}x}"
    return str(int(value))


def words(values):
    """Numbers as words; runs of one number are one word."""
    found = []
    for word in (number(v) for v in np.ravel(values)):
        if found and found[-1][0] == word:
            found[-1][1] += 1
        else:
            found.append([word, 1])
    return [word if times == 1 else f"{word}*{times}" for word, times in found]


def wrapped(*parts):
    """A comment in lines of at most WIDTH characters."""
    lines, current = [], "//"
    for word in parts:
        if len(current) + len(word) + 1 > WIDTH:
            lines.append(current)
            current = "// and:"
        current += f" {word}"
    return lines + [current]


def kind(array):
    return {"float32": "f32", "float16": "f16", "int32": "s32", "int8": "s8"}[array.dtype.name]


def argument(value):
    """Comments for an argument: an input, (None, expected) for an output, (before, after) for both, or a number."""
    if isinstance(value, tuple):
        before, after = value
        if before is None:
            return wrapped("arg: out", kind(after), *words(after))
        return wrapped("arg: inout", kind(after), *words(before), "->", *words(after))
    if isinstance(value, np.ndarray):
        return wrapped("arg: in", kind(value), *words(value))
    if isinstance(value, float):
        return [f"// arg: f32 {number(np.float32(value))}"]
    return [f"// arg: u32 {value}"]


def stripped(ptx):
    """The PTX without comments, debug sections and empty lines, in a version that drivers of CUDA 12 know."""
    # In 8.4 strides of tensor maps counted 16 bytes each.
    ptx = re.sub(r"\.version \d+\.\d+", ".version 8.6" if "tensormap" in ptx else ".version 8.4", ptx)
    # What was inlined counts as the line that it was inlined at.
    ptx = re.sub(r"\.loc\s+[\d ]+,.*inlined_at (\d+ \d+ \d+)", r".loc \1", ptx)
    # Lines of inline assembly are counted on from the line of the source.
    inline = r"// begin inline asm.*?// end inline asm"
    ptx = re.sub(inline, lambda asm: re.sub(r"\.loc[^\n]*", "", asm.group()), ptx, flags=re.S)
    ptx = re.sub(r"//.*", "", ptx)
    ptx = re.sub(r"\.section[^{]*\{.*?\n\s*\}", "", ptx, flags=re.S)
    ptx = re.sub(r'\.file\s+(\d+) "[^"]*/([^/"]+)"( "[^"]*")?', r'.file \1 "\2"', ptx)
    ptx = re.sub(r'\.file\s+(\d+) "[^"]*" "([^"]*)"', r'.file \1 "\2"', ptx)
    lines = [line.strip().replace("\t", " ") for line in ptx.splitlines()]
    lines = [line for line in lines if line and not re.match(r"\$L__(tmp|func_|debug_)\w*:$", line)]
    return "\n".join(lines) + "\n"


def make(name, kernel, target, grid, args, constants, finding=None, within=0, **options):
    signature, values = {}, list(args.values())
    for arg, value in args.items():
        array = value[1] if isinstance(value, tuple) else value
        if isinstance(array, np.ndarray):
            signature[arg] = f"*{TYPES[array.dtype.name]}"
        else:
            signature[arg] = "fp32" if isinstance(array, float) else "i32"
    order = {arg: signature.get(arg, "constexpr") for arg in kernel.arg_names}
    facts = {(i,): [["tt.divisibility", 16]] for i, ty in enumerate(order.values()) if ty.startswith("*")}
    source = ASTSource(kernel, order, constants, facts)
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": 4} | options)
    settings = f" within={within}" if within else ""
    run = f"// run: {compiled.metadata.name} grid={grid} block=128 smem={compiled.metadata.shared}{settings}"
    lines = [f"// Made from kernels.py by make.py, for sm_{target}.", run]
    for value in values:
        lines += argument(value)
    scratch = getattr(compiled.metadata, "global_scratch_size", 0) * np.prod([int(n) for n in str(grid).split(",")])
    lines += [f"// arg: out u8 _*{scratch}", "// arg: u64 0"] if scratch else ["// arg: u64 0 0"]
    if finding:
        lines.append(f"// finding: {finding}")
    path = FOLDER / f"{name}_{target}.ptx"
    path.write_text("\n".join(lines) + "\n" + stripped(compiled.asm["ptx"]))


def floats(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def small(*shape, dtype=np.float16):
    return RNG.integers(-4, 5, shape).astype(dtype)


def main():
    x, y = floats(300), floats(300)
    make("vector_add", kernels.vector_add, 90, 3, dict(x=x, y=y, out=(None, x + y), n=300), dict(BLOCK=128))
    short = floats(200), floats(200)
    make(
        "vector_add_outside",
        kernels.vector_add_outside,
        80,
        2,
        dict(x=short[0], y=short[1], out=(None, short[0])),
        dict(BLOCK=128),
        finding="OutOfBounds",
    )
    x = floats(3, 100)
    power = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    make(
        "softmax",
        kernels.softmax,
        80,
        3,
        dict(x=x, out=(None, (power / power.sum(1, keepdims=True)).astype(np.float32)), n=100),
        dict(BLOCK=128),
        within=40,
    )
    w, b = floats(100), floats(100)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * w + b
    make(
        "layer_norm",
        kernels.layer_norm,
        90,
        3,
        dict(x=x, weight=w, bias=b, out=(None, expected.astype(np.float32)), n=100, eps=1e-5),
        dict(BLOCK=128),
        within=400,
    )
    a, b = small(40, 72), small(72, 48)
    product = (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16)
    for target, tile in [
        (75, dict(BM=32, BN=32, BK=32)),
        (80, dict(BM=32, BN=32, BK=32)),
        (90, dict(BM=64, BN=32, BK=32)),
    ]:
        grid = f"{-(-40 // tile['BM'])},{-(-48 // tile['BN'])}"
        make("matmul", kernels.matmul, target, grid, dict(a=a, b=b, c=(None, product), M=40, N=48, K=72), tile)
    described_on_the_device()
    a, b = small(32, 64, dtype=np.int8), small(64, 32, dtype=np.int8)
    product = a.astype(np.int32) @ b.astype(np.int32)
    make(
        "matmul_bytes",
        kernels.matmul,
        80,
        "1,1",
        dict(a=a, b=b, c=(None, product), M=32, N=32, K=64),
        dict(BM=32, BN=32, BK=32),
    )
    q, k, v = (floats(50, 32, dtype=np.float16) for _ in range(3))
    v = abs(v) + np.float16(0.5)
    score = q.astype(np.float64) @ k.astype(np.float64).T / np.sqrt(32)
    weight = np.exp(score - score.max(1, keepdims=True))
    expected = (weight @ v.astype(np.float64) / weight.sum(1, keepdims=True)).astype(np.float16)
    for target in (80, 90):
        make(
            "attention",
            kernels.attention,
            target,
            1,
            dict(q=q, k=k, v=v, out=(None, expected), S=50, scale=float(1 / np.sqrt(32))),
            dict(D=32, BM=64, BN=32),
            within=40,
        )
    x = RNG.integers(0, 100, 300).astype(np.int32)
    counts = np.concatenate([np.bincount(x % 8, minlength=8), [x.max()], [7]]).astype(np.int32)
    make("atomics", kernels.atomics, 90, 3, dict(x=x, out=(np.zeros(10, np.int32), counts), n=300), dict(BLOCK=128))
    x = RNG.integers(0, 9, 4 * 128).astype(np.float32)
    zero, total = np.zeros(1, np.float32), np.array([x.sum()], np.float32)
    off = np.zeros(1, np.int32)
    make("locked", kernels.locked, 90, 4, dict(flag=(off, off), total=(zero, total), x=x), dict(BLOCK=128))
    make("unlocked", kernels.unlocked, 90, 4, dict(total=(zero, total), x=x), dict(BLOCK=128), finding="GlobalRace")
    x = RNG.permutation(128).astype(np.int32)
    expected = np.concatenate([np.cumsum(x), np.sort(x), x[::-1]]).astype(np.int32)
    make("arrange", kernels.arrange, 80, 1, dict(x=x, out=(None, expected)), dict(BLOCK=128), debug=True)
    large = x.copy()
    large[5] = 5000
    make(
        "arrange_asserts",
        kernels.arrange,
        90,
        1,
        dict(x=large, out=(None, expected)),
        dict(BLOCK=128),
        finding="AssertFailed",
        debug=True,
    )
    written_in_place()


def described_on_the_device():
    rng = np.random.default_rng(11)
    a, b = (rng.integers(-4, 5, shape).astype(np.float16) for shape in [(72, 40), (48, 40)])
    product = (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float16)
    args = dict(a=a, b=b, c=(None, product), M=72, N=48, K=40)
    make("matmul_by_own_maps", kernels.matmul_by_own_maps, 90, 2, args, dict(BM=64, BN=32, BK=32))


def written_in_place():
    """Of a block of 32, four warps read every element, and one writes it."""
    x = np.arange(129, dtype=np.int32)
    few, more = x[:32], (x, np.concatenate([x[:-1] + x[1:], x[-1:]]))
    make("in_place", kernels.in_place, 80, 1, dict(x=(few, few + 1)), dict(BLOCK=32))
    neighbours = kernels.in_place_of_neighbours
    make("in_place_of_neighbours", neighbours, 80, 1, dict(x=more), dict(BLOCK=128), finding="GlobalRace")


if __name__ == "__main__":
    main()
