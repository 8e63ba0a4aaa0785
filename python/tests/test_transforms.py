"""What torch does with functions: `torch.func`, autocast, forward mode, tensors without memory; merged parts that are traced."""

import flashcore
from harness import cases, need_torch, raises


def three(torch):
    torch.manual_seed(0)
    return torch.randn(2, 4, 10, 16), torch.randn(2, 2, 12, 16), torch.randn(2, 2, 12, 16)


def ours(q, k, v):
    return flashcore.attention(q, k, v, causal=True)


def plain(torch):
    """The same by torch's operations."""

    def attend(q, k, v):
        k, v = (x.repeat_interleave(2, -3) for x in (k, v))
        hidden = ~torch.ones(10, 12).tril(2).bool()
        return (q @ k.transpose(-1, -2) / 4).masked_fill(hidden, float("-inf")).softmax(-1) @ v

    return attend


def loss(call):
    return lambda *x: call(*x).square().sum()


def transforms(torch):
    """Functions of a call and its tensors."""
    func = torch.func
    return {
        "grad": lambda f: func.grad(loss(f), (0, 1, 2)),
        "vjp": lambda f: lambda *x: func.vjp(f, *x)[1](torch.ones_like(x[0])),
        "jacrev": lambda f: func.jacrev(lambda *x: f(*x).sum((0, 1, 3)), (0, 1)),
        "vmap": lambda f: func.vmap(f),
        "vmap of grad": lambda f: func.vmap(func.grad(loss(f), (0, 1, 2))),
        "vmap of some": lambda f: lambda q, k, v: func.vmap(f, (0, None, None))(torch.stack([q, 2 * q]), k, v),
        "vmap of vmap": lambda f: func.vmap(func.vmap(f)),
    }


@cases(name=["grad", "vjp", "jacrev", "vmap", "vmap of grad", "vmap of some", "vmap of vmap"])
def test_functions_are_transformed(name):
    torch = need_torch()
    change, tensors = transforms(torch)[name], three(torch)
    if name == "vmap of vmap":
        tensors = [torch.stack([x, -x]) for x in tensors]
    got, expected = change(ours)(*tensors), change(plain(torch))(*tensors)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_forward_mode_and_second_gradients_are_refused():
    torch = need_torch()
    from torch.autograd import forward_ad

    q, k, v = three(torch)
    with raises(NotImplementedError, "no forward-mode gradients"):
        torch.func.jvp(lambda q: ours(q, k, v), (q,), (q,))
    with raises(NotImplementedError, "no forward-mode gradients"), forward_ad.dual_level():
        ours(forward_ad.make_dual(q, q), k, v)
    with forward_ad.dual_level():
        assert torch.equal(ours(q, k, v), ours(q, k, v))
    with raises(NotImplementedError, "no second-order gradients"):
        torch.func.grad(lambda q: torch.func.grad(lambda q: loss(ours)(q, k, v))(q).sum())(q)


@cases(how=["plain", "recorded", "compiled"])
def test_autocast_is_that_of_sdpa(how):
    """float32 tensors are computed in bfloat16 inside of autocast, mixed ones too; gradients have the tensors' types."""
    torch = need_torch()
    torch._dynamo.reset()
    sdpa = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    mine = lambda q, k, v: flashcore.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    calls = [mine, sdpa]
    if how == "compiled":
        calls = [torch.compile(mine, fullgraph=True, backend="aot_eager"), sdpa]
    for change in (lambda x: x, lambda x: x.bfloat16()):
        results = []
        for call in calls:
            q, k, v = three(torch)
            q.requires_grad_(how == "recorded")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = call(q, change(k), v)
            results.append((out.detach(), torch.autograd.grad(out.float().sum(), q)[0] if how == "recorded" else None))
        (out, grad), (theirs, of_theirs) = results
        assert out.dtype == theirs.dtype == torch.bfloat16
        torch.testing.assert_close(out, theirs, atol=3e-2, rtol=0)
        if grad is not None:
            assert grad.dtype == of_theirs.dtype == torch.float32
            torch.testing.assert_close(grad, of_theirs, atol=3e-2, rtol=0)
    q, k, v = three(torch)
    assert ours(q, k, v).dtype == torch.float32


def test_tensors_without_memory():
    torch = need_torch()
    out = ours(*(x.to("meta") for x in three(torch)))
    assert out.is_meta and out.shape == (2, 4, 10, 16)
    nested = torch.nested.nested_tensor([torch.randn(3, 4, 16), torch.randn(5, 4, 16)], layout=torch.jagged)
    with raises(NotImplementedError, "nested tensors are not supported"):
        flashcore.attention(nested, nested, nested)


@cases(layout=["bhsd", "bshd"])
def test_merged_parts_are_differentiated_and_compiled(layout):
    torch = need_torch()
    torch._dynamo.reset()
    q, k, v = (x.transpose(1, 2).contiguous() if layout == "bshd" else x for x in three(torch))
    at = 1 if layout == "bshd" else 2

    def merged(q, k, v):
        halves = (flashcore.attention(q, *(x.narrow(at, start, 6) for x in (k, v)), layout=layout, return_lse=True) for start in (0, 6))
        outs, lses = zip(*halves)
        return flashcore.merge(outs, lses, layout=layout, return_lse=True)

    whole = lambda *x: flashcore.attention(*x, layout=layout, return_lse=True)
    for change in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(change(merged)(q, k, v), whole(q, k, v), atol=1e-5, rtol=1e-4)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    total = lambda results: results[0].square().sum() + results[1].sin().sum()
    got, expected = (torch.autograd.grad(total(f(*leaves)), leaves) for f in (merged, whole))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
