"""FlashAttention's package by its names: both dialects, packed forms, slopes, padding."""

import importlib
import inspect
import sys

import flashcore
import numpy as np
from harness import NUMPY, TORCH, TORCH_CUDA, band_mask, cases, check_close, check_lse, need_torch, normal, raises, reference

FLASH = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
SIGNATURES = {
    "flash_attn_func": f"q k v {FLASH}",
    "flash_attn_kvpacked_func": f"q kv {FLASH}",
    "flash_attn_qkvpacked_func": f"qkv {FLASH}",
    "flash_attn_varlen_func": f"q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {FLASH} block_table",
    "flash_attn_varlen_kvpacked_func": f"q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {FLASH}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {FLASH}",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
    "block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse",
}
DESCALES = "q_descale k_descale v_descale"
SIGNATURES_3 = {
    "flash_attn_func": f"q k v softmax_scale causal qv {DESCALES} window_size attention_chunk softcap num_splits pack_gqa "
    "deterministic sm_margin return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale "
    f"causal qv {DESCALES} window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin return_attn_probs",
    "flash_attn_with_kvcache": "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
    f"page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens {DESCALES} softmax_scale causal window_size "
    "attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse",
    "flash_attn_combine": "out_partial lse_partial out out_dtype",
}


def positional(function):
    return [name for name, given in inspect.signature(function).parameters.items() if given.kind != given.KEYWORD_ONLY]


def test_positional_arguments_are_those_of_each_dialect():
    for module, signatures in (("flashcore.flash_attn", SIGNATURES), ("flashcore.flash_attn.flash_attn_3", SIGNATURES_3)):
        for name, wanted in signatures.items():
            assert positional(getattr(importlib.import_module(module), name)) == wanted.split(), (module, name)


def test_what_imports_flash_attn_gets_flashcore():
    need_torch()
    import flashcore.flash_attn as ours

    names = list(ours._MODULES)
    before = {name: sys.modules.get(name) for name in names}
    try:
        ours.install()
        import flash_attn
        from flash_attn.bert_padding import unpad_input
        from flash_attn.flash_attn_interface import flash_attn_func
        from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_func
        from flash_attn_interface import flash_attn_with_kvcache

        assert flash_attn_func is flash_attn.flash_attn_func is flashcore.flash_attn_func
        assert "qv" in positional(flash_attn_with_kvcache) and callable(unpad_input)
        assert callable(apply_rotary_emb) and apply_rotary_emb_func is apply_rotary_emb
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


@cases(interleaved=[False, True], inplace=[False, True])
def test_rotary_embedding(interleaved, inplace):
    torch = need_torch()
    from flashcore.flash_attn.layers.rotary import apply_rotary_emb

    angles = torch.rand(20, 6)
    x, offsets, firsts = torch.randn(12, 3, 16), torch.tensor([0, 5, 12]), torch.tensor([4, 15])
    at = torch.tensor([4, 5, 6, 7, 8, 15, 16, 17, 18, 19, 20, 21])
    # Positions behind the tables turn nothing.
    angle = torch.where((at < 20)[:, None], angles[at.clamp(max=19)], 0)[:, None]
    pairs = x[..., :12].unflatten(-1, (6, 2)) if interleaved else x[..., :12].unflatten(-1, (2, 6)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    turned = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)
    expected = torch.cat((turned, x[..., 12:]), -1)
    given = x.clone()
    out = apply_rotary_emb(given, angles.cos(), angles.sin(), interleaved, inplace, firsts, offsets, 7)
    torch.testing.assert_close(out, expected)
    assert (out.data_ptr() == given.data_ptr()) == inplace
    batch = apply_rotary_emb(x.unflatten(0, (2, 6)), angles.cos(), angles.sin(), interleaved, False, 3)
    one = apply_rotary_emb(x[6:], angles.cos(), angles.sin(), interleaved, False, 3, torch.tensor([0, 6]))
    torch.testing.assert_close(batch[1], one)


