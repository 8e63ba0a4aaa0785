"""Mixtures of experts: every framework, every option, against a plain loop in float64."""

import importlib.util

import numpy as np
from harness import ALL, TOLERANCE, Skip, cases, raises

import flashcore

T, H, I, E, K = 7, 32, 24, 5, 2


def layer(seed=0, transposed=False):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((T, H))
    gate_up = rng.standard_normal((E, 2 * I, H)) / np.sqrt(H)
    down = rng.standard_normal((E, H, I)) / np.sqrt(I)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype("int64")
    weights = rng.random((T, K)) + 0.1
    return x, gate_up, down, ids, weights


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def expected(x, gate_up, down, ids, weights, join=lambda gate, up: gate * sigmoid(gate) * up, interleaved=False, biases=None):
    out = np.zeros_like(x)
    for token, slot in np.ndindex(ids.shape):
        expert = ids[token, slot]
        if not 0 <= expert < len(gate_up):
            continue
        h = gate_up[expert] @ x[token] + (0 if biases is None else biases[0][expert])
        gate, up = (h[0::2], h[1::2]) if interleaved else np.split(h, 2)
        y = down[expert] @ join(gate, up) + (0 if biases is None else biases[1][expert])
        out[token] += weights[token, slot] * y
    return out


def near(framework, dtype, got, wanted):
    error = np.abs(framework.read(got) - wanted).max()
    assert error < 4 * TOLERANCE[dtype], error


@cases(framework=ALL, dtype=["float32", "float16", "bfloat16"], index=["int32", "int64"])
def test_tokens_go_where_they_are_sent(framework, dtype, index):
    framework.need()
    arrays = layer()
    x, gate_up, down, weights = (framework.make(arrays[n], dtype) for n in (0, 1, 2, 4))
    read = [framework.read(tensor) for tensor in (x, gate_up, down, weights)]
    if getattr(framework, "device", "cpu") == "cuda" and dtype == "float32":
        return
    out = flashcore.moe(x, gate_up, down, framework.numbers(arrays[3], index), weights)
    near(framework, dtype, out, expected(*read[:3], arrays[3], read[3]))


@cases(framework=ALL)
def test_experts_elsewhere_add_nothing(framework):
    framework.need()
    x, gate_up, down, ids, weights = layer(1)
    x, gate_up, down = (framework.make(array, "float16") for array in (x, gate_up, down))
    weights32 = framework.make(weights, "float32")
    read = [framework.read(tensor) for tensor in (x, gate_up, down, weights32)]
    out = flashcore.moe(x, gate_up, down, framework.numbers(ids + 2, "int32"), weights32, experts=(3, 9))
    near(framework, "float16", out, expected(*read[:3], ids - 1, read[3]))


@cases(framework=ALL)
def test_options_of_models(framework):
    framework.need()
    x, gate_up, down, ids, weights = layer(2)
    rng = np.random.default_rng(3)
    biases = rng.standard_normal((E, 2 * I)), rng.standard_normal((E, H))
    make = lambda array: framework.make(array, "float16")
    turned = [make(np.ascontiguousarray(array.transpose(0, 2, 1))) for array in (gate_up, down)]
    x, made, weights16 = make(x), [make(bias) for bias in biases], make(weights)
    read = framework.read
    out = flashcore.moe(
        x, *turned, framework.numbers(ids, "int32"), weights16,
        interleaved=True, transposed=True, biases=tuple(made), activation="clamped", alpha=1.5, limit=1.0,
    )
    join = lambda gate, up: (np.clip(up, -1, 1) + 1) * np.minimum(gate, 1) * sigmoid(1.5 * np.minimum(gate, 1))
    turned = [read(tensor).transpose(0, 2, 1) for tensor in turned]
    wanted = expected(read(x), *turned, ids, read(weights16), join, True, [read(bias) for bias in made])
    near(framework, "float16", out, wanted)


