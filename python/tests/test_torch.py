"""torch beyond plain calls: torch.compile, streams, CUDA graphs, transformers."""

import contextlib
import importlib.util
import shutil

import flashcore
import numpy as np
from harness import Skip, cases, check_close, need_torch, normal, raises, reference


def three(torch, device, *, dtype=None, shape=(2, 4, 48, 64), keys=None):
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    shapes = [shape, *[(shape[0], 2, keys or shape[2], shape[3])] * 2]
    return [torch.tensor(normal(*s, seed=n)).to(device, dtype) for n, s in enumerate(shapes)]


COMPILED = {
    "causal": lambda q, k, v: flashcore.attention(q, k, v, causal=True) * 2,
    "lse": lambda q, k, v: sum(x.sum() for x in flashcore.attention(q, k, v, return_lse=True)),
    "lengths": lambda q, k, v: flashcore.attention(q, k, v, key_lengths=[48, 20]) + 1,
    "sdpa": lambda q, k, v: flashcore.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) + q,
    "sdpa of five": lambda q, k, v: flashcore.scaled_dot_product_attention(
        *(x[None] for x in (q, q, q)), is_causal=True
    ),
    "window": lambda q, k, v: flashcore.attention(q, k, v, window=(7, 0)) + 1,
    "flash": lambda q, k, v: flashcore.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True) + 1,
}


@cases(name=list(COMPILED), device=["cpu", "cuda"])
def test_compile_in_one_graph(name, device):
    torch = need_torch(device)
    # Where nothing can be compiled the graph is traced and run as it is, which is what concerns us.
    backend = "inductor" if device == "cuda" and shutil.which("cc") else "aot_eager"
    torch._dynamo.reset()
    call = COMPILED[name]
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for seed in range(2):
        tensors = [x + seed for x in three(torch, device)]
        torch.testing.assert_close(compiled(*tensors), call(*tensors))


def test_numbers_that_torch_has_yet_to_negate_are_refused():
    torch = need_torch()
    lazy = torch.randn(2, 4, 10, 1, dtype=torch.complex64).conj().imag
    assert lazy.is_neg()
    for call in (lambda x: flashcore.attention(x, x, x), lambda x: flashcore.attention(x.clone(), x.clone(), x.clone(), out=x)):
        with raises(ValueError, "negative bit.*resolve_neg"):
            call(lazy)


def test_operator_is_sound():
    """The fake implementation agrees with the real one in shapes, strides and types."""
    torch = need_torch()
    from flashcore._torch_operator import operator

    for q in (torch.randn(2, 4, 16, 8), torch.randn(2, 16, 4, 8).transpose(1, 2)):
        arguments = (q, q, q, None, 0, False, None, None, "bhsd", None, False, *(None,) * 8, True)
        torch.library.opcheck(operator, arguments)


def test_fake_tensors_go_through_the_operator():
    torch = need_torch()
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 4, 16, 8)
        out = flashcore.attention(q, q, q)
        assert type(out).__name__ == "FakeTensor" and out.shape == (2, 4, 16, 8)


def short_way(torch):
    """The extension's short way for plain tensors; torch before 2.10 has none."""
    from flashcore import _frameworks

    if not _frameworks.of(torch.empty(0)).exchanges:
        raise Skip("this torch has no exchange API")
    return _frameworks.shortcuts[torch.Tensor]


@contextlib.contextmanager
def long_way(torch, exchanges=True):
    """Without the extension's short way; without the exchange API, too, as in torch before 2.10."""
    from flashcore import _frameworks

    framework, tables = _frameworks.of(torch.empty(0)), (_frameworks.shortcuts, _frameworks.direct)
    kept = [table.copy() for table in tables]
    framework.exchanges = framework.exchanges and exchanges
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        framework.exchanges = bool(kept[0])
        for table, entries in zip(tables, kept):
            table.update(entries)


