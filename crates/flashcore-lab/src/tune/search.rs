//! The search for one problem: wave after wave of candidates, each built, checked and measured, then a final race.
//!
//! The rules' own choice is measured with every wave, and fitness is the cost relative to it, so a drifting GPU clock
//! favours no candidate. What is in the log is not measured again.

use std::time::{Duration, Instant};

use flashcore_kernels::{
    ALLOCATED_ALIGNMENT, Tile, plan_tile,
    tuned::{self, Row},
};
use serde::Serialize;

use super::{
    candidates::{Scored, Walk, fittest},
    log::{Log, Outcome},
    runner::Runner,
};
use crate::{
    bootstrap::{self, Interval},
    contest::Observer,
    error::LabError,
    machine,
    stats::{blocks, median},
    task::Task,
};

/// Candidates that are built together.
const WAVE: usize = 12;
/// Turns of each side of a final.
const FINAL_TURNS: usize = 10;
/// A turn of a final is this many times as long as a candidate's.
const FINAL_LENGTH: f64 = 3.0;
/// Candidates that meet the rules' choice in a final.
const FINALISTS: usize = 3;
/// Highest fraction of the rules' cost that is worth a row.
const WORTHWHILE: f64 = 0.995;
/// By how much an idle candidate is worse than a busy one of the same speed: counters break ties, no more.
const IDLE_COST: f64 = 0.02;

/// How to search.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Settings {
    /// Whether every candidate is tried instead of offspring of the best.
    pub exhaustive: bool,
    /// Seed of the inputs and of the search.
    pub seed: u64,
    /// Seconds for which a candidate is measured.
    pub seconds: f64,
    /// Time after which no further wave begins.
    pub budget: Duration,
    /// Most candidates that are tried.
    pub candidates: usize,
}

/// What came of a search.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Tuned {
    pub task: String,
    /// What costs are counted in.
    pub unit: &'static str,
    /// What the rules choose.
    pub rules: Contender,
    /// The best; the rules' choice where nothing is better beyond doubt.
    pub best: Contender,
    /// The cost of the best over that of the rules' choice, head to head; `None` where they are the same.
    pub ratio: Option<Interval>,
    /// Candidates that were right, and measured.
    pub measured: usize,
    /// Candidates that could not be built, or were wrong; the log says why.
    pub rejected: usize,
    /// Candidates that the log knew already.
    pub known: usize,
    /// Whether all candidates were tried, or evolution came to its end.
    pub complete: bool,
    pub seconds: f64,
    /// What the table gets: the key, and the row.
    pub row: Option<(String, Row)>,
}

/// A candidate in figures.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Contender {
    pub kernel: String,
    /// How it cuts the work.
    pub tile: Tile,
    /// The median of its costs.
    pub cost: f64,
}

/// A candidate that met the rules' choice, turn by turn.
struct Finalist {
    tile: Tile,
    /// Its costs, and those of the rules' choice.
    costs: [Vec<f64>; 2],
    ratio: Interval,
}

/// A search that is going on.
pub struct Search<'a> {
    task: &'a Task,
    runner: &'a mut dyn Runner,
    log: &'a mut Log,
    observer: &'a mut dyn Observer,
    settings: Settings,
    measured: Vec<Scored>,
    rejected: usize,
}

impl<'a> Search<'a> {
    /// A search whose work `runner` does and `log` remembers.
    pub const fn new(
        task: &'a Task,
        runner: &'a mut dyn Runner,
        log: &'a mut Log,
        observer: &'a mut dyn Observer,
        settings: Settings,
    ) -> Self {
        Self { task, runner, log, observer, settings, measured: Vec::new(), rejected: 0 }
    }

    /// Searches; where the observer stops it, the log has everything that was measured.
    pub fn run(mut self) -> Result<Tuned, LabError> {
        let (begin, known, planned) = (Instant::now(), self.log.known(), self.runner.setting().planned);
        self.try_all(&[planned])?;
        if let Some(Outcome::Rejected(reason)) = self.log.outcome(&planned) {
            return Err(LabError::Failed { competitor: "the rules' choice".to_owned(), reason });
        }
        let complete = self.explore(begin)?;
        let winner = self.finals()?;
        let costs = match &winner {
            Some(Finalist { costs: [_, rules], .. }) => rules.clone(),
            None => self.cost(&planned, 1.0)?,
        };
        let rules = self.contender(planned, &costs);
        let best = winner.as_ref().map(|winner| self.contender(winner.tile, &winner.costs[0]));
        let ratio = winner.map(|winner| winner.ratio);
        Ok(Tuned {
            task: self.task.to_string(),
            unit: self.runner.setting().unit,
            row: best.as_ref().zip(ratio).and_then(|(best, ratio)| self.row(best, &rules, ratio)),
            best: best.unwrap_or_else(|| rules.clone()),
            rules,
            ratio,
            measured: self.measured.len(),
            rejected: self.rejected,
            known,
            complete,
            seconds: begin.elapsed().as_secs_f64(),
        })
    }

    /// Wave after wave; whether there are no candidates left.
    fn explore(&mut self, begin: Instant) -> Result<bool, LabError> {
        let (problem, setting, settings) =
            (self.task.forward()?, self.runner.setting().clone(), self.settings);
        let fits = |tile: &Tile| plan_tile(problem, &setting.gpu, ALLOCATED_ALIGNMENT, *tile).is_ok();
        let mut walk = match settings.exhaustive {
            true => Walk::exhaustive(&setting.planned),
            false => Walk::evolve(&setting.planned, settings.seed),
        };
        loop {
            let tried = self.measured.len() + self.rejected;
            let room = settings.candidates.saturating_sub(tried).min(WAVE);
            if room == 0 || begin.elapsed() >= settings.budget {
                return Ok(false);
            }
            let wave = walk.next(room, &self.measured, fits);
            if wave.is_empty() {
                return Ok(true);
            }
            self.observer.at(self.task, &format!("{tried} candidates, trying {} more", wave.len()));
            self.try_all(&wave)?;
        }
    }

