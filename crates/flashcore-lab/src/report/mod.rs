//! What saved runs come to, as a page that needs nothing but a browser, and as pictures.
//!
//! Reading order: [`run`] (a record in figures), [`series`] (runs that can be compared), [`sweep`] (problems on one
//! curve), [`plot`], [`page`]; [`markup`] and [`wording`] write. `flashcore report` is the only caller.

pub mod checks;
pub mod markup;
pub mod page;
pub mod plot;
pub mod run;
pub mod series;
pub mod sweep;
pub mod wording;

use self::{
    checks::Checks,
    plot::{Cast, figure::Figure, sweep::Quantity},
    run::Run,
    series::Series,
};

/// Most runs in one report.
const MOST_RUNS: usize = 500;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// There is nothing to show.
    #[error("no run to report; name result files of `flashcore bench --out`, or a folder with some")]
    Nothing,
    /// A run measured nothing.
    #[error("{name} holds no measurement; leave it out or measure again")]
    Empty {
        /// The run.
        name: String,
    },
    /// A run is larger than any real one.
    #[error("{name} holds {count} measurements, more than the {most} that a report shows; leave it out")]
    TooMuch {
        /// The run.
        name: String,
        /// Its measurements.
        count: usize,
        /// How many may be.
        most: usize,
    },
    /// There are more runs than a page can hold.
    #[error("{count} runs, more than the {MOST_RUNS} that a report shows; name those that matter")]
    TooMany {
        /// How many.
        count: usize,
    },
}

/// Everything that a report shows.
#[derive(Debug)]
pub struct Report {
    series: Vec<Series>,
    checks: Option<Checks>,
    cast: Cast,
}

/// A picture by itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Picture {
    /// Its file name: the newest run's, and what it shows.
    pub file: String,
    /// An SVG document.
    pub svg: String,
}

impl Report {
    /// Sorts runs into series.
    pub fn new(runs: Vec<Run>, checks: Option<Checks>) -> Result<Self, ReportError> {
        match runs.len() {
            0 => return Err(ReportError::Nothing),
            count if count > MOST_RUNS => return Err(ReportError::TooMany { count }),
            _ => {}
        }
        let series = series::sort(runs);
        Ok(Self { cast: Cast::of(&series), series, checks })
    }

    /// Runs that can be compared with each other.
    pub fn series(&self) -> &[Series] {
        &self.series
    }

    /// The page.
    pub fn html(&self) -> String {
        page::html(self)
    }

    /// Every plot as a picture.
    pub fn pictures(&self) -> Vec<Picture> {
        let mut names = Names::default();
        let mut pictures = Vec::new();
        for series in &self.series {
            let name = names.unique(&series.newest().name);
            pictures.extend(self.figures(series).iter().map(|figure| picture(&name, series, figure)));
        }
        pictures
    }

    /// The plots of a series.
    fn figures(&self, series: &Series) -> Vec<Figure> {
        let run = series.newest();
        let (curves, rest) = sweep::sweeps(&run.problems);
        let curves = |quantity| plot::sweep::figure(quantity, run, &curves, &self.cast);
        let figures = [
            curves(Quantity::Speed),
            curves(Quantity::Time),
            plot::dots::figure(run, &rest, &self.cast),
            plot::roofline::figure(run, &self.cast),
            plot::history::figure(series, &self.cast),
        ];
        figures.into_iter().flatten().collect()
    }
}

fn picture(name: &str, series: &Series, figure: &Figure) -> Picture {
    let run = series.newest();
    let heading = format!("{}: {} on {}", figure.title, series.title(), run.device());
    let driver = run.record.machine.driver.as_ref().filter(|_| run.on_gpu);
    let parts = [
        Some(wording::date(&run.record.created)),
        run.record.commit.as_deref().map(|id| format!("commit {}", wording::commit(Some(id)))),
        driver.map(|driver| format!("driver {driver}")),
        run.record.machine.peers.clone(),
    ];
    let measured = parts.into_iter().flatten().collect::<Vec<_>>().join(", ");
    let origin = format!("{} Measured {measured}.", figure.caption);
    Picture {
        file: format!("{name}-{}.svg", figure.name),
        svg: format!("{}\n", figure.picture(&heading, &origin)),
    }
}

/// Names for files and addresses, none twice.
#[derive(Default)]
struct Names {
    given: Vec<String>,
}

impl Names {
    fn unique(&mut self, text: &str) -> String {
        let slug = wording::slug(text);
        let numbered = (2..).map(|n| format!("{slug}-{n}"));
        let mut candidates = std::iter::once(slug.clone()).chain(numbered);
        let name = candidates.find(|name| !self.given.contains(name)).unwrap_or(slug);
        self.given.push(name.clone());
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_given_once() {
        let mut names = Names::default();
        let given = ["A b", "a-b", "a b", "c"].map(|text| names.unique(text));
        assert_eq!(given, ["a-b", "a-b-2", "a-b-3", "c"]);
    }

    #[test]
    fn there_must_be_something_to_show() {
        assert!(matches!(Report::new(Vec::new(), None), Err(ReportError::Nothing)));
    }
}
