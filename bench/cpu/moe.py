"""A small Mixtral's experts on the CPU: flashcore.moe beside torch's paths, in turns.

`python bench/cpu/moe.py [--threads N] [--seconds S] [--out FILE]` prints the best milliseconds for one token and for 256, and how
many times as fast flashcore is as the faster of torch's two, by the best and by the median: a loop over experts as transformers
has it, and `grouped_mm`. FILE gets all of it as JSON.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import time

import flashcore
import torch

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 1024, 3584, 8, 2


def eager(x, gate_up, down, ids, weights):
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        tokens, slots = torch.where(ids == expert)
        if tokens.numel() == 0:
            continue
        gate, up = torch.nn.functional.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        rows = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down[expert])
        out.index_add_(0, tokens, rows * weights[tokens, slots, None].to(x.dtype))
    return out


def grouped(x, gate_up, down, ids, weights):
    mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    flat = ids.flatten()
    order = torch.argsort(flat)
    ends = torch.cumsum(torch.bincount(flat, minlength=EXPERTS), 0, dtype=torch.int32)
    gate, up = mm(x[order // TOP_K], gate_up.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
    rows = mm(torch.nn.functional.silu(gate) * up, down.transpose(-2, -1), offs=ends)
    rows = rows * weights.flatten()[order, None].to(rows.dtype)
    back = torch.empty_like(rows)
    back[order] = rows
    return back.view(*ids.shape, -1).sum(dim=1)


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratio(times, of):
    """How many times as fast flashcore is as the faster of the others."""
    return min(of(spans) for name, spans in times.items() if name != "flashcore") / of(times["flashcore"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=5.0, help="of calls in turns")
    parser.add_argument("--out")
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(asked.threads)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=dtype) * 0.02
        down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, dtype=dtype) * 0.02
        for tokens in (1, 256):
            x = torch.randn(tokens, HIDDEN, dtype=dtype)
            ids = torch.rand(tokens, EXPERTS).topk(TOP_K).indices
            args = (x, gate_up, down, ids, torch.full((tokens, TOP_K), 0.5))
            calls = {"flashcore": flashcore.moe, "loop": eager, "grouped_mm": grouped}
            for name in list(calls):
                try:
                    close = torch.allclose(calls[name](*args).float(), eager(*args).float(), atol=2e-2, rtol=2e-2)
                    assert close, f"{name} differs"
                except (RuntimeError, AttributeError) as error:
                    print(f"{name} does not run here: {error}")
                    del calls[name]
            times = {name: [] for name in calls}
            end = time.perf_counter() + asked.seconds
            while time.perf_counter() < end:
                for name, call in calls.items():
                    times[name].append(seconds(lambda: call(*args)))
            best = {name: min(spans) * 1e3 for name, spans in times.items()}
            ratios = {"best": ratio(times, min), "median": ratio(times, statistics.median)}
            print(dtype, tokens, {name: round(ms, 3) for name, ms in best.items()}, {by: round(x, 2) for by, x in ratios.items()})
            results.append({"dtype": str(dtype), "tokens": tokens, "ratios": ratios, "seconds": times})
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
    layer = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "experts": EXPERTS, "top_k": TOP_K}
    return {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(), "commit": commit, "machine": machine, "layer": layer}


main()