    /// Tries a wave, as far as its candidates are not known.
    fn try_all(&mut self, wave: &[Tile]) -> Result<(), LabError> {
        let unknown: Vec<Tile> =
            wave.iter().copied().filter(|tile| self.log.outcome(tile).is_none()).collect();
        self.build(&unknown)?;
        // Measured with the first new candidate of the wave.
        let mut rules = None;
        for tile in wave {
            let outcome = match self.log.outcome(tile) {
                Some(outcome) => outcome,
                None => self.try_one(tile, &mut rules)?,
            };
            match outcome {
                Outcome::Measured { cost, rules, busy } => {
                    let idle = 1.0 - busy.unwrap_or(1.0);
                    self.measured.push((*tile, cost / rules * (1.0 + IDLE_COST * idle)));
                }
                Outcome::Rejected(_) | Outcome::Started => self.rejected += 1,
            }
        }
        Ok(())
    }

    fn build(&mut self, tiles: &[Tile]) -> Result<(), LabError> {
        let built = self.runner.build(tiles);
        // Ctrl-C ends compilers too, and what they leave undone then says nothing about a tile.
        self.may_continue()?;
        for (tile, built) in tiles.iter().zip(built) {
            built.or_else(|reason| self.log.add(*tile, Outcome::Rejected(reason)))?;
        }
        Ok(())
    }

    /// Checks a candidate and, if it is right, measures it.
    fn try_one(&mut self, tile: &Tile, rules: &mut Option<f64>) -> Result<Outcome, LabError> {
        self.may_continue()?;
        self.log.add(*tile, Outcome::Started)?;
        let outcome = match self.runner.check(tile)? {
            Some(wrong) => Outcome::Rejected(format!("wrong: {wrong}")),
            None => {
                let planned = self.runner.setting().planned;
                let rules = match *rules {
                    Some(cost) => cost,
                    None => *rules.insert(median(&self.cost(&planned, 1.0)?)),
                };
                let cost = median(&self.cost(tile, 1.0)?);
                let best = self.measured.iter().map(|(_, score)| *score).fold(f64::INFINITY, f64::min);
                let close = cost / rules < best * (1.0 + IDLE_COST);
                Outcome::Measured { cost, rules, busy: close.then(|| self.runner.busy(tile)).flatten() }
            }
        };
        self.log.add(*tile, outcome.clone())?;
        Ok(outcome)
    }

    /// The best candidate that beats the rules' choice head to head beyond doubt.
    fn finals(&mut self) -> Result<Option<Finalist>, LabError> {
        self.observer.at(self.task, "final");
        let planned = self.runner.setting().planned;
        let ranked = fittest(&self.measured).into_iter().map(|(tile, _)| tile);
        let mut winner: Option<Finalist> = None;
        for tile in ranked.filter(|tile| *tile != planned).take(FINALISTS) {
            let mut costs = [Vec::new(), Vec::new()];
            for _ in 0..FINAL_TURNS {
                for (tile, costs) in [tile, planned].iter().zip(&mut costs) {
                    // A few figures per turn, so that each counts about as much as it is independent.
                    costs.extend(blocks(&self.cost(tile, FINAL_LENGTH)?, 3));
                }
            }
            let Some(ratio) = bootstrap::ratio(&costs[0], &costs[1]) else { continue };
            let better = winner.as_ref().is_none_or(|best| ratio.point < best.ratio.point);
            if better && ratio.high < 1.0 && ratio.point <= WORTHWHILE {
                winner = Some(Finalist { tile, costs, ratio });
            }
        }
        Ok(winner)
    }

    /// Costs of a turn that is so many times as long as usual.
    fn cost(&mut self, tile: &Tile, length: f64) -> Result<Vec<f64>, LabError> {
        self.may_continue()?;
        self.runner.cost(tile, self.settings.seconds * length)
    }

    fn contender(&self, tile: Tile, costs: &[f64]) -> Contender {
        let gpu = self.runner.setting().gpu;
        let kernel =
            match self.task.forward().map(|problem| plan_tile(problem, &gpu, ALLOCATED_ALIGNMENT, tile)) {
                Ok(plan) => plan.map_or_else(|misfit| misfit.to_string(), |plan| plan.kernel().name()),
                Err(error) => error.to_string(),
            };
        Contender { kernel, tile, cost: median(costs) }
    }

    fn row(&self, best: &Contender, rules: &Contender, ratio: Interval) -> Option<(String, Row)> {
        let setting = self.runner.setting();
        let evidence = format!(
            "{:.1} {} instead of {:.1}, {:.3} to {:.3} of it; best of {} on {}, FlashCore {} {}, {}",
            best.cost,
            setting.unit,
            rules.cost,
            ratio.low,
            ratio.high,
            self.measured.len(),
            setting.device,
            env!("CARGO_PKG_VERSION"),
            machine::commit().unwrap_or_default(),
            machine::now(),
        );
        Some((tuned::key(self.task.forward().ok()?, &setting.gpu)?, Row { tile: best.tile, evidence }))
    }

    /// An error if the user stopped the search; asked before everything that takes time.
    fn may_continue(&self) -> Result<(), LabError> {
        if self.observer.stopped() { Err(LabError::Stopped) } else { Ok(()) }
    }
}
