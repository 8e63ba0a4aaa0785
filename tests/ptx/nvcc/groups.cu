// Parts of warps, rings and chains of blocks: groups of cooperative_groups, pipelines of copies, a scan that looks back.
// options: -arch=sm_90 -std=c++17 -lineinfo
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda/pipeline>
#include <cuda/ptx>
namespace cg = cooperative_groups;
namespace ptx = cuda::ptx;

// Groups of eight lanes turn their numbers round in shared memory.
template <bool RIGHT> static __device__ void turn(const int* in, int* out) {
    __shared__ int room[64];
    auto tile = cg::tiled_partition<8>(cg::this_thread_block());
    int* own = room + tile.meta_group_rank() * 8;
    own[tile.thread_rank()] = in[threadIdx.x];
    if (RIGHT) tile.sync();
    out[threadIdx.x] = own[7 - tile.thread_rank()];
}
// let: eights = np.arange(64).reshape(8, 8)
// run: turned block=64
// arg: in u32 0..64
// arg: out u32 {{eights[:, ::-1]}}
extern "C" __global__ void turned(const int* in, int* out) { turn<true>(in, out); }
// run: turned_too_early block=64
// arg: in u32 0..64
// arg: out u32 _*64
// finding: WarpRace
extern "C" __global__ void turned_too_early(const int* in, int* out) { turn<false>(in, out); }

// Lanes 8 to 15 hear of what lane 0 wrote from lanes 4 to 7, which have met both.
// run: passed_on block=32
// arg: in u32 7
// arg: out u32 7*16
extern "C" __global__ void passed_on(const int* in, int* out) {
    __shared__ int word;
    if (threadIdx.x == 0) word = in[0];
    if (threadIdx.x < 8) __syncwarp(0x00ff);
    if (threadIdx.x >= 4 && threadIdx.x < 16) __syncwarp(0xfff0);
    if (threadIdx.x < 16) out[threadIdx.x] = word;
}
// Nobody of the upper half has met lane 0.
// run: not_passed_on block=32
// arg: in u32 7
// arg: out u32 _*32
// finding: WarpRace UninitShared
extern "C" __global__ void not_passed_on(const int* in, int* out) {
    __shared__ int word;
    auto sixteen = cg::tiled_partition<16>(cg::this_thread_block());
    if (threadIdx.x == 0) word = in[0];
    sixteen.sync();
    out[threadIdx.x] = word;
}

// A ring of two places: warp 0 copies into them, warps 1 and 2 add up what they find and give the place back.
template <int WHEN> static __device__ void ring(const int* in, int* out, int steps) {
    __shared__ __align__(128) int room[2][64];
    __shared__ uint64_t full[2], empty[2];
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; ++s) ptx::mbarrier_init(&full[s], 1), ptx::mbarrier_init(&empty[s], 2);
        ptx::fence_proxy_async(ptx::space_shared);
    }
    __syncthreads();
    int lane = threadIdx.x & 31, own = threadIdx.x - 32, sum = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < steps; ++i) {
            while (!ptx::mbarrier_try_wait_parity(&empty[i & 1], (i / 2 & 1) ^ 1)) {}
            ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full[i & 1], 256);
            ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, room[i & 1], in + i * 64, 256, &full[i & 1]);
        }
    } else if (threadIdx.x >= 32) {
        for (int i = 0; i < steps; ++i) {
            while (!ptx::mbarrier_try_wait_parity(&full[i & 1], i / 2 & 1)) {}
            if (WHEN == 0 && lane == 0) ptx::mbarrier_arrive(&empty[i & 1]);
            sum += room[i & 1][own];
            if (WHEN == 2) __syncwarp();
            if (WHEN > 0 && lane == 0) ptx::mbarrier_arrive(&empty[i & 1]);
        }
        out[own] = sum;
    }
}
// let: sums = np.arange(576).reshape(9, 64).sum(0)
// run: ring_in_time block=96
// arg: in u32 0..576
// arg: out u32 {{sums}}
// arg: u32 9
// note: UnfencedRead
extern "C" __global__ void ring_in_time(const int* in, int* out, int steps) { ring<2>(in, out, steps); }
// Lane 0 has read its number, but perhaps no other lane has.
// run: ring_of_lane_0 block=96
// arg: in u32 0..576
// arg: out u32 _*64
// arg: u32 9
// apart: SharedRace InFlightMemory UnfencedRead MbarrierParityAlias Deadlock
extern "C" __global__ void ring_of_lane_0(const int* in, int* out, int steps) { ring<1>(in, out, steps); }
// run: ring_too_early block=96
// arg: in u32 0..576
// arg: out u32 _*64
// arg: u32 9
// finding: SharedRace InFlightMemory UnfencedRead MbarrierParityAlias Deadlock
extern "C" __global__ void ring_too_early(const int* in, int* out, int steps) { ring<0>(in, out, steps); }

