//! One series: what was measured and how, its plots, its tables.

use super::{
    table::{prose, row_name, table, texts},
    tables,
};
use crate::{
    protocol::{Mode, Protocol},
    report::{
        markup::Element,
        plot::figure::Figure,
        run::{Problem, Run},
        series::Series,
        sweep::{self, Sweep},
        wording,
    },
};

/// The section; `id` is its address on the page.
pub(super) fn section(id: &str, series: &Series, figures: &[Figure]) -> Element {
    let run = series.newest();
    let (curves, rest) = sweep::sweeps(&run.problems);
    let (history, plots): (Vec<_>, Vec<_>) = figures.iter().partition(|figure| figure.name == "history");
    Element::new("section")
        .attr("id", id)
        .with(Element::new("h2").with(series.title()))
        .with(facts(run))
        .all(leads(run, &curves, &rest))
        .all(plots.iter().map(|figure| figure.html(id)))
        .with(details("Every problem in figures", tables::problems(run)))
        .with(errors(run))
        .all(history.iter().map(|figure| figure.html(id)))
        .all((series.runs().len() > 1).then(|| tables::history(series)))
        .all(warnings(run))
}

fn facts(run: &Run) -> Element {
    let machine = &run.record.machine;
    let gpu = |fact: &Option<String>| fact.clone().filter(|_| run.on_gpu);
    let facts = [
        ("GPU", gpu(&machine.gpu)),
        ("driver", gpu(&machine.driver)),
        ("CPU", Some(format!("{}, {} threads", machine.cpu, machine.cores))),
        ("peers", machine.peers.clone()),
        ("measured", Some(way(&run.record.protocol))),
        ("date", Some(wording::date(&run.record.created))),
        ("commit", Some(wording::commit(run.record.commit.as_deref()))),
        ("version", Some(run.record.flashcore.clone())),
        ("run", Some(run.name.clone())),
        ("note", (!run.record.complete).then(|| "stopped before everything was measured".to_owned())),
    ];
    let facts = facts.into_iter().filter_map(|(name, fact)| Some((name, fact?)));
    let pair = |(name, fact): (&str, String)| {
        Element::new("div").with(Element::new("dt").with(name)).with(Element::new("dd").with(fact))
    };
    Element::new("dl").all(facts.map(pair))
}

fn way(protocol: &Protocol) -> String {
    let Protocol { mode, seconds, rounds, cold, replay, warm_up, .. } = protocol;
    let order = match mode {
        Mode::Sustained if *warm_up > 0.0 => &format!("each alone, back to back after {warm_up} s of load"),
        Mode::Sustained => "each alone, back to back",
        Mode::Interleaved => "in short turns",
        Mode::Idle => "single calls after pauses",
    };
    let caches = if *cold { "cold" } else { "warm" };
    let graph = if *replay { ", replayed from a graph" } else { "" };
    let time =
        if *rounds == 1 { format!("{seconds} s each") } else { format!("{rounds} turns of {seconds} s") };
    format!("{order}, {time}, {caches} caches{graph}")
}

/// Tables of leads, and what the marks in them mean.
fn leads(run: &Run, curves: &[Sweep<'_>], rest: &[&Problem]) -> Option<Element> {
    let by_length = run.peers.iter().filter_map(|peer| tables::leads(run, peer, curves));
    let tables = by_length.chain(tables::leads_by_problem(run, rest));
    let words = "How many times as fast FlashCore is: the peer's median time over ours. ▼ marks a miss: slower beyond \
                 doubt. ≈ cannot be told from 1: the 95 % interval holds it.";
    let heading = Element::new("h3").with("FlashCore against each peer");
    let explained = Element::new("p").class("soft").with(words);
    let tables = Element::new("div").class("beside").all(tables);
    (!run.leads().is_empty()).then(|| Element::new("div").with(heading).with(explained).with(tables))
}

/// What is shown when asked for.
pub(super) fn details(title: &str, content: Element) -> Element {
    Element::new("details").with(Element::new("summary").with(title)).with(content)
}

fn errors(run: &Run) -> Element {
    let heading = Element::new("h3").with("Errors");
    let rule = "Largest difference from the same operation in f64, and what share of its tolerance that is.";
    Element::new("div")
        .with(heading)
        .with(Element::new("p").class("soft").with(rule))
        .with(tables::worst_errors(run))
        .with(details("Every error", tables::errors(run)))
}

fn warnings(run: &Run) -> Option<Element> {
    let warnings = &run.record.warnings;
    let rows = warnings
        .iter()
        .enumerate()
        .map(|(n, words)| vec![row_name((n + 1).to_string()), prose(words.as_str())]);
    let content = || table("Warnings of the run", &texts(["", "warning"]), rows);
    (!warnings.is_empty()).then(|| details(&wording::count(warnings.len(), "warning"), content()))
}
