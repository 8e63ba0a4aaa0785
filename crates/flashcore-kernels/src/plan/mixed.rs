//! Batches that mix prompts and single queries, packed: one kernel for sequences of many queries, then one for the others.
//!
//! The device decides which kernel takes a sequence, from lengths that the host never sees. Each kernel writes only rows
//! of its own sequences.

use flashcore_core::{Problem, Sequences};

use super::{Gpu, Plan, PlanError, access, check, decode, decode_config, plan_many};
use crate::{
    decode::{MOST_SEQUENCES, Order, Shape},
    launch::KernelConfig,
    parts::share::{Share, most_short_rows, short_queries},
};

/// The plan for packed queries over pages where sequences may be short or long; `None` where there is no such mixture, or no
/// kernel for the short ones.
pub(super) fn plan(problem: &Problem, gpu: &Gpu, alignment: u64) -> Result<Option<Plan>, PlanError> {
    let input = check(problem, gpu)?;
    let packed = matches!(problem.sequences_kind(), Sequences::PackedQueries { .. });
    if !packed || problem.sequences() < 2 || problem.group() > most_short_rows(problem) {
        return Ok(None);
    }
    let Ok(half) = decode::accept_rows_apart(problem, input, gpu, access(problem, alignment)) else {
        return Ok(None);
    };
    let many = plan_many(problem, gpu, alignment)?;
    let (mut long, mut short) =
        (*many.kernel(), decode_config(problem, gpu, half, short_shape(problem, gpu))?);
    match &mut long {
        KernelConfig::Sm80(long) => long.share = Share::Long,
        KernelConfig::Sm90(long) => long.share = Share::Long,
        _ => return Ok(None),
    }
    if let KernelConfig::Decode(short) = &mut short {
        short.share = Share::Short;
    }
    let launches = [long, short].map(|kernel| Plan::launch(kernel, problem, gpu));
    let why = "prompts go to a kernel for many queries, other sequences to one for few; each finds its own on the device";
    Ok(Some(Plan { passed_over: many.passed_over, ..Plan::of(launches.to_vec(), gpu, why) }))
}

/// The tile for the short sequences: keys of all of them are shared evenly.
fn short_shape(problem: &Problem, gpu: &Gpu) -> Shape {
    let (shape, _) = decode::shape_for(problem, gpu, short_queries(problem) * problem.group());
    let even = problem.sequences() <= MOST_SEQUENCES as usize;
    Shape { order: if even { Order::Even } else { Order::Grid }, ..shape }
}
