#!/usr/bin/env python3
"""FlashCore's CPU backend beside PyTorch's scaled_dot_product_attention: same machine, same threads, interleaved.

    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install -r bench/cpu/requirements.txt
    /tmp/torch/bin/python bench/cpu/compare.py --threads 2

Builds the Rust side, runs every configuration in alternating rounds, prints a table with the ratio of median times and
the bars of each group, and writes all raw times to bench/cpu/<date>.json. Exit code 1 if a bar is missed.
"""

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
BYTES = {"f32": 4, "bf16": 2, "f16": 2}


def configurations(sweep_seed):
    """(group, [batch, heads_q, heads_kv, seq_q, seq_kv, dim], causal, dtype, least ratio)"""
    prefill = [([1, 8, 8, 512, 512, 64], False), ([1, 8, 8, 2048, 2048, 64], False),
               ([1, 8, 8, 2048, 2048, 128], True), ([1, 8, 8, 4096, 4096, 64], True)]
    for dtype in DTYPES:
        for shape, causal in prefill:
            yield "prefill", shape, causal, dtype, 1.5
    for dtype in DTYPES:
        yield "decode", [1, 32, 32, 1, 8192, 128], False, dtype, 4.0 if dtype == "bf16" else 1.0
    for dtype in DTYPES:
        for shape in ([1, 8, 8, 512, 512, 64], [4, 12, 12, 128, 128, 64], [1, 8, 8, 2048, 2048, 128]):
            for causal in (False, True):
                yield "gradients", shape, causal, dtype, 1.0
    draw = random.Random(sweep_seed)
    for n in range(40):
        seq = draw.choice([1, 2, 3, 5, 8, 16, 17, 33, 64, 100, 128, 200, 256, 333, 512, 777, 1024, 1500, 2048, 4096])
        kv_heads = draw.choice([1, 2, 4])
        group = draw.choice([1, 2, 4, 8])
        seq_kv = seq if seq > 16 else draw.choice([seq, 100, 1000, 4096])
        dim = draw.choice([32, 64, 80, 96, 128, 192, 256])
        shape = [draw.choice([1, 2]), kv_heads * group, kv_heads, seq, seq_kv, dim]
        # PyTorch's causal mask starts in the top left corner: with few queries it hides nearly everything.
        causal = draw.random() < 0.5 and seq == seq_kv
        yield "sweep", shape, causal, list(DTYPES)[n % 3], 1.0


class FlashCore:
    """The Rust side: one process that answers requests."""

    def __init__(self, threads):
        target = os.environ.get("CARGO_TARGET_DIR", ROOT / "target")
        build = ["cargo", "build", "--release", "-q", "-p", "flashcore-cpu", "--example", "bench"]
        subprocess.run(build, cwd=ROOT, check=True)
        command = [Path(target) / "release/examples/bench", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def attention(self, group, shape, causal, dtype, repetitions):
        what = "gradients" if group == "gradients" else "attention"
        return self.ask(what, *shape, "causal" if causal else "full", dtype, repetitions)


def torch_attention(group, shape, causal, dtype, repetitions):
    batch, heads_q, heads_kv, seq_q, seq_kv, dim = shape
    make = lambda heads, seq: torch.randn(batch, heads, seq, dim).to(DTYPES[dtype])
    q, k, v = make(heads_q, seq_q), make(heads_kv, seq_kv), make(heads_kv, seq_kv)
    attend = lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=heads_q != heads_kv)
    if group == "gradients":
        inputs, given = [x.requires_grad_() for x in (q, k, v)], make(heads_q, seq_q)
        out = attend()
        run = lambda: torch.autograd.grad(out, inputs, given, retain_graph=True)
    else:
        run = attend
    seconds = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def repetitions_for(flashcore, group, shape, causal, dtype, budget):
    """As many repetitions per round as fit the time budget, at least 3."""
    once = statistics.median(flashcore.attention(group, shape, causal, dtype, 3)["seconds"])
    return max(3, min(200, int(budget / once)))


def measure(flashcore, configuration, rounds, budget):
    group, shape, causal, dtype, bar = configuration
    repetitions = repetitions_for(flashcore, group, shape, causal, dtype, budget)
    ours, theirs, read = [], [], []
    size = 2 * shape[2] * shape[4] * shape[5] * BYTES[dtype]
    for _ in range(rounds):
        # The other side's threads may spin for a while after its last call.
        time.sleep(0.25)
        answer = flashcore.attention(group, shape, causal, dtype, repetitions)
        ours += answer["seconds"]
        if group == "decode":
            read += flashcore.ask("read", size, 5)["seconds"]
        time.sleep(0.05)
        theirs += torch_attention(group, shape, causal, dtype, repetitions)
    result = dict(group=group, shape=shape, causal=causal, dtype=dtype, bar=bar, kernel=answer["kernel"],
                  flops=answer["flops"], scratch=answer["scratch"], flashcore=[round(t, 9) for t in ours],
                  torch=[round(t, 9) for t in theirs])
    if group == "decode":
        result["read"] = dict(bytes=size, seconds=read)
    return result


def row(result):
    ours, theirs = statistics.median(result["flashcore"]), statistics.median(result["torch"])
    batch, heads_q, heads_kv, seq_q, seq_kv, dim = result["shape"]
    name = f"{batch}x{heads_q}/{heads_kv}x{seq_q}/{seq_kv}x{dim}{' causal' if result['causal'] else ''}"
    text = (f"{result['group']:10}{name:32}{result['dtype']:5} {ours * 1e3:9.3f} ms {theirs * 1e3:9.3f} ms "
            f"{theirs / ours:6.2f}x (bar {result['bar']:.1f}) {result['flops'] / ours / 1e9:6.0f} GFLOP/s")
    passed = theirs / ours >= result["bar"]
    if "read" in result:
        bandwidth = result["read"]["bytes"] / statistics.median(result["read"]["seconds"])
        share = result["read"]["bytes"] / ours / bandwidth
        text += f", {share * 100:.0f} % of {bandwidth / 1e9:.1f} GB/s (bar 80)"
        passed = passed and share >= 0.8
    return text + ("" if passed else "  MISSED"), passed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5, help="alternations per configuration")
    parser.add_argument("--seconds", type=float, default=0.5, help="time per side and round")
    parser.add_argument("--only", help="prefill, decode, gradients or sweep")
    parser.add_argument("--seed", type=int, default=7, help="of the sweep's shapes")
    parser.add_argument("--out", type=Path, help="where the raw times go")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    flashcore = FlashCore(options.threads)
    results, missed = [], 0
    for configuration in configurations(options.seed):
        if options.only in (None, configuration[0]):
            results.append(measure(flashcore, configuration, options.rounds, options.seconds))
            text, passed = row(results[-1])
            missed += not passed
            print(text, flush=True)
    now = datetime.datetime.now(datetime.timezone.utc)
    out = options.out or ROOT / f"bench/cpu/{now:%Y-%m-%d}.json"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line), platform.processor())
    machine = dict(cpu=model, threads=options.threads, torch=torch.__version__, system=platform.platform(),
                   capability=torch.backends.cpu.get_cpu_capability(), load=os.getloadavg())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(dict(date=now.isoformat(), commit=commit, machine=machine, results=results)))
    print(f"{len(results) - missed} of {len(results)} bars met; raw times in {out}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
