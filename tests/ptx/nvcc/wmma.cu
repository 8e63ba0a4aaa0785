// Matrix products of one warp through nvcuda::wmma, in the types and shapes it has.
// options: -arch=sm_90
#include <mma.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
using namespace nvcuda::wmma;

template <class T, int M, int N, int K, class A, class B, class C>
static __device__ void product(const T* a, const T* b, const C* c, C* d, int lda, int ldb) {
    fragment<matrix_a, M, N, K, T, A> left;
    fragment<matrix_b, M, N, K, T, B> right;
    fragment<accumulator, M, N, K, C> sum;
    load_matrix_sync(left, a, lda);
    load_matrix_sync(right, b, ldb);
    load_matrix_sync(sum, c, N, mem_row_major);
    mma_sync(sum, left, right, sum);
    store_matrix_sync(d, sum, N, mem_row_major);
}

// let: G = lambda r, c, s: ((np.arange(r * c) * s) % 11 - 5).reshape(r, c)
// let: A = G(16, 16, 3)
// let: B = G(16, 16, 5)
// let: C = G(16, 16, 7)
// run: half_float block=32
// arg: in f16 {{np.float16(A)}}
// arg: in f16 {{np.float16(B)}}
// arg: in f32 {{np.float32(C)}}
// arg: out f32 {{np.float32(A @ B + C)}}
extern "C" __global__ void half_float(const half* a, const half* b, const float* c, float* d) {
    product<half, 16, 16, 16, row_major, row_major>(a, b, c, d, 16, 16);
}
// run: half_half block=32
// arg: in f16 {{np.float16(A)}}
// arg: in f16 {{np.float16(B)}}
// arg: in f16 {{np.float16(C)}}
// arg: out f16 {{np.float16(A @ B.T + C)}}
extern "C" __global__ void half_half(const half* a, const half* b, const half* c, half* d) {
    product<half, 16, 16, 16, row_major, col_major>(a, b, c, d, 16, 16);
}
// let: W = G(32, 16, 3)
// let: V = G(16, 8, 5)
// let: U = G(32, 8, 7)
// run: wide_half block=32
// arg: in f16 {{np.float16(W.T)}}
// arg: in f16 {{np.float16(V)}}
// arg: in f32 {{np.float32(U)}}
// arg: out f32 {{np.float32(W @ V + U)}}
extern "C" __global__ void wide_half(const half* a, const half* b, const float* c, float* d) {
    product<half, 32, 8, 16, col_major, row_major>(a, b, c, d, 32, 8);
}
// run: tall_half block=32
// arg: in f16 {{np.float16(V.T)}}
// arg: in f16 {{np.float16(W.T)}}
// arg: in f32 {{np.float32(U.T)}}
// arg: out f32 {{np.float32(V.T @ W.T + U.T)}}
extern "C" __global__ void tall_half(const half* a, const half* b, const float* c, float* d) {
    product<half, 8, 32, 16, row_major, row_major>(a, b, c, d, 16, 32);
}
// run: brain block=32
// arg: in u16 {{bf16(A)}}
// arg: in u16 {{bf16(B.T)}}
// arg: in f32 {{np.float32(C)}}
// arg: out f32 {{np.float32(A @ B + C)}}
extern "C" __global__ void brain(const __nv_bfloat16* a, const __nv_bfloat16* b, const float* c, float* d) {
    product<__nv_bfloat16, 16, 16, 16, row_major, col_major>(a, b, c, d, 16, 16);
}
// let: D = G(16, 8, 3)
// let: E = G(8, 16, 5)
// run: tensor_float block=32
// arg: in f32 {{np.float32(D)}}
// arg: in f32 {{np.float32(E.T)}}
// arg: in f32 {{np.float32(C)}}
// arg: out f32 {{np.float32(D @ E + C)}}
extern "C" __global__ void tensor_float(const float* a, const float* b, const float* c, float* d) {
    fragment<matrix_a, 16, 16, 8, precision::tf32, row_major> left;
    fragment<matrix_b, 16, 16, 8, precision::tf32, col_major> right;
    fragment<accumulator, 16, 16, 8, float> sum;
    load_matrix_sync(left, a, 8);
    load_matrix_sync(right, b, 8);
    for (int i = 0; i < left.num_elements; i++) left.x[i] = __float_to_tf32(left.x[i]);
    for (int i = 0; i < right.num_elements; i++) right.x[i] = __float_to_tf32(right.x[i]);
    load_matrix_sync(sum, c, 16, mem_row_major);
    mma_sync(sum, left, right, sum);
    store_matrix_sync(d, sum, 16, mem_row_major);
}
// run: signed_bytes block=32
// arg: in s8 {{A * 20}}
// arg: in s8 {{(B * 20).T}}
// arg: in s32 {{C}}
// arg: out s32 {{A @ B * 400 + C}}
extern "C" __global__ void signed_bytes(const signed char* a, const signed char* b, const int* c, int* d) {
    product<signed char, 16, 16, 16, row_major, col_major>(a, b, c, d, 16, 16);
}
// run: unsigned_bytes block=32
// arg: in u8 {{(W + 5).T}}
// arg: in u8 {{V + 5}}
// arg: in s32 {{U}}
// arg: out s32 {{(W + 5) @ (V + 5) + U}}
extern "C" __global__ void unsigned_bytes(const unsigned char* a, const unsigned char* b, const int* c, int* d) {
    product<unsigned char, 32, 8, 16, col_major, row_major>(a, b, c, d, 32, 8);
}
// let: P = G(8, 4, 3) / 8
// let: Q = G(4, 8, 5) / 8
// let: R = G(8, 8, 7) / 8
// run: doubles block=32
// arg: in f64 {{np.float64(P)}}
// arg: in f64 {{np.float64(Q.T)}}
// arg: in f64 {{np.float64(R)}}
// arg: out f64 {{np.float64(P @ Q + R)}}
extern "C" __global__ void doubles(const double* a, const double* b, const double* c, double* d) {
    product<double, 8, 8, 4, row_major, col_major>(a, b, c, d, 4, 4);
}
// let: S = G(8, 32, 3)
// let: T = G(32, 8, 5)
// let: nibbles = lambda x: ((x.ravel() & 15).reshape(-1, 8) << (4 * np.arange(8))).sum(1)
// run: signed_nibbles block=32
// arg: in u32 {{nibbles(S)}}
// arg: in u32 {{nibbles(T.T)}}
// arg: in s32 {{G(8, 8, 7)}}
// arg: out s32 {{S @ T + G(8, 8, 7)}}
extern "C" __global__ void signed_nibbles(const void* a, const void* b, const int* c, int* d) {
    fragment<matrix_a, 8, 8, 32, experimental::precision::s4, row_major> left;
    fragment<matrix_b, 8, 8, 32, experimental::precision::s4, col_major> right;
    fragment<accumulator, 8, 8, 32, int> sum;
    load_matrix_sync(left, (const int*)a, 32);
    load_matrix_sync(right, (const int*)b, 32);
    load_matrix_sync(sum, c, 8, mem_row_major);
    mma_sync(sum, left, right, sum);
    store_matrix_sync(d, sum, 8, mem_row_major);
}
// let: X = (np.arange(8 * 128).reshape(8, 128) * 7 // 3) % 2
// let: Y = (np.arange(128 * 8).reshape(128, 8) * 5 // 7) % 2
// let: packed = lambda x: (x.reshape(-1, 32).astype(np.uint64) << np.arange(32).astype(np.uint64)).sum(1)
// run: bits block=32
// arg: in u32 {{packed(X)}}
// arg: in u32 {{packed(Y.T)}}
// arg: in s32 {{G(8, 8, 7)}}
// arg: out s32 {{np.array([[(X[i] ^ Y[:, j]).sum() for j in range(8)] for i in range(8)]) + G(8, 8, 7)}}
extern "C" __global__ void bits(const void* a, const void* b, const int* c, int* d) {
    fragment<matrix_a, 8, 8, 128, experimental::precision::b1, row_major> left;
    fragment<matrix_b, 8, 8, 128, experimental::precision::b1, col_major> right;
    fragment<accumulator, 8, 8, 128, int> sum;
    load_matrix_sync(left, (const int*)a, 128);
    load_matrix_sync(right, (const int*)b, 128);
    load_matrix_sync(sum, c, 8, mem_row_major);
    bmma_sync(sum, left, right, sum, experimental::bmmaBitOpXOR, experimental::bmmaAccumulateOpPOPC);
    store_matrix_sync(d, sum, 8, mem_row_major);
}
// Two warps through shared memory; the twin forgets the barrier.
template <bool WAIT> static __device__ void staged(const half* a, float* d) {
    __shared__ half tile[256];
    for (int i = threadIdx.x; i < 256; i += 64) tile[i] = a[i];
    if (WAIT) __syncthreads();
    fragment<matrix_a, 16, 16, 16, half, row_major> left;
    fragment<matrix_b, 16, 16, 16, half, row_major> right;
    fragment<accumulator, 16, 16, 16, float> sum;
    fill_fragment(sum, 1.0f);
    load_matrix_sync(left, tile, 16);
    load_matrix_sync(right, tile, 16);
    mma_sync(sum, left, right, sum);
    store_matrix_sync(d + 256 * (threadIdx.x / 32), sum, 16, mem_col_major);
}
// run: staged_right block=64
// arg: in f16 {{np.float16(A)}}
// arg: out f32 {{np.float32([(A @ A + 1).T, (A @ A + 1).T])}}
extern "C" __global__ void staged_right(const half* a, float* d) { staged<true>(a, d); }
// run: staged_wrong block=64
// arg: in f16 {{np.float16(A)}}
// arg: out f32 {{np.float32([(A @ A + 1).T, (A @ A + 1).T])}}
// finding: UninitShared SharedRace WarpRace
extern "C" __global__ void staged_wrong(const half* a, float* d) { staged<false>(a, d); }
// A store that runs over its buffer.
// run: beyond block=32
// arg: in f16 {{np.float16(A)}}
// arg: out f32 {{np.float32(A).ravel()[:240]}}
// finding: OutOfBounds
extern "C" __global__ void beyond(const half* a, float* d) {
    fragment<accumulator, 16, 16, 16, float> sum;
    fill_fragment(sum, 1.0f);
    store_matrix_sync(d, sum, 16, mem_row_major);
}
