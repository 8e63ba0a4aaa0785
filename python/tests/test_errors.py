"""Mistakes: the right exception with the library's own words."""

import flashcore
import numpy as np
from harness import NUMPY, cases, need_torch, normal, raises
from producer import Producer

Q = normal(2, 4, 8, 16)

MISTAKES = {
    "no tensor": (lambda: flashcore.attention([1], Q, Q), TypeError, "q is a list, which does not support DLPack"),
    "no tensor for k": (lambda: flashcore.attention(Q, [1], Q), TypeError, "k is a .*list.*DLPack"),
    "big-endian": (lambda: flashcore.attention(Q, Q.astype(">f4"), Q), TypeError, r"k is >f4; .*k.astype\("),
    "integers for bfloat16": (lambda: bfloat16_with("uint16"), TypeError, "k is uint16; convert"),
    "bfloat16 with others": (lambda: bfloat16_with("float32"), TypeError, "k is f32 but q is bf16"),
    "not shared": (lambda: flashcore.attention(Q, Sealed(), Q), BufferError, "k could not be exported.*: in use"),
    "mixed": (lambda: flashcore.attention(Q, Q, Q.astype("float16")), TypeError, "v is f16 but q is f32"),
    "one dimension": (lambda: flashcore.attention(*[Q[0, 0, 0]] * 3), ValueError, "q has 1 dimensions but 4, 3 or 2 are needed"),
    "mixed dimensions": (lambda: flashcore.attention(Q[0], Q, Q), ValueError, "q has 3 dimensions but k has 4"),
    "mixed output": (
        lambda: flashcore.attention(Q[0], Q[0], Q[0], out=np.empty_like(Q)), ValueError, "q has 3 dimensions but out has 4"
    ),
    "five dimensions": (lambda: flashcore.attention(Q[None], Q, Q), ValueError, "q has 5 dimensions but 4, 3 or 2 are needed"),
    "mask of one entry": (lambda: flashcore.attention(*[Q[0]] * 3, key_mask=KEEP), ValueError, "must be batch x keys"),
    "dimensions in the other order": (
        lambda: flashcore.attention(Q[0], Q, Q, layout="bshd"),
        ValueError,
        "k has 4; give both the same: batch, sequence, heads, dim$",
    ),
    "heads": (lambda: flashcore.attention(Q, Q[:, :3], Q[:, :3]), ValueError, "4 query heads cannot share 3 key heads"),
    "batch": (lambda: flashcore.attention(Q, Q[:1], Q[:1]), ValueError, "k has batch 1 but 2 is needed"),
    "keys": (lambda: flashcore.attention(Q, Q, Q[:, :, :5]), ValueError, "v has sequence 5 but 8 is needed"),
    "dim": (lambda: flashcore.attention(Q, Q[..., :8], Q), ValueError, "k has dim 8 but 16 is needed"),
    "innermost": (lambda: flashcore.attention(*[Q.swapaxes(2, 3)] * 3), ValueError, "innermost stride is 16"),
    "backwards": (lambda: flashcore.attention(*[Q[:, ::-1]] * 3), ValueError, "strides must not be negative"),
    "scale": (lambda: flashcore.attention(Q, Q, Q, scale=-1.0), ValueError, "scale -1 must be finite and positive"),
    "softcap": (lambda: flashcore.attention(Q, Q, Q, softcap=0.0), ValueError, "softcap 0 must be"),
    "large scale": (lambda: flashcore.attention(Q, Q, Q, scale=1e300), ValueError, r"^scale 1e\+300 does not fit in float32"),
    "small scale": (lambda: flashcore.attention(Q, Q, Q, scale=1e-46), ValueError, "^scale 1e-46 does not fit in float32"),
    "endless scale": (lambda: flashcore.attention(Q, Q, Q, scale=float("inf")), ValueError, "scale inf must be finite"),
    "large softcap": (lambda: flashcore.attention(Q, Q, Q, softcap=4e38), ValueError, r"^softcap 4e\+38 does not fit"),
    "nearly all": (
        lambda: flashcore.attention(Q, Q, Q, dropout=0.999999999, dropout_seed=1),
        ValueError,
        "^dropout 0.999999999 is 1 in float32 but must be below",
    ),
    "nearly all of a mask": (lambda: flashcore.dropout_mask(0.999999999, 1, 1, 1, 2, 2), ValueError, "^probability 0.999999999 is 1"),
    "sinks": (lambda: flashcore.attention(Q, Q, Q, sinks=[1.0]), ValueError, "1 sinks for 4 query heads"),
    "column of sinks": (lambda: flashcore.attention(Q, Q, Q, sinks=np.zeros((4, 1), "f4")), ValueError, r"of shape \(4,\) and contiguous"),
    "scale by text": (lambda: flashcore.attention(Q, Q, Q, scale="1"), TypeError, "scale is '1', which is not a number"),
    "softcap by text": (lambda: flashcore.attention(Q, Q, Q, softcap="1"), TypeError, "softcap is '1', which is not"),
    "one sink": (lambda: flashcore.attention(Q, Q, Q, sinks=1.0), TypeError, "sinks is 1.0.*one logit per query head"),
    "sinks by text": (lambda: flashcore.attention(Q, Q, Q, sinks=["1"] * 4), TypeError, r"sinks\[0\] is '1', which"),
    "window": (lambda: flashcore.attention(Q, Q, Q, window=-1), ValueError, "window is -1 but must be from 0"),
    "endless window": (lambda: flashcore.attention(Q, Q, Q, window=(2**40, 0)), ValueError, "window is 1099.*use None"),
    "half a key": (
        lambda: flashcore.attention(Q, Q, Q, window=(2.5, 0)),
        TypeError,
        "window is 2.5, which is not an int",
    ),
    "three sides": (lambda: flashcore.attention(Q, Q, Q, window=(1, 2, 3)), ValueError, r"window is \(1, 2, 3\); pass"),
    "negative length": (lambda: lengths([5, -1]), ValueError, r"key_lengths\[1\] is -1 but must be from 0.*keys each"),
    "endless length": (lambda: lengths([5, 2**40]), ValueError, r"key_lengths\[1\] is 1099511627776 but"),
    "fraction of a length": (
        lambda: lengths([5.7, 8]),
        TypeError,
        r"key_lengths\[0\] is 5.7, which is not an int",
    ),
    "fractions in an array": (lambda: lengths(np.array([5.7, 8])), TypeError, "key_lengths are float64.*int32"),
    "one length": (lambda: lengths(5), TypeError, "key_lengths is 5, which is not a sequence; give how many keys each"),
    "length without dimension": (
        lambda: lengths(np.array(5)),
        TypeError,
        r"key_lengths is array\(5\), which is not a seq",
    ),
    "table of lengths": (lambda: lengths([[5, 8]]), TypeError, r"key_lengths\[0\] is \[5, 8\], which"),
    "layout": (lambda: flashcore.attention(Q, Q, Q, layout="sbhd"), ValueError, "unknown layout `sbhd`"),
    "no namespace": (lambda: flashcore.attention(Bare(), Q, Q), TypeError, "cannot make a tensor like a Bare"),
    "foreign device": (lambda: flashcore.attention(Odd(), Q, Q, out=Q.copy()), ValueError, "DLPack type 10"),
    "layout by number": (lambda: flashcore.attention(Q, Q, Q, layout=4), TypeError, "layout is 4, which is not a string; pass"),
    "many causals": (lambda: flashcore.attention(Q, Q, Q, causal=KEEP), TypeError, "which is not a bool; pass True or False"),
    "mask that is added": (lambda: flashcore.attention(Q, Q, Q, key_mask=Q[0, 0]), TypeError, "key_mask is float32; pass bool, or numbers"),
    "mask of integers": (
        lambda: flashcore.scaled_dot_product_attention(Q, Q, Q, np.ones((8, 8), "int64")), TypeError, "attn_mask is int64; pass bool"
    ),
    "padding below zero": (lambda: cached(cache_leftpad=np.array([0, -1], "int32")), ValueError, "cache_leftpad has -1; pass 0 or more"),
    "positions behind tables": (
        lambda: cached(k=Q, v=Q, rotary_cos=Q[0, 0, :2, :2], rotary_sin=Q[0, 0, :2, :2]), ValueError,
        "rotary_sin have 2 positions but the cache "
    ),
    "mask by text": (lambda: flashcore.attention(Q, Q, Q, key_mask="1"), TypeError, "key_mask is <U1; pass bool"),
    "nothing to merge": (lambda: flashcore.merge(None, Q), TypeError, "parts is None, which is not a sequence"),
    "factors": (lambda: flashcore.attention(Q, Q, Q, factors=2.0), ValueError, "pass three factors"),
    "bound by text": (lambda: packed(longest_query="5"), TypeError, "longest_query is '5', which is not an int"),
    "bound below zero": (lambda: packed(longest_key=-5), ValueError, "longest_key is -5 but must be from 0.*any sequence"),
    "no cache": (lambda: cached(v_cache=None), TypeError, "v.* is a NoneType, which does not support DLPack"),
    "cache entries": (lambda: cached(cache_batch_idx=[3, 2], cache_leftpad=[0, 0], block_table=[[0]]), ValueError, "do not fit the cache"),
    "used rows": (lambda: parted(seqused_k=[4, 4, 4]), ValueError, r"seqused_k is \(3,\) but there are 2 sequences"),
    "misaligned": (lambda: flashcore.attention(shifted(), Q, Q), ValueError, "not aligned to its 4-byte elements"),
}


