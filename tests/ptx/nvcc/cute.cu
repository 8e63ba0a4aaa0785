// Products as CuTe writes them; needs CUTLASS's headers (the wheel nvidia-cutlass, -I …/cutlass_library/source/include).
// options: -arch=sm_90a -lineinfo -std=c++17 -w --expt-relaxed-constexpr
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
using namespace cute;

// let: a = np.random.default_rng(5).integers(-3, 4, (64, 32))
// let: b = np.random.default_rng(6).integers(-3, 4, (64, 32))
// let: c = a @ b.T
using Rows = Layout<Shape<_64, _32>, Stride<_32, _1>>;
using Result = Layout<Shape<_64, _64>, Stride<_64, _1>>;
using Threads = Layout<Shape<Int<32>, _4>, Stride<_4, _1>>;

template <class Atom, class To> static __device__ void bring(const half_t* from, To& to) {
    auto copier = make_tiled_copy(Copy_Atom<Atom, half_t>{}, Threads{}, Layout<Shape<_1, _8>>{});
    auto own = copier.get_slice(threadIdx.x);
    copy(copier, own.partition_S(make_tensor(make_gmem_ptr(from), Rows{})), own.partition_D(to));
}

template <bool WAIT> static __device__ void warps(const half_t* a, const half_t* b, float* c) {
    auto layout = tile_to_shape(composition(Swizzle<2, 3, 3>{}, Layout<Shape<_8, _32>, Stride<_32, _1>>{}), Shape<_64, _32>{});
    __shared__ alignas(128) half_t left[64 * 32], right[64 * 32];
    auto A = make_tensor(make_smem_ptr(left), layout), B = make_tensor(make_smem_ptr(right), layout);
    bring<SM80_CP_ASYNC_CACHEALWAYS<uint128_t>>(a, A);
    bring<SM80_CP_ASYNC_CACHEALWAYS<uint128_t>>(b, B);
    cp_async_fence();
    if (WAIT) cp_async_wait<0>();
    __syncthreads();
    auto mma = make_tiled_mma(SM80_16x8x16_F32F16F16F32_TN{}, Layout<Shape<_2, _2>>{}, Tile<_32, _32, _16>{});
    auto own = mma.get_slice(threadIdx.x);
    auto C = own.partition_C(make_tensor(make_gmem_ptr(c), Result{}));
    auto x = own.partition_fragment_A(A);
    auto y = own.partition_fragment_B(B);
    auto sum = own.make_fragment_C(C);
    clear(sum);
    auto load_a = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, half_t>{}, mma);
    auto load_b = make_tiled_copy_B(Copy_Atom<SM75_U32x4_LDSM_N, half_t>{}, mma);
    auto from_a = load_a.get_slice(threadIdx.x);
    auto from_b = load_b.get_slice(threadIdx.x);
    copy(load_a, from_a.partition_S(A), from_a.retile_D(x));
    copy(load_b, from_b.partition_S(B), from_b.retile_D(y));
    gemm(mma, x, y, sum);
    copy(sum, C);
}
// run: warp_product block=128
// arg: in f16 {{a}}
// arg: in f16 {{b}}
// arg: out f32 {{c}}
extern "C" __global__ void warp_product(const half_t* a, const half_t* b, float* c) { warps<true>(a, b, c); }
// run: does_not_wait block=128
// arg: in f16 0*2048
// arg: in f16 0*2048
// arg: out f32 _*4096
// finding: InFlightMemory Undrained
extern "C" __global__ void does_not_wait(const half_t* a, const half_t* b, float* c) { warps<false>(a, b, c); }

enum Fault { NONE, NO_FENCE, NO_WAIT, NO_ARRIVE };
template <Fault FAULT> static __device__ void group(const half_t* a, const half_t* b, float* c) {
    auto layout = tile_to_shape(GMMA::Layout_K_SW64_Atom<half_t>{}, Shape<_64, _32>{});
    __shared__ alignas(1024) half_t left[64 * 32], right[64 * 32];
    auto A = make_tensor(make_smem_ptr(left), layout), B = make_tensor(make_smem_ptr(right), layout);
    bring<UniversalCopy<uint128_t>>(a, A);
    bring<UniversalCopy<uint128_t>>(b, B);
    if (FAULT != NO_FENCE) cutlass::arch::fence_view_async_shared();
    __syncthreads();
    auto mma = make_tiled_mma(SM90_64x64x16_F32F16F16_SS<GMMA::Major::K, GMMA::Major::K>{});
    auto own = mma.get_slice(threadIdx.x);
    auto C = own.partition_C(make_tensor(make_gmem_ptr(c), Result{}));
    auto x = own.make_fragment_A(own.partition_A(A));
    auto y = own.make_fragment_B(own.partition_B(B));
    auto sum = own.make_fragment_C(C);
    clear(sum);
    warpgroup_fence_operand(sum);
    if (FAULT != NO_ARRIVE) warpgroup_arrive();
    gemm(mma, x, y, sum);
    warpgroup_commit_batch();
    if (FAULT != NO_WAIT) warpgroup_wait<0>();
    warpgroup_fence_operand(sum);
    copy(sum, C);
}
// run: group_product block=128
// arg: in f16 {{a}}
// arg: in f16 {{b}}
// arg: out f32 {{c}}
extern "C" __global__ void group_product(const half_t* a, const half_t* b, float* c) { group<NONE>(a, b, c); }
// run: no_fence block=128
// arg: in f16 0*2048
// arg: in f16 0*2048
// arg: out f32 _*4096
// finding: MissingProxyFence
extern "C" __global__ void no_fence(const half_t* a, const half_t* b, float* c) { group<NO_FENCE>(a, b, c); }
// run: no_wait block=128
// arg: in f16 0*2048
// arg: in f16 0*2048
// arg: out f32 _*4096
// finding: InFlightRegister Undrained
extern "C" __global__ void no_wait(const half_t* a, const half_t* b, float* c) { group<NO_WAIT>(a, b, c); }
// run: no_arrive block=128
// arg: in f16 0*2048
// arg: in f16 0*2048
// arg: out f32 _*4096
// finding: MissingWgmmaFence
extern "C" __global__ void no_arrive(const half_t* a, const half_t* b, float* c) { group<NO_ARRIVE>(a, b, c); }
