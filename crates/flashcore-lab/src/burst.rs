//! Timing one competitor for a while: how many calls, in which samples, under which conditions.
//!
//! [`crate::protocol`] decides who is timed when; a [`Burst`] is one such turn. Competitors implement [`Ready::time`];
//! everything else about timing is here.

use crate::{competitor::Ready, error::LabError, stats::median};

/// Samples that a burst is cut into at most: enough for quantiles, few enough for files.
const MOST_SAMPLES: usize = 1000;
/// The same where caches are emptied before each: that takes longer than most calls.
const MOST_COLD_SAMPLES: usize = 100;
/// Samples that a burst has at least, however slow a call is.
const LEAST_SAMPLES: usize = 4;
/// A sample lasts at least this long, so that neither the clock's grain nor what a graph's launch costs shows.
const LEAST_SECONDS: f64 = 500e-6;
/// Calls of the trial that says how long a call takes.
const TRIAL: usize = 3;

/// What surrounds each call.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Conditions {
    pub cold: bool,
    pub replay: bool,
}

/// How long to time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Burst {
    pub seconds: f64,
    pub conditions: Conditions,
}

/// What a competitor is asked to time: `samples` samples of `calls` calls each.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Run {
    pub samples: usize,
    pub calls: u32,
    pub conditions: Conditions,
}

/// What a burst gave.
#[derive(Clone, PartialEq, Debug)]
pub struct Samples {
    /// Seconds per call, sample by sample in order of time.
    pub seconds: Vec<f64>,
    pub calls: u32,
}

impl Burst {
    /// Times `ready`.
    pub fn run(&self, ready: &mut dyn Ready) -> Result<Samples, LabError> {
        let trial = Run { samples: TRIAL, calls: 1, conditions: Conditions::default() };
        let once = median(&ready.time(&trial)?);
        let run = self.layout(once);
        let seconds = ready.time(&run)?;
        Ok(Samples { seconds, calls: run.calls })
    }

    /// Samples and calls that fill the time, if a call takes `once` seconds.
    fn layout(&self, once: f64) -> Run {
        let once = once.max(1e-7);
        let calls = ((self.seconds / once).ceil().min(1e9) as usize).max(LEAST_SAMPLES);
        if self.conditions.cold {
            return Run { samples: calls.min(MOST_COLD_SAMPLES), calls: 1, conditions: self.conditions };
        }
        let for_the_clock = (LEAST_SECONDS / once).ceil() as usize;
        let each = calls.div_ceil(MOST_SAMPLES).max(for_the_clock).max(1);
        let samples = calls.div_ceil(each).max(LEAST_SAMPLES);
        Run { samples, calls: each as u32, conditions: self.conditions }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(seconds: f64, once: f64, conditions: Conditions, samples: usize, calls: u32) {
        let run = Burst { seconds, conditions }.layout(once);
        assert_eq!((run.samples, run.calls), (samples, calls), "{seconds} s of {once} s");
    }

    #[test]
    fn bursts_fill_their_time() {
        let plain = Conditions::default();
        check(0.5, 1e-3, plain, 500, 1);
        check(0.5, 5e-6, plain, 1000, 100);
        check(1e-4, 5e-6, plain, 4, 100);
        check(0.5, 3.0, plain, 4, 1);
        check(0.5, 0.0, plain, 1000, 5000);
        check(0.5, 5e-6, Conditions { cold: true, ..plain }, 100, 1);
    }
}
