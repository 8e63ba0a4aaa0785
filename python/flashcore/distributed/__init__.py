"""Attention over sequences that are split between ranks of ``torch.distributed``: context parallel.

Every rank holds a shard of the tokens and computes the attention of its queries over the keys of all. Three schemes move
what has to be moved, and give the same result:

| scheme | moves | pays |
| --- | --- | --- |
| `ring_attention` | K and V from rank to rank, the next while the present ones are multiplied | long sequences |
| `allgather_attention` | all K and V to all ranks at once | few key heads, memory to spare |
| `ulysses_attention` | heads: each rank computes some heads of the whole sequence | at least as many key heads as ranks |

>>> import torch, torch.distributed as dist
>>> from flashcore.distributed import ring_attention, shard, unshard
>>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
>>> q = torch.randn(1, 4, 100, 64)
>>> out = ring_attention(*(shard(x) for x in (q, q, q)), causal=True)   # this rank's tokens
>>> unshard(out).shape                                                  # all of them
torch.Size([1, 4, 100, 64])
>>> dist.destroy_process_group()

Gradients go through all three. Partial results are summed in float32 by the kernels, always in the same order, so that a
result does not depend on when messages arrive. All ranks of the group have to make the same call; before anything is
computed they compare its arguments, and a mistake on one of them raises on all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _attention, _merge
from .._arguments import each, whole
from . import _shards
from ._agree import Asked, Call, agree
from ._exchange import Group, Swap
from ._gather import Gathered
from ._heads import by_heads
from ._ring import Ring

__all__ = ["allgather_attention", "decode_attention", "ring_attention", "shard", "ulysses_attention", "unshard"]


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any | None = None,
    *,
    layout: str = "zigzag",
    order: str = "bhsd",
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    query_offsets: Any | None = None,
    key_offsets: Any | None = None,
    return_lse: bool = False,
    timeout: float | None = None,
) -> Any:
    """Attention of this rank's queries over the keys of all ranks of `group`, which go round a ring.

    Args:
        q, k, v: this rank's tokens, as `shard` gives them: float16, bfloat16 or float32, 4 dimensions in that ``order``.
            Heads of ``q`` are a multiple of those of ``k``; ``v`` may have another dim; queries and keys may differ in
            number, and the last query then stands at the last key.
        group: the process group; all processes if None.
        layout: which tokens a rank holds. ``"zigzag"``: an early and a late chunk, which gives all ranks the same work
            under a causal mask; ``"striped"``: every n-th token; ``"contiguous"``: one chunk. Any number of tokens works.
        order: ``"bhsd"`` for batch, heads, sequence, dim; ``"bshd"`` for batch, sequence, heads, dim.
        causal, window, scale, softcap: as in `flashcore.attention`; positions are those in the whole sequence.
        sinks: one logit per query head, the same on all ranks. Its gradient covers this rank's queries; sum it
            over ranks like that of any other weight.
        query_offsets, key_offsets: where each *whole* sequence starts, one more number than there are, for sequences that
            are packed one after another. Tensors are then tokens x heads x dim, a rank's shard of each sequence after
            that of the one before.
        return_lse: also return the log-sum-exp, float32, batch x heads x this rank's tokens (heads x tokens, if packed).
        timeout: seconds after which a missing message raises. If None, the limit of the process group
            applies, as it always does with NCCL.
    """
    asked = _asked(q, k, v, layout, order, causal, window, scale, softcap, sinks, query_offsets, key_offsets)
    return _run(Ring.apply, asked, group, timeout, return_lse)


def allgather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any | None = None,
    *,
    layout: str = "zigzag",
    order: str = "bhsd",
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    query_offsets: Any | None = None,
    key_offsets: Any | None = None,
    return_lse: bool = False,
    timeout: float | None = None,
) -> Any:
    """As `ring_attention`; every rank gets all keys and values before it computes."""
    asked = _asked(q, k, v, layout, order, causal, window, scale, softcap, sinks, query_offsets, key_offsets)
    return _run(Gathered.apply, asked, group, timeout, return_lse)


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any | None = None,
    *,
    layout: str = "contiguous",
    order: str = "bhsd",
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    query_offsets: Any | None = None,
    key_offsets: Any | None = None,
    return_lse: bool = False,
    timeout: float | None = None,
) -> Any:
    """As `ring_attention`; every rank gets some heads of the whole sequences and gives the result back.

    Ranks beyond the last query head have nothing to compute. The gradient of ``sinks`` covers this rank's heads.
    """
    asked = _asked(q, k, v, layout, order, causal, window, scale, softcap, sinks, query_offsets, key_offsets)
    return _run(by_heads, asked, group, timeout, return_lse)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any | None = None,
    *,
    key_lengths: Any | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    layout: str = "bhsd",
    timeout: float | None = None,
) -> Tensor:
    """Attention of the same queries on every rank over a cache whose keys are split between ranks, in any way.

    Every query sees every key. Partial results and their log-sum-exps are gathered and merged in the order of ranks, so
    that all ranks have the same bits. It has no gradients.

    Args:
        q: the queries, the same on all ranks.
        k, v: this rank's part of the cache; it may be empty.
        key_lengths: how many keys of it each batch entry uses.
    """
    ranks = Group(group, timeout)
    with torch.no_grad():
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=torch.float32, device=q.device)
        batch, heads, count = (q.shape[n] for n in ((0, 1, 2) if layout == "bhsd" else (0, 2, 1)))
        lse = torch.full((batch, heads, count), -torch.inf, dtype=torch.float32, device=q.device)
        options = dict(scale=scale, softcap=softcap, key_lengths=key_lengths, layout=layout)
        _attention.accumulate(q, k, v, out, lse, **options)
        parts, lses = ranks.gather(out), ranks.gather(lse)
        return _merge.merge(parts, lses, layout=layout, out=torch.empty_like(out, dtype=q.dtype))


def shard(x: Tensor, group: Any | None = None, *, layout: str = "zigzag", dim: int = 2, offsets: Any | None = None) -> Tensor:
    """This rank's tokens of a whole tensor, which every rank has; ``dim`` is the dimension of tokens.

    Use it for everything with a value per token, as position ids and labels (``dim=1``). ``offsets`` say where packed
    sequences start. Gradients go through it.
    """
    ranks = Group(group, None)
    index = _shards.positions(_lengths(x.shape[dim], offsets, layout), ranks.world, ranks.rank, layout)
    return x.index_select(dim, index.to(x.device))


def unshard(
    x: Tensor,
    group: Any | None = None,
    *,
    layout: str = "zigzag",
    dim: int = 2,
    offsets: Any | None = None,
    timeout: float | None = None,
) -> Tensor:
    """The whole tensor from the shards of all ranks: the inverse of `shard`. Gradients go through it: each rank gets the
    sum of all ranks' gradients of its tokens."""
    ranks = Group(group, timeout)
    counts = [int(n) for n in ranks.gather(torch.tensor([x.shape[dim]], device=x.device))]
    lengths = _lengths(sum(counts), offsets, layout)
    kinds = [[((*x.shape[:dim], count, *x.shape[dim + 1 :]), x.dtype)] for count in counts]
    parts = Swap.apply(ranks, kinds, *[x] * ranks.world)
    return torch.cat(parts, dim).index_select(dim, _shards.order(lengths, ranks.world, layout).to(x.device))


