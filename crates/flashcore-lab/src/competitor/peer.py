"""PyTorch as a competitor: reads one JSON request per line, answers with one line of JSON.

Started by flashcore's lab, which says what to compute, how many calls to time and under which conditions; all figures
are seconds per call. Requests: hello, fa3, load, prepare, compute, time, ceiling. What competitors do is in peer_calls.py,
which runs before this.
"""

import contextlib
import ctypes
import importlib.util
import itertools
import json
import lzma
import os
import platform
import shutil
import signal
import sys
import tempfile
import time

# Ctrl-C is for the parent, which closes this process's input when it is done.
signal.signal(signal.SIGINT, signal.SIG_IGN)
# Libraries may print; only answers go to the parent.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
except ImportError as error:
    torch, missing = None, str(error)

DTYPES = torch and {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
GPU = "cuda"
FLUSH_BYTES = 256 << 20
COPY_BYTES = 1 << 30
fa3_loaded = False
loaded = {}
calls = {}


class Unsupported(Exception):
    pass


class Unavailable(Exception):
    pass


def backends():
    """Names of this process's competitors, where they compute, and what makes their call."""
    both = {"math": SDPBackend.MATH}
    gpu = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
           "efficient": SDPBackend.EFFICIENT_ATTENTION, **both}
    sdpa_of = lambda backend: lambda device: sdpa(device, backend)
    names = {f"torch-{name}": (GPU, sdpa_of(backend)) for name, backend in gpu.items()}
    names["torch-flex"] = (GPU, flex)
    names["torch-grouped"] = (GPU, experts)
    if fa3_loaded:
        names["fa3"] = (GPU, fa3)
        names["fa3-deterministic"] = (GPU, lambda device: fa3(device, deterministic=True))
    if importlib.util.find_spec("flashinfer"):
        names["flashinfer"] = (GPU, flashinfer)
    names["torch-cpu"] = ("cpu", sdpa_of(SDPBackend.FLASH_ATTENTION))
    names["torch-cpu-math"] = ("cpu", sdpa_of(SDPBackend.MATH))
    return names


def hello(_):
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else None
    competitors = [name for name, (place, _) in backends().items() if gpu or place == "cpu"]
    cudnn = torch.backends.cudnn.version() if gpu else None
    return dict(torch=torch.__version__, python=platform.python_version(), cuda=torch.version.cuda, cudnn=cudnn,
                gpu=device, threads=torch.get_num_threads(), competitors=competitors)


def load_fa3(request):
    """Loads FlashAttention-3's operator, after the CUDA runtime that its library was linked with."""
    global fa3_loaded
    if not torch.cuda.is_available():
        raise Unavailable("it needs a GPU, and this PyTorch sees none")
    try:
        ctypes.CDLL(request["runtime"], mode=ctypes.RTLD_GLOBAL)
        with unpacked(request["library"]) as path:
            torch.ops.load_library(path)
        torch.ops.flash_attn_3.fwd.default
    except (OSError, EOFError, lzma.LZMAError, AttributeError, RuntimeError) as error:
        raise Unavailable(f"its library cannot be loaded ({first_line(error)})") from error
    fa3_loaded = True
    return hello(request)


@contextlib.contextmanager
def unpacked(path):
    """A library's path; a packed one's until it is loaded, after which it needs its file no more."""
    if not path.endswith(".xz"):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="flashcore-") as folder:
        plain = os.path.join(folder, os.path.basename(path).removesuffix(".xz"))
        with lzma.open(path) as packed, open(plain, "wb") as target:
            shutil.copyfileobj(packed, target, 1 << 20)
        yield plain


def first_line(error):
    return str(error).split("\n")[0]


def load(request):
    """Takes over a task; its tensors are read when a competitor wants them."""
    loaded.clear()
    calls.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if request.get("threads"):
        torch.set_num_threads(request["threads"])
    loaded.update(task=request["task"], folder=request["folder"], sets=request["sets"], tensors={})
    return {}


def prepare(request):
    name = request["competitor"]
    device, make = backends()[name]
    try:
        call, judged, context = make(device)
        with torch.no_grad(), context():
            call(0)
            synchronize(device)
    except (RuntimeError, TypeError, ValueError, ImportError) as error:
        raise Unsupported(first_line(error)) from error
    calls[name] = (device, call, judged, context)
    return dict(kernel=f"{name.removeprefix('torch-')} {torch.__version__}")


def synchronize(device):
    if device == GPU:
        torch.cuda.synchronize()


def compute(request):
    """Writes what is judged, one tensor after another."""
    device, _, judged, context = calls[request["competitor"]]
    with torch.no_grad(), context():
        results = judged()
        synchronize(device)
    with open(request["out"], "wb") as file:
        for result in results:
            result.contiguous().cpu().view(torch.uint8).numpy().tofile(file)
    return {}


def run_time(request):
    device, call, _, context = calls[request["competitor"]]
    measure = time_gpu if device == GPU else time_cpu
    with torch.no_grad(), context():
        return dict(seconds=measure(call, **{k: request[k] for k in ("samples", "calls", "cold", "replay")}))


def time_cpu(call, samples, calls, cold, replay):
    flush = torch.zeros(FLUSH_BYTES // 2, dtype=torch.uint8) if cold else None
    seconds = []
    for _ in range(samples):
        if cold:
            flush.add_(1)
        start = time.perf_counter()
        for n in range(calls):
            call(n)
        seconds.append((time.perf_counter() - start) / calls)
    return seconds


def time_gpu(call, samples, calls, cold, replay):
    body = replayed(call, calls) if replay else lambda: [call(n) for n in range(calls)]
    body()
    torch.cuda.synchronize()
    event = lambda: torch.cuda.Event(enable_timing=True)
    if not cold:
        marks = [event() for _ in range(samples + 1)]
        marks[0].record()
        for mark in marks[1:]:
            body()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) * 1e-3 / calls for a, b in itertools.pairwise(marks)]
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    pairs = [(event(), event()) for _ in range(samples)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        body()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 / calls for start, end in pairs]


def replayed(call, count):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(count):
            call(n)
    return graph.replay


def ceiling(request):
    """Bytes and operations per second that this GPU reaches in a copy and in a large matrix product."""
    a = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    copy = median(time_gpu(lambda n: b.copy_(a), 20, 2, False, False))
    del a, b
    n = 8192
    x, y = (torch.randn(n, n, device="cuda", dtype=DTYPES[request["dtype"]]) for _ in range(2))
    product = median(time_gpu(lambda n: torch.mm(x, y), 100, 4, False, False)[50:])
    return dict(copy=2 * COPY_BYTES / copy, matrix=2 * n**3 / product)


def median(values):
    return sorted(values)[len(values) // 2]


REQUESTS = dict(hello=hello, fa3=load_fa3, load=load, prepare=prepare, compute=compute, time=run_time, ceiling=ceiling)


def answer(request):
    if torch is None:
        return dict(unavailable=f"this Python has no torch ({missing}); set FLASHCORE_PYTHON to one that has")
    try:
        return REQUESTS[request["op"]](request)
    except Unsupported as what:
        return dict(unsupported=str(what))
    except Unavailable as why:
        return dict(unavailable=str(why))
    except Exception as error:
        return dict(failed=f"{type(error).__name__}: {error}")


for line in sys.stdin:
    answers.write(json.dumps(answer(json.loads(line))) + "\n")
    answers.flush()
