//! The tiles of the general kernel, `forward_sm80`: one table, the reason beside each row.

use flashcore_core::Problem;
use flashcore_ptx::{sm::RESERVED_SHARED, target::Target};
use flashcore_tile::Element;

use super::{Gpu, PlanError, single};
use crate::forward_sm80::Shape;

/// The newest target that the GPU runs; what `forward_sm80` needs, all have.
pub(super) fn target(gpu: &Gpu) -> Target {
    let (major, minor) = gpu.capability;
    let runs = |target: &Target| target.runs_on(major, minor) && !target.is_arch_specific();
    Target::ALL.into_iter().rfind(runs).unwrap_or(Target::Sm80)
}

/// The tile for a problem, and why: the first of the table that fits. Batch and heads have no say in it.
pub(super) fn shape(
    problem: &Problem,
    input: Element,
    gpu: &Gpu,
) -> Result<(Shape, &'static str), PlanError> {
    let (qk, v) = (problem.dim_qk() as u32, problem.dim_v() as u32);
    let queries = problem.longest_q();
    let fits = |row: &&Row| qk.max(v) <= row.dim && queries <= row.queries && row.fits(input, [qk, v], gpu);
    let table = if input == Element::F32 { single::TABLE } else { TABLE };
    let row = table.iter().find(fits).ok_or(PlanError::SharedMemory {
        qk: problem.dim_qk(),
        v: problem.dim_v(),
        shared_bytes: gpu.shared_bytes,
    })?;
    Ok((row.shape, row.why))
}

/// Up to this dim and this many queries, this tile.
pub(super) struct Row {
    pub(super) dim: u32,
    pub(super) queries: usize,
    pub(super) shape: Shape,
    pub(super) why: &'static str,
}

impl Row {
    /// Whether as many CTAs as the row counts on fit on an SM.
    fn fits(&self, input: Element, dims: [u32; 2], gpu: &Gpu) -> bool {
        let per_cta = self.shape.shared_bytes(input, input, dims) + RESERVED_SHARED;
        self.shape.ctas_per_sm * per_cta <= gpu.shared_bytes + RESERVED_SHARED
    }
}

pub(super) const ANY: usize = usize::MAX;

pub(super) const fn shape_of(
    [warps, blocks]: [u32; 2],
    [tile_n, step_n]: [u32; 2],
    ctas_per_sm: u32,
) -> Shape {
    Shape { warps, blocks, tile_n, step_n, stages: 2, ctas_per_sm, q_in_registers: false }
}

const fn with_q(shape: Shape) -> Shape {
    Shape { q_in_registers: true, ..shape }
}

/// Of the rows for a head dim and sequence, the first whose CTAs fit on an SM is taken.
const TABLE: &[Row] = &[
    Row {
        dim: 64,
        queries: 64,
        shape: with_q(shape_of([4, 1], [64, 64], 2)),
        why: "64 rows are all there are; 16 per warp",
    },
    Row {
        dim: 64,
        queries: ANY,
        shape: with_q(shape_of([4, 2], [128, 64], 2)),
        why: "32 rows per warp use each key fragment twice; Q stays in registers; two CTAs hide each other's waits",
    },
    Row {
        dim: 64,
        queries: ANY,
        shape: with_q(shape_of([4, 2], [64, 64], 2)),
        why: "as with 128 keys, which would leave room for one CTA only",
    },
    Row {
        dim: 128,
        queries: 64,
        shape: with_q(shape_of([4, 1], [32, 32], 2)),
        why: "64 rows are all there are; 16 per warp leave registers for Q",
    },
    Row {
        dim: 128,
        queries: ANY,
        shape: shape_of([4, 2], [64, 32], 2),
        why: "32 rows per warp use each key fragment twice; the output leaves no registers for Q or more than 32 scores",
    },
    Row {
        dim: 128,
        queries: ANY,
        shape: shape_of([4, 2], [32, 32], 2),
        why: "as with 64 keys, which would leave room for one CTA only",
    },
    Row {
        dim: 128,
        queries: ANY,
        shape: with_q(shape_of([4, 1], [32, 32], 2)),
        why: "64 rows, so that two CTAs fit in little shared memory",
    },
    Row {
        dim: 256,
        queries: ANY,
        shape: shape_of([8, 1], [64, 64], 1),
        why: "the output takes half of the registers, so that a warp has 16 rows; one CTA fills shared memory",
    },
    Row {
        dim: 256,
        queries: ANY,
        shape: shape_of([8, 1], [32, 32], 1),
        why: "as with 64 keys, which do not fit",
    },
    Row {
        dim: 256,
        queries: ANY,
        shape: shape_of([4, 1], [32, 32], 1),
        why: "64 rows and 32 keys are what little shared memory holds",
    },
];
