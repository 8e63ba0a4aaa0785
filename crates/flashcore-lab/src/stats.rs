//! Samples summarised: quantiles, and how well the median is known. Called by everything that reports a time.

use serde::Serialize;

use crate::bootstrap::{self, Interval};

/// Summary of a set of times, in seconds.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct Summary {
    pub p50: f64,
    pub p90: f64,
    pub min: f64,
    pub max: f64,
    /// The 95 % confidence interval of the median.
    pub interval: Interval,
    pub samples: usize,
}

impl Summary {
    /// Sums up `samples`; `None` where there are none. The interval rests on `units`, which should be independent
    /// of each other: see [`blocks`].
    pub fn of(samples: &[f64], units: &[f64]) -> Option<Self> {
        let sorted = sorted(samples);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let interval = bootstrap::median(units)?;
        let at = |quantile| nearest_rank(&sorted, quantile);
        Some(Self { p50: at(0.5), p90: at(0.9), min, max, interval, samples: sorted.len() })
    }
}

/// The smallest element that at least this share of all elements does not exceed; 0 where there is none.
pub fn nearest_rank(sorted: &[f64], quantile: f64) -> f64 {
    let rank = (quantile * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// The median by nearest rank; 0 where there are no samples.
pub fn median(samples: &[f64]) -> f64 {
    nearest_rank(&sorted(samples), 0.5)
}

/// The medians of `count` consecutive parts of a series.
///
/// Neighbouring times resemble each other (clocks, caches, other programs). Resampling them one by one would promise
/// more certainty than they hold; the medians of long stretches are nearly independent.
pub fn blocks(series: &[f64], count: usize) -> Vec<f64> {
    let count = count.min(series.len());
    let edge = |n: usize| n * series.len() / count;
    (0..count).map(|n| median(&series[edge(n)..edge(n + 1)])).collect()
}

/// The samples in ascending order.
pub fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_samples() {
        let samples: Vec<f64> = (1..=10).rev().map(f64::from).collect();
        let summary = Summary::of(&samples, &samples).unwrap();
        assert_eq!((summary.p50, summary.p90, summary.min, summary.max), (5.0, 9.0, 1.0, 10.0));
        assert!(summary.interval.low <= 5.0 && summary.interval.high >= 5.0);
        let one = Summary::of(&[7.0], &[7.0]).unwrap();
        assert_eq!((one.p50, one.p90, one.min, one.max, one.samples), (7.0, 7.0, 7.0, 7.0, 1));
        assert_eq!(Summary::of(&[], &[]), None);
    }

    #[test]
    fn blocks_cover_the_series() {
        assert_eq!(blocks(&[1.0, 1.0, 5.0, 2.0, 2.0, 9.0], 2), [1.0, 2.0]);
        assert_eq!(blocks(&[3.0, 4.0], 5), [3.0, 4.0]);
        assert_eq!(blocks(&[], 5), [0.0; 0]);
        assert_eq!(blocks(&[1.0; 101], 20).len(), 20);
    }
}
