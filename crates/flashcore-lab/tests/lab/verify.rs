//! Verification: stages are named, children that hang or die cost one row, broken backends are found out.

use std::{cell::Cell, process::Command, time::Duration};

use flashcore_core::{Backend, BackendError, DataMut, HostCall, Problem, Ran};
use flashcore_cpu::Cpu;
use flashcore_lab::verify::{
    Ending, Extent, Line, Order, Report, Scope, child,
    plan::{self, Candidate, Open, TARGETS, Target},
    watch::{Outcome, Watch},
};

fn order(group: &str, filter: Option<&str>) -> Order {
    let scope =
        Scope { filter: filter.map(str::to_owned), seeds: 1, runs: 3, extent: Extent::Quick, kernel: None };
    Order { backend: "cpu".to_owned(), group: group.to_owned(), scope, skip: 0 }
}

fn ended(name: &str, ending: &str) -> String {
    format!(
        r#"{{"end":{{"check":"{name}","ending":"{ending}","stage":null,"reason":null,"kernel":null,"max_error":null,"tolerance":null}}}}"#
    )
}

/// Watches a shell script that sees the number of finished checks as `$0`.
fn watch(script: &str) -> Outcome {
    watch_until(script, &|| false)
}

fn watch_until(script: &str, stopped: &dyn Fn() -> bool) -> Outcome {
    let command = |order: &Order| {
        let mut command = Command::new("sh");
        command.args(["-c", script, &order.skip.to_string()]);
        command
    };
    let watch = Watch { command: &command, patience: Duration::from_secs(2), stopped };
    watch.group(order("any", None), &mut |_| ()).unwrap()
}

fn names(outcome: &Outcome) -> Vec<(&str, Ending)> {
    outcome.reports.iter().map(|report| (report.check.as_str(), report.ending)).collect()
}

#[test]
fn a_child_that_dies_costs_one_row() {
    let script = format!(
        r#"echo '{{"total":3}}'
        if [ $0 = 0 ]; then echo '{{"begin":[0,"a"]}}'; echo '{}'; echo '{{"begin":[1,"b"]}}'; kill -9 $$; fi
        echo noise; echo '{{"begin":[2,"c"]}}'; echo '{}'"#,
        ended("a", "passed"),
        ended("c", "skipped"),
    );
    let outcome = watch(&script);
    assert_eq!(names(&outcome), [("a", Ending::Passed), ("b", Ending::Failed), ("c", Ending::Skipped)]);
    assert!(outcome.reports[1].reason.as_ref().unwrap().contains("signal"), "{outcome:?}");
}

#[test]
fn a_child_that_hangs_costs_one_row() {
    let script = format!(
        r#"echo '{{"total":2}}'
        if [ $0 = 0 ]; then echo '{{"begin":[0,"a"]}}'; exec sleep 100; fi
        echo '{{"begin":[1,"b"]}}'; echo '{}'"#,
        ended("b", "passed"),
    );
    let outcome = watch(&script);
    assert_eq!(names(&outcome), [("a", Ending::Failed), ("b", Ending::Passed)]);
    assert!(outcome.reports[0].reason.as_ref().unwrap().contains("hangs"), "{outcome:?}");
}

#[test]
fn children_that_never_get_anywhere_are_given_up() {
    for script in ["exit 3", "echo garbage", r#"echo '{"total":4}'"#] {
        let outcome = watch(script);
        assert_eq!(outcome.reports.len(), 1, "{script}: {outcome:?}");
        assert_eq!(outcome.reports[0].ending, Ending::Failed);
    }
    let always_dying = r#"echo '{"total":99}'; echo "{\"begin\":[$0,\"x\"]}"; exit 1"#;
    let outcome = watch(always_dying);
    assert_eq!(outcome.reports.len(), 6, "five deaths and the rest: {outcome:?}");
    assert!(outcome.reports[5].check.contains("94 more"), "{outcome:?}");
}

