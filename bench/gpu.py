"""Everything that only a GPU can show, one command after another, with a line for each.

python bench/gpu.py OUT [checks|memory|speed ...] [--bin target/release] [--fa3 FOLDER] [--seconds N] [--only WORD] [--list]

Commands are those of `COMMANDS`; they need no compiler, so that `cargo build --release --workspace --examples` may have run
elsewhere. Several of `checks` run at a time (`--jobs`), since most of their work is the reference on the CPU; all others run
alone. What a command prints goes to a file of its group, results of `speed` to files of their own. A command that does not
end in its time counts as failed, and so does one for which no time of `--seconds` is left. Exits with 1 if one failed.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PTX = "tests/ptx tests/ptx/nvcc tests/ptx/triton tests/ptx/findings"
SHARES = 6
"""Processes that share the Python tests."""
TOGETHER = "checks"
"""The group whose commands may run beside each other."""
OVER = 124
"""What `timeout` returns where time was over."""
LOGS = threading.Lock()
"""Held while a log is written."""
# Group, seconds at most, what it is called, and the command; {out} is the file of that name.
COMMANDS = [
    ("checks", 60, "driver", "{bin}/examples/gpu_selfcheck"),
    ("checks", 240, "native", "{bin}/examples/gpu_conformance native"),
    ("checks", 120, "laws", "{bin}/examples/gpu_conformance native laws"),
    ("checks", 240, "random problems", "{bin}/examples/gpu_conformance native random 400"),
    ("checks", 240, "random decode", "{bin}/examples/gpu_conformance native decode 400"),
    ("checks", 240, "8-bit caches", "{bin}/examples/gpu_conformance native cache 150"),
    ("checks", 240, "persistent", "{bin}/examples/gpu_conformance persistent cases"),
    ("checks", 240, "ampere", "{bin}/examples/gpu_conformance ampere cases"),
    ("checks", 120, "two kernels of gradients", "{bin}/examples/gpu_conformance split backward 300"),
    ("checks", 120, "one kernel of gradients", "{bin}/examples/gpu_conformance fused backward 300"),
    ("checks", 120, "general gradients", "{bin}/examples/gpu_conformance general backward 450"),
    ("checks", 120, "operations", "{bin}/flashcore verify --backend cuda"),
    ("checks", 60, "graphs", "{bin}/examples/gpu_graph 1000"),
    ("checks", 180, "PTX", "{bin}/examples/gpu_ptx " + PTX),
    *(
        ("checks", 400, f"Python {n}/{SHARES}", f"{{python}} python/tests/run_gpu.py --seconds 380 --share {n}/{SHARES}")
        for n in range(1, SHARES + 1)
    ),
    ("memory", 200, "memcheck, forward", "{sanitizer} memcheck {bin}/examples/gpu_conformance native cases 'pages of 16'"),
    ("memory", 200, "memcheck, gradients", "{sanitizer} memcheck {bin}/examples/gpu_conformance fused backward 'length 33'"),
    ("memory", 200, "memcheck, f32", "{sanitizer} memcheck {bin}/examples/gpu_conformance general backward 'length 33'"),
    ("memory", 200, "racecheck, decode", "{sanitizer} racecheck {bin}/examples/gpu_conformance native decode 20"),
    ("speed", 200, "forward.json", "{bin}/flashcore bench --suite forward {fa3} --out {out}"),
    ("speed", 60, "small.json", "{bin}/flashcore bench --suite small --out {out}"),
    ("speed", 240, "backward.json", "{bin}/flashcore bench --suite backward {fa3} {peers} --out {out}"),
    ("speed", 120, "backward-f32.json", "{bin}/flashcore bench --suite backward --dtype f32 --peers torch-efficient --out {out}"),
    ("speed", 240, "kinds.json", "{bin}/flashcore bench --suite kinds {fa3} --out {out}"),
    ("speed", 120, "serving.jsonl", "{python} bench/serving.py {fa3} > {out}"),
    ("speed", 60, "packed-gradients.jsonl", "{python} bench/packed_gradients.py {fa3} --out {out}"),
    ("speed", 120, "moe.jsonl", "{python} bench/moe.py > {out}"),
    ("speed", 60, "grouped.jsonl", "{python} bench/grouped.py > {out}"),
    ("speed", 90, "fp8.jsonl", "{python} bench/fp8.py {fa3} > {out}"),
    ("speed", 120, "ranks.jsonl", "{python} bench/virtual_ranks.py > {out}"),
    ("speed", 120, "llama.json", "{python} bench/train_llama.py > {out}"),
    ("speed", 90, "overhead.txt", "{python} python/tests/overhead.py > {out}"),
]


def shell_line(command, options, name):
    """The command as a shell takes it."""
    fa3 = f"--fa3 {options.fa3}" if options.fa3 else ""
    peers = "--peers torch-cudnn,torch-flash" + (",fa3,fa3-deterministic" if options.fa3 else "")
    places = {"bin": options.bin, "fa3": fa3, "peers": peers, "out": options.out / name}
    return command.format(python=sys.executable, sanitizer="compute-sanitizer --error-exitcode 9 --tool", **places)


def attempt(line, log, limit):
    """How the command ended, and the last line that it printed; the log gets all of it at once."""
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        # `timeout` ends what the command started as well.
        run = ["timeout", "--kill-after=5", str(limit), "bash", "-c", line]
        code = subprocess.run(run, cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT).returncode
        printed.seek(0)
        said = printed.read()
    with LOGS, log.open("a") as all_of_it:
        print(f"$ {line}\n{said}", file=all_of_it)
    end = {0: "passed", OVER: f"failed: more than {limit} s"}.get(code, f"failed: {code}")
    return end, (said.splitlines() or [""])[-1]


def perform(row, options, begin):
    """Runs a command, prints its line, and returns whether it passed."""
    group, limit, name, command = row
    line = shell_line(command, options, name)
    if options.list:
        print(line)
        return True
    start = time.perf_counter()
    left = int(min(limit, options.seconds - (start - begin)))
    end, last = attempt(line, options.out / f"{group}.txt", left) if left > 0 else ("failed: no time left", "")
    print(f"{name:<26} {end:<10} {time.perf_counter() - start:6.1f} s  {last[:100]}", flush=True)
    return end == "passed"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=lambda folder: Path(folder).resolve())
    parser.add_argument("groups", nargs="*", help="checks, memory, speed; all where none is named")
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--fa3", type=Path)
    parser.add_argument("--seconds", type=int, default=1 << 30, help="for all commands")
    parser.add_argument("--jobs", type=int, default=4, help="checks at a time")
    parser.add_argument("--only", default="", help="commands whose name contains this")
    parser.add_argument("--list", action="store_true", help="show commands and run none")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    wanted = [row for row in COMMANDS if (not options.groups or row[0] in options.groups) and options.only in row[2]]
    together = [row for row in wanted if row[0] == TOGETHER]
    with ThreadPoolExecutor(1 if options.list else options.jobs) as pool:
        passed = list(pool.map(lambda row: perform(row, options, begin), together))
    passed += [perform(row, options, begin) for row in wanted if row[0] != TOGETHER]
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
