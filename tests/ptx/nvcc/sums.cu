// Sums in shared memory of another block of the cluster, counted by an mbarrier there; lines that mean nothing any more.
// options: -arch=sm_90 -std=c++17 -lineinfo
#include <cooperative_groups.h>
#include <cuda/memory>
#include <cuda/ptx>
namespace cg = cooperative_groups;
namespace ptx = cuda::ptx;
enum Fault { NONE, EXPECTS_TOO_LITTLE, EXPECTS_TOO_MUCH, NO_SYNC, NO_WAIT, NO_FENCE };
#define CLUSTER_KERNEL(name) extern "C" __global__ void __cluster_dims__(2, 1, 1) name

static __device__ void wait(uint64_t* bar) {
    while (!ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cluster, bar, 0)) {}
}

// Every thread of both blocks adds its number in the first one.
template <Fault FAULT> static __device__ void add_up(unsigned* out) {
    __shared__ unsigned sum, most;
    __shared__ uint64_t wide, bar;
    auto cluster = cg::this_cluster();
    if (threadIdx.x == 0) {
        sum = 7, most = 3, wide = 5;
        ptx::mbarrier_init(&bar, 1);
        unsigned bytes = FAULT == EXPECTS_TOO_MUCH ? 64 * 8 + 64 * 8 : 64 * 8 + 2 * 8;
        if (blockIdx.x == 0) ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cluster, ptx::space_shared, &bar, bytes);
    }
    if (FAULT != NO_SYNC) cluster.sync();
    auto there = cluster.map_shared_rank(&bar, 0);
    unsigned value = 32 * blockIdx.x + threadIdx.x;
    ptx::red_async(ptx::op_add, cluster.map_shared_rank(&sum, 0), value, there);
    ptx::red_async(ptx::op_max, cluster.map_shared_rank(&most, 0), value, there);
    if (threadIdx.x == 0) ptx::red_async(ptx::op_add, cluster.map_shared_rank(&wide, 0), uint64_t(1) << 40, there);
    if (blockIdx.x == 0) {
        if (FAULT != NO_WAIT) wait(&bar);
        if (threadIdx.x == 0) out[0] = sum, out[1] = most, out[2] = unsigned(wide), out[3] = unsigned(wide >> 32);
    }
    cluster.sync();
}
// run: adds_up grid=2 block=32 cluster=2
// arg: out u32 {{[7 + sum(range(64)), 63, 5, 2 << 8]}}
CLUSTER_KERNEL(adds_up)(unsigned* out) { add_up<NONE>(out); }
// run: adds_up_forever grid=2 block=32 cluster=2
// arg: out u32 _*4
// finding: Deadlock
CLUSTER_KERNEL(adds_up_forever)(unsigned* out) { add_up<EXPECTS_TOO_MUCH>(out); }
// run: adds_up_unready grid=2 block=32 cluster=2
// arg: out u32 _*4
// finding: SharedRace MbarrierUninit UninitShared WarpRace
CLUSTER_KERNEL(adds_up_unready)(unsigned* out) { add_up<NO_SYNC>(out); }
// run: adds_up_unawaited grid=2 block=32 cluster=2
// arg: out u32 _*4
// finding: Undrained InFlightMemory SharedRace UninitShared
CLUSTER_KERNEL(adds_up_unawaited)(unsigned* out) { add_up<NO_WAIT>(out); }

// Both blocks add a row, by a copy that runs on its own.
template <Fault FAULT> static __device__ void add_rows(int* out) {
    __shared__ alignas(16) int total[32], row[32];
    __shared__ uint64_t bar;
    auto cluster = cg::this_cluster();
    int t = threadIdx.x;
    total[t] = 1000, row[t] = t * (1 + blockIdx.x);
    if (t == 0) {
        ptx::mbarrier_init(&bar, 1);
        unsigned bytes = FAULT == EXPECTS_TOO_LITTLE ? 128 : 256;
        if (blockIdx.x == 0) ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cluster, ptx::space_shared, &bar, bytes);
    }
    if (FAULT != NO_FENCE) ptx::fence_proxy_async();
    cluster.sync();
    auto there = cluster.map_shared_rank(&bar, 0);
    auto space = ptx::space_cluster;
    if (t == 0) ptx::cp_reduce_async_bulk(space, ptx::space_shared, ptx::op_add, cluster.map_shared_rank(total, 0), row, 128, there);
    if (blockIdx.x == 0) {
        wait(&bar);
        out[t] = total[t];
    }
    cluster.sync();
}
// run: adds_rows grid=2 block=32 cluster=2
// arg: out s32 {{1000 + 3 * np.arange(32)}}
CLUSTER_KERNEL(adds_rows)(int* out) { add_rows<NONE>(out); }
// One of the two rows may come after the wait: no schedule is needed to see that it was not expected.
// run: adds_rows_early grid=2 block=32 cluster=2
// arg: out s32 _*32
// finding: MbarrierLeftover InFlightMemory Undrained SharedRace UninitShared UnfencedRead
CLUSTER_KERNEL(adds_rows_early)(int* out) { add_rows<EXPECTS_TOO_LITTLE>(out); }
// run: adds_rows_unfenced grid=2 block=32 cluster=2
// arg: out s32 _*32
// finding: MissingProxyFence
CLUSTER_KERNEL(adds_rows_unfenced)(int* out) { add_rows<NO_FENCE>(out); }

// run: uses_scratch block=32
// arg: inout u32 0*64 -> _*64
// arg: out u32 {{2 * np.arange(32)}}
extern "C" __global__ void uses_scratch(unsigned* scratch, unsigned* out) {
    scratch[threadIdx.x] = threadIdx.x;
    __syncwarp();
    out[threadIdx.x] = 2 * scratch[threadIdx.x];
    __syncwarp();
    if (threadIdx.x == 0) cuda::discard_memory(scratch, 128);
}
// run: uses_what_was_discarded block=32
// arg: inout u32 0*64 -> _*64
// arg: out u32 _*32
// finding: UninitGlobal
extern "C" __global__ void uses_what_was_discarded(unsigned* scratch, unsigned* out) {
    if (threadIdx.x == 0) cuda::discard_memory(scratch, 128);
    __syncwarp();
    out[threadIdx.x] = scratch[threadIdx.x];
}
