"""The plugin against SGLang's recorded interfaces, on the CPU: prefill, then steps of decode, eager and as graphs see them."""

import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
HERE = Path(__file__).resolve().parent
HEADS, KV_HEADS, DIM, CONTEXT = 4, 2, 16, 64


@pytest.fixture
def plugin(monkeypatch):
    for folder in (HERE, HERE.parent):
        monkeypatch.syspath_prepend(str(folder))
    before = dict(sys.modules)
    recorded = importlib.import_module("recorded")
    places = recorded.install()
    package = importlib.import_module("flashcore_sglang")
    package.register()
    yield recorded, *places
    for name in set(sys.modules) - set(before):
        if name.split(".")[0] in ("sglang", "recorded", "flashcore_sglang"):
            del sys.modules[name]


def layer(**more):
    given = dict(
        layer_id=0, tp_q_head_num=HEADS, qk_head_dim=DIM, v_head_dim=DIM, scaling=0.3, logit_cap=0.0, sliding_window_size=-1,
        k_scale=None, v_scale=None, is_cross_attention=False, attn_type="decoder",
    )  # fmt: skip
    return SimpleNamespace(**(given | more))


class Server:
    """Two requests, whose tokens lie in scattered slots."""

    def __init__(self, recorded, registry, page, layer, cache=None, runner=None):
        self.recorded, self.page, self.layer, self.cache = recorded, page, layer, cache
        self.runner = recorded.runner(torch, page, KV_HEADS, DIM, CONTEXT, cache) if runner is None else runner
        self.backend = registry.ATTENTION_BACKENDS["flashcore"](self.runner)
        self.keys = [torch.zeros(0, KV_HEADS, DIM)] * 2
        self.values = list(self.keys)
        torch.manual_seed(0)
        pages = torch.randperm(60)[: 2 * CONTEXT // page].view(2, -1) + 1 if page > 1 else torch.randperm(63).add(1)[:62].view(2, 31)
        slots = (pages[..., None] * page + torch.arange(page)).flatten(1)
        self.runner.req_to_token_pool.req_to_token[3, : slots.shape[1]] = slots[0].int()
        self.runner.req_to_token_pool.req_to_token[5, : slots.shape[1]] = slots[1].int()
        self.slots = slots

    def step(self, new, graph=False, sinks=None):
        """What the layer gives for `new` tokens of each request, and what it should."""
        old = [len(k) for k in self.keys]
        (q, k, v), kept = self.new(sum(new))
        slots = torch.cat([self.slots[n, old[n] : old[n] + new[n]] for n in range(2)])
        self.keys = [torch.cat([a, b]) for a, b in zip(self.keys, kept[0].split(new))]
        self.values = [torch.cat([a, b]) for a, b in zip(self.values, kept[1].split(new))]
        batch = self.batch(new, slots, new == [1, 1] and old != [0, 0])
        if graph:
            self.backend.init_cuda_graph_state(4, 4)
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            self.backend.init_forward_metadata_out_graph(batch)
        else:
            self.backend.init_forward_metadata(batch)
        got = self.backend.forward(q.flatten(1), k, v, self.layer, batch, sinks=sinks)
        own = zip(q.float().split(new), self.keys, self.values)
        return got, torch.cat([plain(*one, self.layer, sinks) for one in own]).flatten(1)

    def new(self, count):
        """Queries, keys and values of so many new tokens, and keys and values as the cache has them."""
        q, k, v = (torch.randn(count, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        if self.cache is None:
            return (q, k, v), [k, v]
        q, k, v = (x.bfloat16() for x in (q, k, v))
        return (q, k, v), [(x / scale).to(self.cache).float() * scale for x, scale in ((k, self.layer.k_scale), (v, self.layer.v_scale))]

    def batch(self, new, slots, decode=False):
        lengths = torch.tensor([len(k) for k in self.keys])
        return SimpleNamespace(
            batch_size=2, seq_lens=lengths, seq_lens_cpu=lengths, req_pool_indices=torch.tensor([3, 5]),
            out_cache_loc=slots, forward_mode=self.recorded.Mode(decode),
            extend_seq_lens=torch.tensor(new), extend_seq_lens_cpu=new,
        )  # fmt: skip


def plain(q, k, v, layer, sinks=None):
    """What a layer computes for one request."""
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scaling
    cap = layer.logit_cap
    scores = cap * torch.tanh(scores / cap) if cap else scores
    past = torch.arange(len(k))[None] - (torch.arange(len(q))[:, None] + len(k) - len(q))
    window = layer.sliding_window_size
    scores = scores.masked_fill((past > 0) | (past < -window if window >= 0 else past < -len(k)), -math.inf)
    sums = scores.logsumexp(-1) if sinks is None else torch.logaddexp(scores.logsumexp(-1), sinks[:, None])
    return torch.einsum("hqk,khd->qhd", (scores - sums[..., None]).exp(), v)


@pytest.mark.parametrize("page", [1, 8])
@pytest.mark.parametrize("more", [{}, {"sliding_window_size": 5}, {"logit_cap": 3.0}], ids=["plain", "window", "capped"])
def test_prompts_and_then_steps(plugin, page, more):
    recorded, registry, _ = plugin
    server = Server(recorded, registry, page, layer(**more))
    for new, graph in (([7, 3], False), ([4, 1], False), ([1, 1], False), ([1, 1], True)):
        got, wanted = server.step(new, graph)
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize("page", [1, 8])
def test_a_cache_of_8_bits(plugin, page):
    recorded, registry, _ = plugin
    scaled = layer(k_scale=torch.tensor(0.01), v_scale=torch.tensor(0.02))
    server = Server(recorded, registry, page, scaled, torch.float8_e4m3fn)
    for new, graph in (([7, 3], False), ([1, 1], False), ([1, 1], True)):
        got, wanted = server.step(new, graph)
        torch.testing.assert_close(got.float(), wanted, atol=0.02, rtol=0.01)


def test_sinks(plugin):
    recorded, registry, _ = plugin
    server, sinks = Server(recorded, registry, 1, layer()), torch.linspace(-1, 1, HEADS)
    for new in ([7, 3], [1, 1]):
        got, wanted = server.step(new, sinks=sinks)
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=0)


class LatentServer(Server):
    """The same for latent attention: tokens have one row each, whose first features are the values of all heads."""

    RANK, ROW = 32, 48

    def __init__(self, recorded, registry, page, cache=None):
        of_rows = layer(qk_head_dim=self.ROW, v_head_dim=self.RANK, tp_k_head_num=1)
        runner = recorded.runner(torch, page, 1, self.ROW, CONTEXT, cache, self.RANK)
        super().__init__(recorded, registry, page, of_rows, cache, runner)
        self.keys = [torch.zeros(0, 1, self.ROW)] * 2
        self.values = [torch.zeros(0, 1, self.RANK)] * 2

    def new(self, count):
        q, rows = torch.randn(count, HEADS, self.ROW), torch.randn(count, 1, self.ROW)
        if self.cache is None:
            return (q, rows, rows[..., : self.RANK]), [rows, rows[..., : self.RANK]]
        q, rows = q.bfloat16(), rows.bfloat16()
        kept = rows.to(self.cache).float()
        return (q, rows, rows[..., : self.RANK]), [kept, kept[..., : self.RANK]]

    def prompts(self, new):
        """Prompts as models compute them that begin with nothing in the pool: head by head, latents written by the model."""
        _, (rows, values) = self.new(sum(new))
        slots = torch.cat([self.slots[n, : new[n]] for n in range(2)])
        self.runner.token_to_kv_pool.set_kv_buffer(self.layer, slots, rows, values)
        self.keys, self.values = list(rows.split(new)), list(values.split(new))
        q, k, v = (torch.randn(sum(new), HEADS, dim) for dim in (24, 24, 16))
        by_heads, batch = layer(qk_head_dim=24, v_head_dim=16), self.batch(new, slots)
        self.backend.init_forward_metadata(batch)
        got = self.backend.forward(q.flatten(1), k, v, by_heads, batch, save_kv_cache=False)
        own = zip(*(x.split(new) for x in (q, k, v)))
        return got, torch.cat([plain(*one, by_heads) for one in own]).flatten(1)


@pytest.mark.parametrize("page", [1, 8])
def test_latent_attention(plugin, page):
    recorded, registry, _ = plugin
    server = LatentServer(recorded, registry, page)
    got, wanted = server.prompts([7, 3])
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=0)
    for new, graph in (([4, 1], False), ([1, 1], False), ([1, 1], True)):
        got, wanted = server.step(new, graph)
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize("page", [1, 8])
def test_latents_of_8_bits(plugin, page):
    recorded, registry, _ = plugin
    server = LatentServer(recorded, registry, page, torch.float8_e4m3fn)
    for new, graph in (([7, 3], False), ([4, 1], False), ([1, 1], True)):
        got, wanted = server.step(new, graph)
        torch.testing.assert_close(got.float(), wanted, atol=0.02, rtol=0.01)


def test_it_is_offered_and_says_what_it_cannot_do(plugin):
    recorded, registry, arguments = plugin
    assert "flashcore" in registry.ATTENTION_BACKENDS and "flashcore" in arguments.choices
    runner = recorded.runner(torch, 1, 1, 48, CONTEXT, rank=32)
    runner.token_to_kv_pool.use_dsa = True
    with pytest.raises(ValueError, match="sparse latent attention.*choose another"):
        registry.ATTENTION_BACKENDS["flashcore"](runner)
    server = Server(recorded, registry, 1, layer(is_cross_attention=True))
    with pytest.raises(NotImplementedError, match="for decoders"):
        server.step([2, 2])
