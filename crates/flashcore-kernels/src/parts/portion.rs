//! What a thread moves of a row between global memory and registers, in pieces as wide as the rows' alignment allows.
//!
//! A row is cut into portions of 16 bytes, a chunk, or less. Its features may end inside the last portion: data past
//! them is neither read nor written, and counts as zeros. `load` and `staged` move rows this way.

use flashcore_tile::{Builder, CopyWidth, Element, Global, Pred, Reg, Scope, U32, Val};

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
    pub(crate) const fn copy(self) -> Option<CopyWidth> {
        match self {
            Self::B2 => None,
            Self::B4 => Some(CopyWidth::B4),
            Self::B8 => Some(CopyWidth::B8),
            Self::B16 => Some(CopyWidth::B16),
        }
    }
}

/// Rows as they lie in memory, and how they are cut.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) element: Element,
    /// Features of a row.
    pub(crate) dim: u32,
    /// Bytes of a portion: whole words.
    pub(crate) bytes: u32,
}

/// What of a thread's portion, the same in every row, are features.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Features {
    /// Bytes of a portion.
    bytes: u32,
    /// Whether any are, where some portions only pad.
    pub(crate) some: Option<Pred>,
    /// Where rows end inside a portion.
    pub(crate) end: Option<RowEnd>,
}

/// The end of rows whose last portion is not full.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowEnd {
    /// Whether all of this thread's portion are features.
    pub(crate) whole: Pred,
    /// Bytes of the last portion that are.
    pub(crate) bytes: u32,
}

impl Features {
    /// Portion number `index`, which is less than `most`, if that is known.
    #[track_caller]
    pub(crate) fn new(b: &mut Builder, cut: Cut, index: Reg<U32>, most: Option<u32>) -> Self {
        let row = cut.dim * cut.element.bytes();
        let (held, whole) = (row.div_ceil(cut.bytes), row / cut.bytes);
        let all = most.is_some_and(|most| held >= most);
        let some = (!all).then(|| b.let_(index.lt(held)));
        let end = (held > whole).then(|| RowEnd { whole: b.let_(index.lt(whole)), bytes: row % cut.bytes });
        Self { bytes: cut.bytes, some, end }
    }

    /// The pieces in which portions are moved.
    fn pieces(&self, access: Access) -> Vec<Piece> {
        let full = split(access, self.bytes);
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

/// Offset in a portion, and bytes.
type Place = (u32, u32);

/// A part of a portion that one instruction moves.
#[derive(Clone, Copy, Debug)]
struct Piece {
    place: Place,
    /// Whose portions have it, where not all do that hold features.
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

/// A portion in registers, or in flight to them.
#[derive(Debug)]
pub(crate) struct Portion {
    words: Vec<Reg<U32>>,
    /// Upper halves of the words, where elements come one by one.
    upper: Vec<Reg<U32>>,
}

impl Portion {
    /// Starts to read the portion at `from`; zeros where `there` does not hold or no features are.
    #[track_caller]
    pub(crate) fn read(
        b: &mut Builder,
        access: Access,
        features: &Features,
        from: Global,
        there: Option<Pred>,
    ) -> Self {
        let mut zeros = |n: u32| (0..n).map(|_| b.var_in(Scope::Lane, 0)).collect();
        let words = features.bytes / 4;
        let portion =
            Self { words: zeros(words), upper: zeros(if access == Access::B2 { words } else { 0 }) };
        let present = both(b, there, features.some);
        for Piece { place, only } in features.pieces(access) {
            let load = |b: &mut Builder| portion.read_piece(b, from.at(place.0 as i32), place);
            match both(b, present, only) {
                Some(who) => b.predicated(who, load),
                None => load(b),
            }
        }
        portion
    }

    #[track_caller]
    fn read_piece(&self, b: &mut Builder, from: Global, (at, bytes): Place) {
        match (&self.words[(at / 4) as usize..], bytes) {
            ([w0, w1, w2, w3, ..], 16) => b.load_global_into([*w0, *w1, *w2, *w3], from),
            ([w0, w1, ..], 8) => b.load_global_into([*w0, *w1], from),
            ([w0, ..], 4) => b.load_global_into([*w0], from),
            _ if at % 4 == 2 => b.load_global_16_into(self.upper[(at / 4) as usize], from),
            _ => b.load_global_16_into(self.words[(at / 4) as usize], from),
        }
    }

    /// The portion, which has arrived.
    #[track_caller]
    pub(crate) fn words(&self, b: &mut Builder) -> Vec<Val<U32>> {
        let words = self.words.iter().enumerate();
        let joined = words.map(|(n, &word)| match self.upper.get(n) {
            Some(&upper) => b.let_(word | (upper << 16)).into(),
            None => word.into(),
        });
        joined.collect()
    }
}

/// Writes the features of a portion, of which there are some, to `to`.
#[track_caller]
pub(crate) fn write(b: &mut Builder, access: Access, features: &Features, words: &[Reg<U32>], to: Global) {
    for Piece { place, only } in features.pieces(access) {
        let store = |b: &mut Builder| write_piece(b, words, to.at(place.0 as i32), place);
        match only {
            Some(who) => b.predicated(who, store),
            None => store(b),
        }
    }
}

#[track_caller]
fn write_piece(b: &mut Builder, words: &[Reg<U32>], to: Global, (at, bytes): Place) {
    let n = (at / 4) as usize;
    if bytes > 2 {
        let words: Vec<Val<U32>> =
            words[n..][..(bytes / 4) as usize].iter().map(|&word| word.into()).collect();
        return b.store_global(to, &words);
    }
    let half = if at % 4 == 2 { b.let_(words[n] >> 16) } else { words[n] };
    b.store_global_16(to, half);
}

/// Both conditions, if there are any.
#[track_caller]
pub(crate) fn both(b: &mut Builder, x: Option<Pred>, y: Option<Pred>) -> Option<Pred> {
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
            for bytes in (2..=16).step_by(2) {
                let places = split(access, bytes);
                let ends = places.iter().map(|(at, width)| at + width);
                let starts = std::iter::once(0).chain(ends.clone());
                assert!(starts.zip(&places).all(|(end, place)| end == place.0), "{places:?}");
                assert_eq!(ends.max(), Some(bytes));
                assert!(places.iter().all(|(at, width)| at % width == 0 && *width <= access.bytes()));
            }
        }
        assert_eq!(split(Access::B16, 6), [(0, 4), (4, 2)]);
        assert_eq!(split(Access::B4, 6), [(0, 4), (4, 2)]);
        assert_eq!(split(Access::B16, 14), [(0, 8), (8, 4), (12, 2)]);
    }
}
