//! The search with a runner that only pretends: what it finds, what it rejects, and that it goes on where it was.

use std::{cell::Cell, collections::HashMap, path::Path, time::Duration};

use flashcore_core::{DType, Mask};
use flashcore_kernels::{Gpu, Tile, plan};
use flashcore_lab::{
    LabError,
    contest::Observer,
    task::Task,
    tune::{
        log::{Log, Outcome},
        runner::{Runner, Setting},
        search::{Search, Settings, Tuned},
    },
};
use flashcore_testkit::Rng;

/// A machine that makes costs up.
struct Pretended {
    setting: Setting,
    cost: fn(&Tile) -> f64,
    build: fn(&Tile) -> Result<(), String>,
    wrong: fn(&Tile) -> bool,
    /// Whether running it ends the search.
    deadly: fn(&Tile) -> bool,
    rng: Rng,
    /// How often each candidate was checked.
    checks: HashMap<Tile, u32>,
}

impl Runner for Pretended {
    fn setting(&self) -> &Setting {
        &self.setting
    }

    fn build(&mut self, tiles: &[Tile]) -> Vec<Result<(), String>> {
        tiles.iter().map(self.build).collect()
    }

    fn check(&mut self, tile: &Tile) -> Result<Option<String>, LabError> {
        *self.checks.entry(*tile).or_default() += 1;
        if (self.deadly)(tile) {
            return Err(LabError::Stopped);
        }
        Ok((self.wrong)(tile).then(|| "NaN".to_owned()))
    }

    fn cost(&mut self, tile: &Tile, _seconds: f64) -> Result<Vec<f64>, LabError> {
        let noise = |rng: &mut Rng| 1.0 + 0.01 * f64::from(rng.normal()).abs();
        Ok((0..8).map(|_| (self.cost)(tile) * noise(&mut self.rng)).collect())
    }
}

/// Has had enough when it was asked so many times.
struct Impatient(Cell<usize>);

impl Observer for Impatient {
    fn at(&mut self, _: &Task, _: &str) {}

    fn stopped(&self) -> bool {
        self.0.set(self.0.get().saturating_sub(1));
        self.0.get() == 0
    }
}

const SETTINGS: Settings =
    Settings { exhaustive: false, seed: 4, seconds: 0.01, budget: Duration::from_secs(600), candidates: 150 };

fn task() -> Task {
    Task::square(DType::BF16, [1, 16, 4096, 128], Mask::NONE).unwrap()
}

/// 112 keys are best, more stages help a little.
fn keys_matter(tile: &Tile) -> f64 {
    let Tile::Sm90(shape) = tile else { return 1000.0 };
    1000.0 + 5.0 * f64::from(shape.tile_n.abs_diff(112)) - 10.0 * f64::from(shape.stages)
}

fn has_keys(tile: &Tile, keys: u32) -> bool {
    matches!(tile, Tile::Sm90(shape) if shape.tile_n == keys)
}

fn pretended(gpu: Gpu) -> Pretended {
    let planned = plan(task().forward().unwrap(), &gpu, 256).unwrap().kernel().tile();
    Pretended {
        setting: Setting { gpu, device: "a pretended GPU".to_owned(), unit: "us", planned },
        cost: keys_matter,
        build: |tile| if has_keys(tile, 80) { Err("it spills".to_owned()) } else { Ok(()) },
        wrong: |tile| has_keys(tile, 48),
        deadly: |_| false,
        rng: Rng::new(1),
        checks: HashMap::new(),
    }
}

fn log(path: &Path, search: &str) -> Log {
    Log::open(path, search.to_owned(), false).unwrap()
}

/// Searches until it was asked so often whether to go on.
fn search_until(
    runner: &mut Pretended,
    settings: Settings,
    path: &Path,
    asked: usize,
) -> Result<Tuned, LabError> {
    let mut observer = Impatient(Cell::new(asked));
    Search::new(&task(), runner, &mut log(path, "s"), &mut observer, settings).run()
}

fn search(runner: &mut Pretended, settings: Settings, path: &Path) -> Result<Tuned, LabError> {
    search_until(runner, settings, path, usize::MAX)
}

#[test]
fn the_fastest_that_is_right_is_found_and_becomes_a_row() {
    let folder = tempfile::tempdir().unwrap();
    let tuned = search(&mut pretended(Gpu::HOPPER), SETTINGS, &folder.path().join("log")).unwrap();
    assert!(has_keys(&tuned.best.tile, 112) && tuned.rejected > 0, "{tuned:?}");
    assert!(tuned.ratio.is_some_and(|ratio| ratio.high < 1.0) && tuned.measured > 20, "{tuned:?}");
    let (key, row) = tuned.row.unwrap();
    assert!(key.contains("sm_90") && key.contains("1x16x4096x128"), "{key}");
    assert!(row.tile == tuned.best.tile && row.evidence.contains("a pretended GPU"), "{row:?}");
    let text = std::fs::read_to_string(folder.path().join("log")).unwrap();
    assert!(text.contains("wrong: NaN") && text.contains("it spills"), "{text}");
}

