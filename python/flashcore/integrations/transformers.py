"""Hugging Face transformers: ``attn_implementation="flashcore"`` and ``experts_implementation="flashcore"``.

>>> from flashcore.integrations import transformers          # doctest: +SKIP
>>> transformers.register()                                   # doctest: +SKIP
>>> model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flashcore")  # doctest: +SKIP
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from .._attention import attention, packed_attention
from .._moe import moe
from .._sdpa import by_torch

NAME = "flashcore"


def register(name: str = NAME) -> None:
    """Makes ``attn_implementation="flashcore"`` known to transformers (5.0 or later; gpt-oss needs a newer one).

    Prefill, generation with dynamic and static caches, continuous batching, padding on either side, packed sequences
    (``cu_seq_lens_q``), grouped heads, sliding and chunked windows, soft caps, sinks and learned biases; training, with
    ``attention_dropout`` too.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, forward)
    AttentionInterface.register(f"paged|{name}", forward)
    AttentionMaskInterface.register(name, mask)
    _keep_from_hub(name)
    _knows_chunks(name)
    _fits_every_model(name)
    _register_experts(name)


def _register_experts(name: str) -> None:
    """Makes ``experts_implementation="flashcore"`` known, where transformers has such implementations."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)


def experts_forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """The experts of one layer: tokens x hidden in and out."""
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

    _pass_over(modeling_utils, "lazy_import_flash_attention", name, None, lambda implementation=None: implementation)


def _knows_chunks(name: str) -> None:
    """It refuses to every such name chunks that are shorter than the keys; `mask` says them, and `forward` computes them."""
    from transformers import masking_utils

    of_config = lambda config=None: getattr(config, "_attn_implementation", None)
    _pass_over(masking_utils, "is_flash_attention_requested", name, False, of_config)


def _pass_over(module: Any, function: str, name: str, answer: Any, asked: Any) -> None:
    """Lets a function of transformers, where there is one, answer so where `asked` finds our name in its first argument."""
    others = getattr(module, function, None)
    if others is None or name in getattr(others, "names", ()):
        return

    def answering(*args: Any, **kwargs: Any) -> Any:
        return answer if asked(*args[:1]) == name else others(*args, **kwargs)

    answering.names = (*getattr(others, "names", ()), name)  # type: ignore[attr-defined]
    setattr(module, function, answering)


def _fits_every_model(name: str) -> None:
    """Some models name the flash kernels that know their sinks and replace all others; ours knows them too.

    Models, and parts of models, whose attention cannot be exchanged keep their own.
    """
    from transformers import PreTrainedModel

    check = PreTrainedModel._check_and_adjust_attn_implementation
    if name in getattr(check, "names", ()):
        return

    def check_others(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation in (name, f"paged|{name}"):
            return attn_implementation if _exchanges(type(self)) else _own_attention(type(self))
        return check(self, attn_implementation, *args, **kwargs)

    check_others.names = (*getattr(check, "names", ()), name)  # type: ignore[attr-defined]
    PreTrainedModel._check_and_adjust_attn_implementation = check_others


def _exchanges(model: type) -> bool:
    """Whether a model looks its attention up by name."""
    from transformers import PreTrainedModel

    if getattr(model, "_supports_attention_backend", False):
        return True
    supported = any(getattr(model, f"_supports_{kind}", False) for kind in ("sdpa", "flash_attn", "flash_attn_2"))
    own = (base for base in model.__mro__ if issubclass(base, PreTrainedModel) and base is not PreTrainedModel)
    return supported and any(hasattr(sys.modules.get(base.__module__), "ALL_ATTENTION_FUNCTIONS") for base in own)


def _own_attention(model: type) -> str:
    """The best attention that a model has of its own."""
    from transformers.utils import logging

    kept = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    words = f"{model.__name__} has attention of its own that cannot be exchanged; it keeps attn_implementation='{kept}'."
    logging.get_logger(__name__).warning_once(words)
    return kept


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
    if kwargs.get("block_table") is not None:
        raise NotImplementedError("block_table is not supported; use attn_implementation='sdpa' for this model")
    if kwargs.get("position_bias") is not None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        return _by_bias(query, key, value, kwargs["position_bias"], attention_mask, causal, scaling, dropout)
    if attention_mask is not None and attention_mask.dim() == 4 and kwargs.get("cu_seq_lens_q") is None:
        kwargs |= _restarts(module, query, kwargs.get("position_ids"))
    if kwargs.get("cu_seq_lens_q") is not None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        window = getattr(module, "sliding_window", None) if sliding_window is None else sliding_window
        options = dict(causal=causal, window=_window(window, causal), scale=scaling, softcap=softcap, sinks=s_aux)
        options |= dict(dropout=dropout)
        return _packed(module, query, key, value, options, window, **kwargs)
    if attention_mask is not None and attention_mask.dim() == 4:
        return _by_whole_mask(query, key, value, attention_mask, scaling, softcap, s_aux, dropout)
    if attention_mask is not None and attention_mask.shape[-1] < key.shape[2]:  # a static cache, not yet full
        used = attention_mask.shape[-1]
        key, value = key[:, :, :used], value[:, :, :used]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = attention(
        query,
        key,
        value,
        causal=causal and query.shape[2] > 1,
        window=_window(sliding_window, causal),
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        key_mask=attention_mask,
        dropout=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


def _restarts(module: Any, query: Any, positions: Any | None) -> dict[str, Any]:
    """Where sequences start that are packed in one batch entry, told by positions that restart."""
    shape = (1, query.shape[2])
    packed = positions is not None and tuple(positions.shape) == shape == (query.shape[0], query.shape[2])
    if not packed or getattr(module.config, "attention_chunk_size", None) is not None:
        return {}
    import torch

    starts = (positions[0].diff() != 1).nonzero().flatten() + 1
    if not len(starts):
        return {}
    offsets = torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), positions.shape[1])]).int()
    longest = int(offsets.diff().max())
    return dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=longest, max_length_k=longest)


def _window(size: int | None, causal: bool) -> tuple[int, int | None] | None:
    """A window of transformers, which counts a query's own key."""
    return (size - 1, 0 if causal else None) if size else None


