//! The backend: threads, SIMD level, working memory, and dispatch from an erased call to a typed one.

use std::sync::{Arc, Mutex, PoisonError};

use flashcore_core::{
    AppendCall, Backend, BackendError, BackwardCall, DType, Data, DataMut, GroupedCall, HostCall, MergeCall,
    MoeCall, MoeGradientCall, QuantiseCall, Ran,
};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::{
    SimdLevel, Tiles, append, backward, cache,
    crew::{Crew, OpenMp},
    forward::{Queries, forward, is_serial},
    grouped::grouped,
    merge::merge,
    moe::{gradients, moe},
    narrow,
    output::Target,
    quantise::quantise,
    scratch::Scratch,
    simd::runner::Runner,
};

/// Most threads that the environment may request.
const MOST_THREADS: usize = 4096;

/// Nanoseconds of work below which waking other threads costs more than it saves.
const SERIAL: f64 = 25_000.0;
/// The same where threads of a program are waiting for work already.
const SERIAL_BESIDE: f64 = 6_000.0;

/// Attention on the CPU.
///
/// Clones share threads and working memory.
#[derive(Clone, Debug)]
pub struct Cpu {
    pool: Option<Arc<ThreadPool>>,
    /// Whose threads come before the pool's.
    openmp: Option<OpenMp>,
    runner: Runner,
    /// Sizes of blocks, where they are not the level's own.
    tiles: Option<Tiles>,
    /// Working memory of calls that are not running; a call takes one and puts it back.
    idle: Arc<Mutex<Vec<Scratch>>>,
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Cpu {
    /// Runs in rayon's current pool: all cores, unless the program says otherwise.
    pub fn new() -> Self {
        Self { pool: None, openmp: None, runner: Runner::detect(), tiles: None, idle: Arc::default() }
    }

    /// Runs on as many threads of its own as the variable `FLASHCORE_THREADS` says, as [`Self::new`] without it.
    pub fn from_environment() -> Result<Self, BackendError> {
        match std::env::var("FLASHCORE_THREADS").unwrap_or_default().as_str() {
            "" => Ok(Self::new()),
            text => match text.parse() {
                Ok(threads @ 1..=MOST_THREADS) => Self::with_threads(threads),
                _ => {
                    let reason =
                        format!("FLASHCORE_THREADS is `{text}`; use a number from 1 to {MOST_THREADS}");
                    Err(BackendError::Unavailable { backend: "cpu", reason })
                }
            },
        }
    }

    /// Runs on its own pool of `threads` threads.
    pub fn with_threads(threads: usize) -> Result<Self, BackendError> {
        let pool = ThreadPoolBuilder::new().num_threads(threads.max(1)).build();
        let pool = pool.map_err(|e| BackendError::Failed { backend: "cpu", source: Box::new(e) })?;
        Ok(Self::with_pool(Arc::new(pool)))
    }

    /// Runs in the caller's pool.
    pub fn with_pool(pool: Arc<ThreadPool>) -> Self {
        Self { pool: Some(pool), ..Self::new() }
    }

    /// Runs on the threads of the OpenMP that the program around it has loaded, as many as that allows; without one,
    /// where it would have run anyway. For libraries beside PyTorch, whose threads would otherwise be in the way.
    ///
    /// A forked child must not: OpenMP's threads stay behind in its parent.
    #[must_use]
    pub fn beside_openmp(self) -> Self {
        Self { openmp: OpenMp::of_program(), ..self }
    }

    /// Uses the instructions of `level`, or an error if this machine lacks them.
    pub fn with_simd(self, level: SimdLevel) -> Result<Self, BackendError> {
        let reason = || format!("this machine has no {level}; use SimdLevel::detect()");
        let missing = || BackendError::Unavailable { backend: "cpu", reason: reason() };
        Ok(Self { runner: Runner::new(level).ok_or_else(missing)?, ..self })
    }

    /// Works in blocks of these sizes instead of the usual ones: for tuning.
    #[must_use]
    pub fn with_tiles(self, tiles: Tiles) -> Self {
        Self { tiles: Some(tiles), ..self }
    }

    /// The sizes of the blocks it works in.
    pub fn tiles(&self) -> Tiles {
        self.tiles.unwrap_or_else(|| self.simd().usual_tiles())
    }

    /// How many threads compute.
    pub fn threads(&self) -> usize {
        self.on_crew(Crew::threads)
    }

    /// Nanoseconds of work that the calling thread does alone.
    const fn serial(&self) -> f64 {
        if self.openmp.is_some() { SERIAL_BESIDE } else { SERIAL }
    }

    fn on_crew<R: Send>(&self, f: impl FnOnce(Crew) -> R + Send) -> R {
        match self.openmp {
            Some(openmp) => f(Crew::Program(openmp)),
            None => self.install(|| f(Crew::Rayon)),
        }
    }

    /// The instructions in use.
    pub fn simd(&self) -> SimdLevel {
        self.runner.level()
    }

    /// Computes `call` in the caller's working memory; returns the kernel's name.
    ///
    /// Nothing is allocated when `scratch` has seen a call of this size.
    pub fn run_with(
        &self,
        call: &mut HostCall<'_>,
        scratch: &mut Scratch,
    ) -> Result<&'static str, BackendError> {
        if is_serial(call.problem(), self.serial()) {
            return self.run_here(call, scratch, Crew::Caller);
        }
        self.on_crew(|crew| self.run_here(call, scratch, crew))
    }

