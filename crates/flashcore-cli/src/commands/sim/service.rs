//! Launches for Python: the request is data, the arrays are bytes, the answer is JSON.

use std::path::Path;

use flashcore_ptx::{launch::Slot, module::Kernel};
use flashcore_sim::Buffer;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    SimFailure, bound, parse_text,
    request::{HowRequest, Known, LaunchRequest, Ran, run_all},
    stats,
};
use crate::simulation;

/// What Python asks for.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct Request {
    /// The program.
    ptx: String,
    /// How messages call it.
    name: String,
    arrays: Vec<ArrayRequest>,
    launches: Vec<LaunchRequest>,
    how: HowRequest,
}

/// What is known of an array besides its bytes.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct ArrayRequest {
    name: String,
    /// What findings call it.
    label: String,
    element: String,
    shape: Vec<usize>,
    initialised: bool,
}

/// Runs a request as long as `going` says so; arrays come back in their order.
pub fn simulate(
    text: &str,
    contents: Vec<Vec<u8>>,
    going: &(dyn Fn() -> bool + Sync),
) -> Result<(String, Vec<Vec<u8>>), SimFailure> {
    let request: Request =
        serde_json::from_str(text).map_err(|error| SimFailure::Script(error.to_string()))?;
    if contents.len() > bound::MOST {
        return Err(SimFailure::TooMany { given: contents.len(), most: bound::MOST });
    }
    let parsed = parse_text(Path::new(&request.name), &request.ptx)?;
    let find = |name: &str| {
        let at = request.arrays.iter().position(|array| array.name == name)?;
        let ArrayRequest { element, shape, .. } = &request.arrays[at];
        Some(Known { slot: Slot(at as u8), element, shape })
    };
    let specs =
        request.launches.iter().map(|launch| launch.spec(&parsed, &find)).collect::<Result<_, _>>()?;
    let count = contents.len();
    let pairs = request.arrays.iter().zip(contents).enumerate();
    let buffer = |(at, (array, bytes)): (usize, (&ArrayRequest, Vec<u8>))| Buffer {
        slot: Slot(at as u8),
        bytes,
        initialised: array.initialised,
        name: Some(array.label.clone()),
    };
    let mut ran = run_all(&parsed, specs, pairs.map(buffer).collect(), &request.how.options()?, going)?;
    let answer = Value::Array(ran.iter().map(told).collect());
    let last = ran.pop().map(|ran| ran.outcome.buffers).unwrap_or_default();
    Ok((answer.to_string(), last.into_iter().take(count).map(|buffer| buffer.bytes).collect()))
}

fn told(ran: &Ran) -> Value {
    let answer =
        json!({ "kernel": ran.spec.entry.to_string(), "grid": ran.spec.grid, "block": ran.spec.block });
    simulation::merged(simulation::merged(answer, simulation::json(&ran.outcome)), stats::json(ran))
}

/// The kernels of a text: names, parameters, and what they say about their launch.
pub fn kernels(ptx: &str) -> Result<String, SimFailure> {
    let parsed = parse_text(Path::new("<ptx>"), ptx)?;
    let described = |kernel: &Kernel| {
        let param = |p: &flashcore_ptx::module::KernelParam| json!({ "name": p.name.to_string(), "type": p.ty.text(), "bytes": p.bytes(), "array": p.len.is_some() });
        json!({
            "name": kernel.name.to_string(),
            "params": kernel.params.iter().map(param).collect::<Vec<_>>(),
            "block": kernel.directives.required_threads,
            "cluster": kernel.directives.required_cluster,
        })
    };
    Ok(Value::Array(parsed.module.kernels.iter().map(described).collect()).to_string())
}
