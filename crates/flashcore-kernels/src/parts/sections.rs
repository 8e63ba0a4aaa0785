//! Which rows of which head tile number `n` has.
//!
//! Tiles are numbered by sections of heads whose K and V fit in L2 together; inside a section, row tiles come one after
//! another and heads fastest, so that CTAs that run at the same time share K and V. If later rows see more keys, row
//! tiles run from last to first, so that short ones fill the gaps at the end.

use flashcore_core::{Problem, Sequences};
use flashcore_tile::{Builder, Reg, U32};

use super::schedule::Side;

/// Bytes of L2 that a section may fill on a Hopper.
const HOPPER_BYTES: usize = 32 << 20;
/// Bytes of L2 that a section may fill: well under what data-centre GPUs have.
const BYTES: usize = 24 << 20;

/// The numbering, as registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sections {
    /// Heads of a section.
    pub(crate) heads: Reg<U32>,
    /// Row tiles of a head.
    pub(crate) row_tiles: Reg<U32>,
    /// Heads of all sequences, where the last section may be narrower than the others.
    pub(crate) all: Option<Reg<U32>>,
    /// Row tiles run from the last to the first.
    pub(crate) last_first: bool,
}

impl Sections {
    /// Row tile, and head among those of all sequences, of tile number `index`.
    #[track_caller]
    pub(crate) fn find(&self, b: &mut Builder, index: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        let tiles = b.let_(self.heads * self.row_tiles);
        let (section, within) = (b.let_(index / tiles), b.let_(index % tiles));
        let Some(all) = self.all else {
            let row = b.let_(within / self.heads);
            let row = self.row_tile(b, row);
            return (row, b.let_(section * self.heads + within % self.heads));
        };
        let first = b.let_(section * self.heads);
        let width = b.let_((all - first).min(self.heads));
        let row = b.let_(within / width);
        (self.row_tile(b, row), b.let_(first + within % width))
    }

    /// The `n`-th row tile of a head in the order in which they are taken.
    #[track_caller]
    pub(crate) fn row_tile(&self, b: &mut Builder, n: Reg<U32>) -> Reg<U32> {
        if self.last_first { b.let_(self.row_tiles - 1 - n) } else { n }
    }
}

/// Heads of a section; the last may have fewer. What CTAs share is the other side's rows.
pub(crate) fn heads(problem: &Problem, side: Side) -> u32 {
    let (rows, heads_per_row) = match side {
        Side::Queries => (problem.seq_kv(), 1),
        Side::Keys => (problem.seq_q(), problem.group()),
    };
    let rows = match problem.sequences_kind() {
        Sequences::Ragged { .. } => rows.div_ceil(problem.sequences().max(1)),
        _ => rows,
    };
    let per_row = heads_per_row * (problem.dim_qk() + problem.dim_v()) * problem.dtype().bytes();
    let shared_by = if side == Side::Queries { problem.group() } else { 1 };
    let per_head = rows.saturating_mul(per_row).div_ceil(shared_by).max(1);
    let fit = (BYTES / per_head) as u64;
    fit.clamp(1, side.planes(problem).max(1)) as u32
}

/// Query heads of a section on a Hopper: a power of two that divides all heads, so that sections are full.
pub(crate) fn full_sections(problem: &Problem) -> u32 {
    full_section(problem.heads_q() * problem.batch(), bytes_of_keys(problem, problem.seq_kv()))
}

/// Like [`full_sections`], of `heads` heads of one packed sequence, whatever its length.
pub(crate) fn sections_of_sequence(problem: &Problem, heads: u32) -> u32 {
    full_section(heads as usize, bytes_of_keys(problem, problem.longest_kv()))
}

/// Bytes of so many keys and values of a head.
fn bytes_of_keys(problem: &Problem, keys: usize) -> usize {
    2 * keys * problem.dim_v() * problem.dtype().bytes()
}

/// How many of `heads` heads make up a section on a Hopper if each brings `per_head` bytes: a power of two that divides
/// them all.
pub(crate) fn full_section(heads: usize, per_head: usize) -> u32 {
    let fits = |n: &usize| heads.is_multiple_of(*n) && n * per_head <= HOPPER_BYTES;
    let largest = (1..usize::BITS).map(|bit| 1usize << bit).take_while(|&n| n <= heads && fits(&n)).last();
    largest.unwrap_or(1) as u32
}
