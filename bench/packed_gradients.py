"""Gradients of packed sequences on a GPU, beside FlashAttention-3's: what training without padding waits for.

python bench/packed_gradients.py [--fa3 FOLDER] [--seconds 0.05] [--out FILE]

Prints a line per cell with microseconds of each and the ratio of FlashAttention-3's time to ours; `off` is the largest difference
between both gradients, in parts of the largest gradient. FILE gets the same as one JSON object per line.
"""

import argparse
import json
import sys

import flashcore
import torch
from timing import seconds

TOKENS = 16384
FEATURES = 2048
"""Of all heads together."""


def random_lengths(count):
    """So many lengths that fill all tokens, the longest many times the shortest."""
    generator = torch.Generator().manual_seed(5)
    cuts = torch.randperm(TOKENS - 1, generator=generator)[: count - 1] + 1
    ends = [0, *sorted(cuts.tolist()), TOKENS]
    return [b - a for a, b in zip(ends, ends[1:])]


BATCHES = {"8x2048": [2048] * 8, "4x4096": [4096] * 4, "16 random": random_lengths(16), "64x256": [256] * 64}


class Cell:
    """Tensors of a batch, and its gradients by each."""

    def __init__(self, lengths, dtype, dim, kv_heads):
        heads = FEATURES // dim
        normal = lambda heads: torch.randn(TOKENS, heads, dim, device="cuda", dtype=dtype)
        self.inputs = [normal(heads), normal(kv_heads or heads), normal(kv_heads or heads)]
        self.d_out = normal(heads)
        self.longest = max(lengths)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        self.offsets = ends.to("cuda", torch.int32)

    def ours(self):
        inputs = [x.detach().requires_grad_() for x in self.inputs]
        out = flashcore.flash_attn_varlen_func(
            *inputs, self.offsets, self.offsets, self.longest, self.longest, causal=True
        )
        return lambda: torch.autograd.grad(out, inputs, self.d_out, retain_graph=True)

    def theirs(self, fa3, deterministic):
        offsets = dict(
            cu_seqlens_q=self.offsets,
            cu_seqlens_k=self.offsets,
            max_seqlen_q=self.longest,
            max_seqlen_k=self.longest,
        )
        out, lse = fa3.forward_lse(*self.inputs, True, **offsets)
        scale = self.inputs[0].shape[-1] ** -0.5

        def run():
            grads = [torch.empty_like(x) for x in self.inputs]
            options = dict(softmax_scale=scale, is_causal=True, deterministic=deterministic, **offsets)
            torch.ops.flash_attn_3.bwd(self.d_out, *self.inputs, out, lse, *grads, **options)
            return grads

        return run


def off(ours, theirs):
    """The largest difference, in parts of the largest number."""
    of = lambda a, b: ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()
    return max(of(a, b) for a, b in zip(ours, theirs))


def measure(cell, fa3, least):
    ours = cell.ours()
    times = {"us": seconds(ours, least) * 1e6}
    if fa3:
        for name, deterministic in (("fa3", False), ("fa3_deterministic", True)):
            try:
                run = cell.theirs(fa3, deterministic)
                times[name] = seconds(run, least) * 1e6
                if name == "fa3":
                    times["off"] = off(ours(), run())
                    times["ratio"] = times["fa3"] / times["us"]
            except Exception as error:
                print(f"{name}: {str(error).splitlines()[0][:200]}", file=sys.stderr)
    return times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fa3", help="the folder of FlashAttention-3's library and of fa3.py, which loads it")
    parser.add_argument("--seconds", type=float, default=0.05, help="for each time")
    parser.add_argument("--out", help="a file for the same as JSON")
    options = parser.parse_args()
    fa3 = None
    if options.fa3:
        sys.path.insert(0, options.fa3)
        import fa3

        fa3.load(options.fa3)
    file = open(options.out, "w") if options.out else None
    for dim, kv_heads in ((64, None), (128, None), (128, 4)):
        for dtype in (torch.bfloat16, torch.float16):
            for batch, lengths in BATCHES.items():
                found = dict(dim=dim, kv_heads=kv_heads or FEATURES // dim, dtype=str(dtype)[6:], batch=batch)
                found |= measure(Cell(lengths, dtype, dim, kv_heads), fa3, options.seconds)
                print("  ".join(f"{name} {x:.3g}" if isinstance(x, float) else str(x) for name, x in found.items()), flush=True)
                if file:
                    print(json.dumps(found), file=file, flush=True)


if __name__ == "__main__":
    main()
