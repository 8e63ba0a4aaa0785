//! The end of a row: its LSE, and the result of a row that the sequence does not use.

use flashcore_tile::{Acc, Builder, F32, Pred, ROWS_PER_THREAD, Reg, U32, U64};

use super::softmax::Rows;

/// The LSE of a row: −∞ where it lies beyond the used queries.
#[track_caller]
pub(crate) fn lse_of_used(b: &mut Builder, beyond: Pred, lse: Reg<F32>) -> Reg<F32> {
    b.select(beyond, f32::NEG_INFINITY, lse)
}

/// Zeros for the rows that lie beyond the used queries, whatever was read for them.
#[track_caller]
pub(crate) fn clear_unused(b: &mut Builder, beyond: [Pred; ROWS_PER_THREAD], output: &Acc) {
    for (i, &value) in output.regs().iter().enumerate() {
        b.select_into(value, beyond[Acc::row(i)], 0.0, value);
    }
}

/// Where LSE values go, if requested.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LseOutput {
    /// Whether this thread writes: one lane of each quad that shares rows, where the address is not 0.
    pub(crate) writes: Pred,
}

impl LseOutput {
    /// The values go to an array at `base`.
    #[track_caller]
    pub(crate) fn new(b: &mut Builder, base: Reg<U64>, lane: Reg<U32>) -> Self {
        Self { writes: b.let_((lane & 3).eq(0) & base.ne(0)) }
    }

    /// Writes the value of one row in the threads for which `who` holds.
    #[track_caller]
    pub(crate) fn write(b: &mut Builder, who: Pred, to: Reg<U64>, lse: Reg<F32>) {
        b.predicated(who, |b| b.store_global(to, &[lse.into()]));
    }
}

/// This thread's two rows, if its warp's rows start at `first`.
#[track_caller]
pub(crate) fn thread_rows(b: &mut Builder, first: Reg<U32>, lane: Reg<U32>) -> Rows<U32> {
    let row = b.let_(first + (lane >> 2));
    [row, b.let_(row + 8)]
}
