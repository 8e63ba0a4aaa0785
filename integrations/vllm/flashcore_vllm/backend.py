"""The backend: vLLM's own for FlashAttention, with FlashCore's kernels where they compute what a layer asks for.

vLLM changes the insides of its backends every few releases. Metadata, graphs and the writing of caches are therefore left to
the classes that these derive from; only the call of the kernel is new.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from flashcore import flash_attn_varlen_func
from vllm.v1.attention.backends import flash_attn as theirs


class FlashCoreBackend(theirs.FlashAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks the name up among its own

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return FlashCoreImpl

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


class FlashCoreImpl(theirs.FlashAttentionImpl):
    """The attention of one layer.

    Over a cache of 8 bits queries stay what they are: the kernels widen keys and values.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if narrow(self):
            self.supports_quant_query_input = False
        self.invariant = invariant()

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        output_scale: Any | None = None,
        output_block_scale: Any | None = None,
    ) -> Any:
        scaled = output_scale is not None or output_block_scale is not None
        if scaled or not self.computes(attn_metadata) or query.element_size() == 1:
            rest = (output_scale, output_block_scale)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *rest)
        tokens = attn_metadata.num_actual_tokens
        k, v = views(kv_cache, self.head_size)
        factors = {}
        if narrow(self):
            k, v = (x if x.dtype == torch.float8_e4m3fn else x.view(torch.float8_e4m3fn) for x in (k, v))
            factors = {"k_descale": layer._k_scale, "v_descale": layer._v_scale}
        causal = attn_metadata.causal
        flash_attn_varlen_func(
            query[:tokens],
            k,
            v,
            attn_metadata.query_start_loc,
            None,
            attn_metadata.max_query_len,
            attn_metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=causal,
            window_size=window(self.sliding_window, causal),
            softcap=self.logits_soft_cap or 0.0,
            alibi_slopes=slopes(self, query.device),
            block_table=attn_metadata.block_table,
            seqused_k=attn_metadata.seq_lens,
            sinks=self.sinks,
            **factors,
            batch_invariant=self.invariant,
            out=output[:tokens].view(tokens, self.num_heads, -1),
        )
        return output

    def computes(self, metadata: Any) -> bool:
        """Whether FlashCore takes the call; profiling runs and what is rare are the other backend's."""
        if metadata is None or not isinstance(getattr(metadata, "causal", True), bool):
            return False
        # What begins alike is theirs to compute once, unless their kernels would need queries of 8 bits. Releases from 0.33
        # on have no such batches.
        if getattr(metadata, "use_cascade", False) and not narrow(self):
            return False
        rare = ("mm_prefix_query_range_tensor", "rswa_prefix_lens")
        if any(getattr(metadata, name, None) is not None for name in rare):
            return False
        decoder = str(getattr(self.attn_type, "value", self.attn_type)) == "decoder"
        known = narrow(self) or not self.kv_cache_dtype.startswith("fp8")
        return decoder and known and getattr(self, "dcp_world_size", 1) <= 1


def invariant() -> bool:
    """Whether vLLM asks for results that do not depend on what else is in a batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


def narrow(impl: Any) -> bool:
    """Whether a layer's cache is E4M3."""
    return impl.kv_cache_dtype in ("fp8", "fp8_e4m3")


def views(kv_cache: Any, head_size: int) -> tuple[Any, Any]:
    """Keys and values as pages x rows of a page x heads x dim, whatever the release calls its cache."""
    if kv_cache.dim() == 4:  # from 0.26 on: pages x heads x rows x both
        return kv_cache.transpose(1, 2).split(head_size, dim=-1)
    if kv_cache.shape[0] == 2 and kv_cache.shape[1] != 2:  # up to 0.22
        return kv_cache.unbind(0)
    return kv_cache.unbind(1)


def window(sides: tuple[int, int] | None, causal: bool) -> tuple[int, int]:
    """The window of a layer, which without causality reaches as far forwards as back."""
    if sides is None:
        return (-1, -1)
    return (sides[0], sides[0]) if sides[0] >= 0 and sides[1] == 0 and not causal else tuple(sides)


def slopes(impl: Any, device: Any) -> Any | None:
    """ALiBi's slopes where the queries are, moved there once."""
    if impl.alibi_slopes is not None and impl.alibi_slopes.device != device:
        impl.alibi_slopes = impl.alibi_slopes.to(device)
    return impl.alibi_slopes
