//! Which keys a query may see: a band around the diagonal.

use std::{fmt, ops::Range};

/// Which corner the diagonal of a mask ends in when queries and keys differ in number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Align {
    /// The last query sees the last key, as in FlashAttention.
    #[default]
    BottomRight,
    /// The first query sees the first key, as in PyTorch's `is_causal`.
    TopLeft,
}

/// The keys that each query may see.
///
/// Every mask is a band: query `i` sees the keys from `d - left` to `d + right`, where `d` is the key on its
/// diagonal and `None` means no limit. No mask, causal and sliding window are values of this one type.
///
/// ```
/// use flashcore_core::Mask;
/// assert_eq!(Mask::CAUSAL.keys(1, 4, 4), 0..2);
/// assert_eq!(Mask::window(1, 0).keys(3, 4, 4), 2..4);
/// // Bottom-right alignment: one query over four keys sees them all.
/// assert_eq!(Mask::CAUSAL.keys(0, 1, 4), 0..4);
/// assert_eq!(Mask::CAUSAL.top_left().keys(0, 1, 4), 0..1);
/// // Queries that start two positions behind the first key.
/// assert_eq!(Mask::CAUSAL.top_left().shifted(2).keys(0, 4, 8), 0..3);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Mask {
    left: Option<u32>,
    right: Option<u32>,
    align: Align,
    shift: i32,
}

impl Mask {
    /// Every query sees every key.
    pub const NONE: Self = Self { left: None, right: None, align: Align::BottomRight, shift: 0 };

    /// A query sees the keys up to its own position.
    pub const CAUSAL: Self = Self { right: Some(0), ..Self::NONE };

    /// A query sees at most `left` keys before and `right` keys after its own position; `None` means no limit.
    pub fn window(left: impl Into<Option<u32>>, right: impl Into<Option<u32>>) -> Self {
        Self { left: left.into(), right: right.into(), ..Self::NONE }
    }

    /// The same mask with its diagonal starting in the top left corner.
    pub const fn top_left(self) -> Self {
        Self { align: Align::TopLeft, ..self }
    }

    /// The same mask with its diagonal `keys` further to later keys; a negative number moves it to earlier ones.
    ///
    /// For part of a longer sequence, whose queries start at position `p` and whose keys start at
    /// position `s`, align the mask to the top left corner and shift it by `p - s`.
    pub const fn shifted(self, keys: i32) -> Self {
        Self { shift: self.shift.saturating_add(keys), ..self }
    }

    /// Keys visible before the diagonal.
    pub const fn left(&self) -> Option<u32> {
        self.left
    }

    /// Keys visible after the diagonal.
    pub const fn right(&self) -> Option<u32> {
        self.right
    }

    /// Where the diagonal lies.
    pub const fn align(&self) -> Align {
        self.align
    }

    /// How far the diagonal lies to the right of its corner.
    pub const fn shift(&self) -> i32 {
        self.shift
    }

    /// Whether no key is ever masked.
    pub const fn is_none(&self) -> bool {
        self.left.is_none() && self.right.is_none()
    }

    /// The key on the diagonal of query 0; may be negative, as where there are more queries than keys.
    pub const fn diagonal(&self, seq_q: usize, seq_kv: usize) -> i64 {
        let corner = match self.align {
            Align::BottomRight => seq_kv as i64 - seq_q as i64,
            Align::TopLeft => 0,
        };
        corner + self.shift as i64
    }

    /// The keys that query `i` of `seq_q` sees among `seq_kv`.
    pub fn keys(&self, i: usize, seq_q: usize, seq_kv: usize) -> Range<usize> {
        let on_diagonal = i as i64 + self.diagonal(seq_q, seq_kv);
        let clamp = |key: i64| key.clamp(0, seq_kv as i64) as usize;
        let end = self.right.map_or(seq_kv, |right| clamp(on_diagonal + i64::from(right) + 1));
        let start = self.left.map_or(0, |left| clamp(on_diagonal - i64::from(left)));
        start.min(end)..end
    }

    /// How many (query, key) pairs are visible, at a cost that does not depend on the lengths.
    pub fn pairs(&self, seq_q: usize, seq_kv: usize) -> u64 {
        let diagonal = i128::from(self.diagonal(seq_q, seq_kv));
        let whole = seq_q as i128 * seq_kv as i128;
        let sum = |offset: i128| clamped_sum(seq_q as i128, diagonal + offset, seq_kv as i128);
        let ends = self.right.map_or(whole, |right| sum(i128::from(right) + 1));
        let starts = self.left.map_or(0, |left| sum(-i128::from(left)));
        u64::try_from(ends - starts).unwrap_or(u64::MAX)
    }
}

/// The sum of `i + offset`, kept between 0 and `most`, for `i` from 0 to below `count`.
fn clamped_sum(count: i128, offset: i128, most: i128) -> i128 {
    // Below `rises` every term is 0, from `full` on it is `most`; between them terms grow by 1.
    let rises = (-offset).clamp(0, count);
    let full = (most - offset).clamp(0, count);
    (full - rises) * (rises + full - 1 + 2 * offset) / 2 + (count - full) * most
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bound = |b: Option<u32>| b.map_or("inf".to_owned(), |b| b.to_string());
        match (self.left, self.right) {
            (None, None) => f.write_str("full"),
            (None, Some(0)) => f.write_str("causal"),
            (left, right) => write!(f, "window {},{}", bound(left), bound(right)),
        }?;
        if self.align == Align::TopLeft && !self.is_none() {
            f.write_str(" top-left")?;
        }
        if self.shift != 0 && !self.is_none() { write!(f, " shifted {:+}", self.shift) } else { Ok(()) }
    }
}