KEEP = np.ones((2, 8), bool)


def lengths(values):
    return flashcore.attention(Q, Q, Q, key_lengths=values)


def packed(**options):
    return flashcore.packed_attention(Q[0], Q[0], Q[0], [0, 2, 4], [0, 2, 4], **options)


def parted(**options):
    return flashcore.flash_attn_varlen_func(Q[0], Q[0], Q[0], [0, 2, 4], [0, 2, 4], 2, 2, **options)


def cached(**options):
    return flashcore.flash_attn_with_kvcache(**{"q": Q, "k_cache": Q, "v_cache": Q, "cache_seqlens": [3, 4]} | options)


def bfloat16_with(dtype):
    q, other = NUMPY.make(Q, "bfloat16"), Q.astype(dtype)
    return flashcore.attention(q, other, other)


class Bare:
    """Exports, but cannot make its like."""

    shape = Q.shape

    def __dlpack__(self, **options):
        return Q.__dlpack__(**options)


class Odd(Bare):
    """Claims to be on a device of another maker."""

    def __dlpack__(self, **options):
        return Producer(Q, device=(10, 0)).__dlpack__()


class Sealed(Bare):
    """Of a type that can be read, by an owner who does not let it be."""

    dtype = np.dtype("float32")

    def __dlpack__(self, **options):
        raise BufferError("in use")


