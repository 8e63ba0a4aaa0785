"""Masks as callers have them become key ranges and a band, which is what kernels know."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from ._options import Options


class Band(NamedTuple):
    """Which keys a query sees: from ``left`` before to ``right`` after its diagonal, where None does not limit."""

    left: int | None
    right: int | None
    top_left: bool
    """Whether the diagonal starts at the first key, rather than ending at the last."""

    @property
    def limits(self) -> bool:
        return self.left is not None or self.right is not None


class Ranges(NamedTuple):
    """A mask, reduced: the band, and the keys that each batch entry uses (None for all)."""

    band: Band
    starts: tuple[int, ...] | None
    ends: tuple[int, ...] | None


class _Memory:
    """Remembers what was read from a tensor for as long as the tensor lives unchanged.

    Reading a GPU tensor waits for the GPU, and finding out what a mask is takes longer than looking whether it has changed; a
    model passes the same mask to every layer.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, Any], tuple[Any, Callable[[], bool], Any]] = {}

    def get(self, tensor: Any, kind: Any, read: Callable[[], Any]) -> Any:
        key = (id(tensor), kind)
        found = self._known.get(key)
        if found is not None and found[0]() is tensor and found[1]():
            return found[2]
        # What is changed while it is read is read again next time.
        unchanged = _watch(tensor)
        value = read()
        if unchanged is not None:
            forget = lambda _: self._known.pop(key, None)
            self._known[key] = (weakref.ref(tensor, forget), unchanged, value)
        return value


MOST_KEPT = 1 << 22
"""Elements of a mask on the CPU from which on no copy is kept."""


def _watch(tensor: Any) -> Callable[[], bool] | None:
    """What says whether the tensor's values are still those of now; None where there is no telling."""
    module = type(tensor).__module__
    if module.startswith("jax"):
        return lambda: True  # immutable
    if not module.startswith("torch"):
        return None
    own = weakref.ref(tensor)
    if tensor.is_cpu:
        # Its memory may be somebody else's too, as NumPy's, whose writes no version counts.
        from torch import equal

        kept = tensor.detach().clone() if tensor.numel() <= MOST_KEPT else None
        return None if kept is None else lambda: equal(kept, own().detach())
    if tensor.is_inference():
        return None
    version = tensor._version
    return lambda: own()._version == version


_memory = _Memory()


def band_of(options: Options) -> Band:
    """The band that the options ask for."""
    return Band(options.left, options.right, options.top_left)


class _Irreducible(Exception):
    """A mask that is neither padding nor a band."""


MOST_READ = 1 << 26
"""Elements of a mask from which on it is not read to find out what it is."""


def reduce(mask: Any, band: Band, batch: int, queries: int, keys: int) -> Ranges | None:
    """Which keys each batch entry uses, and the band, from a mask that has the shape of padding or of a band; else None."""
    if prod(getattr(mask, "shape", ())) > MOST_READ:
        return None

    def read() -> Ranges | None:
        try:
            return _reduce(mask, band, batch, queries, keys)
        except _Irreducible:
            return None

    return _memory.get(mask, (band, batch, queries, keys), read)


def _reduce(mask: Any, band: Band, batch: int, queries: int, keys: int) -> Ranges:
    seen = _host(mask)
    if seen.ndim == 1 and batch == 1:
        seen = seen[None]
    if seen.ndim == 2:
        if seen.shape != (batch, keys):
            raise ValueError(f"key_mask is {seen.shape} but must be batch x keys, {(batch, keys)}")
        seen = seen[:, None, :]
    else:
        seen = _without_heads(seen, batch, queries, keys)
    starts, ends = _spans(seen, keys)
    if seen.shape[1] > 1:
        band = _band_of(seen, band, starts, ends)
    return _placed(band, starts, ends, queries, keys)


