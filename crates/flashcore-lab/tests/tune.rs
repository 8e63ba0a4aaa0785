//! The search on stands that only pretend: what it finds, what it refuses, and that it takes up where it was.

use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap},
    path::Path,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use flashcore_core::{DType, Mask};
use flashcore_kernels::{CpuTile, Gpu, Tile, plan, plan_tile, tuned::Subject};
use flashcore_lab::{
    LabError,
    contest::Observer,
    referee::Finding,
    task::Task,
    tune::{
        journal::{Header, Journal},
        search::{Search, Settings, Tuned},
        stand::Stand,
        strategy::Strategy,
    },
};
use flashcore_testkit::Rng;

/// A machine that makes times up.
struct Pretended {
    task: Task,
    gpu: Gpu,
    /// Seconds of a tile on a task.
    speed: fn(&Task, &Tile) -> f64,
    unbuildable: fn(&Tile) -> Option<&'static str>,
    wrong: fn(&Tile) -> bool,
    /// Whether running it ends the search.
    deadly: fn(&Tile) -> bool,
    rng: Rng,
    /// How often each candidate was judged and timed.
    calls: HashMap<Tile, u32>,
    /// Measurements after which the power goes off.
    left: usize,
}

impl Pretended {
    fn measure(&mut self, tile: &Tile) -> Result<(), LabError> {
        self.left = self.left.checked_sub(1).ok_or(LabError::Stopped)?;
        *self.calls.entry(*tile).or_default() += 1;
        Ok(())
    }
}

impl Stand for Pretended {
    fn plan(&self) -> Result<Tile, LabError> {
        Ok(plan(self.task.problem(), &self.gpu, 256).unwrap().kernel().tile())
    }

    fn refusal(&self, tile: &Tile) -> Option<String> {
        plan_tile(self.task.problem(), &self.gpu, 256, *tile).err().map(|misfit| misfit.to_string())
    }

    fn build(&mut self, tiles: &[Tile]) -> Vec<Option<String>> {
        tiles.iter().map(|tile| (self.unbuildable)(tile).map(str::to_owned)).collect()
    }

    fn judge(&mut self, tile: &Tile) -> Result<Finding, LabError> {
        self.measure(tile)?;
        if (self.deadly)(tile) {
            return Err(LabError::Stopped);
        }
        let wrong = (self.wrong)(tile).then(|| "NaN".to_owned());
        Ok(Finding { max_error: 0.0, tolerance: 1.0, rows: 1, wrong })
    }

    fn time(&mut self, tile: &Tile, _seconds: f64) -> Result<Vec<f64>, LabError> {
        self.measure(tile)?;
        let level = (self.speed)(&self.task, tile);
        Ok((0..8).map(|_| level * (1.0 + 0.01 * f64::from(self.rng.normal()).abs())).collect())
    }

    fn other(&self, task: &Task) -> Result<Box<dyn Stand + '_>, LabError> {
        let (task, rng, calls) = (task.clone(), Rng::new(9), HashMap::new());
        Ok(Box::new(Self { task, rng, calls, left: usize::MAX, ..*self }))
    }

    fn subject(&self) -> Option<Subject<'_>> {
        Subject::new("sm_90", self.gpu.sms, self.task.problem())
    }

    fn kernel(&self, tile: &Tile) -> String {
        format!("{tile:?}")
    }
}

struct Silent;

impl Observer for Silent {
    fn at(&mut self, _: &Task, _: &str) {}

    fn stopped(&self) -> bool {
        false
    }
}

fn task() -> Task {
    Task::square(DType::BF16, [1, 16, 4096, 128], Mask::NONE).unwrap()
}

fn pretended(speed: fn(&Task, &Tile) -> f64, left: usize) -> Pretended {
    let wrong = |tile: &Tile| matches!(tile, Tile::Sm90(shape) if shape.tile_n == 64 && shape.stages == 3);
    let (gpu, rng, calls) = (Gpu::HOPPER, Rng::new(1), HashMap::new());
    Pretended { task: task(), gpu, speed, unbuildable: spills, wrong, deadly: |_| false, rng, calls, left }
}

fn spills(tile: &Tile) -> Option<&'static str> {
    matches!(tile, Tile::Sm90(shape) if shape.tile_n == 80).then_some("it spills")
}

const SETTINGS: Settings = Settings {
    strategy: Strategy::Evolve,
    seed: 4,
    seconds: 0.01,
    budget: Duration::from_secs(600),
    candidates: 72,
    wave: 12,
};

fn search(stand: &mut Pretended, settings: Settings, path: &Path) -> Result<Tuned, LabError> {
    watched(stand, settings, path, &mut Silent)
}

fn watched(
    stand: &mut Pretended,
    settings: Settings,
    path: &Path,
    observer: &mut dyn Observer,
) -> Result<Tuned, LabError> {
    let header = Header::new("pretended".to_owned(), settings.seed, vec![task().spec().clone()]);
    let mut journal = Journal::open(path, &header, false)?;
    Search::new((0, &task()), stand, &mut journal, observer, settings).run()
}

