"""Mixtures of experts on a GPU: layers as models have them, beside the same layer of torch's grouped products.

python bench/moe.py [--seconds 0.3] [--only LAYER]

Prints one JSON object per line: microseconds of both, replayed from graphs that go through several random routings, so that
weights do not come from the cache; bytes of the experts in use as a share of the copy bandwidth of the same run; and FLOPs as
a share of a dense product's rate.
"""

import argparse
import json

import flashcore
import torch
from timing import copy_bandwidth, replayed, seconds

# Hidden, intermediate, experts, experts of a token.
LAYERS = {
    "qwen3": (2048, 768, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
    "deepseek": (7168, 2048, 32, 8),
    "gpt-oss": (2880, 2880, 128, 4),
}
TOKENS = (1, 16, 128, 1024, 8192)
ROUTINGS = 8


def torch_layer(x, gate_up, down, ids, weights):
    """Sorted, gathered, two grouped products, a weighted sum."""
    flat = ids.flatten()
    order = torch.argsort(flat)
    ends = torch.cumsum(torch.histc(flat.float(), bins=len(down), min=0, max=len(down) - 1), 0, dtype=torch.int32)
    product = lambda rows, matrices: torch._grouped_mm(rows, matrices.transpose(-2, -1), offs=ends)
    gate, up = product(x[order // ids.shape[1]], gate_up).chunk(2, dim=-1)
    rows = product(torch.nn.functional.silu(gate) * up, down) * weights.flatten()[order, None].to(x.dtype)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return rows[back].view(*ids.shape, -1).sum(dim=1)


def flashcore_layer(x, gate_up, down, ids, weights):
    return flashcore.moe(x, gate_up, down, ids, weights)


def matrix_rate(least):
    """FLOP/s of a dense product of bfloat16 tensors."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / seconds(lambda: a @ b, least)


def routings(experts, top_k, tokens):
    """Experts of each token, as torch's layer and as FlashCore takes them."""
    draw = lambda: torch.rand(tokens, experts, device="cuda").topk(top_k, dim=1).indices
    return [draw() for _ in range(ROUTINGS)]


def timed(layer, x, matrices, ids, weights, least):
    """Seconds of a call, over all routings in one graph."""

    def every():
        for chosen in ids:
            layer(x, *matrices, chosen, weights)

    return seconds(replayed(every), least) / len(ids)


def cell(name, matrices, tokens, limits, least):
    hidden, inner, experts, top_k = LAYERS[name]
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weights = torch.full((tokens, top_k), 1 / top_k, device="cuda")
    ids = routings(experts, top_k, tokens)
    short = [chosen.int() for chosen in ids]
    ours, theirs = (layer(x, *matrices, ids[0], weights).float() for layer in (flashcore_layer, torch_layer))
    off = ((ours - theirs).norm() / theirs.norm()).item()
    theirs = timed(torch_layer, x, matrices, ids, weights, least)
    ours = timed(flashcore_layer, x, matrices, short, weights, least)
    touched = sum(len(chosen.unique()) for chosen in ids) / len(ids)
    moved = touched * 3 * hidden * inner * 2
    flops = tokens * top_k * 6 * hidden * inner
    line = dict(layer=name, tokens=tokens, torch_us=theirs * 1e6, us=ours * 1e6, ratio=theirs / ours, difference=off)
    return line | dict(of_bandwidth=moved / ours / limits[0], of_matrix_rate=flops / ours / limits[1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--only", default="", help="layers whose name contains this")
    options = parser.parse_args()
    torch.manual_seed(0)
    limits = copy_bandwidth(options.seconds), matrix_rate(options.seconds)
    print(json.dumps(dict(copy_bandwidth=limits[0], matrix_rate=limits[1])), flush=True)
    for name in (name for name in LAYERS if options.only in name):
        hidden, inner, experts, _ = LAYERS[name]
        shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
        matrices = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5 for shape in shapes]
        for tokens in TOKENS:
            print(json.dumps(cell(name, matrices, tokens, limits, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
