"""Grouped products on the CPU: flashcore.grouped_mm beside torch's, call by call.

`python bench/cpu/grouped.py [--threads N] [--seconds S] [--out FILE]` prints the best milliseconds of both for weights in either
layout and for the products of gradients, and how many times as fast flashcore is. FILE gets all of it as JSON.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import time

import flashcore
import torch

# Groups, depth, columns, rows in all.
SHAPES = [(8, 1024, 3584, 8), (8, 1024, 3584, 64), (8, 1024, 3584, 512), (8, 1024, 3584, 2048), (8, 3584, 1024, 512), (4, 4096, 4096, 16),
          (4, 4096, 4096, 1024), (64, 512, 512, 64), (64, 512, 512, 1024), (16, 64, 128, 256), (4, 64, 64, 2048), (5, 328, 200, 77)]


def ends_of(rows, groups):
    """Where groups end, none of them quite like another; torch wants groups that divide depth to end at multiples of eight."""
    cuts = torch.randint(0, rows + 1, (groups - 1,)).sort().values
    even = torch.arange(1, groups) * rows // groups
    between = (3 * even + cuts) // 4
    return torch.cat([between // 8 * 8 if rows >= 64 * groups else between, torch.tensor([rows])]).int()


def forms(groups, depth, columns, rows, dtype):
    """Name, factors and offsets."""
    new = lambda *shape: (torch.randn(shape) / depth**0.5).to(dtype)
    x, weights, across, ends = new(rows, depth), new(groups, columns, depth), new(groups, depth, columns), ends_of(rows, groups)
    yield "rows", x, weights.mT, ends
    yield "rows, weights as columns", x, across, ends
    if rows >= 64 * groups:
        yield "depth", x.t(), new(rows, columns), ends
    each = x[: rows // groups * groups].view(groups, -1, depth)
    yield "batch", each, weights.mT, None


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turns(calls, least):
    times, end = [[] for _ in calls], time.perf_counter() + least
    while len(times[0]) < 7 or time.perf_counter() < end:
        for call, spans in zip(calls, times):
            spans.append(seconds(call))
    return [min(spans) * 1e3 for spans in times]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--out")
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(asked.threads)
    mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        for groups, depth, columns, rows in SHAPES:
            for form, a, b, ends in forms(groups, depth, columns, rows, dtype):
                ours, theirs = (lambda: flashcore.grouped_mm(a, b, offs=ends)), (lambda: mm(a, b, offs=ends))
                line = dict(dtype=str(dtype)[6:], form=form, groups=groups, depth=depth, columns=columns, rows=rows)
                try:
                    want = theirs().float()
                except RuntimeError as error:
                    print(line, f"torch: {str(error).splitlines()[0][:90]}")
                    continue
                assert (ours().float() - want).norm() < 1e-2 * want.norm(), line
                best = in_turns((ours, theirs), asked.seconds)
                line |= dict(flashcore_ms=round(best[0], 4), torch_ms=round(best[1], 4), ratio=round(best[1] / best[0], 2))
                print(*line.values(), flush=True)
                results.append(line)
    for dtype in ("bfloat16", "float32"):
        ratios = sorted((line["ratio"], line["form"]) for line in results if line["dtype"] == dtype)
        print(dtype, "least", ratios[0], "median", ratios[len(ratios) // 2])
    if asked.out:
        with open(asked.out, "w") as file:
            json.dump(described(asked.threads) | {"results": results}, file)


def described(threads):
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    machine = {
        "system": platform.platform(),
        "threads": threads,
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg(),
    }
    return {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(), "commit": commit, "machine": machine}


main()
