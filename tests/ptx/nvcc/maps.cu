// Tensor maps that a kernel makes: fields replaced in shared memory, copied to global memory, fenced, used.
// options: -arch=sm_90a -std=c++17 -lineinfo
// version: 8.6
#include <cuda/ptx>
namespace ptx = cuda::ptx;
enum Fault { NONE, NO_FENCE, NO_ZEROS, ODD_STRIDE };

// Copies a box of 16 by 4 numbers of a tensor of `rows` rows of 20, from column 4 and row 2 on.
template <Fault FAULT> static __device__ void copy_box(int* tensor, int rows, char* space, int* out) {
    __shared__ alignas(128) int box[4][16];
    __shared__ alignas(128) int map[32];
    __shared__ uint64_t bar;
    map[threadIdx.x] = FAULT == NO_ZEROS ? 3 : 0;
    __syncwarp();
    auto smem = ptx::space_shared;
    if (threadIdx.x == 0) {
        ptx::n32_t<0> first;
        ptx::n32_t<1> second;
        ptx::tensormap_replace_global_address(smem, map, tensor);
        ptx::tensormap_replace_rank(smem, map, 1);
        ptx::tensormap_replace_box_dim(smem, map, first, 16);
        ptx::tensormap_replace_box_dim(smem, map, second, 4);
        ptx::tensormap_replace_global_dim(smem, map, first, 20);
        ptx::tensormap_replace_global_dim(smem, map, second, rows);
        ptx::tensormap_replace_global_stride(smem, map, first, uint64_t(FAULT == ODD_STRIDE ? 84 : 80));
        ptx::tensormap_replace_element_size(smem, map, first, 1);
        ptx::tensormap_replace_element_size(smem, map, second, 1);
        ptx::tensormap_replace_elemtype(smem, map, ptx::n32_t<3>());
        ptx::tensormap_replace_interleave_layout(smem, map, first);
        ptx::tensormap_replace_swizzle_mode(smem, map, first);
        ptx::tensormap_replace_fill_mode(smem, map, first);
        ptx::mbarrier_init(&bar, 1);
        ptx::fence_proxy_async(smem);
    }
    __syncwarp();
    ptx::n32_t<128> size;
    ptx::tensormap_cp_fenceproxy(ptx::sem_release, ptx::scope_gpu, space, map, size);
    if (FAULT != NO_FENCE) ptx::fence_proxy_tensormap_generic(ptx::sem_acquire, ptx::scope_gpu, space, size);
    if (threadIdx.x == 0) {
        int at[2] = {4, 2};
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, smem, &bar, sizeof(box));
        ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, box, space, at, &bar);
    }
    while (!ptx::mbarrier_try_wait_parity(&bar, 0)) {}
    for (int i = threadIdx.x; i < 64; i += 32) out[i] = box[i / 16][i % 16];
}
// let: tensor = np.arange(80).reshape(4, 20)
// run: copies_box block=32
// arg: in s32 0..80
// arg: u32 4
// arg: out u8 _*128
// arg: out s32 {{np.concatenate([tensor[2:, 4:], np.zeros((2, 16), int)])}}
extern "C" __global__ void copies_box(int* tensor, int rows, char* space, int* out) { copy_box<NONE>(tensor, rows, space, out); }
// run: copies_box_unfenced block=32
// arg: in s32 0..80
// arg: u32 4
// arg: out u8 _*128
// arg: out s32 _*64
// finding: MissingProxyFence
extern "C" __global__ void copies_box_unfenced(int* tensor, int rows, char* space, int* out) {
    copy_box<NO_FENCE>(tensor, rows, space, out);
}
// run: replaces_nothing block=32
// arg: in s32 0..80
// arg: u32 4
// arg: out u8 _*128
// arg: out s32 _*64
// finding: BadDescriptor
extern "C" __global__ void replaces_nothing(int* tensor, int rows, char* space, int* out) {
    copy_box<NO_ZEROS>(tensor, rows, space, out);
}
// run: strides_oddly block=32
// arg: in s32 0..80
// arg: u32 4
// arg: out u8 _*128
// arg: out s32 _*64
// finding: BadDescriptor
extern "C" __global__ void strides_oddly(int* tensor, int rows, char* space, int* out) {
    copy_box<ODD_STRIDE>(tensor, rows, space, out);
}