@cases(interleaved=[False, True], scale_base=[None, 8])
def test_rotary_embedding_of_queries_keys_and_values(interleaved, scale_base):
    """Every form that layers call turns alike, in place, and its gradients are turned back."""
    torch = need_torch()
    from flashcore.flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_torch
    from flashcore.flash_attn.ops.triton.rotary import apply_rotary

    module = RotaryEmbedding(12, interleaved=interleaved, scale_base=scale_base)
    qkv = torch.randn(2, 5, 3, 4, 16, requires_grad=True)
    q, k, v = (qkv.detach()[:, :, n].clone().requires_grad_() for n in range(3))
    together, d_out = module(qkv, seqlen_offset=3), torch.randn(2, 5, 3, 4, 16)
    tables = [table[3:] for table in (module._cos_cached, module._sin_cached)]
    of_keys = tables if scale_base is None else [table[3:] for table in (module._cos_k_cached, module._sin_k_cached)]
    assert len(tables[0]) == 5 and together.data_ptr() == qkv.data_ptr()
    apart = [apply_rotary_emb_torch(x, *rows, interleaved) for x, rows in ((q, tables), (k, of_keys))]
    torch.testing.assert_close(together, torch.stack([*apart, v], 2))
    together.backward(d_out)
    torch.stack([*apart, v], 2).backward(d_out)
    torch.testing.assert_close(qkv.grad, torch.stack([q.grad, k.grad, v.grad], 2))
    # Fewer heads of keys, beside those of queries; and keys and values by themselves.
    q, k, v = (x.detach() for x in (q, k[:, :, :2], v[:, :, :2]))
    grouped = module(torch.cat([q, k, v], 2), seqlen_offset=torch.tensor([3, 3]), max_seqlen=8, num_heads_q=4)
    apart = [x.detach() for x in (apart[0], apart[1][:, :, :2])]
    torch.testing.assert_close(grouped, torch.cat([*apart, v], 2))
    turned, kv = module(q.clone(), torch.stack([k, v], 2), 3)
    torch.testing.assert_close((turned, kv), (apart[0], torch.stack([apart[1], v], 2)))
    if scale_base is None:
        back = apply_rotary(apart[0], module._cos_cached, module._sin_cached, 3, interleaved=interleaved, conjugate=True)
        torch.testing.assert_close(back, q)
    leaf = q.clone().requires_grad_()
    assert apply_rotary_emb(leaf, *tables, interleaved, inplace=True).data_ptr() == leaf.data_ptr()


def test_what_rotary_embedding_does_not_know():
    torch = need_torch()
    from flashcore.flash_attn.layers.rotary import RotaryEmbedding

    module, x = RotaryEmbedding(8), torch.zeros(2, 5, 6, 8)
    with raises(ValueError, "pass num_heads_q"):
        module(x)
    with raises(ValueError, "pass max_seqlen"):
        RotaryEmbedding(8)(x, seqlen_offset=torch.tensor([1, 2]), num_heads_q=2)


def distances(queries, keys):
    return np.abs(np.arange(queries)[:, None] + keys - queries - np.arange(keys)[None])


@cases(framework=[NUMPY, TORCH, TORCH_CUDA], each=[False, True], causal=[False, True])
def test_slopes(framework, each, causal):
    framework.need()
    dtype = "float32" if framework.device == "cpu" else "float16"
    q, k = (framework.make(normal(2, rows, heads, 32), dtype) for rows, heads in ((40, 4), (70, 2)))
    slopes = np.abs(normal(2, 4, seed=3)) if each else np.abs(normal(4, seed=3))
    bias = -slopes.reshape(-1, 4, 1, 1) * distances(40, 70)
    mask = band_mask(40, 70, right=0) if causal else None
    exact = [framework.read(x).swapaxes(1, 2) for x in (q, k, k)]
    expected, expected_lse = reference(*exact, mask=mask, bias=bias)
    given = framework.make(slopes, "float32")
    out, lse, _ = flashcore.flash_attn_func(q, k, k, causal=causal, alibi_slopes=given, return_attn_probs=True)
    check_close(framework.read(out).swapaxes(1, 2), expected, dtype)
    check_lse(framework.read(lse), expected_lse)


