//! Products of packed factors, used by experts, grouped products and their gradients: `C = A·B`, or `C += A·B`,
//! summed in f32. Called by `matmul`, whose factors `pack` has laid out.
//!
//! Vectors run along the columns of B, a panel of [`COLUMNS`] of them; elements of A, rows [`STRIDE`] apart, are spread over
//! the lanes. Strides are constants: with run-time strides each row of A needs its own address, and addresses and sums
//! spill. A micro-kernel holds `J` rows × `RV` vectors of C in registers.
//!
//! Factors stream from memory while a product is computed: it prefetches what the next one packs.

// Explicit indices, no closures: a closure would be compiled without the kernel's target features.
#![allow(clippy::needless_range_loop)]

use super::{
    Kernel, Simd,
    product::Term,
    tile::{load, store},
};

/// Terms along the depth of packed factors.
pub(crate) const DEPTH: usize = 128;
/// Columns of a panel of B, and elements from a row of C to the next.
pub(crate) const COLUMNS: usize = 64;
/// Terms from a row of A to the next: rows do not share a few sets of the cache.
pub(crate) const STRIDE: usize = DEPTH + 16;

/// Terms of a panel.
pub(crate) const PANEL: usize = DEPTH * COLUMNS;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Memory to prefetch.
#[derive(Clone, Copy, Default)]
pub(crate) struct Ahead<'a> {
    /// Addresses of cache lines.
    pub(crate) starts: &'a [usize],
    /// Lines that follow each other from each start.
    pub(crate) lines: usize,
}

/// A product to be computed.
pub(crate) struct PanelProduct<'a, E> {
    /// Rows of A and C.
    pub(crate) rows: usize,
    /// Columns of B and C: what lies beyond them in the last vector is computed, too.
    pub(crate) columns: usize,
    /// Columns of A and rows of B: at most [`DEPTH`].
    pub(crate) depth: usize,
    /// The left factor.
    pub(crate) a: &'a [E],
    /// The right factor, [`COLUMNS`] from one row to the next.
    pub(crate) b: &'a [E],
    /// The result.
    pub(crate) c: &'a mut [f32],
    /// Whether it is added to what is there.
    pub(crate) add: bool,
    /// What will be needed next.
    pub(crate) ahead: Ahead<'a>,
}

impl<E> PanelProduct<'_, E> {
    fn check(&self) {
        assert!(self.depth <= DEPTH && self.columns <= COLUMNS, "factors are packed");
        assert!(self.a.len() >= self.rows * STRIDE, "the left factor lies in its slice");
        assert!(self.b.len() >= self.depth * COLUMNS, "the right factor lies in its slice");
        assert!(self.c.len() >= self.rows * COLUMNS, "the result lies in its slice");
    }
}

impl Kernel for PanelProduct<'_, f32> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        // SAFETY: the caller's promise.
        unsafe { S::panel(&mut self) }
    }
}

/// Lines that have been fetched, and how many each tile fetches: memory is busy all the time, and never too busy.
#[derive(Clone, Copy)]
struct Fetched {
    lines: usize,
    pace: usize,
}

/// Computes a product in blocks of `J` rows × `RV` vectors.
///
/// # Safety
/// The machine has the instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn multiply<S: Simd, E: Term<S>, const RV: usize, const J: usize>(
    p: &mut PanelProduct<'_, E>,
) {
    p.check();
    let tiles = (p.rows / J).max(1) * (p.columns / (RV * S::LANES)).max(1);
    let pace = (p.ahead.starts.len() * p.ahead.lines / tiles).min(p.depth);
    let (mut row, mut fetched) = (0, Fetched { lines: 0, pace });
    // SAFETY: the caller's promise, and `check` saw that all lies in its slice.
    unsafe {
        while row + J <= p.rows {
            strip::<S, E, RV, J>(p, row, &mut fetched);
            row += J;
        }
        while row + 4 <= p.rows {
            strip::<S, E, RV, 4>(p, row, &mut fetched);
            row += 4;
        }
        while row + 2 <= p.rows {
            strip::<S, E, RV, 2>(p, row, &mut fetched);
            row += 2;
        }
        if row < p.rows {
            strip::<S, E, RV, 1>(p, row, &mut fetched);
        }
    }
}

/// `J` rows from row `row`.
#[inline(always)]
unsafe fn strip<S: Simd, E: Term<S>, const RV: usize, const J: usize>(
    p: &mut PanelProduct<'_, E>,
    row: usize,
    fetched: &mut Fetched,
) {
    let (mut n, lines) = (0, p.ahead.starts.len() * p.ahead.lines);
    // SAFETY: the caller's promise.
    unsafe {
        while n + RV * S::LANES <= p.columns.next_multiple_of(S::LANES) {
            if fetched.pace > 0 && fetched.lines + fetched.pace <= lines {
                tile::<S, E, RV, J, true>(p, [row, n], *fetched);
            } else {
                tile::<S, E, RV, J, false>(p, [row, n], *fetched);
            }
            fetched.lines += fetched.pace;
            n += RV * S::LANES;
        }
        while n < p.columns {
            tile::<S, E, 1, J, false>(p, [row, n], *fetched);
            n += S::LANES;
        }
    }
}

/// `J` rows × `RV` vectors; prefetches lines if `AHEAD`.
#[inline(always)]
unsafe fn tile<S: Simd, E: Term<S>, const RV: usize, const J: usize, const AHEAD: bool>(
    p: &mut PanelProduct<'_, E>,
    [row, column]: [usize; 2],
    fetched: Fetched,
) {
    // SAFETY: `PanelProduct::check`, and the caller's promise.
    unsafe {
        let (a, b) = (p.a.as_ptr().add(row * STRIDE), p.b.as_ptr().add(column));
        let mut acc = [[S::splat(0.0); RV]; J];
        for k in 0..p.depth {
            if AHEAD {
                // Some lines more than once: that is cheaper than counting.
                let line = fetched.lines + k * fetched.pace / DEPTH;
                let start = *p.ahead.starts.get_unchecked(line / p.ahead.lines);
                S::fetch(std::ptr::without_provenance(start + line % p.ahead.lines * LINE));
            }
            let mut vectors = [E::load(b.add(k * COLUMNS)); RV];
            for r in 1..RV {
                vectors[r] = E::load(b.add(k * COLUMNS + r * S::LANES));
            }
            for j in 0..J {
                let x = E::splat(*a.add(j * STRIDE + k));
                for r in 0..RV {
                    acc[j][r] = E::multiply(x, vectors[r], acc[j][r]);
                }
            }
        }
        for j in 0..J {
            let c = p.c.as_mut_ptr().add((row + j) * COLUMNS + column);
            if p.add {
                let old = load::<S, RV>(c);
                for r in 0..RV {
                    acc[j][r] = S::add(old[r], acc[j][r]);
                }
            }
            store::<S, RV>(c, acc[j]);
        }
    }
}
