"""Hugging Face transformers with random weights: what `attn_implementation="flashcore"` gives beside eager attention."""

import importlib.util
import itertools
from unittest.mock import patch

import flashcore
import numpy as np
from harness import Skip, cases, has_cuda

SMALL = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=128, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GPT2 = dict(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=256, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
WINDOW = dict(head_dim=16, sliding_window=8)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
MODELS = {
    "llama": SMALL,
    "qwen3": SMALL | dict(head_dim=16),
    "mistral": SMALL | dict(sliding_window=8),
    "gemma2": SMALL | WINDOW | dict(query_pre_attn_scalar=16),
    "gemma3_text": SMALL | WINDOW | dict(query_pre_attn_scalar=16),
    "llama4_text": SMALL | dict(head_dim=16, attention_chunk_size=8, intermediate_size_mlp=96, num_local_experts=2),
    "gpt_oss": SMALL | WINDOW | dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": SMALL | EXPERTS | dict(head_dim=16, num_experts=4),
    "phi3": SMALL,
    "gpt2": GPT2,
    "deepseek_v3": SMALL
    | EXPERTS
    | LATENT
    | dict(num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1),
}
TOLERANCE = 2e-6


def need_transformers():
    """Both libraries, with FlashCore registered."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise Skip(f"{name} is not installed")
    import torch
    import transformers

    from flashcore.integrations import transformers as integration

    integration.register()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    return torch, transformers


def make(kind, implementation, **more):
    """The same model, whatever computes its attention."""
    _, transformers = need_transformers()
    config = transformers.AutoConfig.for_model(kind, **MODELS[kind] | more)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def both(model, config):
    """A model of that class with eager attention, and the same with ours."""
    made = []
    for implementation in ("eager", "flashcore"):
        torch, _ = need_transformers()
        made.append(model._from_config(config, attn_implementation=implementation).eval())
    torch.manual_seed(1)
    return made


def pair(kind, **more):
    import torch

    models = make(kind, "eager", **more), make(kind, "flashcore", **more)
    assert models[1].config._attn_implementation == "flashcore"
    torch.manual_seed(1)
    return *models, torch.randint(3, 128, (2, 40))


@cases(kind=list(MODELS), padding=["none", "left", "right"])
def test_logits_are_those_of_eager_attention(kind, padding):
    eager, ours, tokens = pair(kind)
    import torch

    used = torch.ones_like(tokens)
    used[0, {"none": slice(0), "left": slice(7), "right": slice(30, None)}[padding]] = 0
    with torch.no_grad():
        wanted, got = (model(tokens, attention_mask=used).logits[used.bool()] for model in (eager, ours))
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)


@cases(kind=["llama", "mistral", "gemma2", "gpt_oss"], cache=["dynamic", "static", "padded"])
def test_the_same_tokens_are_generated(kind, cache):
    eager, ours, tokens = pair(kind)
    options = dict(max_new_tokens=12, do_sample=False)
    if cache == "static":
        options["cache_implementation"] = "static"
    if cache == "padded":
        options["attention_mask"] = tokens.new_ones(tokens.shape)
        options["attention_mask"][0, :9] = 0
    assert ours.generate(tokens, **options).tolist() == eager.generate(tokens, **options).tolist()


@cases(kind=list(MODELS))
def test_gradients_are_those_of_eager_attention(kind):
    eager, ours, tokens = pair(kind)
    import torch

    for model in (eager, ours):
        model.train()(tokens, labels=tokens).loss.backward()
    for (name, wanted), got in zip(eager.named_parameters(), ours.parameters()):
        assert (wanted.grad is None) == (got.grad is None), name
        if wanted.grad is not None:
            torch.testing.assert_close(got.grad, wanted.grad, atol=TOLERANCE, rtol=0)


@cases(kind=["llama", "mistral", "gpt2"], packed=[False, True])
def test_training_leaves_out_the_weights_of_the_mask(kind, packed):
    """Eager attention that leaves out the same weights has the same loss and gradients."""
    name = "attn_pdrop" if kind == "gpt2" else "attention_dropout"
    eager, ours, tokens = pair(kind, **{name: 0.1})
    import torch

    seeds = {model: itertools.count(100) for model in ("eager", "ours")}
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None]
    if packed:
        tokens, how = tokens[:1], dict(position_ids=positions)
    else:
        how = {}

    def drop(weights, p=0.5, training=True, inplace=False):
        if not training or not p:
            return weights
        whole = flashcore.dropout_mask(p, next(seeds["eager"]), 2, *weights.shape[1:])
        # The sequences of a packed batch are numbered, and so are the tokens of each.
        at = (np.array([0] * 15 + [1] * 25), positions[0].numpy())
        mask = whole[at[0][:, None], :, at[1][:, None], at[1][None]].transpose(2, 0, 1)[None] if packed else whole
        return weights * torch.tensor(mask) / (1 - p)

    draw = lambda *_: torch.tensor([next(seeds["ours"])])
    with patch.object(torch.nn.functional, "dropout", drop), patch.object(flashcore._frameworks.Torch, "seed", draw):
        losses = [model.train()(tokens, labels=tokens, use_cache=False, **how).loss for model in (eager, ours)]
    assert [next(count) for count in seeds.values()] == [102, 102]
    torch.testing.assert_close(*losses, atol=TOLERANCE, rtol=0)
    for loss in losses:
        loss.backward()
    for (name, wanted), got in zip(eager.named_parameters(), ours.parameters()):
        torch.testing.assert_close(got.grad, wanted.grad, atol=TOLERANCE, rtol=0, msg=name)


def test_a_model_learns_with_dropout():
    _, ours, tokens = pair("llama", attention_dropout=0.1)
    import torch

    optimizer, losses = torch.optim.AdamW(ours.train().parameters(), 3e-3), []
    for _ in range(30):
        loss = ours(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses


def test_learned_biases_of_scores_and_their_gradients():
    torch, transformers = need_transformers()
    sizes = dict(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=128, dropout_rate=0.0)
    config = transformers.T5Config(decoder_start_token_id=0, **sizes)
    eager, ours = both(transformers.T5ForConditionalGeneration, config)
    tokens = torch.randint(3, 128, (2, 12))
    used = torch.ones_like(tokens)
    used[0, 8:] = 0
    with torch.no_grad():
        wanted, got = (model(tokens, attention_mask=used, labels=tokens).logits for model in (eager, ours))
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
    for model in (eager, ours):
        model(tokens, attention_mask=used, labels=tokens).loss.backward()
    for (name, wanted), got in zip(eager.named_parameters(), ours.parameters()):
        torch.testing.assert_close(got.grad, wanted.grad, atol=TOLERANCE, rtol=0, msg=name)
    how = dict(attention_mask=used, max_new_tokens=6, do_sample=False)
    assert ours.generate(tokens, **how).tolist() == eager.generate(tokens, **how).tolist()


@cases(kind=["FalconModel", "BloomModel"])
def test_models_with_attention_of_their_own_keep_it(kind):
    torch, transformers = need_transformers()
    model = getattr(transformers, kind)
    sizes = dict(hidden_size=32, num_attention_heads=4, n_head=4, num_hidden_layers=1, n_layer=1, vocab_size=50)
    eager, ours = both(model, model.config_class(**sizes))
    assert ours.config._attn_implementation == {"FalconModel": "sdpa", "BloomModel": "eager"}[kind]
    tokens = torch.randint(3, 50, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens)[0], eager(tokens)[0], atol=TOLERANCE, rtol=0)


@cases(kind=["llama", "mistral", "gemma2"], told=["positions", "offsets"])
def test_packed_sequences_do_not_see_each_other(kind, told):
    eager, ours, tokens = pair(kind)
    import torch

    lengths = (15, 25)
    packed = torch.cat([tokens[n, :length] for n, length in enumerate(lengths)])[None]
    options = dict(position_ids=torch.cat([torch.arange(length) for length in lengths])[None], use_cache=False)
    if told == "offsets":
        offsets = torch.tensor([0, 15, 40], dtype=torch.int32)
        longest = torch.tensor(25)
        options |= dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=longest, max_length_k=longest)
    with torch.no_grad():
        alone = torch.cat([eager(tokens[n : n + 1, :length]).logits[0] for n, length in enumerate(lengths)])
        together = ours(packed, **options).logits[0]
    torch.testing.assert_close(together, alone, atol=TOLERANCE, rtol=0)


def test_continuous_batching_gives_the_tokens_of_plain_generation():
    _, ours, tokens = pair("llama")
    import transformers

    if not hasattr(ours, "generate_batch"):
        raise Skip("this transformers has no continuous batching")
    if has_cuda("torch"):
        # It makes streams wherever there is a GPU.
        ours, tokens = ours.cuda(), tokens.cuda()
    prompts = [tokens[0, :5].tolist(), tokens[1, :17].tolist(), tokens[0, 9:20].tolist()]
    how = dict(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    plain = [ours.generate(tokens.new_tensor([prompt]), **how)[0, len(prompt) :].tolist() for prompt in prompts]
    # Without sizes the cache would take most of the memory that is free. Their place has changed.
    sizes = dict(num_blocks=64, max_batch_tokens=64)
    of_cache = getattr(transformers, "ContinuousBatchingConfig", None)
    options = dict(generation_config=transformers.GenerationConfig(**how, **({} if of_cache else sizes)))
    options |= dict(continuous_batching_config=of_cache(**sizes)) if of_cache else {}
    found = ours.generate_batch(inputs=prompts, progress_bar=False, **options)
    assert [list(found[name].generated_tokens) for name in sorted(found)] == plain
