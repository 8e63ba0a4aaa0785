"""Gradients of mixtures of experts and of grouped products in torch; imported when the first call is recorded.

On the CPU a layer is one function with a backward pass of its own, which computes again what it needs. On a GPU it is made
of grouped products, whose gradients are grouped products too.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _frameworks
from ._grouped import grouped_mm
from ._native import moe_gradients

NO_ROUTING_GRADIENTS = (
    "routing by logits has no gradients; choose experts in torch and pass ids and weights, "
    "or call it under torch.no_grad()"
)
NO_SHARED_GRADIENTS = "shared_expert has no gradients on a GPU; compute it outside moe, or call it under torch.no_grad()"
NO_WIDE_GRADIENTS = "moe has gradients on a GPU for float16 and bfloat16 only; convert the tensors, or move them to the CPU"


@torch.compiler.disable
def differentiable(tensors: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """`moe` with gradients of all tensors that have floats."""
    if tensors["ids"] is None:
        raise NotImplementedError(NO_ROUTING_GRADIENTS)
    if tensors["out"] is not None:
        raise RuntimeError(_frameworks.NO_OUT_GRADIENTS)
    if tensors["x"].is_cuda:
        return by_grouped_products(tensors, options)
    pairs = [*(tensors["biases"] or (None, None)), *(tensors["shared_expert"] or (None, None))]
    single = [tensors[name] for name in ("x", "gate_up", "down", "weights", "ids")]
    return Experts.apply(options, *single, *pairs)


class Experts(torch.autograd.Function):
    """A layer on the CPU."""

    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], *tensors: Optional[Tensor]) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.options = options
        return _frameworks.of(tensors[0]).moe(_named(tensors, None), options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Optional[Tensor], ...]:
        tensors = tuple(None if tensor is None else tensor.detach() for tensor in ctx.saved_tensors)
        x, gate_up, down, weights, _, *pairs = tensors
        d_x, d_weights = x.new_empty(x.shape), weights.new_empty(x.shape[0], ctx.options["top_k"], dtype=torch.float32)
        d_gate_up, d_down = _like(gate_up), _like(down)
        d_pairs = [None if tensor is None else _like(tensor) for tensor in pairs]
        grads = {"x": d_x, "gate_up": d_gate_up, "down": d_down, "weights": d_weights}
        grads |= {"biases": _pair(d_pairs[:2]), "shared_expert": _pair(d_pairs[2:])}
        named = _named(tensors, d_out.detach().contiguous())
        if not _frameworks.exchanges(x):
            named, grads = (_frameworks.each_tensor(group, _frameworks.of(x).export) for group in (named, grads))
        moe_gradients(named, ctx.options, grads)
        return None, d_x, d_gate_up, d_down, d_weights.reshape(-1).to(weights.dtype), None, *d_pairs


def _named(tensors: tuple[Optional[Tensor], ...], out: Optional[Tensor]) -> dict[str, Any]:
    x, gate_up, down, weights, ids, *pairs = tensors
    named = {"x": x, "gate_up": gate_up, "down": down, "weights": weights, "ids": ids, "out": out}
    return named | {"logits": None, "routing_bias": None, "biases": _pair(pairs[:2]), "shared_expert": _pair(pairs[2:])}


def _pair(tensors: Any) -> Optional[tuple[Any, ...]]:
    return None if tensors[0] is None else tuple(tensors)


def _like(tensor: Tensor) -> Tensor:
    """Memory for a gradient: without gaps, with the same dimension contiguous."""
    if tensor.dim() < 3 or tensor.stride(-1) == 1:
        return tensor.new_empty(tensor.shape)
    return tensor.new_empty(tensor.transpose(-2, -1).shape).transpose(-2, -1)


class GroupedMm(torch.autograd.Function):
    """Grouped products, whose gradients are grouped products by the same offsets."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, offs: Optional[Tensor], shape: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(a, b, offs)
        return _frameworks.of(a).grouped_mm(a.detach(), b.detach(), offs, shape)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Optional[Tensor], ...]:
        a, b, offs = ctx.saved_tensors
        need_a, need_b, *_ = ctx.needs_input_grad
        d_out = d_out.contiguous()
        d_a = grouped_mm(d_out, b.transpose(-2, -1), offs=offs) if need_a else None
        d_b = _gradient_of_right(a, b, d_out, offs) if need_b else None
        return d_a, d_b, None, None


