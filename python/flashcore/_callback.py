"""What `_jit` does where JAX has no foreign function interface: a call back to the host when the program runs.

On the CPU arrays are handed over where they lie. On a GPU they would be copied to the host and computed there, which nobody
wants who has a GPU, so that such calls are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._frameworks import exportable
from ._native import Options, Values, backward, forward

if TYPE_CHECKING:
    from ._frameworks import Jax


def call_back(
    framework: Jax, options: Options, longest: Any, ranges: Any, arrays: dict[str, Any], results: list[str], wanted: Any
) -> Any:
    """The results, computed on the host."""
    backend = framework.jax.default_backend()
    if backend != "cpu":
        raise TypeError(f"q is being traced for {backend}, which needs JAX 0.5 or later; update it, or call flashcore outside")
    numpy, names = framework.numpy, list(arrays)

    def compute(*tensors: Any) -> Any:
        made = [numpy.zeros(like.shape, like.dtype) for like in wanted]
        given = dict(zip((*names, *results), (*map(numpy.asarray, tensors), *made)))
        bits = tuple(given[name].dtype.name == "bfloat16" for name in ("q", "k", "v", "q"))
        find = {name: exportable(numpy, array)[0] for name, array in given.items()}.get
        sinks, bias = (given[name].astype("float32") if name in given else None for name in ("sinks", "bias"))
        values = Values(find("lengths_q"), find("lengths_kv"), sinks, longest, ranges, find("table"), bias, seed=find("seed"))
        qkv = [find(name) for name in "qkv"]
        if "dq" in results:
            rest = [find(name) for name in ("out", "sums", "lse", "d_out", "dq", "dk", "dv")]
            # A row for each batch entry, of which the CPU needs one.
            d_sinks = given["d_sinks"][0] if "d_sinks" in given else None
            backward(*qkv, *rest, d_sinks, options, values, bits_are_bf16=True)
        else:
            forward(*qkv, find("out"), find("lse"), options, values, bits_are_bf16=bits)
        return tuple(made)

    return framework.jax.pure_callback(compute, wanted, *arrays.values(), vmap_method="sequential")
