"""PyTorch as a competitor: reads one JSON request per line, answers with one line of JSON.

Started by flashcore's lab, which says what to compute, how many calls to time and under which conditions; all figures
are seconds per call. Requests: hello, fa3, load, prepare, compute, time, ceiling.
"""

import contextlib
import ctypes
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
    if fa3_loaded:
        names["fa3"] = (GPU, fa3)
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
    loaded.update(task=request["task"], folder=request["folder"], tensors={})
    return {}


def tensors(device):
    if device not in loaded["tensors"]:
        task = loaded["task"]
        shapes = dict(q=task["q"], k=task["k"], v=task["k"][:3] + [task["dim_v"]])
        read = lambda name, shape: torch.from_file(
            os.path.join(loaded["folder"], name), size=numel(shape), dtype=DTYPES[task["dtype"]]).reshape(shape)
        loaded["tensors"][device] = [read(name, shape).to(device, copy=True) for name, shape in shapes.items()]
    return loaded["tensors"][device]


def numel(shape):
    return shape[0] * shape[1] * shape[2] * shape[3]


def visible(task, device):
    """None where every key is visible, "causal", or a mask of booleans."""
    queries, keys = task["q"][2], task["k"][2]
    left, right, top_left = task["left"], task["right"], task["top_left"]
    diagonal = 0 if top_left else keys - queries
    if (left is None or left >= queries + diagonal) and (right is None or right >= keys - diagonal - 1):
        return None
    if left is None and right == 0 and diagonal == 0:
        return "causal"
    at = torch.arange(keys, device=device)[None, :] - torch.arange(queries, device=device)[:, None] - diagonal
    mask = torch.ones_like(at, dtype=torch.bool)
    if left is not None:
        mask &= at >= -left
    if right is not None:
        mask &= at <= right
    return mask


def no_sinks(task):
    # Neither SDPA nor FlexAttention's score function reaches the sum that a sink is added to.
    if task.get("sinks"):
        raise Unsupported("sinks")


def sdpa(device, backend):
    task = loaded["task"]
    if task["softcap"] is not None:
        raise Unsupported("softcap")
    no_sinks(task)
    q, k, v = tensors(device)
    mask = visible(task, device)
    if torch.is_tensor(mask) and backend == SDPBackend.FLASH_ATTENTION:
        raise Unsupported("this mask")
    options = dict(scale=task["scale"], is_causal=isinstance(mask, str),
                   attn_mask=mask if torch.is_tensor(mask) else None, enable_gqa=q.shape[1] != k.shape[1])
    return (lambda: scaled_dot_product_attention(q, k, v, **options)), (lambda: sdpa_kernel(backend))


def flex(device):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    task = loaded["task"]
    no_sinks(task)
    q, k, v = tensors(device)
    left, right, cap = task["left"], task["right"], task["softcap"]
    diagonal = 0 if task["top_left"] else k.shape[2] - q.shape[2]

    def within(b, h, i, j):
        seen = j >= 0
        if left is not None:
            seen = seen & (j - i - diagonal >= -left)
        if right is not None:
            seen = seen & (j - i - diagonal <= right)
        return seen

    capped = (lambda score, b, h, i, j: cap * torch.tanh(score / cap)) if cap is not None else None
    masked = left is not None or right is not None
    blocks = create_block_mask(within, None, None, q.shape[2], k.shape[2], device=device) if masked else None
    compiled = torch.compile(flex_attention, dynamic=False)
    options = dict(scale=task["scale"], score_mod=capped, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])
    return (lambda: compiled(q, k, v, **options)), contextlib.nullcontext


def fa3(device):
    """FlashAttention-3's forward kernel on tensors in its own order: batch, sequence, heads, features."""
    task = loaded["task"]
    if task["dtype"] == "f32":
        raise Unsupported("f32")
    if task["softcap"] is not None:
        raise Unsupported("softcap")
    no_sinks(task)
    # Its causal mask ends at the last query and key, as ours does.
    at_the_end = not task["top_left"] or task["q"][2] == task["k"][2]
    causal = task["left"] is None and task["right"] == 0 and at_the_end
    if not causal and visible(task, device) is not None:
        raise Unsupported("this mask")
    q, k, v = (x.transpose(1, 2).contiguous() for x in tensors(device))
    options = dict(softmax_scale=task["scale"], is_causal=causal)
    forward = torch.ops.flash_attn_3.fwd
    return (lambda: forward(q, k, v, **options)[0].transpose(1, 2)), contextlib.nullcontext


def prepare(request):
    name = request["competitor"]
    device, make = backends()[name]
    call, context = make(device)
    try:
        with torch.no_grad(), context():
            call()
            synchronize(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise Unsupported(first_line(error)) from error
    calls[name] = (device, call, context)
    return dict(kernel=f"{name.removeprefix('torch-')} {torch.__version__}")


def synchronize(device):
    if device == GPU:
        torch.cuda.synchronize()


def compute(request):
    device, call, context = calls[request["competitor"]]
    with torch.no_grad(), context():
        result = call()
        synchronize(device)
    result.contiguous().cpu().view(torch.uint8).numpy().tofile(request["out"])
    return {}


def run_time(request):
    device, call, context = calls[request["competitor"]]
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
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - start) / calls)
    return seconds


def time_gpu(call, samples, calls, cold, replay):
    body = replayed(call, calls) if replay else lambda: [call() for _ in range(calls)]
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
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph.replay


def ceiling(request):
    """Bytes and operations per second that this GPU reaches in a copy and in a large matrix product."""
    a = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    copy = median(time_gpu(lambda: b.copy_(a), 20, 2, False, False))
    del a, b
    n = 8192
    x, y = (torch.randn(n, n, device="cuda", dtype=DTYPES[request["dtype"]]) for _ in range(2))
    product = median(time_gpu(lambda: torch.mm(x, y), 100, 4, False, False)[50:])
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
