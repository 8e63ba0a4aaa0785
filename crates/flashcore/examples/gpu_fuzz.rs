//! Writes random straight-line programs with the answers that GPU 0 gives: the corpus that the simulator is held to.
//!
//! `cargo run --release --example gpu_fuzz FOLDER [count] [seed]`; kept under `tests/ptx/fuzz`.
#![allow(unsafe_code)] // Launching kernels.

use std::fmt::Write;

use flashcore::cuda::driver::{Compiler, Device, DeviceBuffer, Module, Prepared, Stream};
use flashcore_ptx::{
    ident::Ident,
    launch::{LaunchSpec, Param, Slot},
    parse::parse,
};
use flashcore_testkit::Rng;

const REGISTERS: usize = 8;
const THREADS: usize = 32;
const LENGTH: usize = 48;

/// Instructions over 32-bit registers: `D` is written, `A`, `B`, `C` are read, `N` is a number below 32.
const FORMS: &[&str] = &[
    "add.u32 D, A, B;",
    "sub.s32 D, A, B;",
    "mul.lo.u32 D, A, B;",
    "mul.hi.u32 D, A, B;",
    "mul.hi.s32 D, A, B;",
    "mad.lo.s32 D, A, B, C;",
    "sad.u32 D, A, B, C;",
    "min.s32 D, A, B;",
    "max.u32 D, A, B;",
    "abs.s32 D, A;",
    "neg.s32 D, A;",
    "and.b32 D, A, B;",
    "or.b32 D, A, B;",
    "xor.b32 D, A, B;",
    "not.b32 D, A;",
    "shl.b32 D, A, N;",
    "shr.u32 D, A, B;",
    "shr.s32 D, A, N;",
    "shf.l.wrap.b32 D, A, B, C;",
    "shf.r.clamp.b32 D, A, B, N;",
    "bfe.u32 D, A, N, 9;",
    "bfe.s32 D, A, N, 5;",
    "bfi.b32 D, A, B, N, 7;",
    "brev.b32 D, A;",
    "popc.b32 D, A;",
    "clz.b32 D, A;",
    "bfind.u32 D, A;",
    "prmt.b32 D, A, B, C;",
    "lop3.b32 D, A, B, C, 0x96;",
    "lop3.b32 D, A, B, C, 0xca;",
    "dp4a.u32.u32 D, A, B, C;",
    "add.rn.f32 D, A, B;",
    "add.rz.f32 D, A, B;",
    "add.rn.ftz.f32 D, A, B;",
    "mul.rn.f32 D, A, B;",
    "fma.rn.f32 D, A, B, C;",
    "fma.rm.f32 D, A, B, C;",
    "min.f32 D, A, B;",
    "max.NaN.f32 D, A, B;",
    "cvt.rni.s32.f32 D, A;",
    "cvt.rzi.u32.f32 D, A;",
    "cvt.rn.f32.s32 D, A;",
    "cvt.rz.f32.u32 D, A;",
    "cvt.rn.f16x2.f32 D, A, B;",
    "cvt.rn.bf16x2.f32 D, A, B;",
    "add.rn.f16x2 D, A, B;",
    "fma.rn.f16x2 D, A, B, C;",
    "fma.rn.bf16x2 D, A, B, C;",
    "setp.lt.f32 %p, A, B; selp.b32 D, A, C, %p;",
    "setp.ge.s32 %p, A, B; selp.b32 D, B, C, %p;",
    "setp.hi.u32 %p, A, B; @%p xor.b32 D, A, C;",
    "shfl.sync.bfly.b32 D, A, N, 0x1f, 0xffffffff;",
    "shfl.sync.up.b32 D, A, N, 0x0, 0xffffffff;",
    "shfl.sync.idx.b32 D, A, B, 0x1f, 0xffffffff;",
    "redux.sync.add.u32 D, A, 0xffffffff;",
    "setp.ne.u32 %p, A, B; vote.sync.ballot.b32 D, %p, 0xffffffff;",
];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let folder = args.first().expect("a folder to write to");
    let count = args.get(1).map_or(32, |n| n.parse().expect("a number of programs"));
    let seed: u64 = args.get(2).map_or(1, |n| n.parse().expect("a seed"));
    let gpu = Gpu::open();
    for n in 0..count {
        let mut rng = Rng::new(seed + n);
        let (text, inputs) = (program(&mut rng), inputs(&mut rng));
        let answers = gpu.run(&text, &inputs);
        let path = format!("{folder}/{:03}.ptx", seed + n);
        std::fs::write(&path, with_answers(&text, &inputs, &answers)).expect("the folder is there");
    }
    println!("{count} programs in {folder}");
}

