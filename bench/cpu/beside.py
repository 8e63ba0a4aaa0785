#!/usr/bin/env python3
"""FlashCore's CPU backend and PyTorch in one process, on the same tensors.

    cargo build --release -p flashcore-cpu --example beside
    python bench/cpu/beside.py --out bench/cpu/DATE-beside.json

Groups: `turns` (each side computes for a while, PyTorch first and last), `decode` and `serving` (the same for one or few
queries: pages, caches of 8 bits), `gradients`, `interleaved` (call by call, as in a real program; best and median of each),
and `levels` (FlashCore alone, one SIMD level after the other). Prints a table with the
bar of each row and writes the figures as JSON. PyTorch's bf16 attention dies of an illegal instruction on some machines;
then bf16 is compared with its f32.
"""

import argparse
import ctypes
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
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).resolve().parents[2]
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
PREFILL = [([1, 8, 8, 512, 512, 64], False), ([1, 8, 8, 2048, 2048, 64], False), ([1, 8, 8, 2048, 2048, 128], False),
           ([1, 8, 8, 2048, 2048, 128], True), ([1, 8, 8, 4096, 4096, 64], True)]
DECODE = [[1, 32, 32, 1, 8192, 128], [1, 32, 8, 1, 8192, 128]]
# Shape, keys of a page or 0, whether keys and values are E4M3.
SERVING = [([1, 32, 4, 1, 8192, 128], 0, False), ([1, 32, 8, 1, 8192, 128], 16, False), ([1, 32, 8, 1, 8192, 128], 64, False),
           ([1, 32, 8, 2, 8192, 128], 0, False), ([1, 32, 8, 4, 8192, 128], 16, False), ([1, 32, 8, 16, 8192, 128], 16, False),
           ([1, 32, 8, 1, 8192, 128], 0, True), ([1, 32, 8, 1, 8192, 128], 16, True), ([1, 32, 32, 1, 8192, 128], 0, True),
           ([1, 32, 8, 4, 8192, 128], 16, True), ([8, 32, 8, 1, 1024, 128], 16, False)]
GRADIENTS = [([1, 8, 8, 512, 512, 64], False), ([1, 8, 8, 2048, 2048, 128], True)]


class Request(ctypes.Structure):
    _fields_ = [("tensors", ctypes.c_size_t * 4), ("lse", ctypes.c_size_t), ("grads", ctypes.c_size_t * 4),
                ("shape", ctypes.c_size_t * 6), ("causal", ctypes.c_size_t), ("dtype", ctypes.c_size_t),
                ("threads", ctypes.c_size_t), ("level", ctypes.c_size_t), ("cache", ctypes.c_size_t), ("page", ctypes.c_size_t)]


def sweep():
    """The forty shapes of compare.py."""
    draw = random.Random(1)
    for n in range(40):
        seq = draw.choice([1, 2, 3, 5, 8, 16, 17, 33, 64, 100, 128, 200, 256, 333, 512, 777, 1024, 1500, 2048, 4096])
        kv_heads, group = draw.choice([1, 2, 4]), draw.choice([1, 2, 4, 8])
        seq_kv = seq if seq > 16 else draw.choice([seq, 100, 1000, 4096])
        dim = draw.choice([32, 64, 80, 96, 128, 192, 256])
        shape = [draw.choice([1, 2]), kv_heads * group, kv_heads, seq, seq_kv, dim]
        yield shape, draw.random() < 0.5 and seq == seq_kv, ["f32", "bf16", "f16"][n % 3]


def torch_has_bf16():
    code = ("import torch; x = torch.randn(1, 2, 64, 64).bfloat16(); "
            "torch.nn.functional.scaled_dot_product_attention(x, x, x)")
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


