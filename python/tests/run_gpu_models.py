"""Models of transformers with random weights on a GPU: how far logits and gradients are from eager attention in float32.

python python/tests/run_gpu_models.py [--kinds NAME,...] [--seconds N] [--json FILE]

Each model runs in bfloat16 with eager attention, with PyTorch's and with FlashCore's; all are compared with eager attention
in float32. FlashCore passes where it is not further off than the worse of the others, with a quarter to spare. Tokens are
generated in float32 and must be those of eager attention.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

import torch
from test_transformers import MODELS, make

LARGER = dict(hidden_size=256, intermediate_size=384, num_attention_heads=8, num_hidden_layers=3, max_position_embeddings=1024)
SPARE = 1.25


def larger(kind):
    """A model of that kind with heads as real ones have them."""
    config = MODELS[kind]
    if kind == "gpt2":
        return config | dict(n_embd=256, n_head=4, n_layer=3, n_positions=1024)
    wide = {"head_dim": 64} if "head_dim" in config else {}
    window = {"sliding_window": 64} if "sliding_window" in config else {}
    heads = {"num_key_value_heads": 8} if kind == "deepseek_v3" else {}
    return config | LARGER | wide | window | heads


def models(kind):
    """Eager attention in float32, and whatever else there is in bfloat16, with the same weights."""
    MODELS[kind] = larger(kind)
    exact = make(kind, "eager").cuda()
    found = {"eager float32": exact}
    for name in ("eager", "sdpa", "flashcore"):
        if name == "sdpa" and kind == "gpt_oss":
            continue  # its sinks have no place in PyTorch's function
        model = make(kind, name).cuda()
        model.load_state_dict(exact.state_dict())
        found[name] = model.bfloat16()
    return found


def numbers(model, tokens, used):
    """Logits of the tokens in use, and all gradients of one training step."""
    model.train()
    model.zero_grad(set_to_none=True)
    # What stands before the first token in use sees nothing, which eager attention makes a mean of everything.
    judged = (used != 0) & (used.roll(1, 1) != 0)
    result = model(tokens, attention_mask=used, labels=tokens.masked_fill(~judged, -100), use_cache=False)
    result.loss.backward()
    grads = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
    return result.logits[used.bool()].detach().float(), grads


def judge(kind):
    torch.manual_seed(1)
    tokens = torch.randint(3, 128, (2, 300), device="cuda")
    used = torch.ones_like(tokens)
    used[0, :37] = 0
    found = models(kind)
    exact = numbers(found.pop("eager float32"), tokens, used)
    row = {}
    for name, model in found.items():
        got = numbers(model, tokens, used)
        row[name] = [((a - b).norm() / b.norm()).item() for a, b in zip(got, exact)]
    others = [row[name] for name in row if name != "flashcore"]
    bars = [SPARE * max(values) for values in zip(*others)]
    row["passed"] = all(error <= bar for error, bar in zip(row["flashcore"], bars))
    return row


def generate(kind):
    """Whether the tokens are those of eager attention, in float32."""
    torch.manual_seed(2)
    tokens = torch.randint(3, 128, (2, 40), device="cuda")
    used = torch.ones_like(tokens)
    used[0, :9] = 0
    options = dict(attention_mask=used, max_new_tokens=16, do_sample=False)
    wanted, got = (make(kind, name).cuda().generate(tokens, **options).tolist() for name in ("eager", "flashcore"))
    return wanted == got


def batches():
    """Whether continuous batching gives the tokens of plain generation."""
    from transformers import GenerationConfig

    model = make("llama", "flashcore").cuda()
    torch.manual_seed(3)
    prompts = [torch.randint(3, 128, (length,)).tolist() for length in (5, 17, 60)]
    how = dict(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    plain = [model.generate(torch.tensor([p], device="cuda"), **how)[0, len(p) :].tolist() for p in prompts]
    config = GenerationConfig(num_blocks=64, max_batch_tokens=128, **how)
    found = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    return [list(found[name].generated_tokens) for name in sorted(found)] == plain


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--kinds", default=",".join(MODELS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    end, found, failed = time.monotonic() + options.seconds, {}, 0
    print(f"{'relative error of logits / gradients':<38}{'eager':>20}{'sdpa':>20}{'flashcore':>20}")
    kinds = options.kinds.split(",")
    steps = [(kind, judge) for kind in kinds] + [(kind, generate) for kind in kinds]
    steps += [("continuous batching", lambda _: batches())] if "llama" in kinds else []
    for kind, step in steps:
        if time.monotonic() > end:
            break
        title = kind if step is not generate else f"{kind}, generated"
        try:
            result = step(kind)
        except Exception as error:
            result = {"passed": False, "error": f"{type(error).__name__}: {error}"}
            traceback.print_exc(limit=-4)
        found[title] = result
        passed = result if isinstance(result, bool) else result["passed"]
        failed += not passed
        cells = ["" for _ in range(3)]
        if isinstance(result, dict) and "flashcore" in result:
            cells = ["{:.2e} / {:.2e}".format(*result[n]) if n in result else "" for n in ("eager", "sdpa", "flashcore")]
        print(f"{title:<38}" + "".join(f"{cell:>20}" for cell in cells) + ("  passed" if passed else "  FAILED"), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
