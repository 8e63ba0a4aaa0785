//! Contests between real and planted competitors: the wrong ones are found out before anything is timed.

use std::{
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use flashcore_core::{Backend, BackendError, DType, DataMut, HostCall, Mask, Ran};
use flashcore_cpu::Cpu;
use flashcore_lab::{
    LabError,
    burst::Run,
    competitor::{Competitor, Place, Ready, host::HostCompetitor},
    contest::{Contest, Observer},
    gate::{self, Demand},
    judge::Care,
    protocol::{Mode, Protocol},
    record::Record,
    sensors::Sensors,
    task::Task,
    workload::{Outputs, Workload},
};
use flashcore_testkit::NaiveBackend;

const QUICK: Protocol = Protocol { seed: 1, ..Protocol::new(Mode::Sustained, 0.05) };

struct Patient;

impl Observer for Patient {
    fn at(&mut self, _: &Task, _: &str) {}

    fn stopped(&self) -> bool {
        false
    }
}

/// The CPU backend with one tile of 16 rows gone wrong.
struct WrongTile;

impl Backend for WrongTile {
    fn name(&self) -> &'static str {
        "wrong"
    }

    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        let ran = Cpu::new().forward(call)?;
        let dim = call.problem().dim_v();
        if let (DataMut::F32(out), _) = call.outputs() {
            out[48 * dim..64 * dim].iter_mut().for_each(|x| *x *= 1.01);
        }
        Ok(ran)
    }
}

/// A competitor that counts how often it is timed.
struct Counted<A> {
    competitor: A,
    place: Place,
    timed: Rc<AtomicU32>,
}

struct CountedReady {
    ready: Box<dyn Ready>,
    timed: Rc<AtomicU32>,
}

impl<A: Competitor> Competitor for Counted<A> {
    fn name(&self) -> &str {
        self.competitor.name()
    }

    fn place(&self) -> Place {
        self.place
    }

    fn prepare(&self, workload: &Rc<Workload>) -> Result<Box<dyn Ready>, LabError> {
        let (ready, timed) = (self.competitor.prepare(workload)?, self.timed.clone());
        Ok(Box::new(CountedReady { ready, timed }))
    }
}

impl Ready for CountedReady {
    fn kernel(&self) -> &str {
        self.ready.kernel()
    }

    fn compute(&mut self) -> Result<Outputs, LabError> {
        self.ready.compute()
    }

    fn time(&mut self, run: &Run) -> Result<Vec<f64>, LabError> {
        self.timed.fetch_add(1, Relaxed);
        self.ready.time(run)
    }
}

fn host(backend: impl Backend + 'static) -> Box<dyn Competitor> {
    Box::new(HostCompetitor::new(Arc::new(backend)))
}

fn task() -> Task {
    Task::square(DType::F32, [1, 2, 96, 32], Mask::CAUSAL).unwrap()
}

fn prepare(competitors: &[Box<dyn Competitor>]) -> Contest {
    Contest::prepare(&task(), competitors, 1, Care::Usual, &mut Patient).unwrap()
}

/// How often the only competitor, at `place`, is timed, and how many turns are kept.
fn bursts(place: Place, warm_up: f64) -> (u32, usize) {
    let timed = Rc::new(AtomicU32::new(0));
    let competitor = HostCompetitor::new(Arc::new(NaiveBackend));
    let contest = prepare(&[Box::new(Counted { competitor, place, timed: timed.clone() })]);
    let measured = contest.run(&Protocol { warm_up, ..QUICK }, &Sensors::start(), &mut Patient).unwrap();
    (timed.load(Relaxed), measured[0].stretches.len())
}

#[test]
fn load_before_the_first_turn_is_not_kept() {
    let (timed, turns) = bursts(Place::Gpu, 0.0);
    assert_eq!(turns, 2, "a turn, and one at the end");
    assert_eq!(bursts(Place::Gpu, 0.05), (timed / 2 * 3, turns));
    assert_eq!(bursts(Place::Cpu, 0.05), (timed, turns));
}

