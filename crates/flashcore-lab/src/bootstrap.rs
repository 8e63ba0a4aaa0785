//! Confidence intervals by resampling: what the median, or a ratio of medians, would be had other samples been drawn.
//!
//! [`crate::stats`] and [`crate::gate`] call this. The percentile bootstrap makes no assumption about the shape of the
//! noise, which for latencies is skewed and has outliers.

use flashcore_testkit::Rng;
use serde::{Deserialize, Serialize};

use crate::stats::sorted;

/// How often samples are drawn again.
pub const RESAMPLES: usize = 10_000;
/// How often the interval shall hold the truth.
pub const CONFIDENCE: f64 = 0.95;
/// The generator's seed: the same samples always give the same interval.
const SEED: u64 = 0x1ab;

/// An estimate and the range that holds the truth with [`CONFIDENCE`].
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Interval {
    pub low: f64,
    pub point: f64,
    pub high: f64,
}

/// The median of `units` and where it lies; `None` where there are none.
pub fn median(units: &[f64]) -> Option<Interval> {
    let mut sampler = Sampler::new(units)?;
    let mut rng = Rng::new(SEED);
    let point = sampler.median_of_all();
    Some(interval(point, (0..RESAMPLES).map(|_| sampler.median(&mut rng)).collect()))
}

/// The median of `ours` over the median of `theirs` and where that ratio lies; `None` where a side has no samples.
pub fn ratio(ours: &[f64], theirs: &[f64]) -> Option<Interval> {
    ratio_seeded(ours, theirs, SEED)
}

/// [`ratio`] with a seed of its own, for repetitions that must differ.
pub fn ratio_seeded(ours: &[f64], theirs: &[f64], seed: u64) -> Option<Interval> {
    let (mut ours, mut theirs) = (Sampler::new(ours)?, Sampler::new(theirs)?);
    let mut rng = Rng::new(seed);
    let point = ours.median_of_all() / theirs.median_of_all();
    let draw = |_| ours.median(&mut rng) / theirs.median(&mut rng);
    Some(interval(point, (0..RESAMPLES).map(draw).collect()))
}

fn interval(point: f64, mut draws: Vec<f64>) -> Interval {
    let tail = (1.0 - CONFIDENCE) / 2.0;
    let last = draws.len() - 1;
    let mut at = |quantile: f64| {
        let index = (quantile * last as f64).round() as usize;
        *draws.select_nth_unstable_by(index, f64::total_cmp).1
    };
    Interval { low: at(tail), point, high: at(1.0 - tail) }
}

/// Draws as many samples as there are, with replacement, and takes their median.
///
/// Samples are sorted once; a draw is then a count per rank, and the median is found by adding counts up, so that no
/// resample is ever sorted.
struct Sampler {
    sorted: Vec<f64>,
    counts: Vec<u32>,
}

impl Sampler {
    fn new(samples: &[f64]) -> Option<Self> {
        (!samples.is_empty()).then(|| Self { sorted: sorted(samples), counts: vec![0; samples.len()] })
    }

    /// The mean of the two middle samples, or the middle one.
    fn median_of_all(&self) -> f64 {
        let n = self.sorted.len();
        (self.sorted[(n - 1) / 2] + self.sorted[n / 2]) / 2.0
    }

    fn median(&mut self, rng: &mut Rng) -> f64 {
        self.counts.fill(0);
        let n = self.sorted.len();
        for _ in 0..n {
            // The upper half of the product: uniform below n but for a bias of n / 2^64.
            let rank = (u128::from(rng.next_u64()) * n as u128) >> 64;
            self.counts[rank as usize] += 1;
        }
        (self.drawn((n - 1) / 2) + self.drawn(n / 2)) / 2.0
    }

    /// The sample at a rank of the resample.
    fn drawn(&self, rank: usize) -> f64 {
        let mut seen = 0;
        let found = self.counts.iter().position(|&count| {
            seen += count as usize;
            seen > rank
        });
        self.sorted[found.unwrap_or(self.sorted.len() - 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_samples_leave_no_doubt() {
        let interval = ratio(&[2.0; 9], &[4.0; 12]).unwrap();
        assert_eq!((interval.low, interval.point, interval.high), (0.5, 0.5, 0.5));
        assert_eq!(median(&[3.0]).unwrap().high, 3.0);
        assert_eq!(ratio(&[], &[1.0]), None);
    }

    #[test]
    fn the_interval_narrows_with_the_square_root_of_the_samples() {
        let width = |n: usize| {
            let mut rng = Rng::new(5);
            let samples: Vec<f64> = (0..n).map(|_| 1.0 + 0.1 * f64::from(rng.normal())).collect();
            let interval = median(&samples).unwrap();
            assert!(interval.low <= interval.point && interval.point <= interval.high);
            interval.high - interval.low
        };
        let ratio = width(50) / width(800);
        assert!((2.0..8.0).contains(&ratio), "{ratio}");
    }

    #[test]
    fn the_truth_lies_inside_as_often_as_promised() {
        let inside = (0..300).filter(|&seed| {
            let mut rng = Rng::new(seed);
            let samples: Vec<f64> = (0..31).map(|_| f64::from(rng.normal())).collect();
            let interval = median(&samples).unwrap();
            interval.low <= 0.0 && interval.high >= 0.0
        });
        let inside = inside.count();
        assert!((276..=297).contains(&inside), "{inside} of 300");
    }
}