@cases(framework=ALL)
def test_logits_choose_experts(framework):
    framework.need()
    x, gate_up, down, _, _ = layer(4)
    logits = np.random.default_rng(5).permuted(np.tile(np.arange(E) * 0.5 - 1, (T, 1)), axis=1)
    x, gate_up, down = (framework.make(array, "float16") for array in (x, gate_up, down))
    made = framework.make(logits, "float32")
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :K]
    chosen = np.take_along_axis(np.exp(logits), ids, 1)
    read = [framework.read(tensor) for tensor in (x, gate_up, down)]
    out = flashcore.moe(x, gate_up, down, logits=made, top_k=K)
    near(framework, "float16", out, expected(*read, ids, chosen / np.exp(logits).sum(1, keepdims=True)))
    out = flashcore.moe(x, gate_up, down, logits=made, top_k=K, renormalise=True)
    near(framework, "float16", out, expected(*read, ids, chosen / chosen.sum(1, keepdims=True)))
    out = flashcore.moe(x, gate_up, down, logits=made, top_k=K, scoring="sigmoid", scale=2.5)
    near(framework, "float16", out, expected(*read, ids, 2.5 * np.take_along_axis(sigmoid(logits), ids, 1)))


def test_what_is_wrong_is_said():
    x, gate_up, down, ids, weights = (array.astype("float32") for array in layer())
    ids = ids.astype("int32")
    with raises(ValueError, "give ids and weights"):
        flashcore.moe(x, gate_up, down)
    with raises(ValueError, "ids has 1 dimensions"):
        flashcore.moe(x, gate_up, down, ids[0], weights)
    with raises(ValueError, "down has 32 columns but 24"):
        flashcore.moe(x, gate_up, np.ones((E, H, H), "float32"), ids, weights)
    with raises(ValueError, "expert ids: 4 values where 14"):
        flashcore.moe(x, gate_up, down, ids[:2], weights)
    with raises(ValueError, "3 are needed: experts, rows, columns"):
        flashcore.moe(x, gate_up[0], down, ids, weights)
    with raises(ValueError, 'activation is "relu"'):
        flashcore.moe(x, gate_up, down, ids, weights, activation="relu")
    with raises(ValueError, "x shares memory with out"):
        flashcore.moe(x, gate_up, down, ids, weights, out=x)


def test_a_shared_expert_is_added():
    x, gate_up, down, ids, weights = (array.astype("float32") for array in layer())
    ids = ids.astype("int32")
    shared = flashcore.moe(x, gate_up, down, ids, weights, shared_expert=(gate_up[0], down[0]))
    routed = flashcore.moe(x, gate_up, down, ids, weights)
    alone = flashcore.moe(x, gate_up[:1], down[:1], np.zeros((T, 1), "int32"), np.ones((T, 1), "float32"))
    assert np.abs(shared - routed - alone).max() < 1e-4


def test_vllm_arguments():
    x, gate_up, down, ids, weights = (array.astype("float32") for array in layer())
    ids = ids.astype("int32")
    wanted = flashcore.moe(x, gate_up, down, ids, weights)
    assert np.array_equal(flashcore.fused_experts(x, gate_up, down, weights, ids), wanted)
    flashcore.fused_experts(x, gate_up, down, weights, ids, inplace=True)
    assert np.array_equal(x, wanted)


SMALL = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    vocab_size=128, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MODELS = {
    "qwen3_moe": SMALL | dict(num_experts=4, moe_intermediate_size=32),
    "mixtral": SMALL | dict(num_local_experts=4),
    "gpt_oss": SMALL | dict(num_local_experts=4, sliding_window=8),
}


@cases(kind=list(MODELS))
def test_models_in_transformers_give_the_logits_of_eager_experts(kind):
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise Skip(f"{name} is not installed")
    import torch
    import transformers

    from flashcore.integrations import transformers as integration

    integration.register()
    transformers.logging.set_verbosity_error()
    logits = []
    for experts in ("eager", "flashcore"):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **MODELS[kind])
        how = dict(attn_implementation="eager", experts_implementation=experts)
        model = transformers.AutoModelForCausalLM.from_config(config, **how).eval()
        assert model.config._experts_implementation == experts
        with torch.no_grad():
            logits.append(model(torch.randint(3, 128, (2, 40))).logits)
    assert (logits[0] - logits[1]).abs().max() < 2e-6
