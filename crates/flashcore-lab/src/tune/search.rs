//! The search for one problem: wave after wave of candidates, each refused, built, judged and raced, then a final.
//!
//! The plan's own choice is candidate 0 and takes part in everything, so that the result is never worse than it beyond
//! noise. What the journal knows is not measured again.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use flashcore_kernels::{Tile, tuned::Row};
use serde::Serialize;

use super::{
    journal::{Entry, Fact, Journal, Known, Stage},
    race::{Runner, race},
    row::Probe,
    space::{Genome, Space},
    stand::Stand,
    strategy::{Scored, Strategy, Walk},
};
use crate::{
    bootstrap::{self, Interval},
    contest::Observer,
    error::LabError,
    referee::Finding,
    stats::median,
    task::Task,
};

/// Turns of each side of a final.
const FINAL_TURNS: u32 = 10;
/// A turn of a final is this many times as long as a first turn.
const FINAL_LENGTH: f64 = 3.0;
/// Candidates that meet the plan's choice in a final.
const FINALISTS: usize = 2;
/// The most of the plan's time that is worth a row.
const WORTHWHILE: f64 = 0.995;
/// How often a candidate may run for the first time: one that hangs or kills the process is left out after that.
const MOST_STARTS: u32 = 2;
/// Candidates of a wave that Nsight Compute looks at.
const COUNTED: usize = 3;
/// By how much an idle candidate is worse than a busy one of the same speed: counters break ties, no more.
const IDLE_COST: f64 = 0.02;

/// How to search.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Settings {
    /// Which candidates come next.
    pub strategy: Strategy,
    /// Seed of the search.
    pub seed: u64,
    /// Seconds of a candidate's first turn.
    pub seconds: f64,
    /// Time after which no further wave begins.
    pub budget: Duration,
    /// Most candidates that are measured.
    pub candidates: usize,
    /// Candidates that are built together.
    pub wave: usize,
}

/// What came of a search.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Tuned {
    /// The problem.
    pub task: String,
    /// What the plan chooses.
    pub plan: Contender,
    /// The fastest; the plan's choice where nothing is faster beyond doubt.
    pub best: Contender,
    /// The time of the fastest over that of the plan's choice, head to head; `None` where they are the same.
    pub ratio: Option<Interval>,
    /// How the fastest does at the ends of its class.
    pub probes: Vec<Probe>,
    /// Candidates that were measured.
    pub measured: usize,
    /// Candidates that were refused without building them, by reason.
    pub refused: BTreeMap<String, usize>,
    /// Candidates that could not be built, or whose result was wrong.
    pub failed: Vec<Failed>,
    /// Measurements that were found in the journal.
    pub resumed: usize,
    /// Whether the search came to its end instead of running out of time or being stopped.
    pub complete: bool,
    /// How long it took.
    pub seconds: f64,
    /// What the table gets.
    pub row: Option<Row>,
}

/// A candidate in figures.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Contender {
    /// Its kernel.
    pub kernel: String,
    /// How it cuts the work.
    pub tile: Tile,
    /// Median time in microseconds.
    pub median_us: f64,
    /// Where that median lies.
    pub interval_us: [f64; 2],
}

/// A candidate that fell out.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Failed {
    /// Its kernel.
    pub kernel: String,
    /// Why.
    pub reason: String,
}

pub(super) struct Candidate {
    genome: Genome,
    pub(super) tile: Tile,
    runner: Runner,
    busy: Option<f64>,
}

/// Both sides of a final.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Side {
    times: Vec<f64>,
    plan: Vec<f64>,
}

impl Side {
    pub(super) fn ratio(&self) -> Option<Interval> {
        bootstrap::ratio(&self.times, &self.plan)
    }

    pub(super) fn interval(&self) -> Interval {
        let point = median(&self.times);
        bootstrap::median(&self.times).unwrap_or(Interval { low: point, point, high: point })
    }

    pub(super) fn plan_median(&self) -> f64 {
        median(&self.plan)
    }
}

/// A search that is going on.
pub struct Search<'a> {
    pub(super) task: Task,
    /// Number of the task in the journal.
    index: usize,
    pub(super) stand: &'a mut dyn Stand,
    journal: &'a mut Journal,
    pub(super) observer: &'a mut dyn Observer,
    pub(super) settings: Settings,
    pub(super) candidates: Vec<Candidate>,
    refused: BTreeMap<String, usize>,
    failed: Vec<Failed>,
    resumed: usize,
}

