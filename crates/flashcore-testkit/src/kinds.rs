//! Kinds of data that kernels are judged on, for error and for time. N(0, 1) alone flatters a kernel: no row is
//! peaked, and no running maximum moves for long.
//!
//! `bench --suite kinds`, `--kind` and the cases of [`Tag::Kinds`](crate::Tag::Kinds) draw from here.

use flashcore_core::{Dims, Element};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::rng::Rng;

/// What the numbers in Q, K and V are like.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// N(0, 1).
    #[default]
    Normal,
    /// N(0, 1), and one element in a thousand N(0, 100) on top: a few features tower over the rest.
    Outliers,
    /// Q and K four times as large: scores of standard deviation 16, most rows dominated by one key.
    Sharp,
    /// All queries share a direction that the first few keys point to strongly, as first tokens do in language models.
    Sink,
    /// Values around 3: what the weights' rounding does to a sum no longer cancels.
    Mean,
    /// Keys that grow towards the first: a kernel that starts with the last key finds ever larger scores.
    Drift,
}

/// Which tensor is filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    Q,
    K,
    V,
}

impl Part {
    /// The inputs, in order.
    pub const ALL: [Self; 3] = [Self::Q, Self::K, Self::V];
}

/// One element in so many is an outlier.
const OUTLIERS_ONE_IN: usize = 1000;
/// Standard deviation of an outlier.
const OUTLIER: f32 = 10.0;
/// How much larger sharp queries and keys are.
const SHARP: f32 = 4.0;
/// Keys that queries are drawn to.
const SINKS: usize = 4;
/// What pointing in the shared direction adds to the score of such a key, with the default scale.
const SINK_SCORE: f32 = 12.0;
/// The mean of values that have one.
const MEAN: f32 = 3.0;
/// The first key over the last, where keys drift.
const DRIFT: f32 = 8.0;
/// Elements that one generator draws in a row.
const STRETCH: usize = 1 << 16;

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 6] =
        [Self::Normal, Self::Outliers, Self::Sharp, Self::Sink, Self::Mean, Self::Drift];

    /// The name used on the command line and in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::Outliers => "outliers",
            Self::Sharp => "sharp",
            Self::Sink => "sink",
            Self::Mean => "mean",
            Self::Drift => "drift",
        }
    }

    /// The kind of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Whether it is N(0, 1), which goes without saying.
    pub fn is_normal(&self) -> bool {
        *self == Self::Normal
    }

    /// Fills a tensor that is dense in the order batch, heads, sequence, dim, on all cores; the same seed gives the same
    /// numbers everywhere.
    pub fn fill<T: Element>(self, part: Part, dims: Dims, elements: &mut [T], seed: u64) {
        let stretches = elements.par_chunks_mut(STRETCH).enumerate();
        stretches.for_each(|(index, stretch)| {
            let mut rng = Rng::new(seed.wrapping_mul(0x1_0000_0001).wrapping_add(index as u64));
            let mut at = index * STRETCH..;
            stretch.fill_with(|| T::from_f32(self.element(part, dims, at.next().unwrap_or(0), &mut rng)));
        });
    }

    /// Element `at` of a dense tensor.
    pub(crate) fn element(self, part: Part, dims: Dims, at: usize, rng: &mut Rng) -> f32 {
        let normal = rng.normal();
        let (feature, seq) = (at % dims.dim, at / dims.dim % dims.seq);
        match (self, part) {
            (Self::Outliers, _) if rng.one_in(OUTLIERS_ONE_IN) => normal + OUTLIER * rng.normal(),
            (Self::Sharp, Part::Q | Part::K) => SHARP * normal,
            (Self::Sink, Part::Q) => normal + direction(feature),
            // A sum of `dim` products, divided by the square root of `dim`.
            (Self::Sink, Part::K) if seq < SINKS => {
                normal + SINK_SCORE / (dims.dim as f32).sqrt() * direction(feature)
            }
            (Self::Mean, Part::V) => normal + MEAN,
            (Self::Drift, Part::K) => normal * growth(seq, dims.seq),
            _ => normal,
        }
    }
}

