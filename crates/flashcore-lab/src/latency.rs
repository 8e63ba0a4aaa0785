//! How long something takes: repeated until the figures mean something. `flashcore run` uses it; comparisons between competitors are the business of [`crate::protocol`].

use std::time::{Duration, Instant};

/// Repetitions stop once this much time is spent.
const ENOUGH: Duration = Duration::from_secs(1);
/// Repetitions that are made beyond that, unless they take too long.
const AT_LEAST: usize = 3;
/// No further repetition starts after this much time.
const TOO_LONG: Duration = Duration::from_secs(10);
/// Repetitions that are not exceeded however short they are.
const AT_MOST: usize = 1000;

/// Times `work` as often as asked, or as often as is sensible: microseconds in ascending order.
pub fn measure<E>(times: Option<usize>, mut work: impl FnMut() -> Result<(), E>) -> Result<Vec<f64>, E> {
    let begin = Instant::now();
    let mut samples = Vec::new();
    while wants_more(times, samples.len(), begin.elapsed()) {
        let start = Instant::now();
        work()?;
        samples.push(start.elapsed().as_secs_f64() * 1e6);
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples)
}

/// A time for people.
pub fn time(microseconds: f64) -> String {
    match microseconds {
        us if us < 1e3 => format!("{us:.1} us"),
        us if us < 1e6 => format!("{:.2} ms", us / 1e3),
        us => format!("{:.2} s", us / 1e6),
    }
}

fn wants_more(times: Option<usize>, done: usize, spent: Duration) -> bool {
    match times {
        Some(times) => done < times,
        None => {
            let limit = if done < AT_LEAST { TOO_LONG } else { ENOUGH };
            done == 0 || (done < AT_MOST && spent < limit)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_are_bounded_both_ways() {
        assert!(wants_more(None, 0, Duration::from_secs(600)));
        assert!(!wants_more(None, 1, Duration::from_secs(600)));
        assert!(wants_more(None, AT_LEAST - 1, Duration::from_secs(2)));
        assert!(!wants_more(None, AT_LEAST, Duration::from_secs(2)));
        assert!(!wants_more(None, AT_MOST, Duration::ZERO));
        assert!(!wants_more(Some(1), 1, Duration::ZERO));
    }

    #[test]
    fn times_read_well() {
        let cases = [(0.04, "0.0 us"), (999.9, "999.9 us"), (1234.0, "1.23 ms"), (2.5e6, "2.50 s")];
        for (microseconds, text) in cases {
            assert_eq!(time(microseconds), text);
        }
    }

    #[test]
    fn work_that_fails_ends_the_measurement() {
        let mut runs = 0;
        let result = measure(Some(5), || {
            runs += 1;
            if runs == 2 { Err("broken") } else { Ok(()) }
        });
        assert_eq!((result, runs), (Err("broken"), 2));
    }
}
