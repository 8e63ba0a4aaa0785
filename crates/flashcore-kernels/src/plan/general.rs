//! The tiles of the general kernel, `forward_sm80`: one table for all GPUs, the reason beside each row.
//!
//! A row is used if its CTAs fit in the shared memory of the GPU: 227 KiB (sm_90, sm_100), 163 (sm_80),
//! 99 (sm_86, sm_89, sm_120) or 64 (sm_75).

use flashcore_core::{Problem, Sequences};
use flashcore_ptx::{sm::Sm, target::Target};
use flashcore_tile::Element;

use super::{Gpu, MOST_KEY_FEATURES, PlanError, narrow::cache, single};
use crate::forward_sm80::Shape;

/// The newest target that the GPU runs; what `forward_sm80` needs, all have.
pub(super) fn target(gpu: &Gpu) -> Target {
    let (major, minor) = gpu.capability;
    let runs = |target: &Target| target.runs_on(major, minor) && !target.is_arch_specific();
    Target::ALL.into_iter().rfind(runs).unwrap_or(Target::Sm75)
}

/// The tile for a problem, and why: the first of the table that fits. Batch and heads have no say in it.
pub(super) fn shape(
    problem: &Problem,
    input: Element,
    gpu: &Gpu,
) -> Result<(Shape, &'static str), PlanError> {
    let (qk, v) = (problem.dim_qk(), problem.dim_v());
    let dims = [qk, v].map(|dim| dim as u32);
    // How many queries others of a packed batch have must not matter where bits are to be a sequence's own.
    let packed =
        matches!(problem.sequences_kind(), Sequences::Ragged { .. } | Sequences::PackedQueries { .. });
    let queries = if packed && problem.batch_invariant() { ANY } else { problem.longest_q() };
    let fits = |row: &&Row| {
        qk.max(v) <= row.dim
            && queries <= row.queries
            && row.fits([input, cache(problem, input)], (dims, problem.pages().is_some()), gpu)
    };
    let shared_bytes = gpu.shared_bytes;
    let table = if input == Element::F32 { single::TABLE } else { TABLE };
    let roomy = |row: &&Row| fits(row) && (!wants_room(problem) || row.leaves_room(dims));
    let row = table.iter().find(roomy).or_else(|| table.iter().find(fits));
    let row = row.ok_or(PlanError::SharedMemory { qk, v, shared_bytes })?;
    Ok((row.shape, row.why))
}

/// Whether a problem takes registers beside sums and scores: for what is added to scores, which is loaded ahead, or for words
/// of dropout together with lengths or a cap.
fn wants_room(problem: &Problem) -> bool {
    let optioned = problem.softcap().is_some() || problem.sequences_kind() != Sequences::Uniform;
    problem.bias().is_some() || (problem.dropout().is_some() && optioned)
}

/// Up to this dim and this many queries, this tile.
pub(super) struct Row {
    pub(super) dim: usize,
    pub(super) queries: usize,
    pub(super) shape: Shape,
    pub(super) why: &'static str,
}

impl Row {
    /// Whether as many CTAs as the row counts on fit on an SM.
    fn fits(&self, [input, cache]: [Element; 2], (dims, paged): ([u32; 2], bool), gpu: &Gpu) -> bool {
        let reserved = Sm::of(gpu.capability).reserved;
        let per_cta = self.shape.shared_bytes([input, cache, input], dims, paged) + reserved;
        self.shape.ctas_per_sm * per_cta <= gpu.shared_bytes + reserved
    }

    /// Whether sums, scores and queries leave a thread registers for more.
    fn leaves_room(&self, [qk, v]: [u32; 2]) -> bool {
        let q = if self.shape.q_in_registers { qk / 4 } else { 0 };
        self.shape.blocks * ((v + self.shape.step_n) / 2 + q) < 160
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
        why: "32 rows per warp use each key fragment twice; Q stays in registers; two CTAs hide each other's latency",
    },
    Row {
        dim: 64,
        queries: ANY,
        shape: with_q(shape_of([4, 2], [64, 64], 2)),
        why: "as with 128 keys, which would leave room for one CTA only",
    },
    Row {
        dim: 64,
        queries: ANY,
        shape: with_q(shape_of([4, 2], [32, 32], 2)),
        why: "as with 64 keys, which would leave room for one CTA only",
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
        why: "64 rows, so that two CTAs fit in a small shared memory",
    },
    Row {
        dim: 128,
        queries: ANY,
        shape: with_q(shape_of([4, 1], [16, 16], 2)),
        why: "as with 32 keys, which would leave room for one CTA only",
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
        why: "64 rows and 32 keys are what a small shared memory holds",
    },
    Row {
        dim: 256,
        queries: ANY,
        shape: shape_of([4, 1], [16, 16], 1),
        why: "64 rows and 16 keys are what 64 KiB of shared memory hold",
    },
    Row {
        dim: MOST_KEY_FEATURES,
        queries: ANY,
        shape: shape_of([8, 1], [32, 32], 1),
        why: "wide rows: 32 keys beside the queries fill shared memory; two warps share an output of more than 256 columns",
    },
    Row {
        dim: MOST_KEY_FEATURES,
        queries: ANY,
        shape: shape_of([8, 1], [16, 16], 1),
        why: "as with 32 keys, which do not fit",
    },
    Row {
        dim: MOST_KEY_FEATURES,
        queries: ANY,
        shape: shape_of([4, 1], [32, 32], 1),
        why: "wide rows: queries of four warps are what shared memory holds",
    },
    Row {
        dim: MOST_KEY_FEATURES,
        queries: ANY,
        shape: shape_of([4, 1], [16, 16], 1),
        why: "as with 32 keys, which do not fit",
    },
    Row {
        dim: MOST_KEY_FEATURES,
        queries: ANY,
        shape: shape_of([2, 1], [16, 16], 1),
        why: "wide rows: queries of two warps are what a small shared memory holds",
    },
];
