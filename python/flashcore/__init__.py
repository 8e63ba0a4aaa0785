"""FlashAttention for the tensors of any framework: torch, JAX, CuPy, NumPy and any other DLPack library.

>>> import numpy, flashcore
>>> q = numpy.random.rand(1, 8, 128, 64).astype("float16")   # batch, heads, sequence, dim
>>> out = flashcore.attention(q, q, q, causal=True)
>>> out.shape, out.dtype
((1, 8, 128, 64), dtype('float16'))

Inputs are not copied. They are on the CPU or an NVIDIA GPU, where kernels run on the caller's current stream; the result
is a tensor of the caller's framework. Code written for PyTorch's ``scaled_dot_product_attention`` or for FlashAttention
changes one import.
"""

from ._append import append, reshape_and_cache_flash
from ._attention import accumulate, attention, packed_attention
from ._config import show_config
from ._dropout import dropout_mask
from ._flash_attn import flash_attn_func, flash_attn_varlen_func
from ._grouped import grouped_mm
from ._kvcache import flash_attn_with_kvcache
from ._merge import merge
from ._moe import fused_experts, moe
from ._native import __version__
from ._packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from ._quantise import Quantised, quantise
from ._sdpa import scaled_dot_product_attention

__all__ = [
    "Quantised",
    "__version__",
    "accumulate",
    "append",
    "attention",
    "dropout_mask",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "fused_experts",
    "grouped_mm",
    "merge",
    "moe",
    "packed_attention",
    "quantise",
    "reshape_and_cache_flash",
    "scaled_dot_product_attention",
    "show_config",
]


def __getattr__(name: str):
    """``flashcore.sim`` and ``flashcore.distributed`` are loaded when they are first asked for."""
    if name in ("sim", "distributed"):
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
