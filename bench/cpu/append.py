"""New rows of a cache on the CPU: flashcore.append beside torch's assignment to a slice, call by call.

`python bench/cpu/append.py [--threads N] [--seconds S]` prints the best microseconds of both, and how many times as fast flashcore is.
"""

import argparse
import time

import flashcore
import torch

BATCH, HEADS, DIM, CACHE = 2, 8, 128, 2048


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.3)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        caches = [torch.zeros(BATCH, CACHE, HEADS, DIM, dtype=dtype) for _ in range(2)]
        for rows in (1, 16, 128, 512):
            new = [torch.randn(BATCH, rows, HEADS, DIM).to(dtype) for _ in range(2)]
            lengths = torch.full((BATCH,), 100, dtype=torch.int32)

            def assign():
                for cache, x in zip(caches, new):
                    cache[:, 100 : 100 + rows] = x

            calls, times = (lambda: flashcore.append(*new, *caches, lengths), assign), ([], [])
            calls[0]()
            assert all(torch.equal(cache[:, 100 : 100 + rows], x) for cache, x in zip(caches, new))
            end = time.perf_counter() + asked.seconds
            while len(times[0]) < 7 or time.perf_counter() < end:
                for call, spans in zip(calls, times):
                    spans.append(seconds(call))
            best = [min(spans) * 1e6 for spans in times]
            print(str(dtype)[6:], rows, *(f"{each:.1f}" for each in best), f"{best[1] / best[0]:.2f}", flush=True)


main()