def test_torch_without_exchange_api():
    """What torch before 2.10 gets: tensors by capsule, those of 8 bits as bytes with the name of their type."""
    torch = need_torch()
    q, k, v = three(torch, "cpu")
    narrow = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    other = [x.to(torch.float8_e8m0fnu) for x in (q, k, v)]
    expected = [flashcore.attention(q, k, v), flashcore.attention(*narrow), flashcore.quantise(q)[0].view(torch.uint8)]
    with long_way(torch, exchanges=False):
        got = [flashcore.attention(q, k, v), flashcore.attention(*narrow), flashcore.quantise(q)[0].view(torch.uint8)]
        with raises(TypeError, "q is float8_e8m0fnu; convert it to"):
            flashcore.attention(*other)
    assert all(map(torch.equal, got, expected))


SHORT = {
    "dense": lambda q, k, v: (q, k, v),
    "turned": lambda q, k, v: tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)),
    "expanded": lambda q, k, v: (q[:1].expand(q.shape), k, v),
    "other dim": lambda q, k, v: (q, k, v[..., :32]),
    "no rows": lambda q, k, v: (q[:, :, :0], k, v),
}


@cases(name=list(SHORT), device=["cpu", "cuda"])
def test_short_way_is_the_long_way(name, device):
    """Plain calls are made by the extension alone, output included; it is what the long way would have made."""
    torch = need_torch(device)
    from flashcore._native import Options

    q, k, v = SHORT[name](*three(torch, device))
    expected, _ = flashcore.attention(q, k, v, causal=True, return_lse=True)  # never the short way
    shortcut, options = short_way(torch), Options("bhsd", right=0)
    for _ in range(2):  # the first call makes the recipe, the second follows it
        out = shortcut(q, k, v, None, options)
        assert torch.equal(out, expected) and out.stride() == expected.stride()
        assert (out.dtype, out.device, out.requires_grad) == (q.dtype, q.device, False)
        mine = torch.empty_like(out)
        assert shortcut(q, k, v, mine, options) is mine and torch.equal(mine, expected)


def test_short_way_leaves_the_rest_to_the_long_way():
    torch = need_torch()
    from flashcore._native import Options

    q, k, v = three(torch, "cpu")
    expected = flashcore.attention(q, k, v)
    shortcut, options = short_way(torch), Options("bhsd")
    recorded, parameter = q.clone().requires_grad_(), torch.nn.Parameter(k, requires_grad=False)
    assert shortcut(recorded, k, v, None, options) is False  # to be recorded
    assert shortcut(recorded, k, v, torch.empty_like(q), options) is None
    assert shortcut(q, parameter, v, None, options) is None
    assert torch.equal(flashcore.attention(q, parameter, v), expected)
    with torch.no_grad():
        assert torch.equal(shortcut(recorded, k, v, None, options), expected)
    assert flashcore.attention(recorded, k, v).requires_grad
    logits = torch.randn(8)[::2]
    assert torch.equal(flashcore.attention(q, k, v, sinks=logits), flashcore.attention(q, k, v, sinks=logits.contiguous()))


