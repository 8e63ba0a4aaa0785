// Arithmetic on f16 and bf16, alone and in pairs, as cuda_fp16.h and cuda_bf16.h write it.
// options: -arch=sm_90
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// let: X = np.float16([1.5, -2.25, 0.0, 65504, 0.1, -0.0, 3, np.inf])
// let: Y = np.float16([0.5, 4.0, -1.0, 65504, 0.3, 0.0, 3, 1])
// run: compare block=8
// arg: in f16 {{X}}
// arg: in f16 {{Y}}
// arg: out u32 {{(X < Y) + 2 * (X <= Y) + 4 * (X == Y) + 8 * (X != Y) + 16 * (X > Y) + 32 * (X >= Y) + 64 * ~(X >= Y)}}
extern "C" __global__ void compare(const half* a, const half* b, unsigned* out) {
    int t = threadIdx.x;
    half x = a[t], y = b[t];
    out[t] = __hlt(x, y) + 2 * __hle(x, y) + 4 * __heq(x, y) + 8 * __hne(x, y) + 16 * __hgt(x, y) + 32 * __hge(x, y)
        + 64 * __hltu(x, y);
}
// let: Z = X.reshape(4, 2)
// let: W = Y.reshape(4, 2)
// run: compare_pairs block=4
// arg: in f16 {{X}}
// arg: in f16 {{Y}}
// arg: out f16 {{np.stack([np.float16(Z < W), np.float16(Z >= W), np.float16(Z == W)])}}
// arg: out u32 {{np.array([65535, 0xffff0000])[[0] * 4] * 0 + (Z < W)[:, 0] * 0xffff + (Z < W)[:, 1] * 0xffff0000}}
// arg: out u32 {{(Z < W).all(1) + 2 * (Z >= W).all(1)}}
extern "C" __global__ void compare_pairs(const half2* a, const half2* b, half2* out, unsigned* masks, unsigned* all) {
    int t = threadIdx.x;
    out[t] = __hlt2(a[t], b[t]);
    out[t + 4] = __hge2(a[t], b[t]);
    out[t + 8] = __heq2(a[t], b[t]);
    masks[t] = __hlt2_mask(a[t], b[t]);
    all[t] = __hblt2(a[t], b[t]) + 2 * __hbge2(a[t], b[t]);
}
// let: P = np.float32([1.5, -2.25, 0.0, 96, 0.125, -0.5, 3, 7])
// let: Q = np.float32([0.5, 4.0, -1.0, 2, 0.25, 0.0, 3, 1])
// run: brain block=8
// arg: in u16 {{bf16(P)}}
// arg: in u16 {{bf16(Q)}}
// arg: out u16 {{np.concatenate([bf16(v) for v in [P + Q, P - Q, P * Q, P * Q + Q, np.maximum(P, Q), -P, abs(P)]])}}
// arg: out u32 {{(P < Q) + 2 * (P >= Q) + 4 * (P == Q)}}
extern "C" __global__ void brain(const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* out, unsigned* is) {
    int t = threadIdx.x;
    __nv_bfloat16 x = a[t], y = b[t];
    out[t] = __hadd(x, y);
    out[t + 8] = __hsub(x, y);
    out[t + 16] = __hmul(x, y);
    out[t + 24] = __hfma(x, y, y);
    out[t + 32] = __hmax(x, y);
    out[t + 40] = __hneg(x);
    out[t + 48] = __habs(x);
    is[t] = __hlt(x, y) + 2 * __hge(x, y) + 4 * __heq(x, y);
}
// run: brain_pairs block=4
// arg: in u16 {{bf16(P)}}
// arg: in u16 {{bf16(Q)}}
// arg: out u16 {{np.concatenate([bf16(v) for v in [P + Q, P - Q, P * Q, np.minimum(P, Q), np.float32(P < Q), np.float32(P != Q)]])}}
extern "C" __global__ void brain_pairs(const __nv_bfloat162* a, const __nv_bfloat162* b, __nv_bfloat162* out) {
    int t = threadIdx.x;
    __nv_bfloat162 x = a[t], y = b[t];
    out[t] = __hadd2(x, y);
    out[t + 4] = __hsub2(x, y);
    out[t + 8] = __hmul2(x, y);
    out[t + 12] = __hmin2(x, y);
    out[t + 16] = __hlt2(x, y);
    out[t + 20] = __hne2(x, y);
}
// let: N = np.array([0, 1, -1, 7, -300, 2047, 2049, 60000])
// run: convert block=8
// arg: in s32 {{N}}
// arg: out f16 {{np.concatenate([np.float16(N), np.float16(np.float64(N)), np.float16(np.float32(N) / 16)])}}
// arg: out s32 {{np.concatenate([np.int64(np.floor(np.float32(np.float16(N / 16)))), np.int64(np.trunc(np.float32(np.float16(N / 16))))])}}
// arg: out u16 {{bf16(np.float32([0, 1, -1, 7, -300, 2048, 2048, 59904]))}}
extern "C" __global__ void convert(const int* in, half* out, int* back, __nv_bfloat16* brain) {
    int t = threadIdx.x, n = in[t];
    out[t] = __int2half_rn(n);
    out[t + 8] = __double2half((double)n);
    half h = __float2half_rn(n / 16.0f);
    out[t + 16] = h;
    back[t] = __half2int_rd(h);
    back[t + 8] = __half2ll_rz(h);
    brain[t] = __int2bfloat16_rn(n);
}
// let: M = np.float16([0.25, 1, 2, 4, 9, 100, 0.5, 3])
// run: functions block=8 within=1
// arg: in f16 {{M}}
// arg: out f16 {{np.concatenate([np.float16(f(np.float64(M))) for f in [np.sqrt, lambda x: 1 / x, np.exp2, np.log2, np.floor, np.ceil, np.trunc, np.rint]])}}
extern "C" __global__ void functions(const half* in, half* out) {
    int t = threadIdx.x;
    half x = in[t];
    out[t] = hsqrt(x);
    out[t + 8] = hrcp(x);
    out[t + 16] = hexp2(x);
    out[t + 24] = hlog2(x);
    out[t + 32] = hfloor(x);
    out[t + 40] = hceil(x);
    out[t + 48] = htrunc(x);
    out[t + 56] = hrint(x);
}
// run: atomics block=32
// arg: inout f16 0x0000 0x0000 -> 0x5000 0x5400
// arg: inout u16 0 0 -> {{bf16(np.float32([32, 64]))}}
// arg: inout f16 0x0000 -> 0x5000
extern "C" __global__ void atomics(half2* sum, __nv_bfloat162* brain, half* one) {
    atomicAdd(sum, __floats2half2_rn(1, 2));
    atomicAdd(brain, __floats2bfloat162_rn(1, 2));
    atomicAdd(one, __float2half(1));
}
// Two warps add without atomics.
// run: adds_plainly block=64
// arg: inout f16 0x0000 0x0000 -> 0x5400 0x5800
// finding: GlobalRace
extern "C" __global__ void adds_plainly(half2* sum) { *sum = __hadd2(*sum, __floats2half2_rn(1, 2)); }
// A pair behind the end.
// run: one_too_many block=5
// arg: in f16 0x3c00*8
// arg: out f16 0x4000*8
// finding: OutOfBounds
extern "C" __global__ void one_too_many(const half2* in, half2* out) {
    out[threadIdx.x] = __hadd2(in[threadIdx.x], in[threadIdx.x]);
}
