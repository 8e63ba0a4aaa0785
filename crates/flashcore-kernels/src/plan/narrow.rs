//! Tiles of the Hopper kernel for tensors of 8 bits, and the launches around it.

use flashcore_core::Problem;
use flashcore_tile::Element;

use super::{
    Gpu, Plan, PlanError, Tile,
    hopper::{SLAB, THREE_CONSUMERS, TWO_CONSUMERS, WHOLE_64, WHOLE_128, order, with_policy},
};
use crate::{
    forward_sm90::{self, ROWS_PER_GROUP, Settles, Shape},
    launch::{KernelConfig, Launch, Subject},
    turn_values,
};

/// Features of values up to which sums fit in registers twice, beside scores.
const TWICE: usize = 128;

/// Keys of a tile.
const TILE_KEYS: u32 = 128;

/// Whether blocks with factors are whole rows of consumers and whole tiles of keys: scores of a tile then have one factor.
pub(super) fn check_blocks(problem: &Problem, [q, k]: [usize; 2]) -> Result<(), String> {
    let (rows, keys) = (ROWS_PER_GROUP as usize, TILE_KEYS as usize);
    let whole = |block: usize, unit: usize, all: usize| block.is_multiple_of(unit) || block >= all;
    if whole(q, rows, problem.seq_q()) && whole(k, keys, problem.seq_kv()) {
        return Ok(());
    }
    Err(format!(
        "its factors are of blocks of a multiple of {rows} rows of q and {keys} of k, not {q} and {k}"
    ))
}

/// The tile, and why.
pub(super) fn shape(problem: &Problem) -> (Shape, &'static str) {
    let (stages, staging) = match problem.dim_qk().max(problem.dim_v()) {
        0..=64 => (4, WHOLE_64),
        65..=128 => (4, WHOLE_128),
        // What fits beside two tiles of Q.
        _ => (2, SLAB),
    };
    let shape = Shape {
        consumers: 2,
        tile_n: TILE_KEYS,
        stages,
        q_stages: 2,
        staging,
        budget: Some(TWO_CONSUMERS),
        order: order(problem),
        ctas_per_sm: 1,
        turn: if problem.dim_v() <= TWICE { 2 } else { 1 },
    };
    let why = match settles(problem, &shape) {
        Settles::Parts => "the output takes half of the registers; scores and sums take turns in others",
        _ => "two consumers leave registers for sums in f32 beside those of tensor cores",
    };
    (shape, why)
}

/// When sums are added up in f32.
pub(super) fn settles(problem: &Problem, shape: &Shape) -> Settles {
    match problem.dim_v() {
        _ if !problem.dtype().is_narrow() => Settles::AtEnd,
        0..=TWICE if shape.turn == 1 => Settles::Tiles,
        0..=TWICE => Settles::Pairs,
        _ => Settles::Parts,
    }
}

/// How the kernel is cut and paced, if not as the rules say: for comparisons.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NarrowForm {
    /// Consumers of 64 rows.
    pub consumers: u32,
    /// Keys of a tile.
    pub tile_n: u32,
    /// K and V tiles in flight.
    pub stages: u32,
    /// When sums are added up in f32.
    pub settles: Settles,
    /// Whether consumers multiply in turn.
    pub in_turn: bool,
}

impl NarrowForm {
    /// The same plan in this form, where it is one for tensors of 8 bits.
    pub(super) fn plan(&self, problem: &Problem, plan: Plan) -> Result<Plan, PlanError> {
        let KernelConfig::Sm90(mut kernel) = *plan.kernel() else { return Ok(plan) };
        let Self { consumers, tile_n, stages, settles, in_turn } = *self;
        let turn = if settles == Settles::Pairs { 2 } else { 1 };
        let budget = Some(if consumers > 2 { THREE_CONSUMERS } else { TWO_CONSUMERS });
        kernel.shape = Shape { consumers, tile_n, stages, turn, budget, ..kernel.shape };
        kernel = with_policy(forward_sm90::Config { settles, ..kernel });
        kernel.policy.in_turn = in_turn && settles != Settles::Parts;
        let fits = Tile::Sm90(kernel.shape).check().and_then(|()| {
            let plan = plan.by(KernelConfig::Sm90(kernel), problem);
            plan.check_resources(problem).map(|()| plan)
        });
        match fits {
            _ if !kernel.narrow() => Ok(plan),
            Ok(plan) => Ok(plan),
            Err(misfit) => Err(PlanError::Kernel { reason: misfit.to_string() }),
        }
    }
}

/// Turns the values, unless they are, before `kernel` multiplies them.
pub(super) fn launches(kernel: forward_sm90::Config, problem: &Problem, gpu: &Gpu) -> Vec<Launch> {
    let turn = turn_values::Config { dim: kernel.dim_v, lengths: kernel.lengths };
    let subject = || Subject::Forward(Box::new(problem.clone()));
    let mut extent = forward_sm90::extent(kernel, problem, gpu.sms);
    if problem.turned() {
        return vec![Launch { kernel: KernelConfig::Sm90(kernel), subject: subject(), extent: Some(extent) }];
    }
    extent.workspace.push(turn_values::workspace(problem));
    vec![
        Launch {
            kernel: KernelConfig::TurnValues(turn),
            subject: subject(),
            // Launches of a plan share their scratch memory.
            extent: turn_values::extent(problem, extent.workspace.clone()),
        },
        Launch { kernel: KernelConfig::Sm90(kernel), subject: subject(), extent: Some(extent) },
    ]
}

/// Element type of keys and values, under queries of `input`.
pub(super) fn cache(problem: &Problem, input: Element) -> Element {
    if problem.kv_dtype() == problem.dtype() { input } else { Element::E4m3 }
}

/// What the general kernel asks of a cache of 8 bits, which it copies two elements at a time.
pub(super) fn check_cache(problem: &Problem, gpu: &Gpu, alignment: u64) -> Result<(), PlanError> {
    if !problem.kv_dtype().is_narrow() {
        return Ok(());
    }
    if gpu.capability < (8, 0) {
        return Err(refused("keys of 8 bits are widened from compute capability 8.0 on"));
    }
    let dims = [problem.dim_qk(), problem.dim_v()];
    let strides = [problem.k(), problem.v()].map(|layout| layout.strides()).into_iter();
    let odd = strides.flat_map(|strides| strides.into_iter().take(3)).chain(dims).any(|n| n % 2 == 1);
    if odd || alignment % 2 == 1 {
        return Err(refused(
            "two neighbours of 8 bits are moved at once, from even addresses and by even strides",
        ));
    }
    Ok(())
}

/// Why no kernel takes a problem of 8-bit tensors, where the Hopper kernel does not.
pub(super) fn refused(reason: &str) -> PlanError {
    PlanError::Narrow { reason: reason.to_owned() }
}

impl Plan {
    /// The Hopper kernel with what comes before it.
    pub(super) fn narrow(
        kernel: forward_sm90::Config,
        problem: &Problem,
        gpu: &Gpu,
        why: &'static str,
    ) -> Self {
        let launches = launches(kernel, problem, gpu);
        Self { main: launches.len() - 1, ..Self::of(launches, gpu, why) }
    }
}