    /// Runs `f` in the backend's pool of rayon, or in the current one where it has none.
    pub fn install<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) => pool.install(f),
            None => f(),
        }
    }

    pub(crate) fn runner(&self) -> Runner {
        self.runner
    }

    /// Computes gradients in the caller's working memory; returns the kernel's name.
    pub fn backward_with(
        &self,
        call: &mut BackwardCall<'_>,
        scratch: &mut Scratch,
    ) -> Result<&'static str, BackendError> {
        let problem = call.problem();
        let dtypes = [problem.forward().dtype(), problem.forward().out_dtype(), problem.grad_dtype()];
        let known = |dtype: &DType| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
        if let Some(dtype) = dtypes.iter().find(|dtype| !known(dtype)) {
            return Err(unsupported(*dtype, "tensors"));
        }
        if backward::is_small(problem, self.serial()) {
            return Ok(backward::backward(call, self.runner, (scratch, Crew::Caller))?);
        }
        self.on_crew(|crew| Ok(backward::backward(call, self.runner, (scratch, crew))?))
    }

    /// Lends working memory to `run`.
    fn with_scratch<R>(&self, run: impl FnOnce(&mut Scratch) -> R) -> R {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scratch = idle().pop().unwrap_or_default();
        let result = run(&mut scratch);
        idle().push(scratch);
        result
    }

    fn run_here(
        &self,
        call: &mut HostCall<'_>,
        scratch: &mut Scratch,
        crew: Crew,
    ) -> Result<&'static str, BackendError> {
        if call.problem().kv_dtype() != call.problem().dtype() {
            return self.beside_cache(call, (scratch, crew));
        }
        if call.problem().dtype().is_narrow() {
            return narrow::forward(call, scratch, |call, scratch| self.compute(call, scratch, crew));
        }
        self.compute(call, scratch, crew)
    }

    /// Computes a call over a cache of 8 bits.
    fn beside_cache(
        &self,
        call: &mut HostCall<'_>,
        work: (&mut Scratch, Crew),
    ) -> Result<&'static str, BackendError> {
        let (with, [_, k, v]) = ((self.runner, self.tiles()), call.inputs());
        match (k, v) {
            (Data::E4M3(k), Data::E4M3(v)) => cache::forward(call, [k, v], with, work),
            (Data::E5M2(k), Data::E5M2(v)) => cache::forward(call, [k, v], with, work),
            _ => Err(unsupported(call.problem().kv_dtype(), "caches")),
        }
    }

    /// Computes a call; one of 8-bit tensors to f32.
    fn compute(
        &self,
        call: &mut HostCall<'_>,
        scratch: &mut Scratch,
        crew: Crew,
    ) -> Result<&'static str, BackendError> {
        let (problem, inputs) = (call.instance(), call.inputs());
        let (out, lse) = call.outputs();
        let with = (self.runner, self.tiles());
        let work = (scratch, crew);
        let kernel = match (inputs, out) {
            ([Data::F32(q), Data::F32(k), Data::F32(v)], DataMut::F32(out)) => {
                forward(problem, with, (Queries::Same(q), [k, v]), (Target::Same(out), lse), work)
            }
            ([Data::F16(q), Data::F16(k), Data::F16(v)], DataMut::F16(out)) => {
                forward(problem, with, (Queries::Same(q), [k, v]), (Target::Same(out), lse), work)
            }
            ([Data::F16(q), Data::F16(k), Data::F16(v)], DataMut::F32(out)) => {
                forward(problem, with, (Queries::Same(q), [k, v]), (Target::Wide(out), lse), work)
            }
            ([Data::BF16(q), Data::BF16(k), Data::BF16(v)], DataMut::BF16(out)) => {
                forward(problem, with, (Queries::Same(q), [k, v]), (Target::Same(out), lse), work)
            }
            ([Data::BF16(q), Data::BF16(k), Data::BF16(v)], DataMut::F32(out)) => {
                forward(problem, with, (Queries::Same(q), [k, v]), (Target::Wide(out), lse), work)
            }
            ([Data::E4M3(q), Data::E4M3(k), Data::E4M3(v)], DataMut::F32(out)) => {
                forward(problem, with, (Queries::Same(q), [k, v]), (Target::Wide(out), lse), work)
            }
            ([Data::E5M2(q), Data::E5M2(k), Data::E5M2(v)], DataMut::F32(out)) => {
                forward(problem, with, (Queries::Same(q), [k, v]), (Target::Wide(out), lse), work)
            }
            _ => return Err(unsupported(problem.dtype(), "tensors")),
        };
        Ok(kernel)
    }
}

