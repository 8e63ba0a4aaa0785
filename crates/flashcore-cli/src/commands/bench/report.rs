//! The answer of `bench`: a short table per task, per kind of comparison, or per problem with all kinds of data.

use std::path::Path;

use flashcore_lab::{
    bootstrap::Interval, ceiling::Ceiling, comparison::Compared, figures::Figures, latency::time,
    record::Record,
};
use serde_json::json;

use super::kinds;
use crate::{
    error::CliError,
    output::{Output, Page, Text, bad, good},
};

pub(super) type Facts = Vec<(&'static str, Text)>;

/// What the tables are about.
#[derive(Clone, Copy, Debug)]
pub enum View {
    /// Everybody's times, task by task.
    Tasks,
    /// Everybody's errors and times beside the best peer's.
    Kinds,
    /// Ours beside ours alone.
    Comparisons,
}

/// Shows what a record comes to; raw times are in the result file.
pub fn show(
    record: &Record,
    view: View,
    comparisons: &[Compared],
    out: Option<&Path>,
    output: &Output,
) -> Result<(), CliError> {
    let (results, standings) = (record.figures(None), record.standings());
    let Record { complete, created, machine, protocol, ceilings, warnings, .. } = record;
    let out = out.map(|path| path.display().to_string());
    let json = json!({
        "complete": complete, "created": created, "machine": machine, "protocol": protocol, "ceilings": ceilings,
        "results": results, "standings": standings, "comparisons": comparisons, "warnings": warnings, "out": out,
    });
    output.answer(&json, || {
        let page = Page::default().facts(facts(record));
        let excluded = results.iter().filter_map(|r| Some(bad(format!("{}: {}", r.task, exclusion(r)?))));
        let page = match view {
            View::Tasks => compared(results.chunk_by(|a, b| a.task == b.task).fold(page, task), comparisons),
            View::Kinds => kinds::tables(page, &standings).lines(excluded),
            View::Comparisons => compared(page, comparisons).lines(excluded),
        };
        let mut ending: Facts = warnings.iter().map(|warning| ("warning", bad(warning))).collect();
        ending.extend(summary(comparisons));
        ending.extend(matches!(view, View::Kinds).then(|| kinds::summary(&standings)).into_iter().flatten());
        ending.extend((!complete).then(|| ("result", bad("STOPPED; not everything was measured"))));
        ending.extend(out.map(|path| ("wrote", path.into())));
        page.facts(ending)
    })
}

fn facts(record: &Record) -> Facts {
    let (machine, p) = (&record.machine, &record.protocol);
    let cold = if p.cold { "cold" } else { "warm" };
    let replay = if p.replay { ", GPU calls replayed" } else { "" };
    let way =
        format!("{}, {} s x {}, caches {cold}{replay}, seed {}", p.mode.name(), p.seconds, p.rounds, p.seed);
    let device = machine.gpu.as_ref().unwrap_or(&machine.cpu);
    let mut facts = vec![("machine", device.as_str().into()), ("measured", way.into())];
    facts.extend(machine.peers.as_ref().map(|peers| ("peers", peers.as_str().into())));
    facts.extend(record.ceilings.iter().map(|Ceiling { place, dtype, copy, matrix, how }| {
        let (matrix, copy) = (matrix / 1e12, copy / 1e9);
        ("roofline", format!("{place} {dtype}: {matrix:.2} TFLOP/s ({how}), {copy:.0} GB/s copied").into())
    }));
    facts
}

fn task(page: Page, rows: &[Figures]) -> Page {
    let heading = ["", "p50", "p90", "95 %", "TFLOP/s", "GB/s", "roof", "ratio"];
    let page = page.line(rows[0].task.as_str()).headed(&heading, rows.iter().filter_map(row));
    page.lines(rows.iter().filter_map(exclusion).map(bad))
}

fn row(figures: &Figures) -> Option<Vec<Text>> {
    let speed = figures.speed.as_ref()?;
    // Three digits that mean something.
    let figure = |value: f64| match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 1.0 => format!("{v:.1}"),
        v => format!("{v:.3}"),
    };
    Some(vec![
        figures.competitor.as_str().into(),
        time(speed.p50_us).into(),
        time(speed.p90_us).into(),
        spread(speed.low_us, speed.p50_us, speed.high_us).into(),
        figure(speed.tflops).into(),
        figure(speed.gbps).into(),
        speed.roofline_percent.map_or(String::new(), |percent| format!("{percent:.0} %")).into(),
        speed.ratio.map_or("1".into(), |Interval { point, high, .. }| {
            let words = format!("{point:.3}");
            if high < 1.0 { good(words) } else { words.into() }
        }),
    ])
}

