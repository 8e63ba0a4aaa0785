//! The backend: threads, SIMD level, and the way from a call to its rows.

use std::sync::Arc;

use flashcore_core::{Backend, BackendError, Data, DataMut, Element, HostCall, Problem, Ran};
use rayon::{ThreadPool, ThreadPoolBuilder, prelude::*};

use crate::{
    SimdLevel,
    out::SharedOut,
    rowwise::{KeyValues, Logit, Row},
};

/// Attention on the CPU.
#[derive(Clone, Debug)]
pub struct Cpu {
    pool: Option<Arc<ThreadPool>>,
    level: SimdLevel,
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Cpu {
    /// Runs in rayon's current pool: all cores, unless the program says otherwise.
    pub fn new() -> Self {
        Self { pool: None, level: SimdLevel::detect() }
    }

    /// Runs on `threads` threads of its own.
    pub fn with_threads(threads: usize) -> Result<Self, BackendError> {
        let pool = ThreadPoolBuilder::new().num_threads(threads.max(1)).build();
        let pool = pool.map_err(|e| BackendError::Failed { backend: "cpu", source: Box::new(e) })?;
        Ok(Self::with_pool(Arc::new(pool)))
    }

    /// Runs in the caller's pool.
    pub fn with_pool(pool: Arc<ThreadPool>) -> Self {
        Self { pool: Some(pool), ..Self::new() }
    }

    /// Uses the instructions of `level`, or an error if this machine lacks them.
    pub fn with_simd(self, level: SimdLevel) -> Result<Self, BackendError> {
        if !level.is_available() {
            let reason = format!("this machine has no {level}; use SimdLevel::detect()");
            return Err(BackendError::Unavailable { backend: "cpu", reason });
        }
        Ok(Self { level, ..self })
    }

    /// The instructions in use.
    pub fn simd(&self) -> SimdLevel {
        self.level
    }
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        let problem = call.problem();
        let inputs = call.inputs();
        let (out, lse) = call.outputs();
        let run = || match (inputs, out) {
            ([Data::F32(q), Data::F32(k), Data::F32(v)], DataMut::F32(out)) => rows(problem, [q, k, v], out, lse),
            ([Data::F16(q), Data::F16(k), Data::F16(v)], DataMut::F16(out)) => rows(problem, [q, k, v], out, lse),
            ([Data::BF16(q), Data::BF16(k), Data::BF16(v)], DataMut::BF16(out)) => {
                rows(problem, [q, k, v], out, lse)
            }
            _ => Err(BackendError::Unsupported {
                backend: "cpu",
                what: format!("{} tensors", problem.dtype()),
                instead: "convert them to f32".to_owned(),
            }),
        };
        match &self.pool {
            Some(pool) => pool.install(run),
            None => run(),
        }?;
        Ok(Ran { kernel: format!("rowwise-{}", self.level) })
    }
}

fn rows<T: Element>(
    problem: &Problem,
    [q, k, v]: [&[T]; 3],
    out: &mut [T],
    lse: Option<&mut [f32]>,
) -> Result<(), BackendError> {
    let out = SharedOut::new(out, *problem.out(), lse);
    let logit = Logit { scale: problem.scale(), softcap: problem.softcap() };
    let heads = problem.heads_q();
    (0..problem.sequences() * heads).into_par_iter().for_each(|unit| {
        let (n, head) = (unit / heads, unit % heads);
        let s = problem.sequence(n);
        let kv =
            KeyValues::new([k, v], [problem.k(), problem.v()], s.batch, head / problem.group(), s.kv_start);
        let unused = if problem.batch() == problem.sequences() { problem.seq_q() - s.q_start } else { s.q_len };
        for i in 0..unused.max(s.q_len) {
            let sink = problem.sinks().filter(|_| i < s.q_len).map(|sinks| sinks[head]);
            let mut row = Row::new(problem.dim_v(), sink);
            if i < s.q_len {
                let start = problem.q().row(s.batch, head, s.q_start + i);
                let keys = problem.mask().keys(i, s.q_len, s.kv_len);
                row.attend(&q[start..start + problem.dim_qk()], &kv, keys, logit);
            }
            // SAFETY: every (sequence, head, row) is visited once, by one thread.
            unsafe { out.write([s.batch, head, s.q_start + i], row.lse(), |to| row.store(to)) };
        }
    });
    Ok(())
}
