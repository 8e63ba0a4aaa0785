//! Times that the project promises: first calls and the host's share of a launch.

use crate::{
    bare::Bare,
    bench::{self, Bench, Outcome, PARAMS, TMA_COPY, expect, matrix_map},
};
use flashcore_cuda::{
    Compiler, Cubin, Graph, Module, Prepared, Route,
    cache::{Cache, CacheOptions},
};
use flashcore_ptx::launch::{Param, Slot};
use std::{
    error::Error,
    fmt,
    path::PathBuf,
    time::{Duration, Instant},
};

/// A folder of our own below the system's temporary one, removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("flashcore-selfcheck-{name}-{}", std::process::id())))
    }

    fn cache(&self) -> Result<Cache, flashcore_cuda::cache::CacheError> {
        Cache::open(&self.0, CacheOptions::default())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Nothing depends on it being gone.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn timed(bench: &Bench, compiler: &Compiler) -> Result<(Cubin, Duration), flashcore_cuda::Error> {
    let start = Instant::now();
    let cubin = compiler.compile(TMA_COPY.ptx, TMA_COPY.target, bench.device)?;
    Module::load(bench.device, &cubin)?.kernel(TMA_COPY.name)?;
    Ok((cubin, start.elapsed()))
}

pub(crate) fn routes(bench: &Bench) -> Outcome {
    let scratch = Scratch::new("routes");
    let ptxas = bench.compiler.ptxas.clone();
    let mut times = Vec::new();
    for (name, ptxas, route) in [("ptxas", ptxas.clone(), Route::Ptxas), ("JIT", None, Route::Jit)] {
        if route == Route::Ptxas && ptxas.is_none() {
            times.push("no ptxas found".to_owned());
            continue;
        }
        let compiler = Compiler::new(Some(scratch.cache()?), ptxas);
        let (built, fresh) = timed(bench, &compiler)?;
        let (found, cached) = timed(bench, &compiler)?;
        expect(built.route() == route && found.route() == Route::Cache, || {
            format!("{:?} {:?}", built.route(), found.route())
        })?;
        expect(built.bytes() == found.bytes() && built.report() == found.report(), || {
            "the cache changed it".into()
        })?;
        times.push(format!("{name} {:.1} ms, then {:.2} ms cached", ms(fresh), ms(cached)));
    }
    Ok(times.join("; "))
}

pub(crate) fn first_call_jit(bench: &Bench) -> Outcome {
    let (_, time) = timed(bench, &Compiler::new(None, None))?;
    expect(time < Duration::from_secs(1), || format!("{:.1} ms", ms(time)))?;
    Ok(format!("{:.1} ms", ms(time)))
}

/// From opening the cache to a kernel ready to launch, with whatever ptxas search the environment implies.
pub(crate) fn first_call_cached(bench: &Bench) -> Outcome {
    let scratch = Scratch::new("first");
    let compiler = Compiler { cache: Some(scratch.cache()?), ..Compiler::from_env()? };
    timed(bench, &compiler)?;
    let start = Instant::now();
    let compiler = Compiler { cache: Some(scratch.cache()?), ..Compiler::from_env()? };
    let (cubin, _) = timed(bench, &compiler)?;
    let time = start.elapsed();
    expect(cubin.route() == Route::Cache, || format!("{:?}", cubin.route()))?;
    expect(time < Duration::from_millis(20), || format!("{:.2} ms", ms(time)))?;
    Ok(format!("{:.2} ms", ms(time)))
}

/// Four tensor maps and two buffers, other addresses each time, beside a replay with the same addresses, the driver's own
/// calls with nothing to do before them, and an empty kernel. They take turns, so that whatever else the machine does
/// meets them alike.
pub(crate) fn host_cost(bench: &Bench) -> Outcome {
    let maps = (0..4).map(|slot| matrix_map(slot, 128, 64));
    let rest = [Param::Buffer(Slot(4)), Param::Buffer(Slot(5))].into_iter().chain((1..=6).map(Param::U32));
    let spec = bench::spec(&PARAMS, [1, 1, 1], 32, maps.chain(rest).collect());
    let prepared = bench.prepare(&PARAMS, &spec)?;
    let memory = bench.poisoned(1 << 20)?;
    let buffers = |i: u64| [0, 1, 2, 3, 4, 5].map(|slot| memory.address() + (i % 64) * 16 + slot * 65_536);
    let bare = Bare::new(bench, memory.address())?;
    // SAFETY: the kernel writes one word into `memory`, which outlives the wait after each burst.
    let ours = |i| Ok(unsafe { prepared.launch(&bench.stream, &buffers(i)) }?);
    let graph = Graph::capture(&bench.stream, |stream| {
        // SAFETY: as above; the graph is replayed only here.
        unsafe { prepared.launch(stream, &buffers(0)) }
    })?;
    let launches: [(&str, &Launch); 5] = [
        ("flashcore", &ours),
        ("flashcore, replayed", &|_| Ok(graph.launch(&bench.stream)?)),
        ("driver alone", &|_| bare.launch()),
        ("driver alone, older call", &|_| bare.older_call()),
        ("driver alone, empty kernel", &|_| bare.nothing()),
    ];
    let costs = bench.device.with_context(|| interleaved(bench, launches.map(|(_, launch)| launch)))??;
    check_sum(bench, &prepared, buffers(0))?;
    let lines: Vec<String> =
        launches.iter().zip(&costs).map(|((name, _), cost)| format!("{name} {cost}")).collect();
    expect(costs[0].median < 5.0, || lines.join("; "))?;
    Ok(lines.join("; "))
}

/// A launch, given its number.
type Launch<'a> = dyn Fn(u64) -> Result<(), Box<dyn Error>> + 'a;

/// Microseconds of host time per launch, over bursts.
struct Cost {
    least: f64,
    median: f64,
    p90: f64,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "min {:.2} median {:.2} p90 {:.2} us", self.least, self.median, self.p90)
    }
}

/// Launches of a burst: far fewer than the driver queues without waiting.
const BURST: u64 = 100;
const ROUNDS: usize = 200;
const WARM_UP: usize = 10;

fn interleaved<const N: usize>(bench: &Bench, launches: [&Launch; N]) -> Result<[Cost; N], Box<dyn Error>> {
    let mut times = [const { Vec::new() }; N];
    for round in 0..WARM_UP + ROUNDS {
        for (launch, times) in launches.iter().zip(&mut times) {
            let time = burst(bench, launch)?;
            if round >= WARM_UP {
                times.push(time);
            }
        }
    }
    Ok(times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        Cost { least: times[0], median: times[ROUNDS / 2], p90: times[ROUNDS * 9 / 10] }
    }))
}

fn burst(bench: &Bench, launch: &Launch) -> Result<f64, Box<dyn Error>> {
    let start = Instant::now();
    (0..BURST).try_for_each(launch)?;
    let time = start.elapsed();
    bench.stream.synchronize()?;
    Ok(time.as_secs_f64() * 1e6 / BURST as f64)
}

fn check_sum(bench: &Bench, prepared: &Prepared, buffers: [u64; 6]) -> Result<(), Box<dyn Error>> {
    let out = bench.poisoned(4)?;
    let [q, k, v, o, lse, _] = buffers;
    // SAFETY: the kernel writes one word to `out`; the copy below waits.
    unsafe { prepared.launch(&bench.stream, &[q, k, v, o, lse, out.address()])? };
    let sum = bench.read_u32(&out)?[0];
    expect(sum == 21, || format!("1 + … + 6 = {sum}"))
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
