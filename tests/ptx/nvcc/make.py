"""Compiles the CUDA files of this folder to the PTX tests beside them.

    python3 make.py NVCC [NAME …]

NVCC is the compiler, as the wheels nvidia-cuda-nvcc, nvidia-cuda-crt, nvidia-nvvm and nvidia-cuda-runtime bring it
(release 13.0 made what is checked in). Comments of a source say how its kernels are launched, in the form of all PTX
tests; `{{…}}` in them is Python over NumPy, `// let: name = …` names a value for what follows, `// options:` is for the
compiler, `// version:` what the PTX says if 8.4 is too old.
"""

import pathlib
import re
import subprocess
import sys

import numpy as np

KEYS = ("run:", "arg:", "and:", "finding:", "apart:", "note:")
WIDTH = 118


def number(value):
    """A value as the comments of a test write it: floats by their bits, so that none is rounded twice."""
    if isinstance(value, np.floating):
        bits = value.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[value.itemsize])
        return f"0x{int(bits):0{2 * value.itemsize}x}"
    return str(int(value))


def bf16(values):
    """Values that bf16 holds exactly, as its bits."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def cat(*arrays):
    """Arrays one behind the other, none of them changed to the type of another."""
    return np.array([value for array in arrays for value in np.ravel(array).tolist()], dtype=object)


NAMES = {"np": np, "bf16": bf16, "cat": cat}


def filled(line, names):
    """A comment with its expressions worked out, in lines of at most WIDTH characters."""

    def value(match):
        result = np.atleast_1d(eval(match.group(1), NAMES | names))
        return " ".join(number(v) for v in result.ravel())

    words = re.sub(r"{{(.*?)}}", value, line).split()
    lines, current = [], "//"
    for word in words:
        if len(current) + len(word) + 1 > WIDTH:
            lines.append(current)
            current = "// and:"
        current += f" {word}"
    return lines + [current]


def comments(source):
    """How the kernels of a source are launched."""
    names, lines = {}, []
    for line in source.splitlines():
        comment = line.removeprefix("// ") if line.startswith("// ") else ""
        if comment.startswith("let: "):
            name, expression = comment.removeprefix("let: ").split(" = ", 1)
            names[name] = eval(expression, NAMES | names)
        elif comment.startswith(KEYS):
            lines += filled(comment, names)
    return lines


def located(lines):
    """The lines, with what was inlined at the line of its outermost call: sections that tell more are left out."""
    calls = {}
    for line in lines:
        found = re.match(r"\s*\.loc\s+(\d+ \d+ \d+)(?:,.*inlined_at (\d+ \d+ \d+))?", line)
        if found:
            own, call = found.groups()
            calls[own] = calls.get(call, call) if call else own
            line = f" .loc {calls[own]}"
        yield line


def stripped(ptx, version):
    """The PTX without comments, debug sections and empty lines, with the source's name instead of its path, in a version
    that drivers of CUDA 12 know."""
    ptx = re.sub(r"\.version \d+\.\d+", f".version {version}", ptx)
    ptx = re.sub(r"\.section[^{]*\{.*?\n\s*\}", "", ptx, flags=re.S)
    lines = [line.rstrip().replace("\t", " ") for line in located(ptx.splitlines())]
    lines = [line for line in lines if line and not line.lstrip().startswith("//")]
    return re.sub(r'"[^"\n]*/([^/"\n]+)"', r'"\1"', "\n".join(lines)) + "\n"


def compile(nvcc, path):
    source = path.read_text()
    options = re.search(r"^// options: (.*)$", source, re.M)
    command = [nvcc, "-ptx", "-o", "-", *(options.group(1).split() if options else ["-arch=sm_90"]), str(path)]
    ptx = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    head = [f"// Made from {path.name} by make.py.", *comments(source)]
    version = re.search(r"^// version: (.*)$", source, re.M)
    text = stripped(ptx, version.group(1) if version else "8.4")
    path.with_suffix(".ptx").write_text("\n".join(head) + "\n" + text)


def main():
    nvcc, *names = sys.argv[1:]
    folder = pathlib.Path(__file__).parent
    for path in sorted(folder.glob("*.cu")):
        if not names or path.stem in names:
            compile(nvcc, path)


if __name__ == "__main__":
    main()
