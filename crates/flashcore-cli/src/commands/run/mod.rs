//! `flashcore run`: attention on made or given tensors, checked against f64 and timed.
//!
//! The path: [`Flags`] → [`Request`] (everything that can be wrong is found here) → [`Tensors`] → backend →
//! [`Check`] and [`Latency`] → [`report`]. Results reach their files only after they passed. [`simulate`] does the same
//! with the kernel of a GPU that need not be there.

mod check;
mod flags;
mod report;
mod request;
mod simulate;
mod tensors;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use flashcore::Backend;
use flashcore_lab::{latency::Latency, memory, simulator::Simulator};

pub use self::flags::Flags;
use self::{
    check::Check,
    report::{Computed, Effort, RunReport},
    request::Request,
    tensors::Tensors,
};
use crate::{
    backends,
    error::{CliError, Verdict},
    output::Output,
};

/// Runs attention and says how right and how fast it was.
pub fn execute(flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    let (backends, simulated) = (flags.backend.clone(), flags.simulated()?);
    let request = Request::parse(flags)?;
    // The tensors by themselves first: how much comparing takes is found by walking through all rows.
    memory::check(request.bytes())?;
    memory::check(request.bytes().saturating_add(Check::bytes(&request.problem)))?;
    match simulated {
        Some(gpu) => simulate::execute(request, Simulator::new(gpu).with_table(backends.table()?), output),
        None => run(request, &backends.candidates()?, output),
    }
}

fn run(mut request: Request, candidates: &[Arc<dyn Backend>], output: &Output) -> Result<Verdict, CliError> {
    let mut tensors = Tensors::prepare(&mut request)?;
    let forward = |backend: &dyn Backend| tensors.forward(backend, &request.problem);
    let (backend, ran) = backends::first_to_take(candidates, forward)?;
    let first = tensors.digest();
    let latency = Latency::measure(request.times, || tensors.forward(backend, &request.problem).map(drop))?;
    let check = Check::of(&request.problem, &tensors, tensors.digest() == first)?;
    if check.pass {
        request.save(&tensors)?;
    }
    let computed = Computed { backend: backend.name(), kernel: ran.kernel };
    output.show(&RunReport::new(&request, computed, &check, Effort::Timed(latency)))?;
    Ok(Verdict::from_bool(check.pass))
}
