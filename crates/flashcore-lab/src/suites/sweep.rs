//! The suite `sweep`: sequence lengths of all kinds, each beside the next that fills its last tile of rows.

use flashcore_core::{DType, Mask};

use super::Comparisons;
use crate::{comparison::Comparison, task::Task};

/// Rows that lengths are rounded up to.
const TILE_ROWS: usize = 128;
/// What a tile that is not full may cost.
const WANTED: f64 = 1.10;

/// Lengths beside powers of two and three quarters of them, and primes between.
const LENGTHS: [usize; 36] = [
    64, 65, 96, 127, 129, 191, 193, 255, 257, 320, 383, 385, 449, 511, 513, 641, 769, 1000, 1023, 1025, 1151,
    1537, 2047, 2049, 2503, 3073, 4095, 4097, 5003, 6145, 8191, 8193, 10_007, 12_289, 16_257, 16_383,
];

/// Heads and features of each curve.
const HEADS: [[usize; 2]; 2] = [[16, 128], [32, 64]];

/// Every length, full and causal.
pub(super) fn comparisons(dtype: DType) -> Comparisons {
    let mut comparisons = Vec::new();
    for [heads, dim] in HEADS {
        for (mask, name) in [(Mask::NONE, "full"), (Mask::CAUSAL, "causal")] {
            let what = format!("1x{heads}xSx{dim} {name}, against S rounded up to {TILE_ROWS}");
            for seq in LENGTHS {
                let [task, other] = [seq, seq.next_multiple_of(TILE_ROWS)]
                    .map(|seq| Task::square(dtype, [1, heads, seq, dim], mask));
                comparisons.push(Comparison::of_ours(what.clone(), task?, other?, WANTED));
            }
        }
    }
    Ok(comparisons)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_leaves_its_last_tile_partly_empty() {
        assert!(LENGTHS.is_sorted() && LENGTHS[0] == 64 && LENGTHS.iter().all(|seq| seq % TILE_ROWS != 0));
        let of = |dtype| comparisons(dtype).unwrap();
        assert_eq!(of(DType::F16).len(), 4 * LENGTHS.len());
        assert!(of(DType::F16).iter().all(|c| c.work == 1.0 && c.task.spec().dtype == "f16"));
    }
}
