"""How long a call takes on a GPU; for the scripts of this folder."""

import torch

MOST = 10


def once(run, calls):
    """Seconds of a call, over so many back to back."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def seconds(run, least):
    """The median time of a call over turns of up to ten, after as long a warm-up."""
    run()
    calls = max(1, min(MOST, int(least / 4 / once(run, 1))))
    times, total = [], 0.0
    while total < 2 * least or len(times) < 4:
        times.append(once(run, calls))
        total += calls * times[-1]
    half = sorted(times[len(times) // 2 :])
    return half[len(half) // 2]


def replayed(run):
    """A call from a captured graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def copy_bandwidth(least):
    """Bytes read and written in a second by a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), least)
