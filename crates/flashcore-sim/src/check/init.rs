//! One bit per byte: whether it was ever written.

use std::ops::Range;

/// Which bytes of a memory were written; `None` is all of them.
#[derive(Clone, Debug)]
pub(crate) struct Written {
    known: Option<Vec<u64>>,
    bytes: usize,
}

impl Written {
    /// `bytes` bytes, all written or none.
    pub(crate) fn new(bytes: usize, all: bool) -> Self {
        Self { known: (!all).then(|| vec![0; bytes.div_ceil(64)]), bytes }
    }

    /// Marks a range as written.
    pub(crate) fn mark(&mut self, range: Range<usize>) {
        if let Some(known) = &mut self.known {
            words(range).for_each(|(word, mask)| known[word] |= mask);
        }
    }

    /// Marks a range as not written.
    pub(crate) fn clear(&mut self, range: Range<usize>) {
        let all = self.bytes.div_ceil(64);
        let known = self.known.get_or_insert_with(|| vec![u64::MAX; all]);
        words(range).for_each(|(word, mask)| known[word] &= !mask);
    }

    /// Whether nothing of the range was written.
    pub(crate) fn misses(&self, range: Range<usize>) -> bool {
        let Some(known) = &self.known else { return false };
        words(range).all(|(word, mask)| known[word] & mask == 0)
    }

    /// Marks what is marked in the shadow of a copy.
    pub(crate) fn join(&mut self, other: &Self) {
        if let (Some(own), Some(other)) = (&mut self.known, &other.known) {
            own.iter_mut().zip(other).for_each(|(own, other)| *own |= other);
        }
    }

    /// Whether the whole range was written.
    pub(crate) fn covers(&self, range: Range<usize>) -> bool {
        let Some(known) = &self.known else { return true };
        words(range).all(|(word, mask)| known[word] & mask == mask)
    }
}

/// The words that a range of bits touches, with the bits in each.
fn words(range: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    let (start, end) = (range.start, range.end);
    let last = if range.is_empty() { start / 64 } else { end.div_ceil(64) };
    (start / 64..last).map(move |word| {
        let low = start.saturating_sub(word * 64);
        let high = (end - word * 64).min(64);
        (word, (u64::MAX >> (64 - (high - low))) << low)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_across_words_are_exact() {
        let mut written = Written::new(256, false);
        written.mark(60..70);
        assert!(written.covers(60..70));
        assert!(!written.covers(59..70) && !written.covers(60..71));
        assert!(Written::new(5, true).covers(0..5) && written.covers(65..65));
    }
}