@cases(device=["cpu", "cuda"], packed=["kv", "qkv"])
def test_packed_sequences_in_one_tensor(device, packed):
    torch = need_torch(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    offsets = torch.tensor([0, 5, 5, 30], dtype=torch.int32, device=device)
    qkv = torch.randn(30, 3, 4, 32, device=device, dtype=dtype, requires_grad=True)
    options = dict(causal=True, softcap=10.0)
    if packed == "qkv":
        out = flashcore.flash_attn_varlen_qkvpacked_func(qkv, offsets, 25, **options)
    else:
        out = flashcore.flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], offsets, offsets, 25, 25, **options)
    wanted = flashcore.flash_attn_varlen_func(*qkv.unbind(1), offsets, offsets, 25, 25, **options)
    assert torch.equal(out, wanted)
    grads = [torch.autograd.grad(x.float().square().sum(), qkv)[0] for x in (out, wanted)]
    assert torch.equal(*grads) and grads[0].abs().sum() > 0


def test_slopes_of_packed_sequences():
    torch = need_torch()
    q, offsets = torch.randn(30, 4, 32), torch.tensor([0, 5, 30], dtype=torch.int32)
    slopes = torch.rand(2, 4)
    out = flashcore.flash_attn_varlen_func(q, q, q, offsets, offsets, 25, 25, causal=True, alibi_slopes=slopes)
    for n, (start, end) in enumerate(((0, 5), (5, 30))):
        alone = flashcore.flash_attn_func(*[q[None, start:end]] * 3, causal=True, alibi_slopes=slopes[n])
        torch.testing.assert_close(out[start:end], alone[0], atol=1e-6, rtol=0)


def test_gradients_with_slopes():
    torch = need_torch()
    ours = [torch.randn(1, 30, 4, 16, requires_grad=True) for _ in range(3)]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    slopes, d_out = torch.rand(4), torch.randn(1, 30, 4, 16)
    flashcore.flash_attn_func(*ours, causal=True, alibi_slopes=slopes).backward(d_out)
    bias = -slopes[:, None, None] * torch.tensor(distances(30, 30)) + torch.full((30, 30), -torch.inf).triu(1)
    q, k, v = (x.transpose(1, 2) for x in theirs)
    torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).backward(d_out)
    for got, wanted in zip(ours, theirs):
        torch.testing.assert_close(got.grad, wanted.grad, atol=1e-5, rtol=0)
    with raises(NotImplementedError, "slopes have no gradient"):
        flashcore.flash_attn_func(*ours, alibi_slopes=slopes.requires_grad_())


def test_padding_and_back():
    torch = need_torch()
    from flashcore.flash_attn.bert_padding import pad_input, unpad_input, unpad_input_for_concatenated_sequences

    x = torch.randn(3, 7, 2, requires_grad=True)
    mask = torch.arange(7) < torch.tensor([7, 0, 3])[:, None]
    packed, places, offsets, longest, used = unpad_input(x, mask)
    assert (offsets.tolist(), longest, used.tolist()) == ([0, 7, 7, 10], 7, [7, 0, 3])
    back = pad_input(packed, places, 3, 7)
    assert torch.equal(back, x * mask[..., None])
    back.sum().backward()
    assert torch.equal(x.grad, mask[..., None].expand_as(x).float())
    lengths = torch.zeros(2, 6, dtype=torch.int32)
    lengths[0, :2], lengths[1, 0] = torch.tensor([2, 3]), 6
    _, places, offsets, longest = unpad_input_for_concatenated_sequences(torch.randn(2, 6, 4), lengths)
    assert (offsets.tolist(), longest, len(places)) == ([0, 2, 5, 11], 6, 11)


def test_the_third_dialect():
    torch = need_torch()
    from flashcore.flash_attn import flash_attn_3 as three

    q, k = torch.randn(2, 9, 4, 16), torch.randn(2, 20, 2, 16)
    wanted, lse, _ = flashcore.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    out, got = three.flash_attn_func(q, k, k, None, True, return_attn_probs=True)
    assert torch.equal(out, wanted) and torch.equal(got, lse)
    together = torch.cat([q, q[:, :, :2], q[:, :, 2:]], 2)
    assert torch.equal(three.flash_attn_qkvpacked_func(together, num_heads_q=4), three.flash_attn_func(q, q[:, :, :2], q[:, :, 2:]))
    assert three.get_scheduler_metadata(2, 1, 64, 4, 2, 16, torch.tensor([3, 4])) is None
    cached = three.flash_attn_with_kvcache(q[:, :1], k, k, cache_seqlens=torch.tensor([20, 7]), return_softmax_lse=True)
    assert len(cached) == 4
    parts = [three.flash_attn_func(q, keys, keys, return_attn_probs=True) for keys in (k[:, :6], k[:, 6:])]
    merged, sums = three.flash_attn_combine(torch.stack([p[0] for p in parts]), torch.stack([p[1].transpose(1, 2) for p in parts]))
    torch.testing.assert_close(merged, three.flash_attn_func(q, k, k), atol=1e-6, rtol=0)
    assert sums.shape == (2, 9, 4)


