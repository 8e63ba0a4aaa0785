//! The sparse A of `mma.sp`: its stored columns are placed where its lanes' metadata says, all others are 0.
//!
//! PTX ISA, "Sparse matrix storage": of four neighbours two are stored, with two-bit positions; of two tf32 one is, with a
//! four-bit position. The lanes of a quad that hold the metadata of rows g and g + 8 are chosen by the selector.

use super::{Outcome, Step, tensor::Matrix};
use crate::{
    finding::FindingKind,
    program::{Element, Lanes, Sparse},
};

/// Bits that tell of one chunk of neighbours.
const CHUNK_BITS: usize = 4;

/// Where a chunk's metadata lies: lane and lowest bit.
fn home(sparse: &Sparse, element: Element, k: usize, row: usize, chunk: usize) -> (usize, usize) {
    let (group, lower) = (row % 8, row / 8);
    // Eight chunks of one row fill a word of 8-bit elements; else four chunks of each of two rows do.
    let (word, bit) = match element.bits() {
        8 => (2 * (chunk / 8) + lower, CHUNK_BITS * (chunk % 8)),
        _ => (chunk / 4, 16 * lower + CHUNK_BITS * (chunk % 4)),
    };
    let per_row = k / width(element) * CHUNK_BITS;
    let lanes = 2 * per_row / 32;
    (4 * group + sparse.selector * lanes + word, bit)
}

/// Neighbours of which half are stored.
const fn width(element: Element) -> usize {
    if matches!(element, Element::Tf32) { 2 } else { 4 }
}

/// The columns of a chunk that its stored elements belong to; `None` where the ISA gives the bits no meaning.
fn columns(element: Element, bits: u64, ordered: bool) -> Option<Vec<usize>> {
    let (first, second) = ((bits & 3) as usize, (bits >> 2 & 3) as usize);
    match (element, bits) {
        (Element::Tf32, 0b0100) => Some(vec![0]),
        (Element::Tf32, 0b1110) => Some(vec![1]),
        (Element::Tf32, _) => None,
        _ if first == second || (ordered && first > second) => None,
        _ => Some(vec![first, second]),
    }
}

impl Step<'_, '_> {
    /// A with all of its columns, from the half that is `stored`.
    pub(super) fn expanded(
        &mut self,
        sparse: &Sparse,
        element: Element,
        stored: &Matrix,
        (rows, k): (usize, usize),
    ) -> Outcome<Matrix> {
        let words: Lanes = self.read(sparse.metadata);
        let (width, mut full) = (width(element), Matrix::zero(rows, k));
        for row in 0..rows {
            for chunk in 0..k / width {
                let (lane, bit) = home(sparse, element, k, row, chunk);
                let bits = words[lane] >> bit & 0xf;
                let Some(columns) = columns(element, bits, sparse.ordered) else {
                    return self.bad_metadata(sparse, element, lane, bits, (row, chunk * width));
                };
                for (slot, column) in columns.into_iter().enumerate() {
                    full.set(row, chunk * width + column, stored.at(row, chunk * width / 2 + slot));
                }
            }
        }
        Ok(full)
    }

    fn bad_metadata<T>(
        &mut self,
        sparse: &Sparse,
        element: Element,
        lane: usize,
        bits: u64,
        (row, column): (usize, usize),
    ) -> Outcome<T> {
        let rule = match (element, sparse.ordered) {
            (Element::Tf32, _) => "0b0100 and 0b1110 are the two that tf32 knows",
            (_, true) => "two places of four in ascending order, the first in the lower bits, are needed",
            (_, false) => "two different places of four are needed",
        };
        let text = format!(
            "sparsity metadata {bits:#06b} of row {row} from column {column} has no meaning: {rule} (selector {})",
            sparse.selector
        );
        self.halt(FindingKind::BadDescriptor, lane, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        numeric::{E4M3, F16},
        program::Src,
    };
    use std::collections::BTreeSet;

    /// Every chunk has four bits of its own, in the lanes that the selector names and no others.
    #[test]
    fn chunks_fill_the_words_of_the_chosen_lanes() {
        let half = Element::Small(F16, 16);
        let byte = Element::Small(E4M3, 8);
        for (element, k, lanes) in [
            (half, 16, 1),
            (half, 32, 2),
            (Element::Tf32, 8, 1),
            (Element::Tf32, 16, 2),
            (byte, 32, 2),
            (byte, 64, 4),
        ] {
            for selector in 0..4 / lanes {
                let sparse = Sparse { metadata: Src::Imm(0), selector, ordered: true };
                let chunks = (0..16).flat_map(|row| (0..k / width(element)).map(move |chunk| (row, chunk)));
                let homes: BTreeSet<_> =
                    chunks.map(|(row, chunk)| home(&sparse, element, k, row, chunk)).collect();
                let expected = (0..32)
                    .filter(|lane| lane % 4 / lanes == selector)
                    .flat_map(|lane| (0..8).map(move |bits| (lane, 4 * bits)));
                assert_eq!(homes, expected.collect(), "{element:?} k={k} selector {selector}");
            }
        }
    }

    #[test]
    fn metadata_without_meaning_is_told_from_the_rest() {
        let half = Element::Small(F16, 16);
        assert_eq!(columns(half, 0b1001, true), Some(vec![1, 2]));
        assert_eq!(columns(half, 0b0110, true), None, "descending");
        assert_eq!(columns(half, 0b0110, false), Some(vec![2, 1]));
        assert_eq!(columns(half, 0b0101, false), None, "the same place twice");
        assert_eq!(columns(Element::Tf32, 0b1110, true), Some(vec![1]));
        assert_eq!(columns(Element::Tf32, 0b1100, false), None);
    }
}
