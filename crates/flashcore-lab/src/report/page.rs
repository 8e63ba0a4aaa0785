//! The page: a summary of everything on top, then a section per series with its plots and tables.
//!
//! It is one file without scripts, and its content security policy forbids the browser to load anything. Text enters
//! it only through [`escaped`].

use super::{
    Report, STYLE,
    data::{Curve, Lead, Problem, Run, change, curves, mean_speed},
    words::{self, SPEED, TIME, escaped},
};
use crate::{
    bootstrap::Interval,
    figures::Figures,
    protocol::{Mode, Protocol},
    standing::Standing,
};

/// No network, no scripts; styles only from the page itself.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";
const MARKS: &str = "FlashCore's speed relative to the peer: the peer's median time over FlashCore's. ▼ marks a miss: \
                     significantly slower. ≈ is no significant difference: the 95 % interval contains 1.";

/// The whole page.
pub(super) fn html(report: &Report) -> String {
    let runs = || report.series.iter().flatten();
    let newest = runs().map(|run| run.record.created.as_str()).max().unwrap_or_default();
    let mut devices: Vec<_> = runs().map(Run::device).collect();
    devices.sort_unstable();
    devices.dedup();
    let count = words::count(runs().count(), "run");
    let lede = format!("{count} on {}; the newest is of {}.", devices.join(", "), words::date(newest));
    let named: Vec<_> = report.named().collect();
    let cards: String = named.iter().map(|(id, series)| card(id, &series[series.len() - 1])).collect();
    let sections: String = named.iter().map(|(id, series)| section(report, id, series)).collect();
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>FlashCore: measured</title>\
         <style>{STYLE}</style></head><body><header><h1>FlashCore: measured</h1><p class=\"soft\">{}</p></header>\
         <main><nav class=\"cards\" aria-label=\"Summary\">{cards}</nav>{sections}</main></body></html>\n",
        escaped(&lede)
    )
}

/// How many times as fast, against whom, on what.
fn card(id: &str, run: &Run) -> String {
    let headline = |lead: &Lead| {
        let Lead { peer, mean, least, most, problems, faster, slower } = lead;
        let slow = if *slower > 0 { format!(", slower on {slower}") } else { String::new() };
        let class = if *mean < 1.0 { "miss" } else { "" };
        let (mean, peer) = (words::times(*mean), escaped(&run.title(peer)));
        let range = format!("{} to {}", words::times(*least), words::times(*most));
        format!(
            "<li><strong class=\"{class}\">{mean}</strong><span>as fast as {peer}</span>\
             <small>{range}; faster on {faster} of {problems}{slow}</small></li>"
        )
    };
    let leads = run.leads();
    let nothing = || {
        let what = if run.ours.is_some() { "no peer" } else { "no FlashCore" };
        format!("<li>{} timed, {what} in this run</li>", words::count(run.problems.len(), "problem"))
    };
    let list = if leads.is_empty() { nothing() } else { leads.iter().map(headline).collect() };
    let (title, origin) = (escaped(&run.subject()), escaped(&format!("{}; {}", run.device(), origin(run))));
    format!(
        "<article><h2><a href=\"#{id}\">{title}</a></h2><p class=\"soft\">{origin}</p><ul>{list}</ul></article>"
    )
}

