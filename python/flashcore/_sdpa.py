"""PyTorch's ``scaled_dot_product_attention``, computed by FlashCore."""

from __future__ import annotations

from typing import Any

from ._attention import run


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """``torch.nn.functional.scaled_dot_product_attention`` by its signature and meaning, for tensors of any framework.

    With ``is_causal`` the first query stands at the first key, as PyTorch has it. ``attn_mask`` may be padding, causal
    or a window, as bool or as 0 and -inf; its values are read on the host. Other masks, dropout and gradients raise
    NotImplementedError. Rows that see no key are zeros.

    >>> import numpy
    >>> q = numpy.ones((2, 4, 16, 8), "float32")
    >>> keep = numpy.ones((2, 1, 1, 16), bool)
    >>> keep[1, ..., :5] = False                       # the second entry is padded on the left
    >>> scaled_dot_product_attention(q, q, q, attn_mask=keep).shape
    (2, 4, 16, 8)
    """
    if dropout_p:
        raise NotImplementedError("dropout is not supported; pass dropout_p=0.0")
    if attn_mask is not None and is_causal:
        raise ValueError("pass attn_mask or is_causal, not both")
    if len(query.shape) != 4:
        return _by_four(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"query has {query.shape[1]} heads but key has {key.shape[1]}; pass enable_gqa=True")
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - len(attn_mask.shape))]
    settings = (None, 0 if is_causal else None, is_causal, scale, None, None, None, attn_mask, "bhsd")
    return run(query, key, value, settings, False, None)


def _by_four(query: Any, key: Any, value: Any, mask: Any, is_causal: bool, scale: Any, enable_gqa: bool) -> Any:
    """Tensors without heads, or without heads and batch."""
    dimensions = len(query.shape)
    if dimensions not in (2, 3):
        raise ValueError(f"query has {dimensions} dimensions; 2, 3 and 4 are supported")
    add = (slice(None), None) if dimensions == 3 else (None, None)
    if mask is not None and dimensions == 3 and len(mask.shape) == 3:
        mask = mask[add]
    four = [tensor[add] for tensor in (query, key, value)]
    out = scaled_dot_product_attention(*four, mask, 0.0, is_causal, scale, enable_gqa)
    return out[:, 0] if dimensions == 3 else out[0, 0]