def _lengths(tokens: int, offsets: Any | None, layout: str) -> list[int]:
    _shards.check_layout(layout)
    if offsets is None:
        return [tokens]
    starts = each("offsets", offsets, whole, "pass where each sequence starts")
    lengths = [end - start for start, end in zip(starts, starts[1:])]
    if not starts or starts[0] != 0 or starts[-1] != tokens or min(lengths, default=0) < 0:
        raise ValueError(f"offsets are {list(starts)}; they must increase from 0 to the number of tokens, {tokens}")
    return lengths


def _asked(
    q: Any, k: Any, v: Any, layout: Any, order: Any, causal: Any, window: Any, scale: Any, softcap: Any, sinks: Any,
    query_offsets: Any, key_offsets: Any,
) -> tuple[Asked, bool]:  # fmt: skip
    """The arguments in one form, and whether sequences are packed."""
    packed = query_offsets is not None or key_offsets is not None
    offsets = None
    if packed:
        query_offsets = key_offsets if query_offsets is None else query_offsets
        key_offsets = query_offsets if key_offsets is None else key_offsets
        given = (("query_offsets", query_offsets), ("key_offsets", key_offsets))
        offsets = tuple(list(each(name, value, whole, "pass where each sequence starts")) for name, value in given)
        q, k, v = (x[None] if isinstance(x, Tensor) else x for x in (q, k, v))
        order = "bshd"
    return Asked((q, k, v), layout, order, causal, window, scale, softcap, sinks, offsets), packed


def _run(scheme: Any, asked: tuple[Asked, bool], group: Any, timeout: float | None, return_lse: bool) -> Any:
    arguments, packed = asked
    call: Call = agree(arguments, Group(group, timeout))
    out, lse = scheme(call, *arguments.tensors, arguments.sinks)
    out, lse = (out[0], lse[0]) if packed else (out, lse)
    return (out, lse) if return_lse else out
