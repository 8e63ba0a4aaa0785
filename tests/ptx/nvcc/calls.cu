// Functions that are really called: parameters, results, structs by value, recursion, pointers, virtual functions.
// options: -arch=sm_90 -lineinfo

struct Pair { int a; double b; };

static __device__ __noinline__ int add(int a, int b) { return a + b; }
static __device__ __noinline__ int mul(int a, int b) { return a * b; }
static __device__ __noinline__ Pair shift(Pair p, int by) { return {p.a + by, p.b * by}; }
static __device__ __noinline__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }
static __device__ __noinline__ void put(int* to, int value) { *to = value; }

// let: T = np.arange(40)
// run: direct block=40
// arg: out s32 {{T * 3 + 7}}
extern "C" __global__ void direct(int* out) { put(out + threadIdx.x, add(mul(threadIdx.x, 3), 7)); }

// run: structs block=4
// arg: out f64 {{np.float64([0 + 2 + 0.5 * 2, 1 + 2 + 1.5 * 2, 2 + 2 + 2.5 * 2, 3 + 2 + 3.5 * 2])}}
extern "C" __global__ void structs(double* out) {
    Pair p = shift({(int)threadIdx.x, threadIdx.x + 0.5}, 2);
    out[threadIdx.x] = p.a + p.b;
}

// run: recursive block=10
// arg: out s32 0 1 1 2 3 5 8 13 21 34
extern "C" __global__ void recursive(int* out) { out[threadIdx.x] = fibonacci(threadIdx.x); }

typedef int (*Operation)(int, int);
static __device__ __noinline__ int sub(int a, int b) { return a - b; }
__device__ Operation table[3] = {add, mul, sub};

// Each lane calls through a pointer of its own.
// run: pointers block=6
// let: W = np.array([0, 1, 2, 2, 1, 0])
// arg: in s32 {{W}}
// arg: out s32 {{np.array([[t + 3, t * 3, t - 3][w] for t, w in enumerate(W)])}}
extern "C" __global__ void pointers(const int* which, int* out) {
    int t = threadIdx.x;
    out[t] = table[which[t]](t, 3);
}

// run: no_function block=1
// arg: in s32 3
// arg: out s32 0
// finding: BadCall OutOfBounds
extern "C" __global__ void no_function(const int* which, int* out) {
    Operation f = which[0] < 3 ? table[which[0]] : (Operation)0;
    out[0] = f(1, 2);
}

struct Shape {
    __device__ virtual int area() const = 0;
};
struct Square : Shape {
    int side;
    __device__ Square(int side) : side(side) {}
    __device__ int area() const override { return side * side; }
};
struct Bar : Shape {
    int a, b;
    __device__ Bar(int a, int b) : a(a), b(b) {}
    __device__ int area() const override { return a * b; }
};
static __device__ __noinline__ int area_of(const Shape* shape) { return shape->area(); }

// run: virtuals block=4
// arg: out s32 0 10 4 30
extern "C" __global__ void virtuals(int* out) {
    int t = threadIdx.x;
    Square square(t);
    Bar bar(t, 10);
    out[t] = area_of(t % 2 ? (Shape*)&bar : (Shape*)&square);
}

// run: switches block=8
// arg: out s32 10 21 32 43 54 65 76 -1
extern "C" __global__ void switches(int* out) {
    int t = threadIdx.x, x;
    switch (t) {
        case 0: x = 10; break;
        case 1: x = add(t, 20); break;
        case 2: x = mul(t, 16); break;
        case 3: x = 43; out[7] = -1; break;
        case 4: x = 50 + t; break;
        case 5: x = 60 + t; break;
        case 6: x = 70 + t; break;
        default: return;
    }
    out[t] = x;
}

// An array that is indexed by what nobody knows lies in local memory.
// let: V = np.arange(64)
// run: locals block=32
// arg: in s32 {{V}}
// arg: out s32 {{np.array([sorted(V[t:t+8], reverse=True)[t % 8] for t in range(32)])}}
extern "C" __global__ void locals(const int* in, int* out) {
    int t = threadIdx.x, a[8];
    for (int i = 0; i < 8; i++) a[i] = in[t + i];
    for (int i = 0; i < 8; i++)
        for (int j = i + 1; j < 8; j++)
            if (a[i] < a[j]) { int x = a[i]; a[i] = a[j]; a[j] = x; }
    out[t] = a[(t + in[0]) & 7];
}

__constant__ float weights[4] = {0.5f, 1.0f, 2.0f, 4.0f};
__constant__ int offsets[2][2] = {{1, 2}, {3, 4}};

// run: constants block=4
// arg: out f32 {{np.float32([1.5, 3, 5, 8])}}
extern "C" __global__ void constants(float* out) {
    int t = threadIdx.x;
    out[t] = weights[t] + offsets[t / 2][t % 2];
}

// run: asserts block=4
// arg: in s32 1 2 3 0
// finding: AssertFailed
#include <cassert>
extern "C" __global__ void asserts(const int* in) { assert(in[threadIdx.x] > 0); }

#include <cstdio>
// run: prints block=2
// arg: out s32 0 1
extern "C" __global__ void prints(int* out) {
    printf("thread %d: %f %s\n", threadIdx.x, 0.5 * threadIdx.x, "done");
    out[threadIdx.x] = threadIdx.x;
}

// A write behind the end, in a function.
// run: outside block=1
// arg: out s32 0
// finding: OutOfBounds
extern "C" __global__ void outside(int* out) { put(out + 1, 3); }

// A function that meets others at a barrier, and one that forgets it.
static __device__ __noinline__ int neighbour(int* cells, int t, bool wait) {
    cells[t] = t;
    if (wait) __syncthreads();
    return cells[(t + 33) % 64];
}
// run: meets block=64
// arg: out s32 {{(np.arange(64) + 33) % 64}}
extern "C" __global__ void meets(int* out) {
    __shared__ int cells[64];
    out[threadIdx.x] = neighbour(cells, threadIdx.x, true);
}
// run: races block=64
// arg: out s32 {{(np.arange(64) + 33) % 64}}
// finding: UninitShared SharedRace WarpRace
extern "C" __global__ void races(int* out) {
    __shared__ int cells[64];
    out[threadIdx.x] = neighbour(cells, threadIdx.x, false);
}
