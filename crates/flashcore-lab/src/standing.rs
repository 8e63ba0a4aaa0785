//! All competitors relative to the best peer on the same problem: how much larger errors are, how much faster calls.
//!
//! `bench` prints it; its suite `kinds` makes tables of it.

use serde::Serialize;

use crate::{competitor::roster::Ours, figures::Figures, record::Record, task::TaskSpec};

/// One competitor on one task.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Standing {
    /// The task without its kind of data, which tables are about.
    pub problem: String,
    pub kind: &'static str,
    #[serde(rename = "arm")]
    pub competitor: String,
    pub relative_rms: Option<f64>,
    pub max_error: Option<f64>,
    pub p50_us: Option<f64>,
    /// Its relative RMS error over the least of a peer.
    pub rms_of_best: Option<f64>,
    /// Its largest error over the least of a peer.
    pub max_of_best: Option<f64>,
    /// The least time of a peer over its own: above 1 where it is faster than every peer.
    pub speed_of_best: Option<f64>,
}

impl Standing {
    /// Whether it is one of ours.
    pub fn is_ours(&self) -> bool {
        is_ours(&self.competitor)
    }
}

fn is_ours(competitor: &str) -> bool {
    Ours::NAMES.contains(&competitor)
}

/// A figure of a competitor, where it has one.
type Figure = fn(&Figures) -> Option<f64>;

const RMS: Figure = |row| row.relative_rms;
const MAX: Figure = |row| row.max_error;
const TIME: Figure = |row| row.speed.as_ref().map(|speed| speed.p50_us);

impl Record {
    /// A row for each measurement, in order.
    pub fn standings(&self) -> Vec<Standing> {
        let rows: Vec<_> = self.measurements.iter().map(|m| &m.task).zip(self.figures(None)).collect();
        rows.chunk_by(|a, b| a.0 == b.0).flat_map(|task| task.iter().map(|row| standing(row, task))).collect()
    }
}

fn standing((task, own): &(&TaskSpec, Figures), all: &[(&TaskSpec, Figures)]) -> Standing {
    // Who is wrong is nobody's measure.
    let peers =
        || all.iter().map(|row| &row.1).filter(|row| !is_ours(&row.competitor) && row.excluded.is_none());
    let best = |figure: Figure| peers().filter_map(figure).reduce(f64::min);
    let over = |a: Option<f64>, b: Option<f64>| Some(a? / b.filter(|b| *b > 0.0)?);
    Standing {
        problem: task.without_kind().to_string(),
        kind: task.kind().name(),
        competitor: own.competitor.clone(),
        relative_rms: RMS(own),
        max_error: MAX(own),
        p50_us: TIME(own),
        rms_of_best: over(RMS(own), best(RMS)),
        max_of_best: over(MAX(own), best(MAX)),
        speed_of_best: over(best(TIME), TIME(own)),
    }
}
