//! The tables of a page: leads over a peer, every problem, errors, history, checks.

use super::{
    section::details,
    table::{cell, figures, lead, lead_range, prose, row_name, some, table, texts, word},
};
use crate::report::{
    checks::{Backend, Checks, Group},
    markup::Element,
    run::{Problem, Run},
    series::Series,
    sweep::{Sweep, length},
    wording,
};

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
        let cells = lengths.iter().map(|&s| lead(at(curve, s)));
        std::iter::once(row_name(curve.title.as_str())).chain(cells).collect()
    };
    let mut headings = texts(["S"]);
    headings.extend(figures(lengths.iter().map(|&s| wording::extent(s))));
    let caption = format!("Times as fast as {}", run.title(peer));
    Some(table(&caption, &headings, curves.iter().map(row)))
}

/// How many times as fast as each peer, for problems that are on no curve.
pub(super) fn leads_by_problem(run: &Run, problems: &[&Problem]) -> Option<Element> {
    let peers: Vec<&String> = run.peers.iter().filter(|peer| run.lead(peer).is_some()).collect();
    let mut headings = texts(["problem"]);
    headings.extend(figures(peers.iter().map(|peer| run.title(peer))));
    let row = |problem: &&Problem| {
        let cells = peers.iter().map(|peer| lead(problem.lead(peer)));
        std::iter::once(row_name(problem.task.to_string())).chain(cells).collect()
    };
    let any = !peers.is_empty() && !problems.is_empty();
    any.then(|| table("Times as fast as each peer", &headings, problems.iter().map(row)))
}

/// Every figure of every competitor.
pub(super) fn problems(run: &Run) -> Element {
    let mut headings = texts(["problem", "competitor"]);
    let times = ["time", "95 % interval", "speed", "of the roof", "times as fast", "95 % interval"];
    headings.extend(figures(times));
    headings.extend(texts(["kernel"]));
    let rows = run
        .problems
        .iter()
        .flat_map(|problem| run.arms().filter_map(|arm| problem_row(run, problem, arm)).collect::<Vec<_>>());
    table("Every problem and competitor", &headings, rows)
}

fn problem_row(run: &Run, problem: &Problem, arm: &str) -> Option<Vec<Element>> {
    let entry = problem.entry(arm)?;
    let name = row_name(problem.task.to_string());
    let who = cell(run.title(arm)).class(if run.is_ours(arm) { "text ours" } else { "text" });
    if let Some(reason) = &entry.excluded {
        let reason = prose(format!("not timed: {reason}")).attr("colspan", 7);
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
        lead(entry.lead),
        some(entry.lead.as_ref(), lead_range),
        word(entry.kernel.clone().unwrap_or_default()),
    ])
}

/// Each competitor's worst error.
pub(super) fn worst_errors(run: &Run) -> Element {
    let mut headings = texts(["competitor"]);
    headings.extend(figures(["judged", "wrong", "worst, of tolerance", "error", "tolerance"]));
    headings.extend(texts(["on"]));
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
        cell(found.len().to_string()),
        cell(wrong.to_string()).class(if wrong > 0 { "miss" } else { "" }),
        some(worst, |(_, f)| wording::percent(f.max_error / f.tolerance)),
        some(worst, |(_, f)| wording::error(f.max_error)),
        some(worst, |(_, f)| wording::error(f.tolerance)),
        word(worst.map_or(String::new(), |(problem, _)| problem.task.to_string())),
    ]
}

/// The error of every competitor on every problem.
pub(super) fn errors(run: &Run) -> Element {
    let mut headings = texts(["problem"]);
    headings.extend(figures(["rows compared", "tolerance"]));
    headings.extend(figures(run.arms().map(|arm| run.title(arm))));
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
    let mut headings = texts(["date", "commit"]);
    headings.extend(figures(["speed"]));
    headings.extend(figures(newest.peers.iter().map(|peer| format!("against {}", newest.title(peer)))));
    headings.extend(figures(["time, of the run before", "at worst"]));
    headings.extend(texts(["on", "run"]));
    let rows = series.runs().iter().enumerate().map(|(n, run)| {
        let change = series.change(n);
        let mut cells = vec![
            row_name(wording::date(&run.record.created)),
            word(wording::commit(run.record.commit.as_deref())),
            some(series.mean_speed(run), wording::flops),
        ];
        cells.extend(newest.peers.iter().map(|peer| some(run.lead(peer), |lead| wording::times(lead.mean))));
        cells.push(some(change.as_ref(), |change| wording::times(change.mean)));
        cells.push(some(change.as_ref(), |change| wording::times(change.worst)));
        cells.push(word(change.map_or(String::new(), |change| change.problem)));
        cells.push(word(run.name.as_str()));
        cells
    });
    table("Runs of the same problems, oldest first", &headings, rows)
}

/// What `verify` found: a row per backend, and every group when asked for.
pub(super) fn checks(checks: &Checks) -> Element {
    let counts = || figures(["passed", "skipped", "failed", "worst, of tolerance"]);
    let mut by_group = texts(["backend", "group"]);
    by_group.extend(counts());
    let mut by_backend = texts(["backend"]);
    by_backend.extend(counts());
    let groups = checks.backends.iter().flat_map(|b| {
        let row =
            |group: &Group| [vec![row_name(b.backend.as_str()), word(group.group.as_str())], sums(&[group])];
        b.groups.iter().map(|group| row(group).concat()).collect::<Vec<_>>()
    });
    let verdict = if checks.pass { "passed" } else { "did not pass" };
    let sum = format!("Verification {verdict} in {}.", wording::seconds(checks.seconds));
    Element::new("section")
        .attr("id", "checks")
        .with(Element::new("h2").with("Checks"))
        .with(Element::new("p").class(if checks.pass { "" } else { "miss" }).with(sum))
        .with(table("Checks of each backend", &by_backend, checks.backends.iter().map(backend_row)))
        .with(details("Every group of checks", table("Groups of checks", &by_group, groups)))
}

fn backend_row(backend: &Backend) -> Vec<Element> {
    let mut row = vec![row_name(backend.backend.as_str())];
    match &backend.unavailable {
        Some(reason) => row.push(prose(format!("not there: {reason}")).attr("colspan", 4)),
        None => row.extend(sums(&backend.groups.iter().collect::<Vec<_>>())),
    }
    row
}

/// Passed, skipped, failed, and the worst error of some groups.
fn sums(groups: &[&Group]) -> Vec<Element> {
    let sum = |count: fn(&Group) -> usize| groups.iter().map(|g| count(g)).fold(0, usize::saturating_add);
    let failed = sum(|group| group.failed);
    vec![
        cell(sum(|group| group.passed).to_string()),
        cell(sum(|group| group.skipped).to_string()),
        cell(failed.to_string()).class(if failed > 0 { "miss" } else { "" }),
        some(groups.iter().filter_map(|group| group.worst).reduce(f64::max), wording::percent),
    ]
}
