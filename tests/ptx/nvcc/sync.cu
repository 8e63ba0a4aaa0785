// Order between threads: atomics with their orders and scopes, loops of compare-and-swap, mbarriers, pipelines.
// options: -arch=sm_90 -lineinfo
#include <cooperative_groups.h>
#include <cuda/atomic>
#include <cuda_awbarrier_primitives.h>
#include <cuda_pipeline_primitives.h>

static __device__ double add(double* to, double value) {
    unsigned long long* word = (unsigned long long*)to;
    unsigned long long old = *word, assumed;
    do {
        assumed = old;
        old = atomicCAS(word, assumed, __double_as_longlong(value + __longlong_as_double(assumed)));
    } while (assumed != old);
    return __longlong_as_double(old);
}
// The plain read at the start of the loop may be old: the swap notices.
// run: swaps grid=4 block=64
// arg: inout f64 0x0000000000000000 -> {{np.float64(256.0)}}
extern "C" __global__ void swaps(double* total) { add(total, 1.0); }

// run: swaps_shared grid=2 block=64
// arg: out f64 {{np.float64([64, 64])}}
extern "C" __global__ void swaps_shared(double* out) {
    __shared__ double total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    add(&total, 1.0);
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = total;
}
// A plain read beside atomics that nobody follows up.
// run: peeks grid=4 block=32
// arg: inout u32 0 -> _
// arg: out u32 _ _ _ _
// finding: GlobalRace
extern "C" __global__ void peeks(unsigned* count, unsigned* out) {
    atomicAdd(count, 1);
    if (threadIdx.x == 0) out[blockIdx.x] = *count;
}
// run: orders grid=4 block=32
// arg: inout u32 0 0 0 0xffffffff -> 128 0x0000000f 127 0
extern "C" __global__ void orders(unsigned* words) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    cuda::atomic_ref<unsigned, cuda::thread_scope_device> sum(words[0]), bits(words[1]), most(words[2]), least(words[3]);
    sum.fetch_add(1, cuda::memory_order_acq_rel);
    bits.fetch_or(1u << blockIdx.x, cuda::memory_order_release);
    most.fetch_max(i, cuda::memory_order_relaxed);
    least.fetch_min(i, cuda::memory_order_seq_cst);
}
// The first block writes, then raises a flag; the second waits for the flag, then reads.
template <bool RIGHT> static __device__ void hand_over(unsigned* data, unsigned* flag, unsigned* out) {
    cuda::atomic_ref<unsigned, cuda::thread_scope_device> ready(*flag);
    if (blockIdx.x == 0) {
        data[threadIdx.x] = threadIdx.x + 5;
        __syncthreads();
        if (threadIdx.x == 0) ready.store(1, RIGHT ? cuda::memory_order_release : cuda::memory_order_relaxed);
    } else {
        if (threadIdx.x == 0)
            while (ready.load(RIGHT ? cuda::memory_order_acquire : cuda::memory_order_relaxed) == 0) {}
        __syncthreads();
        out[threadIdx.x] = data[threadIdx.x];
    }
}
// run: hands_over grid=2 block=32
// arg: out u32 {{np.arange(32) + 5}}
// arg: inout u32 0 -> 1
// arg: out u32 {{np.arange(32) + 5}}
extern "C" __global__ void hands_over(unsigned* data, unsigned* flag, unsigned* out) { hand_over<true>(data, flag, out); }
// run: drops grid=2 block=32
// arg: out u32 {{np.arange(32) + 5}}
// arg: inout u32 0 -> 1
// arg: out u32 {{np.arange(32) + 5}}
// finding: GlobalRace
extern "C" __global__ void drops(unsigned* data, unsigned* flag, unsigned* out) { hand_over<false>(data, flag, out); }

