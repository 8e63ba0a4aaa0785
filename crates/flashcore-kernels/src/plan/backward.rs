//! How gradients are computed on a GPU: the terms of each row, the gradients of the sinks, then the products.
//!
//! [`plan_backward`] tries the kernel families from the most special to the most general. A family gives the launches of
//! the products; all launches name the same workspaces, in which the terms of the rows come first.

use flashcore_core::{BackwardProblem, DType, Problem};
use flashcore_ptx::launch::Workspace;
use flashcore_tile::Element;

use super::{
    Gpu, Misfit, Plan, PlanError, Tile, access_to, backward_general, backward_hopper, check,
    check_capability, general,
};
use crate::{
    backward_rows::{self, sinks},
    backward_sm80, backward_sm90, backward_sums,
    launch::{KernelConfig, Launch, Subject},
    parts::{bias::BiasKind, lengths::LengthsKind, mask::Sides, portion::Access, schedule::Side},
};

/// How gradients are computed on a Hopper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// Two kernels, for keys and for queries.
    Split,
    /// The same with these tiles, but for their order.
    SplitBy([backward_sm90::Shape; 2]),
    /// One kernel, with dQ summed in memory, where it takes the problem; otherwise two.
    Fused,
    /// The same with this tile.
    FusedBy(backward_sm90::Shape),
}

/// Plans gradients; `alignment` is what all addresses of tensors are multiples of, in bytes.
pub fn plan_backward(problem: &BackwardProblem, gpu: &Gpu, alignment: u64) -> Result<Plan, PlanError> {
    check_backward(problem, gpu)?;
    plan_backward_by(problem, gpu, alignment, backward_hopper::form(problem, gpu))
}

/// As [`plan_backward`], but in this form where a Hopper's kernels take the problem: for comparisons.
pub fn plan_backward_by(
    problem: &BackwardProblem,
    gpu: &Gpu,
    alignment: u64,
    form: Form,
) -> Result<Plan, PlanError> {
    check_backward(problem, gpu)?;
    match backward_hopper::accept(problem, gpu, alignment) {
        Ok(half) => assemble(problem, gpu, alignment, backward_hopper::products(problem, half, form)?),
        Err(reason) => {
            let passed_over = vec![format!("backward_sm90: {reason}")];
            Ok(Plan { passed_over, ..plan_backward_general(problem, gpu, alignment)? })
        }
    }
}

/// As [`plan_backward`], but always the general kernels: for comparing them with others.
pub fn plan_backward_general(
    problem: &BackwardProblem,
    gpu: &Gpu,
    alignment: u64,
) -> Result<Plan, PlanError> {
    let input = check_backward(problem, gpu)?;
    let any = general_config(problem, input, gpu, access_of(problem, alignment))?;
    let side = |side| backward_general::with_shape(backward_sm80::Config { side, ..any }, gpu);
    let ((keys, why), (queries, _)) = (side(Side::Keys)?, side(Side::Queries)?);
    if [keys, queries]
        .iter()
        .any(|cfg| cfg.side.tile_count(problem.forward(), cfg.tile_rows()) > i32::MAX as u64)
    {
        return Err(PlanError::Tiles);
    }
    let kernels = [keys, queries].map(KernelConfig::BackwardSm80).to_vec();
    assemble(problem, gpu, alignment, Products { workspace: Vec::new(), kernels, why })
}

/// The plan that computes gradients with exactly these tiles of the general kernels, the queries' first; for tuning.
pub fn plan_backward_tiles(
    problem: &BackwardProblem,
    gpu: &Gpu,
    alignment: u64,
    tiles: [backward_sm80::Shape; 2],
) -> Result<Plan, Misfit> {
    let input = check_backward(problem, gpu)?;
    let any = general_config(problem, input, gpu, access_of(problem, alignment))?;
    let mut kernels = Vec::new();
    for (side, shape) in [Side::Keys, Side::Queries].into_iter().zip(tiles.into_iter().rev()) {
        Tile::BackwardSm80(shape).check()?;
        let cfg = backward_sm80::Config { side, shape, ..any };
        if !backward_general::fits(&cfg, gpu) {
            let (bytes, most) = ((shape.ctas_per_sm * cfg.shared_bytes()).into(), gpu.shared_bytes.into());
            return Err(Misfit::SharedMemory { bytes, most });
        }
        kernels.push(KernelConfig::BackwardSm80(cfg));
    }
    Ok(assemble(problem, gpu, alignment, Products { workspace: Vec::new(), kernels, why: "asked for" })?)
}

