"""Microseconds from Python to a launched kernel, with torch tensors on a GPU.

    python python/tests/overhead.py [--json]

Figures are over rounds of calls; between rounds the GPU is waited for, so that no call waits for it. On a machine without
a GPU the CPU computes a problem so small that the call is what is measured.
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

CALLS, ROUNDS, WARM_UP = 100, 200, 10
"""Calls between two waits: far fewer than a GPU queues. All calls take turns, round by round."""


def microseconds(calls, wait):
    """Least, median and 90th percentile over rounds of the time of one call, for each of the calls."""
    times = {name: [] for name in calls}
    for round_number in range(WARM_UP + ROUNDS):
        for name, call in calls.items():
            wait()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            taken = (time.perf_counter() - begin) / CALLS * 1e6
            if round_number >= WARM_UP:
                times[name].append(taken)
    wait()
    tenths = {name: statistics.quantiles(values, n=10) for name, values in times.items()}
    return {name: [min(values), tenths[name][4], tenths[name][8]] for name, values in times.items()}


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
    asked = _native.Options("bhsd")
    rows = shape[2]
    lengths = torch.full((1,), rows, dtype=torch.int32, device=device)
    sinks = torch.zeros(shape[1], dtype=dtype, device=device)
    offsets = torch.tensor([0, rows], dtype=torch.int32, device=device)
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    recorded = [x.clone().requires_grad_() for x in (q, k, v)]
    grad = torch.ones_like(q)
    calls = {
        "flashcore.attention": lambda: flashcore.attention(q, k, v),
        "flashcore.attention, causal": lambda: flashcore.attention(q, k, v, causal=True),
        "flashcore.attention, out given": lambda: flashcore.attention(q, k, v, out=out),
        "flashcore.attention, key_lengths": lambda: flashcore.attention(q, k, v, key_lengths=lengths),
        "flashcore.attention, both lengths, sinks": lambda: flashcore.attention(
            q, k, v, key_lengths=lengths, query_lengths=lengths, sinks=sinks
        ),
        "flashcore.flash_attn_varlen_func": lambda: flashcore.flash_attn_varlen_func(*packed, offsets, offsets, 64, 64),
        "flashcore.flash_attn_with_kvcache": lambda: flashcore.flash_attn_with_kvcache(
            turned[0][:, :1], turned[1], turned[2], cache_seqlens=lengths, causal=True
        ),
        "flashcore.attention and its gradients": lambda: torch.autograd.grad(flashcore.attention(*recorded), recorded, grad),
        "torch sdpa and its gradients": lambda: torch.autograd.grad(sdpa(*recorded), recorded, grad),
        "flashcore.flash_attn_func": lambda: flashcore.flash_attn_func(*turned, causal=True),
        "the extension alone": lambda: _native.forward(q, k, v, out, None, asked),
        "torch.empty_like": lambda: torch.empty_like(q),
        "torch scaled_dot_product_attention": lambda: sdpa(q, k, v),
    }
    if cuda:
        one = torch.ones(1, device=device)
        calls["torch: one small kernel (mul_)"] = lambda: one.mul_(1.0)
    figures = microseconds(calls, wait)
    python = f"Python {sys.version.split()[0]}"
    if options.json:
        machine = torch.cuda.get_device_name() if cuda else "cpu"
        print(json.dumps({"device": machine, "torch": torch.__version__, "min_median_p90_us": figures}))
        return
    print(f"{'us per call':<42}{'min':>8}{'median':>8}{'p90':>8}   {device}, torch {torch.__version__}, {python}")
    for name, (least, median, p90) in figures.items():
        print(f"{name:<42}{least:>8.2f}{median:>8.2f}{p90:>8.2f}")


if __name__ == "__main__":
    main()
