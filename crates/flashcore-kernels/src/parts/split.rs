//! Rows whose keys several CTAs share: where CTAs of `forward_sm80` leave their parts, and where `combine` finds them.
//!
//! Rows are those of a folded schedule (see [`Schedule::declare_folded`]): the queries of all heads that share a key head.

use flashcore_core::Problem;
use flashcore_ptx::launch::Workspace;
use flashcore_tile::{Builder, Params, Reg, U32, U64};

use super::schedule::{Schedule, Tile};
use crate::slots;

const BYTES: u32 = size_of::<f32>() as u32;

/// f32 rows of all parts, one part after another, then their LSE.
pub(crate) fn workspace(problem: &Problem, parts: u32) -> Workspace {
    let floats = problem.rows() as u64 * (problem.dim_v() as u64 + 1);
    Workspace { slot: slots::PARTS, bytes: u64::from(BYTES) * u64::from(parts) * floats, zeroed: false }
}

/// Where parts lie, as registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SplitRows {
    base: Reg<U64>,
    /// LSE of the first part.
    lse: Reg<U64>,
    /// Rows of a part.
    rows: Reg<U32>,
    /// Bytes of a row.
    row_bytes: u32,
}

impl SplitRows {
    #[track_caller]
    pub(crate) fn declare(b: &mut Builder, params: &mut Params<Problem>, [dim_v, parts]: [u32; 2]) -> Self {
        let row_bytes = dim_v * BYTES;
        let base = params.buffer(b, "parts", slots::PARTS);
        let rows = params.u32(b, "part_rows", |p| p.rows() as u32);
        let lse = b.let_(base + (rows * parts).mul_wide(row_bytes));
        Self { base, lse, rows, row_bytes }
    }

    /// Addresses of a row of a part, and of its LSE.
    #[track_caller]
    pub(crate) fn place(&self, b: &mut Builder, part: Reg<U32>, row: Reg<U32>) -> [Reg<U64>; 2] {
        let number = b.let_(part * self.rows + row);
        [b.let_(self.base + number.mul_wide(self.row_bytes)), b.let_(self.lse + number.mul_wide(BYTES))]
    }

    /// Bytes of a row.
    pub(crate) const fn row_bytes(&self) -> u32 {
        self.row_bytes
    }

    /// Whether all rows start at multiples of 8 bytes: they lie one after another, whatever the caller's tensors look like.
    pub(crate) const fn pairs(&self) -> bool {
        self.row_bytes.is_multiple_of(2 * BYTES)
    }

    /// Bytes from a row, and from its LSE, to those of the next part.
    #[track_caller]
    pub(crate) fn steps(&self, b: &mut Builder) -> [Reg<U64>; 2] {
        [b.let_(self.rows.mul_wide(self.row_bytes)), b.let_(self.rows.mul_wide(BYTES))]
    }
}

/// Number of the first row of a tile among all rows.
#[track_caller]
pub(crate) fn first_row(b: &mut Builder, schedule: &Schedule, tile: &Tile) -> Reg<U32> {
    let plane = b.let_(tile.batch * schedule.heads() + tile.head_kv);
    let rows_of_plane = b.let_(schedule.seq_q() * schedule.group());
    b.let_(plane * rows_of_plane + tile.q_start + tile.first_row)
}
