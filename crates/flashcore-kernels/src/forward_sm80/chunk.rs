//! Chunks of 16 bytes between global memory and registers, in pieces as wide as the alignment of rows allows.
//!
//! The features of a row may end inside its last chunk: what lies behind them is neither read nor written, and counts
//! as zeros. `load` and `epilogue` move rows by these chunks.

use flashcore_tile::{Builder, CHUNK_BYTES, CopyWidth, Global, Pred, Reg, Scope, U32, Val};

/// What every row's start is aligned to, in all tensors of a launch: how many bytes can be moved at once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Access {
    /// One element.
    B2,
    /// Two elements.
    B4,
    /// Four elements.
    B8,
    /// A chunk.
    B16,
}

impl Access {
    /// Every access, narrowest first.
    pub const ALL: [Self; 4] = [Self::B2, Self::B4, Self::B8, Self::B16];

    /// Bytes moved at once.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::B2 => 2,
            Self::B4 => 4,
            Self::B8 => 8,
            Self::B16 => 16,
        }
    }

    /// The widest that addresses at multiples of `bytes` allow; odd addresses hold no 16-bit elements.
    pub fn widest_for(bytes: u64) -> Option<Self> {
        Self::ALL.into_iter().rev().find(|access| bytes.is_multiple_of(u64::from(access.bytes())))
    }

    /// The asynchronous copy that moves as much.
    pub(super) const fn copy(self) -> Option<CopyWidth> {
        match self {
            Self::B2 => None,
            Self::B4 => Some(CopyWidth::B4),
            Self::B8 => Some(CopyWidth::B8),
            Self::B16 => Some(CopyWidth::B16),
        }
    }
}

/// What of a thread's chunk, the same in every row, are features.
#[derive(Clone, Copy, Debug)]
pub(super) struct Features {
    /// Whether any are, where some chunks only pad.
    pub(super) some: Option<Pred>,
    /// Where rows end inside a chunk.
    pub(super) end: Option<RowEnd>,
}

/// The end of rows whose last chunk is not full.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowEnd {
    /// Whether all of this thread's chunk are features.
    pub(super) whole: Pred,
    /// Bytes of the last chunk that are.
    pub(super) bytes: u32,
}

impl Features {
    /// Chunk number `chunk`, of as many as `chunks`, of rows of `dim` elements, of which a chunk holds `per_chunk`.
    #[track_caller]
    pub(super) fn new(
        b: &mut Builder,
        chunk: Reg<U32>,
        [dim, per_chunk]: [u32; 2],
        chunks: impl Into<Option<u32>>,
    ) -> Self {
        let (held, whole) = (dim.div_ceil(per_chunk), dim / per_chunk);
        let all = chunks.into().is_some_and(|chunks| held >= chunks);
        let some = (!all).then(|| b.let_(chunk.lt(held)));
        let end = (held > whole).then(|| RowEnd {
            whole: b.let_(chunk.lt(whole)),
            bytes: dim % per_chunk * (CHUNK_BYTES / per_chunk),
        });
        Self { some, end }
    }

    /// The pieces in which chunks are moved.
    fn pieces(&self, access: Access) -> Vec<Piece> {
        let full = split(access, CHUNK_BYTES);
        let Some(RowEnd { whole, bytes }) = self.end else {
            return full.into_iter().map(|place| Piece { place, only: None }).collect();
        };
        let last = split(access, bytes);
        let of_full = full.iter().map(|&place| {
            let only = (!last.contains(&place)).then_some(whole);
            Piece { place, only }
        });
        let of_last = last.iter().filter(|place| !full.contains(place));
        of_full.chain(of_last.map(|&place| Piece { place, only: Some(whole.not()) })).collect()
    }
}

/// Offset in a chunk, and bytes.
type Place = (u32, u32);

/// A part of a chunk that one instruction moves.
#[derive(Clone, Copy, Debug)]
struct Piece {
    place: Place,
    /// Whose chunks have it, where not all do that hold features.
    only: Option<Pred>,
}

/// The fewest pieces that `bytes` bytes fall into.
fn split(access: Access, bytes: u32) -> Vec<Place> {
    let widths = Access::ALL.map(Access::bytes).into_iter().rev().filter(|&width| width <= access.bytes());
    let next = |at: u32| {
        let fits = |width: &u32| *width <= bytes - at && at.is_multiple_of(*width);
        widths.clone().find(fits).map(|width| (at, width))
    };
    std::iter::successors(next(0), |(at, width)| next(at + width)).collect()
}