#[test]
fn a_wrong_tile_fails_before_it_is_timed() {
    let timed = Rc::new(AtomicU32::new(0));
    let competitor = HostCompetitor::new(Arc::new(WrongTile));
    let wrong = Counted { competitor, place: Place::Cpu, timed: timed.clone() };
    let contest = prepare(&[Box::new(wrong), host(NaiveBackend)]);
    let ruling = gate::correctness(&task(), "wrong", &contest).unwrap().expect("a ruling without timing");
    assert!(!ruling.pass() && ruling.ratio.is_none(), "{ruling:?}");
    let measured = contest.run(&QUICK, &Sensors::start(), &mut Patient).unwrap();
    assert_eq!(timed.load(Relaxed), 0, "a wrong kernel must not be timed");
    assert!(measured[0].stretches.is_empty() && !measured[1].stretches.is_empty());
}

#[test]
fn a_wrong_peer_is_no_peer() {
    let contest = prepare(&[host(Cpu::new()), host(WrongTile), host(NaiveBackend)]);
    let error = gate::correctness(&task(), "cpu", &contest).unwrap_err();
    assert!(matches!(&error, LabError::Oracle { competitor, .. } if competitor == "wrong"), "{error}");
}

#[test]
fn if_nobody_agrees_with_the_oracle_it_is_not_ours_that_is_blamed() {
    struct Also;
    impl Backend for Also {
        fn name(&self) -> &'static str {
            "also"
        }

        fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
            WrongTile.forward(call)
        }
    }
    let contest = prepare(&[host(WrongTile), host(Also)]);
    let error = gate::correctness(&task(), "wrong", &contest).unwrap_err();
    assert!(matches!(&error, LabError::Oracle { competitor, .. } if competitor == "also"), "{error}");
}

#[test]
fn right_competitors_are_timed_in_turn() {
    let contest = prepare(&[host(Cpu::new()), host(NaiveBackend)]);
    assert!(gate::correctness(&task(), "cpu", &contest).unwrap().is_none());
    // Long enough for samples beside a busy machine's other work.
    let protocol = Protocol { seed: 1, ..Protocol::new(Mode::Sustained, 0.3) };
    let measured = contest.run(&protocol, &Sensors::start(), &mut Patient).unwrap();
    let turns: Vec<Vec<bool>> =
        measured.iter().map(|m| m.stretches.iter().map(|s| s.again).collect()).collect();
    assert_eq!(turns, [vec![false, true], vec![false]], "the first comes again");
    let ruling =
        gate::against_peer(&task(), &measured, &protocol, ["cpu", "naive"], Demand::Superior(1e3)).unwrap();
    assert!(ruling.pass() && ruling.ratio.is_some(), "{ruling:?}");
    let impossible =
        gate::against_peer(&task(), &measured, &protocol, ["cpu", "naive"], Demand::Superior(1e-6));
    assert!(!impossible.unwrap().pass());
    let missing = gate::against_peer(&task(), &measured, &protocol, ["cpu", "nobody"], Demand::Superior(1.0));
    assert!(matches!(missing, Err(LabError::Unavailable { .. })));
}

#[test]
fn a_baseline_must_fit() {
    let contest = prepare(&[host(Cpu::new())]);
    let mut measured = contest.run(&QUICK, &Sensors::start(), &mut Patient).unwrap();
    // How steady and how busy the machine is must not decide.
    measured[0].stretches.iter_mut().for_each(|stretch| stretch.seconds = vec![1e-3; 32]);
    let mut baseline = Record::new(QUICK, None);
    let now = baseline.clone();
    let compare = |baseline: &Record| {
        gate::against_baseline(&task(), &measured[0], &QUICK, baseline, Demand::NotInferior(0.5))
    };
    assert!(matches!(compare(&baseline), Err(LabError::Baseline(_))), "nothing was measured");
    baseline.measurements = measured.clone();
    assert!(compare(&baseline).unwrap().pass(), "equal to itself");
    assert!(gate::check_baseline(&baseline, &now).is_ok());
    let mut other = baseline.clone();
    other.machine.cpu = "another".to_owned();
    assert!(gate::check_baseline(&other, &now).unwrap_err().to_string().contains("another"));
    baseline.protocol.cold = true;
    assert!(gate::check_baseline(&baseline, &now).is_err());
    for time in &mut baseline.measurements[0].stretches[0].seconds {
        *time /= 10.0;
    }
    assert!(!compare(&baseline).unwrap().pass(), "ten times slower than before");
}
