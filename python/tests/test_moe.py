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
    with raises(ValueError, "pass ids and weights"):
        flashcore.moe(x, gate_up, down)
    with raises(ValueError, "ids has 1 dimensions"):
        flashcore.moe(x, gate_up, down, ids[0], weights)
    with raises(ValueError, "down has 32 columns but 24"):
        flashcore.moe(x, gate_up, np.ones((E, H, H), "float32"), ids, weights)
    with raises(ValueError, "ids: 4 values where 14"):
        flashcore.moe(x, gate_up, down, ids[:2], weights)
    with raises(ValueError, "3 are needed: experts, rows, columns"):
        flashcore.moe(x, gate_up[0], down, ids, weights)
    with raises(ValueError, 'activation is "relu"'):
        flashcore.moe(x, gate_up, down, ids, weights, activation="relu")
    with raises(ValueError, "groups and scale go with"):
        flashcore.moe(x, gate_up, down, logits=np.ones((T, E), "float32"), top_k=K, scale=2.5)
    with raises(TypeError, "gate_up is f16 but x is f32"):
        flashcore.moe(x, gate_up.astype("float16"), down, ids, weights)
    with raises(TypeError, "x is float64"):
        flashcore.moe(x.astype("float64"), gate_up, down, ids, weights)
    with raises(ValueError, "x shares memory with out"):
        flashcore.moe(x, gate_up, down, ids, weights, out=x)


def test_a_shared_expert_is_added():
    x, gate_up, down, ids, weights = (array.astype("float32") for array in layer())
    ids = ids.astype("int32")
    shared = flashcore.moe(x, gate_up, down, ids, weights, shared_expert=(gate_up[0], down[0]))
    routed = flashcore.moe(x, gate_up, down, ids, weights)
    alone = flashcore.moe(x, gate_up[:1], down[:1], np.zeros((T, 1), "int32"), np.ones((T, 1), "float32"))
    assert np.abs(shared - routed - alone).max() < 1e-4


def test_a_shared_expert_lies_as_the_others_do():
    x, gate_up, down, ids, weights = (array.astype("float32") for array in layer())
    ids = ids.astype("int32")
    routed = (x, gate_up.swapaxes(1, 2), down.swapaxes(1, 2), ids, weights)
    wanted = flashcore.moe(x, gate_up, down, ids, weights, shared_expert=(gate_up[0], down[0]))
    for shared in ((gate_up[0].T, down[0].T), tuple(tensor[:1] for tensor in routed[1:3])):
        assert np.abs(flashcore.moe(*routed, transposed=True, shared_expert=shared) - wanted).max() < 1e-5
    order = "with transposed gate_up is experts x hidden x 2.intermediate and down experts x intermediate x hidden"
    with raises(ValueError, f"^shared_expert gate_up has 48 rows but 32 are needed to match x; {order}, those of a shared expert too"):
        flashcore.moe(*routed, transposed=True, shared_expert=(gate_up[0], down[0]))
    with raises(ValueError, f"^down has 5 columns but 32 are needed to match x; {order}"):
        flashcore.moe(*routed[:2], down[:, :24, :5], *routed[3:], transposed=True)
    with raises(ValueError, "^gate_up is 5x32x47: with transposed it needs .* an even number of columns"):
        flashcore.moe(x, routed[1][..., 1:], *routed[2:], transposed=True)


def test_vllm_arguments():
    x, gate_up, down, ids, weights = (array.astype("float32") for array in layer())
    ids = ids.astype("int32")
    wanted = flashcore.moe(x, gate_up, down, ids, weights)
    assert np.array_equal(flashcore.fused_experts(x, gate_up, down, weights, ids), wanted)
    where = np.array([3, -1, 0, 1], "int32")  # the experts here that numbers 0 to 3 mean
    mapped = flashcore.fused_experts(x, gate_up, down, weights, ids, global_num_experts=4, expert_map=where)
    local = np.where(ids < 4, where[np.minimum(ids, 3)], -1).astype("int32")
    assert np.array_equal(mapped, flashcore.moe(x, gate_up, down, local, weights))
    oss = flashcore.fused_experts(x, gate_up, down, weights, ids, activation="swigluoai")
    assert np.array_equal(oss, flashcore.moe(x, gate_up, down, ids, weights, activation="clamped", interleaved=True))
    with raises(NotImplementedError, "use one of silu"):
        flashcore.fused_experts(x, gate_up, down, weights, ids, activation="relu2_no_mul")
    with raises(NotImplementedError, "apply_router_weight_on_input"):
        flashcore.fused_experts(x, gate_up, down, weights, ids, apply_router_weight_on_input=True)
    with raises(ValueError, "give expert_map"):
        flashcore.fused_experts(x, gate_up, down, weights, ids, global_num_experts=64)
    flashcore.fused_experts(x, gate_up, down, weights, ids, inplace=True)
    assert np.array_equal(x, wanted)


def need_torch(*more):
    for name in ("torch", *more):
        if importlib.util.find_spec(name) is None:
            raise Skip(f"{name} is not installed")


