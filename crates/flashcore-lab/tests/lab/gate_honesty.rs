//! The gate is honest: on synthetic times with known truth it neither cries wolf nor sleeps.
//!
//! Times are drawn as real ones look: log-normal noise, one in twenty an outlier, neighbours alike.

use flashcore_lab::{
    bootstrap::ratio_seeded,
    gate::Demand,
    protocol::{Mode, Protocol},
};
use flashcore_testkit::Rng;

const REPETITIONS: u64 = 400;
const PROTOCOL: Protocol = Protocol::new(Mode::Sustained, 0.5);

/// The times of one competitor whose true median is `median`.
fn times(median: f64, rng: &mut Rng) -> Vec<f64> {
    let (spread, likeness) = (0.03, 0.5_f64);
    let mut level = 0.0;
    let mut draw = || {
        level = likeness * level + (1.0 - likeness * likeness).sqrt() * f64::from(rng.normal());
        let outlier = if rng.one_in(20) { 1.3 } else { 1.0 };
        median * (spread * level).exp() * outlier
    };
    (0..1000).map(|_| draw()).collect()
}

/// How many of 400 repetitions meet `demand` when our true time is `truth` times theirs.
fn met(demand: Demand, truth: f64, seed: u64) -> u64 {
    let once = |n: u64| {
        let mut rng = Rng::new(seed * 1_000_003 + n);
        let (ours, theirs) = (times(truth * 1e-3, &mut rng), times(1e-3, &mut rng));
        let units = |samples: &[f64]| PROTOCOL.units([samples].into_iter());
        let ratio = ratio_seeded(&units(&ours), &units(&theirs), n).unwrap();
        u64::from(demand.is_met(&ratio))
    };
    (0..REPETITIONS).map(once).sum()
}

const MARGIN: Demand = Demand::NotInferior(0.025);

#[test]
fn identical_arms_raise_no_alarm() {
    let passed = met(MARGIN, 1.0, 1);
    assert!(passed * 100 >= REPETITIONS * 95, "{passed} of {REPETITIONS}");
}

#[test]
fn a_slowdown_of_five_percent_is_caught() {
    let passed = met(MARGIN, 1.05, 2);
    assert!(passed * 100 <= REPETITIONS * 5, "{passed} of {REPETITIONS} went unnoticed");
}

#[test]
fn superiority_is_not_claimed_for_identical_arms() {
    for (seed, most) in [(3, 1.0), (4, 0.95)] {
        let claimed = met(Demand::Superior(most), 1.0, seed);
        assert!(claimed * 100 <= REPETITIONS * 5, "{claimed} of {REPETITIONS} at {most}");
    }
}

#[test]
fn at_the_bound_itself_superiority_is_rarely_claimed() {
    let claimed = met(Demand::Superior(0.95), 0.95, 5);
    assert!(claimed * 100 <= REPETITIONS * 5, "{claimed} of {REPETITIONS}");
}

#[test]
fn superiority_is_found_where_it_is() {
    let claimed = met(Demand::Superior(0.95), 0.9, 6);
    assert!(claimed * 100 >= REPETITIONS * 95, "{claimed} of {REPETITIONS}");
}
