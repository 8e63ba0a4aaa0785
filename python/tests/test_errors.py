"""Mistakes: the right exception with the library's own words."""

import flashcore
import numpy as np
from harness import cases, need_torch, normal, raises

Q = normal(2, 4, 8, 16)

MISTAKES = {
    "no tensor": (lambda: flashcore.attention([1], Q, Q), TypeError, "q is a list, which does not speak DLPack"),
    "no tensor for k": (lambda: flashcore.attention(Q, [1], Q), TypeError, "k is a .*list.*DLPack"),
    "float64": (lambda: flashcore.attention(*[Q.astype("float64")] * 3), TypeError, "64 bits.*float16, bfloat16"),
    "mixed": (lambda: flashcore.attention(Q, Q, Q.astype("float16")), TypeError, "v is f16 but q is f32"),
    "three dimensions": (lambda: flashcore.attention(Q[0], Q[0], Q[0]), ValueError, "q has 3 dimensions but 4"),
    "five dimensions": (lambda: flashcore.attention(Q[None], Q, Q), ValueError, "q has 5 dimensions but 4"),
    "heads": (lambda: flashcore.attention(Q, Q[:, :3], Q[:, :3]), ValueError, "4 query heads cannot share 3 key heads"),
    "batch": (lambda: flashcore.attention(Q, Q[:1], Q[:1]), ValueError, "k has batch 1 but 2 is needed"),
    "keys": (lambda: flashcore.attention(Q, Q, Q[:, :, :5]), ValueError, "v has sequence 5 but 8 is needed"),
    "dim": (lambda: flashcore.attention(Q, Q[..., :8], Q), ValueError, "k has dim 8 but 16 is needed"),
    "innermost": (lambda: flashcore.attention(*[Q.swapaxes(2, 3)] * 3), ValueError, "innermost stride is 16"),
    "backwards": (lambda: flashcore.attention(*[Q[:, ::-1]] * 3), ValueError, "strides must not be negative"),
    "scale": (lambda: flashcore.attention(Q, Q, Q, scale=-1.0), ValueError, "scale -1 must be finite and positive"),
    "softcap": (lambda: flashcore.attention(Q, Q, Q, softcap=0.0), ValueError, "softcap 0 must be"),
    "sinks": (lambda: flashcore.attention(Q, Q, Q, sinks=[1.0]), ValueError, "1 sinks for 4 query heads"),
    "window": (lambda: flashcore.attention(Q, Q, Q, window=-1), ValueError, "must not be negative"),
    "layout": (lambda: flashcore.attention(Q, Q, Q, layout="sbhd"), ValueError, "unknown layout `sbhd`"),
    "no namespace": (lambda: flashcore.attention(Bare(), Q, Q), TypeError, "cannot make a tensor like a Bare"),
    "foreign device": (lambda: flashcore.attention(Odd(), Q, Q, out=Q.copy()), ValueError, "DLPack type 10"),
    "misaligned": (lambda: flashcore.attention(shifted(), Q, Q), ValueError, "no multiple of its 4-byte elements"),
}


class Bare:
    """Exports, but cannot make its like."""

    shape = Q.shape

    def __dlpack__(self, **options):
        return Q.__dlpack__(**options)


class Odd(Bare):
    """Claims to be on a device of another maker."""

    def __dlpack__(self, **options):
        from producer import Producer

        return Producer(Q, device=(10, 0)).__dlpack__()


def shifted():
    """Elements that start one byte late."""
    whole = np.zeros(Q.nbytes + 8, "uint8")
    return whole[1 : Q.nbytes + 1].view("float32").reshape(Q.shape)


@cases(name=list(MISTAKES))
def test_mistakes(name):
    call, kind, words = MISTAKES[name]
    with raises(kind, words):
        call()


def test_gradients_are_refused():
    torch = need_torch()
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    with raises(NotImplementedError, "no backward pass"):
        flashcore.attention(q, q, q)
    with torch.no_grad():
        assert not flashcore.attention(q, q, q).requires_grad


def test_tracing_by_jax_is_refused():
    from harness import JAX

    JAX.need()
    import jax

    with raises(TypeError, "being traced"):
        jax.jit(lambda x: flashcore.attention(x, x, x))(JAX.make(Q, "float32"))


def test_cuda_tensors_say_what_kernels_take():
    torch = need_torch("cuda")
    q = torch.randn(1, 2, 8, 16, device="cuda")
    with raises(NotImplementedError, "GPU kernels take f16 and bf16"):
        flashcore.attention(q, q, q)
    with raises(ValueError, "k is on the CPU but q is on GPU 0"):
        flashcore.attention(q.half(), q.half().cpu(), q.half())
    odd = torch.randn(1, 2, 8, 20, device="cuda", dtype=torch.float16)
    with raises(NotImplementedError, "multiples of 8"):
        flashcore.attention(odd, odd, odd)
