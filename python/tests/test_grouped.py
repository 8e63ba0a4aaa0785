"""Grouped products: every framework and form against plain products in float64, and torch's own function."""

import importlib.util

import numpy as np
from harness import ALL, TOLERANCE, Skip, cases, raises

import flashcore

M, N, K, G = 24, 16, 32, 3
ENDS = [5, 5, 20]
FORMS = {"rows": ((M, K), (G, K, N)), "columns": ((G, M, K), (K, N)), "depth": ((M, K), (K, N)), "batch": ((G, M, K), (G, K, N))}


def expected(a, b, form, ends=ENDS):
    if form == "batch":
        return a @ b
    parts = list(zip([0, *ends], ends))
    if form == "depth":
        return np.stack([a[:, start:end] @ b[start:end] for start, end in parts])
    out = np.zeros((a.shape[-2], b.shape[-1]))
    for n, (start, end) in enumerate(parts):
        if form == "rows":
            out[start:end] = a[start:end] @ b[n]
        else:
            out[:, start:end] = a[n] @ b[:, start:end]
    return out


def factors(form, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) / 4 for shape in FORMS[form]]


@cases(framework=ALL, form=list(FORMS), dtype=["float32", "float16", "bfloat16"])
def test_every_form(framework, form, dtype):
    framework.need()
    if getattr(framework, "device", "cpu") == "cuda" and (dtype == "float32" or form in ("columns", "depth")):
        return  # GPUs want the divided dimension strided: below
    a, b = (framework.make(array, dtype) for array in factors(form))
    offs = None if form == "batch" else framework.numbers(np.array([min(end, N) if form == "columns" else end for end in ENDS]), "int32")
    ends = [min(end, N) for end in ENDS] if form == "columns" else ENDS
    out = flashcore.grouped_mm(a, b, offs=offs)
    error = np.abs(framework.read(out) - expected(framework.read(a), framework.read(b), form, ends)).max()
    assert error < 8 * TOLERANCE[dtype], error


def test_offsets_are_not_trusted():
    a, b = (array.astype("float32") for array in factors("rows"))
    for offs, ends in (([-5, 2**31 - 1, 7], [0, M, M]), ([30, 2, -(2**31)], [M, M, M]), ([4, 2, 9], [4, 4, 9]), ([0, 0, 0], [0, 0, 0])):
        out = flashcore.grouped_mm(a, b, offs=np.array(offs, "int32"))
        assert np.abs(out - expected(a, b, "rows", ends)).max() < 1e-4, offs


def test_what_is_wrong_is_said():
    a, b = (array.astype("float32") for array in factors("rows"))
    offs = np.array(ENDS, "int32")
    with raises(ValueError, "give offs, the end of each group"):
        flashcore.grouped_mm(a, b)
    with raises(ValueError, "omit offs"):
        flashcore.grouped_mm(b, b.transpose(0, 2, 1), offs=offs)
    with raises(ValueError, "2 offs for 3 groups"):
        flashcore.grouped_mm(a, b, offs=offs[:2])
    with raises(ValueError, "mat_b has 16 rows but mat_a has 32"):
        flashcore.grouped_mm(a, b.transpose(0, 2, 1), offs=offs)
    with raises(TypeError, "convert them to int32"):
        flashcore.grouped_mm(a, b, offs=offs.astype("int64"))
    with raises(ValueError, "mat_a has 1 dimensions"):
        flashcore.grouped_mm(a[0], b, offs=offs)
    with raises(NotImplementedError, "add it to the result"):
        flashcore.grouped_mm(a, b, offs=offs, bias=a)
    with raises(NotImplementedError, "out_dtype"):
        flashcore.grouped_mm(a, b, offs=offs, out_dtype="float16")


@cases(form=list(FORMS))
def test_gradients_are_those_of_torch(form):
    if importlib.util.find_spec("torch") is None:
        raise Skip("torch is not installed")
    import torch

    ends = [min(end, N) for end in ENDS] if form == "columns" else ENDS
    offs = None if form == "batch" else torch.tensor(ends, dtype=torch.int32)
    results = []
    for own in (False, True):
        a, b = (torch.tensor(array, dtype=torch.float32, requires_grad=True) for array in factors(form, 2))
        if own:
            out = flashcore.grouped_mm(a, b, offs=offs)
        elif form == "batch":
            out = a @ b
        elif form == "depth":
            out = torch.stack([a[:, start:end] @ b[start:end] for start, end in zip([0, *ends], ends)])
        else:
            parts = list(enumerate(zip([0, *ends], ends)))
            rows = form == "rows"
            made = [a[start:end] @ b[n] if rows else a[n] @ b[:, start:end] for n, (start, end) in parts]
            rest = torch.zeros(M - ends[-1], N) if rows else torch.zeros(M, N - ends[-1])
            out = torch.cat([*made, rest], dim=0 if rows else 1)
        (out * torch.arange(out.numel()).view(out.shape).remainder(7)).sum().backward()
        results.append((out.detach(), a.grad, b.grad))
    for wanted, got in zip(*results):
        assert torch.allclose(wanted, got, atol=1e-4), (wanted - got).abs().max()


def test_torch_means_the_same():
    if importlib.util.find_spec("torch") is None:
        raise Skip("torch is not installed")
    import torch

    if not hasattr(torch.nn.functional, "grouped_mm"):
        raise Skip("this torch has no grouped_mm")
    for form in FORMS:
        a, b = (torch.tensor(array, dtype=torch.bfloat16) for array in factors(form, 1))
        whole = {"rows": M, "columns": N, "depth": K}
        offs = None if form == "batch" else torch.tensor([8, 8, whole[form]], dtype=torch.int32)
        wanted = torch.nn.functional.grouped_mm(a, b, offs=offs)
        got = flashcore.grouped_mm(a, b, offs=offs)
        assert got.shape == wanted.shape and (got.float() - wanted.float()).abs().max() < 0.05, form
