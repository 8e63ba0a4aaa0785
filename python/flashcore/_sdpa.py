"""PyTorch's ``scaled_dot_product_attention``, computed by FlashCore."""

from __future__ import annotations

import sys
import warnings
from math import prod
from typing import Any

from . import _frameworks
from ._arguments import number
from ._attention import run
from ._dropout import seed_of
from ._options import NONE, Values, options
from ._words import retell


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    dropout_seed: Any | None = None,
) -> Any:
    """``torch.nn.functional.scaled_dot_product_attention``, same signature and meaning, for tensors of any framework.

    With ``is_causal`` the first query is aligned with the first key, as in PyTorch. ``attn_mask`` may be anything that
    broadcasts to batch x heads x queries x keys, bool or numbers to add to scores. Its values are read on the host once, to
    find out whether it is padding, causal or a window, which are much faster. ``dropout_seed`` is `attention`'s: torch's
    generator draws one if it is None; other frameworks need one. A learned mask (``requires_grad``) gets its gradient from
    torch's own function, which then computes the whole call, and a warning says so. Rows that see no key are zeros, also
    where the mask is padding, causal or a window by the least finite number instead of minus infinity. Any number of batch
    dimensions may precede the heads: tensors are viewed as batch x heads x sequence x dim if their strides allow it, and
    copied otherwise. They are not broadcast, and ``scale`` must be positive.

    >>> import numpy
    >>> q = numpy.ones((2, 4, 16, 8), "float32")
    >>> keep = numpy.ones((2, 1, 1, 16), bool)
    >>> keep[1, ..., :5] = False                       # the second entry is padded on the left
    >>> scaled_dot_product_attention(q, q, q, attn_mask=keep).shape
    (2, 4, 16, 8)
    """
    try:
        dropout_p = number("dropout_p", dropout_p)
        if attn_mask is not None and is_causal:
            raise ValueError("pass attn_mask or is_causal, not both")
        if "int" in str(getattr(attn_mask, "dtype", "")):
            raise TypeError(f"attn_mask is {attn_mask.dtype}; pass bool, or numbers of query's type that are added to scores")
        if attn_mask is not None and _is_learned(attn_mask):
            if not _frameworks.is_traced():
                warnings.warn(LEARNED, stacklevel=2)
            if dropout_seed is not None:
                raise NotImplementedError("dropout_seed cannot be combined with a learned mask; omit it, or detach the mask")
            return by_torch(query, key, value, attn_mask, scale, enable_gqa, dropout_p)
        shape = _frameworks.shape("query", query)
        if len(shape) != 4:
            rest = (dropout_p, is_causal, scale, enable_gqa)
            return _by_four(query, key, value, attn_mask, rest, dropout_seed)
        of_key = _frameworks.shape("key", key)
        if len(of_key) != 4:
            raise ValueError(f"key is {of_key} but query {shape}; give them the same number of dimensions")
        if not enable_gqa and of_key[1] != shape[1]:
            raise ValueError(f"query has {shape[1]} heads but key has {of_key[1]}; pass enable_gqa=True")
        if attn_mask is not None:
            missing = 4 - len(_frameworks.shape("attn_mask", attn_mask))
            # A whole mask stays the same object, whose values may have been read before.
            attn_mask = attn_mask[(None,) * missing] if missing else attn_mask
        asked = options(is_causal, None, scale, None, "bhsd", top_left=is_causal, dropout=dropout_p)
        seed = seed_of(query, key, value, dropout_seed) if dropout_p else None
        values = NONE if attn_mask is None and seed is None else Values(mask=attn_mask, seed=seed)
        return run(query, key, value, asked, values, False, None)
    except Exception as error:
        retell(error, q="query", k="key", v="value", mask="attn_mask", dropout="dropout_p", seed="dropout_seed")
        raise


def _is_learned(mask: Any) -> bool:
    """Whether torch records what is done with a mask."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(mask, torch.Tensor) and mask.requires_grad and torch.is_grad_enabled()


def by_torch(
    query: Any, key: Any, value: Any, mask: Any, scale: float | None, enable_gqa: bool, dropout: float = 0.0
) -> Any:
    """torch's own function, for the gradient of a mask."""
    # Not by the name that callers may have given to this function.
    function = sys.modules["torch"]._C._nn.scaled_dot_product_attention
    return function(query, key, value, mask, dropout, scale=scale, enable_gqa=enable_gqa)