fn unsupported(dtype: DType, what: &str) -> BackendError {
    let (what, instead) = (format!("{dtype} {what}"), "convert them to f32".to_owned());
    BackendError::Unsupported { backend: "cpu", what, instead }
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        let kernel = self.with_scratch(|scratch| self.run_with(call, scratch))?;
        Ok(Ran { kernel: kernel.to_owned() })
    }

    fn backward(&self, call: &mut BackwardCall<'_>) -> Result<Ran, BackendError> {
        let kernel = self.with_scratch(|scratch| self.backward_with(call, scratch))?;
        Ok(Ran { kernel: kernel.to_owned() })
    }

    fn append(&self, call: &mut AppendCall<'_>) -> Result<Ran, BackendError> {
        let dtype = call.problem().spec().dtype;
        let ran = match append::is_small(call.problem()) {
            true => append::append(call, Crew::Caller),
            false => self.on_crew(|crew| append::append(call, crew)),
        };
        let kernel = ran.ok_or_else(|| unsupported(dtype, "caches"))?;
        Ok(Ran { kernel: kernel.to_owned() })
    }

    fn merge(&self, call: &mut MergeCall<'_>) -> Result<Ran, BackendError> {
        let dtype = call.problem().dtype();
        let kernel = self
            .on_crew(|crew| merge(call, (self.runner, crew)))
            .ok_or_else(|| unsupported(dtype, "parts"))?;
        Ok(Ran { kernel: kernel.to_owned() })
    }

    fn quantise(&self, call: &mut QuantiseCall<'_>) -> Result<Ran, BackendError> {
        let dtype = call.problem().spec().dtype;
        let kernel = self
            .on_crew(|crew| quantise(call, (self.runner, crew)))
            .ok_or_else(|| unsupported(dtype, "tensors"))?;
        Ok(Ran { kernel: kernel.to_owned() })
    }

    fn moe(&self, call: &mut MoeCall<'_>) -> Result<Ran, BackendError> {
        let dtype = call.problem().dtype();
        let kernel = self
            .on_crew(|crew| moe(call, (self.runner, crew)))
            .ok_or_else(|| unsupported(dtype, "experts"))?;
        Ok(Ran { kernel: kernel.to_owned() })
    }

    fn moe_gradients(&self, call: &mut MoeGradientCall<'_>) -> Result<Ran, BackendError> {
        let dtype = call.problem().dtype();
        let kernel = self
            .on_crew(|crew| gradients(call, (self.runner, crew)))
            .ok_or_else(|| unsupported(dtype, "experts"))?;
        Ok(Ran { kernel: kernel.to_owned() })
    }

    fn grouped(&self, call: &mut GroupedCall<'_>) -> Result<Ran, BackendError> {
        let dtype = call.problem().dtype();
        let kernel = self
            .on_crew(|crew| grouped(call, (self.runner, crew)))
            .ok_or_else(|| unsupported(dtype, "factors"))?;
        Ok(Ran { kernel: kernel.to_owned() })
    }
}
