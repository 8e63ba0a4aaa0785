"""The backend: SGLang's pool of keys and values looked at as pages, of one token each where SGLang has no others.

The pool of latent attention holds one row for each token, of which the values are the first features: keys are the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from flashcore import flash_attn_varlen_func, flash_attn_with_kvcache
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend


@dataclass
class Batch:
    """What the kernels of all layers need to know of a batch."""

    lengths: Any
    """Keys of each request, those of this step included."""
    table: Any
    """Pages of each request."""
    offsets: Any | None = None
    """Where the queries of each request start; None where each has one."""
    longest_query: int = 1
    longest_key: int = 0


class FlashCoreBackend(AttentionBackend):
    def __init__(self, runner: Any) -> None:
        super().__init__()
        refuse(runner)
        self.page = runner.page_size
        self.narrow = "float8" in str(runner.kv_cache_dtype)
        self.latent = bool(getattr(runner, "use_mla_backend", False))
        self.pool = runner.token_to_kv_pool
        self.tokens_of = runner.req_to_token_pool.req_to_token
        self.longest = runner.model_config.context_len
        self.device = runner.device
        self.invariant = bool(getattr(runner.server_args, "enable_deterministic_inference", False))
        self.batch: Batch | None = None
        self.captured: Batch | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        longest = int(forward_batch.seq_lens_cpu.max()) if len(forward_batch.seq_lens_cpu) else 0
        table = self.pages(forward_batch.req_pool_indices, longest)
        self.batch = Batch(forward_batch.seq_lens.to(torch.int32), table, longest_key=longest)
        if not forward_batch.forward_mode.is_decode_or_idle():
            ends = forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32)
            self.batch.offsets = torch.nn.functional.pad(ends, (1, 0))
            self.batch.longest_query = int(max(forward_batch.extend_seq_lens_cpu))

    def pages(self, requests: Any, longest: int) -> Any:
        """The pages of the first `longest` tokens of some requests."""
        tokens = self.tokens_of[requests, :longest]
        return (tokens[:, :: self.page] // self.page).to(torch.int32) if self.page > 1 else tokens.to(torch.int32)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        columns = -(-self.longest // self.page)
        lengths = torch.zeros(max_bs, dtype=torch.int32, device=self.device)
        table = torch.zeros(max_bs, columns, dtype=torch.int32, device=self.device)
        self.captured = Batch(lengths, table, longest_key=self.longest)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fills in what a captured graph reads when it runs."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise NotImplementedError("graphs are captured for decode alone; use another backend for this mode")
        size, kept = forward_batch.batch_size, self.captured
        kept.lengths[:size].copy_(forward_batch.seq_lens[:size])
        longest = self.longest if in_capture else int(forward_batch.seq_lens_cpu[:size].max())
        pages = self.pages(forward_batch.req_pool_indices[:size], longest)
        kept.table[:size, : pages.shape[1]].copy_(pages)
        self.batch = Batch(kept.lengths[:size], kept.table[:size], longest_key=self.longest)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, sinks: Any | None = None,
        **_: Any,
    ) -> Any:  # fmt: skip
        keys, values = self.stored(k, v, layer, forward_batch, save_kv_cache)
        batch, q = self.batch, q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        longest, where = (batch.longest_query, batch.longest_key), dict(seqused_k=batch.lengths, block_table=batch.table)
        starts = None
        if keys.shape[-1] != layer.qk_head_dim:  # prompts, before their keys are latents, behind nothing in the pool
            keys, values = (x.reshape(len(q), -1, dim).to(q.dtype) for x, dim in ((k, layer.qk_head_dim), (v, layer.v_head_dim)))
            starts, longest, where = batch.offsets, (batch.longest_query,) * 2, {}
        out = flash_attn_varlen_func(
            q, keys, values, batch.offsets, starts, *longest, sinks=sinks, batch_invariant=self.invariant, **where,
            **asked(layer), **self.factors(layer),
        )  # fmt: skip
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, sinks: Any | None = None,
        **_: Any,
    ) -> Any:  # fmt: skip
        keys, values = self.stored(k, v, layer, forward_batch, save_kv_cache)
        q = q.reshape(-1, 1, layer.tp_q_head_num, layer.qk_head_dim)
        where = dict(cache_seqlens=self.batch.lengths, page_table=self.batch.table, batch_invariant=self.invariant)
        out = flash_attn_with_kvcache(q, keys, values, sinks=sinks, **where, **asked(layer), **self.factors(layer))
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def stored(self, k: Any, v: Any, layer: Any, forward_batch: Any, save: bool) -> tuple[Any, Any]:
        """The pages of a layer, with the new keys and values in them."""
        if save and k is not None:
            scales = () if self.latent else (layer.k_scale, layer.v_scale)
            self.pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, *scales)
        pools = (x.view(-1, self.page, *x.shape[1:]) for x in self.pool.get_kv_buffer(layer.layer_id))
        return tuple(x.view(torch.float8_e4m3fn) if self.narrow and x.dtype == torch.uint8 else x for x in pools)

    def factors(self, layer: Any) -> dict[str, Any]:
        """What a layer's keys and values of 8 bits are multiplied by, where it says so."""
        if not self.narrow or self.latent or layer.k_scale is None:
            return {}
        return {"k_descale": layer.k_scale, "v_descale": layer.v_scale}


def asked(layer: Any) -> dict[str, Any]:
    """What a layer asks for."""
    if getattr(layer, "is_cross_attention", False) or "encoder" in str(getattr(layer, "attn_type", "")).lower():
        raise NotImplementedError("FlashCore's backend is for decoders; start the server with another one for this model")
    size = layer.sliding_window_size
    window = (size, 0) if size is not None and size >= 0 else (-1, -1)
    return dict(softmax_scale=layer.scaling, causal=True, window_size=window, softcap=layer.logit_cap or 0.0)


def refuse(runner: Any) -> None:
    """Says when the server starts what would fail later."""
    for told, what in (
        (getattr(runner, "is_hybrid_swa", False), "pools of their own for windows"),
        (getattr(runner.token_to_kv_pool, "use_dsa", False), "sparse latent attention"),
        (getattr(runner.server_args, "dcp_size", 1) > 1, "decode context parallelism"),
    ):
        if told:
            raise ValueError(f"FlashCore's backend does not support {what}; choose another --attention-backend")
    algorithm = getattr(runner, "spec_algorithm", None)
    if algorithm is not None and not algorithm.is_none():
        raise ValueError("FlashCore's backend does not support speculative decoding; choose another --attention-backend")
    if getattr(runner.token_to_kv_pool, "requires_physical_write_loc", False):
        raise ValueError("FlashCore's backend does not support unified pools; choose another --attention-backend")
    if "float8_e5m2" in str(runner.kv_cache_dtype):
        raise ValueError("FlashCore's backend does not support caches of fp8_e5m2; use --kv-cache-dtype fp8_e4m3 or auto")
