"""FlashAttention's rotary embedding by its names, in plain torch: what models import beside attention.

Keys that go into a cache are turned by `flash_attn_with_kvcache` and `flashcore.append` as they are written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Turns the first features of each row by its position: those of ``cos`` and ``sin``, positions x pairs of features.

    ``x`` is batch x sequence x heads x dim, or sequence x heads x dim with the offsets of packed sequences in ``cu_seqlens``.
    A pair is two neighbours where ``interleaved``, a feature of the first half and its like of the second otherwise. The
    first row of a sequence has position ``seqlen_offsets``, one number or one for each sequence. ``max_seqlen`` is not needed.
    """
    at = _positions(x, seqlen_offsets, cu_seqlens)
    if inplace:
        return _in_place(x, (...,), [(cos, sin)], at, interleaved)
    return _turned(x, *_rows(cos, sin, at), interleaved)


apply_rotary_emb_func = apply_rotary_emb
"""Its older name, which models still import."""


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The same for rows whose positions are their numbers; ``cos`` and ``sin`` may have a batch in front."""
    return _turned(x, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Turns queries and keys where they lie: in batch x sequence x 3 x heads x dim, or in batch x sequence x heads x dim with
    ``num_heads_q`` heads of queries before as many of keys as of values. Keys may have tables of their own."""
    of_keys = (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    if qkv.ndim == 5:
        parts: Any = (0, 1)
    elif num_heads_q is None:
        raise ValueError("qkv has four dimensions, so that nothing says which heads are queries; pass num_heads_q")
    else:
        parts = (slice(num_heads_q), slice(num_heads_q, (num_heads_q + qkv.shape[2]) // 2))
    at = _positions(qkv, seqlen_offsets)
    return _in_place(qkv, parts, [(cos, sin), of_keys], at, interleaved)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Turns the keys in batch x sequence x 2 x heads x dim where they lie."""
    return _in_place(kv, (0,), [(cos, sin)], _positions(kv, seqlen_offsets), interleaved)


class RotaryEmbedding(torch.nn.Module):
    """Turns queries and keys where they lie, by tables that grow with the longest sequence.

    With ``scale_base`` pairs are also scaled by their position, queries up and keys down (XPos).
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        features = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        scale = None if scale_base is None else (features + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached = self._sin_cached = self._cos_k_cached = self._sin_k_cached = None

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        """Makes the tables anew where they are too short, elsewhere, of another type, or not for training."""
        kept = self._cos_cached
        fits = kept is not None and seqlen <= self._seq_len_cached and (kept.device, kept.dtype) == (device, dtype)
        if fits and not (self.training and kept.is_inference()):
            return
        self._seq_len_cached = seqlen
        # Of 16 bits, positions and frequencies would be too coarse, whatever type the module has been cast to.
        exact = self.inv_freq.dtype == torch.float32
        frequencies = self.inv_freq.to(device) if exact else self._compute_inv_freq(device)
        places = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(places, frequencies)
        if self.scale is None:
            self._cos_cached, self._sin_cached = angles.cos().to(dtype), angles.sin().to(dtype)
            return
        power = ((places - seqlen // 2) / self.scale_base)[:, None]
        scale = self.scale.to(device, torch.float32) ** power
        self._cos_cached, self._sin_cached = (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (angles.cos() / scale).to(dtype), (angles.sin() / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``qkv`` as in `apply_rotary_emb_qkv_`; with ``kv`` it is queries alone, and both are returned. Where
        ``seqlen_offset`` is a tensor, ``max_seqlen`` says how many positions there are."""
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        elif self._cos_cached is None:
            raise ValueError("seqlen_offset is a tensor, so that nothing says how many positions there are; pass max_seqlen")
        tables = (self._cos_cached, self._sin_cached)
        of_keys = tables if self.scale is None else (self._cos_k_cached, self._sin_k_cached)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *tables, *of_keys, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, *tables, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, *of_keys, self.interleaved, seqlen_offset)


def _positions(x: Tensor, first: int | Tensor, offsets: Tensor | None = None) -> Tensor:
    """The position of each row."""
    first = torch.as_tensor(first, device=x.device)
    rows = torch.arange(x.shape[1 if offsets is None else 0], device=x.device)
    if offsets is None:
        return (first.expand(x.shape[0])[:, None] + rows).long()
    # Rows behind the last sequence are nobody's: what becomes of them does not matter.
    of = torch.searchsorted(offsets[1:].contiguous(), rows, right=True).clamp(max=len(offsets) - 2)
    return (rows - offsets[of] + first.expand(len(offsets) - 1)[of]).long()


def _rows(cos: Tensor, sin: Tensor, at: Tensor) -> list[Tensor]:
    """The tables' rows of some positions, for all heads; positions behind the tables turn nothing."""
    at = at.clamp(max=len(cos))
    tables = (torch.cat((cos, torch.ones_like(cos[:1]))), torch.cat((sin, torch.zeros_like(sin[:1]))))
    return [table[at].unsqueeze(-2) for table in tables]


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    cos, sin = cos.float(), sin.float()
    first, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    pairs = first.float().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    side = -1 if interleaved else -2
    a, b = pairs.unbind(side)
    pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), side).flatten(-2)
    return torch.cat((pairs.to(x.dtype), rest), -1)


def _in_place(x: Tensor, parts: Any, tables: list[tuple[Tensor, Tensor]], at: Tensor, interleaved: bool) -> Tensor:
    rows = [_rows(cos.detach(), sin.detach(), at) for cos, sin in tables]
    return _InPlace.apply(x, parts, interleaved, *(row for both in rows for row in both))


class _InPlace(torch.autograd.Function):
    """Parts of a tensor's third dimension, each turned by rows of its own; gradients are turned back.

    The tensor is not marked as changed, since autograd would refuse to change what a caller wants gradients of.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Any, interleaved: bool, *rows: Tensor) -> Tensor:
        ctx.save_for_backward(*rows)
        ctx.how = (parts, interleaved)
        return _turn(x, parts, interleaved, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts, interleaved = ctx.how
        # cos and sin in turn: with the sines negated a turn goes back.
        rows = [row if n % 2 == 0 else -row for n, row in enumerate(ctx.saved_tensors)]
        return _turn(grad.clone(), parts, interleaved, rows), None, None, *(None for _ in rows)


def _turn(x: Tensor, parts: Any, interleaved: bool, rows: Any) -> Tensor:
    for part, cos, sin in zip(parts, rows[::2], rows[1::2]):
        own = x if part is ... else x[:, :, part]
        own.copy_(_turned(own, cos, sin, interleaved))
    return x