class Case:
    """One call, for both sides."""

    def __init__(self, library, shape, causal, dtype, gradients=False, torch_dtype=None, page=0, cache=False):
        batch, heads_q, heads_kv, seq_q, seq_kv, dim = shape
        make = lambda heads, seq: torch.randn(batch, heads, seq, dim).to(DTYPES[dtype])
        self.library, self.shape, self.causal, self.dtype = library, shape, causal, dtype
        self.q, self.k, self.v = make(heads_q, seq_q), make(heads_kv, seq_kv), make(heads_kv, seq_kv)
        self.out, self.lse = torch.empty_like(self.q), torch.empty(batch, heads_q, seq_q)
        self.d_out, self.grads = make(heads_q, seq_q), [torch.empty_like(x) for x in (self.q, self.k, self.v)]
        self.request = Request(causal=causal, dtype=list(DTYPES).index(dtype), threads=0, level=99)
        self.request.page, self.request.cache, self.page, self.cache = page, cache, page, cache
        self.k_seen, self.v_seen = (self.seen(x) for x in (self.k, self.v))
        self.request.tensors[:] = [x.data_ptr() for x in (self.q, self.k_seen, self.v_seen, self.out)]
        self.request.lse, self.request.shape[:] = self.lse.data_ptr(), shape
        pairs = seq_q * seq_kv
        if causal:
            pairs = sum(min(i + 1, seq_kv) for i in range(seq_q))
        self.flops = (10 if gradients else 4) * batch * heads_q * pairs * dim
        as_torch = DTYPES[torch_dtype or dtype]
        # PyTorch reads no pages and no 8 bits here: its keys and values lie together, in the queries' type.
        wide = [x.to(torch.float8_e4m3fn).to(DTYPES[dtype]) if cache else x for x in (self.k, self.v)]
        self.t = [x.to(as_torch) for x in (self.q, *wide)]
        self.group = heads_q != heads_kv
        if gradients:
            self.ours()
            self.request.grads[:] = [x.data_ptr() for x in (self.d_out, *self.grads)]
            self.t = [x.requires_grad_() for x in self.t]
            self.t_out = self.attend()
            self.t_d_out = self.d_out.to(as_torch)
            self.theirs = lambda: torch.autograd.grad(self.t_out, self.t, self.t_d_out, retain_graph=True)
        else:
            self.theirs = self.attend

    def seen(self, x):
        """Keys or values as FlashCore gets them."""
        if self.cache:
            x = x.to(torch.float8_e4m3fn)
        if not self.page:
            return x
        batch, heads, seq, dim = x.shape
        rows = x.view(torch.uint8) if self.cache else x
        rows = rows.transpose(1, 2).reshape(batch * seq // self.page, self.page, heads, dim).flip(0).contiguous()
        return rows.view(x.dtype)

    def attend(self):
        return scaled_dot_product_attention(*self.t, is_causal=self.causal, enable_gqa=self.group)

    def ours(self):
        if self.library.flashcore_run(ctypes.byref(self.request)):
            raise SystemExit(f"flashcore refused {self.shape} {self.dtype}")

    def check(self):
        """Both sides agree, about."""
        want = self.theirs()
        self.ours()
        pairs = zip(self.grads, want) if self.request.grads[0] else [(self.out, want)]
        for got, want in pairs:
            error = (got.float() - want.float()).abs().max().item()
            assert error < 0.1 * max(1.0, want.float().abs().max().item()), (self.shape, self.dtype, error)


def turn(call, seconds):
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def in_turns(case, seconds):
    theirs = turn(case.theirs, seconds)
    ours = turn(case.ours, seconds)
    return ours, theirs + turn(case.theirs, seconds)


def interleaved(case, seconds):
    ours, theirs, end = [], [], time.perf_counter() + seconds
    while len(ours) < 5 or time.perf_counter() < end:
        for call, times in ((case.theirs, theirs), (case.ours, ours)):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return ours[1:], theirs[1:]


def bandwidth(library, size, seconds):
    """Bytes per second when `size` bytes are read again and again: caches count as they do for keys and values."""
    data = torch.ones(size // 8, dtype=torch.int64)
    # PyTorch's threads look for work for a while before they sleep.
    time.sleep(0.25)
    call = lambda: library.flashcore_read(ctypes.c_void_p(data.data_ptr()), data.numel())
    return data.numel() * 8 / statistics.median(turn(call, seconds))


class Report:
    def __init__(self):
        self.rows, self.missed = [], 0

    def add(self, group, case, bar, ours, theirs, **more):
        ratio = statistics.median(theirs) / statistics.median(ours) if theirs else None
        row = dict(group=group, shape=case.shape, causal=case.causal, dtype=case.dtype, bar=bar,
                   ours_ms=round(1e3 * statistics.median(ours), 4), ours_best_ms=round(1e3 * min(ours), 4),
                   gflops=round(case.flops / statistics.median(ours) / 1e9, 1), **more)
        if theirs:
            row.update(torch_ms=round(1e3 * statistics.median(theirs), 4), ratio=round(ratio, 3),
                       best_ratio=round(min(theirs) / min(ours), 3))
        bad = bar is not None and ratio is not None and ratio < bar
        self.missed += bad
        self.rows.append(row)
        shown = "x".join(map(str, case.shape)) + (" causal" if case.causal else "")
        print(f"{group:12} {shown:34} {case.dtype:5} {row['ours_ms']:10.3f} ms {row['gflops']:8.1f} GFLOP/s "
              + (f"ratio {ratio:6.2f} best {row['best_ratio']:6.2f} bar {bar} {'MISSED ' if bad else ''}" if theirs else "")
              + " ".join(f"{k} {v}" for k, v in more.items()), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a turn")
    parser.add_argument("--library", default=os.environ.get("CARGO_TARGET_DIR", ROOT / "target") / Path("release/examples/libbeside.so"))
    parser.add_argument("--out", help="where to write the figures")
    parser.add_argument("--only", help="one group: turns, decode, serving, gradients, interleaved or levels")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    library = ctypes.CDLL(str(options.library))
    library.flashcore_read.restype = ctypes.c_uint64
    other = None if torch_has_bf16() else "f32"
    stand_in = lambda dtype: other if dtype == "bf16" else None
    report, seconds = Report(), options.seconds
    wanted = lambda group: options.only in (None, group)
    if wanted("turns"):
        for dtype, (shape, causal) in ((d, c) for d in ("bf16", "f32", "f16") for c in PREFILL):
            case = Case(library, shape, causal, dtype, torch_dtype=stand_in(dtype))
            case.check()
            report.add("turns", case, 1.3, *in_turns(case, seconds))
    if wanted("decode"):
        for dtype, shape in ((d, s) for d in DTYPES for s in DECODE):
            case = Case(library, shape, False, dtype, torch_dtype=stand_in(dtype))
            case.check()
            ours, theirs = in_turns(case, seconds)
            size = case.k.nbytes + case.v.nbytes
            share = size / statistics.median(ours) / bandwidth(library, size, seconds / 2)
            report.add("decode", case, 1.0, ours, theirs, of_bandwidth=round(share, 3))
    if wanted("serving"):
        for dtype, (shape, page, cache) in ((d, s) for d in ("bf16", "f16") for s in SERVING):
            case = Case(library, shape, False, dtype, torch_dtype=stand_in(dtype), page=page, cache=cache)
            case.check()
            ours, theirs = in_turns(case, seconds / 2)
            size = case.k_seen.nbytes + case.v_seen.nbytes
            share = size / statistics.median(ours) / bandwidth(library, size, seconds / 4)
            report.add("serving", case, 1.0, ours, theirs, of_bandwidth=round(share, 3), page=page, cache="e4m3" if cache else dtype)
    if wanted("gradients"):
        for dtype, (shape, causal) in ((d, c) for d in ("f32", "bf16") for c in GRADIENTS):
            case = Case(library, shape, causal, dtype, gradients=True, torch_dtype=stand_in(dtype))
            case.check()
            report.add("gradients", case, 1.2, *in_turns(case, seconds / 2))
    if wanted("interleaved"):
        cases = list(sweep()) + [(s, c, d) for d in DTYPES for s, c in PREFILL] + [(s, False, d) for d in DTYPES for s in DECODE]
        for shape, causal, dtype in cases + [([4, 12, 12, 128, 128, 64], False, d) for d in DTYPES]:
            case = Case(library, shape, causal, dtype, torch_dtype=stand_in(dtype))
            report.add("interleaved", case, 1.0, *interleaved(case, seconds * 0.6))
    if wanted("levels"):
        for level, dtype in ((l, d) for l in ("avx2", "avx512", "avx512bf16", "amx") for d in DTYPES):
            number = library.flashcore_level(level.encode())
            if number >= 0 and (level != "avx512bf16" or dtype == "bf16"):
                case = Case(library, [1, 8, 8, 2048, 2048, 128], False, dtype)
                case.request.level = number
                report.add("levels", case, None, turn(case.ours, seconds / 2), [], level=level)
    print(f"{report.missed} bars missed" + (f"; bf16 is compared with PyTorch's {other}: its bf16 dies here" if other else ""))
    if options.out:
        named = (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line)
        machine = dict(cpu=next(named, platform.processor()), cores=len(os.sched_getaffinity(0)), torch=torch.__version__,
                       capability=torch.backends.cpu.get_cpu_capability(), load=os.getloadavg(), bf16_stand_in=other)
        date = datetime.datetime.now(datetime.timezone.utc).isoformat()
        Path(options.out).write_text(json.dumps(dict(date=date, machine=machine, results=report.rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