/// Numbers of all kinds: small, large, floats, and the edges of f32.
fn inputs(rng: &mut Rng) -> Vec<u32> {
    const EDGES: [u32; 8] =
        [0, 0x8000_0000, 0x3f80_0000, 0x7f80_0000, 0xff80_0000, 0x0000_0001, 0x7f7f_ffff, 0xffff_ffff];
    let number = |rng: &mut Rng| match rng.next_u64() % 4 {
        0 => EDGES[(rng.next_u64() % 8) as usize],
        1 => (rng.normal() * 100.0).to_bits(),
        2 => (rng.next_u64() % 64) as u32,
        _ => rng.next_u64() as u32,
    };
    (0..REGISTERS * THREADS).map(|_| number(rng)).collect()
}

fn program(rng: &mut Rng) -> String {
    let mut body = String::new();
    for _ in 0..LENGTH {
        let form = FORMS[(rng.next_u64() % FORMS.len() as u64) as usize];
        // Sources differ: assemblers fold `min x, x` and the like, and then keep bits of a NaN that hardware would not.
        let order = rng.permutation(REGISTERS);
        let [a, b, c] = [0, 1, 2].map(|i| format!("%r{}", order[i]));
        let d = format!("%r{}", rng.next_u64() % REGISTERS as u64);
        let n = (rng.next_u64() % 32).to_string();
        let place = |word: &str| match word.trim_end_matches([',', ';']) {
            "D" => word.replace('D', &d),
            "A" => word.replace('A', &a),
            "B" => word.replace('B', &b),
            "C" => word.replace('C', &c),
            "N" => word.replace('N', &n),
            _ => word.to_owned(),
        };
        let line: Vec<_> = form.split(' ').map(place).collect();
        writeln!(body, "    {}", line.join(" ")).expect("a string grows");
    }
    let each = |f: &dyn Fn(usize) -> String| (0..REGISTERS).map(f).collect::<String>();
    let loads = each(&|r| format!("    ld.global.b32 %r{r}, [%in+{}];\n", r * THREADS * 4));
    let stores = each(&|r| format!("    st.global.b32 [%out+{}], %r{r};\n", r * THREADS * 4));
    format!(
        ".visible .entry fuzz(.param .u64 source, .param .u64 target)\n{{\n    .reg .b32 %r<{REGISTERS}>, %t; \
         .reg .b64 %in, %out, %at; .reg .pred %p;\n    mov.u32 %t, %tid.x; mul.wide.u32 %at, %t, 4;\n    \
         ld.param.u64 %in, [source]; add.u64 %in, %in, %at;\n    ld.param.u64 %out, [target]; \
         add.u64 %out, %out, %at;\n{loads}{body}{stores}    ret;\n}}\n"
    )
}

fn header() -> &'static str {
    ".version 7.8\n.target sm_80\n.address_size 64\n\n"
}

fn with_answers(text: &str, inputs: &[u32], answers: &[u32]) -> String {
    let numbers = |values: &[u32]| {
        let rows = values.chunks(THREADS).map(|row| {
            let row: Vec<_> = row.iter().map(|v| format!("{v:#x}")).collect();
            row.join(" ")
        });
        rows.collect::<Vec<_>>().join("\n// and: ")
    };
    format!(
        "// Random instructions with the answers of an H200.\n{}// run: fuzz block={THREADS}\n// arg: in u32 {}\n\
         // arg: out u32 {}\n\n{text}",
        header(),
        numbers(inputs),
        numbers(answers)
    )
}

struct Gpu {
    device: Device,
    stream: Stream,
    compiler: Compiler,
}

impl Gpu {
    fn open() -> Self {
        let device = Device::new(0).expect("a GPU");
        let stream = Stream::new(device).expect("a stream");
        Self { device, stream, compiler: Compiler::from_env().expect("a compiler") }
    }

    fn run(&self, text: &str, inputs: &[u32]) -> Vec<u32> {
        let text = format!("{}{text}", header());
        let target = parse(&text).expect("the program is legal").module.target;
        let cubin = self.compiler.compile(&text, target, self.device).expect("the program compiles");
        let kernel =
            Module::load(self.device, &cubin).and_then(|m| m.kernel("fuzz")).expect("the kernel is there");
        let spec = LaunchSpec {
            entry: Ident::new("fuzz").expect("a legal name"),
            grid: [1, 1, 1],
            block: [THREADS as u32, 1, 1],
            cluster: [1, 1, 1],
            shared_bytes: 0,
            dependent: false,
            params: vec![Param::Buffer(Slot(0)), Param::Buffer(Slot(1))],
            workspace: Vec::new(),
        };
        let prepared = Prepared::new(&kernel, &spec).expect("the launch is legal");
        let bytes: Vec<u8> = inputs.iter().flat_map(|v| v.to_le_bytes()).collect();
        let source = DeviceBuffer::from_host(&self.stream, &bytes).expect("room for inputs");
        let target = DeviceBuffer::from_host(&self.stream, &bytes).expect("room for answers");
        // SAFETY: both buffers hold one word per thread and register, and live until the copy below has waited.
        unsafe { prepared.launch(&self.stream, &[source.address(), target.address()]).expect("a launch") };
        let answers = target.to_host(&self.stream).expect("answers");
        answers.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }
}
