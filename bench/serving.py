"""Decode and mixed batches on a GPU, beside cuDNN and FlashAttention-3: tensors are made there, calls replayed from graphs.

python bench/serving.py [--fa3 FOLDER] [--seconds 0.2] [--only dense|paged|random|mixed]

Prints one JSON object per line with microseconds of each. Dense caches are read again and again; paged ones take turns over
more memory than the GPU caches. `of_bandwidth` is the share of a copy's bandwidth at which keys and values were read.
"""

import argparse
import json
import sys

import flashcore
import torch
from timing import copy_bandwidth, replayed, seconds
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DIM = 128
SPREAD = 400 << 20
"""Bytes that paged caches take turns over."""
# Batch, heads of queries and of keys, keys, queries.
DENSE = [
    (1, 32, 8, 1024, 1),
    (1, 32, 8, 8192, 1),
    (1, 32, 8, 131072, 1),
    (8, 32, 8, 4096, 1),
    (64, 32, 8, 8192, 1),
    (128, 64, 8, 2048, 1),
    (32, 32, 32, 4096, 1),
    (16, 16, 1, 8192, 1),
    (8, 32, 8, 8192, 4),
]
PAGED = [(1, 32, 8, 8192), (64, 32, 8, 8192), (128, 64, 8, 2048)]
RANDOM = [(16, 32, 8, 8192), (64, 32, 8, 8192), (256, 32, 8, 8192)]
PAGES = (1, 16, 64)


