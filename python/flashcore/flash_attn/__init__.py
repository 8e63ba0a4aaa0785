"""FlashAttention's package by its names, computed by FlashCore.

>>> import flashcore.flash_attn as flash_attn
>>> flash_attn.flash_attn_func                                  # doctest: +ELLIPSIS
<function flash_attn_func at ...>

`install` goes further, for code that is not one's own: what imports ``flash_attn`` from then on, in this process, gets these
modules, and so does what imports FlashAttention-3's ``flash_attn_interface``.
"""

from __future__ import annotations

import importlib
import sys

from .._flash_attn import flash_attn_func, flash_attn_varlen_func
from .._kvcache import flash_attn_with_kvcache
from .._packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__version__ = "2.8.3"
"""The release of FlashAttention whose functions these are: callers ask for one that is new enough."""

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]

_MODULES = {
    "flash_attn": "",
    "flash_attn.flash_attn_interface": ".flash_attn_interface",
    "flash_attn.bert_padding": ".bert_padding",
    "flash_attn.layers": ".layers",
    "flash_attn.layers.rotary": ".layers.rotary",
    "flash_attn.ops": ".ops",
    "flash_attn.ops.triton": ".ops.triton",
    "flash_attn.ops.triton.rotary": ".ops.triton.rotary",
    "flash_attn_interface": ".flash_attn_3",
}


def install() -> None:
    """Makes ``import flash_attn`` and ``import flash_attn_interface`` mean FlashCore, until the process ends."""
    for name, ours in _MODULES.items():
        sys.modules[name] = importlib.import_module(ours or __name__, __name__)
