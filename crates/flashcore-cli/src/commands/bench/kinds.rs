//! The tables of `bench --suite kinds`: errors and times on every kind of data, beside the best peer's.

use flashcore_lab::{latency::time, standing::Standing};

use super::report::Facts;
use crate::output::{Page, Text, bad, good};

/// Adds a table for each problem, with a row for each kind of data and competitor.
pub fn tables(page: Page, standings: &[Standing]) -> Page {
    let heading = ["", "", "rms error", "of best", "max error", "of best", "p50", "speed"];
    standings.chunk_by(|a, b| a.problem == b.problem).fold(page, |page, problem| {
        let kinds = problem.chunk_by(|a, b| a.kind == b.kind);
        let rows = kinds.flat_map(|kind| kind.iter().enumerate().map(|(n, one)| row(one, n == 0)));
        page.line(problem[0].problem.as_str()).headed(&heading, rows)
    })
}

fn row(one: &Standing, is_first: bool) -> Vec<Text> {
    let error = |error: Option<f64>| error.map_or(String::new(), |error| format!("{error:.2e}")).into();
    vec![
        if is_first { one.kind } else { "" }.into(),
        one.competitor.as_str().into(),
        error(one.relative_rms),
        ratio(one, one.rms_of_best, |ratio| ratio <= 1.0),
        error(one.max_error),
        ratio(one, one.max_of_best, |ratio| ratio <= 1.0),
        one.p50_us.map_or(String::new(), time).into(),
        ratio(one, one.speed_of_best, |ratio| ratio >= 1.0),
    ]
}

/// A ratio to the best peer, coloured where it is ours.
fn ratio(one: &Standing, ratio: Option<f64>, is_good: fn(f64) -> bool) -> Text {
    let Some(ratio) = ratio else { return "".into() };
    let words = format!("{ratio:.3}");
    match (one.is_ours(), is_good(ratio)) {
        (false, _) => words.into(),
        (true, true) => good(words),
        (true, false) => bad(words),
    }
}

/// Where ours is worst beside the best peer.
pub fn summary(standings: &[Standing]) -> Facts {
    let worst = |of: fn(&Standing) -> Option<f64>, sign: f64| {
        let ours = standings.iter().filter(|one| one.is_ours()).filter_map(|one| Some((of(one)?, one)));
        let (ratio, one) = ours.max_by(|a, b| (sign * a.0).total_cmp(&(sign * b.0)))?;
        Some(Text::from(format!("{ratio:.3} of the best peer's: {} {}", one.problem, one.kind)))
    };
    let facts = [
        ("largest rms", worst(|one| one.rms_of_best, 1.0)),
        ("largest max", worst(|one| one.max_of_best, 1.0)),
        ("least speed", worst(|one| one.speed_of_best, -1.0)),
    ];
    facts.into_iter().filter_map(|(name, text)| Some((name, text?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(kind: &'static str, competitor: &str, [error, time]: [f64; 2], best: [f64; 2]) -> Standing {
        Standing {
            problem: "2x16x4096x128 bf16 causal".to_owned(),
            kind,
            competitor: competitor.to_owned(),
            relative_rms: Some(error),
            max_error: Some(10.0 * error),
            p50_us: Some(time),
            rms_of_best: Some(error / best[0]),
            max_of_best: Some(error / best[0]),
            speed_of_best: Some(best[1] / time),
        }
    }

    #[test]
    fn every_kind_has_its_rows_and_the_worst_is_told() {
        let all = [
            one("sharp", "torch-cudnn", [1.5e-3, 410.0], [1.5e-3, 400.0]),
            one("sharp", "cuda", [1.8e-3, 420.0], [1.5e-3, 400.0]),
            one("sharp", "fa3", [1.6e-3, 400.0], [1.5e-3, 400.0]),
            one("drift", "cuda", [1.5e-3, 380.0], [1.5e-3, 400.0]),
        ];
        let text = tables(Page::default(), &all).facts(summary(&all)).render(false);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        for words in [
            "2x16x4096x128 bf16 causal",
            "1.80e-3    1.200    1.80e-2    1.200    420.0 us  0.952",
            "largest rms  1.200 of the best peer's: 2x16x4096x128 bf16 causal sharp",
            "least speed  0.952 of",
        ] {
            assert!(text.contains(words), "no `{words}` in\n{text}");
        }
        assert_eq!(text.matches("sharp  ").count(), 1, "a kind is named once:\n{text}");
    }
}
