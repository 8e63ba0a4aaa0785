"""What is particular to each framework: how to make a tensor, which stream is current, when memory may go.

`of` finds the framework of a tensor by its type; `attention` of that framework calls the extension. Each has a file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .._native import Direct, exchanges
from .base import CPU, NO_NESTED, UNTOLD, Framework, demand, each_tensor, no_tensor, rows, seed_number, shape
from .of_cupy import Cupy
from .of_jax import Jax
from .of_numpy import Numpy, exportable
from .of_torch import (
    NO_FORWARD_GRADIENTS,
    NO_MASK_GRADIENTS,
    NO_OUT_GRADIENTS,
    NO_SECOND_GRADIENTS,
    NO_SLOPE_GRADIENTS,
    Torch,
    TorchSubclass,
    autocast,
    without_memory,
)

__all__ = [
    "NO_FORWARD_GRADIENTS",
    "NO_MASK_GRADIENTS",
    "NO_NESTED",
    "NO_OUT_GRADIENTS",
    "NO_SECOND_GRADIENTS",
    "NO_SLOPE_GRADIENTS",
    "Jax",
    "Torch",
    "UNTOLD",
    "autocast",
    "demand",
    "direct",
    "duals",
    "each_tensor",
    "exchanges",
    "exportable",
    "is_traced",
    "learn",
    "of",
    "of_all",
    "rows",
    "seed_number",
    "shape",
    "shortcuts",
    "without_memory",
]


def is_traced() -> bool:
    """Whether torch.compile follows the caller; torch's own function takes this one's place once torch is met."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


class duals:  # noqa: N801 - torch's module of forward-mode gradients takes its place once torch is met
    """Tensors that carry derivatives with them, of which there are none while the level is negative."""

    _current_level = -1


direct: dict[type, Direct] = {}
"""The extension's short way for the types of tensors that have it."""
shortcuts: dict[type, Callable[..., Any]] = {}
"""`Direct.attention` for these types."""
_known: dict[type, Framework] = {}
_made: dict[type[Framework], Framework] = {}


def is_on_host(array: Any) -> bool:
    """Whether an array's values can be looked at without waiting for anything."""
    is_cpu = getattr(array, "is_cpu", None)  # torch's tensors may stand for others, which have no memory to tell of
    return bool(array.__dlpack_device__()[0] == CPU if is_cpu is None else is_cpu)


def of(tensor: Any) -> Framework:
    """The framework of a tensor."""
    if is_traced():  # what makes torch known is no part of a trace
        from .._torch_operator import FRAMEWORK

        return FRAMEWORK
    return _known.get(type(tensor)) or learn(tensor)


def of_all(q: Any, *others: Any) -> Framework:
    """The framework of q; JAX's where q is an array of NumPy's among arrays of JAX's, as JAX takes them."""
    framework = of(q)
    if type(framework) is Numpy:
        kinds = (_known.get(type(other)) or (learn(other) if hasattr(other, "__dlpack__") else framework) for other in others)
        framework = next((kind for kind in kinds if type(kind) is Jax), framework)
    return framework


def learn(tensor: Any) -> Framework:
    """Makes the framework of a kind of tensors known."""
    kind = type(tensor)
    modules = [base.__module__.partition(".")[0] for base in kind.__mro__]
    maker = next((_MAKERS[name] for name in modules if name in _MAKERS), None)
    if maker is None and not hasattr(kind, "__dlpack__"):
        raise no_tensor("q", tensor)
    maker = maker or Framework
    if maker is Torch and kind not in (sys.modules["torch"].Tensor, sys.modules["torch"].nn.Parameter):
        maker = TorchSubclass
    # Two threads that come here at once may both make one; either will do.
    framework = _made.get(maker) or _made.setdefault(maker, maker())
    _known[kind] = framework
    if isinstance(framework, Torch) and framework.exchanges and not framework.by_operator:
        global is_traced
        is_traced = framework.torch.compiler.is_dynamo_compiling
        global duals
        duals = framework.torch.autograd.forward_ad
        direct[kind] = Direct(framework.torch.is_grad_enabled, framework.is_autocast_enabled, framework.recipe)
        shortcuts[kind] = direct[kind].attention
    return framework


_MAKERS: dict[str, type[Framework]] = {
    "torch": Torch,
    "numpy": Numpy,
    "cupy": Cupy,
    "jax": Jax,
    "jaxlib": Jax,
}