/// A chunk in registers, or on its way there.
#[derive(Debug)]
pub(super) struct Chunk {
    words: [Reg<U32>; 4],
    /// Upper halves of the words, where elements come one by one.
    upper: Option<[Reg<U32>; 4]>,
}

impl Chunk {
    /// Starts to read the chunk at `from`; zeros where `there` does not hold or no features are.
    #[track_caller]
    pub(super) fn read(
        b: &mut Builder,
        access: Access,
        features: &Features,
        from: Global,
        there: Option<Pred>,
    ) -> Self {
        let zeros = |b: &mut Builder| std::array::from_fn(|_| b.var_in(Scope::Lane, 0));
        let chunk = Self { words: zeros(b), upper: (access == Access::B2).then(|| zeros(b)) };
        let present = both(b, there, features.some);
        for Piece { place: (at, bytes), only } in features.pieces(access) {
            let load = |b: &mut Builder| chunk.read_piece(b, from.at(at as i32), (at, bytes));
            match both(b, present, only) {
                Some(who) => b.predicated(who, load),
                None => load(b),
            }
        }
        chunk
    }

    #[track_caller]
    fn read_piece(&self, b: &mut Builder, from: Global, (at, bytes): Place) {
        let [w0, w1, w2, w3] = self.words;
        let n = (at / 4) as usize;
        match bytes {
            16 => b.load_global_into([w0, w1, w2, w3], from),
            8 => b.load_global_into([self.words[n], self.words[n + 1]], from),
            4 => b.load_global_into([self.words[n]], from),
            _ => {
                let upper = self.upper.filter(|_| at % 4 == 2);
                b.load_global_16_into(upper.map_or(self.words[n], |upper| upper[n]), from);
            }
        }
    }

    /// The chunk, which has arrived.
    #[track_caller]
    pub(super) fn words(&self, b: &mut Builder) -> [Val<U32>; 4] {
        std::array::from_fn(|n| match self.upper {
            Some(upper) => b.let_(self.words[n] | (upper[n] << 16)).into(),
            None => self.words[n].into(),
        })
    }
}

/// Writes the features of a chunk, of which there are some, to `to`.
#[track_caller]
pub(super) fn write(b: &mut Builder, access: Access, features: &Features, words: [Reg<U32>; 4], to: Global) {
    for Piece { place: (at, bytes), only } in features.pieces(access) {
        let store = |b: &mut Builder| write_piece(b, words, to.at(at as i32), (at, bytes));
        match only {
            Some(who) => b.predicated(who, store),
            None => store(b),
        }
    }
}

#[track_caller]
fn write_piece(b: &mut Builder, words: [Reg<U32>; 4], to: Global, (at, bytes): Place) {
    let n = (at / 4) as usize;
    if bytes > 2 {
        let words: Vec<Val<U32>> =
            words[n..][..(bytes / 4) as usize].iter().map(|&word| word.into()).collect();
        return b.store_global(to, &words);
    }
    let half = if at % 4 == 2 { b.let_(words[n] >> 16) } else { words[n] };
    b.store_global_16(to, half);
}

/// Both conditions, as far as there are any.
#[track_caller]
pub(super) fn both(b: &mut Builder, x: Option<Pred>, y: Option<Pred>) -> Option<Pred> {
    match (x, y) {
        (Some(x), Some(y)) => Some(b.both(x, y)),
        (x, y) => x.or(y),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces are aligned, as wide as allowed, and cover each byte once.
    #[test]
    fn pieces_cover_what_is_there() {
        for access in Access::ALL {
            for bytes in (2..=CHUNK_BYTES).step_by(2) {
                let places = split(access, bytes);
                let ends = places.iter().map(|(at, width)| at + width);
                assert!(
                    std::iter::once(0).chain(ends.clone()).zip(&places).all(|(end, place)| end == place.0)
                );
                assert_eq!(ends.last(), Some(bytes));
                assert!(places.iter().all(|(at, width)| at % width == 0 && *width <= access.bytes()));
            }
        }
        assert_eq!(split(Access::B16, 6), [(0, 4), (4, 2)]);
        assert_eq!(split(Access::B4, 6), [(0, 4), (4, 2)]);
        assert_eq!(split(Access::B16, 14), [(0, 8), (8, 4), (12, 2)]);
    }
}
