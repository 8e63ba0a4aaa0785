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
    "scale by text": (lambda: flashcore.attention(Q, Q, Q, scale="1"), TypeError, "scale is '1', which is no number"),
    "softcap by text": (lambda: flashcore.attention(Q, Q, Q, softcap="1"), TypeError, "softcap is '1', which is no"),
    "one sink": (lambda: flashcore.attention(Q, Q, Q, sinks=1.0), TypeError, "sinks is 1.0.*one logit per query head"),
    "sinks by text": (lambda: flashcore.attention(Q, Q, Q, sinks=["1"] * 4), TypeError, r"sinks\[0\] is '1', which"),
    "window": (lambda: flashcore.attention(Q, Q, Q, window=-1), ValueError, "window is -1 but must be from 0"),
    "endless window": (lambda: flashcore.attention(Q, Q, Q, window=(2**40, 0)), ValueError, "window is 1099.*use None"),
    "half a key": (
        lambda: flashcore.attention(Q, Q, Q, window=(2.5, 0)),
        TypeError,
        "window is 2.5, which is no whole",
    ),
    "three sides": (lambda: flashcore.attention(Q, Q, Q, window=(1, 2, 3)), ValueError, r"window is \(1, 2, 3\); pass"),
    "negative length": (lambda: lengths([5, -1]), ValueError, r"key_lengths\[1\] is -1 but must be from 0.*keys each"),
    "endless length": (lambda: lengths([5, 2**40]), ValueError, r"key_lengths\[1\] is 1099511627776 but"),
    "fraction of a length": (
        lambda: lengths([5.7, 8]),
        TypeError,
        r"key_lengths\[0\] is 5.7, which is no whole number",
    ),
    "fractions in an array": (lambda: lengths(np.array([5.7, 8])), TypeError, r"key_lengths\[0\] is 5.7"),
    "one length": (lambda: lengths(5), TypeError, "key_lengths is 5, which is no sequence; give how many keys each"),
    "length without dimension": (
        lambda: lengths(np.array(5)),
        TypeError,
        r"key_lengths is array\(5\), which is no seq",
    ),
    "table of lengths": (lambda: lengths([[5, 8]]), TypeError, r"key_lengths\[0\] is \[5, 8\], which"),
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
KEEP = np.ones((2, 8), bool)


def lengths(values):
    return flashcore.attention(Q, Q, Q, key_lengths=values)


def bfloat16_with(dtype):
    q, other = NUMPY.make(Q, "bfloat16"), Q.astype(dtype)
    return flashcore.attention(q, other, other)



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