def _packed(
    module: Any, query: Any, key: Any, value: Any, options: dict[str, Any], window: int | None, cu_seq_lens_q: Any,
    cu_seq_lens_k: Any, cache: Any | None = None, **kwargs: Any,
) -> tuple[Any, None]:  # fmt: skip
    """Sequences one after another, 1 x heads x tokens x dim: packed batches of training, and continuous batching."""
    longest = [kwargs.get(f"max_length_{of}", kwargs.get(f"max_seqlen_{of}")) for of in "qk"]
    if cache is not None:
        key, value = _cached(cache, module.layer_idx, key, value, cu_seq_lens_k, kwargs)
    if isinstance(cu_seq_lens_k, dict):
        kind = "sliding_attention" if window else "full_attention"
        cu_seq_lens_k, longest[1] = cu_seq_lens_k[kind], longest[1][kind]
    tokens = [tensor[0].transpose(0, 1) if tensor.dim() == 4 else tensor for tensor in (query, key, value)]
    bounds = [None if bound is None else int(bound) for bound in longest]
    out = packed_attention(
        *tokens, cu_seq_lens_q, cu_seq_lens_k, longest_query=bounds[0], longest_key=bounds[1], **options
    )
    return out[None], None


def _cached(cache: Any, layer: int, key: Any, value: Any, offsets: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """New keys and values written to the cache of continuous batching, and all that its sequences have."""
    known = inspect.signature(cache.update).parameters
    if "kwargs" in known:
        of_cache = {**kwargs, "cu_seq_lens_k": offsets}
        return cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=of_cache)
    indices = {name: kwargs[name] for name in ("read_index", "write_index")}
    return cache.update(key_states=key, value_states=value, layer_idx=layer, **indices)


def _by_whole_mask(
    query: Any, key: Any, value: Any, mask: Any, scaling: float | None, softcap: float | None, sinks: Any, dropout: float,
    right: int | None = None,
) -> tuple[Any, None]:  # fmt: skip
    """A mask that says everything, causal (but for `right`) and window included."""
    from .._attention import run
    from .._dropout import seed_of
    from .._options import Options, Values

    options = Options(right=right, scale=scaling, softcap=softcap, dropout=dropout or None)
    seed = seed_of(query, key, value, None) if dropout else None
    values = Values(sinks=sinks, mask=mask[..., : key.shape[2]], seed=seed)
    return run(query, key, value, options, values, False, None).transpose(1, 2).contiguous(), None


def _by_bias(
    query: Any, key: Any, value: Any, bias: Any, mask: Any | None, causal: bool, scaling: float | None, dropout: float
) -> tuple[Any, None]:
    """Scores that get a learned bias added (T5). Its gradients are those of torch's own attention."""
    import torch

    causal = causal and query.shape[2] > 1 and (mask is None or mask.dim() != 4)
    used = min(x.shape[-1] for x in (bias, key.transpose(2, 3), mask) if x is not None)
    bias, key, value = bias[..., :used], key[:, :, :used], value[:, :, :used]
    if mask is not None:
        seen = (mask if mask.dim() == 4 else mask[:, None, None])[..., :used]
        bias = bias + seen if seen.is_floating_point() else bias.masked_fill(seen == 0, torch.finfo(bias.dtype).min)
    if torch.is_grad_enabled() and bias.requires_grad:
        if causal:
            ahead = torch.ones(query.shape[2], used, dtype=torch.bool, device=bias.device).triu(used - query.shape[2] + 1)
            bias = bias.masked_fill(ahead, torch.finfo(bias.dtype).min)
        grouped = query.shape[1] != key.shape[1]
        out = by_torch(query, key, value, bias, scaling, grouped, dropout)
        return out.transpose(1, 2).contiguous(), None
    return _by_whole_mask(query, key, value, bias, scaling, None, None, dropout, right=0 if causal else None)


def mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
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
    at = kwargs.get("cache_position")  # the first releases of transformers 5 say where queries stand
    sizes = dict(q_length=q_length, q_offset=q_offset) if at is None else {}
    if at is not None:
        q_length, q_offset = at.shape[0], at[0]
    chunk = getattr(config, "attention_chunk_size", None)
    if (not allow_is_causal_skip and q_length > 1) or (chunk is not None and kv_length + kv_offset > chunk):
        from transformers.masking_utils import sdpa_mask

        known = {"kv_length": kv_length, "kv_offset": kv_offset, "attention_mask": attention_mask, "config": config}
        return sdpa_mask(batch_size=batch_size, allow_is_causal_skip=False, **sizes, **known, **kwargs)
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
