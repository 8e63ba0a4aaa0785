//! Measured fitness with early stopping: candidates run against the best so far and leave as soon as they are clearly
//! behind.
//!
//! Every candidate has a short turn. Those whose interval lies wholly above that of the best are out; of the others the
//! better half has a turn twice as long, and so on. [`super::search`] races every wave together with the champion, which
//! has turns of its own again, so that a machine that drifts favours nobody.

use crate::{
    bootstrap::{self, Interval},
    stats::median,
};

/// Turns of a candidate in one race, each twice as long as the one before.
const ROUNDS: u32 = 3;

/// A candidate in races.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Runner {
    /// Nearly independent times of all its turns, in seconds.
    pub times: Vec<f64>,
    /// Turns it had.
    pub turns: u32,
}

impl Runner {
    /// The median of its times.
    pub fn median(&self) -> f64 {
        median(&self.times)
    }

    /// Where that median lies.
    pub fn interval(&self) -> Option<Interval> {
        bootstrap::median(&self.times)
    }

    /// Whether it is beyond doubt slower than the best, whose median lies in `best`.
    fn is_behind(&self, best: &Interval) -> bool {
        self.interval().is_some_and(|own| own.low > best.high)
    }
}

/// Races `runners`; `time` gives a runner's times for a turn of so many seconds.
pub fn race<E>(
    runners: &mut [Runner],
    seconds: f64,
    mut time: impl FnMut(usize, u32, f64) -> Result<Vec<f64>, E>,
) -> Result<(), E> {
    let mut fit: Vec<usize> = (0..runners.len()).collect();
    for round in 0..ROUNDS {
        for &n in &fit {
            let turn = runners[n].turns;
            runners[n].times.extend(time(n, turn, seconds * f64::from(1 << round))?);
            runners[n].turns += 1;
        }
        fit = survivors(runners, fit);
        if fit.len() < 2 {
            break;
        }
    }
    Ok(())
}

/// The better half, without those that are clearly behind the best.
fn survivors(runners: &[Runner], mut fit: Vec<usize>) -> Vec<usize> {
    fit.sort_by(|a, b| runners[*a].median().total_cmp(&runners[*b].median()));
    let Some(best) = fit.first().and_then(|&best| runners[best].interval()) else { return fit };
    fit.truncate(fit.len().div_ceil(2).max(2));
    fit.retain(|&n| !runners[n].is_behind(&best));
    fit
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_testkit::Rng;

    /// Times around a level, with a tenth of outliers.
    fn turn(rng: &mut Rng, level: f64) -> Vec<f64> {
        let sample = |_| {
            let outlier = if rng.next_u64().is_multiple_of(10) { 1.5 } else { 1.0 };
            level * outlier * (1.0 + 0.01 * f64::from(rng.normal()))
        };
        (0..8).map(sample).collect()
    }

    /// Turns that each level had, and which one has the lowest median.
    fn run(levels: &[f64], seed: u64) -> (Vec<u32>, usize) {
        let mut rng = Rng::new(seed);
        let mut runners = vec![Runner::default(); levels.len()];
        race(&mut runners, 0.01, |n, _, _| Ok::<_, ()>(turn(&mut rng, levels[n]))).unwrap();
        let best = (0..levels.len()).min_by(|a, b| runners[*a].median().total_cmp(&runners[*b].median()));
        (runners.iter().map(|runner| runner.turns).collect(), best.unwrap())
    }

    #[test]
    fn who_is_clearly_behind_stops_early() {
        for seed in 0..20 {
            let (turns, best) = run(&[1.0, 1.2, 3.0, 2.0, 0.9, 1.4], seed);
            assert_eq!(best, 4, "seed {seed}");
            assert_eq!([turns[2], turns[3], turns[5]], [1, 1, 1], "seed {seed}: {turns:?}");
            assert!(turns.iter().sum::<u32>() < 6 * ROUNDS / 2 + 4, "seed {seed}: {turns:?}");
        }
    }

    #[test]
    fn equals_are_told_apart_as_well_as_time_allows() {
        let (turns, _) = run(&[1.0; 8], 3);
        assert_eq!(turns.iter().max(), Some(&ROUNDS), "{turns:?}");
        assert_eq!(turns.iter().filter(|turns| **turns == ROUNDS).count(), 2, "{turns:?}");
        assert!(turns.iter().sum::<u32>() <= 8 + 4 + 2, "{turns:?}");
    }

    #[test]
    fn a_slight_advantage_wins_mostly() {
        let won = (0..50).filter(|seed| run(&[1.0, 0.97], *seed).1 == 1).count();
        assert!(won >= 45, "{won} of 50");
    }

    #[test]
    fn nobody_and_failures() {
        assert_eq!(race(&mut [], 1.0, |_, _, _| Err(())), Ok(()));
        assert_eq!(race(&mut [Runner::default()], 1.0, |_, _, _| Err(7)), Err(7));
    }
}