def eager(torch, x, gate_up, down, ids, weights, biases=None, clamped=False):
    """The layer as operations that torch differentiates."""
    out = torch.zeros_like(x)
    for token, slot in np.ndindex(tuple(ids.shape)):
        expert = int(ids[token, slot])
        if not 0 <= expert < len(gate_up):
            continue
        h = gate_up[expert] @ x[token] + (0 if biases is None else biases[0][expert])
        gate, up = (h[0::2].clamp(max=1.0), h[1::2].clamp(-1, 1) + 1) if clamped else h.chunk(2)
        h = gate * torch.sigmoid((1.5 if clamped else 1) * gate) * up
        y = down[expert] @ h + (0 if biases is None else biases[1][expert])
        out = torch.cat([out[:token], (out[token] + weights[token, slot] * y)[None], out[token + 1 :]])
    return out


@cases(clamped=[False, True], by=["moe", "grouped products"])
def test_gradients_are_those_of_torch(clamped, by):
    need_torch()
    import torch

    from flashcore import _torch_moe

    arrays = layer(6)
    rng = np.random.default_rng(7)
    floats = [*arrays[:3], arrays[4], rng.standard_normal((E, 2 * I)), rng.standard_normal((E, H))]
    ids = torch.tensor(arrays[3])
    ids[0, 1], ids[2, 0] = 99, ids[2, 1]  # one that is nowhere, and one twice
    d_out = torch.tensor(rng.standard_normal((T, H)), dtype=torch.float32)
    results = []
    for own in (False, True):
        x, gate_up, down, weights, *biases = (torch.tensor(array, dtype=torch.float32, requires_grad=True) for array in floats)
        pair = tuple(biases) if clamped else None
        if own:
            options = dict(activation="clamped", alpha=1.5, limit=1.0, interleaved=True) if clamped else {}
            call = _torch_moe.differentiable
            if by != "moe":  # what a GPU gets
                _torch_moe.differentiable = _torch_moe.by_grouped_products
            try:
                out = flashcore.moe(x, gate_up, down, ids, weights, biases=pair, **options)
            finally:
                _torch_moe.differentiable = call
        else:
            out = eager(torch, x, gate_up, down, ids, weights, pair, clamped)
        out.backward(d_out)
        used = [x, gate_up, down, weights, *(biases if clamped else [])]
        results.append([out.detach(), *(tensor.grad for tensor in used)])
    for wanted, got in zip(*results):
        assert wanted.shape == got.shape
        assert (wanted - got).abs().max() < 2e-4 * (1 + wanted.abs().max()), (wanted - got).abs().max()


def test_gradients_of_transposed_weights_and_of_a_shared_expert():
    need_torch()
    import torch

    arrays = [torch.tensor(array, dtype=torch.float32) for array in layer(8)]
    x, gate_up, down, ids, weights = arrays
    ids = ids.long()
    grads = []
    for transposed in (False, True):
        made = [tensor.transpose(1, 2).contiguous() if transposed else tensor.clone() for tensor in (gate_up, down)]
        shared = [tensor[1].clone() for tensor in made]
        leaves = [tensor.requires_grad_() for tensor in (x.clone(), *made, *shared)]
        out = flashcore.moe(*leaves[:3], ids, weights, transposed=transposed, shared_expert=tuple(leaves[3:]))
        out.sum().backward()
        grads.append([leaf.grad.transpose(-1, -2) if transposed and n else leaf.grad for n, leaf in enumerate(leaves)])
    for plain, turned in zip(*grads):
        assert torch.allclose(plain, turned, atol=1e-5)
    # A weight that no token goes to has a gradient of exactly 0.
    only = torch.zeros(T, 1, dtype=torch.long)
    gate_up.requires_grad_()
    flashcore.moe(x, gate_up, down, only, weights[:, :1].contiguous()).sum().backward()
    assert gate_up.grad[0].abs().sum() > 0 and not gate_up.grad[1:].any()


def test_what_has_no_gradients_says_so():
    need_torch()
    import torch

    x, gate_up, down, ids, weights = (torch.tensor(array, dtype=torch.float32) for array in layer())
    x.requires_grad_()
    with raises(NotImplementedError, "choose experts in torch"):
        flashcore.moe(x, gate_up, down, logits=torch.zeros(T, E), top_k=K)
    with raises(RuntimeError, "out= cannot be combined with gradients"):
        flashcore.moe(x, gate_up, down, ids.int(), weights, out=torch.empty(T, H))


SMALL = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    vocab_size=128, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MODELS = {
    "qwen3_moe": SMALL | dict(num_experts=4, moe_intermediate_size=32),
    "mixtral": SMALL | dict(num_local_experts=4),
    "gpt_oss": SMALL | dict(num_local_experts=4, sliding_window=8),
    "olmoe": SMALL | dict(num_experts=4),
    "deepseek_v3": SMALL
    | dict(
        moe_intermediate_size=32, n_routed_experts=8, n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1,
        q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=4, head_dim=8,
    ),
}


@cases(kind=["qwen3_moe", "mixtral"])
def test_models_in_transformers_train_as_with_eager_experts(kind):
    need_torch("transformers")
    import torch
    import transformers

    from flashcore.integrations import transformers as integration

    integration.register()
    transformers.logging.set_verbosity_error()
    grads = []
    for experts in ("eager", "flashcore"):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **MODELS[kind])
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation=experts)
        tokens = torch.randint(3, 128, (2, 24))
        model.train()(tokens, labels=tokens).loss.backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, wanted in grads[0].items():
        assert wanted is not None and grads[1][name] is not None, name
        assert (wanted - grads[1][name]).abs().max() < 1e-5, name


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
