"""Times of expert layers as torch computes them, beside `gpu_moe time`: sorted, gathered, two `grouped_mm`, weighted sum.

`python bench/moe_torch.py [layer] [tokens,tokens,…]` prints one JSON object per line: replayed CUDA graphs over several random
routings, so that weights do not come from the cache. The last lines are the limits: a copy, and dense products of as many
operations.
"""

import json
import sys

import torch

LAYERS = {
    "qwen3": (2048, 768, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
    "deepseek": (7168, 2048, 32, 8),
    "gpt-oss": (2880, 2880, 128, 4),
}
TOKENS = [1, 16, 128, 1024, 8192]
ROUTINGS = 8

grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


def layer(x, gate_up, down, ids, weights):
    """Experts as transformers has them by `grouped_mm`."""
    experts, top_k = gate_up.shape[0], ids.shape[1]
    flat = ids.flatten()
    order = torch.argsort(flat)
    counts = torch.histc(flat.float(), bins=experts, min=0, max=experts - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    rows = x[order // top_k]
    gate, up = grouped_mm(rows, gate_up.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
    rows = grouped_mm(torch.nn.functional.silu(gate) * up, down.transpose(-2, -1), offs=ends)
    rows = rows * weights.flatten()[order, None].to(rows.dtype)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return rows[back].view(*ids.shape, -1).sum(dim=1)


def replayed(calls):
    """Microseconds of one call: the median of spans of replays of a graph of all of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def span(replays):
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / (replays * len(calls))

    once = span(2)
    replays = max(1, min(300, int(50_000 / (once * len(calls)))))
    spans = sorted(span(replays) for _ in range(5))
    del kept
    return spans[len(spans) // 2]


def limits(hidden, intermediate, experts, top_k, tokens):
    """Dense products of as many operations, in microseconds."""
    rows = tokens * top_k
    x, y = (torch.randn(rows, n, device="cuda", dtype=torch.bfloat16) for n in (hidden, intermediate))
    up = torch.randn(2 * intermediate, hidden, device="cuda", dtype=torch.bfloat16) * 0.02
    down = torch.randn(hidden, intermediate, device="cuda", dtype=torch.bfloat16) * 0.02
    return replayed([lambda: (x @ up.T, y @ down.T)] * 2)


def main():
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    tokens_of = [int(n) for n in sys.argv[2].split(",")] if len(sys.argv) > 2 else TOKENS
    torch.manual_seed(0)
    say = lambda **fields: print(json.dumps(fields), flush=True)
    source = torch.empty(1 << 29, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    micros = replayed([lambda: torch.add(source, 1, out=target)] * 2)  # a kernel: graphs leave copies to slower engines
    say(limit="copy", tb_s=round(2 * source.nbytes / micros / 1e6, 3))
    del source, target
    for name, (hidden, intermediate, experts, top_k) in LAYERS.items():
        if only not in name:
            continue
        torch.cuda.empty_cache()
        gate_up = torch.empty(experts, 2 * intermediate, hidden, device="cuda", dtype=torch.bfloat16)
        down = torch.empty(experts, hidden, intermediate, device="cuda", dtype=torch.bfloat16)
        gate_up.normal_(std=0.02), down.normal_(std=0.02)
        for tokens in tokens_of:
            x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
            ids = [torch.rand(tokens, experts, device="cuda").topk(top_k).indices for _ in range(ROUTINGS)]
            weights = torch.full((tokens, top_k), 0.125, device="cuda")
            calls = [lambda ids=ids: layer(x, gate_up, down, ids, weights) for ids in ids]
            say(layer=name, tokens=tokens, torch_us=round(replayed(calls), 2))
        if max(tokens_of) >= 8192:
            micros = limits(hidden, intermediate, experts, top_k, 8192)
            flops = 6 * 8192 * top_k * hidden * intermediate
            say(limit="dense", layer=name, us=round(micros, 1), tflops=round(flops / micros / 1e6, 1))


main()