/// When a run was measured, by which commit, with which driver and peers.
pub(super) fn origin(run: &Run) -> String {
    let driver = run.record.machine.driver.as_ref().filter(|_| run.on_gpu);
    let parts = [
        Some(words::date(&run.record.created)),
        run.record.commit.as_deref().map(|id| format!("commit {}", words::commit(Some(id)))),
        driver.map(|driver| format!("driver {driver}")),
        run.record.machine.peers.clone(),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn section(report: &Report, id: &str, series: &[Run]) -> String {
    let run = &series[series.len() - 1];
    let figures = report.cast.figures(series);
    let html = |history: bool| -> String {
        figures.iter().filter(|f| (f.name == "history") == history).map(|f| f.html(id)).collect()
    };
    let past = if series.len() > 1 { history(series, run) } else { String::new() };
    format!(
        "<section id=\"{id}\"><h2>{}</h2>{}{}{}{}{}{past}{}</section>",
        escaped(&run.subject()),
        facts(run),
        leads(run),
        html(false),
        details("Every problem in figures", &problems(run)) + &worst_errors(run) + &standings(run),
        html(true),
        warnings(run)
    )
}

fn facts(run: &Run) -> String {
    let machine = &run.record.machine;
    let gpu = |fact: &Option<String>| fact.clone().filter(|_| run.on_gpu);
    let facts = [
        ("GPU", gpu(&machine.gpu)),
        ("driver", gpu(&machine.driver)),
        ("CPU", Some(format!("{}, {} threads", machine.cpu, machine.cores))),
        ("peers", machine.peers.clone()),
        ("measured", Some(way(&run.record.protocol))),
        ("date", Some(words::date(&run.record.created))),
        ("commit", Some(words::commit(run.record.commit.as_deref()))),
        ("version", Some(run.record.flashcore.clone())),
        ("run", Some(run.name.clone())),
        ("note", (!run.record.complete).then(|| "stopped before everything was measured".to_owned())),
    ];
    let pair = |(name, fact): (&str, Option<String>)| {
        Some(format!("<div><dt>{name}</dt><dd>{}</dd></div>", escaped(&fact?)))
    };
    format!("<dl>{}</dl>", facts.into_iter().filter_map(pair).collect::<String>())
}

fn way(protocol: &Protocol) -> String {
    let Protocol { mode, seconds, rounds, cold, replay, warm_up, .. } = protocol;
    let order = match mode {
        Mode::Sustained if *warm_up > 0.0 => &format!("each alone, back to back after {warm_up} s of load"),
        Mode::Sustained => "each alone, back to back",
        Mode::Interleaved => "in short turns",
    };
    let caches = if *cold { "cold" } else { "warm" };
    let graph = if *replay { ", replayed from a graph" } else { "" };
    format!("{order}, {} of {seconds} s, {caches} caches{graph}", words::count(*rounds as usize, "turn"))
}

fn details(title: &str, content: &str) -> String {
    format!("<details><summary>{}</summary>{content}</details>", escaped(title))
}

fn warnings(run: &Run) -> String {
    let warnings = &run.record.warnings;
    let items: String = warnings.iter().map(|words| format!("<li>{}</li>", escaped(words))).collect();
    let title = words::count(warnings.len(), "warning");
    if warnings.is_empty() { String::new() } else { details(&title, &format!("<ul>{items}</ul>")) }
}

/// A cell of a table.
struct Cell {
    words: String,
    class: &'static str,
    title: String,
    span: usize,
}

fn cell(words: impl Into<String>) -> Cell {
    Cell { words: words.into(), class: "", title: String::new(), span: 1 }
}

/// A cell of words, as opposed to figures.
fn word(words: impl Into<String>) -> Cell {
    Cell { class: "text", ..cell(words) }
}

/// A figure, or nothing.
fn some<T>(value: Option<T>, words: impl FnOnce(T) -> String) -> Cell {
    cell(value.map_or_else(|| "–".to_owned(), words))
}

/// How many times as fast, with a mark unless it is faster beyond doubt.
fn lead(lead: Option<Interval>) -> Cell {
    let Some(lead) = lead else { return cell("–") };
    let (class, mark) = match lead {
        Interval { low, .. } if low > 1.0 => ("", ""),
        Interval { high, .. } if high < 1.0 => ("miss", "▼ "),
        _ => ("level", "≈ "),
    };
    let point = words::times(lead.point);
    let title = format!("{} to {}", words::times(lead.low), words::times(lead.high));
    Cell { class, title, ..cell(format!("{mark}{}", point.trim_end_matches('×'))) }
}

/// A table that scrolls by itself where it is wider than the page; the first cell of a row is its heading.
fn table(caption: &str, headings: &[String], rows: &[Vec<Cell>]) -> String {
    let class =
        |n: usize| rows.iter().filter_map(|row| row.get(n)).any(|cell| cell.class.starts_with("text"));
    let heading = |(n, words): (usize, &String)| {
        let class = if class(n) { " class=\"text\"" } else { "" };
        format!("<th scope=\"col\"{class}>{}</th>", escaped(words))
    };
    let row = |cells: &Vec<Cell>| {
        let head = cells.first().map_or(String::new(), |cell| escaped(&cell.words));
        let cells = cells.iter().skip(1).map(|Cell { words, class, title, span }| {
            let title = escaped(title);
            format!("<td class=\"{class}\" title=\"{title}\" colspan=\"{span}\">{}</td>", escaped(words))
        });
        format!("<tr><th scope=\"row\">{head}</th>{}</tr>", cells.collect::<String>())
    };
    let caption = escaped(caption);
    let (headings, rows) = (
        headings.iter().enumerate().map(heading).collect::<String>(),
        rows.iter().map(row).collect::<String>(),
    );
    // Focusable, so that the keyboard can scroll it.
    format!(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{caption}\"><table><caption>{caption}</caption>\
         <thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
}

fn headings<'a>(fixed: &[&'a str], more: impl Iterator<Item = String> + 'a) -> Vec<String> {
    fixed.iter().map(|words| (*words).to_owned()).chain(more).collect()
}

/// Ours against each peer: by length where there are curves, by problem for the rest.
fn leads(run: &Run) -> String {
    let (curves, rest) = curves(&run.problems);
    let peers: Vec<String> = run.leads().into_iter().map(|lead| lead.peer).collect();
    if peers.is_empty() {
        return String::new();
    }
    let mut tables = String::new();
    for peer in peers.iter().filter(|_| !curves.is_empty()) {
        tables += &leads_by_length(run, peer, &curves);
    }
    if !rest.is_empty() {
        let row = |p: &&Problem| {
            std::iter::once(cell(p.task.to_string()))
                .chain(peers.iter().map(|peer| lead(p.lead(peer))))
                .collect()
        };
        let rows: Vec<Vec<Cell>> = rest.iter().map(row).collect();
        let headings = headings(&["problem"], peers.iter().map(|peer| run.title(peer)));
        tables += &table("Times as fast as each peer", &headings, &rows);
    }
    format!(
        "<h3>FlashCore against each peer</h3><p class=\"soft\">{MARKS}</p><div class=\"beside\">{tables}</div>"
    )
}

fn leads_by_length(run: &Run, peer: &str, curves: &[Curve<'_>]) -> String {
    let lengths = Curve::lengths(curves);
    let row = |curve: &Curve<'_>| {
        let at = |s: &usize| lead(curve.at(*s).and_then(|p| p.lead(peer)));
        std::iter::once(cell(curve.title.as_str())).chain(lengths.iter().map(at)).collect()
    };
    let rows: Vec<Vec<Cell>> = curves.iter().map(row).collect();
    let headings = headings(&["S"], lengths.iter().map(|s| words::extent(*s)));
    table(&format!("Times as fast as {}", run.title(peer)), &headings, &rows)
}

/// Every figure of every competitor.
fn problems(run: &Run) -> String {
    let names = [
        "problem",
        "competitor",
        "time",
        "95 % interval",
        "speed",
        "of the roof",
        "times as fast",
        "error",
        "of its tolerance",
        "kernel",
    ];
    let row = |p: &Problem, name: &str| {
        let entry = p.entry(name)?;
        let class = if run.is_ours(name) { "text ours" } else { "text" };
        let mut row = vec![cell(p.task.to_string()), Cell { class, ..cell(run.title(name)) }];
        if let Some(reason) = &entry.excluded {
            row.push(Cell { class: "prose", span: 8, ..cell(format!("not timed: {reason}")) });
            return Some(row);
        }
        let seconds = |time: f64| words::scaled(time, TIME);
        let roof = entry.speed.as_ref().and_then(|speed| speed.roofline_percent).filter(|p| p.is_finite());
        row.extend([
            some(p.time(name), |time| seconds(time.point)),
            some(p.time(name), |time| format!("{} to {}", seconds(time.low), seconds(time.high))),
            some(p.speed(name), |speed| words::scaled(speed.point, SPEED)),
            some(roof, |percent| words::percent(percent / 100.0)),
            lead(p.lead(name)),
            some(entry.max_error, |error| format!("{error:.1e}")),
            some(share(entry), words::percent),
            word(entry.kernel.clone().unwrap_or_default()),
        ]);
        Some(row)
    };
    let rows: Vec<_> =
        run.problems.iter().flat_map(|p| run.competitors().filter_map(move |name| row(p, name))).collect();
    table("Every problem and competitor", &headings(&names, std::iter::empty()), &rows)
}

/// How much of its tolerance an error takes.
fn share(entry: &Figures) -> Option<f64> {
    Some(entry.max_error? / entry.tolerance?).filter(|share| share.is_finite())
}

fn worst_errors(run: &Run) -> String {
    let row = |name: &str| {
        let found = run.problems.iter().filter_map(|p| Some((share(p.entry(name)?)?, p)));
        let found: Vec<_> = found.collect();
        let worst = found.iter().max_by(|a, b| a.0.total_cmp(&b.0));
        let wrong = found.iter().filter(|(share, _)| *share > 1.0).count();
        let wrong = Cell { class: if wrong > 0 { "miss" } else { "" }, ..cell(wrong.to_string()) };
        let on = word(worst.map_or(String::new(), |(_, p)| p.task.to_string()));
        vec![
            cell(run.title(name)),
            cell(found.len().to_string()),
            wrong,
            some(worst, |w| words::percent(w.0)),
            on,
        ]
    };
    let rows: Vec<_> = run.competitors().map(row).collect();
    let names = ["competitor", "compared with f64", "beyond tolerance", "worst, of its tolerance", "on"];
    table("Errors of each competitor", &headings(&names, std::iter::empty()), &rows)
}

/// Ours beside the best peer, in error and time; nothing for runs that do not tell the relative RMS error.
fn standings(run: &Run) -> String {
    let row = |one: &Standing| {
        let error = |error: Option<f64>| some(error, |error| format!("{error:.2e}"));
        let ratio = |ratio: Option<f64>, is_miss: fn(f64) -> bool| {
            let class = if ratio.is_some_and(is_miss) { "miss" } else { "" };
            Cell { class, ..some(ratio, |ratio| format!("{ratio:.2}")) }
        };
        Some(vec![
            cell(one.problem.as_str()),
            word(one.kind),
            error(Some(one.relative_rms?)),
            ratio(Some(one.rms_of_best?), |ratio| ratio > 1.0),
            error(one.max_error),
            ratio(one.max_of_best, |ratio| ratio > 1.0),
            ratio(one.speed_of_best, |ratio| ratio < 1.0),
        ])
    };
    let rows: Vec<_> = run.standings.iter().filter(|one| one.is_ours()).filter_map(row).collect();
    let names =
        ["problem", "data", "relative RMS", "of the best", "largest error", "of the best", "times as fast"];
    let table =
        || table("Beside the best peer, in error and time", &headings(&names, std::iter::empty()), &rows);
    if rows.is_empty() { String::new() } else { details("Errors beside the best peer's", &table()) }
}

/// All runs of a series, oldest first.
fn history(series: &[Run], newest: &Run) -> String {
    let row = |(n, run): (usize, &Run)| {
        let change = n.checked_sub(1).and_then(|before| change(&series[before], run));
        let mut row = vec![
            cell(words::date(&run.record.created)),
            word(words::commit(run.record.commit.as_deref())),
            some(mean_speed(series, run), |speed| words::scaled(speed, SPEED)),
        ];
        row.extend(newest.peers.iter().map(|peer| some(run.lead(peer), |lead| words::times(lead.mean))));
        row.push(some(change.as_ref(), |change| words::times(change.0)));
        row.push(some(change.as_ref(), |change| words::times(change.1)));
        row.extend([word(change.map_or(String::new(), |change| change.2)), word(run.name.as_str())]);
        row
    };
    let rows: Vec<_> = series.iter().enumerate().map(row).collect();
    let against = newest.peers.iter().map(|peer| format!("against {}", newest.title(peer)));
    let last = ["time, of the run before", "at worst", "on", "run"].map(str::to_owned);
    let headings = headings(&["date", "commit", "speed"], against.chain(last));
    table("Runs of the same problems, oldest first", &headings, &rows)
}
