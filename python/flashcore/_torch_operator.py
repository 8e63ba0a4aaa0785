"""Attention as an operator of torch, with its gradients: for what records or traces calls, as autograd, torch.compile,
torch.export and tensor subclasses do.

Plain calls do not come here: they go to the extension directly, which is several microseconds faster. Imported when the
first call needs it.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from . import _attention, _frameworks
from ._options import NONE, Options, Values

GPU_GRADIENTS = (torch.float16, torch.bfloat16, torch.float32)
NO_GPU_GRADIENTS = (
    "FlashCore computes gradients on a GPU of float16, bfloat16 and float32 tensors, not {dtype}; "
    "convert q, k and v, call it under torch.no_grad(), or move them to the CPU"
)
NO_NARROW_GRADIENTS = "8-bit tensors have no gradients; convert them to bfloat16, or call it under torch.no_grad()"
NO_PAGE_GRADIENTS = (
    "keys in pages have no gradients; call it under torch.no_grad(), or gather keys and values first"
)


@torch.library.custom_op("flashcore::attention", mutates_args=())
def operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: Optional[int],
    right: Optional[int],
    top_left: bool,
    scale: Optional[float],
    softcap: Optional[float],
    layout: str,
    dropout: Optional[float],
    batch_invariant: bool,
    query_lengths: Optional[Tensor],
    key_lengths: Optional[Tensor],
    sinks: Optional[Tensor],
    mask: Optional[Tensor],
    slopes: Optional[Tensor],
    table: Optional[Tensor],
    seed: Optional[Tensor],
    longest: Optional[list[int]],
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """The result, and the log-sum-exp or, where that is not wanted, a tensor without elements."""
    options = Options(left, right, top_left, scale, softcap, layout, batch_invariant=batch_invariant, dropout=dropout)
    bounds = None if longest is None else (longest[0], longest[1])
    values = Values(query_lengths, key_lengths, sinks, mask, bounds, table, slopes, seed=seed)
    result = _attention.by_framework(_frameworks.of(q), q, k, v, options, values, return_lse, None)
    return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))


@operator.register_fake
def _(q, k, v, left, right, top_left, scale, softcap, layout, *values_and_lse):
    make, return_lse = _frameworks.Torch(), values_and_lse[-1]
    rows = make.empty_lse(q, layout) if return_lse else q.new_empty(0, dtype=torch.float32)
    return make.empty(q, v), rows


@torch.library.custom_op("flashcore::attention_backward", mutates_args=())
def backward_operator(
    d_out: Tensor,
    out: Tensor,
    sums: Optional[Tensor],
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: Optional[int],
    right: Optional[int],
    top_left: bool,
    scale: Optional[float],
    softcap: Optional[float],
    layout: str,
    dropout: Optional[float],
    query_lengths: Optional[Tensor],
    key_lengths: Optional[Tensor],
    sinks: Optional[Tensor],
    mask: Optional[Tensor],
    slopes: Optional[Tensor],
    seed: Optional[Tensor],
    longest: Optional[list[int]],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and the sinks; without sinks the last has no elements.

    `sums` are those of d_out times out over each row, where they are not to be computed here.
    """
    options = Options(left, right, top_left, scale, softcap, layout, dropout=dropout)
    bounds = None if longest is None else (longest[0], longest[1])
    values = Values(query_lengths, key_lengths, sinks, mask, bounds, slopes=slopes, seed=seed)
    with torch.no_grad():
        *grads, d_sinks = _attention.gradients((q, k, v), out, sums, lse, d_out, options, values)
    d_sinks = q.new_empty(0, dtype=torch.float32) if d_sinks is None else d_sinks.to(sinks.dtype)
    return (*grads, d_sinks)


@backward_operator.register_fake
def _(d_out, out, sums, lse, q, k, v, *options_and_values):
    sinks = options_and_values[9]
    d_sinks = q.new_empty(0, dtype=torch.float32) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_sinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """What gradients need of a call."""
    q, k, v, *options = inputs[:10]
    _, *values, _, seed, longest, _ = inputs[10:]
    ctx.save_for_backward(q, k, v, *output, *values, seed)
    ctx.options, ctx.longest = options, longest
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_out: Optional[Tensor], d_lse: Optional[Tensor]) -> tuple[Any, ...]:
    q, k, v, out, lse, *values = ctx.saved_tensors
    none = (None,) * 20
    if d_out is None and d_lse is None:
        return none
    d_out, sums = _sums(d_out, d_lse, out, ctx.options[5])
    dq, dk, dv, d_sinks = _by(backward_operator, TransformedBackward)(d_out, out, sums, lse, q, k, v, *ctx.options, *values, ctx.longest)
    return dq, dk, dv, *none[3:13], None if values[2] is None else d_sinks, *none[14:]


