//! The tables of a page: leads over a peer, every problem, errors, history, checks.

use super::table::{cell, lead, prose, row_name, some, table};
use crate::report::{
    checks::{Checks, Group},
    markup::Element,
    run::{Problem, Run},
    series::Series,
    sweep::{Sweep, length},
    wording,
};

fn words<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).to_vec()
}

/// How many times as fast as `peer`: a row per curve, a column per length; `None` where there are no curves.
pub(super) fn leads(run: &Run, peer: &str, curves: &[Sweep<'_>]) -> Option<Element> {
    let mut lengths: Vec<usize> = curves.iter().flat_map(|c| c.problems.iter().map(|p| length(p))).collect();
    lengths.sort_unstable();
    lengths.dedup();
    run.lead(peer).filter(|_| !curves.is_empty())?;
    let at = |curve: &Sweep<'_>, s: usize| {
        let problem = curve.problems.iter().find(|p| length(p) == s)?;
        problem.lead(peer)
    };
    let row = |curve: &Sweep<'_>| {
        let cells = lengths.iter().map(|&s| lead(at(curve, s), false));
        std::iter::once(row_name(curve.title.as_str())).chain(cells).collect()
    };
    let columns = lengths.iter().map(|&s| wording::extent(s));
    let headings: Vec<_> = std::iter::once("S".to_owned()).chain(columns).collect();
    let caption = format!("Times as fast as {}", run.title(peer));
    Some(table(&caption, &headings, curves.iter().map(row)))
}

/// Every figure of every competitor.
pub(super) fn problems(run: &Run) -> Element {
    let mut headings = words(["problem", "competitor", "time", "95 % interval", "speed", "of the roof"]);
    headings.extend(words(["FlashCore is", "kernel"]));
    let rows = run
        .problems
        .iter()
        .flat_map(|problem| run.arms().filter_map(|arm| problem_row(run, problem, arm)).collect::<Vec<_>>());
    table("Every problem and competitor", &headings, rows)
}

fn problem_row(run: &Run, problem: &Problem, arm: &str) -> Option<Vec<Element>> {
    let entry = problem.entry(arm)?;
    let name = row_name(problem.task.to_string());
    let who = cell(run.title(arm)).class(if run.is_ours(arm) { "ours" } else { "" });
    if let Some(reason) = &entry.excluded {
        let reason = prose(format!("not timed: {reason}")).attr("colspan", 6);
        return Some(vec![name, who, reason]);
    }
    let range =
        |t| format!("{} to {}", wording::seconds(t), wording::seconds(entry.time.map_or(t, |t| t.high)));
    Some(vec![
        name,
        who,
        some(entry.time, |t| wording::seconds(t.point)),
        some(entry.time.map(|t| t.low), range),
        some(problem.speed(arm), |speed| wording::flops(speed.point)),
        some(entry.roofline, wording::percent),
        lead(entry.lead, true),
        some(entry.kernel.as_ref(), String::clone),
    ])
}

/// Each competitor's worst error.
pub(super) fn worst_errors(run: &Run) -> Element {
    let headings =
        words(["competitor", "judged", "wrong", "worst, of tolerance", "error", "tolerance", "on"]);
    table("Worst error of each competitor", &headings, run.arms().map(|arm| worst_row(run, arm)))
}

fn worst_row(run: &Run, arm: &str) -> Vec<Element> {
    let found = run.problems.iter().filter_map(|p| Some((p, p.entry(arm)?.finding.as_ref()?)));
    let found: Vec<_> = found.collect();
    let wrong = found.iter().filter(|(_, finding)| !finding.pass()).count();
    let worst = found.iter().max_by(|a, b| {
        let share = |f: &crate::referee::Finding| f.max_error / f.tolerance;
        share(a.1).total_cmp(&share(b.1))
    });
    vec![
        row_name(run.title(arm)),
        cell(wording::count(found.len(), "problem")),
        cell(wrong.to_string()).class(if wrong > 0 { "miss" } else { "" }),
        some(worst, |(_, f)| wording::percent(f.max_error / f.tolerance)),
        some(worst, |(_, f)| wording::error(f.max_error)),
        some(worst, |(_, f)| wording::error(f.tolerance)),
        some(worst, |(problem, _)| problem.task.to_string()),
    ]
}

/// The error of every competitor on every problem.
pub(super) fn errors(run: &Run) -> Element {
    let mut headings = words(["problem", "rows compared", "tolerance"]);
    headings.extend(run.arms().map(|arm| run.title(arm)));
    let row = |problem: &Problem| {
        let finding = |arm: &str| problem.entry(arm)?.finding.as_ref();
        let any = run.arms().find_map(finding);
        let mut cells = vec![
            row_name(problem.task.to_string()),
            some(any, |f| f.rows.to_string()),
            some(any, |f| wording::error(f.tolerance)),
        ];
        cells.extend(run.arms().map(|arm| match finding(arm) {
            Some(f) if !f.pass() => cell(format!("▼ {}", wording::error(f.max_error))).class("miss"),
            finding => some(finding, |f| wording::error(f.max_error)),
        }));
        cells
    };
    table("Errors", &headings, run.problems.iter().map(row))
}

/// All runs of a series, oldest first.
pub(super) fn history(series: &Series) -> Element {
    let newest = series.newest();
    let mut headings = words(["date", "commit", "speed"]);
    headings.extend(newest.peers.iter().map(|peer| format!("against {}", newest.title(peer))));
    headings.extend(words(["time since the run before", "worst", "run"]));
    let rows = series.runs().iter().enumerate().map(|(n, run)| {
        let change = series.change(n);
        let mut cells = vec![
            row_name(wording::date(&run.record.created)),
            cell(wording::commit(run.record.commit.as_deref())),
            some(series.mean_speed(run), wording::flops),
        ];
        cells.extend(newest.peers.iter().map(|peer| some(run.lead(peer), |lead| wording::times(lead.mean))));
        cells.push(some(change.as_ref(), |change| wording::times(change.mean)));
        cells.push(some(change.as_ref(), |c| format!("{} on {}", wording::times(c.worst), c.problem)));
        cells.push(cell(run.name.as_str()));
        cells
    });
    table("Runs of the same problems, oldest first", &headings, rows)
}

/// What `verify` found.
pub(super) fn checks(checks: &Checks) -> Element {
    let headings = words(["backend", "group", "passed", "skipped", "failed", "worst, of tolerance"]);
    let rows = checks.backends.iter().flat_map(|backend| {
        let missing = backend.unavailable.iter().map(|reason| {
            vec![row_name(backend.backend.as_str()), prose(format!("not there: {reason}")).attr("colspan", 5)]
        });
        missing
            .chain(backend.groups.iter().map(|group| group_row(&backend.backend, group)))
            .collect::<Vec<_>>()
    });
    let verdict = if checks.pass { "passed" } else { "did not pass" };
    let sum = format!("Verification {verdict} in {}.", wording::seconds(checks.seconds));
    Element::new("section")
        .attr("id", "checks")
        .with(Element::new("h2").with("Checks"))
        .with(Element::new("p").class(if checks.pass { "" } else { "miss" }).with(sum))
        .with(table("Groups of checks", &headings, rows))
}

fn group_row(backend: &str, group: &Group) -> Vec<Element> {
    vec![
        row_name(backend),
        cell(group.group.as_str()),
        cell(group.passed.to_string()),
        cell(group.skipped.to_string()),
        cell(group.failed.to_string()).class(if group.failed > 0 { "miss" } else { "" }),
        some(group.worst, wording::percent),
    ]
}
