"""Context parallel on one GPU: every rank of a ring is a thread of this process, beside the unsplit call.

python bench/virtual_ranks.py [HEADSxKV_HEADSxDIM ...] [--ranks 8] [--tokens 65536] [--layout zigzag] [--profile]

Ranks run the code of `ring_attention`, forward and backward, causal. What one passes on is handed to the next as it is:
kernels and sums are those of several GPUs, and messages take no time. Prints a line of JSON for each case: seconds (medians;
split and unsplit take turns), the share of the unsplit speed that is left, and the relative RMS errors of both against
float64 over all rows of the first key head and its queries.
"""

import argparse
import json
import math
import queue
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

import flashcore
import timing
from flashcore.distributed import _attend, _ring, _shards
from flashcore.distributed._agree import Call


class Loop:
    """A rank of a group whose ranks are threads."""

    def __init__(self, rank, boxes):
        self.rank, self.world, self.boxes = rank, len(boxes), boxes

    def pass_on(self, given, kinds):
        self.boxes[(self.rank + 1) % self.world].put(given)
        return Arriving(self.boxes[self.rank], kinds)


class Arriving:
    def __init__(self, box, kinds):
        self.box, self.kinds = box, kinds

    def wait(self):
        found = self.box.get(timeout=60)
        assert [(tuple(x.shape), x.dtype) for x in found] == self.kinds
        return found


class Ranks:
    """All ranks of a ring and their shards of q, k, v and the gradient of the output."""

    def __init__(self, options, tensors):
        tokens, world, layout = [options.tokens], options.ranks, options.layout
        how = _attend.How(_attend.Mask(None, 0), 1 / math.sqrt(tensors[0].shape[3]), None, "bhsd")
        boxes = [queue.SimpleQueue() for _ in range(world)]
        self.calls = [Call(Loop(rank, boxes), how, layout, _attend.Lengths(tokens, tokens)) for rank in range(world)]
        places = [_shards.positions(tokens, world, rank, layout).to(tensors[0].device) for rank in range(world)]
        self.shards = [[x.index_select(2, place) for x in tensors] for place in places]
        self.order = _shards.order(tokens, world, layout).to(tensors[0].device)
        self.threads = ThreadPoolExecutor(world)

    def forward(self):
        """Output and log-sum-exp of every rank."""
        run = lambda call, shard: _ring.forward(call, *shard[:3], None)
        return self.on_all(run, self.calls, self.shards)

    def backward(self, results):
        """The gradients of every rank's q, k and v."""

        def run(call, shard, result):
            sums = _attend.row_sums(shard[3], result[0], None, call.how)
            return _ring.backward(call, *shard[:3], result[1], sums, shard[3])

        return self.on_all(run, self.calls, self.shards, results)

    def on_all(self, run, *each):
        found = [self.threads.submit(run, *arguments) for arguments in zip(*each)]
        failed = [future.exception() for future in found if future.exception()]
        # Ranks that wait for one that failed fail too.
        for error in sorted(failed, key=lambda error: isinstance(error, queue.Empty)):
            raise error
        return [future.result() for future in found]

    def whole(self, parts):
        return torch.cat(parts, 2)[:, :, self.order]


def exact(q, k, v, d_out, rows=2048):
    """Output and gradients of one key head and its queries in float64, causal, some queries at a time."""
    q, k, v, d_out = (x.double() for x in (q, k, v, d_out))
    scale, out, dq, dk, dv = q.shape[2] ** -0.5, *map(torch.zeros_like, (q, q, k, v))
    for a in range(0, q.shape[1], rows):
        b = min(a + rows, q.shape[1])
        some, keys, values, d = q[:, a:b], k[:, :b], v[:, :b], d_out[:, a:b]
        hidden = torch.ones(b - a, b, dtype=torch.bool, device=q.device).triu(1 + a)
        p = (some @ keys.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        out[:, a:b] = p @ values
        ds = p * (d @ values.mT - (d * out[:, a:b]).sum(-1, keepdim=True)) * scale
        dq[:, a:b] = ds @ keys
        dk[:, :b] += (ds.mT @ some).sum(0)
        dv[:, :b] += (p.mT @ d).sum(0)
    return out, dq, dk, dv


def errors(found, right):
    """Relative RMS errors, by name."""
    off = lambda x, y: ((x[0, : len(y)].double() - y).square().sum() / y.square().sum()).sqrt().item()
    return {name: off(x, y) for name, x, y in zip(("out", "dq", "dk", "dv"), found, right)}


def on_cpu(run, calls):
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begin) / calls


def seconds(runs, once, rounds=5, least=0.2):
    """The median time of each call, several back to back; calls take turns, so that all meet the same clocks."""
    calls = {name: math.ceil(least / max(once(run, 1), once(run, 1))) for name, run in runs.items()}
    times = [{name: once(run, calls[name]) for name, run in runs.items()} for _ in range(rounds)]
    return {name: statistics.median(turn[name] for turn in times) for name in runs}


def case(options, heads, kv_heads, dim):
    torch.manual_seed(0)
    make = lambda heads: torch.randn(1, heads, options.tokens, dim, device=options.device, dtype=torch.bfloat16)
    q, k, v, d_out = map(make, (heads, kv_heads, kv_heads, heads))
    whole = [x.detach().requires_grad_() for x in (q, k, v)]
    result = flashcore.attention(*whole, causal=True)
    grads = lambda: torch.autograd.grad(result, whole, d_out, retain_graph=True)
    ranks = Ranks(options, (q, k, v, d_out))
    results = ranks.forward()
    split = [[out for out, _ in results], *zip(*ranks.backward(results))]
    group = heads // kv_heads
    right = exact(q[0, :group], k[0, :1], v[0, :1], d_out[0, :group])
    found = dict(unsplit=errors((result, *grads()), right), split=errors(map(ranks.whole, split), right))
    del split, right
    runs = {
        "forward_unsplit": lambda: flashcore.attention(q, k, v, causal=True),
        "forward_split": ranks.forward,
        "backward_unsplit": grads,
        "backward_split": lambda: ranks.backward(results),
    }
    times = seconds(runs, timing.once if options.device == "cuda" else on_cpu)
    if options.profile:
        profile(runs)
    of = lambda way, *parts: sum(times[f"{part}_{way}"] for part in parts)
    share = lambda *parts: of("unsplit", *parts) / of("split", *parts)
    worst = max(found["split"][name] / found["unsplit"][name] for name in found["split"])
    shares = dict(share=share("forward", "backward"), share_forward=share("forward"), share_backward=share("backward"))
    about = dict(heads=heads, kv_heads=kv_heads, dim=dim) | {
        x: getattr(options, x) for x in ("ranks", "tokens", "layout")
    }
    return about | shares | times | dict(errors=found, error_ratio=worst)


def profile(runs):
    """Time by kernel, to stderr."""
    for name, run in runs.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            run()
            torch.cuda.synchronize()
        table = found.key_averages().table(sort_by="cuda_time_total", row_limit=12, max_name_column_width=90)
        print(name, table, sep="\n", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["32x8x128", "16x16x128"])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--layout", default="zigzag", choices=_shards.LAYOUTS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for text in options.cases:
        print(json.dumps(case(options, *map(int, text.split("x")))), flush=True)


if __name__ == "__main__":
    main()
