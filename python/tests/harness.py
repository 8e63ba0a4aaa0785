"""What all tests share: frameworks, an f64 reference, cases; needs no pytest, so that `run_gpu.py` runs the same tests.

A test is a function `test_*`. `@cases(a=[...], b=[...])` runs it for every combination; `Skip` says why one cannot run.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from contextlib import contextmanager
from unittest import SkipTest as Skip

import numpy as np

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves memory to the others
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads wait for each other in loops, for tensors this small

TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}


def cases(**axes):
    """Runs a test for every combination of values; a case's name is made of the values."""

    def mark(test):
        combinations = [dict(zip(axes, values)) for values in itertools.product(*axes.values())]
        test.cases = {"-".join(str(v) for v in case.values()): case for case in combinations}
        return test

    return mark


@contextmanager
def raises(kind, pattern):
    """Demands an exception of exactly that class whose message matches."""
    try:
        yield
    except Exception as error:
        assert type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}: {error}"
        assert re.search(pattern, str(error)), f"{str(error)!r} does not match {pattern!r}"
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


class Framework:
    """Makes tensors of one framework on one device, and reads them."""

    dtypes = ("float32", "float16", "bfloat16")

    def __init__(self, name, module, device="cpu"):
        self.name, self.module, self.device = name, module, device

    def __str__(self):
        return self.name

    def need(self):
        """Skips the test where the framework or its device is not there."""
        if importlib.util.find_spec(self.module) is None:
            raise Skip(f"{self.module} is not installed")
        if self.device == "cuda" and not has_cuda(self.module):
            raise Skip(f"{self.module} has no GPU")

    def numbers(self, values, dtype):
        """Integers as the framework has them."""
        return self.make(np.asarray(values), dtype)


class Numpy(Framework):
    def make(self, values, dtype):
        if dtype == "bfloat16":
            if importlib.util.find_spec("ml_dtypes") is None:
                raise Skip("ml_dtypes is not installed")
            import ml_dtypes

            return values.astype(ml_dtypes.bfloat16)
        return values.astype(dtype)

    def read(self, tensor):
        return np.asarray(tensor).astype("float64")

    def is_mine(self, tensor):
        return type(tensor) is np.ndarray

    def transpose(self, tensor):
        return tensor.swapaxes(1, 2)


class Jax(Framework):
    def make(self, values, dtype):
        import jax

        return jax.device_put(jax.numpy.asarray(values, dtype), jax.devices(self.device)[0])

    def read(self, tensor):
        return np.asarray(tensor.astype("float32")).astype("float64")

    def is_mine(self, tensor):
        import jax

        return isinstance(tensor, jax.Array) and tensor.devices() == {jax.devices(self.device)[0]}

    def transpose(self, tensor):
        return tensor.swapaxes(1, 2)


class Torch(Framework):
    def make(self, values, dtype):
        import torch

        return torch.tensor(np.asarray(values)).to(device=self.device, dtype=getattr(torch, dtype))

    def read(self, tensor):
        return tensor.double().cpu().numpy()

    def is_mine(self, tensor):
        import torch

        return type(tensor) is torch.Tensor and tensor.device.type == self.device

    def transpose(self, tensor):
        return tensor.transpose(1, 2)


class Cupy(Framework):
    dtypes = ("float32", "float16")

    def make(self, values, dtype):
        import cupy

        return cupy.asarray(values.astype(dtype))

    def read(self, tensor):
        return tensor.get().astype("float64")

    def is_mine(self, tensor):
        import cupy

        return isinstance(tensor, cupy.ndarray)

    def transpose(self, tensor):
        return tensor.swapaxes(1, 2)


NUMPY, JAX, TORCH = Numpy("numpy", "numpy"), Jax("jax", "jax"), Torch("torch", "torch")
TORCH_CUDA, JAX_CUDA = Torch("torch-cuda", "torch", "cuda"), Jax("jax-cuda", "jax", "cuda")
CUPY = Cupy("cupy", "cupy", "cuda")
ALL = [NUMPY, JAX, TORCH, TORCH_CUDA, JAX_CUDA, CUPY]


def has_cuda(module):
    """Whether a framework that is installed sees a GPU."""
    try:
        if module == "torch":
            import torch

            return torch.cuda.is_available()
        if module == "cupy":
            import cupy

            return cupy.cuda.runtime.getDeviceCount() > 0
        import jax

        return bool(jax.devices("cuda"))
    except Exception:
        return False


def need_torch(device="cpu"):
    (TORCH if device == "cpu" else TORCH_CUDA).need()
    import torch

    return torch


def normal(*shape, seed=0):
    """N(0, 1) in float32."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape, "float32")


def band_mask(queries, keys, left=None, right=None, top_left=False):
    """Which keys each query sees."""
    past = np.arange(keys)[None, :] - np.arange(queries)[:, None] - (0 if top_left else keys - queries)
    seen = np.ones((queries, keys), bool)
    if left is not None:
        seen &= past >= -left
    if right is not None:
        seen &= past <= right
    return seen


def reference(q, k, v, mask=None, scale=None, softcap=None, sinks=None, bias=None):
    """Attention in float64 over batch x heads x sequence x dim, and the log-sum-exp; `mask` and `bias` broadcast to scores."""
    q, k, v = (np.asarray(x, "float64") for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    scores = q @ k.swapaxes(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(np.asarray(sinks, "float64")[None, :, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, column], axis=-1)
        v = np.concatenate([v, np.zeros_like(v[:, :, :1])], axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
        total = weights.sum(axis=-1, keepdims=True)
        lse = (np.log(total) + np.where(np.isfinite(top), top, 0.0))[..., 0]
        out = np.where(total > 0, weights / np.where(total > 0, total, 1.0), 0.0) @ v
    return out, lse


def check_close(got, expected, dtype, what="result"):
    """Demands equality up to the rounding of the element type."""
    assert got.shape == expected.shape, f"{what} is {got.shape} instead of {expected.shape}"
    assert np.isfinite(got).all(), f"{what} has values that are no numbers"
    error = np.abs(got - expected).max(initial=0.0)
    assert error <= TOLERANCE[dtype], f"{what} is off by {error:.2e}, at most {TOLERANCE[dtype]:.0e}"


def check_lse(got, expected):
    assert got.shape == expected.shape, f"lse is {got.shape} instead of {expected.shape}"
    endless = np.isneginf(expected)
    assert (np.isneginf(got) == endless).all(), "rows that see nothing have a log-sum-exp of -inf"
    assert np.abs(got[~endless] - expected[~endless]).max(initial=0.0) < 2e-3
