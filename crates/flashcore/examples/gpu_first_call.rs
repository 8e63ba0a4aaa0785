//! How long the first call of an attention kernel takes on GPU 0, from opening FlashCore to the result: compiled by the
//! driver without any cache, and from a warm cache. Each call is made in a process of its own, which has started the
//! driver and filled its tensors on the GPU before the clock starts.
//!
//! `cargo run --release --example gpu_first_call [runs]`; exits with 1 if a median misses its bar.
#![allow(unsafe_code)] // The launch takes device addresses.

use std::{
    error::Error,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Instant,
};

use flashcore::{
    DType, Dims, Layout, Mask, Problem, Spec,
    cuda::{
        Cuda, DeviceTensors,
        driver::{Device, DeviceBuffer, Stream},
    },
};

/// The word that makes this program the process of one call; dim and mask follow.
const CALL: &str = "--call";
/// Batch, heads, sequence.
const ROWS: [usize; 3] = [2, 8, 1024];
const KERNELS: [(&str, &str); 4] = [("64", "full"), ("64", "causal"), ("128", "full"), ("128", "causal")];
/// How a call gets its machine code, and the most milliseconds that may take.
const ROUTES: [(&str, f64); 2] = [("Jit", 1000.0), ("Cache", 20.0)];

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args[..] {
        [CALL, dim, mask] => call(dim, mask).map(|()| true),
        [runs] => runs.parse().map_err(Into::into).and_then(measure),
        _ => measure(5),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs every kernel by every route in processes of their own; tells whether all bars hold.
fn measure(runs: usize) -> Outcome<bool> {
    let scratch = Scratch::new();
    println!("{:<8}{:<8}{:<8}{:>10}{:>10}{:>10}   ms", "route", "dim", "mask", "least", "median", "most");
    let mut good = true;
    for (route, bar) in ROUTES {
        let mut all = Vec::new();
        for (dim, mask) in KERNELS {
            let times = repeat(route, dim, mask, runs, &scratch.0)?;
            println!("{route:<8}{dim:<8}{mask:<8}{}", Summary::of(&times));
            all.extend(times);
        }
        let Summary { median, most, .. } = Summary::of(&all);
        let kept = median < bar;
        good &= kept;
        println!(
            "{{\"first_call\":\"{route}\",\"kernels\":{},\"runs\":{runs},\"median_ms\":{median:.3},\
             \"worst_ms\":{most:.3},\"bar_ms\":{bar},\"ok\":{kept}}}",
            KERNELS.len()
        );
    }
    Ok(good)
}

/// The milliseconds of `runs` first calls.
fn repeat(route: &str, dim: &str, mask: &str, runs: usize, cache: &Path) -> Outcome<Vec<f64>> {
    let once = || child(route, dim, mask, cache);
    if route == "Cache" {
        // Fills the cache; later processes find the kernel there.
        child("", dim, mask, cache)?;
    }
    (0..runs).map(|_| once()).collect()
}

/// One call in a process of its own; `route` is what its machine code must come from, where it is not empty.
fn child(route: &str, dim: &str, mask: &str, cache: &Path) -> Outcome<f64> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args([CALL, dim, mask]).env("FLASHCORE_CACHE_DIR", cache).env_remove("FLASHCORE_CACHE");
    if route == "Jit" {
        // Neither our cache nor the driver's own.
        command.envs([("FLASHCORE_CACHE", "off"), ("FLASHCORE_PTXAS", "off"), ("CUDA_CACHE_DISABLE", "1")]);
    }
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let [came, milliseconds] = text.split_whitespace().collect::<Vec<_>>()[..] else {
        return Err(format!("{}{text}", String::from_utf8_lossy(&output.stderr)).into());
    };
    if !route.is_empty() && came != route {
        return Err(format!("the kernel came by {came}, not by {route}").into());
    }
    Ok(milliseconds.parse()?)
}

/// The process of one call: prints where the machine code came from and the milliseconds.
fn call(dim: &str, mask: &str) -> Outcome<()> {
    let problem = problem(dim.parse()?, if mask == "causal" { Mask::CAUSAL } else { Mask::NONE })?;
    let device = Device::new(0)?;
    let stream = Stream::new(device)?;
    let bytes = (problem.q().span() * problem.dtype().bytes()) as u64;
    let buffer = || -> Outcome<DeviceBuffer> {
        let mut buffer = DeviceBuffer::new(device, bytes)?;
        buffer.fill(&stream, 0)?;
        Ok(buffer)
    };
    let [q, k, v, out] = [buffer()?, buffer()?, buffer()?, buffer()?];
    stream.synchronize()?;
    let start = Instant::now();
    let ready = Cuda::open(0)?.prepare(&problem)?;
    let [q, k, v, out] = [&q, &k, &v, &out].map(DeviceBuffer::address);
    // SAFETY: four live buffers with the problem's layout, which nothing else touches until the wait is over.
    unsafe { ready.launch(&DeviceTensors { q, k, v, out, ..DeviceTensors::default() }, &stream)? };
    stream.synchronize()?;
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;
    println!("{:?} {milliseconds}", ready.route());
    Ok(())
}

fn problem(dim: usize, mask: Mask) -> Outcome<Problem> {
    let [batch, heads, seq] = ROWS;
    let layout = Layout::bhsd(Dims::new(batch, heads, seq, dim))?;
    Ok(Spec { mask, ..Spec::new(DType::F16, layout, layout, layout) }.parse()?)
}

struct Summary {
    least: f64,
    median: f64,
    most: f64,
}

impl Summary {
    fn of(times: &[f64]) -> Self {
        let mut sorted = times.to_vec();
        sorted.sort_by(f64::total_cmp);
        Self { least: sorted[0], median: sorted[sorted.len() / 2], most: sorted[sorted.len() - 1] }
    }
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:>10.2}{:>10.2}{:>10.2}", self.least, self.median, self.most)
    }
}

/// A cache folder of our own, removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        Self(std::env::temp_dir().join(format!("flashcore-first-call-{}", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Nothing depends on it being gone.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