LEARNED = (
    "attn_mask requires a gradient, which FlashCore does not compute: torch's own scaled_dot_product_attention computes this "
    "call, with memory for every pair of query and key; detach the mask if it is not learned"
)


def _by_four(query: Any, key: Any, value: Any, mask: Any, rest: tuple[Any, ...], seed: Any) -> Any:
    """Tensors with another number of dimensions, as batch x heads x sequence x dim."""
    tensors = {"query": query, "key": key, "value": value}
    shapes = {name: _frameworks.shape(name, tensor) for name, tensor in tensors.items()}
    enable_gqa = rest[-1]
    _check_batch(shapes, enable_gqa)
    four = [_reshape(tensors[name], _four(shape, enable_gqa)) for name, shape in shapes.items()]
    if mask is not None:
        mask = _mask_of_four(mask, shapes["query"], enable_gqa)
    out = scaled_dot_product_attention(*four, mask, *rest, dropout_seed=seed)
    return _reshape(out, (*shapes["query"][:-1], shapes["value"][-1]))


Shape = tuple[int, ...]


def _parts(shape: Shape, enable_gqa: bool) -> tuple[Shape, Shape, Shape]:
    """Batch dimensions, heads (one extent or none) and the matrix of each head.

    What stands before the matrices of three dimensions is heads only where heads are grouped: a batch may have a mask for
    each entry.
    """
    matrix = len(shape) - 2
    heads = matrix - 1 if len(shape) > 3 or (len(shape) == 3 and enable_gqa) else matrix
    return shape[:heads], shape[heads:matrix], shape[matrix:]


def _four(shape: Shape, enable_gqa: bool) -> Shape:
    """Batch x heads x sequence x dim of a tensor with any number of dimensions."""
    batch, heads, matrix = _parts(shape, enable_gqa)
    return prod(batch), prod(heads), *matrix


def _check_batch(shapes: dict[str, Shape], enable_gqa: bool) -> None:
    """Demands that key and value have the batch dimensions of query."""
    query = shapes["query"]
    if len(query) < 2:
        raise ValueError(f"query is {query} but must have 2 dimensions or more, the last two sequence and dim")
    batch = _parts(query, enable_gqa)[0]
    for name, shape in shapes.items():
        if len(shape) != len(query):
            raise ValueError(f"{name} is {shape} but query {query}; give them the same number of dimensions")
        if _parts(shape, enable_gqa)[0] != batch:
            raise ValueError(f"{name} is {shape} but query has the batch dimensions {batch}; expand it to them")


def _mask_of_four(mask: Any, query: Shape, enable_gqa: bool) -> Any:
    """The mask for queries of that shape, as one for four dimensions."""
    shape = _frameworks.shape("attn_mask", mask)
    if len(shape) > len(query):
        raise ValueError(f"attn_mask is {shape} but query {query}; give it no more dimensions")
    shape = (1,) * (len(query) - len(shape)) + shape
    batch, heads, matrix = _parts(shape, enable_gqa)
    if prod(batch) != 1:
        batch = _parts(query, enable_gqa)[0]
        mask = _broadcast(_reshape(mask, shape), (*batch, *heads, *matrix))
    return _reshape(mask, (prod(batch), prod(heads), *matrix))


def _reshape(tensor: Any, shape: Shape) -> Any:
    """A view where strides allow it, else a copy. Not every array of the standard has the method."""
    try:
        return tensor.reshape(shape)
    except AttributeError:
        return tensor.__array_namespace__().reshape(tensor, shape)


def _broadcast(tensor: Any, shape: Shape) -> Any:
    """The tensor repeated along dimensions of 1, without a copy."""
    try:
        return tensor.expand(shape)
    except AttributeError:
        pass
    namespace = getattr(tensor, "__array_namespace__", None)
    if namespace is None:  # older NumPy, and older CuPy, which answers for NumPy's functions
        import numpy as np

        return np.broadcast_to(tensor, shape)
    return namespace().broadcast_to(tensor, shape)
