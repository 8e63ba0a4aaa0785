//! The results of saved runs, as a page that needs only a browser, and as pictures.
//!
//! Reading order: `data` (runs in figures, series, curves), `charts` (which plots there are), `plot` (how one is
//! drawn), `page`, `markdown`; `words` formats numbers and escapes text. `flashcore report` is the only caller.

mod charts;
pub mod data;
mod markdown;
mod page;
mod plot;
mod words;

use self::{
    charts::Cast,
    data::{Run, Series},
};

/// Colours and layout, in light and dark, of the page and of pictures.
const STYLE: &str = include_str!("style.css");
/// Most runs in one report.
const MOST_RUNS: usize = 500;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    #[error("no runs to report; name result files of `flashcore bench --out`, or a folder of them")]
    Nothing,
    #[error("{name} holds no measurement; omit it or measure again")]
    Empty { name: String },
    #[error("{name} holds {count} measurements, more than the {most} that a report can show; omit it")]
    TooMuch { name: String, count: usize, most: usize },
    #[error("{0} runs, more than the {MOST_RUNS} that a report can show; name those that matter")]
    TooMany(usize),
}

/// Everything that a report shows.
#[derive(Debug)]
pub struct Report {
    series: Vec<Series>,
    cast: Cast,
}

impl Report {
    /// Sorts runs into series.
    pub fn new(runs: Vec<Run>) -> Result<Self, ReportError> {
        match runs.len() {
            0 => return Err(ReportError::Nothing),
            count if count > MOST_RUNS => return Err(ReportError::TooMany(count)),
            _ => {}
        }
        let mut cast = Cast::default();
        for peer in runs.iter().flat_map(|run| &run.peers) {
            if !cast.0.contains(peer) {
                cast.0.push(peer.clone());
            }
        }
        Ok(Self { series: data::series(runs), cast })
    }

    /// Runs that can be compared with each other.
    pub fn series(&self) -> &[Series] {
        &self.series
    }

    /// The series, each with its own name.
    fn named(&self) -> impl Iterator<Item = (String, &Series)> {
        let mut given = Vec::new();
        self.series.iter().map(move |series| {
            let name = words::slug(&series[series.len() - 1].name, &given);
            given.push(name.clone());
            (name, series)
        })
    }

    /// The page.
    pub fn html(&self) -> String {
        page::html(self)
    }

    /// Its main tables, for a README.
    pub fn markdown(&self) -> String {
        markdown::tables(self)
    }

    /// Every plot as an SVG document, with a file name made of the newest run's and what it shows.
    pub fn pictures(&self) -> Vec<(String, String)> {
        let mut pictures = Vec::new();
        for (name, series) in self.named() {
            let run = &series[series.len() - 1];
            pictures.extend(self.cast.figures(series).iter().map(|figure| {
                let heading = format!("{}: {} on {}", figure.title, run.subject(), run.device());
                let origin = format!("{} Measured {}.", figure.caption, page::origin(run));
                (format!("{name}-{}.svg", figure.name), figure.picture(&heading, &origin))
            }));
        }
        pictures
    }
}
