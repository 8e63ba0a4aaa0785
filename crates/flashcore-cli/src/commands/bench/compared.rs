//! Comparisons as tables: a table per kind with a row for each, and how many came out as wanted.

use flashcore_lab::{comparison::Compared, latency::time};

use crate::output::{Page, Text, Tone};

/// Adds a table for each kind of comparison.
pub fn tables(page: Page, comparisons: &[Compared]) -> Page {
    comparisons.chunk_by(|a, b| a.what == b.what).fold(page, |page, kind| {
        let title = format!("{}; wanted: at most {}", kind[0].what, kind[0].wanted);
        page.line(title).table(std::iter::once(heading()).chain(kind.iter().map(row)))
    })
}

/// How many came out as wanted, and the one that came out worst.
pub fn summary(comparisons: &[Compared]) -> Vec<(&'static str, Text)> {
    let met = comparisons.iter().filter(|one| one.met() == Some(true)).count();
    let missing = comparisons.iter().filter(|one| one.met().is_none()).count();
    let rest = if missing == 0 { String::new() } else { format!(", {missing} could not be compared") };
    let tone = if met == comparisons.len() { Tone::Good } else { Tone::Bad };
    let count = Text::new(format!("{met} of {}{rest}", comparisons.len()), tone);
    let beyond = |one: &Compared| Some(one.ratio?.point / one.wanted);
    let worst = comparisons.iter().filter(|one| one.ratio.is_some());
    let worst = worst.max_by(|a, b| beyond(a).partial_cmp(&beyond(b)).unwrap_or(std::cmp::Ordering::Equal));
    let facts = (!comparisons.is_empty()).then_some(("as wanted", count));
    facts.into_iter().chain(worst.and_then(|one| Some(("worst", describe(one)?)))).collect()
}

fn describe(one: &Compared) -> Option<Text> {
    let ratio = one.ratio?.point;
    Some(format!("{ratio:.3}, wanted {}: {} against {}", one.wanted, one.task, one.against).into())
}

fn heading() -> Vec<Text> {
    ["", "p50", "against", "ratio", "95 %", ""].map(|word| Text::new(word, Tone::Faint)).to_vec()
}

fn row(one: &Compared) -> Vec<Text> {
    let duration = |time_us: Option<f64>| time_us.map_or("-".to_owned(), time);
    let (ratio, spread) = one.ratio.map_or(("-".to_owned(), String::new()), |ratio| {
        (format!("{:.3}", ratio.point), format!("±{:.1} %", 50.0 * (ratio.high - ratio.low) / ratio.point))
    });
    let words = [one.task.clone(), duration(one.p50_us), duration(one.against_p50_us), ratio, spread];
    words.into_iter().map(Text::from).chain([verdict(one)]).collect()
}

fn verdict(one: &Compared) -> Text {
    match one.met() {
        Some(true) => Text::new("ok", Tone::Good),
        Some(false) => Text::new("MISS", Tone::Bad),
        None => Text::new("?", Tone::Bad),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_lab::bootstrap::Interval;

    fn compared(what: &str, times: [f64; 2], wanted: f64) -> Compared {
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
            compared("sinks", [102.0, 100.0], 1.05),
            compared("window", [1200.0, 1000.0], 1.1),
            compared("window", [100.0, f64::NAN], 1.1),
        ];
        let text = tables(Page::default(), &all).facts(summary(&all)).render(false);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let found = |words: &str| assert!(text.contains(words), "no `{words}` in\n{text}");
        found("sinks; wanted: at most 1.05");
        found("1.020  ±1.0 %  ok");
        found("1.200  ±1.0 %  MISS");
        found("1 of 3, 1 could not be compared");
        found("1.200, wanted 1.1: 1x16x16384x128 f16 window 1023,0");
        assert_eq!(text.matches("window; wanted").count(), 1, "one table per kind:\n{text}");
    }
}
