//! Keys and values in pages: which page holds a key, and where it lies there.
//!
//! The table is unchecked, so page numbers are clamped to the range of the pool here. Entries beyond a
//! sequence's keys are never read.

use flashcore_core::Problem;
use flashcore_ptx::launch::Slot;
use flashcore_tile::{Builder, Params, Pred, Reg, Scope, U32, U64};

use crate::slots;

/// Pages of a pool, rows of a page, and numbers between rows of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageShape {
    pub(crate) pages: usize,
    pub(crate) size: usize,
    pub(crate) row_stride: usize,
}

/// What a kernel needs to follow a page table, as registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageArguments {
    table: Reg<U64>,
    /// Bytes between the rows of the table.
    row: Reg<U64>,
    /// The last page.
    last: Reg<U32>,
    /// Keys of a page.
    size: Reg<U32>,
    /// What turns a key into its page: see [`Divisor`].
    multiplier: Reg<U32>,
    shift: Reg<U32>,
}

impl PageArguments {
    #[track_caller]
    pub(crate) fn declare(b: &mut Builder, params: &mut Params<Problem>) -> Self {
        Self::declare_for(b, params, slots::TABLE, |p| {
            let (pool, row_stride) = (p.k().dims(), p.pages().map_or(0, |pages| pages.row_stride));
            PageShape { pages: pool.batch, size: p.page_size().unwrap_or(1), row_stride }
        })
    }

    /// For a problem of any operation.
    #[track_caller]
    pub(crate) fn declare_for<P: 'static>(
        b: &mut Builder,
        params: &mut Params<P>,
        slot: Slot,
        of: fn(&P) -> PageShape,
    ) -> Self {
        Self {
            table: params.buffer(b, "table", slot),
            row: params.u64(b, "table_row", move |p| 4 * of(p).row_stride as u64),
            last: params.u32(b, "last_page", move |p| of(p).pages.saturating_sub(1) as u32),
            size: params.u32(b, "page_size", move |p| of(p).size as u32),
            multiplier: params.u32(b, "page_multiplier", move |p| Divisor::new(of(p).size as u32).multiplier),
            shift: params.u32(b, "page_shift", move |p| Divisor::new(of(p).size as u32).shift),
        }
    }

    /// Where the page numbers of a sequence start.
    #[track_caller]
    pub(crate) fn row(&self, b: &mut Builder, sequence: Reg<U32>) -> Reg<U64> {
        b.let_(sequence.widen() * self.row + self.table)
    }

    /// Which page of its sequence a key lies in, and which key of the page it is.
    #[track_caller]
    pub(crate) fn find(&self, b: &mut Builder, key: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        let twice = b.let_(key << 1);
        let product = b.mul_hi(twice, self.multiplier);
        let page = b.let_(product >> self.shift);
        (page, b.let_(key - page * self.size))
    }

    /// The page of a key and its place there, as the table says where `there` holds, and whether that page exists.
    #[track_caller]
    pub(crate) fn follow(
        &self,
        b: &mut Builder,
        sequence: Reg<U32>,
        key: Reg<U32>,
        there: Pred,
    ) -> (Reg<U32>, Pred, Reg<U32>) {
        let row = self.row(b, sequence);
        let (column, within) = self.find(b, key);
        let at = b.let_(row + column.mul_wide(4));
        let page = b.var_in(Scope::Lane, u32::MAX);
        b.predicated(there, |b| b.load_global_into([page], at));
        // Numbers below 0 are beyond the last, and so is what was not read.
        (page, b.let_(page.le(self.last)), within)
    }

    /// A number from the table as the number of a page that exists.
    #[track_caller]
    pub(crate) fn clamp(&self, b: &mut Builder, number: Reg<U32>) -> Reg<U32> {
        b.let_(number.signed().max(0).unsigned().min(self.last))
    }
}

/// Division by a number that is known before a launch, as a product and a shift: `n / d` is the upper half of
/// `2n · multiplier`, shifted right by `shift`, for every `n` below 2³¹ (Granlund and Montgomery, "Division by invariant
/// integers using multiplication", theorem 4.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Divisor {
    multiplier: u32,
    shift: u32,
}

impl Divisor {
    fn new(d: u32) -> Self {
        let d = d.max(1);
        let shift = d.next_power_of_two().trailing_zeros();
        Self { multiplier: (1u64 << (31 + shift)).div_ceil(d.into()) as u32, shift }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quotient(n: u32, d: u32) -> u32 {
        let Divisor { multiplier, shift } = Divisor::new(d);
        (((u64::from(n) << 1) * u64::from(multiplier)) >> 32) as u32 >> shift
    }

    #[test]
    fn a_product_and_a_shift_divide() {
        let most = i32::MAX as u32;
        for d in (1..2000).chain([1 << 20, (1 << 20) + 1, 1 << 29, (1 << 30) - 1, 1 << 30]) {
            let around = |n: u32| n.saturating_sub(2)..=n.saturating_add(2).min(most);
            let multiples = [0, 1, 2, 7, 1000, most / d].map(|k: u32| k.saturating_mul(d).min(most));
            for n in multiples.into_iter().chain([most, most / 3]).flat_map(around) {
                assert_eq!(quotient(n, d), n / d, "{n} / {d}");
            }
        }
    }
}
