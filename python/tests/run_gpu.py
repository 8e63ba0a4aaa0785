"""Runs all tests that a GPU can matter to without pytest and prints a table; for machines that have a GPU but no pytest.

python python/tests/run_gpu.py [--filter WORDS] [--share 1/4] [--seconds N] [--failures N]
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
NEED_NO_GPU = {"test_sim", "test_command", "test_distributed"}
sys.path.insert(0, str(HERE))

from harness import Skip, has_cuda


def tests(filter):
    """Name and call of every case of every test."""
    for path in sorted(HERE.glob("test_*.py")):
        if path.stem in NEED_NO_GPU:
            continue
        module = importlib.import_module(path.stem)
        for name, function in list(vars(module).items()):
            if not name.startswith("test_") or not callable(function):
                continue
            for case, arguments in getattr(function, "cases", {"": {}}).items():
                title = f"{path.stem}::{name}" + (f"[{case}]" if case else "")
                if filter in title:
                    yield path.stem, title, function, arguments


def run(function, arguments):
    """How the test ended, and why where it did not pass."""
    try:
        function(**arguments)
        return "passed", ""
    except Skip as reason:
        return "skipped", str(reason)
    except Exception:
        return "failed", traceback.format_exc()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--filter", default="", help="run tests whose name contains this")
    parser.add_argument("--failures", type=int, default=10, help="show so many failures in full")
    parser.add_argument("--share", default="1/1", help="run this part of the tests: 2/4 is the second of every four")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no test after so many seconds")
    options = parser.parse_args()
    part, parts = map(int, options.share.split("/"))
    started = time.perf_counter()
    import flashcore

    flashcore.show_config()
    table, failures, reasons = {}, [], {}
    for module, title, function, arguments in itertools.islice(tests(options.filter), part - 1, None, parts):
        begin = time.perf_counter()
        if begin - started > options.seconds:
            print(f"stopped before {title}: {options.seconds:.0f} seconds are over")
            break
        end, why = run(function, arguments)
        row = table.setdefault(module, {"passed": 0, "skipped": 0, "failed": 0, "seconds": 0.0})
        row[end] += 1
        row["seconds"] += time.perf_counter() - begin
        if end == "failed":
            failures.append((title, why))
            print(f"FAILED {title}: {why.strip().splitlines()[-1]}", flush=True)
        elif end == "skipped":
            reasons[why] = reasons.get(why, 0) + 1
    for title, why in failures[: options.failures]:
        print(f"\n--- {title}\n{why}")
    print(f"\n{'tests':<16}{'passed':>8}{'skipped':>9}{'failed':>8}{'seconds':>9}")
    for module, row in table.items():
        print(f"{module:<16}{row['passed']:>8}{row['skipped']:>9}{row['failed']:>8}{row['seconds']:>9.1f}")
    for why, count in sorted(reasons.items()):
        print(f"skipped {count}: {why}")
    print(f"GPU: torch {has_cuda('torch')}, jax {has_cuda('jax')}, cupy {has_cuda('cupy')}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
