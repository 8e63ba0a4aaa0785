//! How long something takes: repeated until the figures mean something, summed up in quantiles.

use std::time::{Duration, Instant};

use serde::Serialize;

/// Repetitions stop once this much time is spent.
const ENOUGH: Duration = Duration::from_secs(1);
/// Repetitions that are made however long they take.
const AT_LEAST: usize = 3;
/// Repetitions that are not exceeded however short they are.
const AT_MOST: usize = 1000;

/// Quantiles of a latency, in microseconds.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Latency {
    /// Half of the runs were this fast or faster.
    pub p50: f64,
    /// Nine in ten of the runs were this fast or faster.
    pub p90: f64,
    /// The fastest run.
    pub min: f64,
    /// The slowest run.
    pub max: f64,
    /// How many runs there were.
    pub samples: usize,
}

impl Latency {
    /// Times `work` as often as asked, or as often as is sensible.
    pub fn measure<E>(times: Option<usize>, mut work: impl FnMut() -> Result<(), E>) -> Result<Self, E> {
        let begin = Instant::now();
        let mut samples = Vec::new();
        while wants_more(times, samples.len(), begin.elapsed()) {
            let start = Instant::now();
            work()?;
            samples.push(start.elapsed().as_secs_f64() * 1e6);
        }
        Ok(Self::of(samples))
    }

    fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |quantile: f64| {
            // Nearest rank: the smallest sample that at least this share of all samples does not exceed.
            let rank = (quantile * samples.len() as f64).ceil() as usize;
            samples.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        Self { p50: at(0.5), p90: at(0.9), min: at(0.0), max: at(1.0), samples: samples.len() }
    }
}

fn wants_more(times: Option<usize>, done: usize, spent: Duration) -> bool {
    match times {
        Some(times) => done < times,
        None => done < AT_LEAST || (done < AT_MOST && spent < ENOUGH),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_samples() {
        let latency = Latency::of((1..=10).rev().map(f64::from).collect());
        assert_eq!(latency, Latency { p50: 5.0, p90: 9.0, min: 1.0, max: 10.0, samples: 10 });
        let one = Latency::of(vec![7.0]);
        assert_eq!((one.p50, one.p90, one.min, one.max), (7.0, 7.0, 7.0, 7.0));
    }

    #[test]
    fn repetitions_are_bounded_both_ways() {
        assert!(wants_more(None, AT_LEAST - 1, Duration::from_secs(600)));
        assert!(!wants_more(None, AT_LEAST, Duration::from_secs(600)));
        assert!(!wants_more(None, AT_MOST, Duration::ZERO));
        assert!(!wants_more(Some(1), 1, Duration::ZERO));
    }

    #[test]
    fn work_that_fails_ends_the_measurement() {
        let mut runs = 0;
        let result = Latency::measure(Some(5), || {
            runs += 1;
            if runs == 2 { Err("broken") } else { Ok(()) }
        });
        assert_eq!((result, runs), (Err("broken"), 2));
    }
}
