//! The order of timing turns that makes competitors comparable.
//!
//! | mode | order | what counts |
//! | --- | --- | --- |
//! | sustained | after some load, each alone, back to back for a while; the first again at the end | the second half of each turn |
//! | interleaved | many short turns, one after another | everything |
//!
//! Sustained is the figure that counts on a power-limited device: in one rotation, turns of very different power would
//! affect each other's clock. About three quarters of a second after it starts working, such a GPU lowers its clock too
//! far for a while, at the expense of the competitor whose turn it is. So there is load before the first turn.
//! [`crate::contest`] follows the order.

use serde::{Deserialize, Serialize};

use crate::{
    burst::{Burst, Conditions},
    competitor::Place,
    stats::blocks,
};

/// Independent parts that the samples of a competitor are split into for confidence intervals.
const UNITS: usize = 30;
/// Seconds of load on a GPU after which its clock is steady.
pub const STEADY: f64 = 1.5;

/// The order of turns.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Each alone, the first again at the end.
    Sustained,
    /// In many short turns.
    Interleaved,
}

impl Mode {
    /// Every mode.
    pub const ALL: [Self; 2] = [Self::Sustained, Self::Interleaved];

    /// The name used on the command line and in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sustained => "sustained",
            Self::Interleaved => "interleaved",
        }
    }

    /// Default number of rounds.
    pub const fn usual_rounds(self) -> u32 {
        match self {
            Self::Sustained => 1,
            Self::Interleaved => UNITS as u32,
        }
    }
}

/// How a measurement is made.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Protocol {
    /// The order of turns.
    pub mode: Mode,
    /// Seconds of timing per competitor and round.
    pub seconds: f64,
    pub rounds: u32,
    /// Seconds of load on a GPU before the first sustained turn.
    #[serde(default)]
    pub warm_up: f64,
    pub cold: bool,
    pub replay: bool,
    pub seed: u64,
}

/// One competitor's turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    pub competitor: usize,
    /// Whether it is the first competitor's extra turn at the end, which shows how much the machine drifted.
    pub again: bool,
}

impl Protocol {
    /// One round of `seconds`, with nothing before or between.
    pub const fn new(mode: Mode, seconds: f64) -> Self {
        Self { mode, seconds, rounds: 1, warm_up: 0.0, cold: false, replay: false, seed: 0 }
    }

    /// The turns of `competitors` competitors.
    pub fn turns(&self, competitors: usize) -> Vec<Turn> {
        let round = (0..competitors).map(|competitor| Turn { competitor, again: false });
        let rounds = (0..self.rounds).flat_map(|_| round.clone());
        let last = Turn { competitor: 0, again: true };
        let again = (self.mode == Mode::Sustained && competitors > 0).then_some(last);
        rounds.chain(again).collect()
    }

    /// What the first competitor does before its first turn, where that is at `place`.
    pub fn warm_up(&self, place: Place) -> Option<Burst> {
        let due = self.mode == Mode::Sustained && place == Place::Gpu && self.warm_up > 0.0;
        due.then(|| Burst { seconds: self.warm_up, ..self.burst() })
    }

    /// What is done in one turn.
    pub const fn burst(&self) -> Burst {
        let conditions = Conditions { cold: self.cold, replay: self.replay };
        Burst { seconds: self.seconds, conditions }
    }

    /// The part of a turn's samples that counts.
    pub fn kept<'a>(&self, samples: &'a [f64]) -> &'a [f64] {
        match self.mode {
            Mode::Sustained => &samples[samples.len() / 2..],
            Mode::Interleaved => samples,
        }
    }

    /// Nearly independent figures out of the turns of one competitor: what confidence intervals rest on.
    pub fn units<'a>(&self, turns: impl ExactSizeIterator<Item = &'a [f64]>) -> Vec<f64> {
        let each = UNITS.div_ceil(turns.len().max(1));
        turns.flat_map(|samples| blocks(self.kept(samples), each)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn protocol(mode: Mode, rounds: u32) -> Protocol {
        Protocol { rounds, warm_up: STEADY, ..Protocol::new(mode, 0.5) }
    }

    #[test]
    fn a_gpu_is_warmed_up_before_sustained_turns() {
        let seconds = |mode, place| protocol(mode, 1).warm_up(place).map(|burst| burst.seconds);
        assert_eq!(seconds(Mode::Sustained, Place::Gpu), Some(STEADY));
        assert_eq!(seconds(Mode::Sustained, Place::Cpu), None);
        assert_eq!(seconds(Mode::Interleaved, Place::Gpu), None);
        let none = Protocol { warm_up: 0.0, ..protocol(Mode::Sustained, 1) };
        assert!(none.warm_up(Place::Gpu).is_none());
    }

    #[test]
    fn the_first_competitor_comes_again() {
        let order = |mode, rounds| -> Vec<_> {
            protocol(mode, rounds).turns(3).iter().map(|turn| (turn.competitor, turn.again)).collect()
        };
        let round = [(0, false), (1, false), (2, false)];
        assert_eq!(order(Mode::Sustained, 1), [&round[..], &[(0, true)]].concat());
        assert_eq!(order(Mode::Interleaved, 2), [round, round].concat());
        assert!(protocol(Mode::Sustained, 1).turns(0).is_empty());
    }

    #[test]
    fn sustained_keeps_the_second_half() {
        let samples = [9.0, 9.0, 1.0, 1.0];
        assert_eq!(protocol(Mode::Sustained, 1).kept(&samples), [1.0, 1.0]);
        assert_eq!(protocol(Mode::Interleaved, 1).kept(&samples), samples);
        assert_eq!(protocol(Mode::Sustained, 1).kept(&[3.0]), [3.0]);
    }

    #[test]
    fn units_are_as_many_as_can_be_told_apart() {
        let long: Vec<f64> = (0..600).map(f64::from).collect();
        let protocol = protocol(Mode::Sustained, 1);
        assert_eq!(protocol.units([&long[..]].into_iter()).len(), UNITS);
        assert_eq!(protocol.units([&long[..], &long[..]].into_iter()).len(), UNITS);
        assert_eq!(protocol.units([&long[..4]].into_iter()).len(), 2);
        assert!(protocol.units([].into_iter()).is_empty());
    }
}
