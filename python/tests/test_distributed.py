"""`flashcore.distributed` over gloo, several processes on this machine: every scheme against one process in f64."""

import itertools
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as processes  # noqa: E402

from flashcore import distributed  # noqa: E402
from flashcore.distributed import _shards  # noqa: E402

SCHEMES = {name: getattr(distributed, f"{name}_attention") for name in ("ring", "allgather", "ulysses")}

CASES = {
    "plain": dict(),
    "causal": dict(causal=True),
    "grouped heads, another dim of values": dict(causal=True, heads=(4, 2), dims=(16, 24)),
    "one key head": dict(causal=True, heads=(6, 1)),
    "more ranks than heads": dict(causal=True, heads=(2, 1)),
    "window": dict(window=(9, 4)),
    "causal window": dict(causal=True, window=(5, None)),
    "softcap, scale": dict(causal=True, softcap=3.0, scale=0.4),
    "sinks": dict(causal=True, sinks=True),
    "fewer queries": dict(causal=True, tokens=(13, 38)),
    "more queries, some of which see nothing": dict(causal=True, tokens=(38, 13), sinks=True),
    "two tokens": dict(causal=True, tokens=(2, 2)),
    "no token": dict(tokens=(0, 0)),
    "no key": dict(tokens=(5, 0)),
    "order": dict(causal=True, order="bshd"),
    "packed": dict(causal=True, offsets=([0, 7, 7, 30, 41], [0, 7, 9, 32, 43])),
    "packed window": dict(window=(3, 6), offsets=([0, 11, 40], [0, 15, 44])),
    "bf16": dict(causal=True, dtype=torch.bfloat16),
    "f16": dict(causal=True, dtype=torch.float16),
}


def seen(queries, keys, causal, window):
    """Which keys a query sees, from the definition."""
    left, right = (None, None) if window is None else window
    right = 0 if causal else right
    distance = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    mask = torch.ones(queries, keys, dtype=torch.bool)
    mask &= distance <= right if right is not None else mask
    return mask & (distance >= -left) if left is not None else mask