impl<'a> Search<'a> {
    /// A search over `stand`, whose problem is number `index` of the journal.
    pub fn new(
        (index, task): (usize, &Task),
        stand: &'a mut dyn Stand,
        journal: &'a mut Journal,
        observer: &'a mut dyn Observer,
        settings: Settings,
    ) -> Self {
        Self {
            task: task.clone(),
            index,
            stand,
            journal,
            observer,
            settings,
            candidates: Vec::new(),
            refused: BTreeMap::new(),
            failed: Vec::new(),
            resumed: 0,
        }
    }

    /// Searches; where the observer stops it, the journal has everything that was measured.
    pub fn run(mut self) -> Result<Tuned, LabError> {
        let begin = Instant::now();
        let plan = self.stand.plan()?;
        let space = Space::around(&plan);
        let start = space.genome(&plan).unwrap_or_default();
        self.admit(&space, vec![start.clone()])?;
        if self.candidates.is_empty() {
            let reason = self.failed.pop().map_or_else(String::new, |failed| failed.reason);
            return Err(LabError::Failed { arm: "the plan's choice".to_owned(), reason });
        }
        self.race_from(0)?;
        let complete = self.explore(&space, start, begin)?;
        self.observer.at(&self.task, "final");
        let winner = self.finals()?;
        self.conclude(winner, complete, begin)
    }

    /// Wave after wave; whether the walk came to its end.
    fn explore(&mut self, space: &Space, start: Genome, begin: Instant) -> Result<bool, LabError> {
        let mut walk = Walk::new(space, start, self.settings.strategy, self.settings.seed);
        loop {
            let room = self.settings.candidates.saturating_sub(self.candidates.len() + self.failed.len());
            if room == 0 {
                return Ok(false);
            }
            let scored = self.scores();
            let (stand, refused) = (&*self.stand, &mut self.refused);
            let mut allowed = |genome: &Genome| match stand.refusal(&space.tile(genome)) {
                Some(reason) => {
                    *refused.entry(without_numbers(&reason)).or_default() += 1;
                    false
                }
                None => true,
            };
            let wave = walk.next(room.min(self.settings.wave), &scored, &mut allowed);
            if wave.is_empty() {
                return Ok(true);
            }
            if begin.elapsed() >= self.settings.budget {
                return Ok(false);
            }
            let first = self.candidates.len();
            self.admit(space, wave)?;
            self.race_from(first)?;
            self.count(first)?;
        }
    }

    /// Builds and judges; those that are right become candidates.
    fn admit(&mut self, space: &Space, wave: Vec<Genome>) -> Result<(), LabError> {
        let wave: Vec<(Genome, Tile)> = wave.into_iter().map(|g| (g.clone(), space.tile(&g))).collect();
        let what = format!("{} candidates, building {}", self.candidates.len(), wave.len());
        self.observer.at(&self.task, &what);
        self.build(&wave.iter().map(|(_, tile)| *tile).collect::<Vec<_>>())?;
        for (genome, tile) in wave {
            go_on(self.observer)?;
            let reason = match self.known(&tile).and_then(|known| known.unbuildable.clone()) {
                Some(reason) => Some(reason),
                None => self.judged(&tile)?.wrong.map(|wrong| format!("wrong: {wrong}")),
            };
            match reason {
                Some(reason) => self.failed.push(Failed { kernel: self.stand.kernel(&tile), reason }),
                None => {
                    self.candidates.push(Candidate { genome, tile, runner: Runner::default(), busy: None })
                }
            }
        }
        Ok(())
    }

    /// Builds what was never built or judged.
    fn build(&mut self, tiles: &[Tile]) -> Result<(), LabError> {
        let settled = |known: &Known| known.unbuildable.is_some() || known.finding.is_some();
        let new: Vec<Tile> =
            tiles.iter().copied().filter(|tile| !self.known(tile).is_some_and(settled)).collect();
        // In portions: who stops the search does not wait for a whole wave.
        for tiles in new.chunks(rayon::current_num_threads()) {
            go_on(self.observer)?;
            let reasons = self.stand.build(tiles);
            // Ctrl-C ends compilers too, and what they leave undone then says nothing about a tile.
            go_on(self.observer)?;
            for (tile, reason) in tiles.iter().zip(reasons) {
                if let Some(reason) = reason {
                    self.keep(*tile, Fact::Unbuildable(reason))?;
                }
            }
        }
        Ok(())
    }

