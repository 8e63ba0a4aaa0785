"""As much of vLLM as the plugin touches, as its sources of 2026-08 (a014e35) have it: names, signatures, metadata."""

from __future__ import annotations

import enum
import sys
import types
from dataclasses import dataclass
from typing import Any


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


@dataclass
class FlashAttentionMetadata:
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Any
    max_seq_len: int
    seq_lens: Any
    block_table: Any
    slot_mapping: Any = None
    use_cascade: bool = False
    causal: Any = True
    mm_prefix_query_range_tensor: Any = None
    rswa_prefix_lens: Any = None


class FlashAttentionImpl:
    dcp_world_size = 1

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
        sinks=None,
    ) -> None:
        import torch

        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes)
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.kv_cache_dtype, self.logits_soft_cap = kv_cache_dtype, logits_soft_cap or 0
        self.attn_type, self.sinks = attn_type, sinks

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):
        return "theirs" if attn_metadata is not None else output.fill_(0)


class FlashAttentionBackend:
    @staticmethod
    def get_name():
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls():
        return FlashAttentionImpl


@dataclass
class FlashAttnMLADecodeMetadata:
    block_table: Any
    seq_lens: Any
    query_start_loc: Any
    max_query_len: int
    max_seq_len: int


class MLACommonImpl:
    dcp_world_size = 1

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        logits_soft_cap,
        attn_type,
        kv_sharing_target_layer_name,
        kv_lora_rank,
        qk_rope_head_dim,
    ) -> None:
        self.num_heads, self.head_size, self.scale, self.kv_cache_dtype = num_heads, head_size, scale, kv_cache_dtype
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        self.supports_quant_query_input = True


class FlashAttnMLAImpl(MLACommonImpl):
    supports_dcp = True

    def __init__(self, *arguments, **named):
        raise AssertionError("FlashAttnMLA is not supported on this device")


class FlashAttnMLAMetadataBuilder:
    def _schedule_decode(self, num_reqs, cu_query_lens, max_query_len, seqlens, max_seq_len, causal, max_num_splits):
        return "theirs"


class FlashAttnMLABackend:
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]


class MLAPrefillBackend:
    def __init__(self, num_heads, scale, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, vllm_config):
        self.num_heads, self.scale = num_heads, scale

    def prepare_metadata(self, prefill_metadata):
        self._prefill_metadata = prefill_metadata


def registry_of(module: types.ModuleType, named: bool) -> None:
    """`AttentionBackendEnum` and `register_backend`, with or without backends that have names of their own."""
    module.known, members = {}, {"FLASH_ATTN": "", "CUSTOM": None}
    module.AttentionBackendEnum = known = enum.Enum("AttentionBackendEnum", members)

    def add(name, path):
        if name in known._member_map_:
            raise ValueError(f"Backend {name} already exists")
        member = object.__new__(known)
        member._name_, member._value_ = name, path
        known._member_map_[name] = member
        return member

    if named:
        known.register = add

    def register_backend(backend, path):
        backend = add(backend, path) if isinstance(backend, str) else backend
        module.known[backend.name] = path

    module.register_backend = register_backend


def install(named: bool = True) -> types.ModuleType:
    """Puts it where `import vllm` finds it; returns the registry, whose `known` says what was registered."""
    names = ["vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", "vllm.v1.attention.backends.mla"]
    of_mla, backends, prompts = f"{names[-1]}.flashattn_mla", names[-2], f"{names[-1]}.prefill"
    more = [f"{backends}.flash_attn", f"{backends}.registry", of_mla]
    more += [prompts, f"{prompts}.base", f"{prompts}.registry"] if named else []
    for name in [name for name in sys.modules if name.startswith(prompts)]:
        del sys.modules[name]
    modules = {name: types.ModuleType(name) for name in [*names, *more]}
    flash, registry = modules[f"{backends}.flash_attn"], modules[f"{backends}.registry"]
    flash.FlashAttentionBackend, flash.FlashAttentionImpl = FlashAttentionBackend, FlashAttentionImpl
    modules[backends].flash_attn = flash
    modules[names[-1]].flashattn_mla = modules[of_mla]
    for theirs in (FlashAttnMLABackend, FlashAttnMLAMetadataBuilder, FlashAttnMLAImpl):
        setattr(modules[of_mla], theirs.__name__, theirs)
    registry_of(registry, named)
    if named:
        base, places = modules[f"{prompts}.base"], modules[f"{prompts}.registry"]
        base.MLAPrefillBackend, modules[prompts].base, modules[prompts].registry = MLAPrefillBackend, base, places
        places.MLAPrefillBackendEnum = enum.Enum("MLAPrefillBackendEnum", ["FLASH_ATTN", "CUSTOM"])
        places.register_mla_prefill_backend = lambda place, path: registry.known.update({f"prompts, {place.name}": path})
    sys.modules.update(modules)
    return registry
