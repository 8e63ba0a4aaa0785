"""Latent attention (MLA): vLLM's own backend by FlashAttention, with FlashCore's kernels over the latents of its cache.

Metadata, graphs, the writing of caches and prompts that are computed head by head are left to the classes that these derive
from. What was for Hopper and caches of 16 bits alone runs on every GPU from Ampere on, over E4M3 too.
"""

from __future__ import annotations

from typing import Any

import torch
from flashcore import flash_attn_varlen_func
from vllm.v1.attention.backends.mla import flashattn_mla as theirs

from . import LATENT
from .backend import invariant, narrow


class FlashCoreMLABackend(theirs.FlashAttnMLABackend):
    supported_kv_cache_dtypes = [*theirs.FlashAttnMLABackend.supported_kv_cache_dtypes, "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return LATENT

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return FlashCoreMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return FlashCoreMLAImpl

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_combination(cls, *_: Any, **__: Any) -> str | None:
        return None


class FlashCoreMLAMetadataBuilder(theirs.FlashAttnMLAMetadataBuilder):
    def _schedule_decode(self, *_: Any, **__: Any) -> None:
        """Kernels read lengths when they run: there is nothing to plan before."""


class FlashCoreMLAImpl(theirs.FlashAttnMLAImpl):
    """The attention of one layer; queries over a cache of 8 bits stay what they are."""

    supports_dcp = False

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Any, sliding_window: Any,
        kv_cache_dtype: str, logits_soft_cap: Any, attn_type: Any, kv_sharing_target_layer_name: Any, **latent: Any,
    ) -> None:  # fmt: skip
        given = (alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name)
        # Past the class before, which asks for FlashAttention-3.
        super(theirs.FlashAttnMLAImpl, self).__init__(num_heads, head_size, scale, num_kv_heads, *given, **latent)
        if any((alibi_slopes, sliding_window, logits_soft_cap)) or getattr(attn_type, "value", attn_type) != "decoder":
            raise NotImplementedError("FLASHCORE_MLA is for decoders without slopes, windows and caps; choose another backend")
        if getattr(self, "dcp_world_size", 1) > 1:
            raise NotImplementedError("FLASHCORE_MLA does not split caches over ranks; choose another backend")
        self.supports_quant_query_input = False
        self.invariant = invariant()

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any) -> tuple[Any, None]:
        decode, rows, factors = attn_metadata.decode, kv_c_and_k_pe_cache.unsqueeze(-2), {}
        if narrow(self):
            rows = rows if rows.dtype == torch.float8_e4m3fn else rows.view(torch.float8_e4m3fn)
            factors = {"k_descale": layer._k_scale, "v_descale": layer._k_scale}
        out = flash_attn_varlen_func(
            torch.cat(q, -1) if isinstance(q, tuple) else q,
            rows,
            rows[..., : self.kv_lora_rank],
            decode.query_start_loc,
            None,
            max(decode.max_query_len, 1),
            decode.max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            block_table=decode.block_table,
            seqused_k=decode.seq_lens,
            batch_invariant=self.invariant,
            **factors,
        )
        return out, None