    fn judged(&mut self, tile: &Tile) -> Result<Finding, LabError> {
        if let Some(finding) = self.known(tile).and_then(|known| known.finding.clone()) {
            self.resumed += 1;
            return Ok(finding);
        }
        if self.known(tile).is_some_and(|known| known.started >= MOST_STARTS) {
            let wrong = format!("it ended the search {MOST_STARTS} times");
            return Ok(Finding { max_error: 0.0, tolerance: 0.0, rows: 0, wrong: Some(wrong) });
        }
        self.keep(*tile, Fact::Started)?;
        let finding = self.stand.judge(tile)?;
        self.keep(*tile, Fact::Judged(finding.clone()))?;
        Ok(finding)
    }

    /// Races the candidates from number `first` on against the best so far.
    fn race_from(&mut self, first: usize) -> Result<(), LabError> {
        let champion = self.ranked(0..first).first().copied();
        let entrants: Vec<usize> = champion.into_iter().chain(first..self.candidates.len()).collect();
        let mut runners: Vec<Runner> = entrants.iter().map(|&n| self.candidates[n].runner.clone()).collect();
        let tiles: Vec<Tile> = entrants.iter().map(|&n| self.candidates[n].tile).collect();
        let seconds = self.settings.seconds;
        race(&mut runners, seconds, |n, turn, seconds| self.timed(&tiles[n], turn, seconds))?;
        for (n, runner) in entrants.into_iter().zip(runners) {
            self.candidates[n].runner = runner;
        }
        Ok(())
    }

    fn timed(&mut self, tile: &Tile, turn: u32, seconds: f64) -> Result<Vec<f64>, LabError> {
        if let Some(times) = self.known(tile).and_then(|known| known.turns.get(&turn).cloned()) {
            self.resumed += 1;
            return Ok(times);
        }
        go_on(self.observer)?;
        let times = self.stand.time(tile, seconds)?;
        self.keep(*tile, Fact::Timed { turn, times: times.clone() })?;
        Ok(times)
    }

    /// Asks Nsight Compute about the best of a wave.
    fn count(&mut self, first: usize) -> Result<(), LabError> {
        for n in self.ranked(first..self.candidates.len()).into_iter().take(COUNTED) {
            go_on(self.observer)?;
            let tile = self.candidates[n].tile;
            let known = self.known(&tile).and_then(|known| known.busy);
            let busy = known.or_else(|| self.stand.busy(&tile));
            if let Some(share) = busy.filter(|_| known.is_none()) {
                self.keep(tile, Fact::Busy(share))?;
            }
            self.candidates[n].busy = busy;
        }
        Ok(())
    }

    fn scores(&self) -> Vec<Scored> {
        let score = |c: &Candidate| Scored { genome: c.genome.clone(), score: c.score() };
        self.candidates.iter().map(score).collect()
    }

    /// Numbers of candidates, the fittest first.
    fn ranked(&self, range: std::ops::Range<usize>) -> Vec<usize> {
        let mut ranked: Vec<usize> = range.collect();
        ranked.sort_by(|a, b| self.candidates[*a].score().total_cmp(&self.candidates[*b].score()));
        ranked
    }

    /// The best candidates beside the plan's choice, unless they are clearly behind it already.
    fn finalists(&self) -> Vec<usize> {
        let plan = self.candidates[0].runner.interval();
        let behind = |n: usize| match (self.candidates[n].runner.interval(), plan) {
            (Some(own), Some(plan)) => own.low > plan.high,
            _ => false,
        };
        let ranked = self.ranked(1..self.candidates.len());
        ranked.into_iter().filter(|n| !behind(*n)).take(FINALISTS).collect()
    }