/// A general kernel for a problem, but for its side and shape.
fn general_config(
    problem: &BackwardProblem,
    input: Element,
    gpu: &Gpu,
    access: Access,
) -> Result<backward_sm80::Config, PlanError> {
    let forward = problem.forward();
    Ok(backward_sm80::Config {
        target: general::target(gpu),
        side: Side::Keys,
        input,
        output: if problem.grad_dtype() == DType::F32 { Element::F32 } else { input },
        accumulate: problem.accumulate(),
        dim_qk: forward.dim_qk() as u32,
        dim_v: forward.dim_v() as u32,
        shape: backward_general::ANY,
        mask: Sides::of(forward),
        lengths: LengthsKind::of(forward).ok_or(PlanError::Lengths)?,
        softcap: forward.softcap().is_some(),
        bias: BiasKind::of(forward),
        dropout: forward.dropout().is_some(),
        access,
    })
}

/// What every row of the tensors of the products is aligned to.
fn access_of(problem: &BackwardProblem, alignment: u64) -> Access {
    let forward = problem.forward();
    let inputs = [forward.q(), forward.k(), forward.v(), problem.d_out()];
    let gradients = [problem.dq(), problem.dk(), problem.dv()];
    let inputs = inputs.map(|layout| (layout, forward.dtype())).into_iter();
    access_to(inputs.chain(gradients.map(|layout| (layout, problem.grad_dtype()))), alignment)
}

/// What a family of kernels adds to a plan.
pub(super) struct Products {
    /// Scratch memory beside the terms of rows.
    pub(super) workspace: Vec<Workspace>,
    /// The one that does most of the work comes first.
    pub(super) kernels: Vec<KernelConfig>,
    pub(super) why: &'static str,
}

/// Joins the launches that all families share with those of one.
fn assemble(
    problem: &BackwardProblem,
    gpu: &Gpu,
    alignment: u64,
    products: Products,
) -> Result<Plan, PlanError> {
    let forward = problem.forward();
    let lengths = LengthsKind::of(forward).ok_or(PlanError::Lengths)?;
    let workspace: Vec<_> =
        [backward_rows::workspace(forward)].into_iter().chain(products.workspace).collect();
    let rows = KernelConfig::BackwardRows(backward_rows::Config::of(problem, alignment));
    let accumulate = problem.accumulate();
    let sinks = forward
        .sinks()
        .map(|sinks| KernelConfig::BackwardSinks(sinks::Config { sinks, lengths, accumulate }));
    let kernels: Vec<_> = [rows].into_iter().chain(sinks).chain(products.kernels).collect();
    let main = 1 + usize::from(sinks.is_some());
    let launches = kernels.into_iter().map(|kernel| launch(kernel, problem, gpu, &workspace)).collect();
    Ok(Plan { main, ..Plan::of(launches, gpu, products.why) })
}

fn launch(kernel: KernelConfig, problem: &BackwardProblem, gpu: &Gpu, workspace: &[Workspace]) -> Launch {
    let extent = match &kernel {
        KernelConfig::BackwardRows(cfg) => backward_rows::extent(cfg, problem, workspace),
        KernelConfig::BackwardSinks(_) => sinks::extent(problem, workspace),
        KernelConfig::BackwardSm80(cfg) => backward_sm80::extent(cfg, problem, workspace),
        KernelConfig::BackwardSm90(cfg) => {
            Some(backward_sm90::extent(*cfg, problem, gpu.sms, workspace.to_vec()))
        }
        KernelConfig::BackwardSums(cfg) => Some(backward_sums::extent(cfg, problem, workspace)),
        // Kernels of other operations have plans of their own.
        _ => None,
    };
    Launch { kernel, subject: Subject::Backward(Box::new(problem.clone())), extent }
}

/// What every kernel asks of a problem; returns what Q, K and V are multiplied as.
fn check_backward(problem: &BackwardProblem, gpu: &Gpu) -> Result<Element, PlanError> {
    let forward = problem.forward();
    check_capability(gpu, (8, 0))?;
    let input = check(forward, gpu)?;
    let (out, dtype) = (forward.out_dtype(), forward.dtype());
    if out != dtype {
        return Err(PlanError::GradientsFrom { out, dtype });
    }
    check_rows(forward)?;
    Ok(input)
}

/// Rows are numbered in one launch.
fn check_rows(forward: &Problem) -> Result<(), PlanError> {
    if backward_rows::all_rows(forward) > i32::MAX as u64 { Err(PlanError::Tiles) } else { Ok(()) }
}