def _sums(d_out: Optional[Tensor], d_lse: Optional[Tensor], out: Tensor, layout: str) -> tuple[Tensor, Optional[Tensor]]:
    """The gradient of the result, and the row sums where they are not those of its products with the result."""
    d_out = torch.zeros_like(out) if d_out is None else d_out
    if d_lse is None:
        return d_out, None
    # The gradient of the log-sum-exp is the weights: it counts like a row sum of the other sign.
    products = (d_out.float() * out.float()).sum(-1)
    products = products.transpose(-1, -2) if layout != "bhsd" and products.dim() > 1 else products
    return d_out, (products - d_lse).contiguous()


def _refuse_twice(ctx: Any, *given: Any) -> None:
    raise NotImplementedError(_frameworks.NO_SECOND_GRADIENTS)


operator.register_autograd(_differentiate, setup_context=_keep)
backward_operator.register_autograd(_refuse_twice)


class Recorded(torch.autograd.Function):
    """What the operator does, for autograd alone: operators that are written in Python take several times as long."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any, options: Options, values: Values, return_lse: bool) -> Any:
        out, lse = _compute(q, k, v, options, values)
        ctx.options, ctx.others = options, None
        if values is NONE:
            ctx.save_for_backward(q, k, v, out, lse)
        else:
            tensors = [x if isinstance(x, Tensor) else None for x in values]
            ctx.save_for_backward(q, k, v, out, lse, *tensors)
            ctx.others = [None if isinstance(x, Tensor) else x for x in values]
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, d_out: Optional[Tensor], d_lse: Optional[Tensor] = None) -> tuple[Any, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        if d_out is None and d_lse is None:
            return (None,) * 7
        options, values, sums = ctx.options, NONE, None
        if ctx.others is not None:
            values = Values(*(other if tensor is None else tensor for tensor, other in zip(tensors, ctx.others)))
        if d_out is None or d_lse is not None:
            d_out, sums = _sums(d_out, d_lse, out, options.layout)
        # What is differentiated once more must be recorded, to be refused.
        differentiate = _by_operator if torch.is_grad_enabled() or _is_watched(q, k, v, d_out) else _differentiated
        *grads, d_sinks = differentiate((q, k, v), out, sums, lse, d_out, options, values)
        return (*grads, None if values.sinks is None else d_sinks.to(values.sinks.dtype), None, None, None)


class Narrow(torch.autograd.Function):
    """Attention of tensors of 8 bits that ask for gradients: these are refused when somebody wants them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Options, values: Values, return_lse: bool) -> Any:
        return _attention.by_framework(_frameworks.of(q), q, k, v, options, values, return_lse, None)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise NotImplementedError(NO_NARROW_GRADIENTS)


def recorded(q: Tensor, k: Tensor, v: Tensor, options: Options, queries: Any, keys: Any, sinks: Any, longest: Any) -> Any:
    """A call that autograd records, by its short way; None where the long way has to be taken."""
    if q.is_cuda and q.dtype not in GPU_GRADIENTS or _is_watched(q, k, v):
        return None
    if _is_autocast_enabled() and not (q.dtype is k.dtype is v.dtype is torch.get_autocast_dtype(q.device.type)):
        return None
    plain = queries is None and keys is None and sinks is None and longest is None
    values = NONE if plain else Values(queries, keys, sinks, longest=longest)
    return Recorded.apply(q, k, v, sinks, options, values, False)


def _compute(q: Tensor, k: Tensor, v: Tensor, options: Options, values: Values) -> tuple[Tensor, Tensor]:
    """The result and the log-sum-exp, by the extension's short way where it takes these."""
    short, given = _short_way(q, values), values[:3]
    result = None
    if short is not None:
        result = short.recorded(q, k, v, options.native, *given, values.longest)
    return result or _attention.by_framework(_frameworks.of(q), q, k, v, options, values, True, None)


def _differentiated(inputs: Any, out: Tensor, sums: Any, lse: Tensor, d_out: Tensor, options: Options, values: Values) -> Any:
    """`_attention.gradients`, by the extension's short way where it takes these."""
    short = _short_way(inputs[0], values) if values.sinks is None else None
    # Only packed sequences have rows for every number.
    if short is not None and (values is NONE or options.layout == "packed"):
        grads = short.gradients(*inputs, out, sums, lse, d_out, options.native, *values[:2], values.longest)
        if grads is not None:
            return (*grads, None)
    return _attention.gradients(inputs, out, sums, lse, d_out, options, values)


def _short_way(q: Tensor, values: Values) -> Any:
    """The extension's short way, where q and these values may have one."""
    if values is not NONE:
        _, _, _, mask, _, table, slopes, factors, _, turned, seed = values
        numbers = all(x is None or type(x) in _PLAIN for x in values[:3])
        if not numbers or turned or any(x is not None for x in (mask, table, slopes, factors, seed)):
            return None
    return _frameworks.direct.get(type(q))


def _by_operator(inputs: Any, out: Tensor, sums: Any, lse: Tensor, d_out: Tensor, options: Options, values: Values) -> Any:
    """`_attention.gradients` as a call of the operator."""
    given = (values.query_lengths, values.key_lengths, values.sinks, values.mask, values.slopes, values.seed)
    longest = None if values.longest is None else list(values.longest)
    tensors = (d_out, out, sums, lse, *inputs)
    return _by(backward_operator, TransformedBackward)(*tensors, *_asked(options), *map(_tensor, given), longest)


