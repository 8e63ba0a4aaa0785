// What CUDA's own libraries do, CUB above all.
// options: -arch=sm_75 -lineinfo -std=c++17 -w
#include <cub/cub.cuh>

struct Less {
    __device__ bool operator()(int a, int b) const { return a < b; }
};
// Merging reads one element behind the last and drops it: nobody wrote it.
// let: x = np.random.default_rng(3).integers(0, 1000, 192).astype(np.int32)
// run: merges block=64
// arg: in s32 {{x}}
// arg: out s32 {{np.sort(x.reshape(2, 96)).ravel()}}
extern "C" __global__ void merges(const int* in, int* out) {
    using Sort = cub::WarpMergeSort<int, 3, 32>;
    __shared__ Sort::TempStorage storage[2];
    int items[3];
    for (int i = 0; i < 3; i++) items[i] = in[threadIdx.x * 3 + i];
    Sort(storage[threadIdx.x / 32]).Sort(items, Less());
    for (int i = 0; i < 3; i++) out[threadIdx.x * 3 + i] = items[i];
}
// Two warps in storage for one.
// run: shares block=64
// arg: in s32 {{x}}
// arg: out s32 _*192
// finding: SharedRace SameValueRace UninitShared WarpRace
extern "C" __global__ void shares(const int* in, int* out) {
    using Sort = cub::WarpMergeSort<int, 3, 32>;
    __shared__ Sort::TempStorage storage;
    int items[3];
    for (int i = 0; i < 3; i++) items[i] = in[threadIdx.x * 3 + i];
    Sort(storage).Sort(items, Less());
    for (int i = 0; i < 3; i++) out[threadIdx.x * 3 + i] = items[i];
}
// let: y = np.random.default_rng(4).integers(0, 2**32, 128, dtype=np.uint32)
// run: digits block=32
// arg: inout u32 {{y}} -> {{np.sort(y)}}
extern "C" __global__ void digits(unsigned* keys) {
    using Sort = cub::BlockRadixSort<unsigned, 32, 4>;
    __shared__ Sort::TempStorage storage;
    unsigned items[4];
    for (int i = 0; i < 4; i++) items[i] = keys[threadIdx.x * 4 + i];
    Sort(storage).Sort(items);
    for (int i = 0; i < 4; i++) keys[threadIdx.x * 4 + i] = items[i];
}
