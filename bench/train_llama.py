"""A small Llama, trained from scratch on generated text with FlashCore's attention and with sdpa's, in turns.

python bench/train_llama.py [--steps 200] [--device cuda] [--tokens 2048] [--batch 8]

The text is made by a hidden Markov chain, so that there is something to learn and nothing to remember. Prints JSON: the
losses of every step, the milliseconds of a step, and how far apart the losses are beside two runs of sdpa that differ in
nothing but the seed of the text.
"""

import argparse
import json
import time

import torch
from flashcore.integrations import transformers as integration
from transformers import LlamaConfig, LlamaForCausalLM

SYMBOLS = 256


def text(options, seed):
    """Batches of symbols, each drawn from one of three that follow the one before."""
    generator = torch.Generator().manual_seed(seed)
    follows = torch.randint(0, SYMBOLS, (SYMBOLS, 3), generator=torch.Generator().manual_seed(0))
    choices = torch.randint(0, 3, (options.steps, options.batch, options.tokens + 1), generator=generator)
    symbols = torch.zeros_like(choices)
    for n in range(1, options.tokens + 1):
        symbols[:, :, n] = follows[symbols[:, :, n - 1], choices[:, :, n]]
    return symbols.to(options.device)


def model(options, attention):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SYMBOLS,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=options.tokens,
    )
    made = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    return made.to(options.device, torch.bfloat16 if options.device == "cuda" else torch.float32).train()


def train(options, attention, symbols):
    """Losses, and the milliseconds of a step once the first tenth has passed."""
    llama = model(options, attention)
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-3)
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    losses, warm = [], options.steps // 10
    for step, batch in enumerate(symbols):
        if step == warm:
            wait()
            begin = time.perf_counter()
        logits = llama(batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    wait()
    milliseconds = (time.perf_counter() - begin) / (options.steps - warm) * 1e3
    return [loss.item() for loss in losses], milliseconds


def apart(one, other):
    """Mean distance of the losses of the last half of the steps."""
    half = len(one) // 2
    return sum(abs(a - b) for a, b in zip(one[half:], other[half:])) / half


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("steps", 200), ("tokens", 2048), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    integration.register()
    symbols, others = text(options, 1), text(options, 2)
    found = {}
    for name, attention, of in (
        ("sdpa", "sdpa", symbols),
        ("flashcore", "flashcore", symbols),
        ("sdpa, other text", "sdpa", others),
    ):
        losses, milliseconds = train(options, attention, of)
        found[name] = {"losses": losses, "step_ms": milliseconds}
    losses = {name: result["losses"] for name, result in found.items()}
    found["apart"] = apart(losses["flashcore"], losses["sdpa"])
    found["noise"] = apart(losses["sdpa, other text"], losses["sdpa"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
