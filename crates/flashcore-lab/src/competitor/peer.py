"""PyTorch as a competitor: reads one JSON request per line, answers with one line of JSON.

Started by flashcore's lab, which says what to compute, how many calls to time and under which conditions; all figures
are seconds per call. Requests: hello, load, prepare, compute, time, ceiling.
"""

import contextlib
import itertools
import json
import os
import platform
import signal
import sys
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
FLUSH_BYTES = 256 << 20
COPY_BYTES = 1 << 30
loaded = {}
calls = {}


class Unsupported(Exception):
    pass


def backends():
    """Names of this process's competitors on GPU and CPU, and how PyTorch is told to use them."""
    both = {"math": SDPBackend.MATH}
    gpu = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
           "efficient": SDPBackend.EFFICIENT_ATTENTION, **both}
    names = {f"torch-{name}": ("cuda", backend) for name, backend in gpu.items()}
    names["torch-flex"] = ("cuda", None)
    names["torch-cpu"] = ("cpu", SDPBackend.FLASH_ATTENTION)
    names["torch-cpu-math"] = ("cpu", SDPBackend.MATH)
    return names


def hello(_):
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else None
    competitors = [name for name, (place, _) in backends().items() if gpu or place == "cpu"]
    cudnn = torch.backends.cudnn.version() if gpu else None
    return dict(torch=torch.__version__, python=platform.python_version(), cuda=torch.version.cuda, cudnn=cudnn,
                gpu=device, threads=torch.get_num_threads(), competitors=competitors)


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


def prepare(request):
    name = request["competitor"]
    device, backend = backends()[name]
    call, context = sdpa(device, backend) if backend is not None else flex(device)
    try:
        with torch.no_grad(), context():
            call()
            synchronize(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise Unsupported(str(error).split("\n")[0]) from error
    calls[name] = (device, call, context)
    return dict(kernel=f"{name[6:]} {torch.__version__}")


def synchronize(device):
    if device == "cuda":
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
    measure = time_gpu if device == "cuda" else time_cpu
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


REQUESTS = dict(hello=hello, load=load, prepare=prepare, compute=compute, time=run_time, ceiling=ceiling)


def answer(request):
    if torch is None:
        return dict(unavailable=f"this Python has no torch ({missing})")
    try:
        return REQUESTS[request["op"]](request)
    except Unsupported as what:
        return dict(unsupported=str(what))
    except Exception as error:
        return dict(failed=f"{type(error).__name__}: {error}")


for line in sys.stdin:
    answers.write(json.dumps(answer(json.loads(line))) + "\n")
    answers.flush()