def _of_packed(torch, q, k, v, **options):
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    offsets = [torch.tensor([0, x.shape[0] // 3, x.shape[0]], dtype=torch.int32, device=q.device) for x in (q, k)]
    return flashcore.packed_attention(q, k, v, *offsets, longest_query=128, longest_key=128, **options)


RECORDED = {
    "dense": lambda torch, q, k, v: flashcore.attention(q, k, v, causal=True),
    "log-sum-exp": lambda torch, q, k, v: sum(x.sum() for x in flashcore.attention(q, k, v, return_lse=True)),
    "expanded gradient": lambda torch, q, k, v: flashcore.attention(q, k, v).sum(),
    "key lengths": lambda torch, q, k, v: flashcore.attention(q, k, v, key_lengths=torch.tensor([9, 48], device=q.device)),
    "sinks": lambda torch, q, k, v: flashcore.attention(q, k, v, sinks=q[0, :, 0, 0]),
    "packed": _of_packed,
    "packed, with sinks": lambda torch, q, k, v: _of_packed(torch, q, k, v, sinks=q[0, :, 0, 0], causal=True),
}


@cases(name=list(RECORDED), form=list(SHORT), device=["cpu", "cuda"])
def test_short_way_of_recorded_calls_is_the_long_way(name, form, device):
    torch = need_torch(device)
    short_way(torch)
    if form == "no rows" and ("packed" in name or "sinks" in name):
        raise Skip("there are no rows to take offsets or sinks from")

    def run():
        inputs = [x.detach().requires_grad_() for x in three(torch, device)]
        out = RECORDED[name](torch, *SHORT[form](*inputs))
        return [out, *torch.autograd.grad(out, inputs, torch.full_like(out, 0.5) if out.ndim else None)]

    for _ in range(2):  # the first call makes the recipes, the second follows them
        got = run()
        with long_way(torch):
            expected = run()
        for mine, other in zip(got, expected):
            assert torch.equal(mine, other) and mine.stride() == other.stride()


def test_options_are_numbers():
    """A tensor's value may change, and options are found again by what was passed."""
    torch = need_torch()
    q, k, v = three(torch, "cpu")
    for option in ("scale", "softcap"):
        with raises(TypeError, f"{option} is tensor.*pass a float"):
            flashcore.attention(q, k, v, **{option: torch.tensor(0.5)})


def test_streams():
    """Work is ordered by the current stream alone, and the caller is not blocked."""
    torch = need_torch("cuda")
    q, k, v = three(torch, "cuda", shape=(2, 8, 1024, 128))
    expected = flashcore.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        late = q * 1
        out = flashcore.attention(late, k, v, causal=True)
        assert not stream.query(), "the call waited for its stream"
    stream.synchronize()
    assert torch.equal(out, expected)


def test_many_streams_at_once():
    torch = need_torch("cuda")
    inputs = [three(torch, "cuda", shape=(1, 4, 256 + 64 * n, 64)) for n in range(8)]
    expected = [flashcore.attention(*x, causal=True) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(20):
        results = []
        for stream, x in zip(streams, inputs):
            with torch.cuda.stream(stream):
                results.append(flashcore.attention(*x, causal=True))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, expected))


@cases(option=["plain", "causal", "sinks", "lengths", "left padding"])
def test_graph_capture(option):
    torch = need_torch("cuda")
    q, k, v = three(torch, "cuda", shape=(2, 4, 300, 128))
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[1, :37] = False
    options = {
        "plain": {},
        "causal": {"causal": True},
        "sinks": {"sinks": [0.1, 0.2, 0.3, 0.4]},
        "lengths": {"key_lengths": [300, 77]},
        "left padding": {"key_mask": mask, "causal": True},
    }[option]
    flashcore.attention(q, k, v, **options)  # builds the kernel, which cannot be done while capturing
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashcore.attention(q, k, v, **options)
    for seed in range(3):
        q.copy_(torch.tensor(normal(*q.shape, seed=10 + seed)))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, flashcore.attention(q, k, v, **options))


def test_offsets_and_strides_on_the_gpu():
    """Addresses that are no multiple of 16 bytes, and rows that are not."""
    torch = need_torch("cuda")
    for start, extra in ((0, 0), (1, 0), (4, 0), (8, 0), (0, 2), (0, 8), (3, 5)):
        whole = torch.tensor(normal(2 * 4 * 40 * (64 + extra) + start)).to("cuda", torch.float16)
        q = whole[start:].view(2, 4, 40, 64 + extra)[..., :64]
        exact = q.double().cpu().numpy()
        out = flashcore.attention(q, q, q)
        check_close(
            out.double().cpu().numpy(), reference(exact, exact, exact)[0], "float16", f"start {start} + {extra}"
        )


def test_memory_of_freed_inputs_is_not_read_late():
    torch = need_torch("cuda")
    q, k, v = three(torch, "cuda", shape=(4, 8, 2048, 128))
    expected = flashcore.attention(q, k, v)
    for _ in range(10):
        out = flashcore.attention(q.clone(), k.clone(), v.clone())
        trash = [torch.full_like(q, float("nan")) for _ in range(4)]
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        del trash


def llama(torch, device, implementation, **options):
    """A small Llama with random weights, the same for every implementation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        attn_implementation=implementation,
        **options,
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = LlamaForCausalLM(config).to(device, dtype).eval()
    model.generation_config.pad_token_id = 0
    return model


def pair(torch, device, **options):
    if importlib.util.find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    from flashcore.integrations import transformers

    transformers.register()
    return [llama(torch, device, name, **options) for name in ("flashcore", "sdpa")]


def words(torch, device, side, lengths=(20, 13, 1, 17)):
    """Token ids and their mask, padded on one side."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    generator = torch.Generator().manual_seed(3)
    for row, length in enumerate(lengths):
        part = slice(max(lengths) - length, None) if side == "left" else slice(0, length)
        ids[row, part] = torch.randint(1, 512, (length,), generator=generator)
        mask[row, part] = 1
    return ids.to(device), mask.to(device)


@cases(side=["left", "right", "none"], device=["cpu", "cuda"])
def test_llama_prefill(side, device):
    torch = need_torch(device)
    ours, theirs = pair(torch, device)
    ids, mask = words(torch, device, side, (20,) * 4 if side == "none" else (20, 13, 1, 17))
    with torch.no_grad():
        got, expected = (model(input_ids=ids, attention_mask=mask).logits.float() for model in (ours, theirs))
    real = mask.bool()
    torch.testing.assert_close(got[real], expected[real], **closeness(device))


@cases(device=["cpu", "cuda"], cache=["dynamic", "static"])
def test_llama_generate(device, cache):
    """Steps of generation with left padding; logits are compared, for tokens of random weights are all but ties."""
    torch = need_torch(device)
    ours, theirs = pair(torch, device)
    ids, mask = words(torch, device, "left")
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    with torch.no_grad():
        done = ours.generate(ids, attention_mask=mask, **options)
        whole = torch.cat([mask, torch.ones(4, 12, dtype=mask.dtype, device=device)], dim=1)
        positions = (whole.cumsum(-1) - 1).clamp(min=0)
        expected = theirs(input_ids=done.sequences, attention_mask=whole, position_ids=positions).logits.float()
    got = torch.stack(done.logits, dim=1).float()
    torch.testing.assert_close(got, expected[:, ids.shape[1] - 1 : -1], **closeness(device))


def closeness(device):
    return {"atol": 2e-4, "rtol": 1e-3} if device == "cpu" else {"atol": 4e-2, "rtol": 3e-2}


def test_transformers_computes_other_masks():
    torch = need_torch()
    ours, theirs = pair(torch, "cpu")
    ids, _ = words(torch, "cpu", "none", (20,) * 4)
    packed = torch.cat([torch.arange(8), torch.arange(12)]).expand(4, 20)  # two sequences in each row
    with torch.no_grad():
        got, wanted = (model(input_ids=ids, position_ids=packed, use_cache=False).logits for model in (ours, theirs))
    torch.testing.assert_close(got, wanted, **closeness("cpu"))


def test_sinks_of_a_parameter_are_read_once():
    torch = need_torch()
    sinks = torch.nn.Parameter(torch.tensor([0.5, -0.5, 0.0, 1.0]))
    q, k, v = three(torch, "cpu")
    with torch.no_grad():
        out = flashcore.attention(q, k, v, sinks=sinks)
    expected, _ = reference(*(x.numpy() for x in (q, k, v)), sinks=sinks.detach().numpy())
    check_close(out.double().numpy(), expected, "float32")
    assert np.isfinite(expected).all()


@cases(device=["cpu", "cuda"])
def test_lengths_of_other_types_and_places(device):
    """Whatever holds the numbers, the result is that of a list."""
    torch = need_torch(device)
    q = torch.randn(2, 4, 8, 64, device=device, dtype=torch.float16)
    expected = flashcore.attention(q, q, q, key_lengths=[5, 8], sinks=[0.5] * 4)
    numbers = torch.tensor([5, 8])
    strided = torch.tensor([5, 0, 8, 0], device=device)[::2]
    for lengths in (numbers, numbers.int(), numbers.short(), numbers.to(device), strided, np.array([5, 8]), (5, 8)):
        for sinks in (torch.full((4,), 0.5), torch.full((4,), 0.5, dtype=torch.float64, device=device)):
            got = flashcore.attention(q, q, q, key_lengths=lengths, sinks=sinks)
            assert torch.equal(got, expected), lengths
    with raises(TypeError, "key_lengths is float32"):
        flashcore.attention(q, q, q, key_lengths=torch.tensor([5.0, 8.0], device=device))
