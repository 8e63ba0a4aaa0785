"""As much of SGLang as the plugin touches, as its sources of 2026-08 (cce0a12) have it: names, signatures, the pool."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace


class AttentionBackend:
    """The way of a call through `sglang.srt.layers.attention.base_attn_backend.AttentionBackend`."""

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        way = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return way(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


class Mode:
    def __init__(self, decode):
        self.decode = decode

    def is_decode(self):
        return self.decode

    is_decode_or_idle = is_decode


class Pool:
    """`MHATokenToKVPool` of one layer: tokens x heads x dim, keys and values apart."""

    def __init__(self, torch, slots, heads, dim, dtype):
        self.k, self.v = torch.zeros(2, slots, heads, dim).to(dtype)
        self.dtype = dtype

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        for cache, rows, scale in ((self.k, cache_k, k_scale), (self.v, cache_v, v_scale)):
            bits = cache.view(cache.dtype if cache.element_size() > 1 else self.bytes)
            rows = (rows if scale is None else rows / scale).to(self.dtype)
            bits[loc_info] = rows.view(bits.dtype)

    def get_kv_buffer(self, layer_id):
        return self.k, self.v


class LatentPool:
    """`MLATokenToKVPool` of one layer: a row for each token, of which the first `rank` features are the values."""

    use_dsa = False

    def __init__(self, torch, slots, rank, dim, dtype):
        self.rank, self.dtype, self.bytes = rank, dtype, torch.uint8
        self.rows = torch.zeros(slots, 1, dim).to(dtype)

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, layer_id_override=None):
        assert layer_id_override is None, "this pool takes no scales"
        bits = self.rows.view(self.dtype if self.rows.element_size() > 1 else self.bytes)
        bits[loc_info] = cache_k.to(self.dtype).view(bits.dtype)

    def get_kv_buffer(self, layer_id):
        return self.rows, self.rows[..., : self.rank]


def runner(torch, page, heads, dim, context, dtype=None, rank=None):
    dtype = dtype or torch.float32
    Pool.bytes = torch.uint8  # indexed writes know no 8-bit floats
    shape = (torch, 64 * page, heads if rank is None else rank, dim, dtype)
    pool = SimpleNamespace(req_to_token=torch.zeros(8, context, dtype=torch.int32))
    return SimpleNamespace(
        page_size=page,
        token_to_kv_pool=Pool(*shape) if rank is None else LatentPool(*shape),
        req_to_token_pool=pool,
        model_config=SimpleNamespace(context_len=context),
        device="cpu",
        kv_cache_dtype=dtype,
        use_mla_backend=rank is not None,
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        server_args=SimpleNamespace(enable_deterministic_inference=False),
    )


def install():
    names = ["sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention"]
    base, registry = f"{names[-1]}.base_attn_backend", f"{names[-1]}.attention_registry"
    modules = {name: types.ModuleType(name) for name in [*names, base, registry, "sglang.srt.server_args"]}
    modules[base].AttentionBackend = AttentionBackend
    modules[registry].ATTENTION_BACKENDS = known = {}
    modules[registry].register_attention_backend = lambda name: lambda make: known.update({name: make}) or make
    arguments = modules["sglang.srt.server_args"]
    arguments.choices = []
    arguments.add_attention_backend_choices = arguments.choices.extend
    modules["sglang.srt"].server_args = arguments
    sys.modules.update(modules)
    return modules[registry], arguments
