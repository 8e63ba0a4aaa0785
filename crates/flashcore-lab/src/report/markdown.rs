//! The main tables of a report in Markdown, for a README: how many times as fast as the best peer, and how exact on
//! every kind of data.

use super::{
    Report,
    data::{BEST_PEER, Curve, Run, curves},
    page::origin,
    words,
};
use crate::standing::Standing;

/// A section for each series, with its newest run.
pub(super) fn tables(report: &Report) -> String {
    report.series.iter().map(|series| section(&series[series.len() - 1])).collect::<Vec<_>>().join("\n")
}

fn section(run: &Run) -> String {
    let head = format!("### {}\n\n{}; {}\n", run.subject(), run.device(), origin(run));
    let (curves, _) = curves(&run.problems);
    let parts = [plain(&head), by_length(run, curves), by_kind(run)];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n")
}

/// Text of a record that no table or link of the document takes for its own.
fn plain(text: &str) -> String {
    text.replace(['|', '<', '[', ']', '`'], " ")
}

fn by_length(run: &Run, mut curves: Vec<Curve<'_>>) -> String {
    let peers: Vec<_> = run.leads().into_iter().map(|lead| lead.peer).collect();
    let Some(peer) = peers.last().filter(|_| !curves.is_empty()) else { return String::new() };
    let names: Vec<_> = peers.iter().filter(|name| *name != BEST_PEER).map(|name| run.title(name)).collect();
    let against = if names.len() > 1 { format!("the best of {}", names.join(", ")) } else { names.join("") };
    // A head dim's masks stand together.
    curves.sort_by_key(|curve| curve.problems[0].task.attention().map(|spec| spec.q[3]));
    let lengths = Curve::lengths(&curves);
    let row = |curve: &Curve<'_>| {
        let at = |length: &usize| curve.at(*length).and_then(|p| p.lead(peer));
        let cells = lengths
            .iter()
            .map(|length| at(length).map_or("–".to_owned(), |lead| format!("{:.2}", lead.point)));
        let features = curve.problems[0].features().replace("D = ", "");
        [features, curve.mask.clone()].into_iter().chain(cells).collect()
    };
    let of_heads = curves[0].problems[0].task.attention().is_some();
    let heads = [if of_heads { "head dim" } else { "layer" }, "mask"]
        .map(str::to_owned)
        .into_iter()
        .chain(lengths.iter().map(|s| words::extent(*s)));
    let title = format!("Speed relative to {}, by {}:\n\n", plain(&against), curves[0].problems[0].axis()[0]);
    title + &table(&heads.collect::<Vec<_>>(), curves.iter().map(row))
}

fn by_kind(run: &Run) -> String {
    let ours: Vec<_> = run.standings.iter().filter(|one| one.is_ours()).collect();
    if ours.iter().all(|one| one.kind == "normal" || one.rms_of_best.is_none()) {
        return String::new();
    }
    let pair = |own: Option<f64>, ratio: Option<f64>| match (own, ratio) {
        (Some(own), Some(ratio)) => format!("{own:.2e} / {:.2e} ({ratio:.2})", own / ratio),
        (Some(own), None) => format!("{own:.2e}"),
        _ => "–".to_owned(),
    };
    let row = |one: &&Standing| {
        let speed = one.speed_of_best.map_or("–".to_owned(), |speed| format!("{speed:.2}"));
        let errors = [pair(one.relative_rms, one.rms_of_best), pair(one.max_error, one.max_of_best)];
        [one.problem.clone(), one.kind.to_owned()].into_iter().chain(errors).chain([speed]).collect()
    };
    let heads =
        ["problem", "kind", "relative RMS / best peer's", "largest error / best peer's", "times as fast"];
    table(&heads.map(str::to_owned), ours.iter().map(row))
}

fn table(heads: &[String], rows: impl Iterator<Item = Vec<String>>) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let rule = vec!["---".to_owned(); heads.len()];
    [line(heads), line(&rule)].into_iter().chain(rows.map(|row| line(&row))).collect()
}
