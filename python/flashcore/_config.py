"""``show_config``: what this installation found."""

from __future__ import annotations

import platform
import sys
from typing import Literal

from . import _native


def show_config(mode: Literal["print", "dict"] = "print") -> dict[str, str] | None:
    """Prints what FlashCore found on this machine, or returns it with ``mode="dict"``.

    >>> sorted(show_config(mode="dict"))[:3]
    ['cpu', 'cuda', 'frameworks']
    """
    rows = dict(_native.config())
    rows["python"] = f"{platform.python_version()} on {platform.platform()}"
    names = ("torch", "jax", "cupy", "numpy", "transformers")
    loaded = [f"{name} {sys.modules[name].__version__}" for name in names if name in sys.modules]
    rows["frameworks"] = ", ".join(loaded) or "none imported"
    if mode == "dict":
        return rows
    if mode != "print":
        raise ValueError(f'unknown mode {mode!r}; use "print" or "dict"')
    width = max(map(len, rows))
    for name, text in rows.items():
        print(f" {name:<{width}}  {text}")
    return None
