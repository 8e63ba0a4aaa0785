//! Writes random programs with the answers that GPU 0 gives: the corpus that the simulator is held to.
//!
//! `cargo run --release --example gpu_fuzz FILE [count] [first seed] [family,family…]`; kept under `tests/ptx/fuzz`.
//! Compiling is most of the work, so that all cores do it.
#![allow(unsafe_code)] // Launching kernels.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use flashcore::cuda::driver::{Compiler, Device, DeviceBuffer, Error, Module, Prepared, Stream};
use flashcore_ptx::{
    ident::Ident,
    launch::{LaunchSpec, Param, Slot},
    parse::parse,
};
use flashcore_testkit::fuzz::{Program, THREADS, corpus};

/// So many programs are asked for between two copies of the file.
const BATCH: usize = 256;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let file = args.first().expect("a file to write");
    let count: usize = args.get(1).map_or(96, |n| n.parse().expect("a number of programs"));
    let first: u64 = args.get(2).map_or(0, |n| n.parse().expect("a seed"));
    let families: Vec<&str> = args.get(3).map_or(vec![], |names| names.split(',').collect());
    let wanted = |p: &Program| families.is_empty() || families.iter().any(|f| p.name.starts_with(f));
    let programs: Vec<_> = (first..).map(Program::new).filter(wanted).take(count).collect();
    let name = Gpu::open().name;
    let mut answered = Vec::new();
    for batch in programs.chunks(BATCH) {
        answered.extend(ask(batch));
        let packed = corpus::write(&name, &answered).expect("memory can be written");
        std::fs::write(file, packed).expect("the file can be written");
    }
    println!("{} programs in {file}, {} failed", answered.len(), count - answered.len());
    std::process::exit(i32::from(answered.len() < count));
}

/// The programs that the GPU takes, with its answers.
fn ask(programs: &[Program]) -> Vec<(Program, Vec<u32>)> {
    let (next, answers) = (AtomicUsize::new(0), Mutex::new(vec![None; programs.len()]));
    let work = || {
        let gpu = Gpu::open();
        while let Some((at, program)) = Some(next.fetch_add(1, Ordering::Relaxed))
            .and_then(|at| programs.get(at).map(|program| (at, program)))
        {
            match gpu.run(program) {
                Ok(words) => answers.lock().expect("no thread panics")[at] = Some(words),
                Err(error) => println!("FAIL  {}: {error}", program.name),
            }
        }
    };
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(work))));
    let answers = answers.into_inner().expect("no thread panics");
    programs.iter().cloned().zip(answers).filter_map(|(program, words)| Some((program, words?))).collect()
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