/// Ctrl-C ends the child with its parent, which may hear of it a moment later.
#[test]
fn a_check_that_the_user_stopped_is_no_failure() {
    for script in [
        r#"echo '{"total":3}'; echo '{"begin":[0,"a"]}'; kill -INT $$"#,
        r#"echo '{"total":3}'; echo '{"begin":[0,"a"]}'; exec sleep 100"#,
        r#"echo '{"total":3}'; kill -INT $$"#,
        "kill -INT $$",
    ] {
        for unheard in [0, 3] {
            let asked = Cell::new(0);
            let outcome = watch_until(script, &|| asked.replace(asked.get() + 1) >= unheard);
            assert_eq!(names(&outcome), [], "{script}");
        }
    }
}

#[test]
fn nothing_is_begun_after_a_stop() {
    let script = format!(
        r#"echo '{{"total":2}}'; echo '{{"begin":[0,"a"]}}'; echo '{}'; echo '{{"begin":[1,"b"]}}'; echo '{}'"#,
        ended("a", "passed"),
        ended("b", "failed"),
    );
    assert_eq!(names(&watch_until(&script, &|| true)), [("a", Ending::Passed)]);
}

#[test]
fn a_backend_that_is_not_there_is_no_failure() {
    let outcome = watch(r#"echo '{"total":4}'; echo '{"unavailable":"no GPU"}'"#);
    assert_eq!((outcome.reports.len(), outcome.unavailable.as_deref()), (0, Some("no GPU")));
}

fn run_on(target: &Target, order: &Order) -> Vec<Report> {
    let mut written = Vec::new();
    child::run_on(target, order, &mut written).unwrap();
    let lines = written.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    let lines = lines.map(|line| serde_json::from_slice::<Line>(line).unwrap());
    lines.filter_map(|line| if let Line::End(report) = line { Some(report) } else { None }).collect()
}

#[test]
fn the_cpu_passes_a_group() {
    let reports = run_on(&TARGETS[0], &order("empty-rows", None));
    assert!(reports.len() >= 12, "{}", reports.len());
    for report in &reports {
        assert_eq!(report.ending, Ending::Passed, "{report:?}");
        assert!(report.kernel.is_some() && report.max_error <= report.tolerance, "{report:?}");
    }
}

/// The CPU with a fault at one stage.
#[derive(Clone, Copy)]
enum Faulty {
    Build,
    Launch,
    Unwritten,
    Wrong,
}

impl Candidate for Faulty {
    fn build(&self, _: &Problem) -> Result<(), BackendError> {
        match self {
            Self::Build => {
                Err(BackendError::Failed { backend: "faulty", source: "registers spilled".into() })
            }
            _ => Ok(()),
        }
    }
}

impl Backend for Faulty {
    fn name(&self) -> &'static str {
        "faulty"
    }

    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        if matches!(self, Self::Launch) {
            return Err(BackendError::Failed { backend: "faulty", source: "illegal address".into() });
        }
        if matches!(self, Self::Unwritten) {
            return Ok(Ran { kernel: "idle".to_owned() });
        }
        let ran = Cpu::new().forward(call)?;
        match call.outputs().0 {
            DataMut::F32(out) => out.iter_mut().for_each(|x| *x *= 1.5),
            DataMut::F16(out) => out.iter_mut().for_each(|x| *x *= half::f16::from_f32(1.5)),
            DataMut::BF16(out) => out.iter_mut().for_each(|x| *x *= half::bf16::from_f32(1.5)),
            _ => unreachable!("three element types"),
        }
        Ok(ran)
    }
}

#[test]
fn the_first_failing_stage_is_named() {
    let cases: [(Open, &str); 4] = [
        (|_| Ok(Box::new(Faulty::Build)), "build"),
        (|_| Ok(Box::new(Faulty::Launch)), "launch"),
        (|_| Ok(Box::new(Faulty::Unwritten)), "sanity"),
        (|_| Ok(Box::new(Faulty::Wrong)), "correctness"),
    ];
    for (open, stage) in cases {
        let target = Target { open, ..plan::CPU };
        let reports = run_on(&target, &order("named", Some("1x2x64x64")));
        assert_eq!(reports[0].stage.as_deref(), Some(stage), "{reports:?}");
        let ended_early = reports.len() == 1;
        assert_eq!(ended_early, matches!(stage, "build" | "launch"), "{reports:?}");
    }
}