def shifted():
    """Elements that start one byte late."""
    whole = np.zeros(Q.nbytes + 8, "uint8")
    return whole[1 : Q.nbytes + 1].view("float32").reshape(Q.shape)


@cases(name=list(MISTAKES))
def test_mistakes(name):
    call, kind, words = MISTAKES[name]
    with raises(kind, words):
        call()


TURNED, CACHES = Q.swapaxes(1, 2), np.zeros((6, 16, 4, 16), "float32")
"""Batch x sequence x heads x dim, and six pages."""
TABLE, FRACTIONS, ONES = [[0, 1], [2, 3]], np.array([2.5, 3.0]), np.ones((2, 4), "float32")


def by_name(function, *tensors, **options):
    return lambda: getattr(flashcore, function)(*tensors, **options)


def varlen(*tensors, **options):
    offsets = {"cu_seqlens_q": [0, 2, 4], "cu_seqlens_k": [0, 2, 4], "max_seqlen_q": 2, "max_seqlen_k": 2}
    return by_name("flash_attn_varlen_func", *(tensors or [Q[0]] * 3), **offsets | options)


def kvcache(**options):
    caches = {"q": TURNED, "k_cache": CACHES[:2], "v_cache": CACHES[:2], "cache_seqlens": [3, 4]}
    return by_name("flash_attn_with_kvcache", **caches | options)


def moe(**options):
    given = {"x": Q[0, 0], "gate_up": np.ones((4, 64, 16), "f4"), "down": np.ones((4, 16, 32), "f4"), "logits": Q[0, 0, :, :4], "top_k": 2}
    return by_name("moe", **given | options)