/// The direction that sinks lie in: as far in every feature, back and forth so that no tensor gets a mean.
fn direction(feature: usize) -> f32 {
    if feature.is_multiple_of(2) { 1.0 } else { -1.0 }
}

/// From 1 at the last key to nearly [`DRIFT`] at the first, evenly.
fn growth(seq: usize, seqs: usize) -> f32 {
    1.0 + (DRIFT - 1.0) * (seqs - 1 - seq) as f32 / seqs as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: Dims = Dims::new(1, 2, 2048, 64);

    fn draw(kind: Kind, part: Part) -> Vec<f32> {
        let mut tensor = vec![0.0; DIMS.count().unwrap()];
        kind.fill(part, DIMS, &mut tensor, 7);
        tensor
    }

    fn moments(numbers: impl Iterator<Item = f32> + Clone) -> [f64; 2] {
        let count = numbers.clone().count() as f64;
        let mean = numbers.clone().map(f64::from).sum::<f64>() / count;
        let variance = numbers.map(|x| (f64::from(x) - mean).powi(2)).sum::<f64>() / count;
        [mean, variance.sqrt()]
    }

    #[track_caller]
    fn check(kind: Kind, part: Part, wanted: [f64; 2]) {
        let found = moments(draw(kind, part).into_iter());
        let near =
            found.iter().zip(wanted).all(|(found, wanted)| (found - wanted).abs() < 0.02 * wanted.max(1.0));
        assert!(near, "{kind:?} {part:?}: mean and deviation {found:?} instead of {wanted:?}");
    }

    #[test]
    fn kinds_have_the_moments_they_claim() {
        for part in Part::ALL {
            check(Kind::Normal, part, [0.0, 1.0]);
            // 1 + 100 / 1000.
            check(Kind::Outliers, part, [0.0, 1.1f64.sqrt()]);
            let sharp = if part == Part::V { 1.0 } else { 4.0 };
            check(Kind::Sharp, part, [0.0, sharp]);
            check(Kind::Mean, part, [if part == Part::V { 3.0 } else { 0.0 }, 1.0]);
        }
        check(Kind::Sink, Part::Q, [0.0, 2f64.sqrt()]);
    }

    /// Scores of one query with the keys of its head, with the default scale.
    fn scores(kind: Kind, query: usize) -> Vec<f64> {
        let (q, k, dim) = (draw(kind, Part::Q), draw(kind, Part::K), DIMS.dim);
        let q = &q[query * dim..][..dim];
        let score =
            |k: &[f32]| q.iter().zip(k).map(|(a, b)| f64::from(a * b)).sum::<f64>() / (dim as f64).sqrt();
        k.chunks(dim).take(DIMS.seq).map(score).collect()
    }

    #[test]
    fn the_first_keys_of_sink_take_most_of_a_row() {
        let scores = scores(Kind::Sink, 1000);
        let mass = |scores: &[f64]| scores.iter().map(|score| score.exp()).sum::<f64>();
        assert!(mass(&scores[..SINKS]) > 0.8 * mass(&scores), "{:?}", &scores[..8]);
    }

    #[test]
    fn scores_of_drift_grow_towards_the_first_key() {
        let scores = scores(Kind::Drift, 5);
        let spreads: Vec<_> =
            scores.chunks(DIMS.seq / 4).map(|part| moments(part.iter().map(|&x| x as f32))[1]).collect();
        assert!(spreads.is_sorted_by(|a, b| a > b) && spreads[0] > 3.0 * spreads[3], "{spreads:?}");
    }

    #[test]
    fn names_are_unique_and_found_again() {
        for kind in Kind::ALL {
            assert_eq!(Kind::named(kind.name()), Some(kind));
        }
        assert_eq!((Kind::named("Sharp"), Kind::default()), (None, Kind::Normal));
    }
}
