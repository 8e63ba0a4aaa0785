"""What the plugins rely on is there in the engines' sources, where an engine is installed or on the path; it is not imported.

Engines need a GPU and gigabytes beside them; their sources are enough to see that names, arguments and fields are as recorded:

    pip download --no-deps vllm sglang
    unzip 'vllm*.whl' 'vllm/v1/attention/*' 'vllm/model_executor/layers/*' && unzip 'sglang*.whl' 'sglang/srt/*'
    PYTHONPATH=. python -m pytest integrations/test_interfaces.py
"""

import ast
import importlib.util
from pathlib import Path

import pytest

FIELDS = "num_actual_tokens max_query_len query_start_loc max_seq_len seq_lens block_table causal"
IMPL = "num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap attn_type"
FORWARD = "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"


def module(name, path):
    """The parsed source of an engine's module, with its classes by their names."""
    spec = importlib.util.find_spec(name)
    found = [Path(folder) / path for folder in (spec.submodule_search_locations if spec else ())]
    source = next((file for file in found if file.exists()), None)
    if source is None:
        pytest.skip(f"{name} is not installed")
    tree = ast.parse(source.read_text())
    return tree, {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def arguments(scope, name):
    """The names of a function's arguments."""
    function = next(node for node in scope.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return [argument.arg for argument in function.args.args]


def fields(scope):
    """What a class declares: fields, and members of an enumeration."""
    declared = [node.target for node in scope.body if isinstance(node, ast.AnnAssign)]
    declared += [target for node in scope.body if isinstance(node, ast.Assign) for target in node.targets]
    return {target.id for target in declared if isinstance(target, ast.Name)}


def functions(scope):
    """The functions that a class defines."""
    return {node.name for node in scope.body if isinstance(node, ast.FunctionDef)}


def stored(scope):
    """The attributes that a class sets."""
    return {node.attr for node in ast.walk(scope) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}


def test_vllm_has_what_its_plugin_uses():
    _, classes = module("vllm", "v1/attention/backends/flash_attn.py")
    impl = classes["FlashAttentionImpl"]
    assert arguments(impl, "__init__")[1:10] == IMPL.split() and "sinks" in arguments(impl, "__init__")
    assert arguments(impl, "forward") == FORWARD.split()
    assert set(FIELDS.split()) <= fields(classes["FlashAttentionMetadata"])
    read = {"scale", "sliding_window", "logits_soft_cap", "alibi_slopes", "sinks", "num_heads", "head_size", "kv_cache_dtype", "attn_type"}
    assert read <= stored(impl)
    assert {"get_name", "get_impl_cls", "get_builder_cls"} <= functions(classes["FlashAttentionBackend"])
    tree, classes = module("vllm", "v1/attention/backends/registry.py")
    assert "register" in functions(classes["AttentionBackendEnum"])
    assert arguments(tree, "register_backend")[:2] == ["backend", "class_path"]
    assert {"FLASH_ATTN", "CUSTOM"} <= fields(classes["AttentionBackendEnum"])


MLA_IMPL = "num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap attn_type"
MLA_DECODE = "query_start_loc max_query_len max_seq_len"


def test_vllm_has_what_latent_attention_uses():
    _, classes = module("vllm", "v1/attention/backends/mla/flashattn_mla.py")
    backend, impl = classes["FlashAttnMLABackend"], classes["FlashAttnMLAImpl"]
    asked = "get_name get_impl_cls get_builder_cls supports_compute_capability supports_combination"
    assert set(asked.split()) <= functions(backend)
    assert "supported_kv_cache_dtypes" in fields(backend) and "supports_dcp" in fields(impl)
    assert arguments(impl, "__init__")[1:11] == [*MLA_IMPL.split(), "kv_sharing_target_layer_name"]
    assert arguments(impl, "forward_mqa") == "self q kv_c_and_k_pe_cache attn_metadata layer".split()
    assert set(MLA_DECODE.split()) <= fields(classes["FlashAttnMLADecodeMetadata"])
    assert "_schedule_decode" in functions(classes["FlashAttnMLAMetadataBuilder"])
    assert [base.id for node in impl.bases for base in ast.walk(node) if isinstance(base, ast.Name)][0] == "MLACommonImpl"
    _, classes = module("vllm", "model_executor/layers/attention/mla_attention.py")
    assert {"block_table", "seq_lens"} <= fields(classes["MLACommonDecodeMetadata"])
    assert {"kv_lora_rank", "scale", "kv_cache_dtype"} <= stored(classes["MLACommonBaseImpl"])
    assert {"dcp_world_size", "supports_quant_query_input"} <= stored(classes["MLACommonImpl"])


def test_vllm_has_what_prompts_of_latent_attention_use():
    tree, classes = module("vllm", "v1/attention/backends/mla/prefill/base.py")
    base = classes["MLAPrefillBackend"]
    assert arguments(base, "run_prefill_new_tokens") == "self q k v return_softmax_lse out output_scale".split()
    assert arguments(base, "run_prefill_context_chunk") == "self chunk q k v out".split()
    assert {"get_name", "supports_compute_capability", "supports_out"} <= functions(base)
    assert {"scale", "_prefill_metadata"} <= stored(base)
    tree, classes = module("vllm", "v1/attention/backends/mla/prefill/registry.py")
    assert arguments(tree, "register_mla_prefill_backend") == ["backend", "class_path"]
    assert "CUSTOM" in fields(classes["MLAPrefillBackendEnum"])
    _, classes = module("vllm", "model_executor/layers/attention/mla_attention.py")
    chunk = next(node for node in classes["MLACommonPrefillMetadata"].body if getattr(node, "name", "") == "ContextChunk")
    assert {"query_start_loc", "max_query_len", "cu_seq_lens", "max_seq_len"} <= fields(chunk)
    assert {"query_start_loc", "max_query_len"} <= fields(classes["MLACommonPrefillMetadata"])


def test_sglang_has_what_its_plugin_uses():
    _, classes = module("sglang", "srt/layers/attention/base_attn_backend.py")
    base = classes["AttentionBackend"]
    for name in ("forward_decode", "forward_extend"):
        assert arguments(base, name) == "self q k v layer forward_batch save_kv_cache".split()
    assert arguments(base, "init_forward_metadata_out_graph") == ["self", "forward_batch", "in_capture"]
    assert arguments(base, "init_cuda_graph_state") == ["self", "max_bs", "max_num_tokens"]
    tree, _ = module("sglang", "srt/layers/attention/attention_registry.py")
    assert arguments(tree, "register_attention_backend") == ["name"]
    tree, _ = module("sglang", "srt/server_args.py")
    names = {alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    names |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"add_attention_backend_choices", "add_deterministic_attention_backend_choices"} <= names
    _, classes = module("sglang", "srt/model_executor/forward_batch_info.py")
    batch = "req_pool_indices seq_lens out_cache_loc seq_lens_cpu extend_seq_lens extend_seq_lens_cpu forward_mode batch_size"
    assert set(batch.split()) <= fields(classes["ForwardBatch"])
    _, classes = module("sglang", "srt/mem_cache/memory_pool.py")
    written = arguments(classes["MHATokenToKVPool"], "set_kv_buffer")
    assert written[:2] == ["self", "layer"] and written[3:7] == ["cache_k", "cache_v", "k_scale", "v_scale"]
    latent = classes["MLATokenToKVPool"]
    assert arguments(latent, "set_kv_buffer")[:5] == "self layer loc_info cache_k cache_v".split()
    assert {"get_kv_buffer", "get_key_buffer", "get_value_buffer"} <= functions(latent) and "use_dsa" in stored(latent)
    _, classes = module("sglang", "srt/model_executor/model_runner.py")
    assert "use_mla_backend" in stored(classes["ModelRunner"])
    tree, _ = module("sglang", "srt/models/deepseek_common/attention_backend_handler.py")
    # A name that is not known goes the way of Triton's backend: prompts by heads, everything else by rows of latents.
    handler = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "get_handler")
    assert "cls._handlers.get('triton')" in ast.unparse(handler)
