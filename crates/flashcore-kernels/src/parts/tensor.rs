//! Tensors by address: for kernels, or parts of them, that move rows without tensor maps.

use flashcore_core::{DType, Layout};
use flashcore_ptx::launch::Slot;
use flashcore_tile::{Builder, Params, Reg, U32, U64};

/// A tensor: where it starts, and its strides in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorArgument {
    base: Reg<U64>,
    batch: Reg<U64>,
    pub(crate) head: Reg<U64>,
    pub(crate) row: Reg<U64>,
}

impl TensorArgument {
    /// Where the tensor starts.
    pub(crate) const fn base(&self) -> Reg<U64> {
        self.base
    }

    /// Address of a row.
    #[track_caller]
    pub(crate) fn at(&self, b: &mut Builder, batch: Reg<U32>, head: Reg<U32>, row: Reg<U32>) -> Reg<U64> {
        let steps = [(batch, self.batch), (head, self.head), (row, self.row)];
        steps.into_iter().fold(self.base, |at, (index, stride)| b.let_(index.widen() * stride + at))
    }

    /// Bytes to a row of a batch entry.
    #[track_caller]
    pub(crate) fn offset(&self, b: &mut Builder, batch: Reg<U32>, row: Reg<U32>) -> Reg<U64> {
        let entry = b.let_(batch.widen() * self.batch);
        b.let_(row.widen() * self.row + entry)
    }

    /// Where a head starts in the first batch entry, or the first page.
    #[track_caller]
    pub(crate) fn of_head(&self, b: &mut Builder, head: Reg<U32>) -> Reg<U64> {
        b.let_(head.widen() * self.head + self.base)
    }

    /// Address of a row of a page, where `from` lies in the first row of the first page.
    #[track_caller]
    pub(crate) fn in_page(&self, b: &mut Builder, from: Reg<U64>, page: Reg<U32>, row: Reg<U32>) -> Reg<U64> {
        let page = b.let_(page.widen() * self.batch + from);
        b.let_(row.widen() * self.row + page)
    }

    #[track_caller]
    pub(crate) fn declare<A: 'static>(
        b: &mut Builder,
        params: &mut Params<A>,
        name: &str,
        slot: Slot,
        of: fn(&A) -> (&Layout, DType),
    ) -> Self {
        Self::declare_by(b, params, name, slot, of)
    }

    /// Like [`declare`](Self::declare), with whatever tells the layout.
    #[track_caller]
    pub(crate) fn declare_by<A: 'static>(
        b: &mut Builder,
        params: &mut Params<A>,
        name: &str,
        slot: Slot,
        of: impl Fn(&A) -> (&Layout, DType) + Copy + Send + Sync + 'static,
    ) -> Self {
        let base = params.buffer(b, name, slot);
        let mut stride = |b: &mut Builder, what: &str, axis: usize| {
            params.u64(b, &format!("{name}_{what}"), move |p| {
                let (layout, dtype) = of(p);
                // Steps to what is not there may be anything, but copies of nothing must be aligned, too.
                let step = if layout.dims().array()[axis] > 1 { layout.strides()[axis] } else { 0 };
                (step * dtype.bytes()) as u64
            })
        };
        Self { base, batch: stride(b, "batch", 0), head: stride(b, "head", 1), row: stride(b, "row", 2) }
    }
}
