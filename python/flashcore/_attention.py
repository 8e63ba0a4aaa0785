"""``attention``: options become one ``Options`` value, tensors go to the extension as they are."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

from . import _frameworks, _masks
from ._arguments import count, number
from ._native import Options


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any | None = None,
    key_lengths: Any | None = None,
    key_mask: Any | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Any | None = None,
) -> Any:
    """Attention: ``softmax(scale * q @ k.T + mask) @ v`` for each head, in memory linear in the sequence length.

    Args:
        q, k, v: tensors of float16, bfloat16 or float32 with 4 dimensions in the order of ``layout``. The heads of
            ``q`` are a multiple of those of ``k`` and ``v`` (grouped heads); ``v`` may have another dim.
        causal: a query sees the keys up to its own position. The last query stands at the last key.
        window: a query sees so many keys before its position, and as many after it unless ``causal``; or a pair of
            both numbers, where None does not limit.
        scale: factor on the scores, 1/sqrt(dim) where None.
        softcap: limits scores softly, to ``softcap * tanh(score / softcap)``.
        sinks: one logit per query head that takes its share of the softmax and adds nothing to the output.
        key_lengths: how many keys each batch entry uses, one number per entry. The last query stands at the last key
            that is used.
        key_mask: which keys take part, bool, batch x keys: padding on the left or on the right.
        layout: ``"bhsd"`` for batch, heads, sequence, dim; ``"bshd"`` for batch, sequence, heads, dim.
        return_lse: also return the log-sum-exp of each row's scores, float32, batch x heads x sequence.
        out: where to write the result; a new tensor where None.

    Returns:
        The result, a tensor of q's framework and order; with ``return_lse`` a pair. Rows that see no key are zeros
        with a log-sum-exp of minus infinity.

    On a GPU the call returns as soon as the kernel is queued on the current stream. Values of ``sinks``,
    ``key_lengths`` and ``key_mask`` are needed on the host: where these are GPU tensors, reading them waits for the GPU,
    once for as long as the tensor is unchanged.

    >>> import numpy
    >>> q = numpy.ones((2, 4, 16, 8), "float32")
    >>> k = numpy.ones((2, 2, 32, 8), "float32")                     # two query heads share a key head
    >>> out, lse = attention(q, k, k, window=(7, 0), return_lse=True)
    >>> out.shape, lse.shape
    ((2, 4, 16, 8), (2, 4, 16))
    >>> out = attention(q, k, k, causal=True, key_lengths=[32, 20])  # the second entry uses 20 keys
    """
    plain = window is None and sinks is None and key_lengths is None and key_mask is None and not return_lse
    if plain and not _frameworks.is_traced():
        # As `run`, with fewer steps: this is the call that counts.
        shortcut = _shortcuts.get(type(q))
        if shortcut is not None:
            options = _plain.get((causal, scale, softcap, layout)) or _learn_plain(causal, scale, softcap, layout)
            result = shortcut(q, k, v, out, options)
            if result is not None:
                return result
    left, right = band(causal, window)
    return run(q, k, v, (left, right, False, scale, softcap, sinks, key_lengths, key_mask, layout), return_lse, out)


Settings = tuple[
    "int | None",  # left
    "int | None",  # right
    bool,  # top_left
    "float | None",  # scale
    "float | None",  # softcap
    Any,  # sinks
    Any,  # key_lengths
    Any,  # mask: batch x keys, or batch x 1 x queries x keys as scaled_dot_product_attention has it
    str,  # layout
]
"""What is asked for beside the tensors, with a band and its corner spelled out."""


def run(q: Any, k: Any, v: Any, settings: Settings, return_lse: bool, out: Any | None) -> Any:
    """Attention; all public functions end here."""
    _, _, _, _, _, sinks, key_lengths, mask, _ = settings
    plain = sinks is None and key_lengths is None and mask is None and not return_lse
    if plain and not _frameworks.is_traced():
        shortcut = _shortcuts.get(type(q))
        result = shortcut and shortcut(q, k, v, out, _known.get(settings) or _learn(settings))
        if result is not None:
            return result
    if _is_compiling():
        from ._torch_operator import call

        return call(q, k, v, settings, return_lse, out)
    return eager(q, k, v, settings, return_lse, out)


def eager(q: Any, k: Any, v: Any, settings: Settings, return_lse: bool, out: Any | None) -> Any:
    """`run` outside of tracing."""
    framework = _frameworks.of(q)
    if framework.by_operator:
        from ._torch_operator import call

        return call(q, k, v, settings, return_lse, out)
    _, _, _, _, _, sinks, key_lengths, mask, layout = settings
    if sinks is None and key_lengths is None and mask is None:
        options = _known.get(settings) or _learn(settings)
    else:
        options = _with_values(q, k, settings)
    return framework.attention(q, k, v, out, layout, return_lse, options)


_shortcuts = _frameworks.shortcuts
_MOST_KNOWN = 1024
_known: dict[Settings, Options] = {}
_plain: dict[tuple[bool, float | None, float | None, str], Options] = {}
"""Options by causal, scale, softcap and layout, for calls that ask for nothing else."""


def _learn_plain(causal: bool, scale: float | None, softcap: float | None, layout: str) -> Options:
    left, right = band(causal, None)
    if len(_plain) >= _MOST_KNOWN:
        _plain.clear()
    options = _learn((left, right, False, scale, softcap, None, None, None, layout))
    return _plain.setdefault((causal, scale, softcap, layout), options)


def _learn(settings: Settings) -> Options:
    """Options without values, which later calls find again."""
    left, right, top_left, scale, softcap, _, _, _, layout = settings
    if len(_known) >= _MOST_KNOWN:  # a program that never asks the same twice
        _known.clear()
    scale, softcap = _factors(scale, softcap)
    options = Options(layout, left=left, right=right, top_left=top_left, scale=scale, softcap=softcap)
    return _known.setdefault(settings, options)


def _with_values(q: Any, k: Any, settings: Settings) -> Options:
    """Options with sinks, lengths or a mask, whose values are read here."""
    left, right, top_left, scale, softcap, sinks, key_lengths, mask, layout = settings
    starts = ends = None
    if key_lengths is not None:
        if mask is not None:
            raise ValueError("pass key_lengths or key_mask, not both")
        ends = _masks.lengths(key_lengths)
    elif mask is not None and _have_four(q, k):
        axis = 2 if layout == "bhsd" else 1
        band = _masks.Band(left, right, top_left)
        band, starts, ends = _masks.reduce(mask, band, q.shape[0], q.shape[axis], k.shape[axis])
        left, right, top_left = band
    if sinks is not None:
        sinks = _masks.logits(sinks)
    return _options(layout, left, right, top_left, *_factors(scale, softcap), sinks, starts, ends)


def _have_four(q: Any, k: Any) -> bool:
    """Whether masks can be read by the extents of these tensors; the extension refuses tensors where not."""
    return len(getattr(q, "shape", ())) == len(getattr(k, "shape", ())) == 4


def _factors(scale: Any, softcap: Any) -> tuple[float | None, float | None]:
    """Scale and softcap, each a number or None."""
    return (
        None if scale is None else number("scale", scale),
        None if softcap is None else number("softcap", softcap),
    )


@lru_cache(maxsize=256)
def _options(
    layout: str,
    left: int | None,
    right: int | None,
    top_left: bool,
    scale: float | None,
    softcap: float | None,
    sinks: tuple[float, ...] | None,
    starts: tuple[int, ...] | None,
    ends: tuple[int, ...] | None,
) -> Options:
    """The same value for the same numbers, so that the extension recognises it by its address."""
    return Options(
        layout,
        left=left,
        right=right,
        top_left=top_left,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        starts=starts,
        ends=ends,
    )


def band(causal: bool, window: Any, name: str = "window") -> tuple[int | None, int | None]:
    """How many keys before and after its position a query sees; None does not limit."""
    if window is None:
        return (None, 0) if causal else (None, None)
    try:
        sides = tuple(window)
    except TypeError:  # one number for both
        sides = (window, window)
    if len(sides) != 2:
        raise ValueError(f"{name} is {window}; pass a pair: how many keys before, how many after")
    instead = "use None for a side without limit"
    left, right = [None if side is None else count(name, side, instead) for side in sides]
    return left, 0 if causal else right


def _is_compiling() -> bool:
    """Whether torch is tracing the caller, so that it needs an operator of its own."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()