@cases(device=["cpu", "cuda"], packed=[False, True])
def test_queries_that_meet_values_too(device, packed):
    """As latent attention has it: scores are those of q and k and those of qv and v together."""
    torch = need_torch(device)
    from flashcore.flash_attn import flash_attn_3 as three

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    make = lambda *shape, seed: torch.tensor(normal(*shape, seed=seed)).to(device, dtype)
    q, qv, k, v = make(12, 4, 64, seed=0), make(12, 4, 512, seed=1), make(20, 1, 64, seed=2), make(20, 1, 512, seed=3)
    if packed:
        offsets = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (12, 20)]
        out = three.flash_attn_varlen_func(q, k, v, *offsets, 12, 20, causal=True, qv=qv)[None]
    else:
        out = three.flash_attn_func(q[None], k[None], v[None], causal=True, qv=qv[None])
    parts = [torch.cat([x, y], -1).double().cpu().numpy()[None].swapaxes(1, 2) for x, y in ((q, qv), (k, v))]
    wanted, _ = reference(*parts, v.double().cpu().numpy()[None].swapaxes(1, 2), mask=band_mask(12, 20, right=0))
    check_close(out.double().cpu().numpy().swapaxes(1, 2), wanted, "float32" if device == "cpu" else "bfloat16")
    with raises(ValueError, "qv has 64 features but v 512"):
        three.flash_attn_func(q[None], k[None], v[None], qv=q[None])


def test_slopes_over_a_cache():
    torch = need_torch()
    q, cache, slopes = torch.randn(2, 3, 4, 16), torch.randn(2, 20, 2, 16), torch.rand(4)
    out = flashcore.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=torch.tensor([20, 7]), causal=True, alibi_slopes=slopes
    )
    for n, keys in enumerate((20, 7)):
        alone = flashcore.flash_attn_func(q[n : n + 1], *[cache[n : n + 1, :keys]] * 2, causal=True, alibi_slopes=slopes)
        torch.testing.assert_close(out[n : n + 1], alone, atol=1e-6, rtol=0)


@cases(packed=[False, True], framework=[TORCH, TORCH_CUDA])
def test_halves_of_the_autograd_functions(packed, framework):
    """Forward and backward apart give what the function and its backward pass give."""
    framework.need()
    torch = need_torch(framework.device)
    from flashcore.flash_attn import flash_attn_interface as theirs

    shape = (24, 2, 64) if packed else (2, 12, 2, 64)
    dtype = "float16" if framework.device == "cuda" else "float32"
    q, k, v, dout = (framework.make(normal(*shape, seed=n), dtype).requires_grad_(n < 3) for n in range(4))
    offsets = torch.tensor([0, 7, 24], dtype=torch.int32, device=framework.device)
    where = (offsets, offsets, 17, 17) if packed else ()
    name = "varlen_" if packed else ""
    out = getattr(flashcore, f"flash_attn_{name}func")(q, k, v, *where, causal=True)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    got, lse, *_ = getattr(theirs, f"_flash_attn_{name}forward")(q, k, v, *where, 0.0, None, True)
    assert torch.equal(got, out) and lse.shape == ((2, 24) if packed else (2, 2, 12))
    into = [torch.empty_like(x) for x in (q, k, v)]
    rest = (*into, *where, 0.0, None, True)
    sums = getattr(theirs, f"_flash_attn_{name}backward")(dout, q, k, v, out.detach(), lse, *rest)
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(into, expected))
    assert sums.shape == lse.shape