    /// The best candidate that beats the plan's choice head to head beyond doubt.
    fn finals(&mut self) -> Result<Option<(usize, Side)>, LabError> {
        let plan = self.candidates[0].tile;
        let mut winner: Option<(usize, Side)> = None;
        for n in self.finalists() {
            let tile = self.candidates[n].tile;
            let side = match self.final_known(Stage::Problem, &tile) {
                Some(side) => side,
                None => {
                    let times =
                        head_to_head(self.stand, [&tile, &plan], self.settings.seconds, self.observer)?;
                    self.keep_final(Stage::Problem, &tile, times)?
                }
            };
            let point = |side: &Side| side.ratio().map_or(1.0, |ratio| ratio.point);
            let better = winner.as_ref().is_none_or(|(_, best)| point(&side) < point(best));
            if side.ratio().is_some_and(|ratio| ratio.high < 1.0 && ratio.point <= WORTHWHILE) && better {
                winner = Some((n, side));
            }
        }
        Ok(winner)
    }

    fn conclude(
        mut self,
        winner: Option<(usize, Side)>,
        complete: bool,
        begin: Instant,
    ) -> Result<Tuned, LabError> {
        let mut plan = self.contender(0, &self.candidates[0].runner.times);
        let (best, ratio, row, probes) = match winner {
            None => (plan.clone(), None, None, Vec::new()),
            Some((n, side)) => {
                let tile = self.candidates[n].tile;
                let (row, probes) = self.row(&tile, side.clone())?;
                // The final is where both met under the same conditions.
                plan = self.contender(0, &side.plan);
                (self.contender(n, &side.times), side.ratio(), row, probes)
            }
        };
        Ok(Tuned {
            task: self.task.to_string(),
            plan,
            best,
            ratio,
            probes,
            measured: self.candidates.len(),
            refused: self.refused,
            failed: self.failed,
            resumed: self.resumed,
            complete,
            seconds: begin.elapsed().as_secs_f64(),
            row,
        })
    }

    fn contender(&self, n: usize, times: &[f64]) -> Contender {
        let tile = self.candidates[n].tile;
        let micro = |seconds: f64| seconds * 1e6;
        let interval = bootstrap::median(times).map_or([0.0; 2], |interval| [interval.low, interval.high]);
        Contender {
            kernel: self.stand.kernel(&tile),
            tile,
            median_us: micro(median(times)),
            interval_us: interval.map(micro),
        }
    }

    fn known(&self, tile: &Tile) -> Option<&Known> {
        self.journal.known(self.index, tile)
    }

    fn keep(&mut self, tile: Tile, fact: Fact) -> Result<(), LabError> {
        self.journal.add(Entry { task: self.index, tile, fact })
    }

    pub(super) fn final_known(&mut self, stage: Stage, tile: &Tile) -> Option<Side> {
        let [times, plan] = self.known(tile)?.finals.get(&stage).cloned()?;
        self.resumed += 1;
        Some(Side { times, plan })
    }

    pub(super) fn keep_final(
        &mut self,
        stage: Stage,
        tile: &Tile,
        [times, plan]: [Vec<f64>; 2],
    ) -> Result<Side, LabError> {
        self.keep(*tile, Fact::Final { stage, times: times.clone(), plan: plan.clone() })?;
        Ok(Side { times, plan })
    }
}

impl Candidate {
    /// Smaller is fitter: the median time, and a little more where units are known to be idle.
    fn score(&self) -> f64 {
        self.runner.median() * (1.0 + IDLE_COST * (1.0 - self.busy.unwrap_or(1.0)))
    }
}

/// An error if the user stopped the search; asked before everything that takes time.
fn go_on(observer: &dyn Observer) -> Result<(), LabError> {
    if observer.stopped() { Err(LabError::Stopped) } else { Ok(()) }
}

/// Times of both, turn by turn.
pub(super) fn head_to_head(
    stand: &mut dyn Stand,
    tiles: [&Tile; 2],
    seconds: f64,
    observer: &dyn Observer,
) -> Result<[Vec<f64>; 2], LabError> {
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..FINAL_TURNS {
        for (tile, times) in tiles.into_iter().zip(&mut times) {
            go_on(observer)?;
            // A few figures per turn, so that each counts about as much as it is independent.
            times.extend(crate::stats::blocks(&stand.time(tile, seconds * FINAL_LENGTH)?, 3));
        }
    }
    Ok(times)
}

/// Reasons that differ in numbers only are one reason.
fn without_numbers(reason: &str) -> String {
    let mut text = String::new();
    for letter in reason.chars() {
        match letter {
            '0'..='9' if text.ends_with('N') => {}
            '0'..='9' => text.push('N'),
            other => text.push(other),
        }
    }
    text
}
