"""The weights that FlashAttention's functions return beside a result with dropout, for tests: as large as all scores.

FlashAttention hands over what its kernel has in hand: each weight measured from the largest score met until then, in blocks
of keys from the last to the first, negative where it is left out. Who divides by what is missing, as its own tests do, asks
`block_keys` how large a block is. Called by `_flash_attn`; computed by torch.
"""

from __future__ import annotations

import sys
from typing import Any

from ._dropout import dropout_mask
from ._options import Options


def block_keys(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys of a block: FlashAttention's ``_get_block_size_n`` on a Hopper."""
    if head_dim <= 64:
        return 128 if head_dim <= 32 or not is_dropout else 64
    return 32 if 96 < head_dim <= 128 and is_dropout else 64


def of_batch(q: Any, k: Any, options: Options, slopes: Any, seed: Any) -> Any:
    """Weights of tensors batch x sequence x heads x dim: batch x query heads x queries x keys. None without dropout, and for
    tensors that are not torch's."""
    if not _has_weights(q, seed):
        return None
    stays = _mask(q, options, seed, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    return _signed(q, k, stays, options, slopes)


def of_packed(
    q: Any, k: Any, offsets: tuple[Any, Any], longest: tuple[int, int], options: Options, slopes: Any, seed: Any
) -> Any:
    """The same of packed sequences: sequences x query heads x queries x keys of the longest, 0 beyond each one's own."""
    if not _has_weights(q, seed):
        return None
    starts = [[int(offset) for offset in side] for side in offsets]
    stays = _mask(q, options, seed, (len(starts[0]) - 1, q.shape[1], *longest))
    together = q.new_zeros(stays.shape)
    for n, (a, b, c, d) in enumerate(zip(*(part for side in starts for part in (side, side[1:])))):
        of_one = slopes[n] if getattr(slopes, "ndim", 1) > 1 else slopes
        own = (n, slice(None), slice(b - a), slice(d - c))
        together[own] = _signed(q[None, a:b], k[None, c:d], stays[own], options, of_one)[0]
    return together


def _has_weights(q: Any, seed: Any) -> bool:
    torch = sys.modules.get("torch")
    return seed is not None and torch is not None and isinstance(q, torch.Tensor)


def _mask(q: Any, options: Options, seed: Any, extents: tuple[int, ...]) -> Any:
    import torch

    return torch.tensor(dropout_mask(options.dropout, seed, *extents), device=q.device)


def _signed(q: Any, k: Any, stays: Any, options: Options, slopes: Any) -> Any:
    import torch

    scores = _scores(q.detach(), k.detach(), options, slopes)
    if scores.numel() == 0:
        return scores.to(q.dtype)
    met, weights = scores.new_full((), -torch.inf), []
    for block in reversed(scores.split(block_keys(q.device, q.shape[-1], True, False), -1)):
        met = met.maximum(block.amax(-1, keepdim=True))
        # Where nothing was met yet, nothing is seen.
        weights.append((block - met.clamp(min=torch.finfo(met.dtype).min)).exp())
    together = torch.cat(weights[::-1], -1)
    return together.where(stays, -together).to(q.dtype)


def _scores(q: Any, k: Any, options: Options, slopes: Any) -> Any:
    import torch

    queries, keys = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bthd,bshd->bhts", q.float(), k.float()) * scale
    if options.softcap:
        scores = options.softcap * (scores / options.softcap).tanh()
    # How far keys lie behind the diagonal, which ends at the last query and key.
    at = torch.arange(keys, device=q.device) - torch.arange(queries, device=q.device)[:, None] - (keys - queries)
    if slopes is not None:
        scores = scores - slopes[..., None, None] * at.abs()
    if options.left is not None:
        scores = scores.masked_fill(at < -options.left, -torch.inf)
    return scores if options.right is None else scores.masked_fill(at > options.right, -torch.inf)
