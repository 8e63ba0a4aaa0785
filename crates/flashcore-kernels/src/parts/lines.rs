//! One factor of a product on its way into shared memory, by copies of 16 bytes: for kernels whose factors may be
//! transposed.
//!
//! Eight threads copy the 128 bytes of a line; anything beyond the factor becomes zeros without being read.

use flashcore_tile::{
    Builder, CHUNK_BYTES, CopyWidth, Expr, Global, Pred, Reg, Scope, Shared, SmemTile, U32, U64, Val,
};

/// Bytes of an element.
const BYTES: u32 = 2;
/// Threads that share a line of 128 bytes.
const LANES: u32 = 8;
/// Elements of depth of a stage: one row of the widest swizzle.
pub(crate) const DEPTH: u32 = 64;

/// A thread's place in a line, and its first line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    pub(crate) line: Reg<U32>,
    pub(crate) chunk: Reg<U32>,
}

impl Share {
    pub(crate) fn new(b: &mut Builder) -> Self {
        let thread = b.thread();
        Self { line: b.let_(thread / LANES), chunk: b.let_(thread % LANES) }
    }

    /// Where the thread's first chunk goes in the first copy of a tile, but for the tile's own offset.
    pub(crate) fn destination(&self, b: &mut Builder, tile: &SmemTile) -> Reg<U32> {
        let base = b.shared_base();
        tile.chunk(b, base, self.line, self.chunk)
    }
}

/// The bytes of a chunk that are read, where that may be none.
pub(crate) fn present(b: &mut Builder, there: Option<Pred>, inside: Option<Pred>) -> Option<Val<U32>> {
    let both = match (there, inside) {
        (Some(there), Some(inside)) => Some(b.both(there, inside)),
        (one, other) => one.or(other),
    };
    both.map(|both| b.select::<U32>(both, CHUNK_BYTES, 0).into())
}

/// One thread's share of the copies that fill a tile of a factor.
pub(crate) struct LineLoad {
    pub(crate) tile: SmemTile,
    /// Whether lines run along the depth; else across it.
    pub(crate) along: bool,
    pub(crate) to: Reg<U32>,
    pub(crate) lines_per_pass: u32,
    /// Lines, or columns, of one matrix of the tile.
    pub(crate) matrix: u32,
    /// Where the thread's first chunk of the next stage comes from: of each matrix.
    pub(crate) from: Vec<Reg<U64>>,
    /// Bytes between lines of neighbouring passes, and from one stage to the next.
    pub(crate) pass: Reg<U64>,
    pub(crate) step: Option<Reg<U64>>,
    /// What to compare with, where the factor is not whole tiles.
    pub(crate) bounds: Option<Bounds>,
}

/// Where a factor ends.
pub(crate) struct Bounds {
    /// First element of the thread along the depth in the next stage, and their number.
    pub(crate) depth: [Reg<U32>; 2],
    /// First element of the thread across the depth, and their number.
    pub(crate) across: [Reg<U32>; 2],
}

/// Where a tile of a matrix starts and where the matrix ends, as registers.
pub(crate) struct TileStart {
    /// Address of the matrix, and bytes from one line to the next.
    pub(crate) base: Reg<U64>,
    pub(crate) line: Reg<U64>,
    /// First element along the depth, and the end.
    pub(crate) depth: [Reg<U32>; 2],
    /// First element across the depth, and the end.
    pub(crate) across: [Reg<U32>; 2],
}

impl LineLoad {
    /// A thread's share of a tile with so many lines across the depth, from a matrix whose lines run `along` the depth or
    /// across it, as many per pass of all threads.
    pub(crate) fn of_matrix(
        b: &mut Builder,
        tile: &SmemTile,
        (along, matrix, lines_per_pass): (bool, u32, u32),
        start: &TileStart,
    ) -> Self {
        let share = Share::new(b);
        let chunk = b.let_(share.chunk * (CHUNK_BYTES / BYTES));
        let (within_depth, within_across) = if along { (chunk, share.line) } else { (share.line, chunk) };
        let depth = b.let_(start.depth[0] + within_depth);
        let across = b.let_(start.across[0] + within_across);
        let (line, column) = if along { (across, depth) } else { (depth, across) };
        let from = b.let_(line.widen() * start.line + start.base);
        let from = b.let_(from + column.mul_wide(BYTES));
        let bounds = Bounds {
            depth: [b.var_in(Scope::Lane, depth), start.depth[1]],
            across: [across, start.across[1]],
        };
        Self {
            tile: *tile,
            along,
            to: share.destination(b, tile),
            lines_per_pass,
            matrix,
            from: vec![b.var_in(Scope::Lane, from)],
            pass: b.let_(start.line * u64::from(lines_per_pass)),
            step: (!along).then(|| b.let_(start.line * u64::from(DEPTH))),
            bounds: Some(bounds),
        }
    }

    /// Starts the copies of the next stage into the copy of the tile `skip` bytes on.
    pub(crate) fn issue(&self, b: &mut Builder, skip: impl Into<Expr<U32>>) {
        let to = b.let_(self.to + skip.into());
        for (matrix, &from) in (0..).zip(&self.from) {
            match self.along {
                true => self.issue_rows(b, to, matrix, from),
                false => self.issue_columns(b, to, matrix, from),
            }
            match self.step {
                Some(step) => b.add_to(from, step),
                None => b.add_to(from, u64::from(DEPTH * BYTES)),
            }
        }
        if let Some(bounds) = &self.bounds {
            b.add_to(bounds.depth[0], DEPTH);
        }
    }

    fn issue_rows(&self, b: &mut Builder, to: Reg<U32>, matrix: u32, from: Reg<U64>) {
        let inside = self.bounds.as_ref().map(|bounds| b.let_(bounds.depth[0].lt(bounds.depth[1])));
        let at = b.var_in(Scope::Lane, from);
        for pass in 0..self.matrix / self.lines_per_pass {
            if pass > 0 {
                b.add_to(at, self.pass);
            }
            let there = self.bounds.as_ref().map(|Bounds { across: [first, limit], .. }| {
                b.let_((*first + pass * self.lines_per_pass).lt(*limit))
            });
            let present = present(b, there, inside);
            let line = matrix * self.matrix + pass * self.lines_per_pass;
            let offset = self.tile.offset() + line * self.tile.slab_width();
            b.copy_async(CopyWidth::B16Of256, Shared { base: to, offset }, Global::from(at), present);
        }
    }

    fn issue_columns(&self, b: &mut Builder, to: Reg<U32>, matrix: u32, from: Reg<U64>) {
        let at = b.var_in(Scope::Lane, from);
        let slabs = self.matrix / self.tile.slab_cols();
        for pass in 0..DEPTH / self.lines_per_pass {
            if pass > 0 {
                b.add_to(at, self.pass);
            }
            let inside = self.bounds.as_ref().map(|Bounds { depth: [first, limit], .. }| {
                b.let_((*first + pass * self.lines_per_pass).lt(*limit))
            });
            for slab in 0..slabs {
                let skipped = slab * self.tile.slab_cols();
                let there = self
                    .bounds
                    .as_ref()
                    .map(|Bounds { across: [first, limit], .. }| b.let_((*first + skipped).lt(*limit)));
                let present = present(b, there, inside);
                let slab_at = (matrix * slabs + slab) * self.tile.slab_bytes();
                let offset =
                    self.tile.offset() + slab_at + pass * self.lines_per_pass * self.tile.slab_width();
                let from = Global::from(at).at((skipped * BYTES) as i32);
                b.copy_async(CopyWidth::B16, Shared { base: to, offset }, from, present);
            }
        }
    }
}