def _gradient_of_right(a: Tensor, b: Tensor, d_out: Tensor, offs: Optional[Tensor]) -> Tensor:
    """The gradient of b, lying as b does where that is a matter of which factor comes first."""
    if b.dim() == 3 and b.stride(-1) != 1 and d_out.dim() == a.dim():
        return grouped_mm(d_out.transpose(-2, -1), a, offs=offs).transpose(-2, -1)
    return grouped_mm(a.transpose(-2, -1), d_out, offs=offs)


class Sorted(torch.autograd.Function):
    """Rows of the tokens in the order of their experts; what torch's own indexing adds up row by row is a sum here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order, back)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Optional[Tensor], ...]:
        order, back = ctx.saved_tensors
        rows = Unsorted.apply(d_rows, order, back)
        return rows.view(-1, ctx.top_k, rows.shape[-1]).sum(dim=1), None, None, None


class Unsorted(torch.autograd.Function):
    """Rows in the order of tokens again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order, back)
        return rows[back]

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Optional[Tensor], ...]:
        order, back = ctx.saved_tensors
        return Unsorted.apply(d_rows, back, order), None, None


def by_grouped_products(tensors: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """A layer made of operations that torch differentiates; nothing waits for the GPU."""
    x, gate_up, down, biases = (tensors[name] for name in ("x", "gate_up", "down", "biases"))
    if tensors["shared_expert"] is not None:
        raise NotImplementedError(NO_SHARED_GRADIENTS)
    if x.dtype == torch.float32 and x.is_cuda:
        raise NotImplementedError(NO_WIDE_GRADIENTS)
    if not options["transposed"]:  # experts x depth x columns
        gate_up, down = gate_up.transpose(-2, -1), down.transpose(-2, -1)
    top_k, here = options["top_k"], gate_up.shape[0]
    first = options["experts"][0] if options["experts"] else 0
    local = tensors["ids"].long() - first
    # Those that are elsewhere come last, where no group ends.
    local = torch.where((local >= 0) & (local < here), local, here)
    experts, order = torch.sort(local, stable=True)
    ends = torch.searchsorted(experts, torch.arange(here, device=x.device), right=True).int()
    bias = [None, None] if biases is None else [torch.cat([one, one.new_zeros(1, one.shape[1])])[experts] for one in biases]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    joined = grouped_mm(Sorted.apply(x, order, back, top_k), gate_up, offs=ends)
    joined = joined if bias[0] is None else joined + bias[0]
    gate, up = (joined[:, 0::2], joined[:, 1::2]) if options["interleaved"] else joined.chunk(2, dim=-1)
    rows = grouped_mm(_join(gate, up, options).contiguous(), down, offs=ends)
    rows = rows if bias[1] is None else rows + bias[1]
    rows = Unsorted.apply(rows, order, back).view(x.shape[0], top_k, x.shape[1])
    weights = torch.where(local < here, tensors["weights"].float(), 0).view(x.shape[0], top_k, 1)
    return (rows.float() * weights).sum(dim=1).to(x.dtype)


def _join(gate: Tensor, up: Tensor, options: dict[str, Any]) -> Tensor:
    """What joins gate and up: in the tensors' own type, as models do it that train without FlashCore."""
    if options["activation"] == "swiglu":
        return torch.nn.functional.silu(gate) * up
    if options["activation"] == "geglu":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=options["limit"]), up.clamp(-options["limit"], options["limit"])
    return gate * torch.sigmoid(options["alpha"] * gate) * (up + 1)
