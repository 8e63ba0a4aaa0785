// Shared memory of other CTAs of a cluster, which is there as long as they are; atomics on 16 bytes and on vectors.
// options: -arch=sm_90 -lineinfo
#include <cooperative_groups.h>
namespace cg = cooperative_groups;

// let: x = np.arange(128, dtype=np.int32) * 7 % 31
template <bool RIGHT> static __device__ void exchange(const int* in, int* out) {
    __shared__ int part[64];
    auto cluster = cg::this_cluster();
    unsigned i = threadIdx.x, at = blockIdx.x * 64 + i;
    part[i] = in[at];
    cluster.sync();
    out[at] = cluster.map_shared_rank(part, cluster.block_rank() ^ 1)[63 - i];
    if (RIGHT) cluster.sync();
}
// run: exchanges grid=2 block=64 cluster=2
// arg: in s32 {{x}}
// arg: out s32 {{x[::-1]}}
extern "C" __global__ void __cluster_dims__(2, 1, 1) exchanges(const int* in, int* out) { exchange<true>(in, out); }
// A CTA may end while the other one still reads.
// run: leaves grid=2 block=64 cluster=2
// arg: in s32 {{x}}
// arg: out s32 {{x[::-1]}}
// finding: EndedPeer
extern "C" __global__ void __cluster_dims__(2, 1, 1) leaves(const int* in, int* out) { exchange<false>(in, out); }

// An atomic of another CTA's memory, counted by a wait of its owner: nobody else has to wait.
// run: counted grid=2 block=64 cluster=2
// arg: out u32 64 64
extern "C" __global__ void __cluster_dims__(2, 1, 1) counted(unsigned* out) {
    __shared__ unsigned count;
    auto cluster = cg::this_cluster();
    if (threadIdx.x == 0) count = 0;
    cluster.sync();
    atomicAdd(cluster.map_shared_rank(&count, cluster.block_rank() ^ 1), 1);
    cluster.sync();
    if (threadIdx.x == 0) out[blockIdx.x] = count;
}

// run: vectors grid=2 block=32
// arg: inout f32 0*4 -> {{np.float32([64, 128, 192, 256])}}
// arg: inout f32 0*2 -> {{np.float32([64, 32])}}
extern "C" __global__ void vectors(float4* four, float2* two) {
    atomicAdd(four, make_float4(1, 2, 3, 4));
    float2 old = atomicAdd(two, make_float2(1, 0.5f));
    if (old.x > 1e9f) two[1] = old;
}

struct __align__(16) Pair {
    unsigned long long low, high;
};
// run: pairs grid=2 block=32
// arg: inout u64 0 5 -> 64 133
extern "C" __global__ void pairs(Pair* cell) {
    Pair old = *cell, seen;
    do {
        seen = old;
        old = atomicCAS(cell, seen, Pair{seen.low + 1, seen.high + 2});
    } while (old.low != seen.low || old.high != seen.high);
}
// The second of eight bytes alone is no pair.
// run: torn block=1
// arg: inout u64 0*4 -> _ _ _ _
// finding: Misaligned
extern "C" __global__ void torn(unsigned long long* cells) {
    Pair* cell = (Pair*)(cells + 1);
    atomicExch(cell, Pair{1, 2});
}
// run: exchanged grid=2 block=32
// arg: inout u64 7 7 0 -> _ _ 0
extern "C" __global__ void exchanged(Pair* cell) {
    Pair old = atomicExch(cell, Pair{threadIdx.x, threadIdx.x});
    if (old.low != old.high) cell[1].low = 1;
}
