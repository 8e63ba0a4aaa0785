"""Microseconds from Python to a launched kernel, with torch tensors on a GPU.

    python python/tests/overhead.py [--seconds N] [--json FILE]

Figures are over rounds of calls; between rounds the GPU is waited for, so that no call waits for it. Calls that are compared
take turns, round by round, and a group of them is printed as soon as its seconds are over. On a machine without a GPU the CPU
computes a problem so small that the call is what is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import types
from pathlib import Path

import flashcore
import torch
from flashcore import _native, _options, _torch_operator

sdpa = torch.nn.functional.scaled_dot_product_attention

CALLS, WARM_UP, FEWEST = 100, 3, 5
"""Calls between two waits: far fewer than a GPU queues. Rounds that do not count, and as many as there are at least."""
BARS = {
    "flashcore.attention": 5.6,
    "flashcore.flash_attn_varlen_func": 8.0,
    "flashcore.flash_attn_with_kvcache": 8.0,
    "gradients: the call of backward alone": 12.0,
}
"""Microseconds that the median should not exceed."""


def microseconds(calls, wait, seconds):
    """Least, median and 90th percentile over rounds of the time of one call, for each of the calls."""
    times = {name: [] for name in calls}
    end, round_number = time.perf_counter() + seconds, 0
    while round_number < WARM_UP + FEWEST or time.perf_counter() < end:
        round_number += 1
        for name, call in calls.items():
            wait()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            taken = (time.perf_counter() - begin) / CALLS * 1e6
            if round_number > WARM_UP:
                times[name].append(taken)
    wait()
    tenths = {name: statistics.quantiles(values, n=10) for name, values in times.items()}
    return {name: [min(values), tenths[name][4], tenths[name][8]] for name, values in times.items()}


def forward_calls(x):
    """Calls of every function without gradients, beside torch's own."""
    q, k, v, rows = x.q, x.k, x.v, x.q.shape[2]
    out, asked = torch.empty_like(q), _native.Options("bhsd")
    lengths = torch.full((1,), rows, dtype=torch.int32, device=q.device)
    sinks = torch.zeros(q.shape[1], dtype=q.dtype, device=q.device)
    offsets = torch.tensor([0, rows], dtype=torch.int32, device=q.device)
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    both = dict(key_lengths=lengths, query_lengths=lengths, sinks=sinks)
    one = torch.ones(1, device=q.device)
    return {
        "flashcore.attention": lambda: flashcore.attention(q, k, v),
        "flashcore.attention, causal": lambda: flashcore.attention(q, k, v, causal=True),
        "flashcore.attention, out given": lambda: flashcore.attention(q, k, v, out=out),
        "flashcore.attention, both lengths, sinks": lambda: flashcore.attention(q, k, v, **both),
        "flashcore.flash_attn_func": lambda: flashcore.flash_attn_func(*turned, causal=True),
        "flashcore.flash_attn_varlen_func": lambda: flashcore.flash_attn_varlen_func(*packed, offsets, offsets, rows, rows),
        "flashcore.flash_attn_with_kvcache": lambda: flashcore.flash_attn_with_kvcache(
            turned[0], turned[1], turned[2], cache_seqlens=lengths, causal=True
        ),
        "the extension alone": lambda: _native.forward(q, k, v, out, None, asked),
        "torch.empty_like": lambda: torch.empty_like(q),
        "torch: one small kernel (mul_)": lambda: one.mul_(1.0),
        "torch scaled_dot_product_attention": lambda: sdpa(q, k, v),
    }


def gradient_calls(x):
    """Calls that autograd records, their backward pass, and what of it is FlashCore's own."""
    recorded = [tensor.clone().requires_grad_() for tensor in (x.q, x.k, x.v)]
    grad, asked = torch.ones_like(x.q), _options.options(False, None, None, None, "bhsd")
    out, lse = flashcore.attention(x.q, x.k, x.v, return_lse=True)
    inputs = (x.q, x.k, x.v)
    differentiate = _torch_operator._differentiated  # what autograd comes to
    return {
        "gradients: the call of backward alone": lambda: differentiate(inputs, out, None, lse, grad, asked, _options.NONE),
        "flashcore.attention, recorded": lambda: flashcore.attention(*recorded),
        "torch sdpa, recorded": lambda: sdpa(*recorded),
        "flashcore.attention and its gradients": lambda: torch.autograd.grad(flashcore.attention(*recorded), recorded, grad),
        "torch sdpa and its gradients": lambda: torch.autograd.grad(sdpa(*recorded), recorded, grad),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="write one JSON object there")
    parser.add_argument("--seconds", type=float, default=6.0, help="of measuring, for each of two groups")
    options = parser.parse_args()
    begin, cuda = time.perf_counter(), torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    shape = (1, 8, 64, 128) if cuda else (1, 1, 1, 8)
    wait = torch.cuda.synchronize if cuda else lambda: None
    x = types.SimpleNamespace(**{name: torch.randn(shape, device=device, dtype=dtype) for name in "qkv"})
    machine = torch.cuda.get_device_name() if cuda else "cpu"
    python = f"Python {sys.version.split()[0]}"
    print(f"{'us per call':<42}{'min':>8}{'median':>8}{'p90':>8}{'bar':>8}   {machine}, torch {torch.__version__}, {python}")
    figures = {}
    for group in (forward_calls(x), gradient_calls(x)):
        for call in group.values():  # what is compiled is compiled now
            call()
        wait()
        print(f"  first calls done after {time.perf_counter() - begin:.1f} s", flush=True)
        found = microseconds(group, wait, options.seconds)
        figures |= found
        for name, (least, median, p90) in found.items():
            bar = f"{BARS[name]:>8.1f}" if name in BARS else ""
            print(f"{name:<42}{least:>8.2f}{median:>8.2f}{p90:>8.2f}{bar}", flush=True)
    if options.json:
        about = {"device": machine, "torch": torch.__version__, "python": python}
        options.json.write_text(json.dumps({**about, "min_median_p90_us": figures}))


if __name__ == "__main__":
    main()
