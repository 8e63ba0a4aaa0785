//! The repository's PTX tests on GPU 0: the same files, launches and expected bits as in the simulator.
//!
//! `cargo run --release --example gpu_ptx [FOLDER…]`, by default `tests/ptx` with its folders `fuzz`, `nvcc` and `triton`.
//! Each file runs in a process of its own, so that a kernel that traps or hangs costs that file alone; a few run at once,
//! since compiling is most of the work.
#![allow(unsafe_code)] // Launching kernels.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::atomic::{AtomicUsize, Ordering},
    thread::{self, sleep},
    time::{Duration, Instant},
};

use flashcore::cuda::driver::{Compiler, Device, DeviceBuffer, Module, Prepared, Stream};
use flashcore_testkit::ptxtest::{Case, load};

/// How long a file may take: its kernels are tiny.
const PATIENCE: Duration = Duration::from_secs(60);
/// Files that run at once.
const AT_ONCE: usize = 8;

fn main() {
    let args: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    if let [file] = args.as_slice()
        && file.is_file()
    {
        std::process::exit(i32::from(run_file(file) > 0));
    }
    let usual = ["", "fuzz", "nvcc", "triton"].map(|folder| Path::new("tests/ptx").join(folder)).to_vec();
    let folders = if args.is_empty() { usual } else { args };
    let files: Vec<_> = folders.iter().flat_map(|folder| files(folder)).collect();
    let failed = failures(&files);
    println!("{} files, {failed} failed", files.len());
    std::process::exit(i32::from(failed > 0));
}

/// Runs every file; how many failed.
fn failures(files: &[PathBuf]) -> usize {
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            failed.fetch_add(usize::from(!passes(file)), Ordering::Relaxed);
        }
    };
    thread::scope(|scope| (0..AT_ONCE).for_each(|_| drop(scope.spawn(work))));
    failed.into_inner()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder of tests");
    let mut files: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "ptx"));
    files.sort();
    files
}

/// Runs a file in a child; what it found has been printed.
fn passes(file: &Path) -> bool {
    let own = std::env::current_exe().expect("the path of this program");
    let mut child = Command::new(own).arg(file).spawn().expect("a child");
    let done = wait(&mut child);
    if done.is_none() {
        println!("FAIL  {}: no end after {} s", file.display(), PATIENCE.as_secs());
    }
    done == Some(true)
}

/// Whether a child ended well; nothing if it had to be ended.
fn wait(child: &mut Child) -> Option<bool> {
    let begin = Instant::now();
    loop {
        match child.try_wait().expect("a child of this process") {
            Some(status) => return Some(status.success()),
            None if begin.elapsed() > PATIENCE => {
                child.kill().expect("the child is still there");
                return None;
            }
            None => sleep(Duration::from_millis(5)),
        }
    }
}

/// Runs the cases of a file; returns how many failed.
fn run_file(file: &Path) -> usize {
    let gpu = Gpu::open();
    let cases = load(file).unwrap_or_else(|e| panic!("{e}"));
    // A launch with findings has no defined result.
    let failures: Vec<_> =
        cases.iter().filter(|case| case.findings.is_empty()).filter_map(|c| gpu.run(c).err()).collect();
    failures.iter().for_each(|error| println!("FAIL  {error}"));
    println!("{}: {} cases, {} failed", file.display(), cases.len(), failures.len());
    failures.len()
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
        let results = self.launch(case).map_err(|e| format!("{}: {e}", case.name))?;
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
