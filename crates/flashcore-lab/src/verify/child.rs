//! The child's side: runs the checks of one group and reports line by line.
//!
//! A backend that failed to launch may be beyond repair (a poisoned GPU context), so the child exits; the parent
//! starts another for the rest.

use std::io::{self, Write};

use flashcore_core::BackendError;
use flashcore_kernels::Choice;
use flashcore_testkit::{Outcome, Step, append, backward, check_case_runs, merge, moe};

use super::{
    Ending, Line, Order, Report,
    plan::{Candidate, Check, Group, Subject, Target, groups, target},
};

/// Runs an order and writes what happens to `to`.
pub fn run(order: &Order, to: &mut dyn Write) -> io::Result<()> {
    let Some(target) = target(&order.backend) else {
        return tell(to, &Line::Unavailable(format!("there is no backend `{}`", order.backend)));
    };
    run_on(target, order, to)
}

/// [`run`] on a backend that need not be in the table.
pub fn run_on(target: &Target, order: &Order, to: &mut dyn Write) -> io::Result<()> {
    let group = groups(target, &order.scope).into_iter().find(|group| group.name == order.group);
    let Group { checks, .. } = group.unwrap_or(Group { name: String::new(), checks: Vec::new() });
    tell(to, &Line::Total(checks.len()))?;
    let choice = order.scope.kernel.map_or(Choice::Rules, Choice::Kernel);
    let candidate = match (target.open)(choice) {
        Ok(candidate) => candidate,
        Err(error) => return tell(to, &Line::Unavailable(reason(&error))),
    };
    for (index, check) in checks.iter().enumerate().skip(order.skip) {
        tell(to, &Line::Begin(index, check.name()))?;
        let report = examine(&*candidate, check, order.scope.runs);
        let beyond_repair = matches!(report.stage.as_deref(), Some("build" | "launch"));
        tell(to, &Line::End(report))?;
        if beyond_repair {
            break;
        }
    }
    Ok(())
}

fn tell(to: &mut dyn Write, line: &Line) -> io::Result<()> {
    let text = serde_json::to_string(line)?;
    writeln!(to, "{text}")?;
    to.flush()
}

fn examine(candidate: &dyn Candidate, check: &Check, runs: usize) -> Report {
    match &check.subject {
        Subject::Case(case) => {
            if let Some(report) = case
                .problem(check.dtype)
                .ok()
                .and_then(|p| candidate.build(&p).err().map(|error| not_built(check, &error)))
            {
                return report;
            }
            let found = check_case_runs(candidate, case, check.dtype, check.seed, runs);
            let verdict = found.verdict.as_ref();
            Report {
                kernel: found.kernel.clone(),
                max_error: verdict.map(|v| v.max_error).filter(|x| x.is_finite()),
                tolerance: verdict.map(|v| v.tolerance).filter(|x| x.is_finite()),
                ..report(check, &found.outcome)
            }
        }
        Subject::Law(law) => report(check, &law.check(candidate, check.dtype, check.seed)),
        Subject::Gradients(case) => report(check, &backward::check(candidate, case, check.dtype, check.seed)),
        Subject::Experts(case) => report(check, &moe::check(candidate, case, check.dtype, check.seed)),
        Subject::Merge(case, out) => {
            report(check, &merge::check(candidate, case, [check.dtype, *out], check.seed))
        }
        Subject::Append(case) => {
            report(check, &append::check(candidate, case, (check.dtype, check.dtype), check.seed))
        }
        Subject::GradientLaw(law) => report(check, &law.check(candidate, check.dtype, check.seed)),
    }
}

fn not_built(check: &Check, error: &BackendError) -> Report {
    let (ending, stage) = match error {
        BackendError::Unsupported { .. } | BackendError::Unavailable { .. } => (Ending::Skipped, None),
        _ => (Ending::Failed, Some("build")),
    };
    Report::ended(check.name(), ending, stage, reason(error))
}

/// Why, where it is known which backend it is about.
fn reason(error: &BackendError) -> String {
    match error {
        BackendError::Failed { source, .. } => source.to_string(),
        BackendError::Unavailable { reason, .. } => reason.clone(),
        _ => error.to_string(),
    }
}

fn report(check: &Check, outcome: &Outcome) -> Report {
    let name = check.name();
    match outcome {
        Outcome::Passed => {
            Report { reason: None, ..Report::ended(name, Ending::Passed, None, String::new()) }
        }
        Outcome::Skipped(reason) => Report::ended(name, Ending::Skipped, None, reason.clone()),
        Outcome::Failed { step, reason } => {
            Report::ended(name, Ending::Failed, Some(stage_name(*step)), reason.clone())
        }
    }
}

const fn stage_name(step: Step) -> &'static str {
    match step {
        Step::Launch => "launch",
        Step::Sanity => "sanity",
        Step::Determinism => "determinism",
        Step::Isolation => "isolation",
        _ => "correctness",
    }
}