// Lanes of one warp, ordered by an mbarrier alone.
// run: lanes block=32
// arg: out u32 {{np.arange(32)[::-1] * 3}}
extern "C" __global__ void lanes(unsigned* out) {
    __shared__ unsigned cells[32];
    __shared__ __mbarrier_t barrier;
    unsigned t = threadIdx.x;
    if (t == 0) __mbarrier_init(&barrier, 32);
    __syncwarp();
    cells[t] = t * 3;
    __mbarrier_token_t token = __mbarrier_arrive(&barrier);
    while (!__mbarrier_test_wait(&barrier, token)) {}
    out[t] = cells[31 - t];
}
// The twin arrives and does not wait.
// run: lanes_early block=32
// arg: out u32 {{np.arange(32)[::-1] * 3}}
// finding: WarpRace
extern "C" __global__ void lanes_early(unsigned* out) {
    __shared__ unsigned cells[32];
    __shared__ __mbarrier_t barrier;
    unsigned t = threadIdx.x;
    if (t == 0) __mbarrier_init(&barrier, 32);
    __syncwarp();
    cells[t] = t * 3;
    __mbarrier_arrive(&barrier);
    out[t] = cells[31 - t];
}
// Two warps and an mbarrier; then a copy that runs on its own.
// run: pipeline block=64
// arg: in u32 {{np.arange(64) * 7}}
// arg: out u32 {{np.arange(64)[::-1] * 7}}
extern "C" __global__ void pipeline(const unsigned* in, unsigned* out) {
    __shared__ unsigned cells[64];
    unsigned t = threadIdx.x;
    __pipeline_memcpy_async(cells + t, in + t, 4);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    out[t] = cells[63 - t];
}
// The twin forgets to wait for its copy.
// run: pipeline_early block=64
// arg: in u32 {{np.arange(64) * 7}}
// arg: out u32 {{np.arange(64)[::-1] * 7}}
// finding: InFlightMemory Undrained
extern "C" __global__ void pipeline_early(const unsigned* in, unsigned* out) {
    __shared__ unsigned cells[64];
    unsigned t = threadIdx.x;
    __pipeline_memcpy_async(cells + t, in + t, 4);
    __pipeline_commit();
    __syncthreads();
    out[t] = cells[63 - t];
}
namespace cg = cooperative_groups;
// run: tiles block=64
// arg: in s32 {{np.arange(64)}}
// arg: out s32 {{np.arange(64).reshape(8, 8).sum(1).repeat(8)}}
extern "C" __global__ void tiles(const int* in, int* out) {
    auto tile = cg::tiled_partition<8>(cg::this_thread_block());
    int v = in[threadIdx.x];
    for (int i = tile.size() / 2; i > 0; i /= 2) v += tile.shfl_xor(v, i);
    out[threadIdx.x] = v;
}
// run: reduces block=128
// arg: in s32 {{np.arange(128)}}
// arg: out s32 {{np.array([np.arange(128).sum()])}}
extern "C" __global__ void reduces(const int* in, int* out) {
    __shared__ int cells[128];
    int t = threadIdx.x;
    cells[t] = in[t];
    __syncthreads();
    for (int half = 64; half > 0; half /= 2) {
        if (t < half) cells[t] += cells[t + half];
        __syncthreads();
    }
    if (t == 0) *out = cells[0];
}
// The last steps without a barrier, as it was once done.
// run: reduces_old block=64
// arg: in s32 {{np.arange(64)}}
// arg: out s32 _
// finding: WarpRace SharedRace
extern "C" __global__ void reduces_old(const int* in, int* out) {
    __shared__ int cells[64];
    int t = threadIdx.x;
    cells[t] = in[t];
    __syncthreads();
    if (t < 32) {
        cells[t] += cells[t + 32];
        for (int half = 16; half > 0; half /= 2)
            if (t < half) cells[t] += cells[t + half];
    }
    if (t == 0) *out = cells[0];
}
__device__ unsigned tickets;
__device__ int partial[8];
// The last block adds up what all have left.
// run: last_block grid=8 block=32
// arg: out s32 {{np.array([sum(range(8))])}}
extern "C" __global__ void last_block(int* out) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = blockIdx.x;
        __threadfence();
        last = atomicAdd(&tickets, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        __threadfence();
        int sum = 0;
        for (int i = 0; i < gridDim.x; i++) sum += partial[i];
        *out = sum;
    }
}
// Wide numbers, by carries.
// run: wide block=2
// arg: in u64 0xffffffffffffffff 3
// arg: out u64 1 0xfffffffffffffffe 9 0
// arg: out u64 0 2 6 0
extern "C" __global__ void wide(const unsigned long long* in, unsigned long long* square, unsigned long long* sum) {
    int t = threadIdx.x;
    unsigned __int128 x = in[t], y = x * x, z = x + in[t] + (t == 0 ? 2 : 0);
    square[2 * t] = y;
    square[2 * t + 1] = y >> 64;
    sum[2 * t] = z;
    sum[2 * t + 1] = z >> 64;
}
