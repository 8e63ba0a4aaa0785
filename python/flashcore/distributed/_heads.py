"""Every rank gets some heads of the whole sequences, computes them, and gives the result back (Ulysses)."""

from __future__ import annotations

import torch
from torch import Tensor

from .._attention import attention, packed_attention
from ._agree import Call
from ._exchange import Swap


def shares(heads_q: int, heads_kv: int, world: int) -> list[tuple[range, range]]:
    """The query heads and key heads of each rank: whole groups where there are enough, else parts of one group."""
    group = heads_q // heads_kv
    if heads_kv >= world:
        cuts = [heads_kv * n // world for n in range(world + 1)]
        return [(range(a * group, b * group), range(a, b)) for a, b in zip(cuts, cuts[1:])]
    found = []
    for head in range(heads_kv):
        ranks = world * (head + 1) // heads_kv - world * head // heads_kv
        cuts = [head * group + group * n // ranks for n in range(ranks + 1)]
        # A rank beyond the last query head has no key head either.
        found += [(range(a, b), range(head, head + (b > a))) for a, b in zip(cuts, cuts[1:])]
    return found


def by_heads(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over all keys; returns output and log-sum-exp."""
    heads = 3 - call.how.axis
    shared = shares(q.shape[heads], k.shape[heads], call.group.world)
    mine, _ = shared[call.group.rank]
    whole = _whole(call, (q, k, v), shared)
    if len(mine):
        out, lse = _computed(call, whole, None if sinks is None else sinks[mine.start : mine.stop])
    else:
        # Nothing, but made of the tensors: gradients go back by messages that every rank has to send.
        nothing = sum(x.sum() for x in whole)
        out = whole[0].new_empty((*whole[0].shape[:3], v.shape[3])) + nothing
        lse = out.new_empty((q.shape[0], 0, whole[0].shape[call.how.axis]), dtype=torch.float32) + nothing.float()
        out = out if sinks is None else out + sinks.sum().to(out.dtype) * 0
    return _returned(call, out, lse, [share[0] for share in shared])


def _computed(call: Call, tensors: list[Tensor], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    how, lengths = call.how, call.lengths
    options = dict(window=how.mask, scale=how.scale, softcap=how.softcap, sinks=sinks, return_lse=True)
    if len(lengths.queries) == 1:
        return attention(*tensors, layout=how.layout, **options)
    offsets = [torch.tensor([0, *of]).cumsum(0).tolist() for of in lengths]
    longest = dict(longest_query=max(lengths.queries), longest_key=max(lengths.keys))
    out, lse = packed_attention(*(x[0] for x in tensors), *offsets, **longest, **options)
    return out[None], lse[None]


def _whole(call: Call, tensors: tuple[Tensor, ...], shared: list[tuple[range, range]]) -> list[Tensor]:
    """Whole sequences of this rank's heads."""
    axis, group = call.how.axis, call.group
    along, sides = 3 - axis, (0, 1, 1)
    counts = [call.counts(of) for of in ("queries", "keys", "keys")]
    extents = [len(shared[group.rank][side]) for side in sides]
    kinds = [
        [(_like(x, {axis: count[rank], along: n}), x.dtype) for x, count, n in zip(tensors, counts, extents)]
        for rank in range(group.world)
    ]
    given = [x.narrow(along, share[side].start, len(share[side])) for share in shared for x, side in zip(tensors, sides)]
    found = Swap.apply(group, kinds, *given)
    orders = [call.order(of, tensors[0].device) for of in ("queries", "keys", "keys")]
    return [torch.cat(found[n::3], axis).index_select(axis, order) for n, order in enumerate(orders)]


def _returned(call: Call, out: Tensor, lse: Tensor, heads: list[range]) -> tuple[Tensor, Tensor]:
    """All heads of this rank's tokens."""
    axis, group = call.how.axis, call.group
    counts, order = call.counts("queries"), call.order("queries", out.device)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=out.device))
    places = ((out, axis, 3 - axis), (lse, 2, 1))
    given = zip(*(x.index_select(tokens, back).split(counts, tokens) for x, tokens, _ in places))
    mine = counts[group.rank]
    kinds = [[(_like(x, {tokens: mine, along: len(of)}), x.dtype) for x, tokens, along in places] for of in heads]
    found = Swap.apply(group, kinds, *(part for of in given for part in of))
    return torch.cat(found[0::2], 3 - axis), torch.cat(found[1::2], 1)


def _like(x: Tensor, extents: dict[int, int]) -> tuple[int, ...]:
    """The shape of a tensor with other extents."""
    return tuple(extents.get(n, extent) for n, extent in enumerate(x.shape))