// run: piped block=64
// arg: in u32 0..576
// arg: out u32 {{sums[::-1]}}
// arg: u32 9
extern "C" __global__ void piped(const int* in, int* out, int steps) {
    __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
    __shared__ __align__(16) int room[2][64];
    auto block = cg::this_thread_block();
    auto pipe = cuda::make_pipeline(block, &state);
    auto fill = [&](int i) {
        pipe.producer_acquire();
        cuda::memcpy_async(block, room[i & 1], in + i * 64, cuda::aligned_size_t<16>(256), pipe);
        pipe.producer_commit();
    };
    fill(0), fill(1);
    int sum = 0;
    for (int i = 0; i < steps; ++i) {
        pipe.consumer_wait();
        sum += room[i & 1][63 - threadIdx.x];
        pipe.consumer_release();
        if (i + 2 < steps) fill(i + 2);
    }
    out[threadIdx.x] = sum;
}

// A sum so far over blocks: each looks back at those before it until it finds one that is sure.
template <bool RIGHT> static __device__ void look_back(const int* in, int* out, volatile int* state, int* sums, int* ticket) {
    __shared__ int tile, before, total;
    if (threadIdx.x == 0) tile = atomicAdd(ticket, 1);
    __syncthreads();
    int at = tile, lane = threadIdx.x, value = in[at * 32 + lane];
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(~0u, value, d);
        if (lane >= d) value += other;
    }
    if (lane == 31) total = value;
    __syncthreads();
    if (lane == 0) {
        int sum = 0;
        sums[2 * at] = total;
        if (RIGHT) __threadfence();
        state[at] = 1;
        for (int other = at - 1; other >= 0; --other) {
            int found;
            while ((found = state[other]) == 0) {}
            if (RIGHT) __threadfence();
            sum += sums[2 * other + found - 1];
            if (found == 2) break;
        }
        sums[2 * at + 1] = before = sum;
        sums[2 * at + 1] += total;
        if (RIGHT) __threadfence();
        state[at] = 2;
    }
    __syncthreads();
    out[at * 32 + lane] = value + before;
}
// run: looks_back grid=12 block=32
// arg: in u32 0..384
// arg: out u32 {{np.cumsum(np.arange(384))}}
// arg: inout u32 0*12 -> 2*12
// arg: inout u32 0*24 -> _*24
// arg: inout u32 0 -> 12
extern "C" __global__ void looks_back(const int* in, int* out, int* state, int* sums, int* ticket) {
    look_back<true>(in, out, state, sums, ticket);
}
// run: looks_back_too_soon grid=12 block=32
// arg: in u32 0..384
// arg: out u32 _*384
// arg: inout u32 0*12 -> _*12
// arg: inout u32 0*24 -> _*24
// arg: inout u32 0 -> _
// finding: GlobalRace
extern "C" __global__ void looks_back_too_soon(const int* in, int* out, int* state, int* sums, int* ticket) {
    look_back<false>(in, out, state, sums, ticket);
}

// Two warps fill, two take: `.cta` is what a barrier is of if nothing else is said.
template <int THREADS> static __device__ void hand_over(const int* in, int* out, int steps) {
    __shared__ int room[64];
    int t = threadIdx.x;
    for (int i = 0; i < steps; ++i) {
        if (t < 64) {
            asm volatile("barrier.cta.sync.aligned 1, %0;" ::"n"(THREADS) : "memory");
            room[t] = in[i * 64 + t];
            asm volatile("bar.cta.arrive 2, 128;" ::: "memory");
        } else {
            asm volatile("barrier.cta.arrive.aligned 1, 128;" ::: "memory");
            asm volatile("barrier.cta.sync 2, 128;" ::: "memory");
            out[i * 64 + t - 64] = room[127 - t];
        }
    }
}
// let: rows = np.arange(192).reshape(3, 64)
// run: handed_over block=128
// arg: in u32 0..192
// arg: out u32 {{rows[:, ::-1]}}
// arg: u32 3
extern "C" __global__ void handed_over(const int* in, int* out, int steps) { hand_over<128>(in, out, steps); }
// run: handed_over_to_few block=128
// arg: in u32 0..192
// arg: out u32 _*192
// arg: u32 3
// finding: BarrierCount SharedRace BarrierRecycled Deadlock
extern "C" __global__ void handed_over_to_few(const int* in, int* out, int steps) { hand_over<64>(in, out, steps); }