def _asked(options: Options) -> tuple[Any, ...]:
    """The options that both operators take."""
    edges = (options.left, options.right, options.top_left)
    return (*edges, options.scale, options.softcap, options.layout, options.dropout)


def _is_watched(q: Tensor, *others: Tensor) -> bool:
    """Whether something looks at operators: a compiler, a transform, a mode of torch's, a tensor that stands for another."""
    if torch.compiler.is_compiling() or _interpreters() is not None or _modes() > 0 or q.is_meta or type(q) not in _PLAIN:
        return True
    return any(type(x) not in _PLAIN or x.is_meta for x in others)


_interpreters, _modes = torch._C._functorch.peek_interpreter_stack, torch._C._len_torch_dispatch_stack
FRAMEWORK = _frameworks.learn(torch.empty(0))
_is_autocast_enabled = FRAMEWORK.is_autocast_enabled
_PLAIN = (Tensor, torch.nn.Parameter)


class Transformed(torch.autograd.Function):
    """The operator for `torch.func`, which does not look into operators."""

    generate_vmap_rule = False

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return operator(*arguments)

    setup_context = staticmethod(_keep)
    backward = staticmethod(_differentiate)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        raise NotImplementedError(_frameworks.NO_FORWARD_GRADIENTS)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        return _each(Transformed.apply, info, in_dims, arguments)


class TransformedBackward(torch.autograd.Function):
    """Its gradients, as an operator of their own."""

    generate_vmap_rule = False

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return backward_operator(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    backward = jvp = staticmethod(_refuse_twice)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        return _each(TransformedBackward.apply, info, in_dims, arguments)


def _by(operator: Any, transformed: Any) -> Any:
    """The operator, or what `torch.func` can transform."""
    inside = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    return transformed.apply if inside else operator


def _each(function: Any, info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """A function of each of the tensors that `torch.func.vmap` maps, one after another."""

    def one(n: int) -> Any:
        mapped = zip(arguments, in_dims)
        return function(*(x.select(at, n) if isinstance(at, int) and isinstance(x, Tensor) else x for x, at in mapped))

    results = [torch.stack(column) for column in zip(*(one(n) for n in range(info.batch_size)))]
    return tuple(results), (0,) * len(results)


operator.register_vmap(lambda info, in_dims, *arguments: _each(operator, info, in_dims, arguments))
backward_operator.register_vmap(lambda info, in_dims, *arguments: _each(backward_operator, info, in_dims, arguments))


def call(
    q: Tensor, k: Tensor, v: Tensor, options: Options, values: Values, return_lse: bool, out: Optional[Tensor]
) -> Any:
    """`_attention.run` as a call of the operator."""
    q, k, v = _frameworks.autocast(torch, q, k, v)
    sinks = _tensor(values.sinks)
    with_gradients = _records(q, k, v, sinks)
    if values.factors is not None or values.turned:
        if with_gradients and out is None and not _is_watched(q, k, v):
            return Narrow.apply(q, k, v, options, values, return_lse)
        raise NotImplementedError("tensors with factors cannot be traced; make the call outside torch.compile")
    if with_gradients and values.table is not None:
        raise NotImplementedError(NO_PAGE_GRADIENTS)
    if with_gradients and q.is_cuda and q.dtype not in GPU_GRADIENTS:
        raise NotImplementedError(NO_GPU_GRADIENTS.format(dtype=q.dtype))
    for given, message in ((values.mask, _frameworks.NO_MASK_GRADIENTS), (values.slopes, _frameworks.NO_SLOPE_GRADIENTS)):
        if isinstance(given, Tensor) and _records(given):
            raise NotImplementedError(message)
    if out is not None and (with_gradients or _records(out)):
        raise RuntimeError(_frameworks.NO_OUT_GRADIENTS)
    if q.is_nested:
        raise NotImplementedError(_frameworks.NO_NESTED)
    if with_gradients and not _is_watched(q, k, v):
        values = values if sinks is values.sinks else values._replace(sinks=sinks)
        return Recorded.apply(q, k, v, sinks, options, values, return_lse)
    result, lse = _by(operator, Transformed)(
        q,
        k,
        v,
        *_asked(options),
        options.batch_invariant,
        _tensor(values.query_lengths),
        _tensor(values.key_lengths),
        sinks,
        _tensor(values.mask),
        _tensor(values.slopes),
        _tensor(values.table),
        _tensor(values.seed),
        None if values.longest is None else list(values.longest),
        return_lse or with_gradients,
    )
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def _records(*tensors: Optional[Tensor]) -> bool:
    """Whether torch records a call with these tensors for a backward pass."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _tensor(values: Any) -> Optional[Tensor]:
    return values if values is None or isinstance(values, Tensor) else torch.tensor(values)
