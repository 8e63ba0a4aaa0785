"""What all ranks must agree on before they compute: found out together, so that a mistake is told on every rank."""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _options
from ._attend import How, Lengths, Mask
from ._exchange import Group
from ._shards import LAYOUTS, Section, check_layout, order, rows, sections

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FIELDS = (
    "the batch of q", "the heads of q", "the heads of k", "the dim of q", "the dim of v", "the dtype", "the layout",
    "the order of dimensions", "the window to the left", "the window to the right", "the scale", "the softcap",
    "whether there are sinks", "the offsets of queries", "the offsets of keys",
)  # fmt: skip


class Call(NamedTuple):
    """One attention over all ranks."""

    group: Group
    how: How
    layout: str
    lengths: Lengths

    def sections(self, of: str, rank: int | None = None) -> list[list[Section]]:
        """The sections of queries or keys that a rank holds."""
        rank = self.group.rank if rank is None else rank
        return sections(getattr(self.lengths, of), self.group.world, rank, self.layout)

    def counts(self, of: str) -> list[int]:
        """How many queries or keys each rank holds."""
        return [rows(self.sections(of, rank)) for rank in range(self.group.world)]

    def order(self, of: str, device: torch.device) -> Tensor:
        """Where each token of the whole sequences lies among the shards of all ranks, one after another."""
        return order(getattr(self.lengths, of), self.group.world, self.layout).to(device)


class Asked(NamedTuple):
    """The arguments of a call on this rank."""

    tensors: tuple[Tensor, Tensor, Tensor]
    layout: str
    order: str
    causal: bool
    window: Any
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    offsets: tuple[list[int], list[int]] | None
    """Where whole sequences start, where they are packed."""

    def how(self) -> How:
        """The options; checks everything that can be without the other ranks."""
        q, k, v = self.tensors
        check_layout(self.layout)
        if self.order not in ("bhsd", "bshd"):
            raise ValueError(f'unknown order {self.order!r}; use "bhsd" or "bshd"')
        for name, tensor in zip("qkv", self.tensors):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} is a {type(tensor).__name__}; pass a torch tensor")
            if tensor.dim() != 4:
                raise ValueError(f"{name} has {tensor.dim()} dimensions; pass 4 ({self.order})")
            if tensor.dtype not in DTYPES or tensor.dtype != q.dtype:
                raise TypeError(f"{name} is {tensor.dtype}; pass q, k and v of one type: float16, bfloat16 or float32")
        axis = 2 if self.order == "bhsd" else 1
        heads = [tensor.shape[3 - axis] for tensor in self.tensors]
        if k.shape[0] != q.shape[0] or k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[3]:
            shapes = [tuple(t.shape) for t in self.tensors]
            raise ValueError(f"q, k and v are {shapes}; give all one batch, k and v the same rows and heads, and q and k one dim")
        if heads[1] == 0 or heads[0] % heads[1]:
            raise ValueError(f"q has {heads[0]} heads, not a multiple of the {heads[1]} heads of k")
        if self.sinks is not None and tuple(self.sinks.shape) != (heads[0],):
            raise ValueError(f"sinks has shape {tuple(self.sinks.shape)}; pass one for each of the {heads[0]} heads of q")
        left, right = _options.band(self.causal, self.window)
        scale = 1.0 / math.sqrt(q.shape[3]) if self.scale is None else float(self.scale)
        return How(Mask(left, right), scale, self.softcap, self.order)

    def row(self, how: How) -> list[int]:
        """What the other ranks compare with theirs, then the tokens that this one holds."""
        q, k, v = self.tensors
        heads = 3 - how.axis
        offsets = [-1, -1] if self.offsets is None else [hash(tuple(part)) for part in self.offsets]
        fixed = [
            q.shape[0], q.shape[heads], k.shape[heads], q.shape[3], v.shape[3], DTYPES.index(q.dtype),
            LAYOUTS.index(self.layout), self.order == "bhsd", -1 if how.mask.left is None else how.mask.left,
            -1 if how.mask.right is None else how.mask.right, _bits(how.scale), _bits(how.softcap or 0.0),
            self.sinks is not None, *offsets,
        ]  # fmt: skip
        return [int(x) for x in fixed] + [q.shape[how.axis], k.shape[how.axis]]


def _bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<d", number))[0]


def agree(asked: Asked, group: Group) -> Call:
    """The call that all ranks make; raises on every rank where one of them asks for something else."""
    problem, how, row = None, None, [-2] * (len(FIELDS) + 2)
    try:
        how = asked.how()
        row = asked.row(how)
    except (TypeError, ValueError) as error:
        problem = error
    device = asked.tensors[0].device if isinstance(asked.tensors[0], Tensor) else "cpu"
    table = [found.tolist() for found in group.gather(torch.tensor(row, dtype=torch.int64, device=device))]
    if problem is not None or how is None:
        raise problem or ValueError("the arguments are wrong")
    for rank, other in enumerate(table):
        if other[0] == -2:
            raise ValueError(f"rank {rank} cannot take part: its arguments are wrong; see its own error")
        for name, first, here in zip(FIELDS, table[0], other):
            if first != here:
                raise ValueError(f"{name} differs between rank 0 and rank {rank}; pass the same on all ranks")
    return _counted(asked, how, group, [other[-2:] for other in table])


def _counted(asked: Asked, how: How, group: Group, held: list[list[int]]) -> Call:
    """The call, once every rank was seen to hold as many tokens as its layout says."""
    if asked.offsets is None:
        lengths = Lengths([sum(tokens[0] for tokens in held)], [sum(tokens[1] for tokens in held)])
    else:
        lengths = Lengths(*([end - start for start, end in zip(part, part[1:])] for part in asked.offsets))
    call = Call(group, how, asked.layout, lengths)
    for rank, tokens in enumerate(held):
        for of, count in zip(("queries", "keys"), tokens):
            expected = rows(call.sections(of, rank))
            if count != expected:
                raise ValueError(
                    f"rank {rank} holds {count} {of} but the layout {asked.layout!r} gives it {expected}; "
                    "split tensors with flashcore.distributed.shard"
                )
    return call
