"""Padded batches as packed sequences and back, as callers of FlashAttention know it; torch differentiates all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens that a mask, batch x sequence, keeps, one after another.

    Returns them with their places in the flattened batch, the offsets of the sequences, the length of the longest, and how
    many tokens of each are used: those of ``unused_mask`` are kept and not counted.
    """
    kept = attention_mask.bool() if unused_mask is None else attention_mask.bool() | unused_mask.bool()
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices, offsets, longest = _places(kept)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, offsets, longest, used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """As `unpad_input`, where a row of the batch holds several sequences and the mask has their lengths."""
    used = attention_mask_in_length.sum(dim=-1, keepdim=True)
    kept = torch.arange(attention_mask_in_length.shape[-1], device=used.device) < used
    indices = kept.flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length > 0].int()
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _offsets(lengths), int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed tokens in their places of a padded batch, with zeros between them."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Some rows of a tensor."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor of zeros with these rows in these places."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def _places(kept: Tensor) -> tuple[Tensor, Tensor, Any]:
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    return kept.flatten().nonzero().flatten(), _offsets(lengths), int(lengths.max())


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
