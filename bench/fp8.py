"""Attention in 8 bits on a GPU: prefill as a share of the 8-bit matrix rate, decode as a share of the copy bandwidth.

python bench/fp8.py [--fa3 FOLDER] [--seconds 0.3] [--only quantise|prefill|decode]

Prints one JSON object per line. Everything is timed back to back in one run. A line of quantise gives microseconds of q, k and
v as attention quantises them, and bytes that have to move in a second. A line of prefill gives TFLOP/s of E4M3 tensors with
three factors (values are turned in every call), of the same with values that are turned already (`ready`), of both with the
factors that attention makes (`blocks`, `blocks_ready`), of 16-bit tensors quantised on the way, of bfloat16, and of
FlashAttention-3.
"""

import argparse
import ctypes
import json
import lzma
import math
import os
import tempfile

import flashcore
import torch
from flashcore._quantise import BLOCK_ROWS
from timing import copy_bandwidth, replayed, seconds

TOKENS, FEATURES = 16384, 2048


def matrix_rate(least):
    """TFLOP/s of a dense product of 8-bit tensors."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    product = lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return 2 * n**3 / seconds(product, least) / 1e12


def fa3(folder):
    """FlashAttention-3's forward operator, or nothing."""
    if not folder:
        return None
    library = os.path.join(folder, "fa3.so")
    if not os.path.exists(library):
        library = os.path.join(tempfile.mkdtemp(), "fa3.so")
        with open(library, "wb") as file:
            file.write(lzma.open(os.path.join(folder, "fa3.so.xz")).read())
    ctypes.CDLL(os.path.join(folder, "libcudart.so.12"), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(library)
    return torch.ops.flash_attn_3.fwd


def attempt(run, least):
    """Seconds of a peer's call, or why it refuses."""
    try:
        return seconds(run, least), None
    except Exception as error:
        return None, str(error).splitlines()[0][:200]


def ways():
    """How attention quantises q, k and v."""
    rows_q, rows_k = BLOCK_ROWS
    return {
        "q": dict(per="block", rows=rows_q),
        "k": dict(per="block", rows=rows_k, centred=True),
        "v": dict(per="channel", turned=True),
    }


def quantising(options, sequence, dim):
    torch.manual_seed(0)
    shape = (TOKENS // sequence, sequence, FEATURES // dim, dim)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    line = dict(sequence=sequence, dim=dim)
    for name, way in ways().items():
        taken = seconds(replayed(lambda way=way: flashcore.quantise(x, layout="bshd", **way)), options.seconds)
        # Means and factors of features need all numbers before the first is rounded.
        reads = 1 if name == "q" else 2
        line[name + "_us"] = taken * 1e6
        line[name + "_bytes_per_second"] = x.numel() * (2 * reads + 1) / taken
    return line


def prefill(options, peer, sequence, dim, causal):
    torch.manual_seed(0)
    shape = (TOKENS // sequence, sequence, FEATURES // dim, dim)
    wide = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    quantised = [flashcore.quantise(x)[:2] for x in wide]
    narrow, factors = [x for x, _ in quantised], [factor.reshape(()) for _, factor in quantised]
    factors = [factor.item() for factor in factors]
    fine = [flashcore.quantise(x, layout="bshd", **way) for x, way in zip(wide, ways().values())]
    plain = flashcore.quantise(wide[2], layout="bshd", per="channel").values
    turned = flashcore.quantise(wide[2], layout="bshd", turned=True).values
    out = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    how = dict(causal=causal, layout="bshd", out=out)
    by_blocks = dict(factors=tuple(x.factors for x in fine), blocks=BLOCK_ROWS)
    calls = {
        "e4m3": lambda: flashcore.attention(*narrow, factors=factors, **how),
        "ready": lambda: flashcore.attention(*narrow[:2], turned, factors=factors, turned=True, **how),
        "blocks": lambda: flashcore.attention(fine[0].values, fine[1].values, plain, **by_blocks, **how),
        "blocks_ready": lambda: flashcore.attention(*(x.values for x in fine), turned=True, **by_blocks, **how),
        "quantised": lambda: flashcore.attention(*wide, quantise="e4m3", **how),
        "bf16": lambda: flashcore.attention(*wide, **how),
    }
    flops = 4 * TOKENS * sequence * FEATURES / (2 if causal else 1)
    line = dict(sequence=sequence, dim=dim, causal=causal)
    line |= {name: flops / seconds(call, options.seconds) / 1e12 for name, call in calls.items()}
    if peer:
        call = lambda: peer(*narrow, softmax_scale=1 / math.sqrt(dim), is_causal=causal)
        taken, why = attempt(call, options.seconds)
        line |= {"fa3": flops / taken / 1e12} if taken else {"fa3": None, "fa3_says": why}
    exact = flashcore.attention(*(x[:1, :, :2].float() for x in wide), causal=causal, layout="bshd")
    for name in calls:
        calls[name]()
        off = (out[:1, :, :2].float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        line[name + "_error"] = off.item()
    return line


def decode(options, batch, heads, kv_heads, keys, page, dim=128):
    torch.manual_seed(0)
    pages = batch * keys // page
    table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(batch, -1)
    lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
    q = torch.randn(batch, 1, heads, dim, device="cuda", dtype=torch.bfloat16)
    wide = [torch.randn(pages, page, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    narrow = [(x * 64).to(torch.float8_e4m3fn) for x in wide]
    scale = torch.full((batch, kv_heads), 1 / 64, device="cuda")
    how = dict(cache_seqlens=lengths, block_table=table, causal=True)
    calls = {
        "bf16": lambda: flashcore.flash_attn_with_kvcache(q, *wide, **how),
        "e4m3": lambda: flashcore.flash_attn_with_kvcache(q, *narrow, k_descale=scale, v_descale=scale, **how),
    }
    line = dict(batch=batch, heads=heads, kv_heads=kv_heads, keys=keys, page=page)
    for name, call in calls.items():
        taken = seconds(replayed(call), options.seconds)
        stored = wide if name == "bf16" else narrow
        line[name + "_us"] = taken * 1e6
        line[name + "_bytes_per_second"] = sum(x.numel() * x.element_size() for x in stored) / taken
    return line | {"ratio": line["bf16_us"] / line["e4m3_us"]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fa3", help="the folder of FlashAttention-3's library and CUDA runtime")
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--only", choices=("quantise", "prefill", "decode"))
    options = parser.parse_args()
    if options.only in (None, "quantise"):
        for dim in (128, 64):
            for sequence in (4096, 16384):
                print(json.dumps(quantising(options, sequence, dim)), flush=True)
    if options.only in (None, "prefill"):
        print(json.dumps({"matrix_rate": matrix_rate(options.seconds)}), flush=True)
        peer = fa3(options.fa3)
        for dim in (128, 64, 256):
            for sequence in (4096, 16384):
                for causal in (False, True):
                    print(json.dumps(prefill(options, peer, sequence, dim, causal)), flush=True)
        print(json.dumps({"matrix_rate": matrix_rate(options.seconds)}), flush=True)
    if options.only in (None, "decode"):
        print(json.dumps({"copy_bandwidth": copy_bandwidth(options.seconds)}), flush=True)
        for page in (16, 64):
            print(json.dumps(decode(options, 64, 32, 8, 8192, page)), flush=True)
            print(json.dumps(decode(options, 128, 64, 8, 2048, page)), flush=True)


if __name__ == "__main__":
    main()
