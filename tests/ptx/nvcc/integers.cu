// Integer intrinsics, and what nvcc makes of division, bit fields and narrow types.
// options: -arch=sm_80

// let: A = np.array([0, 1, 0xffffffff, 0x80000000, 0x12345678, 0x00ff00ff, 0xdeadbeef, 0x7fffffff], dtype=np.uint64)
// let: B = np.array([5, 0xffffffff, 3, 0x80000000, 0x9abcdef0, 0x0f0f0f0f, 0xcafebabe, 2], dtype=np.uint64)
// let: s = lambda v: v.astype(np.int64) - ((v >> 31) << 32).astype(np.int64)
// let: rev = lambda v: np.array([int(f"{int(x):032b}"[::-1], 2) for x in v])
// let: pop = lambda v: np.array([bin(int(x)).count("1") for x in v])
// let: lead = lambda v: np.array([32 - int(x).bit_length() for x in v])
// let: ffs = lambda v: np.array([(int(x) & -int(x)).bit_length() for x in v])
// run: bits block=8
// arg: in u32 {{A}}
// arg: in u32 {{B}}
// arg: out u32 {{cat(rev(A), pop(A), lead(A), ffs(A))}}
// arg: out u32 {{cat((A << 8 | B >> 24) & 0xffffffff, (A << 24 | B >> 8) & 0xffffffff, (A & 0xff) << 24 | (A & 0xff00) << 8 | A >> 8 & 0xff00 | A >> 24)}}
extern "C" __global__ void bits(const unsigned* a, const unsigned* b, unsigned* out, unsigned* shifted) {
    int t = threadIdx.x;
    unsigned x = a[t], y = b[t];
    out[t] = __brev(x);
    out[t + 8] = __popc(x);
    out[t + 16] = __clz(x);
    out[t + 24] = __ffs(x);
    shifted[t] = __funnelshift_l(y, x, 8);
    shifted[t + 8] = __funnelshift_r(y, x, 8);
    shifted[t + 16] = __byte_perm(x, 0, 0x0123);
}
// let: m24 = lambda v: ((v & 0xffffff) ^ 0x800000).astype(np.int64) - 0x800000
// run: multiply block=8
// arg: in u32 {{A}}
// arg: in u32 {{B}}
// arg: out u32 {{cat((m24(A) * m24(B)) & 0xffffffff, ((A & 0xffffff) * (B & 0xffffff)) & 0xffffffff, (s(A) * s(B) >> 32) & 0xffffffff, A * B >> 32)}}
// arg: out u32 {{cat((abs(s(A) - s(B)) + 7) & 0xffffffff, (abs(A.astype(np.int64) - B.astype(np.int64)) + 7) & 0xffffffff, (A.astype(np.int64) + B.astype(np.int64)) >> 1, (s(A) + s(B)) >> 1 & 0xffffffff)}}
extern "C" __global__ void multiply(const int* a, const int* b, int* out, unsigned* sums) {
    int t = threadIdx.x, x = a[t], y = b[t];
    out[t] = __mul24(x, y);
    out[t + 8] = __umul24(x, y);
    out[t + 16] = __mulhi(x, y);
    out[t + 24] = __umulhi(x, y);
    sums[t] = __sad(x, y, 7);
    sums[t + 8] = __usad(x, y, 7);
    sums[t + 16] = __uhadd(x, y);
    sums[t + 24] = __hadd(x, y);
}
// let: byte = lambda v, i: (v >> np.uint64(8 * i) & 255).astype(np.int64)
// let: sb = lambda v, i: (byte(v, i) ^ 128) - 128
// let: h16 = lambda v, i: ((v >> np.uint64(16 * i) & 0xffff).astype(np.int64) ^ 0x8000) - 0x8000
// run: dots block=8
// arg: in u32 {{A}}
// arg: in u32 {{B}}
// arg: out u32 {{cat((sum(sb(A, i) * sb(B, i) for i in range(4)) + 9) & 0xffffffff, (sum(byte(A, i) * byte(B, i) for i in range(4)) + 9) & 0xffffffff, (h16(A, 0) * sb(B, 0) + h16(A, 1) * sb(B, 1) + 9) & 0xffffffff, (h16(A, 0) * sb(B, 2) + h16(A, 1) * sb(B, 3) + 9) & 0xffffffff)}}
extern "C" __global__ void dots(const int* a, const int* b, int* out) {
    int t = threadIdx.x, x = a[t], y = b[t];
    out[t] = __dp4a(x, y, 9);
    out[t + 8] = __dp4a((unsigned)x, (unsigned)y, 9u);
    out[t + 16] = __dp2a_lo(x, y, 9);
    out[t + 24] = __dp2a_hi(x, y, 9);
}
// let: quad = lambda f: sum(f(byte(A, i), byte(B, i)) << 8 * i for i in range(4))
// run: packed block=8
// arg: in u32 {{A}}
// arg: in u32 {{B}}
// arg: out u32 {{cat(quad(lambda a, b: (a + b) & 255), quad(lambda a, b: (a - b) & 255), quad(np.minimum), quad(lambda a, b: np.minimum(a + b, 255)), quad(lambda a, b: abs(a - b)), quad(lambda a, b: 255 * (a == b)), quad(lambda a, b: 255 * (a > b)))}}
// arg: out u32 {{sum(abs(byte(A, i) - byte(B, i)) for i in range(4))}}
extern "C" __global__ void packed(const unsigned* a, const unsigned* b, unsigned* out, unsigned* sad) {
    int t = threadIdx.x;
    unsigned x = a[t], y = b[t];
    out[t] = __vadd4(x, y);
    out[t + 8] = __vsub4(x, y);
    out[t + 16] = __vminu4(x, y);
    out[t + 24] = __vaddus4(x, y);
    out[t + 32] = __vabsdiffu4(x, y);
    out[t + 40] = __vcmpeq4(x, y);
    out[t + 48] = __vcmpgtu4(x, y);
    sad[t] = __vsadu4(x, y);
}
// let: I = np.array([7, -7, 100, -100, 2**40, -2**40, 5, -1])
// let: J = np.array([2, 2, -7, -7, 1000, 1000, -3, 5])
// let: quotient = np.array([int(abs(i) // abs(j)) * (1 if (i < 0) == (j < 0) else -1) for i, j in zip(I.tolist(), J.tolist())])
// run: divide block=8
// arg: in s64 {{I}}
// arg: in s64 {{J}}
// arg: out s64 {{cat(quotient, I - quotient * J)}}
// arg: out s32 {{cat([int(abs(i) // abs(j)) * (1 if (i < 0) == (j < 0) else -1) for i, j in zip([((int(x) + 2**31) % 2**32) - 2**31 for x in I], J.tolist())])}}
extern "C" __global__ void divide(const long long* a, const long long* b, long long* out, int* narrow) {
    int t = threadIdx.x;
    out[t] = a[t] / b[t];
    out[t + 8] = a[t] % b[t];
    narrow[t] = (int)a[t] / (int)b[t];
}
struct Fields { unsigned a : 5, b : 11; int c : 16; };
// run: fields block=8
// arg: in u32 {{A}}
// arg: out s32 {{cat((A & 31).astype(np.int64), (A >> 5 & 2047).astype(np.int64), (A >> 16).astype(np.int64) - ((A >> 31) << 16).astype(np.int64))}}
// arg: out u32 {{(A & 0xffff001f) | ((A & 31) * 3 & 2047) << 5}}
extern "C" __global__ void fields(const Fields* in, int* out, Fields* changed) {
    int t = threadIdx.x;
    Fields f = in[t];
    out[t] = f.a;
    out[t + 8] = f.b;
    out[t + 16] = f.c;
    f.b = f.a * 3;
    changed[t] = f;
}
// let: L = np.arange(32)
// let: V = L * L % 17
// run: warps block=32
// arg: in s32 {{V}}
// arg: out s32 {{cat(np.roll(V, -1)[:31], V[31:], V[L ^ 4], np.cumsum(V), np.full(32, V.sum()), np.full(32, V.min()), np.full(32, np.bitwise_or.reduce(V)))}}
// arg: out u32 {{cat(np.full(32, sum(1 << int(l) for l in L if V[l] > 8)), np.array([sum(1 << m for m in range(32) if V[m] == V[l]) for l in L]))}}
extern "C" __global__ void warps(const int* in, int* out, unsigned* masks) {
    int t = threadIdx.x, v = in[t];
    unsigned all = 0xffffffffu;
    out[t] = __shfl_down_sync(all, v, 1);
    out[t + 32] = __shfl_xor_sync(all, v, 4);
    int sum = v;
    for (int i = 1; i < 32; i *= 2) {
        int other = __shfl_up_sync(all, sum, i);
        if (t >= i) sum += other;
    }
    out[t + 64] = sum;
    out[t + 96] = __reduce_add_sync(all, v);
    out[t + 128] = __reduce_min_sync(all, v);
    out[t + 160] = __reduce_or_sync(all, v);
    masks[t] = __ballot_sync(all, v > 8);
    masks[t + 32] = __match_any_sync(all, v);
}
// Two halves of a warp, each on its own way.
// run: parted block=32
// arg: in s32 {{V}}
// arg: out s32 {{np.where(L < 16, V[:16].sum(), V[16:].max())}}
// arg: out u32 {{np.where(L < 16, 0xffff, 0xffff0000)}}
extern "C" __global__ void parted(const int* in, int* out, unsigned* active) {
    int t = threadIdx.x, v = in[t];
    if (t < 16) {
        active[t] = __activemask();
        out[t] = __reduce_add_sync(0xffff, v);
    } else {
        active[t] = __activemask();
        out[t] = __reduce_max_sync(0xffff0000u, v);
    }
    __syncwarp();
}
// The mask names lanes that never come.
// run: wrong_mask block=32
// arg: in s32 {{V}}
// arg: out s32 {{V}}
// finding: DivergentAligned
extern "C" __global__ void wrong_mask(const int* in, int* out) {
    int t = threadIdx.x;
    out[t] = 0;
    if (t < 16) out[t] = __shfl_xor_sync(0xffffffffu, in[t], 1);
    __syncthreads();
    out[t] += in[t ^ 1];
}