WORDS = {
    "offsets of attention": (by_name("attention", Q, Q, Q, query_lengths=FRACTIONS), TypeError, "^query_lengths are float64"),
    "number of lengths": (by_name("attention", Q, Q, Q, key_lengths=[1]), ValueError, "^key_lengths has 1 numbers but a batch of 2"),
    "offsets of packed": (by_name("packed_attention", *[Q[0]] * 3, [0, 2, 4], [0, 5, 3]), ValueError, r"^key_offsets\[2\] is wrong"),
    "offsets of queries": (varlen(cu_seqlens_q=[0, 3, 9]), ValueError, r"^cu_seqlens_q\[2\] is wrong.*its 4 rows"),
    "offsets of keys": (varlen(cu_seqlens_k=[0, 2.5, 4]), TypeError, r"^cu_seqlens_k\[1\] is 2.5, which is not an int"),
    "fewer offsets": (varlen(cu_seqlens_k=[0, 4]), ValueError, "^3 cu_seqlens_q but 2 cu_seqlens_k"),
    "used keys": (varlen(Q[0], CACHES, CACHES, block_table=TABLE, seqused_k=[3]), ValueError, "^seqused_k has 1 numbers"),
    "table of varlen": (varlen(Q[0], CACHES, CACHES, block_table=TABLE[:1], seqused_k=[3, 4]), ValueError, "^block_table holds 2 numbers"),
    "sinks of varlen": (varlen(s_aux=["1"] * 4), TypeError, r"^s_aux\[0\] is '1'"),
    "scale": (by_name("flash_attn_func", *[TURNED] * 3, softmax_scale=-1.0), ValueError, "^softmax_scale -1 must be finite"),
    "scale by text": (varlen(softmax_scale="1"), TypeError, "^softmax_scale is '1', which is not a number"),
    "slopes": (by_name("flash_attn_func", *[TURNED] * 3, alibi_slopes=[1.0]), ValueError, "^alibi_slopes must be float32.*4"),
    "slopes by text": (by_name("flash_attn_func", *[TURNED] * 3, alibi_slopes="a"), TypeError, r"^alibi_slopes\[0\] is 'a'"),
    "lengths of a cache": (kvcache(cache_seqlens=FRACTIONS), TypeError, "^cache_seqlens are float64"),
    "cache of others": (kvcache(k_cache=CACHES[:1]), ValueError, "^k_cache has batch 1 but 2 is needed"),
    "values of a cache": (kvcache(v_cache=CACHES[:2, :5]), ValueError, "^v_cache has sequence 5 but 16 is needed to match k_cache"),
    "full cache": (kvcache(k=TURNED, v=TURNED, v_cache=CACHES[2:4], cache_seqlens=[9, 8]), ValueError, "uses 17 rows of k_cache, which has 16"),
    "table of a cache": (kvcache(k_cache=CACHES, v_cache=CACHES, block_table=TABLE[:1]), ValueError, "^block_table holds 2"),
    "table by its other name": (kvcache(k_cache=CACHES, v_cache=CACHES, page_table=[[9], [1]]), ValueError, "page 9 .column 0 of page_table"),
    "descales of a wide cache": (
        kvcache(k_descale=ONES, v_descale=ONES), ValueError, "^f32 tensors have no k_descale and v_descale, which are for e4m3.*omit them"
    ),
    "descales of wide tensors": (varlen(k_descale=ONES), ValueError, "^f32 tensors have no k_descale and v_descale"),
    "chunks and slopes": (
        kvcache(attention_chunk=2, alibi_slopes=np.ones((2, 4), "f4")),
        NotImplementedError,
        "^attention_chunk does not go with alibi_slopes of each sequence; pass",
    ),
    "chunks and out": (kvcache(attention_chunk=2, out=TURNED), NotImplementedError, "^attention_chunk does not go with out; pass"),
    "chunks of packed and slopes": (
        varlen(attention_chunk=2, alibi_slopes=np.ones((2, 4), "f4")),
        NotImplementedError,
        "^alibi_slopes of each sequence cannot be combined with attention_chunk; pass one per head",
    ),
    "large softmax_scale": (varlen(softmax_scale=1e300), ValueError, r"^softmax_scale 1e\+300 does not fit in float32"),
    "nearly all of dropout_p": (
        by_name("scaled_dot_product_attention", Q, Q, Q, dropout_p=0.999999999, dropout_seed=1), ValueError, "^dropout_p 0.999999999 is 1"
    ),
    "half an embedding": (kvcache(k=TURNED, v=TURNED, rotary_cos=Q[0, 0]), ValueError, "needs rotary_cos and rotary_sin; pass both"),
    "flat embedding": (kvcache(k=TURNED, v=TURNED, v_cache=CACHES[2:4], rotary_cos=Q[0, 0, 0], rotary_sin=Q[0, 0, 0]), ValueError, "positions x half"),
    "query": (by_name("scaled_dot_product_attention", Q.astype("i4"), Q, Q), TypeError, r"^query is int32.*query.astype"),
    "value": (by_name("scaled_dot_product_attention", Q, Q, Q[:, :, :5]), ValueError, "^value has sequence 5 .* to match key"),
    "wide mask": (by_name("scaled_dot_product_attention", Q, Q, Q, attn_mask=np.ones((5, 5), "f4")), ValueError, "^attn_mask has 5 keys"),
    "lengths to append": (by_name("append", TURNED, TURNED, CACHES[:2], CACHES[:2], FRACTIONS), TypeError, "^lengths are float64"),
    "slots": (by_name("reshape_and_cache_flash", TURNED[0], TURNED[0], CACHES, CACHES.copy(), np.arange(9)), ValueError, "^slot_mapping have 9 entries but 8"),
    "types to merge": (by_name("merge", [Q, Q.astype("f2")], [Q[..., 0].copy()] * 2), TypeError, "^a part is f16 but the first part is f32"),
    "sums to merge": (by_name("merge", [Q, Q], [Q[:1, ..., 0].copy()] * 2), ValueError, "^lses must be float32"),
    "narrow sum": (by_name("accumulate", Q, Q, Q, Q.astype("f2"), Q[..., 0].copy()), TypeError, "in f32, not f16; give an f32 out"),
    "ends": (by_name("grouped_mm", Q[0, 0], np.ones((2, 16, 3), "f4"), offs=FRACTIONS), TypeError, "^offs are float64"),
    "experts": (moe(logits=None, ids=FRACTIONS[:, None], weights=FRACTIONS[:, None]), TypeError, "^ids are float64"),
    "too many experts": (moe(top_k=9), ValueError, "a token cannot go to 9 experts"),
    "nothing": (by_name("attention", Q, None, Q), TypeError, "^k is a NoneType, which does not support DLPack"),
}


