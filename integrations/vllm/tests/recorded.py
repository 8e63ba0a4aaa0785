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


def install() -> types.ModuleType:
    """Puts it where `import vllm` finds it; returns the registry, whose `known` says what was registered."""
    names = ["vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"]
    modules = {name: types.ModuleType(name) for name in [*names, f"{names[-1]}.flash_attn", f"{names[-1]}.registry"]}
    flash, registry = modules[f"{names[-1]}.flash_attn"], modules[f"{names[-1]}.registry"]
    flash.FlashAttentionBackend, flash.FlashAttentionImpl = FlashAttentionBackend, FlashAttentionImpl
    modules[names[-1]].flash_attn = flash
    registry.known = {}
    registry.AttentionBackendEnum = enum.Enum("AttentionBackendEnum", ["FLASH_ATTN", "CUSTOM"])
    registry.register_backend = lambda backend, path: registry.known.update({backend.name: path})
    sys.modules.update(modules)
    return registry
