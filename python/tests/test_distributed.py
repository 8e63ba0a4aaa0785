"""`flashcore.distributed` over gloo, several processes on this machine: every scheme against one process in f64."""

import argparse
import functools
import importlib
import itertools
import os
import random
import tempfile
import time
import traceback
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
    """Every case by a ring in every layout, and by the other schemes in layouts that change from case to case."""
    runs = [
        (case, scheme, layout)
        for (n, case), (m, scheme), (p, layout) in itertools.product(*map(enumerate, (CASES, SCHEMES, _shards.LAYOUTS)))
        if (n + m) % 3 == p or scheme == "ring" or case in ("causal", "sinks", "packed", "fewer queries")
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
    wanted = ("split tensors with flashcore.distributed.shard", "the softcap differs", "rank 1 cannot take part")
    if rank == 1:
        wanted = (*wanted[:2], "give all one batch")
    for group, want in (("all", "group is 'all', which is not a process group"), (outside(), "not in the group")):
        try:
            distributed.ring_attention(q, k, k, group)
        except (TypeError, ValueError) as error:
            messages, wanted = [*messages, str(error)], (*wanted, want)
    if len(messages) != 5:
        return [f"{len(messages)} mistakes of 5 were told"]
    return [f"{got!r} does not say {want!r}" for got, want in zip(messages, wanted) if want not in got]


def outside():
    """What stands for a group that this rank is not in."""
    return torch.distributed.GroupMember.NON_GROUP_MEMBER


class Llama(torch.nn.Module):
    """A small one: normalised, rotated, gated, two layers."""

    def __init__(self, attend, vocabulary=32, width=32, heads=4, layers=2):
        super().__init__()
        linear = lambda rows, columns: torch.nn.Linear(columns, rows, bias=False)
        self.attend, self.heads = attend, heads
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                dict(
                    qkv=linear(2 * width, width),
                    o=linear(width, width),
                    up=linear(4 * width, width),
                    down=linear(width, 2 * width),
                )
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
        q, k, v = (
            qkv.view(batch, tokens, 2 * self.heads, dim)
            .transpose(1, 2)
            .split([self.heads, self.heads // 2, self.heads // 2], 1)
        )
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
        loss = torch.nn.functional.cross_entropy(
            model(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum"
        )
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


def torchs_own(rank, world):
    """`context_parallel` of torch, whose ring is made of the operators that FlashCore takes: here those of CPU tensors."""
    experimental = pytest.importorskip("torch.distributed.tensor.experimental")
    import flashcore.integrations.torch as slot

    library = torch.library.Library("aten", "IMPL")
    for name, operator in slot.OPERATORS.items():
        library.impl(name, operator, "CPU")
    rng = torch.Generator().manual_seed(4)
    inputs = [torch.randn(2, 4, 24, 16, generator=rng) for _ in range(4)]
    right = [x.double().requires_grad_() for x in inputs[:3]]
    out = reference(*right, None, causal=True)
    out.backward(inputs[3].double())
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))

    # What torch calls for CPU tensors has no place in its ring; what it calls for those of a GPU has.
    def scaled_dot_product_attention(q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]

    functional, kept = torch.nn.functional, torch.nn.functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        shards = [x.clone() for x in inputs]
        with experimental.context_parallel(mesh, buffers=shards, buffer_seq_dims=[2] * 4):
            tensors = [x.detach().clone().requires_grad_() for x in shards[:3]]
            found = functional.scaled_dot_product_attention(*tensors)
            found.backward(shards[3])
            found = found.detach()
    finally:
        functional.scaled_dot_product_attention = kept
        library._destroy()
    cut = lambda x: distributed.shard(x, layout="zigzag")
    pairs = zip((found, *(x.grad for x in tensors)), (out.detach(), *(x.grad for x in right)))
    return [
        f"{n}: off" for n, (got, want) in enumerate(pairs) if not torch.allclose(got.double(), cut(want), atol=2e-5)
    ]


TASKS = {1: ["schemes"], 2: ["schemes", "disagrees", "learns", "torchs_own"], 3: ["schemes", "dies"], 4: ["schemes"]}
"""What the ranks of a group do one after another; a process takes longer to start than to do most of it."""


def work(rank, world, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for task in TASKS[world]:
        try:
            found = globals()[task](rank, world)
        except Exception:
            found = [traceback.format_exc()]
        Path(folder, f"{task}{rank}").write_text("\n".join(found))
    os._exit(0) if "dies" in TASKS[world] else dist.destroy_process_group()


@functools.cache
def outcome(world):
    """What went wrong in each task on each rank."""
    with tempfile.TemporaryDirectory() as folder:
        # One process imports torch, which takes seconds, and all ranks start as copies of it.
        context = processes.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.tensor", "flashcore.distributed", "pytest"])
        ranks = [context.Process(target=work, args=(rank, world, folder), daemon=True) for rank in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(240)
        read = lambda file: file.read_text() if file.exists() else "ended"
        return {task: [read(Path(folder, f"{task}{rank}")) for rank in range(world)] for task in TASKS[world]}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_scheme_gives_what_one_process_gives(world):
    assert outcome(world)["schemes"] == [""] * world


def test_a_mistake_on_one_rank_is_told_on_all():
    assert outcome(2)["disagrees"] == ["", ""]


def test_a_rank_that_ends_is_an_error_on_the_others():
    assert outcome(3)["dies"] == ["", "", "ended"]


def test_a_model_learns_as_on_one_rank():
    assert outcome(2)["learns"] == ["", ""]


def test_context_parallel_of_torch_runs_on_it():
    assert outcome(2)["torchs_own"] == ["", ""]


def bench(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    return importlib.import_module("virtual_ranks")


def test_bits_do_not_depend_on_when_messages_arrive(monkeypatch):
    module = bench(monkeypatch)
    rng = torch.Generator().manual_seed(5)
    tensors = [torch.randn(1, heads, 41, 16, generator=rng) for heads in (4, 2, 2, 4)]
    ranks = module.Ranks(argparse.Namespace(tokens=41, ranks=3, layout="zigzag"), tensors)
    results = ranks.forward()
    found = results, ranks.backward(results)
    prompt = module.Loop.pass_on
    late = lambda *message: (time.sleep(random.random() / 100), prompt(*message))[1]
    monkeypatch.setattr(module.Loop, "pass_on", late)
    results = ranks.forward()
    again = results, ranks.backward(results)
    flat = lambda parts: [x for part in parts for of_rank in part for x in of_rank]
    assert all(map(torch.equal, flat(found), flat(again)))


def test_virtual_ranks_err_no_more_than_the_whole(monkeypatch):
    module = bench(monkeypatch)
    monkeypatch.setattr(module, "seconds", lambda runs, once: {name: once(run, 1) for name, run in runs.items()})
    options = argparse.Namespace(tokens=501, ranks=4, layout="zigzag", device="cpu", profile=False)
    found = module.case(options, 4, 2, 32)
    assert found["error_ratio"] < 1.05, found


def test_a_zigzag_ring_makes_one_call_for_each_step():
    held = [_shards.sections([64], 4, rank, "zigzag")[0] for rank in range(4)]
    for rank, source in itertools.product(range(4), repeat=2):
        (cell,) = _shards.cells(held[rank], held[source], (None, 0), 0)
        wanted = {0: (16, 16), 1: (16, 8), -1: (8, 16)}[(rank > source) - (rank < source)]
        assert cell.extent == wanted and cell.seen == (_shards.CAUSAL if rank == source else _shards.ALL)


@pytest.mark.parametrize("length", [0, 1, 2, 5, 16, 37])
@pytest.mark.parametrize("layout", _shards.LAYOUTS)
def test_every_token_is_held_once_and_bands_say_what_is_seen(layout, length):
    for world in (1, 2, 3, 5):
        held = [_shards.positions([length, 3], world, rank, layout) for rank in range(world)]
        assert sorted(torch.cat(held).tolist()) == list(range(length + 3))
        for (a, b), window in itertools.product(
            itertools.product(range(world), repeat=2), ((None, 0), (3, 2), (4, None))
        ):
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
