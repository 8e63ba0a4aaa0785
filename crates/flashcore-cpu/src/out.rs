//! Rows of the result, written from many threads.

use std::marker::PhantomData;

use flashcore_core::Layout;

/// The result and its LSE, shared by threads that each write rows of their own.
pub(crate) struct SharedOut<'a, T> {
    out: *mut T,
    layout: Layout,
    lse: Option<*mut f32>,
    memory: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointers come from exclusive borrows that live as long as `'a`, and `write` is only called for rows that
// no other thread writes (its contract).
unsafe impl<T: Send> Sync for SharedOut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for SharedOut<'_, T> {}

impl<'a, T> SharedOut<'a, T> {
    /// Takes memory that holds what `layout` reaches, and one LSE value per row of the problem.
    pub(crate) fn new(out: &'a mut [T], layout: Layout, lse: Option<&'a mut [f32]>) -> Self {
        assert!(layout.span() <= out.len(), "HostCall checks the output's length");
        let dims = layout.dims();
        let rows = dims.batch * dims.heads * dims.seq;
        assert!(lse.as_ref().is_none_or(|l| l.len() == rows), "HostCall checks the length of lse");
        Self { out: out.as_mut_ptr(), layout, lse: lse.map(|l| l.as_mut_ptr()), memory: PhantomData }
    }

    /// Hands out one row, to be filled with `row`, and writes its LSE.
    ///
    /// # Safety
    /// No two threads may write the same row at once.
    pub(crate) unsafe fn write(&self, [batch, head, seq]: [usize; 3], lse: f32, fill: impl FnOnce(&mut [T])) {
        let dims = self.layout.dims();
        assert!(batch < dims.batch && head < dims.heads && seq < dims.seq, "a row of the result");
        if let Some(base) = self.lse {
            // SAFETY: the index is below batch·heads·seq, the length checked in `new`; nobody else writes this row.
            unsafe { base.add((batch * dims.heads + head) * dims.seq + seq).write(lse) };
        }
        // SAFETY: rows in range lie within the span checked in `new`, output rows never overlap (checked when the
        // problem was parsed), and nobody else writes this row.
        let row = unsafe {
            std::slice::from_raw_parts_mut(self.out.add(self.layout.row(batch, head, seq)), dims.dim)
        };
        fill(row);
    }
}
