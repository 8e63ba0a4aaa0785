//! Few queries that the kernel for them does not take, such as those of latent attention, whose rows are wide: the general
//! kernel with all heads of a group as rows and keys split among CTAs, then the kernel that puts the parts together.

use flashcore_core::Problem;
use flashcore_tile::Element;

use super::{Gpu, Plan};
use crate::{
    combine,
    forward_sm80::{self, folded_step},
    launch::KernelConfig,
    parts::schedule::folded_tiles,
};

/// Most queries of a sequence that are few.
const MOST_QUERIES: usize = 16;
/// Most parts of a row: one warp reads all of them.
const MOST_PARTS: u32 = 32;
/// Fewest keys of a part: fewer would take less time than to start and to put together.
const FEWEST_KEYS: usize = 128;
/// Features that a lane puts together at once, where rows of the result are aligned to as many.
const WIDTH: u32 = 4;
const WHY: &str = "few queries: the heads of a group share a tile, and its keys are split among CTAs";

/// The plan for few queries that `whole`, by the general kernel, would compute with a head in each tile; `None` where queries
/// are not few, or where options need that.
pub(super) fn plan(whole: &Plan, problem: &Problem, gpu: &Gpu) -> Option<Plan> {
    let KernelConfig::Sm80(cfg) = *whole.kernel() else { return None };
    if gpu.capability < (8, 0) || !suits(problem) {
        return None;
    }
    let parts = parts(problem, &cfg.shape, gpu)?;
    let cfg = forward_sm80::Config { parts: Some(parts), output: Element::F32, ..cfg };
    let plan = plan_of(cfg, parts, problem, gpu, WHY);
    Some(Plan { passed_over: whole.passed_over.clone(), ..plan })
}

/// Both launches.
pub(super) fn plan_of(
    cfg: forward_sm80::Config,
    parts: u32,
    problem: &Problem,
    gpu: &Gpu,
    why: &'static str,
) -> Plan {
    let (out, dim) = (problem.out_dtype(), cfg.dim_v);
    let wide = dim.is_multiple_of(WIDTH) && cfg.access.bytes() >= WIDTH * out.bytes() as u32;
    let combine =
        combine::Config { out, dim, parts, width: if wide { WIDTH } else { 1 }, lengths: cfg.lengths };
    let launches = [KernelConfig::Sm80(cfg), KernelConfig::Combine(combine)];
    Plan::of(launches.map(|kernel| Plan::launch(kernel, problem, gpu)).to_vec(), gpu, why)
}

/// Whether queries are few, rows of a group lie at equal distances, and nothing is asked for that parts of rows do not have.
fn suits(problem: &Problem) -> bool {
    let special = problem.batch_invariant()
        || problem.accumulate()
        || problem.sinks().is_some()
        || problem.bias().is_some()
        || problem.dropout().is_some();
    !special && (1..=MOST_QUERIES).contains(&problem.longest_q()) && folded_step(problem).is_some()
}

/// Parts of the keys of a row, so that CTAs fill the GPU once; `None` where nothing is gained.
fn parts(problem: &Problem, shape: &forward_sm80::Shape, gpu: &Gpu) -> Option<u32> {
    let tiles = folded_tiles(problem, shape.tile_m(problem.dim_v() as u32));
    let room = u64::from(gpu.sms * shape.ctas_per_sm);
    let keys = problem.longest_kv();
    let most = (keys / FEWEST_KEYS.max(shape.tile_n as usize)).min(MOST_PARTS as usize) as u32;
    let mut parts = 1;
    while 2 * parts <= most && 2 * u64::from(parts) * tiles <= room {
        parts *= 2;
    }
    // Sequences may be more than rows, and each has a CTA of its own.
    let ctas = folded_tiles(problem, combine::ROWS).max(tiles * u64::from(parts));
    let counted = ctas.max(problem.rows() as u64 * u64::from(parts)) <= i32::MAX as u64;
    let several = keys > shape.tile_n as usize && (parts > 1 || problem.group() > 1);
    (counted && several).then_some(parts)
}
