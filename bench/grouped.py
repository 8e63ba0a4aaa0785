"""Grouped products on a GPU, as a mixture of experts and its gradients have them, beside torch's.

python bench/grouped.py [--seconds 0.1] [--tokens 4096] [--only LAYER]

Prints one JSON object per line: TFLOP/s of both, and by how much results differ. `step` is a layer with its gradients, made of
either one's products.
"""

import argparse
import json

import flashcore
import torch
from moe import LAYERS, torch_layer
from timing import replayed, seconds


def ends_of(rows, groups):
    """Where groups end, none of them quite like another."""
    cuts = torch.randint(0, rows, (groups - 1,), device="cuda", dtype=torch.int32).sort().values
    even = torch.arange(1, groups, device="cuda", dtype=torch.int32) * (rows // groups)
    last = torch.tensor([rows], device="cuda", dtype=torch.int32)
    # Between all alike and all at random; torch wants groups that divide depth to end at multiples of eight.
    return torch.cat([(3 * even + cuts) // 4 // 8 * 8, last]).int()


def forms(rows, hidden, inner, groups):
    """Name, factors and offsets of products, and how many floating-point operations each is."""
    new = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5
    x, d, weights, ends = new(rows, hidden), new(rows, 2 * inner), new(groups, 2 * inner, hidden), ends_of(rows, groups)
    each = x[: rows // groups * groups].view(groups, -1, hidden)
    yield "rows", x, weights.mT, ends
    yield "rows, weights across", d, weights, ends
    yield "depth", d.t(), x, ends
    yield "columns", weights, x.t(), ends
    yield "batch", each, weights.mT, None


def cell(name, form, a, b, ends, flops, least):
    line = dict(layer=name, form=form)
    ours = flashcore.grouped_mm(a, b, offs=ends)
    line["tflops"] = flops / seconds(replayed(lambda: flashcore.grouped_mm(a, b, offs=ends)), least) / 1e12
    try:
        theirs = torch._grouped_mm(a, b, offs=ends)
        line["torch_tflops"] = flops / seconds(replayed(lambda: torch._grouped_mm(a, b, offs=ends)), least) / 1e12
    except RuntimeError as error:
        return line | dict(torch=str(error).splitlines()[0][:80])
    difference = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
    return line | dict(ratio=line["tflops"] / line["torch_tflops"], difference=difference)


def step(name, tokens, least):
    """Milliseconds of a layer with the gradients of all that it takes."""
    hidden, inner, experts, top_k = LAYERS[name]
    new = lambda *shape: (torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5).requires_grad_()
    tensors = new(tokens, hidden), new(experts, 2 * inner, hidden), new(experts, hidden, inner)
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k, dim=1).indices
    weights = torch.full((tokens, top_k), 1 / top_k, device="cuda", requires_grad=True)
    d_out = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    times = {}
    for who, layer in (("", flashcore.moe), ("torch_", torch_layer)):
        run = lambda: torch.autograd.grad(layer(*tensors, ids, weights), (*tensors, weights), d_out)
        times[f"{who}ms"] = seconds(run, least) * 1e3
    return dict(layer=name, form="step", tokens=tokens) | times | dict(ratio=times["torch_ms"] / times["ms"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--only", default="", help="layers whose name contains this")
    options = parser.parse_args()
    torch.manual_seed(0)
    for name, (hidden, inner, groups, top_k) in LAYERS.items():
        if options.only not in name:
            continue
        rows = options.tokens * top_k
        flops = 2 * rows * hidden * 2 * inner
        for form, a, b, ends in forms(rows, hidden, inner, groups):
            print(json.dumps(cell(name, form, a, b, ends, flops, options.seconds)), flush=True)
        print(json.dumps(step(name, options.tokens, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
