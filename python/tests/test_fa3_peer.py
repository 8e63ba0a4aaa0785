"""The process behind the peers of `flashcore bench`, with an operator in FlashAttention-3's place and no GPU.

The stand-in has the schema of FlashAttention-3's operator, so that a wrong name or type of an argument fails here.
"""

from __future__ import annotations

import importlib.util
import json
import lzma
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import Skip

FOLDER = Path(__file__).parents[2] / "crates/flashcore-lab/src/competitor"

# Loading a library registers the operator; the GPU is the CPU.
PRELUDE = """
import ctypes, math, sys
import torch

SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, float softcap=0.0, int num_splits=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)

def forward(q, k, v, k_new=None, v_new=None, q_v=None, out=None, softmax_scale=None, is_causal=False, *_):
    assert q.is_contiguous() and k.is_contiguous(), "in its own order"
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * softmax_scale
    if is_causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, -math.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2).to(DTYPES[loaded["task"]["dtype"]]).contiguous()
    return out, scores.logsumexp(-1), q.new_empty(0), q.new_empty(0)

def load_library(path):
    if open(path, "rb").read() != b"library":
        raise OSError(f"{path}: invalid ELF header")
    global operators
    operators = torch.library.Library("flash_attn_3", "DEF")
    operators.define(SCHEMA)
    operators.impl("fwd", forward, "CPU")

torch.ops.load_library = load_library
torch.cuda.is_available = lambda: GPU_THERE
torch.cuda.get_device_name = torch.cuda.synchronize = torch.cuda.empty_cache = lambda: None
torch.backends.cudnn.version = lambda: None
ctypes.CDLL = lambda path, mode=None: open(path).close()
"""


class Peer:
    """The script in a process of its own, asked line by line."""

    def __init__(self, gpu=True):
        if importlib.util.find_spec("torch") is None:
            raise Skip("torch is not installed")
        if not FOLDER.exists():
            raise Skip("this is no checkout of FlashCore")
        source = "".join((FOLDER / name).read_text() for name in ("peer_calls.py", "peer.py"))
        source = source.replace('GPU = "cuda"', 'GPU = "cpu"')
        text = f"GPU_THERE = {gpu}\n" + PRELUDE + source
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", text], stdin=pipe, stdout=pipe, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def ask(self, op, **request):
        print(json.dumps(dict(op=op, **request)), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def load(self, folder, content=b"library"):
        folder = Path(folder)
        (folder / "runtime").write_bytes(b"")
        (folder / "fa3.so.xz").write_bytes(lzma.compress(content))
        return self.ask("fa3", library=str(folder / "fa3.so.xz"), runtime=str(folder / "runtime"))


def task(**changes):
    plain = dict(dtype="f16", q=[2, 4, 6, 8], k=[2, 2, 9, 8], dim_v=8, left=None, right=None, top_left=False,
                 scale=0.25, softcap=None)
    return {**plain, **changes}


def take(peer, folder, task):
    """Hands over a task with random inputs and answers with those."""
    shapes = dict(q=task["q"], k=task["k"], v=task["k"][:3] + [task["dim_v"]])
    arrays = {name: np.random.default_rng(3).normal(size=shape).astype(np.float16) for name, shape in shapes.items()}
    for name, array in arrays.items():
        array.tofile(Path(folder) / name)
    assert peer.ask("load", task=task, folder=str(folder), threads=1, sets=1) == {}
    return arrays


def expected(task, arrays):
    group = task["q"][1] // task["k"][1]
    q, k, v = (arrays[name].astype(np.float64) for name in "qkv")
    k, v = (x.repeat(group, 1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) * task["scale"]
    if task["right"] == 0:
        scores[..., np.triu(np.ones(scores.shape[2:], bool), 1 + k.shape[2] - q.shape[2])] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def test_it_competes_once_it_is_loaded():
    with tempfile.TemporaryDirectory() as folder, Peer() as peer:
        assert "fa3" not in peer.ask("hello")["competitors"]
        assert "fa3" in peer.load(folder)["competitors"]
        for problem in (task(), task(right=0), task(right=0, k=[2, 2, 6, 8], top_left=True)):
            arrays = take(peer, folder, problem)
            assert peer.ask("prepare", competitor="fa3")["kernel"].startswith("fa3 ")
            out = Path(folder) / "out"
            assert peer.ask("compute", competitor="fa3", out=str(out)) == {}
            found = np.fromfile(out, np.float16).reshape(problem["q"])
            assert np.abs(found - expected(problem, arrays)).max() < 2e-3, problem


def test_problems_that_it_does_not_take_are_refused():
    refusals = {
        "f32": task(dtype="f32"),
        "softcap": task(softcap=30.0),
        "sinks": task(sinks=True),
        "this mask": task(left=2, right=0),
    }
    with tempfile.TemporaryDirectory() as folder, Peer() as peer:
        peer.load(folder)
        for words, problem in refusals.items():
            take(peer, folder, problem)
            assert peer.ask("prepare", competitor="fa3") == dict(unsupported=words)
        take(peer, folder, task(right=0, top_left=True))
        assert peer.ask("prepare", competitor="fa3") == dict(unsupported="this mask")


def test_a_library_that_does_not_load_is_named():
    with tempfile.TemporaryDirectory() as folder:
        with Peer() as peer:
            assert "invalid ELF header" in peer.load(folder, b"nonsense")["unavailable"]
            library, runtime = f"{folder}/fa3.so.xz", f"{folder}/runtime"
            assert "no-such" in peer.ask("fa3", library=library, runtime="no-such")["unavailable"]
            Path(library).write_bytes(b"not packed")
            assert "cannot be loaded" in peer.ask("fa3", library=library, runtime=runtime)["unavailable"]
            assert "fa3" not in peer.ask("hello")["competitors"]
        with Peer(gpu=False) as peer:
            assert "sees none" in peer.load(folder)["unavailable"]