def normal(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def attempt(run, least):
    """Microseconds of a call from a graph, or None where it refuses."""
    try:
        return seconds(replayed(run), least) * 1e6
    except Exception as error:
        print(str(error).splitlines()[0][:200], file=sys.stderr)
        return None


def line(kind, cell, times, moved=None, bandwidth=None):
    """A cell's times, and the ratio of the best peer's to ours."""
    peers = [us for name, us in times.items() if name in ("fa3", "cudnn") and us]
    found = dict(kind=kind, **cell, **times, ratio=min(peers) / times["us"] if peers else None)
    if moved:
        found["of_bandwidth"] = moved / (times["us"] / 1e6) / bandwidth
    print(json.dumps(found), flush=True)


def dense(options, fa3, bandwidth):
    for batch, heads, kv_heads, keys, queries in DENSE:
        q, k, v = normal(batch, queries, heads, DIM), normal(batch, keys, kv_heads, DIM), normal(batch, keys, kv_heads, DIM)
        causal, out = queries > 1, torch.empty_like(q)
        turned = [x.transpose(1, 2) for x in (q, k, v)]

        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(*turned, enable_gqa=heads != kv_heads)

        times = {"us": attempt(lambda: flashcore.attention(q, k, v, causal=causal, layout="bshd", out=out), options.seconds)}
        invariant = lambda: flashcore.attention(q, k, v, causal=causal, layout="bshd", out=out, batch_invariant=True)
        times["invariant"] = attempt(invariant, options.seconds)
        if fa3:
            times["fa3"] = attempt(lambda: fa3.forward(q, k, v, causal), options.seconds)
        if not causal:  # torch's causal mask starts at the first key
            times["cudnn"] = attempt(cudnn, options.seconds)
        moved = 2 * k.numel() * k.element_size()
        line("dense", dict(batch=batch, heads=heads, kv_heads=kv_heads, keys=keys, queries=queries), times, moved, bandwidth)


class Caches:
    """Pools of permuted pages, as many as memory should be spread over."""

    def __init__(self, lengths, kv_heads, page):
        self.lengths = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        needed = [-(-length // page) for length in lengths]
        self.moved = sum(lengths) * kv_heads * DIM * 4
        pages, sets = sum(needed), max(1, -(-SPREAD // self.moved))
        self.pools = [[normal(pages, page, kv_heads, DIM) for _ in range(2)] for _ in range(sets)]
        order, self.table, at = torch.randperm(pages, device="cuda", dtype=torch.int32), None, 0
        self.table = torch.zeros(len(lengths), max(needed), device="cuda", dtype=torch.int32)
        for row, count in enumerate(needed):
            self.table[row, :count] = order[at : at + count]
            at += count

    def every(self, call):
        """One call for each pool."""
        return lambda: [call(*pool) for pool in self.pools]


def over_pages(options, fa3, bandwidth, kind, cells, lengths_of):
    for batch, heads, kv_heads, keys in cells:
        q, lengths = normal(batch, 1, heads, DIM), lengths_of(batch, keys)
        for page in PAGES if kind == "random" else (*PAGES, keys):
            caches = Caches(lengths, kv_heads, page)
            cell = dict(batch=batch, heads=heads, kv_heads=kv_heads, keys=keys, page=page)
            line(kind, cell, decode(options, fa3 if page > 1 else None, q, caches), caches.moved, bandwidth)


def decode(options, fa3, q, caches):
    """Microseconds of a call over one pool."""
    how = dict(layout="bshd", page_table=caches.table, key_lengths=caches.lengths, out=torch.empty_like(q))
    calls = {
        "us": lambda k, v: flashcore.attention(q, k, v, **how),
        "invariant": lambda k, v: flashcore.attention(q, k, v, batch_invariant=True, **how),
    }
    if fa3:
        calls["fa3"] = lambda k, v: fa3.paged(q, k, v, caches.table, caches.lengths)
    times = {name: attempt(caches.every(call), options.seconds) for name, call in calls.items()}
    return {name: us and us / len(caches.pools) for name, us in times.items()}


def mixed(options, fa3, bandwidth):
    """One sequence in ten brings a part of a prompt, the others one query each."""
    batch, heads, kv_heads, keys, part = 64, 32, 8, 8192, 512
    lengths = torch.randint(part, keys + 1, (batch,)).tolist()
    queries = [part if n % 10 == 0 else 1 for n in range(batch)]
    ends = torch.tensor([0, *queries], device="cuda").cumsum(0, dtype=torch.int32)
    q = normal(sum(queries), heads, DIM)
    out = torch.empty_like(q)
    for page in PAGES[1:]:
        caches = Caches(lengths, kv_heads, page)
        how = dict(key_lengths=caches.lengths, page_table=caches.table, longest_query=part, longest_key=keys, causal=True)
        ours = caches.every(lambda k, v: flashcore.packed_attention(q, k, v, ends, out=out, **how))
        times = {"us": attempt(ours, options.seconds)}
        if fa3:
            extents = dict(cu_seqlens_q=ends, max_seqlen_q=part, max_seqlen_k=keys)
            theirs = caches.every(lambda k, v: fa3.paged(q, k, v, caches.table, caches.lengths, **extents))
            times["fa3"] = attempt(theirs, options.seconds)
        times = {name: us and us / len(caches.pools) for name, us in times.items()}
        line("mixed", dict(batch=batch, heads=heads, kv_heads=kv_heads, keys=keys, part=part, page=page), times)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fa3", help="the folder of FlashAttention-3's library and of fa3.py, which loads it")
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--only", choices=("dense", "paged", "random", "mixed"))
    options = parser.parse_args()
    fa3 = None
    if options.fa3:
        sys.path.insert(0, options.fa3)
        import fa3

        fa3.load(options.fa3)
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(options.seconds)
    print(json.dumps(dict(copy_bandwidth=bandwidth)), flush=True)
    wanted = lambda kind: options.only in (None, kind)
    if wanted("dense"):
        dense(options, fa3, bandwidth)
    if wanted("paged"):
        over_pages(options, fa3, bandwidth, "paged", PAGED, lambda batch, keys: [keys] * batch)
    if wanted("random"):
        over_pages(options, fa3, bandwidth, "random", RANDOM, lambda batch, keys: torch.randint(1, keys + 1, (batch,)).tolist())
    if wanted("mixed"):
        mixed(options, fa3, bandwidth)


if __name__ == "__main__":
    main()