@cases(name=list(WORDS))
def test_mistakes_are_told_in_the_words_of_the_caller(name):
    call, kind, words = WORDS[name]
    with raises(kind, words):
        call()


TORCH_MISTAKES = {
    "sparse": (lambda x: x.to_sparse(), TypeError, "k is sparse; pass k.to_dense"),
    "on meta": (lambda x: x.to("meta"), ValueError, "k is on meta but q on cpu; move it there"),
}


@cases(name=["float64", "int32", "uint8", "bool", "complex64", "object"])
def test_element_types_have_their_names(name):
    with raises(TypeError, rf'q is {name}; convert it to float16, bfloat16 or float32, for example by q.astype\("float32"\)'):
        flashcore.attention(*[Q.astype(name)] * 3)


DLPACK_TYPES = {
    "int8": (0, 8, 1),
    "uint16": (1, 16, 1),
    "bfloat32": (4, 32, 1),
    "float8_e3m4": (7, 8, 1),
    "float4_e2m1fn": (17, 4, 1),
    "float16 in vectors of 2": (2, 16, 2),
    "of DLPack type 3 with 64 bits": (3, 64, 1),
    "of DLPack type 18 with 8 bits": (18, 8, 1),
}


@cases(name=list(DLPACK_TYPES))
def test_element_types_of_dlpack_have_names(name):
    with raises(TypeError, f"k is {name}; convert"):
        flashcore.attention(Q, Producer(Q, elements=DLPACK_TYPES[name]), Q)


@cases(name=list(TORCH_MISTAKES))
def test_tensors_of_torch_without_memory_are_told(name):
    torch = need_torch()
    change, kind, words = TORCH_MISTAKES[name]
    q = torch.tensor(Q)
    with raises(kind, words):
        flashcore.attention(q, change(q), q)


def test_bounds_beyond_what_there_is_cost_nothing():
    chunks = dict(attention_chunk=2, causal=True)
    q, offsets = Q[0], [0, 3, 4]
    expected = flashcore.flash_attn_varlen_func(q, q, q, offsets, offsets, 3, 3, **chunks)
    got = flashcore.flash_attn_varlen_func(q, q, q, offsets, offsets, 2**31, 2**31, **chunks)
    np.testing.assert_array_equal(got, expected)


def test_cuda_tensors_say_what_kernels_take():
    torch = need_torch("cuda")
    q = torch.randn(1, 2, 8, 16, device="cuda")
    with raises(ValueError, "k is on the CPU but q is on GPU 0"):
        flashcore.attention(q.half(), q.half().cpu(), q.half())
    wide = torch.randn(1, 2, 8, 520, device="cuda", dtype=torch.float16)
    with raises(NotImplementedError, "head dims up to 576 .* and 512"):
        flashcore.attention(wide, wide, wide)


def test_numbers_come_in_many_forms():
    expected = flashcore.attention(Q, Q, Q, window=(3, 0), sinks=[0.5, 1.0, 1.5, 2.0])
    sinks = [np.array(0.5), np.float32(1.0), 1.5, 2]
    np.testing.assert_array_equal(flashcore.attention(Q, Q, Q, window=np.array([3, 0]), sinks=sinks), expected)
    turned = Q.swapaxes(1, 2)
    window = [flashcore.flash_attn_func(turned, turned, turned, window_size=size) for size in ((3, 0), np.array([3, 0]))]
    np.testing.assert_array_equal(*window)
