//! Tiles of E4M3 in shared memory, widened to 16 bits once by all threads of a CTA, for kernels whose warps read every tile.
//!
//! Two neighbouring bytes are one 16-bit column of the source tile. A thread takes 16 bytes of a row at a time.

use flashcore_tile::{B32, Builder, CHUNK_BYTES, Half, Pred, Reg, SmemTile, U32, Val};

/// One thread's share of widening a tile.
#[derive(Debug)]
pub(crate) struct Widening {
    half: Half,
    from: SmemTile,
    to: SmemTile,
    /// First row of this thread, its chunk of every row, and whether there is such a chunk, where that is not always so.
    row: Reg<U32>,
    chunk: Reg<U32>,
    exists: Option<Pred>,
    rows_per_pass: u32,
}

impl Widening {
    /// From a ring of one tile to another.
    #[track_caller]
    pub(crate) fn new(b: &mut Builder, half: Half, (from, to): (&SmemTile, &SmemTile)) -> Self {
        let chunks = from.cols() / from.element().per_chunk();
        let lanes = chunks.next_power_of_two();
        let thread = b.thread();
        let (row, chunk) = (b.let_(thread / lanes), b.let_(thread % lanes));
        let exists = (lanes > chunks).then(|| b.let_(chunk.lt(chunks)));
        Self { half, from: *from, to: *to, row, chunk, exists, rows_per_pass: b.threads() / lanes }
    }

    /// Widens the tile that lies `skip` bytes into the ring; barriers are the caller's.
    #[track_caller]
    pub(crate) fn run(&self, b: &mut Builder, skip: Reg<U32>) {
        let rows = self.from.rows();
        for first in (0..rows).step_by(self.rows_per_pass as usize) {
            let row = b.let_(self.row + first);
            let beyond = first + self.rows_per_pass > rows;
            let inside = beyond.then(|| b.let_(row.lt(rows)));
            let takes_part = match (self.exists, inside) {
                (Some(exists), Some(inside)) => Some(b.both(exists, inside)),
                (exists, inside) => exists.or(inside),
            };
            match takes_part {
                Some(some) => b.if_(some, |b| self.chunk(b, row, skip)),
                None => self.chunk(b, row, skip),
            }
        }
    }

    /// Widens this thread's chunk of a row.
    #[track_caller]
    fn chunk(&self, b: &mut Builder, row: Reg<U32>, skip: Reg<U32>) {
        let from = place(b, &self.from, row, self.chunk);
        let from = b.let_(from + skip);
        let words = b.load_shared::<B32, 4>(from);
        let wide: Vec<Val<B32>> =
            words.into_iter().flat_map(|word| b.widen_four(self.half, word)).map(Val::from).collect();
        let first = b.let_(self.chunk << 1);
        let to = place(b, &self.to, row, first);
        // The next chunk of a row is one flipped bit away, whatever the swizzle.
        let next = b.let_(to ^ CHUNK_BYTES);
        b.store_shared(to, &wide[..4]);
        b.store_shared(next, &wide[4..]);
    }
}

/// Where chunk number `chunk` of a row of the first copy lies.
#[track_caller]
fn place(b: &mut Builder, tile: &SmemTile, row: Reg<U32>, chunk: Reg<U32>) -> Reg<U32> {
    let per_slab = tile.slab_width() / CHUNK_BYTES;
    let slab = b.let_((chunk / per_slab) * tile.slab_bytes() + (b.shared_base() + tile.offset()));
    let within = b.let_(chunk % per_slab);
    tile.chunk(b, slab, row, within)
}
