//! How grouped products are computed on a GPU: which kernels, and how rows and columns are cut.

use flashcore_core::{DType, ExpertLayout, GroupedProblem};
use flashcore_tile::Half;

use super::{
    Gpu, Plan, PlanError, check_capability,
    moe::{CHUNK, fitted, shape_for},
};
use crate::{
    grouped::{Config, Divided, Work, index, product},
    launch::{KernelConfig, Launch, Subject},
    moe::product::Shape,
};

/// Columns of elements that one line of shared memory holds: tiles of lines that run across the depth are whole lines.
const LINE: u32 = 64;

/// Plans grouped products; `alignment` is what all addresses of tensors are multiples of, in bytes.
pub fn plan_grouped(problem: &GroupedProblem, gpu: &Gpu, alignment: u64) -> Result<Plan, PlanError> {
    check_capability(gpu, (8, 0))?;
    let work = Work::new(problem, LINE);
    let half = check(problem, &work, alignment)?;
    let rows = match work.divided {
        Divided::Rows => work.rows.rows() / problem.groups(),
        Divided::Nothing | Divided::Depth => work.rows.rows(),
    };
    let (shape, why) = shape_for(rows);
    let along = [&work.rows, &work.columns].map(runs_along);
    let shape = match shape.tile_m < LINE && !along[0] {
        true => Shape { tile_m: LINE, warps: [2, 2], stages: 4, ..shape },
        false => shape,
    };
    let shape = fitted(shape, gpu)?;
    let work = Work { tile_m: shape.tile_m, ..work };
    let config = product::Config { half, divided: work.divided, along, turned: work.turned, shape };
    let extent = product::extent(&config, &work).ok_or(PlanError::Tiles)?;
    let subject = || Subject::Grouped(Box::new(work.clone()));
    let mut launches = Vec::new();
    if extent.is_some() && work.divided != Divided::Nothing {
        let index = index::Config { divided: work.divided, tile_m: shape.tile_m };
        let (kernel, extent) = (KernelConfig::Grouped(Config::Index(index)), Some(index::extent(&work)));
        launches.push(Launch { kernel, subject: subject(), extent });
    }
    let kernel = KernelConfig::Grouped(Config::Product(config));
    launches.push(Launch { kernel, subject: subject(), extent });
    Ok(Plan { main: launches.len() - 1, ..Plan::of(launches, gpu, why) })
}

/// Whether lines of a factor run along the depth.
const fn runs_along(layout: &ExpertLayout) -> bool {
    layout.is_row_major()
}

/// What the kernels ask of a problem.
fn check(problem: &GroupedProblem, work: &Work, alignment: u64) -> Result<Half, PlanError> {
    let half = match problem.dtype() {
        DType::F16 => Half::F16,
        DType::BF16 => Half::Bf16,
        DType::F32 => return Err(PlanError::Grouped("f32 factors; convert them to f16 or bf16")),
        other => return Err(PlanError::DType(other)),
    };
    let along = [&work.rows, &work.columns].map(runs_along);
    let divided = match work.divided {
        Divided::Nothing => true,
        Divided::Rows => along[0],
        Divided::Depth => !along[0] && !along[1],
    };
    if !divided {
        return Err(PlanError::Grouped(
            "offsets along the contiguous dimension of a factor; give it with that dimension strided",
        ));
    }
    let whole = |elements: usize| elements.is_multiple_of(CHUNK);
    let lines = |layout: &ExpertLayout| {
        let contiguous = if runs_along(layout) { layout.cols() } else { layout.rows() };
        whole(contiguous) && layout.strides().into_iter().all(|stride| stride == 1 || whole(stride))
    };
    let [matrix, _, row, _] = problem.out().strides();
    let out = [matrix, row, problem.columns()].into_iter().all(whole) || work.turned;
    if alignment < 16 || !lines(&work.rows) || !lines(&work.columns) || !out {
        return Err(PlanError::Grouped("rows that are not multiples of 16 bytes; pad them"));
    }
    if work.tiles() * u64::from(LINE) > i32::MAX as u64 {
        return Err(PlanError::Tiles);
    }
    Ok(half)
}
