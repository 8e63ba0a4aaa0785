//! How grouped products are computed on a GPU: which kernels, and how rows and columns are tiled.

use flashcore_core::{DType, ExpertLayout, GroupedProblem};
use flashcore_ptx::target::Target;
use flashcore_tile::Half;

use super::{
    Gpu, Misfit, Plan, PlanError, Tile, check_capability,
    moe::{CHUNK, MANY_ROWS, RESERVED, fitted, shape_for},
};
use crate::{
    grouped::{Config, Divided, Work, index, product, product_sm90},
    launch::{KernelConfig, Launch, Subject},
    moe::{Cut, product::Shape, product_sm90 as hopper},
    parts::lines::DEPTH,
};

/// Columns of elements that one line of shared memory holds: tiles of lines that run across the depth are whole lines.
const LINE: u32 = 64;
/// Columns of the widest tile on Hopper, and of a narrower one where there would be fewer of those than SMs.
const WIDEST: usize = 256;
const NARROW: u32 = 128;
/// Most stages on Hopper.
const STAGES: u32 = 6;

/// Plans grouped products; `alignment` is what all addresses of tensors are multiples of, in bytes.
pub fn plan_grouped(problem: &GroupedProblem, gpu: &Gpu, alignment: u64) -> Result<Plan, PlanError> {
    let work = Work::new(problem, LINE);
    let (shape, why) = shape_for(rows_per_group(&work));
    let why = match hopper_shape(&work, gpu) {
        Ok(shape) => {
            let why = "many rows per group: factors by tensor copies, products by warpgroups";
            return plan_with(problem, gpu, alignment, (Cut::Sm90(shape), why));
        }
        Err(not) => not.unwrap_or(why),
    };
    let shape = match shape.tile_m < LINE && !runs_along(&work.rows) {
        true => Shape { tile_m: LINE, warps: [2, 2], stages: 4, ..shape },
        false => shape,
    };
    plan_with(problem, gpu, alignment, (Cut::General(fitted(shape, gpu)?), why))
}

/// Like [`plan_grouped`], with this tile: for tuning.
pub fn plan_grouped_tile(
    problem: &GroupedProblem,
    gpu: &Gpu,
    alignment: u64,
    cut: Cut,
) -> Result<Plan, Misfit> {
    Tile::Grouped(Some(cut)).check()?;
    if matches!(cut, Cut::Sm90(_)) && !takes_hopper(&Work::new(problem, LINE), gpu) {
        let reason = "the Hopper kernel needs compute capability 9.0 and a depth above 0".to_owned();
        return Err(Misfit::Kernel { kernel: "grouped", reason });
    }
    Ok(plan_with(problem, gpu, alignment, (cut, "tiles as requested"))?)
}

fn plan_with(
    problem: &GroupedProblem,
    gpu: &Gpu,
    alignment: u64,
    (cut, why): (Cut, &'static str),
) -> Result<Plan, PlanError> {
    check_capability(gpu, (8, 0))?;
    let work = Work::new(problem, cut.tile_m());
    let half = check(problem, &work, alignment)?;
    let (divided, turned) = (work.divided, work.turned);
    let along = [&work.rows, &work.columns].map(runs_along);
    let (kernel, target, extent) = match cut {
        Cut::General(shape) => {
            let config = product::Config { half, divided, along, turned, shape };
            (Config::Product(config), Target::Sm80, product::extent(&config, &work))
        }
        Cut::Sm90(shape) => {
            let config = product_sm90::Config { half, divided, along, turned, shape };
            (Config::ProductSm90(config), Target::Sm90, product_sm90::extent(&config, &work, gpu.sms))
        }
    };
    let extent = extent.ok_or(PlanError::Tiles)?;
    let launch = |kernel: Config, extent| Launch {
        kernel: KernelConfig::Grouped(kernel),
        subject: Subject::Grouped(Box::new(work.clone())),
        extent,
    };
    let mut launches = Vec::new();
    if extent.is_some() && divided != Divided::Nothing {
        let index = index::Config { target, divided, tile_m: cut.tile_m() };
        launches.push(launch(Config::Index(index), Some(index::extent(&index, &work))));
    }
    launches.push(launch(kernel, extent));
    Ok(Plan { main: launches.len() - 1, ..Plan::of(launches, gpu, why) })
}

/// Rows that a group has on average.
fn rows_per_group(work: &Work) -> usize {
    match work.divided {
        Divided::Rows => work.rows.rows() / work.problem.groups(),
        Divided::Nothing | Divided::Depth => work.rows.rows(),
    }
}

/// Whether the kernel for Hopper takes some work. Tensor copies know no tensor without elements.
const fn takes_hopper(work: &Work, gpu: &Gpu) -> bool {
    matches!(gpu.capability, (9, 0)) && work.rows.cols() > 0
}

/// How products of many rows per group are cut on Hopper, where they are such; else why not, where rows are many.
fn hopper_shape(work: &Work, gpu: &Gpu) -> Result<hopper::Shape, Option<&'static str>> {
    if !takes_hopper(work, gpu) || rows_per_group(work) < MANY_ROWS {
        return Err(None);
    }
    if work.columns.rows() < MANY_ROWS || work.rows.cols() < DEPTH as usize {
        return Err(Some("not by warpgroups: fewer than 64 columns, or elements of depth"));
    }
    let work = Work { tile_m: hopper::TILE_M, ..work.clone() };
    let columns = work.columns.rows();
    let few = work.tiles() * (columns.div_ceil(WIDEST) as u64) < u64::from(gpu.sms);
    let tile_n = columns.min(WIDEST).next_multiple_of(LINE as usize) as u32;
    let tile_n = if few { tile_n.min(NARROW) } else { tile_n };
    let shape =
        |stages: u32| hopper::Shape { tile_n, turns: false, stages, pair: false, rows: hopper::TILE_M };
    let fits = |shape: &hopper::Shape| shape.shared_bytes() + RESERVED <= gpu.shared_bytes;
    let shapes = (3..=STAGES).rev().map(shape);
    shapes.into_iter().find(fits).ok_or(Some("not by warpgroups: too little shared memory"))
}

/// Whether lines of a factor run along the depth.
const fn runs_along(layout: &ExpertLayout) -> bool {
    layout.is_row_major()
}

/// What the kernels require of a problem.
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
