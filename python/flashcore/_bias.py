"""What is added to scores: masks that are more than padding or a band, and ALiBi's slopes, as the extension takes them."""

from __future__ import annotations

from typing import Any

from ._arguments import each, real


def additive(framework: Any, mask: Any, q: Any, keys: int) -> Any:
    """A mask as numbers where q is: batch x heads x queries x keys, where the first three may be 1.

    Numbers stay what they are; bool and integers become 0 where a key takes part and minus infinity where not.
    """
    torch = getattr(framework, "torch", None)
    numbers = _of_torch(torch, mask, q) if torch is not None else _of_arrays(framework, mask, q)
    if numbers.ndim < 4:  # of keys alone, or of batch entries and keys
        numbers = numbers.reshape((1,) * (2 - numbers.ndim) + tuple(numbers.shape))[:, None, None]
    if numbers.shape[-1] == 1 != keys:
        numbers = _widened(torch, numbers, keys)
    return numbers


def _of_torch(torch: Any, mask: Any, q: Any) -> Any:
    mask = torch.as_tensor(mask, device=q.device).detach()
    if not mask.is_floating_point():
        return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(mask == 0, float("-inf"))
    mask = mask if mask.dtype in (torch.float16, torch.bfloat16, torch.float32) else mask.float()
    return mask if mask.shape[-1] <= 1 or mask.stride(-1) == 1 else mask.contiguous()


def _of_arrays(framework: Any, mask: Any, q: Any) -> Any:
    space = _namespace(framework, q)
    mask = framework.beside(space.asarray(mask), q)
    kind = str(mask.dtype)
    if "bool" in kind or "int" in kind:
        return space.where(mask != 0, space.float32(0), space.float32(float("-inf")))
    return space.asarray(mask, dtype=space.float32, order="C") if space.__name__ == "numpy" else mask.astype(space.float32)


def _namespace(framework: Any, q: Any) -> Any:
    """NumPy's functions, of the framework's own."""
    for name in ("cupy", "numpy"):
        if hasattr(framework, name) and not hasattr(framework, "jax"):
            return getattr(framework, name)
    return framework.jax.numpy if hasattr(framework, "jax") else q.__array_namespace__()


def _widened(torch: Any, numbers: Any, keys: int) -> Any:
    shape = (*numbers.shape[:-1], keys)
    if torch is not None:
        return numbers.expand(shape).contiguous()
    return numbers.repeat(keys, axis=-1)


def slopes(framework: Any, values: Any, q: Any) -> Any:
    """Slopes of heads, or of sequences x heads, where q is."""
    if values is None:
        return None
    torch = getattr(framework, "torch", None)
    if not hasattr(values, "dtype"):
        instead = "pass one per query head, or per sequence and query head"
        one = lambda name, item: each(name, item, real, instead) if isinstance(item, (list, tuple)) else real(name, item)
        values = each("slopes", values, one, instead)
    if torch is not None:
        return torch.as_tensor(values, dtype=torch.float32, device=q.device).detach().contiguous()
    space = _namespace(framework, q)
    return framework.beside(getattr(space, "ascontiguousarray", space.asarray)(values, dtype=space.float32), q)
