"""Context parallel on one GPU: the kernels of every rank of a ring, one rank after another, beside the unsplit call.

python bench/virtual_ranks.py [--ranks 8] [--tokens 65536] [--heads 16] [--kv-heads 16] [--dim 128] [--layout zigzag]

No transport: what a rank receives is taken from a list. Prints JSON: seconds of forward and backward, split and unsplit,
and the relative RMS error of both against float64 on some rows.
"""

import argparse
import json
import math

import torch

import flashcore
from flashcore.distributed import _attend, _shards
from flashcore.distributed._agree import Call
from flashcore.distributed._attend import How, Lengths, Mask


class Loop:
    """A rank of a group that moves nothing."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world


def ranks(options):
    how = How(Mask(None, 0), 1 / math.sqrt(options.dim), None, "bhsd")
    lengths = Lengths([options.tokens], [options.tokens])
    return [Call(Loop(rank, options.ranks), how, options.layout, lengths) for rank in range(options.ranks)]


def cut(x, calls):
    """The shards of all ranks."""
    world, layout = calls[0].group.world, calls[0].layout
    places = [_shards.positions([x.shape[2]], world, rank, layout).to(x.device) for rank in range(world)]
    return [x.index_select(2, place) for place in places]


def forward(calls, q, k, v):
    results = []
    for call in calls:
        rank, world = call.group.rank, call.group.world
        parts = _attend.begin(q[rank], v[0].shape[3], call.sections("queries"), call.how)
        for step in range(world):
            source = (rank - step) % world
            _attend.attend(parts, k[source], v[source], call.sections("keys", source), [0], call.how)
        results.append(_attend.finish(parts, None, q[rank], v[0].shape[3], call.how))
    return results


def backward(calls, q, k, v, results, d_out):
    world = len(calls)
    sums = [[torch.zeros_like(x, dtype=torch.float32) for x in (k[n], v[n])] for n in range(world)]
    dq = []
    for call, (out, lse) in zip(calls, results):
        rank = call.group.rank
        rows = _attend.row_sums(d_out[rank], out, None, call.how)
        parts = _attend.differentiate(q[rank], d_out[rank], rows, lse, call.sections("queries"), call.how)
        for step in range(world):
            source = (rank - step) % world
            own = tuple(torch.zeros_like(x) for x in sums[source])
            of = call.sections("keys", source)
            _attend.add_gradients(parts, (k[source], v[source]), own, of, [0], call.how)
            for total, part in zip(sums[source], own):
                total.add_(part)
        dq.append(torch.cat([part.dq for part in parts], 2).to(q[rank].dtype))
    return dq, [tuple(x.to(k[0].dtype) for x in of) for of in sums]


def seconds(run, least=1.0):
    """The median time of a call, back to back, after as long a warm-up."""
    times, total = [], 0.0
    run()
    while total < 2 * least:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
        total += times[-1]
    return sorted(times[len(times) // 2 :])[len(times) // 4]


def error(out, q, k, v):
    """Relative RMS error of some rows against float64."""
    rows = torch.linspace(0, q.shape[2] - 1, 16).long().tolist()
    off, size = 0.0, 0.0
    for row in rows:
        scores = (q[:, :, row : row + 1].double() @ k[:, :, : row + 1].double().transpose(-1, -2)) / math.sqrt(q.shape[3])
        right = torch.softmax(scores, -1) @ v[:, :, : row + 1].double()
        off += (out[:, :, row : row + 1].double() - right).square().sum().item()
        size += right.square().sum().item()
    return math.sqrt(off / size)


def main():
    parser = argparse.ArgumentParser()
    for name, value in dict(ranks=8, tokens=65536, heads=16, kv_heads=16, dim=128).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    parser.add_argument("--layout", default="zigzag", choices=_shards.LAYOUTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    make = lambda heads: torch.randn(1, heads, options.tokens, options.dim, device="cuda", dtype=torch.bfloat16)
    q, k, v, d_out = (make(heads) for heads in (options.heads, options.kv_heads, options.kv_heads, options.heads))
    calls = ranks(options)
    shards = [cut(x, calls) for x in (q, k, v)]
    d_shards = cut(d_out, calls)
    whole = [x.detach().requires_grad_() for x in (q, k, v)]
    result = flashcore.attention(*whole, causal=True)
    found = forward(calls, *shards)
    joined = torch.cat([out for out, _ in found], 2)[:, :, _shards.order([options.tokens], options.ranks, options.layout)]
    run = dict(vars(options), error_unsplit=error(result.detach(), q, k, v), error_split=error(joined, q, k, v))
    run["forward_unsplit"] = seconds(lambda: flashcore.attention(q, k, v, causal=True))
    run["forward_split"] = seconds(lambda: forward(calls, *shards))
    run["backward_unsplit"] = seconds(lambda: torch.autograd.grad(result, whole, d_out, retain_graph=True))
    run["backward_split"] = seconds(lambda: backward(calls, *shards, found, d_shards))
    unsplit, split = (run[f"forward_{way}"] + run[f"backward_{way}"] for way in ("unsplit", "split"))
    print(json.dumps(run | {"share": unsplit / split}))


if __name__ == "__main__":
    main()
