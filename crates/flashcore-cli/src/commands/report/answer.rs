//! The answer of `report`: the headline of each series, what was left out, what was written.

use flashcore_lab::report::{
    Report as Saved,
    series::{Lead, Series},
};
use serde::Serialize;

use crate::output::{Page, Report, Text, Tone};

/// Everything `report` tells.
#[derive(Serialize, Debug)]
pub struct Answer {
    series: Vec<Summary>,
    left_out: Vec<String>,
    wrote: Vec<String>,
}

/// Runs of the same problems on the same device.
#[derive(Serialize, Debug)]
struct Summary {
    title: String,
    device: String,
    /// Oldest first.
    runs: Vec<String>,
    /// The newest run's.
    commit: Option<String>,
    created: String,
    problems: usize,
    leads: Vec<Lead>,
}

impl Answer {
    /// What a report comes to.
    pub fn new(report: &Saved, left_out: Vec<String>, wrote: Vec<String>) -> Self {
        Self { series: report.series().iter().map(Summary::of).collect(), left_out, wrote }
    }
}

impl Summary {
    fn of(series: &Series) -> Self {
        let run = series.newest();
        Self {
            title: series.title(),
            device: run.device().to_owned(),
            runs: series.runs().iter().map(|run| run.name.clone()).collect(),
            commit: run.record.commit.clone(),
            created: run.record.created.clone(),
            problems: run.problems.len(),
            leads: run.leads(),
        }
    }

    fn rows(&self) -> Vec<Vec<Text>> {
        let leads = self.leads.iter().map(|lead| {
            let tone = if lead.slower > 0 { Tone::Bad } else { Tone::Good };
            let count = format!("faster on {} of {}, slower on {}", lead.faster, lead.problems, lead.slower);
            vec![lead.peer.as_str().into(), Text::new(format!("{:.2}x", lead.mean), tone), count.into()]
        });
        leads.collect()
    }
}

impl Report for Answer {
    fn page(&self) -> Page {
        let page = self.series.iter().fold(Page::default(), |page, series| {
            let runs = if series.runs.len() == 1 { "run" } else { "runs" };
            let count =
                format!("{} ({} {runs}, {} problems)", series.device, series.runs.len(), series.problems);
            let page =
                page.table([vec![Text::new(&series.title, Tone::Plain), Text::new(count, Tone::Faint)]]);
            if series.leads.is_empty() { page } else { page.table(series.rows()) }
        });
        let left_out = self.left_out.iter().map(|file| ("left out", Text::new(file, Tone::Faint)));
        page.facts(left_out.chain(self.wrote.iter().map(|path| ("wrote", path.as_str().into()))))
    }
}
