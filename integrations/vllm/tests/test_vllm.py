"""The plugin against vLLM's recorded interfaces, on the CPU: what a layer gets is attention over its pages."""

import importlib
import math
import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
HERE = Path(__file__).resolve().parent
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 8
QUERIES, KEYS = (1, 5, 0, 3), (9, 5, 0, 20)


@pytest.fixture
def plugin(monkeypatch):
    for folder in (HERE, HERE.parent):
        monkeypatch.syspath_prepend(str(folder))
    before = dict(sys.modules)
    registry = importlib.import_module("recorded").install()
    yield importlib.import_module("flashcore_vllm"), importlib.import_module("flashcore_vllm.backend"), registry
    for name in set(sys.modules) - set(before):
        if name.split(".")[0] in ("vllm", "recorded", "flashcore_vllm"):
            del sys.modules[name]


def caches(layout):
    """The same keys and values in the caches of three ages of vLLM."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 12, PAGE, KV_HEADS, DIM)
    cache = {
        "up to 0.22": lambda: torch.stack([k, v]),
        "0.23 to 0.25": lambda: torch.stack([k, v], 1),
        "from 0.26": lambda: torch.cat([k, v], -1).transpose(1, 2),
    }[layout]()
    return k, v, cache


def metadata(recorded, **more):
    offsets = torch.tensor([0, *torch.tensor(QUERIES).cumsum(0)], dtype=torch.int32)
    table = torch.tensor([[3, 7, -1], [0, -1, -1], [-1, -1, -1], [11, 1, 5]], dtype=torch.int32)
    lengths = torch.tensor(KEYS, dtype=torch.int32)
    return recorded.FlashAttentionMetadata(sum(QUERIES), 5, offsets, 64, lengths, table, **more)


def expected(q, k, v, table, window, cap, sinks, slopes):
    rows, at = [], 0
    for n, (queries, keys) in enumerate(zip(QUERIES, KEYS)):
        if not queries:
            continue
        pages = table[n, : math.ceil(keys / PAGE)].long()
        own = [x[pages].flatten(0, 1)[:keys].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v)]
        scores = torch.einsum("qhd,khd->hqk", q[at : at + queries], own[0]) * 0.3
        scores = cap * torch.tanh(scores / cap) if cap else scores
        past = torch.arange(keys)[None] - (torch.arange(queries)[:, None] + keys - queries)
        if slopes is not None:
            scores = scores - torch.tensor(slopes)[:, None, None] * past.abs()
        hidden = (past > 0) | (past <= -window if window else past < -keys)
        scores = scores.masked_fill(hidden, -math.inf)
        sums = scores.logsumexp(-1) if sinks is None else torch.logaddexp(scores.logsumexp(-1), sinks[:, None])
        rows.append(torch.einsum("hqk,khd->qhd", (scores - sums[..., None]).exp(), own[1]))
        at += queries
    return torch.cat(rows)


OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 6},
    "capped": {"logits_soft_cap": 3.0},
    "sinks": {"sinks": torch.linspace(-1, 1, HEADS)},
    "slopes": {"alibi_slopes": [0.1, 0.2, 0.3, 0.4]},
}


@pytest.mark.parametrize("layout", ["up to 0.22", "0.23 to 0.25", "from 0.26"])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_a_layer_attends_to_its_pages(plugin, layout, name):
    _, backend, _ = plugin
    recorded = sys.modules["recorded"]
    given = dict(alibi_slopes=None, sliding_window=None) | OPTIONS[name]
    layer = backend.FlashCoreBackend.get_impl_cls()(HEADS, DIM, 0.3, KV_HEADS, kv_cache_dtype="auto", **given)
    k, v, cache = caches(layout)
    q = torch.randn(sum(QUERIES) + 3, HEADS, DIM)  # padded, as graphs have it
    asked, output = metadata(recorded), torch.full((len(q), HEADS * DIM), 7.0)
    assert layer.forward(None, q, None, None, cache, asked, output) is output
    tokens = sum(QUERIES)
    options = (given.get("logits_soft_cap"), given.get("sinks"), given["alibi_slopes"])
    wanted = expected(q[:tokens], k, v, asked.block_table, given["sliding_window"], *options)
    torch.testing.assert_close(output[:tokens].view(tokens, HEADS, DIM), wanted, atol=2e-6, rtol=0)
    assert (output[tokens:] == 7).all()


@pytest.mark.parametrize("layout", ["up to 0.22", "0.23 to 0.25", "from 0.26"])
@pytest.mark.parametrize("scale", ["number", "heads"])
def test_a_layer_widens_a_cache_of_8_bits(plugin, layout, scale):
    _, backend, _ = plugin
    recorded = sys.modules["recorded"]
    layer = backend.FlashCoreImpl(HEADS, DIM, 0.3, KV_HEADS, None, None, "fp8")
    assert layer.supports_quant_query_input is False
    k, v, cache = caches(layout)
    shape = () if scale == "number" else (KV_HEADS,)
    scales = torch.full(shape, 0.01) + (0 if scale == "number" else torch.tensor([0.0, 0.004]))
    written = (cache * 80).to(torch.float8_e4m3fn)
    stored = written.view(torch.uint8)  # as vLLM hands it over
    k, v = ((x * 80).to(torch.float8_e4m3fn).float() * scales.reshape(-1, 1) for x in (k, v))
    scaled = types.SimpleNamespace(_k_scale=scales, _v_scale=scales)
    q = torch.randn(sum(QUERIES), HEADS, DIM).bfloat16()
    asked, output = metadata(recorded, use_cascade=True), torch.zeros(len(q), HEADS * DIM, dtype=torch.bfloat16)
    assert layer.forward(scaled, q, None, None, stored, asked, output) is output
    wanted = expected(q.float(), k, v, asked.block_table, None, None, None, None)
    torch.testing.assert_close(output.float().view(len(q), HEADS, DIM), wanted, atol=0.02, rtol=0.01)


def test_what_is_rare_is_left_to_vllm(plugin):
    _, backend, _ = plugin
    recorded = sys.modules["recorded"]
    make = lambda **more: backend.FlashCoreImpl(HEADS, DIM, 0.3, KV_HEADS, None, None, **({"kv_cache_dtype": "auto"} | more))
    q, (_, _, cache) = torch.randn(sum(QUERIES), HEADS, DIM), caches("from 0.26")
    output = torch.ones(len(q), HEADS * DIM)
    call = lambda layer, asked: layer.forward(None, q, None, None, cache, asked, output)
    assert call(make(), metadata(recorded, use_cascade=True)) == "theirs"
    assert call(make(kv_cache_dtype="fp8_e5m2"), metadata(recorded)) == "theirs"
    assert call(make(attn_type=recorded.AttentionType.ENCODER_ONLY), metadata(recorded)) == "theirs"
    assert (call(make(), None) == 0).all()


def test_metadata_without_cascades_are_taken(plugin):
    """As from 0.33 on."""
    _, backend, _ = plugin
    layer = backend.FlashCoreImpl(HEADS, DIM, 0.3, KV_HEADS, None, None, "auto")
    asked = metadata(sys.modules["recorded"])
    newer = types.SimpleNamespace(**{name: value for name, value in vars(asked).items() if name != "use_cascade"})
    q, (_, _, cache) = torch.randn(sum(QUERIES), HEADS, DIM), caches("from 0.26")
    outputs = [torch.zeros(len(q), HEADS, DIM) for _ in range(2)]
    for given, output in zip((asked, newer), outputs):
        layer.forward(None, q, None, None, cache, given, output)
    assert torch.equal(*outputs) and outputs[0].abs().sum() > 0


RANK, ROPE = 32, 16


@pytest.mark.parametrize("kind", ["parts", "one tensor", "fp8", "fp8 as bytes"])
def test_a_layer_attends_to_latents(plugin, kind):
    latent = importlib.import_module("flashcore_vllm.latent")
    recorded = sys.modules["recorded"]
    dtype = "fp8" if kind.startswith("fp8") else "auto"
    given = (HEADS, RANK + ROPE, 0.3, 1, None, None, dtype, None, recorded.AttentionType.DECODER, None)
    layer = latent.FlashCoreMLABackend.get_impl_cls()(*given, kv_lora_rank=RANK, qk_rope_head_dim=ROPE)
    assert layer.supports_quant_query_input is False and layer.supports_dcp is False
    torch.manual_seed(0)
    rows, asked = torch.randn(12, PAGE, RANK + ROPE), metadata(recorded)
    q, scale = torch.randn(sum(QUERIES), HEADS, RANK + ROPE), torch.tensor(0.02)
    tolerance, stored = 2e-6, rows
    if dtype == "fp8":
        stored = (rows / scale).to(torch.float8_e4m3fn)
        rows, q, tolerance = stored.float() * scale, q.bfloat16(), 0.02
        stored = stored.view(torch.uint8) if kind == "fp8 as bytes" else stored
    decode = recorded.FlashAttnMLADecodeMetadata(asked.block_table, asked.seq_lens, asked.query_start_loc, 5, 64)
    given = q if kind == "one tensor" else tuple(q.split([RANK, ROPE], dim=-1))
    scaled = types.SimpleNamespace(_k_scale=scale)
    out, lse = layer.forward_mqa(given, stored, types.SimpleNamespace(decode=decode), scaled)
    both = [x[:, :, None].expand(-1, -1, KV_HEADS, -1) for x in (rows, rows[..., :RANK])]
    wanted = expected(q.float(), *both, asked.block_table, None, None, None, None)
    assert lse is None and out.dtype == q.dtype
    torch.testing.assert_close(out.float(), wanted, atol=tolerance, rtol=0.01 if dtype == "fp8" else 0)


def test_latent_attention_plans_nothing_and_says_what_it_cannot_do(plugin):
    latent = importlib.import_module("flashcore_vllm.latent")
    backend = latent.FlashCoreMLABackend
    assert backend.get_builder_cls()()._schedule_decode(1, 2, 3, 4, 5, True, 0) is None
    assert [backend.supports_compute_capability(types.SimpleNamespace(major=n)) for n in (7, 8, 9, 12)] == [False, True, True, True]
    assert backend.supports_combination(576, torch.bfloat16, "auto", 16, True, False, False, False, None) is None
    assert {"auto", "bfloat16", "fp8"} <= set(backend.supported_kv_cache_dtypes)
    rest = dict(kv_lora_rank=RANK, qk_rope_head_dim=ROPE)
    refused = (None, 8, "auto", None, "decoder"), (None, None, "auto", 5.0, "decoder"), (None, None, "auto", None, "encoder_only")
    for given in refused:
        with pytest.raises(NotImplementedError, match="choose another backend"):
            latent.FlashCoreMLAImpl(HEADS, RANK + ROPE, 0.3, 1, *given, None, **rest)


def test_prompts_of_latent_attention_are_computed_head_by_head(plugin):
    """New tokens among themselves, then parts of what stands before them, merged by their log-sum-exps."""
    prompts = importlib.import_module("flashcore_vllm.prompts")
    backend = prompts.FlashCoreMLAPrefillBackend(HEADS, 0.3, 32, 16, 8, 16, None)
    assert backend.supports_out() and backend.get_name() == "CUSTOM"
    assert [backend.supports_compute_capability(one) for one in (None, types.SimpleNamespace(major=8))] == [False, True]
    torch.manual_seed(0)
    new, before = (5, 3), (4, 0)
    starts = lambda counts: torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
    q = torch.randn(8, HEADS, 24)
    (k, v), (old_k, old_v) = ([torch.randn(rows, HEADS, dim) for dim in (24, 16)] for rows in (8, 4))
    backend.prepare_metadata(types.SimpleNamespace(query_start_loc=starts(new), max_query_len=5))
    chunk = types.SimpleNamespace(query_start_loc=starts(new), cu_seq_lens=starts(before), max_query_len=5, max_seq_len=4)
    own, of_own = backend.run_prefill_new_tokens(q, k, v, True)
    into = torch.empty(8, HEADS, 16)
    context, of_context = backend.run_prefill_context_chunk(chunk, q, old_k, old_v, out=into)
    assert context is into and of_own.shape == of_context.shape == (HEADS, 8)
    assert torch.equal(backend.run_prefill_new_tokens(q, k, v, False), own)
    weight = torch.sigmoid(of_context - of_own).T[..., None]
    got = own * (1 - weight) + context * weight
    for rows, keys in ((slice(0, 5), slice(0, 4)), (slice(5, 8), slice(4, 4))):
        both = [torch.cat([old[keys], x[rows]]) for old, x in ((old_k, k), (old_v, v))]
        scores = torch.einsum("qhd,khd->hqk", q[rows], both[0]) * 0.3
        ahead = torch.arange(len(both[0]))[None] > torch.arange(len(q[rows]))[:, None] + keys.stop - keys.start
        wanted = torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -math.inf).softmax(-1), both[1])
        torch.testing.assert_close(got[rows], wanted, atol=2e-6, rtol=0)
    with pytest.raises(NotImplementedError, match="choose another mla_prefill_backend"):
        backend.run_prefill_new_tokens(q, k, v, False, output_scale=torch.ones(1))


def test_it_is_registered_by_vllms_names(plugin):
    package, backend, registry = plugin
    package.register()
    package.register()
    found = {}
    for key, path in registry.known.items():
        module, _, name = path.rpartition(".")
        found[key] = getattr(importlib.import_module(module), name)
    assert found["CUSTOM"] is backend.FlashCoreBackend
    assert {key: one.get_name() for key, one in found.items()} == {
        "CUSTOM": "CUSTOM", "FLASHCORE_MLA": "FLASHCORE_MLA", "prompts, CUSTOM": "CUSTOM"
    }  # fmt: skip
    assert {"CUSTOM", "FLASHCORE_MLA"} <= set(registry.AttentionBackendEnum.__members__)


def test_older_releases_have_no_names_to_add(plugin):
    package, _, _ = plugin
    registry = sys.modules["recorded"].install(named=False)
    package.register()
    assert list(registry.known) == ["CUSTOM"]


def test_invariance_is_asked_for_as_vllm_does(plugin, monkeypatch):
    _, backend, _ = plugin
    recorded, asked = sys.modules["recorded"], []
    monkeypatch.setattr(backend, "flash_attn_varlen_func", lambda *_, batch_invariant, **__: asked.append(batch_invariant))
    q, (_, _, cache) = torch.randn(sum(QUERIES), HEADS, DIM), caches("from 0.26")
    for value in ("0", "1"):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        layer = backend.FlashCoreImpl(HEADS, DIM, 0.3, KV_HEADS, None, None, "auto")
        layer.forward(None, q, None, None, cache, metadata(recorded), torch.zeros(len(q), HEADS * DIM))
    assert asked == [False, True] and backend.FlashCoreBackend.supports_batch_invariance()