def reference(q, k, v, sinks, causal=False, window=None, scale=None, softcap=None):
    """Attention in f64, bhsd, with torch's own gradients."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    mask = seen(q.shape[2], k.shape[2], causal, window)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    some = mask.any(-1)[:, None]
    weights = torch.where(some, torch.softmax(torch.where(some, scores, 0.0), -1), 0.0)
    return weights[..., : k.shape[2]] @ v


def whole(case):
    """Tensors of a whole problem, bhsd, and the gradient of its output."""
    rng = torch.Generator().manual_seed(len(case))
    heads, dims = CASES[case].get("heads", (4, 4)), CASES[case].get("dims", (16, 16))
    offsets = CASES[case].get("offsets")
    tokens = CASES[case].get("tokens", (37, 37)) if offsets is None else tuple(of[-1] for of in offsets)
    batch = 2 if offsets is None else 1
    shapes = [(heads[0], tokens[0], dims[0]), (heads[1], tokens[1], dims[0]), (heads[1], tokens[1], dims[1])]
    dtype = CASES[case].get("dtype", torch.float32)
    make = lambda shape: torch.randn(batch, *shape, generator=rng).to(dtype)
    q, k, v = map(make, shapes)
    sinks = torch.randn(heads[0], generator=rng) if CASES[case].get("sinks") else None
    return q, k, v, sinks, make((heads[0], tokens[0], dims[1]))


def expected(case):
    """Output and gradients of the whole problem in f64."""
    options = {name: CASES[case][name] for name in ("causal", "window", "scale", "softcap") if name in CASES[case]}
    *inputs, d_out = (None if x is None else x.double() for x in whole(case))
    for x in inputs:
        x is None or x.requires_grad_()
    q, k, v, sinks = inputs
    if "offsets" in CASES[case]:
        spans = [list(zip(of, of[1:])) for of in CASES[case]["offsets"]]
        parts = [
            reference(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], sinks, **options) for (a, b), (c, d) in zip(*spans)
        ]
        out = torch.cat(parts, 2)
    else:
        out = reference(q, k, v, sinks, **options)
    out.backward(d_out)
    return out.detach(), [None if x is None else x.grad for x in inputs]


def computed(case, scheme, layout):
    """Output and gradients, put together from all ranks."""
    options = {name: CASES[case][name] for name in ("causal", "window", "scale", "softcap") if name in CASES[case]}
    *inputs, d_out = whole(case)
    offsets = CASES[case].get("offsets")
    flipped = CASES[case].get("order") == "bshd" or offsets is not None
    dim = 1 if flipped else 2
    if offsets is not None:
        options.update(query_offsets=offsets[0], key_offsets=offsets[1])
    elif flipped:
        options["order"] = "bshd"
    turned = lambda x: x.transpose(1, 2) if flipped else x
    cut = lambda x, n: distributed.shard(turned(x), layout=layout, dim=dim, offsets=offsets and offsets[n])
    tensors = [cut(x, n).detach().requires_grad_() for x, n in zip(inputs[:3], (0, 1, 1))]
    sinks = None if inputs[3] is None else inputs[3].clone().requires_grad_()
    packed = lambda x: x[0] if offsets is not None else x
    out, lse = SCHEMES[scheme](
        *map(packed, tensors), layout=layout, sinks=sinks, return_lse=True, timeout=60, **options
    )
    assert lse.dtype == torch.float32
    out.backward(packed(cut(d_out, 0)))
    back = lambda x, n: turned(distributed.unshard(x, layout=layout, dim=dim, offsets=offsets and offsets[n]))
    grads = [back(x.grad, n) for x, n in zip(tensors, (0, 1, 1))]
    if sinks is not None:
        dist.all_reduce(sinks.grad)
        grads.append(sinks.grad)
    out = out[None] if offsets is not None else out
    return back(out.detach(), 0), grads


def compare(case, scheme, layout):
    out, grads = computed(case, scheme, layout)
    if case == "causal":
        assert torch.equal(out, computed(case, scheme, layout)[0]), "other bits"
    right, right_grads = expected(case)
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[out.dtype]
    for name, got, want in zip(("out", "dq", "dk", "dv", "d_sinks"), (out, *grads), (right, *right_grads)):
        assert got.shape == want.shape, f"{name} {got.shape} {want.shape}"
        error = (got.double() - want).abs().max().item() if got.numel() else 0.0
        assert error <= tolerance * max(1.0, want.abs().max().item() if want.numel() else 0.0), f"{name}: {error}"


def failing(check, *arguments):
    try:
        check(*arguments)
    except Exception as error:  # told by the parent, which has all ranks
        return f"{arguments}: {type(error).__name__}: {error}"


def schemes(rank, world):
    """Every case by every scheme, whose layouts change from case to case; some cases with all of them."""
    runs = [
        (case, scheme, layout)
        for (n, case), (m, scheme), (p, layout) in itertools.product(*map(enumerate, (CASES, SCHEMES, _shards.LAYOUTS)))
        if (n + m) % 3 == p or case in ("causal", "sinks", "packed", "fewer queries")
    ]
    found = [failing(compare, *run) for run in runs]
    found.append(failing(decodes, world))
    return [text for text in found if text]


def decodes(world):
    rng = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, tokens, 16, generator=rng) for heads, tokens in ((4, 1), (2, 29), (2, 29)))
    right = reference(q.double(), k.double(), v.double(), None)
    # The last rank has nothing where there are more than two.
    cuts = [29 * min(n, max(world - 1, 1)) // max(world - 1, 1) for n in range(world + 1)]
    mine = slice(cuts[dist.get_rank()], cuts[dist.get_rank() + 1])
    out = distributed.decode_attention(q, k[:, :, mine], v[:, :, mine], timeout=60)
    torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=0)


def disagrees(rank, world):
    """A rank with other arguments raises on all of them."""
    x = torch.randn(1, 2, 8 + (rank == 1), 16)
    messages = []
    for change in (dict(), dict(softcap=1.0 + rank), dict(q=torch.randn(1, 2, 8, 16 * (1 + rank)))):
        k = x[:, :, :8]
        q = change.pop("q", k if change else torch.cat([x, x], 2))
        try:
            distributed.ring_attention(q, k, k, causal=True, layout="contiguous", timeout=20, **change)
            messages.append("no error")
        except ValueError as error:
            messages.append(str(error))
    wanted = ("cut tensors by flashcore.distributed.shard", "the softcap differs", "rank 1 cannot take part")
    if rank == 1:
        wanted = (*wanted[:2], "do not go together")
    return [f"{got!r} does not say {want!r}" for got, want in zip(messages, wanted) if want not in got]


class Llama(torch.nn.Module):
    """A small one: normalised, rotated, gated, two layers."""

    def __init__(self, attend, vocabulary=32, width=32, heads=4, layers=2):
        super().__init__()
        linear = lambda rows, columns: torch.nn.Linear(columns, rows, bias=False)
        self.attend, self.heads = attend, heads
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                dict(qkv=linear(2 * width, width), o=linear(width, width), up=linear(4 * width, width), down=linear(width, 2 * width))
            )
            for _ in range(layers)
        )

    def forward(self, tokens, positions):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer["o"](self.mix(layer["qkv"](norm(x)), positions))
            gate, up = layer["up"](norm(x)).chunk(2, -1)
            x = x + layer["down"](torch.nn.functional.silu(gate) * up)
        return norm(x) @ self.embedding.weight.T

    def mix(self, qkv, positions):
        batch, tokens, width = qkv.shape
        dim = width // 2 // self.heads
        q, k, v = qkv.view(batch, tokens, 2 * self.heads, dim).transpose(1, 2).split([self.heads, self.heads // 2, self.heads // 2], 1)
        q, k = (rotated(x, positions) for x in (q, k))
        return self.attend(q, k, v).transpose(1, 2).reshape(batch, tokens, -1)


def norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotated(x, positions):
    half = x.shape[-1] // 2
    angles = positions[:, None] * 100.0 ** -(torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.split(half, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def losses(attend, shard, total, steps=50):
    """Learns to go on with sequences that repeat themselves."""
    torch.manual_seed(1)
    model = Llama(attend)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    rng, found = torch.Generator().manual_seed(2), []
    for _ in range(steps):
        text = torch.randint(0, 32, (2, 15), generator=rng).repeat(1, 5)[:, :74]
        tokens, labels, positions = shard(text[:, :-1]), shard(text[:, 1:]), shard(torch.arange(73)[None])[0]
        loss = torch.nn.functional.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum")
        optimizer.zero_grad()
        (loss / text[:, 1:].numel()).backward()
        found.append(total(loss.detach()).item() / text[:, 1:].numel())
        for weight in model.parameters():
            total(weight.grad)
        optimizer.step()
    return found


def learns(rank, world):
    whole = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    split = lambda q, k, v: distributed.ring_attention(q, k, v, causal=True, timeout=60)
    alone = losses(whole, lambda x: x, lambda x: x)
    together = losses(split, lambda x: distributed.shard(x, dim=1), lambda x: (dist.all_reduce(x), x)[1])
    apart = max(abs(a - b) for a, b in zip(alone, together))
    found = [] if apart < 2e-3 else [f"losses differ by {apart}: {alone[-1]} and {together[-1]}"]
    return found if alone[-1] < 0.9 * alone[0] else [*found, f"nothing learned: {alone[0]} to {alone[-1]}"]


def dies(rank, world):
    """Where a rank ends, the others do not wait for ever."""
    x = torch.randn(1, 2, 8, 16)
    distributed.ring_attention(x, x, x, layout="contiguous", timeout=20)
    if rank == world - 1:
        os._exit(7)
    begin = time.monotonic()
    try:
        distributed.ring_attention(x, x, x, layout="contiguous", timeout=5)
        return ["no error"]
    except Exception:
        waited = time.monotonic() - begin
        return [] if waited < 30 else [f"waited for {waited} s"]


def work(rank, world, folder, task):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = globals()[task](rank, world)
    Path(folder, f"rank{rank}").write_text("\n".join(found))
    os._exit(0) if task == "dies" else dist.destroy_process_group()


def run(world, task):
    """What went wrong on each rank."""
    with tempfile.TemporaryDirectory() as folder:
        context = processes.get_context("spawn")
        ranks = [context.Process(target=work, args=(rank, world, folder, task), daemon=True) for rank in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(240)
        files = {name: Path(folder, name) for name in (f"rank{rank}" for rank in range(world))}
        return {name: file.read_text() if file.exists() else "ended" for name, file in files.items()}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_scheme_gives_what_one_process_gives(world):
    assert run(world, "schemes") == {f"rank{rank}": "" for rank in range(world)}


def test_a_mistake_on_one_rank_is_told_on_all():
    assert run(2, "disagrees") == {"rank0": "", "rank1": ""}


def test_a_rank_that_ends_is_an_error_on_the_others():
    assert run(3, "dies") == {"rank0": "", "rank1": "", "rank2": "ended"}


def test_a_model_learns_as_on_one_rank():
    assert run(2, "learns") == {"rank0": "", "rank1": ""}


@pytest.mark.parametrize("length", [0, 1, 2, 5, 16, 37])
@pytest.mark.parametrize("layout", _shards.LAYOUTS)
def test_every_token_is_held_once_and_bands_say_what_is_seen(layout, length):
    for world in (1, 2, 3, 5):
        held = [_shards.positions([length, 3], world, rank, layout) for rank in range(world)]
        assert sorted(torch.cat(held).tolist()) == list(range(length + 3))
        for (a, b), window in itertools.product(itertools.product(range(world), repeat=2), ((None, 0), (3, 2), (4, None))):
            for q in _shards.pieces(length, world, a, layout):
                for k in _shards.pieces(length, world, b, layout):
                    check_band(q, k, window, length)


def check_band(q, k, window, length):
    mask = seen(length, length, False, window).numpy()
    positions = [np.arange(piece.count) * piece.step + piece.first for piece in (q, k)]
    wanted = mask[np.ix_(*positions)]
    found = _shards.band(q, k, *window, 0)
    got = np.zeros_like(wanted)
    if found is not None:
        distance = np.arange(k.count) - np.arange(q.count)[:, None] - found.shift
        got = np.ones_like(wanted)
        got &= distance <= found.right if found.right is not None else got
        got &= distance >= -found.left if found.left is not None else got
    assert (found is None) == (not wanted.any())
    np.testing.assert_array_equal(got, wanted)