#[test]
fn where_nothing_is_faster_the_rules_stand() {
    let folder = tempfile::tempdir().unwrap();
    let mut runner = Pretended { cost: |_| 1.0, ..pretended(Gpu::HOPPER) };
    let tuned = search(&mut runner, SETTINGS, &folder.path().join("log")).unwrap();
    assert_eq!((tuned.best.tile, tuned.row), (tuned.rules.tile, None));
    let mut runner = Pretended { wrong: |_| true, ..pretended(Gpu::HOPPER) };
    let error = search(&mut runner, SETTINGS, &folder.path().join("wrong")).unwrap_err().to_string();
    assert!(error.contains("the rules' choice") && error.contains("NaN"), "{error}");
}

#[test]
fn a_search_that_was_ended_goes_on_and_tries_nothing_twice() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let mut checks: HashMap<Tile, u32> = HashMap::new();
    let ended = (1..100).find_map(|n| {
        let mut runner = pretended(Gpu::HOPPER);
        let ended = search_until(&mut runner, SETTINGS, &path, 37 * n);
        runner.checks.into_iter().for_each(|(tile, n)| *checks.entry(tile).or_default() += n);
        ended.is_ok().then(|| (n, ended.unwrap()))
    });
    let (runs, tuned) = ended.unwrap();
    assert!(runs > 2 && tuned.known > 20 && has_keys(&tuned.best.tile, 112), "{runs} runs: {tuned:?}");
    assert!(checks.len() > 20 && checks.values().filter(|n| **n > 1).count() < runs, "{checks:?}");
}

#[test]
fn a_compiler_that_was_interrupted_condemns_no_candidate() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let killed = |tile: &Tile| if has_keys(tile, 64) { Ok(()) } else { Err("SIGINT".to_owned()) };
    let mut runner = Pretended { build: killed, ..pretended(Gpu::HOPPER) };
    // Asked in turn: the rules' choice built, tried, measured twice; then the first wave is built.
    assert!(matches!(search_until(&mut runner, SETTINGS, &path, 5), Err(LabError::Stopped)));
    assert!(!std::fs::read_to_string(&path).unwrap().contains("SIGINT"));
}

#[test]
fn who_ends_the_search_twice_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { candidates: 30, ..SETTINGS };
    let run = |_| {
        let mut runner = Pretended {
            deadly: |tile| matches!(tile, Tile::Sm90(shape) if shape.stages == 3),
            ..pretended(Gpu::HOPPER)
        };
        search(&mut runner, settings, &folder.path().join("log"))
    };
    let ended: Vec<_> = (0..200).map(run).take_while(Result::is_err).collect();
    assert!((2..200).contains(&ended.len()) && ended.len() % 2 == 0, "{}", ended.len());
}

#[test]
fn budgets_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let run = |gpu, settings, name| search(&mut pretended(gpu), settings, &folder.path().join(name)).unwrap();
    let few = run(Gpu::HOPPER, Settings { candidates: 9, ..SETTINGS }, "few");
    assert!(few.measured + few.rejected <= 9 && !few.complete, "{few:?}");
    let short = run(Gpu::HOPPER, Settings { budget: Duration::ZERO, ..SETTINGS }, "short");
    assert_eq!((short.measured, short.best.tile), (1, short.rules.tile));
    let all = run(Gpu::AMPERE, Settings { exhaustive: true, candidates: usize::MAX, ..SETTINGS }, "all");
    assert!(all.complete && all.measured > 50, "{all:?}");
}

#[test]
fn a_log_cut_anywhere_gives_back_every_whole_line() {
    let folder = tempfile::tempdir().unwrap();
    let (path, tile) = (folder.path().join("log"), pretended(Gpu::HOPPER).setting.planned);
    let measured = Outcome::Measured { cost: 1.0, rules: 2.0, busy: None };
    for (search, outcome) in [("s", Outcome::Started), ("other", measured.clone()), ("s", measured.clone())] {
        log(&path, search).add(tile, outcome).unwrap();
    }
    let bytes = std::fs::read(&path).unwrap();
    for end in 0..=bytes.len() {
        std::fs::write(&path, &bytes[..end]).unwrap();
        assert_eq!(log(&path, "s").outcome(&tile).is_some(), end == bytes.len(), "cut at {end}");
        log(&path, "s").add(tile, measured.clone()).unwrap();
        assert_eq!(log(&path, "s").outcome(&tile), Some(measured.clone()), "cut at {end}");
    }
    assert_eq!(Log::open(&path, "s".to_owned(), true).unwrap().known(), 0);
    let text = String::from_utf8(bytes).unwrap().replace("\"cost\":1.0", "\"cost\":-1.0");
    std::fs::write(&path, text).unwrap();
    assert_eq!(log(&path, "s").outcome(&tile), None, "no cost is negative");
    std::fs::write(&path, "notes").unwrap();
    assert!(Log::open(&path, "s".to_owned(), true).is_err(), "somebody else's file");
    assert_eq!(std::fs::read(&path).unwrap(), b"notes");
}
