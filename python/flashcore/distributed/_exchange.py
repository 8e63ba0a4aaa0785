"""Moving tensors between the ranks of a group, by torch.distributed and nothing else."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._arguments import real

Kind = tuple[Any, torch.dtype]
"""Shape and type of a tensor."""


class Group:
    """The ranks that share an attention."""

    def __init__(self, group: Any, timeout: float | None) -> None:
        outside = dist.GroupMember.NON_GROUP_MEMBER  # what `new_group` gives to other ranks
        if not (group is None or group is outside or isinstance(group, dist.ProcessGroup)):
            raise TypeError(f"group is {group!r}, which is not a process group; pass one of torch.distributed, or None for all ranks")
        self.group = group
        self.world = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group; call it on the group's ranks alone")
        self.timeout = None if timeout is None else timedelta(seconds=real("timeout", timeout))

    def wait(self, *works: Any) -> None:
        for work in works:
            work.wait() if self.timeout is None else work.wait(self.timeout)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which are alike, in the order of ranks."""
        found = [torch.empty_like(tensor) for _ in range(self.world)]
        self.wait(dist.all_gather(found, tensor.contiguous(), group=self.group, async_op=True))
        return found

    def pass_on(self, given: list[Tensor], kinds: list[Kind]) -> Moving:
        """Sends dense tensors to the next rank while those of the rank before, whose kinds are known, arrive."""
        arriving = [given[0].new_empty(shape, dtype=dtype) for shape, dtype in kinds]
        after, before = (dist.get_global_rank(self._group(), (self.rank + n) % self.world) for n in (1, -1))
        moves = [dist.P2POp(dist.isend, raw(tensor), after, self.group) for tensor in given if tensor.numel()]
        moves += [dist.P2POp(dist.irecv, raw(tensor), before, self.group) for tensor in arriving if tensor.numel()]
        return Moving(self, arriving, dist.batch_isend_irecv(moves) if moves else [])

    def swap(self, given: list[list[Tensor]], kinds: list[list[Kind]]) -> list[list[Tensor]]:
        """Gives some tensors to each rank and gets some from each, whose kinds are known."""
        sizes = [sum(bytes_of(*kind) for kind in of) for of in kinds]
        sent = pack([tensor for of in given for tensor in of])
        shares = [sum(bytes_of(tensor.shape, tensor.dtype) for tensor in of) for of in given]
        found = sent.new_empty(sum(sizes))
        self.wait(dist.all_to_all_single(found, sent, sizes, shares, group=self.group, async_op=True))
        return [unpack(part, of) for part, of in zip(found.split(sizes), kinds)]

    def _group(self) -> Any:
        return dist.group.WORLD if self.group is None else self.group


class Moving:
    """Tensors that are on their way."""

    def __init__(self, group: Group, arriving: list[Tensor], works: list[Any]) -> None:
        self.group, self.arriving, self.works = group, arriving, works

    def wait(self) -> list[Tensor]:
        """The tensors, once they are here; those that were sent may be used again."""
        self.group.wait(*self.works)
        return self.arriving


def bytes_of(shape: Any, dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def raw(tensor: Tensor) -> Tensor:
    """A dense tensor as bytes: every transport takes bytes, whatever the element type."""
    return tensor.view(-1).view(torch.uint8)


def pack(tensors: list[Tensor]) -> Tensor:
    """Tensors as bytes, one after another."""
    flat = [raw(tensor.contiguous()) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def unpack(buffer: Tensor, kinds: list[Kind]) -> list[Tensor]:
    """The tensors in a buffer that `pack` made of tensors of these shapes and types."""
    sizes = [bytes_of(*kind) for kind in kinds]
    return [part.view(dtype).view(shape) for part, (shape, dtype) in zip(buffer.split(sizes), kinds)]


class Swap(torch.autograd.Function):
    """`Group.swap` of as many tensors with each rank, one rank's after another's; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, group: Group, kinds: list[list[Kind]], *given: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.kinds = group, _by_rank([(tensor.shape, tensor.dtype) for tensor in given], group.world)
        return tuple(tensor for of in group.swap(_by_rank(given, group.world), kinds) for tensor in of)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found = ctx.group.swap(_by_rank(grads, ctx.group.world), ctx.kinds)
        return (None, None, *(tensor for of in found for tensor in of))


def _by_rank(items: Any, world: int) -> list[Any]:
    each = len(items) // world
    return [list(items[rank * each : (rank + 1) * each]) for rank in range(world)]