/// 112 keys are best, more stages help a little.
fn keys_matter(_: &Task, tile: &Tile) -> f64 {
    let Tile::Sm90(shape) = tile else { return 1.0 };
    1e-3 * (1.0 + f64::from(shape.tile_n.abs_diff(112)) / 200.0 - f64::from(shape.stages) / 100.0)
}

#[test]
fn the_fastest_is_found_and_becomes_a_row() {
    let folder = tempfile::tempdir().unwrap();
    let mut stand = pretended(keys_matter, usize::MAX);
    let tuned = search(&mut stand, SETTINGS, &folder.path().join("journal")).unwrap();
    let Tile::Sm90(shape) = tuned.best.tile else { panic!("{tuned:?}") };
    assert_eq!(shape.tile_n, 112, "{tuned:?}");
    assert!(tuned.ratio.is_some_and(|ratio| ratio.high < 1.0), "{tuned:?}");
    let row = tuned.row.unwrap();
    assert_eq!(row.tile, tuned.best.tile);
    assert!(row.class.queries.holds(3000) && row.class.queries.holds(5500), "{row:?}");
    assert!((row.evidence.median_us - 900.0).abs() < 100.0 && row.evidence.tried > 20, "{row:?}");
    assert!(
        tuned.failed.iter().all(|failed| failed.reason.contains("spills") || failed.reason.contains("NaN"))
    );
    assert!(!tuned.failed.is_empty() && tuned.refused.keys().any(|reason| reason.contains("shared memory")));
    let losers = stand.calls.iter().filter(|(tile, _)| keys_matter(&task(), tile) > 1.2e-3);
    assert!(losers.map(|(_, calls)| *calls).max().unwrap_or(0) <= 4, "early stopping");
}

#[test]
fn where_nothing_is_faster_the_plan_stands() {
    let folder = tempfile::tempdir().unwrap();
    let mut stand = pretended(|_, _| 1e-3, usize::MAX);
    let tuned = search(&mut stand, SETTINGS, &folder.path().join("journal")).unwrap();
    assert_eq!((tuned.best.tile, tuned.row), (tuned.plan.tile, None));
}

#[test]
fn a_class_ends_where_its_tile_is_slower() {
    let folder = tempfile::tempdir().unwrap();
    // Good at the problem's size and above, bad below.
    let speed = |task: &Task, tile: &Tile| match task.spec().q[2] {
        0..4096 => 2e-3 - keys_matter(task, tile),
        _ => keys_matter(task, tile),
    };
    let tuned = search(&mut pretended(speed, usize::MAX), SETTINGS, &folder.path().join("one")).unwrap();
    let class = tuned.row.unwrap().class;
    assert_eq!((class.queries.least(), class.queries.most()), (4096, 5792), "{class:?}");
    let speed = |task: &Task, tile: &Tile| match task.spec().q[2] {
        4096 => keys_matter(task, tile),
        _ => 2e-3 - keys_matter(task, tile),
    };
    let tuned = search(&mut pretended(speed, usize::MAX), SETTINGS, &folder.path().join("two")).unwrap();
    assert!(tuned.row.is_none() && tuned.probes.iter().all(|probe| !probe.kept), "{:?}", tuned.probes);
}

#[test]
fn a_search_that_was_ended_goes_on_and_measures_nothing_twice() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole");
    let mut stand = pretended(keys_matter, usize::MAX);
    let expected = search(&mut stand, SETTINGS, &whole).unwrap();
    let (needed, lines): (u32, _) = (stand.calls.values().sum(), lines(&whole));
    let path = folder.path().join("parts");
    let mut spent = 0;
    loop {
        let mut stand = pretended(keys_matter, 37);
        let ended = search(&mut stand, SETTINGS, &path);
        spent += stand.calls.values().sum::<u32>();
        if let Ok(tuned) = ended {
            let speed = |tuned: &Tuned| keys_matter(&task(), &tuned.best.tile);
            assert!((speed(&tuned) / speed(&expected) - 1.0).abs() < 0.02, "{tuned:?}");
            assert!(tuned.resumed > 50, "{}", tuned.resumed);
            break;
        }
        assert!(spent < 2 * needed, "{spent} measurements instead of {needed}");
    }
    let mut keys: Vec<_> = self::lines(&path).into_iter().collect();
    assert!(lines.values().chain(keys.iter().map(|(_, n)| n)).all(|n| *n == 1), "an entry is there twice");
    keys.retain(|(key, _)| key.contains("judged"));
    assert!(keys.len() > 20);
}