/// Half the width of an interval.
fn spread(low: f64, point: f64, high: f64) -> String {
    format!("±{:.1} %", 50.0 * (high - low) / point)
}

/// Why a competitor has no row.
fn exclusion(figures: &Figures) -> Option<String> {
    Some(format!("{} was not timed: {}", figures.competitor, figures.excluded.as_ref()?))
}

/// Adds a table for each kind of comparison.
fn compared(page: Page, comparisons: &[Compared]) -> Page {
    let row = |one: &Compared| {
        let duration = |time_us: Option<f64>| time_us.map_or("-".to_owned(), time);
        let (ratio, width) = one.ratio.map_or(("-".to_owned(), String::new()), |r| {
            (format!("{:.3}", r.point), spread(r.low, r.point, r.high))
        });
        let verdict = match one.met() {
            Some(true) => good("ok"),
            Some(false) => bad("MISS"),
            None => bad("?"),
        };
        let words = [one.task.clone(), duration(one.p50_us), duration(one.against_p50_us), ratio, width];
        words.into_iter().map(Text::from).chain([verdict]).collect()
    };
    comparisons.chunk_by(|a, b| a.what == b.what).fold(page, |page, kind| {
        let title = format!("{}; target: at most {}", kind[0].what, kind[0].wanted);
        page.line(title).headed(&["", "p50", "against", "ratio", "95 %", ""], kind.iter().map(row))
    })
}

/// How many came out as wanted, and the one that came out worst.
fn summary(comparisons: &[Compared]) -> Facts {
    if comparisons.is_empty() {
        return Vec::new();
    }
    let met = comparisons.iter().filter(|one| one.met() == Some(true)).count();
    let missing = comparisons.iter().filter(|one| one.met().is_none()).count();
    let rest = if missing == 0 { String::new() } else { format!(", {missing} could not be compared") };
    let count = format!("{met} of {}{rest}", comparisons.len());
    let beyond =
        comparisons.iter().filter_map(|one| Some((one.ratio?.point / one.wanted, one.ratio?.point, one)));
    let worst = beyond.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, ratio, one)| {
        format!("{ratio:.3}, target {}: {} against {}", one.wanted, one.task, one.against)
    });
    let count = if met == comparisons.len() { good(count) } else { bad(count) };
    [("on target", count)].into_iter().chain(worst.map(|words| ("worst", words.into()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(what: &str, times: [f64; 2], wanted: f64) -> Compared {
        let point = times[0] / times[1];
        let ratio = point.is_finite().then_some(Interval { low: point * 0.99, point, high: point * 1.01 });
        Compared {
            what: what.to_owned(),
            task: "1x16x16384x128 f16 window 1023,0".to_owned(),
            against: "1x16x16384x128 f16 keys1152".to_owned(),
            work: 1.0,
            p50_us: Some(times[0]),
            against_p50_us: Some(times[1]).filter(|time| time.is_finite()),
            ratio,
            wanted,
        }
    }

    #[test]
    fn misses_are_marked_and_counted() {
        let all = [
            one("sinks", [102.0, 100.0], 1.05),
            one("window", [1200.0, 1000.0], 1.1),
            one("window", [100.0, f64::NAN], 1.1),
        ];
        let text = compared(Page::default(), &all).facts(summary(&all)).render(false);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        for words in [
            "sinks; target: at most 1.05",
            "1.020  ±1.0 %  ok",
            "1.200  ±1.0 %  MISS",
            "1 of 3, 1 could not be compared",
            "1.200, target 1.1: 1x16x16384x128 f16 window 1023,0",
        ] {
            assert!(text.contains(words), "no `{words}` in\n{text}");
        }
        assert_eq!(text.matches("window; target").count(), 1, "one table per kind:\n{text}");
    }
}
