"""What PyTorch's competitors do: the tensors of a task, and for each competitor three things: what is timed, given the number
of the call; what is judged, a list of tensors; and the context of both. Stands before peer.py, in one program.
"""

import contextlib
import functools
import os


def shapes(task):
    """Shape and element type of every file of a task."""
    own = DTYPES[task["dtype"]]
    if "experts" in task:
        tokens, hidden, inner, experts, top_k = (
            task[name] for name in ("tokens", "hidden", "intermediate", "experts", "top_k"))
        return dict(x=((tokens, hidden), own), gate_up=((experts, 2 * inner, hidden), own),
                    down=((experts, hidden, inner), own), ids=((-1, tokens, top_k), torch.int32),
                    weights=((tokens, top_k), torch.float32))
    q, k, dim_v = task["q"], task["k"], task["dim_v"]
    if task.get("page"):
        pages = [-1, task["page"], k[1]]
        return dict(q=((-1, q[1], q[3]), own), k=((*pages, k[3]), own), v=((*pages, dim_v), own),
                    lengths_q=((-1,), torch.int32), lengths_kv=((-1,), torch.int32), table=((q[0], -1), torch.int32))
    out = (*q[:3], dim_v)
    return dict(q=(q, own), k=(k, own), v=((*k[:3], dim_v), own), d_out=(out, own), d_judged=(out, own))


def tensors(device):
    """The task's tensors by name, as far as it has them."""
    if device not in loaded["tensors"]:
        found = {}
        for name, (shape, dtype) in shapes(loaded["task"]).items():
            path = os.path.join(loaded["folder"], name)
            if os.path.exists(path):
                size = os.path.getsize(path) // dtype.itemsize
                found[name] = torch.from_file(path, size=size, dtype=dtype).reshape(shape).to(device, copy=True)
        loaded["tensors"][device] = found
    return loaded["tensors"][device]


def qkv(device):
    found = tensors(device)
    return found["q"], found["k"], found["v"]


def in_turn(*tensors):
    """Copies that calls take in turn, so that nothing comes from a cache; a GPU's alone."""
    sets = loaded["sets"] if tensors[0].is_cuda else 1
    copies = [tensors, *([x.clone() for x in tensors] for _ in range(sets - 1))]
    return lambda n: copies[n % len(copies)]


def same(call, context=contextlib.nullcontext):
    """A call that is the same whenever it is made, as what is timed and what is judged."""
    return (lambda n: call()), (lambda: [call()]), context


def gradients(device, attend, context=contextlib.nullcontext):
    """What is timed and judged of gradients: their own kernels alone, from an output that is there."""
    leaves = [x.detach().requires_grad_() for x in qkv(device)]
    with torch.enable_grad(), context():
        out = attend(*leaves)
    grad = lambda d_out: torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    d_out, judged = tensors(device)["d_out"], tensors(device)["d_judged"]
    return (lambda n: grad(d_out)), (lambda: grad(judged)), context


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
    if "experts" in task:
        return experts(device)
    if task["softcap"] is not None:
        raise Unsupported("softcap")
    no_sinks(task)
    if task.get("page"):
        if device == GPU and backend != SDPBackend.FLASH_ATTENTION:
            raise Unsupported("pages")
        return packed(device) if device == GPU else one_by_one(device)
    q, k, v = qkv(device)
    mask = visible(task, device)
    if torch.is_tensor(mask) and backend == SDPBackend.FLASH_ATTENTION:
        raise Unsupported("this mask")
    options = dict(scale=task["scale"], is_causal=isinstance(mask, str),
                   attn_mask=mask if torch.is_tensor(mask) else None, enable_gqa=q.shape[1] != k.shape[1])
    attend, context = functools.partial(scaled_dot_product_attention, **options), lambda: sdpa_kernel(backend)
    if task.get("backward"):
        return gradients(device, attend, context)
    return same(lambda: attend(q, k, v), context)


def sequences(device):
    """Packed queries with their offsets, and keys, values and lengths as they lie in pages."""
    found, task = tensors(device), loaded["task"]
    each, batch = task["q"][2], task["q"][0]
    even = torch.arange(batch + 1, dtype=torch.int32, device=device) * each
    return found["q"], found.get("lengths_q", even), found["lengths_kv"]


def rows_of(pages, n, length):
    """Keys or values of a sequence, out of their pages."""
    table = tensors(pages.device.type)["table"]
    return pages[table[n].long()].flatten(0, 1)[:length]


def one_by_one(device):
    """Every sequence for itself, its keys gathered beforehand."""
    q, offsets, lengths = sequences(device)
    _, k, v = qkv(device)
    task = loaded["task"]
    causal = task["right"] == 0
    calls = []
    for n, length in enumerate(lengths.tolist()):
        own = q[offsets[n]:offsets[n + 1]].transpose(0, 1)[None]
        keys, values = (rows_of(x, n, length).transpose(0, 1)[None].contiguous() for x in (k, v))
        queries = own.shape[2]
        mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries) if causal and queries > 1 else None
        calls.append((own, keys, values, mask))
    options = dict(scale=task["scale"], enable_gqa=task["q"][1] != task["k"][1])
    attend = lambda q, k, v, mask: scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)[0].transpose(0, 1)
    return same(lambda: torch.cat([attend(*call) for call in calls]))


