"""FlashAttention's own tests with FlashCore's functions in place of its own, without pytest.

python python/tests/run_flash_attn_tests.py PATH [--device cpu] [--seconds N] [--longest N] [--seed N] [--only WORDS] [--json FILE]

PATH is a checkout of FlashAttention; nothing of it is built. Of each test's many cases some are drawn, one test after
another, until the seconds are over. A case passes, is skipped by its authors, is refused (a NotImplementedError of
FlashCore's, whose words are counted), or fails. With `--device cpu` tensors are made there, and `--longest` leaves out
sequences that would take too long. Needs torch and einops.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import random
import sys
import time
import traceback
import types
from pathlib import Path

FILES = ("tests/test_flash_attn.py", "hopper/test_flash_attn.py", "tests/test_rotary.py")
NOT_OURS = ("generator_arg", "bw_compatibility", "attention_ref", "combine_ref", "block_table_bounds", "compilation_count")
"""Tests of FlashAttention's own extension module and Triton kernels, and of the class of an error of its."""


class Skipped(Exception):
    """What the authors skip."""


def fake_pytest() -> types.ModuleType:
    """As much of pytest as these files use: parameters are kept, marks are not looked at."""

    def parametrize(names, values, **_):
        def keep(function):
            names_of = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            rows = [dict(zip(names_of, value if len(names_of) > 1 else (value,))) for value in values]
            function.axes = [*getattr(function, "axes", []), rows]
            return function

        return keep

    def skip(reason="", **_):
        raise Skipped(reason)

    def mark(*_, **__):
        return lambda function: function

    @contextlib.contextmanager
    def raises(kind, match=None):
        try:
            yield
        except kind:
            return
        raise AssertionError(f"{kind} was not raised")

    module = types.ModuleType("pytest")
    module.mark = types.SimpleNamespace(parametrize=parametrize, skipif=mark, xfail=mark)
    module.skip, module.raises = skip, raises
    return module


def prepare() -> None:
    """FlashCore under FlashAttention's names."""
    import flashcore.flash_attn

    flashcore.flash_attn.install()
    sys.modules["pytest"] = fake_pytest()


def without_gpu() -> None:
    """What the files ask of a GPU, answered as one would that has all features and much memory."""
    import torch

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 40, multi_processor_count=132)
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None


def load(path: Path, device: str) -> types.ModuleType:
    name = f"theirs_{path.parent.name}"
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.path.insert(0, str(path.parent))
    text = path.read_text().replace('"cuda"', repr(device))
    exec(compile(text, str(path), "exec"), vars(module))
    sys.path.remove(str(path.parent))
    return module


def tests(path: Path, only: str, device: str) -> dict[str, object]:
    """Every test of every file, by name."""
    found = {}
    for file in FILES:
        if not (path / file).exists():
            continue
        for name, function in vars(load(path / file, device)).items():
            title = f"{file.split('/')[0]}::{name}"
            if name.startswith("test_") and callable(function) and not any(word in name for word in NOT_OURS):
                if only in title:
                    found[title] = function
    return found


def draw(function, rng: random.Random, longest: int) -> dict[str, object]:
    """A case without sequences that are too long; one with them where there is no other."""

    def short(row: dict[str, object]) -> bool:
        return all(not isinstance(value, int) or value <= longest for name, value in row.items() if "seqlen" in name)

    rows = [rng.choice([row for row in axis if short(row)] or axis) for axis in getattr(function, "axes", [])]
    return dict(itertools.chain.from_iterable(row.items() for row in rows))


def run(function, arguments: dict[str, object]) -> tuple[str, str]:
    """How a case ends, and why."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            function(**arguments)
        return "passed", ""
    except Skipped:
        return "skipped", ""
    except NotImplementedError as refusal:
        return "refused", str(refusal)
    except Exception as error:
        import torch

        if isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error):
            torch.cuda.empty_cache()
            return "skipped", ""
        return "failed", f"{arguments}\n{traceback.format_exc(limit=-3)}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--longest", type=int, default=1 << 30)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    prepare()
    if options.device == "cpu":
        without_gpu()
    rng, cases = random.Random(options.seed), tests(options.path, options.only, options.device)
    end = time.monotonic() + options.seconds
    table = {name: {"passed": 0, "skipped": 0, "refused": 0, "failed": 0} for name in cases}
    refusals, failures = {}, []
    while cases and time.monotonic() < end:
        for name, function in cases.items():
            # What the options leave nothing of is drawn again, at little cost.
            for _ in range(8):
                how, why = run(function, draw(function, rng, options.longest))
                table[name][how] += 1
                if how == "refused":
                    refusals[why] = refusals.get(why, 0) + 1
                elif how == "failed":
                    failures.append((name, why))
                    print(f"FAILED {name} {why.strip().splitlines()[-1]}", flush=True)
                if how in ("passed", "failed"):
                    break
            if options.json:
                found = {"table": table, "refusals": refusals, "failures": failures}
                options.json.write_text(json.dumps(found, indent=1))
            if time.monotonic() > end:
                break
    print(f"\n{'test':<52}{'passed':>8}{'skipped':>9}{'refused':>9}{'failed':>8}")
    for name, row in table.items():
        print(f"{name:<52}{row['passed']:>8}{row['skipped']:>9}{row['refused']:>9}{row['failed']:>8}")
    for why, count in sorted(refusals.items()):
        print(f"refused {count}: {why}")
    for name, why in failures[:6]:
        print(f"\n--- {name}\n{why}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
