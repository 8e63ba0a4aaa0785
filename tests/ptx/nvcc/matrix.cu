// Matrices in registers: movmatrix, and wgmma with accumulators that nvcc sets behind the fence.
// options: -arch=sm_90a -lineinfo
#include <cuda_fp16.h>

static __device__ unsigned transposed(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
// let: M = np.arange(64).reshape(8, 8) * 257
// run: turns block=32
// arg: in u16 {{M}}
// arg: out u16 {{M.T}}
extern "C" __global__ void turns(const unsigned* in, unsigned* out) {
    out[threadIdx.x] = transposed(in[threadIdx.x]);
}
// run: turns_twice block=32
// arg: in u16 {{M}}
// arg: out u16 {{M}}
extern "C" __global__ void turns_twice(const unsigned* in, unsigned* out) {
    out[threadIdx.x] = transposed(transposed(in[threadIdx.x]));
}
// Half of the warp does not take part.
// run: turns_alone block=32
// arg: in u16 {{M}}
// arg: out u16 {{M}}
// finding: DivergentAligned
extern "C" __global__ void turns_alone(const unsigned* in, unsigned* out) {
    unsigned x = in[threadIdx.x];
    if (threadIdx.x < 16) x = transposed(x);
    out[threadIdx.x] = x;
}

// D = A B + 1 of 64 x 8 x 16: A from registers, B from shared memory.
template <bool FENCE, bool WAIT> static __device__ void product(const half* a, const half* b, float* d) {
    __shared__ __align__(128) half tile[128];
    int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4, col = t % 4 * 2;
    tile[t / 16 * 8 + t % 8 + t % 16 / 8 * 64] = b[t];
    const unsigned* words = (const unsigned*)a;
    unsigned a0 = words[(row * 16 + col) / 2], a1 = words[((row + 8) * 16 + col) / 2];
    unsigned a2 = words[(row * 16 + col + 8) / 2], a3 = words[((row + 8) * 16 + col + 8) / 2];
    if (FENCE) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    unsigned long long at = (unsigned)__cvta_generic_to_shared(tile) >> 4 & 0x3fff;
    unsigned long long descriptor = at | 8ull << 16 | 8ull << 32;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    float sum[4] = {1, 1, 1, 1};
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, 0; }"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(descriptor));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (WAIT) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    d[row * 8 + col] = sum[0];
    d[row * 8 + col + 1] = sum[1];
    d[(row + 8) * 8 + col] = sum[2];
    d[(row + 8) * 8 + col + 1] = sum[3];
}
// let: A = (np.arange(64 * 16) % 7 - 3).reshape(64, 16)
// let: B = (np.arange(8 * 16) % 5 - 2).reshape(8, 16)
// run: product_right block=128
// arg: in f16 {{np.float16(A)}}
// arg: in f16 {{np.float16(B)}}
// arg: out f32 {{np.float32(A @ B.T + 1)}}
// note: UnfencedInit
extern "C" __global__ void product_right(const half* a, const half* b, float* d) { product<true, true>(a, b, d); }
// run: product_unfenced block=128
// arg: in f16 {{np.float16(A)}}
// arg: in f16 {{np.float16(B)}}
// arg: out f32 {{np.float32(A @ B.T + 1)}}
// finding: MissingProxyFence UnfencedInit
extern "C" __global__ void product_unfenced(const half* a, const half* b, float* d) { product<false, true>(a, b, d); }
// run: product_early block=128
// arg: in f16 {{np.float16(A)}}
// arg: in f16 {{np.float16(B)}}
// arg: out f32 {{np.float32(A @ B.T + 1)}}
// finding: InFlightRegister Undrained UnfencedInit
extern "C" __global__ void product_early(const half* a, const half* b, float* d) { product<true, false>(a, b, d); }
