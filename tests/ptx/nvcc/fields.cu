// Fields of a few bits, as code that is compiled for a debugger sets and reads them: bits of one word, one by one.
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
