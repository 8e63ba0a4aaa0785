//! Writes random programs with the answers that GPU 0 gives: the corpus that the simulator is held to.
//!
//! `cargo run --release --example gpu_fuzz FOLDER [count] [first seed] [family,family…]`; kept under `tests/ptx/fuzz`.
#![allow(unsafe_code)] // Launching kernels.

use flashcore::cuda::driver::{Compiler, Device, DeviceBuffer, Error, Module, Prepared, Stream};
use flashcore_ptx::{
    ident::Ident,
    launch::{LaunchSpec, Param, Slot},
    parse::parse,
};
use flashcore_testkit::fuzz::{Program, THREADS};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let folder = args.first().expect("a folder to write to");
    let count: u64 = args.get(1).map_or(96, |n| n.parse().expect("a number of programs"));
    let first: u64 = args.get(2).map_or(0, |n| n.parse().expect("a seed"));
    let families: Vec<&str> = args.get(3).map_or(vec![], |names| names.split(',').collect());
    let wanted = |p: &Program| families.is_empty() || families.iter().any(|f| p.name.starts_with(f));
    let gpu = Gpu::open();
    let mut refused = 0;
    for program in (first..).map(Program::new).filter(wanted).take(count as usize) {
        match gpu.run(&program) {
            Ok(answers) => {
                let path = format!("{folder}/{}.ptx", program.name);
                std::fs::write(&path, program.with_answers(&gpu.name, &answers))
                    .expect("the folder is there");
            }
            Err(error) => {
                refused += 1;
                println!("FAIL  {}: {error}", program.name);
            }
        }
    }
    println!("{} programs in {folder}, {refused} failed", count - refused);
    std::process::exit(i32::from(refused > 0));
}

struct Gpu {
    name: String,
    device: Device,
    stream: Stream,
    compiler: Compiler,
}

impl Gpu {
    fn open() -> Self {
        let device = Device::new(0).expect("a GPU");
        let stream = Stream::new(device).expect("a stream");
        let compiler = Compiler::from_env().expect("a compiler");
        Self { name: device.props().name.clone(), device, stream, compiler }
    }

    fn run(&self, program: &Program) -> Result<Vec<u32>, Error> {
        let target = parse(&program.text).expect("the program is legal").module.target;
        let cubin = self.compiler.compile(&program.text, target, self.device)?;
        let kernel = Module::load(self.device, &cubin)?.kernel("fuzz")?;
        let prepared = Prepared::new(&kernel, &launch())?;
        let bytes: Vec<u8> = program.inputs.iter().flat_map(|v| v.to_le_bytes()).collect();
        let source = DeviceBuffer::from_host(&self.stream, &bytes)?;
        let target = DeviceBuffer::from_host(&self.stream, &bytes)?;
        // SAFETY: both buffers hold one word per thread and register, and live until the copy below has waited.
        unsafe { prepared.launch(&self.stream, &[source.address(), target.address()])? };
        let answers = target.to_host(&self.stream)?;
        Ok(answers.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }
}

fn launch() -> LaunchSpec {
    LaunchSpec {
        entry: Ident::new("fuzz").expect("a legal name"),
        grid: [1, 1, 1],
        block: [THREADS as u32, 1, 1],
        cluster: [1, 1, 1],
        shared_bytes: 0,
        dependent: false,
        params: vec![Param::Buffer(Slot(0)), Param::Buffer(Slot(1))],
        workspace: Vec::new(),
    }
}
