"""Hugging Face transformers: ``attn_implementation="flashcore"`` and ``experts_implementation="flashcore"``.

>>> from flashcore.integrations import transformers          # doctest: +SKIP
>>> transformers.register()                                   # doctest: +SKIP
>>> model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flashcore")  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

from .._attention import attention
from .._moe import moe

NAME = "flashcore"


def register(name: str = NAME) -> None:
    """Makes ``attn_implementation="flashcore"`` known to transformers (5.0 or later).

    Prefill, generation with dynamic and static caches, padding on either side, grouped heads, sliding windows, soft caps and
    sinks; training on the CPU. Masks of another form (chunks, prefixes, packed sequences), attention dropout, and training
    on a GPU raise NotImplementedError.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)
    _keep_from_hub(name)
    _register_experts(name)


def _register_experts(name: str) -> None:
    """Makes ``experts_implementation="flashcore"`` known, where transformers has such implementations."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)


def experts_forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """The experts of one layer: tokens x hidden in and out; for inference."""
    if not self.has_gate or getattr(self, "has_post_expert_norm", False):
        raise NotImplementedError("experts without gates, or with norms, are not supported; use experts_implementation='eager'")
    transposed, hidden = self.is_transposed, hidden_states.shape[-1]
    biases = (self.gate_up_proj_bias, self.down_proj_bias) if self.has_bias else None
    out = moe(
        hidden_states.reshape(-1, hidden),
        self.gate_up_proj,
        self.down_proj,
        top_k_index,
        top_k_weights,
        interleaved=not self.is_concatenated,
        transposed=transposed,
        biases=biases,
        **_activation(self),
    )
    return out.reshape(hidden_states.shape)


def _activation(module: Any) -> dict[str, Any]:
    """What joins gate and up, in the words of `moe`."""
    if hasattr(module, "alpha") and hasattr(module, "limit"):  # gpt-oss
        return {"activation": "clamped", "alpha": float(module.alpha), "limit": float(module.limit)}
    known = {"SiLUActivation": "swiglu", "SiLU": "swiglu", "GELUTanh": "geglu", "PytorchGELUTanh": "geglu"}
    kind = type(getattr(module, "act_fn", None)).__name__
    own = type(module)._apply_gate.__name__ != "_default_apply_gate"
    if own or kind not in known:
        raise NotImplementedError(f"experts with {kind} are not supported; use experts_implementation='eager' for this model")
    return {"activation": known[kind]}


def _keep_from_hub(name: str) -> None:
    """transformers takes every name with "flash" in it for a kernel that it has to load first; ours is here already."""
    from transformers import modeling_utils

    load = getattr(modeling_utils, "lazy_import_flash_attention", None)
    if load is None or name in getattr(load, "names", ()):
        return

    def load_others(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        return None if implementation == name else load(implementation, *args, **kwargs)

    load_others.names = (*getattr(load, "names", ()), name)  # type: ignore[attr-defined]
    modeling_utils.lazy_import_flash_attention = load_others


def forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Any | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """The attention of one layer: batch x heads x sequence x dim in, batch x sequence x heads x dim out."""
    if dropout:
        raise NotImplementedError("attention dropout is not supported; set attention_dropout=0.0 in the config, or call model.eval()")
    refused = [key for key in ("cu_seq_lens_q", "position_bias", "cache") if kwargs.get(key) is not None]
    if refused:
        raise NotImplementedError(f"{refused[0]} is not supported; use attn_implementation='sdpa' for this model")
    if attention_mask is not None and attention_mask.dim() == 4:
        return _by_whole_mask(query, key, value, attention_mask, scaling, softcap, s_aux)
    if attention_mask is not None and attention_mask.shape[-1] < key.shape[2]:  # a static cache, not yet full
        used = attention_mask.shape[-1]
        key, value = key[:, :, :used], value[:, :, :used]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None if sliding_window is None else (sliding_window - 1, None if not causal else 0)
    out = attention(
        query,
        key,
        value,
        causal=causal and query.shape[2] > 1,
        window=window,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        key_mask=attention_mask,
    )
    return out.transpose(1, 2).contiguous(), None


def _by_whole_mask(
    query: Any, key: Any, value: Any, mask: Any, scaling: float | None, softcap: float | None, sinks: Any
) -> tuple[Any, None]:
    """A mask that says everything, causal and window included."""
    from .._attention import run
    from .._options import Options, Values

    options, values = Options(scale=scaling, softcap=softcap), Values(sinks=sinks, mask=mask[..., : key.shape[2]])
    return run(query, key, value, options, values, False, None).transpose(1, 2).contiguous(), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: Any | None = None,
    allow_is_causal_skip: bool = True,
    config: Any | None = None,
    **kwargs: Any,
) -> Any | None:
    """What `forward` needs of a mask: None where causal and window say all, else which keys each batch entry uses.

    Masks of another form are made in full, so that `forward` computes them or refuses.
    """
    chunk = getattr(config, "attention_chunk_size", None)
    if (not allow_is_causal_skip and q_length > 1) or (chunk is not None and kv_length + kv_offset > chunk):
        from transformers.masking_utils import sdpa_mask

        known = {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": attention_mask, "config": config}
        return sdpa_mask(batch_size, q_length, kv_length, allow_is_causal_skip=False, **known, **kwargs)
    used = int(q_offset) + q_length - kv_offset
    if attention_mask is None:
        if used >= kv_length:
            return None
        import torch

        return torch.ones(batch_size, used, dtype=torch.bool, device=kwargs.get("device"))
    attention_mask = attention_mask[:, -kv_length:]
    if attention_mask.shape[1] == kv_length and attention_mask.all():
        return None
    return attention_mask