def _host(mask: Any) -> Any:
    """The mask as a NumPy array of bool; numbers are added to scores, so that 0 shows a key and -inf hides it."""
    import numpy as np

    if type(mask).__module__.startswith("torch"):
        mask = mask.detach()
        mask = (mask.float() if mask.is_floating_point() else mask).cpu().numpy()
    values = mask.get() if hasattr(mask, "dtype") and hasattr(mask, "get") else np.asarray(mask)
    if values.dtype.kind not in "biuf" and values.dtype.name != "bfloat16":
        raise TypeError(f"the mask is {values.dtype}; pass bool, or numbers that are added to scores")
    if values.dtype == bool:
        return values
    if values.dtype.kind in "iu":
        return values != 0
    hidden = values <= np.finfo(np.float16).min  # what stands for -inf, in any of the types
    if not ((values == 0) | hidden).all():
        raise _Irreducible
    return ~hidden


def _without_heads(seen: Any, batch: int, queries: int, keys: int) -> Any:
    """batch x queries x keys, where queries may be 1."""
    import numpy as np

    if seen.ndim != 4:
        raise ValueError(f"the mask has {seen.ndim} dimensions but must have 2 or 4")
    if seen.shape[1] != 1 and not (seen == seen[:, :1]).all():
        raise _Irreducible
    seen = seen[:, 0]
    rows = 1 if seen.shape[1] == 1 else queries
    try:
        return np.broadcast_to(seen, (batch, rows, keys))
    except ValueError:
        whole = (batch, 1, queries, keys)
        raise ValueError(f"the mask of {seen.shape[1:]} does not fit scores of {whole}") from None


def _spans(seen: Any, keys: int) -> tuple[Any, Any]:
    """The first and the one-past-last key that each batch entry uses at all; none is used as `keys` to `keys`."""
    import numpy as np

    used = seen.any(axis=1)
    some = used.any(axis=1)
    starts = np.where(some, used.argmax(axis=1), keys) if keys else np.zeros(len(used), int)
    ends = np.where(some, keys - used[:, ::-1].argmax(axis=1), keys) if keys else starts
    if used.sum() != (ends - starts).sum():
        raise _Irreducible
    return starts, ends


def _band_of(seen: Any, band: Band, starts: Any, ends: Any) -> Band:
    """The band that, with the key ranges, is exactly the mask."""
    if band.limits:
        raise _Irreducible
    for top_left in (False, True):
        found = _band_from(seen, top_left, starts, ends)
        if found is not None:
            return found
    raise _Irreducible


def _band_from(seen: Any, top_left: bool, starts: Any, ends: Any) -> Band | None:
    """The band with its diagonal in that corner, if the mask is one."""
    import numpy as np

    _, queries, keys = seen.shape
    corner = 0 if top_left else keys - queries
    position = np.arange(keys, dtype=np.int32)
    inside = (position >= starts[:, None]) & (position < ends[:, None])
    # How far each key lies past its query's diagonal.
    past = position[None, :] - np.arange(queries, dtype=np.int32)[:, None] - corner
    hidden = (inside[:, None, :] & ~seen).any(axis=0)
    shown = past[seen.any(axis=0)]
    if not shown.size:
        return None
    left = -int(shown.min()) if (hidden & (past < 0)).any() else None
    right = int(shown.max()) if (hidden & (past > 0)).any() else None
    if any(bound is not None and bound < 0 for bound in (left, right)):
        return None
    expected = inside[:, None, :].copy() if left is None else inside[:, None, :] & (past >= -left)
    expected = expected if right is None else expected & (past <= right)
    return Band(left, right, top_left) if (expected == seen).all() else None


def _placed(band: Band, starts: Any, ends: Any, queries: int, keys: int) -> Ranges:
    """Key ranges with a band whose diagonal is that of the whole sequence, as masks mean it.

    The kernel's diagonal starts at the first key in use or ends at the last. For the whole sequence that is the same
    where padding stands at the other end.
    """
    import numpy as np

    none = starts == ends
    from_first, to_last = bool((none | (starts == 0)).all()), bool((none | (ends == keys)).all())
    if from_first and to_last and not none.any():
        return Ranges(band, None, None)
    square = queries == keys
    if from_first and (square or band.top_left or not band.limits):
        return Ranges(band._replace(top_left=True), None, tuple(np.where(none, 0, ends).tolist()))
    if to_last and (square or not band.top_left or not band.limits):
        return Ranges(band._replace(top_left=False), tuple(np.where(none, keys, starts).tolist()), None)
    if not band.limits:
        return Ranges(band, tuple(starts.tolist()), tuple(ends.tolist()))
    raise _Irreducible
