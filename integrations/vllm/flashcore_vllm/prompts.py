"""Prompts of latent attention, which vLLM computes head by head: its place for such backends, filled by FlashCore's kernels."""

from __future__ import annotations

from typing import Any

from flashcore import flash_attn_varlen_func
from vllm.v1.attention.backends.mla.prefill import base

from .backend import invariant


class FlashCoreMLAPrefillBackend(base.MLAPrefillBackend):
    """Keys and values may have any number of features, so that nothing is padded."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is not None and device_capability.major >= 8

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self, q: Any, k: Any, v: Any, return_softmax_lse: bool, out: Any = None, output_scale: Any = None
    ) -> Any:
        if output_scale is not None:
            raise NotImplementedError("FlashCore gives results of 16 bits here; choose another mla_prefill_backend")
        new = self._prefill_metadata
        starts, longest = (new.query_start_loc,) * 2, (new.max_query_len,) * 2
        return self.attend(q, k, v, *starts, *longest, causal=True, return_softmax_lse=return_softmax_lse, out=out)

    def run_prefill_context_chunk(self, chunk: Any, q: Any, k: Any, v: Any, out: Any = None) -> Any:
        starts, longest = (chunk.query_start_loc, chunk.cu_seq_lens), (chunk.max_query_len, chunk.max_seq_len)
        return self.attend(q, k, v, *starts, *longest, causal=False, return_softmax_lse=True, out=out)

    def attend(self, *tensors: Any, **options: Any) -> Any:
        return flash_attn_varlen_func(*tensors, softmax_scale=self.scale, batch_invariant=invariant(), **options)
