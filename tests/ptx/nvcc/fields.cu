// Parts of words: fields of a few bits, as code that is compiled for a debugger sets and reads them: bits of one word, one by one.
// options: -arch=sm_90 -G
struct Parts {
    unsigned kind : 3, count : 12, rest : 17;
};
static __device__ void set(Parts& parts, unsigned kind, unsigned count) {
    parts.kind = kind;
    parts.count = count;
}

// run: sets_fields block=32
// arg: out u32 {{10 * np.arange(32) + 5}}
extern "C" __global__ void sets_fields(unsigned* out) {
    Parts parts;
    set(parts, 5, threadIdx.x);
    Parts copied = parts;
    out[threadIdx.x] = 10 * copied.count + copied.kind;
}
// run: reads_what_was_not_set block=32
// arg: out u32 _*32
// finding: UninitRegister
extern "C" __global__ void reads_what_was_not_set(unsigned* out) {
    Parts parts;
    set(parts, 5, threadIdx.x);
    out[threadIdx.x] = 10 * parts.count + parts.rest;
}

// Every lane reads and writes a byte of its own, in words that it shares; the warps share words too.
// run: counts_bytes block=64
// arg: out u32 {{3 * np.arange(64) + 1}}
extern "C" __global__ void counts_bytes(unsigned* out) {
    __shared__ volatile unsigned char bytes[64];
    unsigned at = threadIdx.x % 32 * 2 + threadIdx.x / 32;
    bytes[at] = 3 * threadIdx.x;
    bytes[at] = bytes[at] + 1;
    out[threadIdx.x] = bytes[at];
}
// The twin writes words that other lanes have read.
// run: overwrites_too_soon block=32
// arg: out u32 _*32
// finding: WarpRace
extern "C" __global__ void overwrites_too_soon(unsigned* out) {
    __shared__ unsigned words[32];
    words[threadIdx.x] = threadIdx.x;
    __syncwarp();
    unsigned other = words[31 - threadIdx.x];
    words[threadIdx.x] = other + 1;
    __syncwarp();
    out[threadIdx.x] = words[threadIdx.x];
}
