//! Storing rows: the caller's tensors or partial results, written from many threads.

use std::marker::PhantomData;

use flashcore_core::{Instance, Problem, Sequence};

use crate::{
    plan::{Merge, Unit},
    simd::{Kernel, Lane, Simd, convert::Narrow},
};

/// Memory that threads share, each writing ranges of its own.
pub(crate) struct Shared<'a, T> {
    at: *mut T,
    len: usize,
    memory: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for an exclusive borrow of a slice, parts of which are lent to one thread at a time.
unsafe impl<T: Send> Sync for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { at: slice.as_mut_ptr(), len: slice.len(), memory: PhantomData }
    }

    /// # Safety
    /// No other range that is still in use may overlap this one.
    #[allow(clippy::mut_from_ref, reason = "ranges in use are disjoint by contract")]
    pub(crate) unsafe fn range(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "a range of the slice");
        // SAFETY: within the slice; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(start), len) }
    }
}

/// Rows of f32 that are rounded into memory that threads share.
pub(crate) struct Emit<'a, 'm, T, F> {
    /// Rows, and the elements from one to the next.
    pub(crate) from: (&'a [f32], usize),
    /// Elements of each to use.
    pub(crate) len: usize,
    pub(crate) to: &'a Shared<'m, T>,
    /// Where each row goes.
    ///
    /// **Invariant:** nobody else uses what these rows take.
    pub(crate) start: F,
}

impl<T: Lane, F: Fn(usize) -> usize> Kernel for Emit<'_, '_, T, F> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for (n, row) in self.from.0.chunks(self.from.1).enumerate() {
            // SAFETY: the caller's promise, and the invariant.
            unsafe {
                let to = self.to.range((self.start)(n), self.len);
                Narrow { from: &row[..self.len], factor: 1.0, to }.run::<S>();
            }
        }
    }
}

/// Where the rows of a result go: elements of the inputs' type, or f32.
pub(crate) enum Target<T, W> {
    /// The inputs' own type.
    Same(T),
    /// f32 for inputs of 16 bits.
    Wide(W),
}

/// The caller's memory for results and, where asked for, LSE.
pub(crate) type Memory<'a, T> = (Target<&'a mut [T], &'a mut [f32]>, Option<&'a mut [f32]>);

/// The result of a call.
///
/// **Invariant:** the units of a plan never share an output row, and parts never share a partial row, so that holding a
/// unit exclusively (`&mut Unit`) is holding its rows exclusively.
pub(crate) struct Output<'a, T> {
    problem: Instance<'a>,
    out: Target<Shared<'a, T>, Shared<'a, f32>>,
    lse: Option<Shared<'a, f32>>,
    partials: Shared<'a, f32>,
}

/// Floats of a partial row: the sums, the maximum, the sum of weights.
pub(crate) fn partial_len(problem: &Problem) -> usize {
    problem.dim_v() + 2
}

/// One row of the result.
pub(crate) struct OutputRow<'u, T> {
    pub(crate) values: Target<&'u mut [T], &'u mut [f32]>,
    pub(crate) lse: Option<&'u mut f32>,
}

impl<'a, T> Output<'a, T> {
    pub(crate) fn new(
        problem: Instance<'a>,
        out: Target<&'a mut [T], &'a mut [f32]>,
        lse: Option<&'a mut [f32]>,
        partials: &'a mut [f32],
    ) -> Self {
        let out = match out {
            Target::Same(out) => Target::Same(Shared::new(out)),
            Target::Wide(out) => Target::Wide(Shared::new(out)),
        };
        Self { problem, out, lse: lse.map(Shared::new), partials: Shared::new(partials) }
    }

    /// The output row of `row`, and where its LSE goes if it is asked for.
    pub(crate) fn row<'u>(&'u self, unit: &'u mut Unit, s: &Sequence, row: usize) -> OutputRow<'u, T> {
        assert!(unit.rows.contains(&row), "a row of the unit");
        let group = self.problem.group();
        let (head, seq) = (unit.kv_head * group + row % group, s.q_start + row / group);
        let out = self.problem.out();
        let (start, dim) = (out.row(s.batch, head, seq), out.dims().dim);
        // SAFETY: only the holder of the unit writes its rows, and output rows do not overlap (`Spec::parse`).
        let values = unsafe {
            match &self.out {
                Target::Same(out) => Target::Same(out.range(start, dim)),
                Target::Wide(out) => Target::Wide(out.range(start, dim)),
            }
        };
        // SAFETY: only the holder of the unit writes its rows.
        let lse = |all: &'u Shared<'a, f32>| unsafe {
            &mut all.range(self.problem.lse_index(s.batch, head, seq), 1)[0]
        };
        OutputRow { values, lse: self.lse.as_ref().map(lse) }
    }

    /// The partial row of `row`.
    pub(crate) fn partial<'u>(&'u self, unit: &'u mut Unit, first: usize, row: usize) -> &'u mut [f32] {
        assert!(unit.rows.contains(&row), "a row of the unit");
        let len = partial_len(&self.problem);
        // SAFETY: only the holder of the unit writes its part.
        unsafe { self.partials.range((first + row - unit.rows.start) * len, len) }
    }

    /// Partial row `row` of every part, in order.
    pub(crate) fn parts<'u>(&'u self, merge: &'u Merge, row: usize) -> impl Iterator<Item = &'u [f32]> {
        let (len, rows) = (partial_len(&self.problem), merge.unit.rows.len());
        let at = merge.first + row - merge.unit.rows.start;
        // SAFETY: units are done when merging begins, so that nobody writes partial rows any more.
        (0..merge.parts).map(move |part| unsafe { &*self.partials.range((at + part * rows) * len, len) })
    }
}
