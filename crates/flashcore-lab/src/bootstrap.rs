//! Confidence intervals by resampling: what the median, or a ratio of medians, would be with other samples.
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
    let sampler = Sampler::new(units)?;
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
    let (ours, theirs) = (Sampler::new(ours)?, Sampler::new(theirs)?);
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
/// A draw is a uniform number that says which of the sorted samples it takes. The median then is that of the middle one of
/// uniform numbers, whose distribution is known: it is drawn by itself, and the others never are.
struct Sampler {
    sorted: Vec<f64>,
}

impl Sampler {
    fn new(samples: &[f64]) -> Option<Self> {
        (!samples.is_empty()).then(|| Self { sorted: sorted(samples) })
    }

    /// The mean of the two middle samples, or the middle one.
    fn median_of_all(&self) -> f64 {
        let n = self.sorted.len();
        (self.sorted[(n - 1) / 2] + self.sorted[n / 2]) / 2.0
    }

    fn median(&self, rng: &mut Rng) -> f64 {
        let n = self.sorted.len();
        let below = (n - 1) / 2;
        let lower = middle(below, n, rng);
        if !n.is_multiple_of(2) {
            return self.sample(lower);
        }
        // The next number is the least of those that are left, which lie anywhere above.
        let left = (n - below - 1) as f64;
        let upper = 1.0 - (1.0 - lower) * uniform(rng).powf(1.0 / left);
        (self.sample(lower) + self.sample(upper)) / 2.0
    }

    /// The sample that a uniform number takes.
    fn sample(&self, uniform: f64) -> f64 {
        let n = self.sorted.len();
        self.sorted[((uniform * n as f64) as usize).min(n - 1)]
    }
}

/// Of `n` uniform numbers the one with `below` smaller ones: a beta variable, which two gamma variables make.
fn middle(below: usize, n: usize, rng: &mut Rng) -> f64 {
    let (under, over) = (gamma(below + 1, rng), gamma(n - below, rng));
    under / (under + over)
}

/// A gamma variable of that shape (Marsaglia and Tsang, 2000).
fn gamma(shape: usize, rng: &mut Rng) -> f64 {
    let d = shape as f64 - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let x = f64::from(rng.normal());
        let v = (1.0 + c * x).powi(3);
        if v > 0.0 && uniform(rng).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return d * v;
        }
    }
}

/// A number above 0 and up to 1.
fn uniform(rng: &mut Rng) -> f64 {
    ((rng.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
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

    /// Medians of resamples, drawn as such, have the quantiles of those that are drawn by themselves.
    #[test]
    fn medians_are_those_of_resamples() {
        for n in [1, 2, 5, 8, 41] {
            let samples: Vec<f64> = (0..n).map(|i| f64::from(i * i)).collect();
            let (sampler, mut rng) = (Sampler::new(&samples).unwrap(), Rng::new(3));
            let mut resampled = || {
                let drawn: Vec<f64> = (0..n).map(|_| sampler.sample(uniform(&mut rng))).collect();
                Sampler::new(&drawn).unwrap().median_of_all()
            };
            let plain = interval(0.0, (0..RESAMPLES).map(|_| resampled()).collect());
            let mut rng = Rng::new(4);
            let quick = interval(0.0, (0..RESAMPLES).map(|_| sampler.median(&mut rng)).collect());
            let near = |a: f64, b: f64| (a - b).abs() <= 0.06 * f64::from(n * n);
            assert!(near(plain.low, quick.low) && near(plain.high, quick.high), "{n}: {plain:?}, {quick:?}");
        }
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
