//! The repository's PTX tests on GPU 0: the same files, launches and expected bits as in the simulator.
//!
//! `cargo run --release --example gpu_ptx [folder]`, by default `tests/ptx`.
#![allow(unsafe_code)] // Launching kernels.

use std::{collections::HashMap, path::PathBuf};

use flashcore::cuda::driver::{Compiler, Device, DeviceBuffer, Module, Prepared, Stream};
use flashcore_testkit::ptxtest::{Case, load};

fn main() {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "tests/ptx".to_owned());
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).expect("a folder of tests").filter_map(|e| Some(e.ok()?.path())).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "ptx"));
    files.sort();
    let gpu = Gpu::open();
    let (mut passed, mut failed) = (0, 0);
    for case in files.iter().flat_map(|file| load(file).unwrap_or_else(|e| panic!("{e}"))) {
        if !case.findings.is_empty() {
            continue;
        }
        match gpu.run(&case) {
            Ok(()) => passed += 1,
            Err(error) => {
                failed += 1;
                println!("FAIL  {}: {error}", case.name);
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    std::process::exit(i32::from(failed > 0));
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

    /// Launches a case and compares; the error says what is wrong.
    fn run(&self, case: &Case) -> Result<(), String> {
        let results = self.launch(case).map_err(|e| e.to_string())?;
        case.check(|slot| results.get(&slot.0).map(Vec::as_slice))
    }

    fn launch(&self, case: &Case) -> Result<HashMap<u8, Vec<u8>>, flashcore::cuda::driver::Error> {
        let module = &case.parsed.module;
        let cubin = self.compiler.compile(&module.to_string(), module.target, self.device)?;
        let kernel = Module::load(self.device, &cubin)?.kernel(case.spec.entry.as_str())?;
        let prepared = Prepared::new(&kernel, &case.spec)?;
        let mut buffers = HashMap::new();
        for bound in &case.buffers {
            let poison = vec![0xa5; bound.len()];
            let bytes = bound.input.as_deref().unwrap_or(&poison);
            buffers.insert(bound.slot.0, DeviceBuffer::from_host(&self.stream, bytes)?);
        }
        let most = buffers.keys().copied().max().map_or(0, |slot| slot as usize + 1);
        let mut addresses = vec![0; most.max(prepared.buffer_count())];
        buffers.iter().for_each(|(slot, buffer)| addresses[*slot as usize] = buffer.address());
        // SAFETY: the buffers are as large as the test says and live until the copies below have waited.
        unsafe { prepared.launch(&self.stream, &addresses)? };
        buffers.into_iter().map(|(slot, buffer)| Ok((slot, buffer.to_host(&self.stream)?))).collect()
    }
}
