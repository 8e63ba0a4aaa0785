"""The command line that comes with the wheel, the documentation's examples, the configuration."""

import doctest
import json
import subprocess
import sys
from pathlib import Path

import flashcore
from flashcore import _attention, _config, _flash_attn, _merge, _sdpa
from harness import raises


def run(*words):
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_module_and_script():
    script = Path(sys.executable).with_name("flashcore")
    commands = [(sys.executable, "-m", "flashcore")]
    if script.exists():
        commands.append((str(script),))
    for command in commands:
        done = run(*command, "run", "--shape", "1x2x64x64", "--backend", "cpu", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["backend"] == "cpu"
        assert run(*command, "--version").stdout.split() == ["flashcore", flashcore.__version__]
        assert run(*command, "no-such-command").returncode == 2


def test_parts_of_a_command_run_in_processes_of_their_own():
    command = (
        sys.executable,
        "-m",
        "flashcore",
        "verify",
        "--quick",
        "--backend",
        "cpu",
        "--filter",
        "decode",
        "--json",
    )
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pass"]


def test_config():
    rows = flashcore.show_config(mode="dict")
    assert rows["version"] == flashcore.__version__
    assert "threads" in rows["cpu"] and rows["cuda"] and "numpy" in rows["frameworks"]
    with raises(ValueError, "unknown mode"):
        flashcore.show_config(mode="yaml")


def test_examples_in_documentation():
    for module in (flashcore, _attention, _config, _flash_attn, _merge, _sdpa):
        failed, tried = doctest.testmod(module)
        assert tried > 0 and failed == 0, f"{failed} of {tried} examples of {module.__name__} fail"


def test_everything_is_documented():
    for name in flashcore.__all__:
        if name != "__version__":
            assert getattr(flashcore, name).__doc__, name
