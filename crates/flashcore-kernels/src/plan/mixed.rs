//! Batches that mix prompts and single queries, packed: one kernel for sequences of many queries, then one for the others.
//!
//! Which sequence is whose is found on the device, from lengths that the host never sees. Both kernels overwrite rows of
//! their own sequences alone.

use flashcore_core::{Problem, Sequences};

use super::{Gpu, Plan, PlanError, access, check, decode, decode_config, plan_general};
use crate::{
    decode::{MOST_SEQUENCES, Order, Shape},
    launch::KernelConfig,
    parts::share::{Share, most_short_rows},
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
    let general = plan_general(problem, gpu, alignment)?;
    let (shape, _) = decode::shape(problem, gpu);
    let (mut long, mut short) =
        (*general.kernel(), decode_config(problem, gpu, half, short_shape(problem, shape))?);
    if let (KernelConfig::Sm80(long), KernelConfig::Decode(short)) = (&mut long, &mut short) {
        long.share = Share::Long;
        short.share = Share::Short;
    }
    let launches = [long, short].map(|kernel| Plan::launch(kernel, problem, gpu));
    let why = "prompts by a kernel for many queries, other sequences by one for few; each finds its own on the device";
    let reason = "forward_sm90: packed sequences and keys in pages have no tensor map".to_owned();
    Ok(Some(Plan { passed_over: vec![reason], ..Plan::of(launches.to_vec(), gpu, why) }))
}

/// The tile for the short sequences: keys of all of them are shared evenly, unless bits must not depend on the batch.
fn short_shape(problem: &Problem, shape: Shape) -> Shape {
    let blocks = crate::parts::share::short_queries(problem) * problem.group();
    let even = !problem.batch_invariant() && problem.sequences() <= MOST_SEQUENCES as usize;
    let order = if even { Order::Even } else { Order::Grid };
    let blocks = (blocks as u32).div_ceil(16).max(1);
    Shape { blocks, q_in_registers: shape.q_in_registers && blocks == 1, order, ..shape }
}
