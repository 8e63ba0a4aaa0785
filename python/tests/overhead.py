"""Microseconds from Python to a launched kernel, with torch tensors on a GPU.

    python python/tests/overhead.py [--json]

Each figure is the median over batches of calls; between batches the GPU is waited for, so that no call waits for it. On
a machine without a GPU the CPU computes a problem so small that the call is what is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import flashcore
import torch
from flashcore import _native

CALLS, BATCHES = 200, 60


def microseconds(call, wait):
    """Median over batches of the time of one call."""
    for _ in range(3 * CALLS):
        call()
    times = []
    for _ in range(BATCHES):
        wait()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    wait()
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    shape = (1, 8, 64, 128) if cuda else (1, 1, 1, 8)
    wait = torch.cuda.synchronize if cuda else lambda: None
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    out = torch.empty_like(q)
    asked = _native.Options("bhsd", right=0)
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls = {
        "flashcore.attention": lambda: flashcore.attention(q, k, v, causal=True),
        "flashcore.attention, out given": lambda: flashcore.attention(q, k, v, causal=True, out=out),
        "flashcore.flash_attn_func": lambda: flashcore.flash_attn_func(*turned, causal=True),
        "the extension alone": lambda: _native.forward(q, k, v, out, None, asked),
        "torch.empty_like": lambda: torch.empty_like(q),
        "torch scaled_dot_product_attention": lambda: sdpa(q, k, v, is_causal=True),
    }
    if cuda:
        one = torch.ones(1, device=device)
        calls["torch: one small kernel (mul_)"] = lambda: one.mul_(1.0)
    figures = {name: microseconds(call, wait) for name, call in calls.items()}
    if options.json:
        machine = torch.cuda.get_device_name() if cuda else "cpu"
        print(json.dumps({"device": machine, "torch": torch.__version__, "microseconds": figures}))
        return
    print(f"{'call':<38}{'us':>8}   {device}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    for name, figure in figures.items():
        print(f"{name:<38}{figure:>8.2f}")


if __name__ == "__main__":
    main()