/// Entries without what was measured, and how often each is there.
fn lines(path: &Path) -> BTreeMap<String, usize> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = BTreeMap::new();
    for line in text.lines().skip(1).filter(|line| !line.contains("started")) {
        let key = line.split("\"times\"").next().unwrap_or_default().to_owned();
        *lines.entry(key).or_default() += 1;
    }
    lines
}

/// Has had enough when it was asked so many times.
struct Impatient {
    patience: Cell<usize>,
}

impl Observer for Impatient {
    fn at(&mut self, _: &Task, _: &str) {}

    fn stopped(&self) -> bool {
        let left = self.patience.get();
        self.patience.set(left.saturating_sub(1));
        left == 0
    }
}

#[test]
fn who_stops_a_search_waits_for_one_measurement_at_most() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let mut before = 0;
    let ended = (0..).map(|n| 40 * n).find_map(|patience| {
        let (mut stand, patience) = (pretended(keys_matter, usize::MAX), Cell::new(patience));
        let tuned = watched(&mut stand, SETTINGS, &path, &mut Impatient { patience: patience.clone() });
        assert!(
            stand.calls.values().sum::<u32>() as usize <= patience.get(),
            "it is asked before everything that takes time"
        );
        match tuned {
            Err(LabError::Stopped) => before += 1,
            tuned => return Some(tuned.unwrap()),
        }
        None
    });
    let (tuned, lines) = (ended.unwrap(), lines(&path));
    assert!(before > 4 && tuned.row.is_some() && tuned.resumed > 50, "{before} times: {tuned:?}");
    assert!(lines.values().all(|n| *n == 1), "an entry is there twice");
}

/// Whether a compiler was ended together with the search.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// A user who has pressed Ctrl-C.
struct Gone;

impl Observer for Gone {
    fn at(&mut self, _: &Task, _: &str) {}

    fn stopped(&self) -> bool {
        INTERRUPTED.load(Relaxed)
    }
}

#[test]
fn a_compiler_that_was_interrupted_condemns_no_candidate() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let mut stand = pretended(keys_matter, usize::MAX);
    stand.unbuildable = |tile| {
        let planned = matches!(tile, Tile::Sm90(shape) if shape.tile_n == 128);
        INTERRUPTED.fetch_or(!planned, Relaxed);
        (!planned).then_some("signal: 2 (SIGINT)")
    };
    let stopped = watched(&mut stand, SETTINGS, &path, &mut Gone);
    assert!(matches!(stopped, Err(LabError::Stopped)) && INTERRUPTED.load(Relaxed), "{stopped:?}");
    let tuned = search(&mut pretended(keys_matter, usize::MAX), SETTINGS, &path).unwrap();
    assert!(!tuned.failed.iter().any(|failed| failed.reason.contains("SIGINT")), "{tuned:?}");
}

#[test]
fn who_ends_the_search_twice_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let deadly = |tile: &Tile| matches!(tile, Tile::Sm90(shape) if shape.tile_n == 96);
    let mut ends = 0;
    let tuned = loop {
        let mut stand = pretended(keys_matter, usize::MAX);
        stand.deadly = deadly;
        match search(&mut stand, Settings { candidates: 30, ..SETTINGS }, &path) {
            Ok(tuned) => break tuned,
            Err(_) => ends += 1,
        }
        assert!(ends < 200, "it never ends");
    };
    assert!(
        ends >= 2 && tuned.failed.iter().any(|failed| failed.reason.contains("ended the search 2 times"))
    );
    assert!(!deadly(&tuned.best.tile));
}

#[test]
fn budgets_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let few = Settings { candidates: 9, ..SETTINGS };
    let tuned = search(&mut pretended(keys_matter, usize::MAX), few, &folder.path().join("few")).unwrap();
    assert!(tuned.measured + tuned.failed.len() <= 9 && !tuned.complete, "{tuned:?}");
    let short = Settings { budget: Duration::ZERO, ..SETTINGS };
    let tuned = search(&mut pretended(keys_matter, usize::MAX), short, &folder.path().join("short")).unwrap();
    assert_eq!((tuned.measured, tuned.best.tile), (1, tuned.plan.tile));
    let all = Settings { strategy: Strategy::Exhaustive, candidates: usize::MAX, ..SETTINGS };
    let mut stand = pretended(|_, _| 1e-3, usize::MAX);
    stand.gpu = Gpu::AMPERE;
    let tuned = search(&mut stand, all, &folder.path().join("all")).unwrap();
    assert!(tuned.complete && tuned.measured > 50, "{}", tuned.measured);
}

#[test]
fn a_plan_that_is_wrong_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let mut stand = pretended(keys_matter, usize::MAX);
    stand.wrong = |_| true;
    let error = search(&mut stand, SETTINGS, &folder.path().join("journal")).unwrap_err().to_string();
    assert!(error.contains("the plan's choice") && error.contains("NaN"), "{error}");
    assert!(Tile::Cpu(CpuTile { keys: 5, chunk: 1 }).check().is_err());
}