def packed(device):
    """FlashAttention-2 over keys that are packed beforehand: nothing of PyTorch's reads pages."""
    q, offsets, lengths = sequences(device)
    task = loaded["task"]
    together = lambda x: torch.cat([rows_of(x, n, length) for n, length in enumerate(lengths.tolist())])
    turn = in_turn(*(together(x) for x in qkv(device)[1:]))
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    forward = torch.ops.aten._flash_attention_forward
    most = task["q"][2], int(lengths.max())
    call = lambda n: forward(q, *turn(n), offsets, ends, *most, 0.0, task["right"] == 0, False, scale=task["scale"])[0]
    return call, (lambda: [call(0)]), contextlib.nullcontext


def flashinfer(device):
    """FlashInfer's own kernels over the same pages."""
    import flashinfer
    q, offsets, lengths = sequences(device)
    task, (_, k, v) = loaded["task"], qkv(device)
    if not task.get("page") or task["dtype"] == "f32":
        raise Unsupported("this problem")
    page, table = task["page"], tensors(device)["table"]
    counts = (lengths + page - 1) // page
    starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    numbers = torch.cat([table[n, :count] for n, count in enumerate(counts.tolist())])
    last = lengths - (counts - 1) * page
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    heads = task["q"][1], task["k"][1], task["q"][3], page
    options = dict(sm_scale=task["scale"], q_data_type=q.dtype, kv_data_type=k.dtype)
    if task["q"][2] == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(starts, numbers, last, *heads, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(offsets, starts, numbers, last, *heads, causal=task["right"] == 0, **options)
    turn = in_turn(k, v)
    call = lambda n: wrapper.run(q, tuple(turn(n)))
    return call, (lambda: [call(0)]), contextlib.nullcontext


def layer(x, gate_up, down, ids, weights):
    """Experts as transformers has them by `grouped_mm`: sorted, gathered, two products, a weighted sum."""
    experts, top_k, flat = gate_up.shape[0], ids.shape[1], ids.flatten()
    order = torch.argsort(flat)
    ends = torch.cumsum(torch.histc(flat.float(), bins=experts, min=0, max=experts - 1), 0, dtype=torch.int32)
    product = grouped if x.is_cuda else one_expert_after_another
    gate, up = product(x[order // top_k], gate_up, ends).chunk(2, dim=-1)
    rows = product(torch.nn.functional.silu(gate) * up, down, ends)
    rows = rows * weights.flatten()[order, None].to(rows.dtype)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return rows[back].view(*ids.shape, -1).sum(dim=1)


def grouped(rows, weights, ends):
    grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return grouped_mm(rows, weights.transpose(-2, -1), offs=ends)


def one_expert_after_another(rows, weights, ends):
    parts = zip(rows.tensor_split(ends[:-1].tolist()), weights)
    return torch.cat([own @ weight.T for own, weight in parts])


def experts(device):
    found = tensors(device)
    call = lambda n: layer(found["x"], found["gate_up"], found["down"], ids[n % len(ids)], found["weights"])
    ids = found["ids"].long()
    return call, (lambda: [call(0)]), contextlib.nullcontext


def flex(device):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    task = loaded["task"]
    no_sinks(task)
    q, k, v = qkv(device)
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
    attend = functools.partial(compiled, **options)
    return gradients(device, attend) if task.get("backward") else same(lambda: attend(q, k, v))


def fa3(device, deterministic=False):
    """FlashAttention-3's kernels on tensors in its own order: batch, sequence, heads, features."""
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
    options = dict(softmax_scale=task["scale"], is_causal=causal)
    forward = torch.ops.flash_attn_3.fwd
    if task.get("page"):
        return fa3_paged(device, functools.partial(forward, **options))
    own = lambda x: x.transpose(1, 2).contiguous()
    q, k, v = (own(x) for x in qkv(device))
    if task.get("backward"):
        out, lse, *_ = forward(q, k, v, **options)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        backward = torch.ops.flash_attn_3.bwd
        grad = lambda d: backward(d, q, k, v, out, lse, *grads, deterministic=deterministic, **options)
        d_out, judged = (own(tensors(device)[name]) for name in ("d_out", "d_judged"))
        return (lambda n: grad(d_out)), (lambda: (grad(judged), [x.transpose(1, 2) for x in grads])[1]), contextlib.nullcontext
    return same(lambda: forward(q, k, v, **options)[0].transpose(1, 2))


def fa3_paged(device, forward):
    q, offsets, lengths = sequences(device)
    turn, queries = in_turn(*qkv(device)[1:]), loaded["task"]["q"][2]
    options = dict(page_table=tensors(device)["table"], seqused_k=lengths)
    if "lengths_q" in tensors(device):
        options.update(cu_seqlens_q=offsets, max_seqlen_q=queries)
    else:
        q = q.unflatten(0, (-1, queries))
    call = lambda n: forward(q, *turn(n), **options)[0]
    return call, (lambda: [call(0)]), contextlib.nullcontext
