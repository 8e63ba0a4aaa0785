"""FlashAttention's rotary embedding by its name, in plain torch: what models import beside attention.

Keys that go into a cache are turned by `flash_attn_with_kvcache` and `flashcore.append` as they are written.
"""

from __future__ import annotations

from typing import Any

__all__ = ["apply_rotary_emb", "apply_rotary_emb_func"]


def apply_rotary_emb(
    x: Any,
    cos: Any,
    sin: Any,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Any = 0,
    cu_seqlens: Any | None = None,
    max_seqlen: int | None = None,
) -> Any:
    """Turns the first features of each row by its position: those of ``cos`` and ``sin``, positions x pairs of features.

    ``x`` is batch x sequence x heads x dim, or sequence x heads x dim with the offsets of packed sequences in ``cu_seqlens``.
    A pair is two neighbours where ``interleaved``, a feature of the first half and its like of the second otherwise. The
    first row of a sequence has position ``seqlen_offsets``, one number or one for each sequence. ``max_seqlen`` is not needed.
    """
    import torch

    at = _positions(x, seqlen_offsets, cu_seqlens).clamp(max=len(cos))
    # Positions behind the tables turn nothing.
    tables = (torch.cat((cos, torch.ones_like(cos[:1]))), torch.cat((sin, torch.zeros_like(sin[:1]))))
    cos, sin = (table[at].unsqueeze(-2).float() for table in tables)
    turned, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    pairs = turned.float().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    side = -1 if interleaved else -2
    a, b = pairs.unbind(side)
    pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), side).flatten(-2)
    out = torch.cat((pairs.to(x.dtype), rest), -1)
    return x.copy_(out) if inplace else out


apply_rotary_emb_func = apply_rotary_emb
"""Its older name, which models still import."""


def _positions(x: Any, first: Any, offsets: Any) -> Any:
    """The position of each row."""
    import torch

    first = torch.as_tensor(first, device=x.device)
    rows = torch.arange(x.shape[-3], device=x.device)
    if offsets is None:
        return (first.expand(x.shape[0])[:, None] + rows).long()
    # Rows behind the last sequence are nobody's: what becomes of them does not matter.
    of = torch.searchsorted(offsets[1:].contiguous(), rows, right=True).clamp(max=len(offsets) - 2)
    return (rows - offsets[of] + first.expand(len(offsets) - 1)[of]).long()
