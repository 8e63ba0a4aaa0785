//! The answer of `gate`: a row per ruling.

use flashcore_lab::{
    gate::{Demand, Ruling},
    machine::Machine,
    protocol::Protocol,
    record::Record,
};
use serde::Serialize;

use crate::output::{Page, Report, Text, Tone};

/// Everything `gate` tells.
#[derive(Serialize, Debug)]
pub struct GateReport<'a> {
    pass: bool,
    stopped: bool,
    machine: &'a Machine,
    protocol: &'a Protocol,
    /// Ours, then the peers whose results were judged too.
    arms: Vec<String>,
    rulings: Vec<Ruling>,
    warnings: &'a [String],
}

impl<'a> GateReport<'a> {
    /// Puts rulings together.
    pub fn new(rulings: Vec<Ruling>, record: &'a Record, arms: impl Iterator<Item = String>) -> Self {
        Self {
            pass: record.complete && rulings.iter().all(Ruling::pass),
            stopped: !record.complete,
            machine: &record.machine,
            protocol: &record.protocol,
            arms: arms.collect(),
            rulings,
            warnings: &record.warnings,
        }
    }

    /// Whether the user stopped it, so that there is no verdict.
    pub const fn stopped(&self) -> bool {
        self.stopped
    }

    /// Whether everything passes.
    pub const fn pass(&self) -> bool {
        self.pass
    }

    fn facts(&self) -> Vec<(&'static str, Text)> {
        let judged = format!("{} against f64, before anything was timed", self.arms.join(", "));
        let failed = self.rulings.iter().filter(|ruling| !ruling.pass()).count();
        let result = match failed {
            _ if self.stopped => Text::new("STOPPED; not everything was measured", Tone::Bad),
            0 => Text::new("PASS", Tone::Good),
            n => Text::new(format!("FAIL: {n} of {} demands not met", self.rulings.len()), Tone::Bad),
        };
        let mut facts = vec![("judged", judged.into())];
        facts.extend(self.warnings.iter().map(|warning| ("note", Text::new(warning, Tone::Faint))));
        facts.push(("result", result));
        facts
    }
}

impl Report for GateReport<'_> {
    fn page(&self) -> Page {
        let heading = ["problem", "against", "demand", "ratio", "95 %", ""];
        let heading = heading.map(|word| Text::new(word, Tone::Faint)).to_vec();
        let rows = std::iter::once(heading).chain(self.rulings.iter().map(row));
        let reasons = self.rulings.iter().filter_map(|r| Some(format!("{}: {}", r.task, r.reason.as_ref()?)));
        let page = Page::default().table(rows);
        let page = reasons.fold(page, |page, reason| page.line(Text::new(reason, Tone::Bad)));
        page.facts(self.facts())
    }
}

fn row(ruling: &Ruling) -> Vec<Text> {
    let demand = ruling.demand.map_or("right".to_owned(), |demand| match demand {
        Demand::Superior(most) => format!("<= {most}"),
        Demand::NotInferior(_) => format!("not > {:.3}", demand.bound()),
    });
    let (point, interval) = ruling.ratio.map_or((String::new(), String::new()), |ratio| {
        (format!("{:.3}", ratio.point), format!("{:.3}-{:.3}", ratio.low, ratio.high))
    });
    let verdict = if ruling.pass() { Text::new("pass", Tone::Good) } else { Text::new("FAIL", Tone::Bad) };
    let words = [ruling.task.clone(), ruling.against.clone(), demand, point, interval];
    words.into_iter().map(Text::from).chain([verdict]).collect()
}
