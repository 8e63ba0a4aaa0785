"""What a call asks for beside its tensors: options, which stay, and values, which change from call to call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import _frameworks, _native
from ._arguments import count, flag, probability, single, text


@dataclass(frozen=True, slots=True)
class Options:
    """Options of attention; `native` is what the extension takes."""

    left: int | None = None
    """How many keys before its diagonal a query sees; None does not limit."""
    right: int | None = None
    top_left: bool = False
    """Whether the diagonal starts at the first key, rather than ending at the last."""
    scale: float | None = None
    softcap: float | None = None
    layout: str = "bhsd"
    accumulate: bool = False
    """Whether the result is merged into what `out` and its log-sum-exp hold already."""
    shift: int = 0
    """How many keys the diagonal lies further to the right."""
    batch_invariant: bool = False
    """Whether the bits of a row must not depend on the rest of the batch."""
    dropout: float | None = None
    """With which probability weights are left out."""
    ready: Any = field(default=None, init=False, compare=False, repr=False)
    """`native`, once it was asked for; `known` options have it."""

    @property
    def native(self) -> _native.Options:
        """The options as the extension takes them, made once."""
        return self.ready or self._make()

    def _make(self) -> _native.Options:
        made = _native.Options(
            text("layout", self.layout, 'pass "bhsd" or "bshd"'),
            left=self.left,
            right=self.right,
            top_left=self.top_left,
            scale=None if self.scale is None else single("scale", self.scale),
            softcap=None if self.softcap is None else single("softcap", self.softcap),
            accumulate=self.accumulate,
            shift=self.shift,
            batch_invariant=self.batch_invariant,
            dropout=None if self.dropout is None else probability("dropout", self.dropout),
        )
        object.__setattr__(self, "ready", made)
        return made


known: dict[tuple[Any, ...], Options] = {}
"""Options by their arguments (causal, window, scale, softcap, layout, top_left, batch_invariant, dropout), so that a call finds
them."""


def options(
    causal: bool,
    window: Any,
    scale: Any,
    softcap: Any,
    layout: str,
    top_left: bool = False,
    name: str = "window",
    batch_invariant: bool = False,
    dropout: float = 0.0,
) -> Options:
    """Options as callers give them."""
    key, found = (causal, window, scale, softcap, layout, top_left, batch_invariant, dropout), None
    if _frameworks.is_traced():  # what traces a call must not see the cache
        key = None
    else:
        try:
            found = known.get(key)
        except TypeError:  # a window that is a list, or a mistake, which is told below
            key = None
    if found is not None:
        return found
    left, right = band(causal, window, name)
    more = dict(batch_invariant=flag("batch_invariant", batch_invariant), dropout=dropout or None)
    return _learn(key, Options(left, right, top_left, scale, softcap, layout, **more))


def _learn(key: Any, made: Options) -> Options:
    if key is None:
        return made
    made.native  # noqa: B018 - a mistake is told before it is remembered
    if len(known) >= 1024:  # a program that never asks the same twice
        known.clear()
    return known.setdefault(key, made)


def band(causal: bool, window: Any, name: str = "window") -> tuple[int | None, int | None]:
    """How many keys before and after its position a query sees; None does not limit."""
    causal = flag("causal", causal)
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


class Values(NamedTuple):
    """Lengths, sinks, masks, page table and factors of one call, as callers have them."""

    query_lengths: Any = None
    """Used queries of each batch entry, or offsets of packed sequences."""
    key_lengths: Any = None
    sinks: Any = None
    mask: Any = None
    """batch x keys, or batch x 1 x queries x keys as scaled_dot_product_attention has it."""
    longest: tuple[int, int] | None = None
    """Bounds on the queries and keys of packed sequences."""
    table: Any = None
    """The numbers of the pages that hold the keys of each sequence."""
    slopes: Any = None
    """ALiBi's, of heads or of sequences x heads."""
    factors: Any = None
    """What q, k and v of 8 bits are multiplied by, or k and v alone: numbers, or tensors of batch x key heads."""
    blocks: tuple[int, int] | None = None
    """Rows of q and of k that share a factor, where factors are those of blocks of q and k and of features of v."""
    turned: bool = False
    """Whether v is turned, as `quantise` leaves it."""
    seed: Any = None
    """What decides which weights dropout leaves out: 64 bits where q is, as `_dropout.seed_of` gives them."""


NONE = Values()
