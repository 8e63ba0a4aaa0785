//! Figures for people: three significant digits, with a suitable unit. Used by plots and tables.

/// Units with their sizes, the largest first.
pub(super) type Units = [(f64, &'static str)];

/// Units of time, in seconds.
pub(super) const TIME: &Units = &[(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")];
/// Units of speed, in operations per second.
pub(super) const SPEED: &Units = &[(1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")];
/// Units of memory traffic, in bytes per second.
pub(super) const RATE: &Units = &[(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")];

/// Three significant digits, without an exponent.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 99.95 || v == 0.0 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        v if v >= 0.9995 => format!("{value:.2}"),
        v if v >= 0.001 => format!("{value:.3}"),
        _ => format!("{value:.1e}"),
    }
}

/// The unit that fits a value.
pub(super) fn unit(value: f64, units: &Units) -> (f64, &'static str) {
    *units.iter().find(|(size, _)| value >= 0.9995 * size).unwrap_or(&units[units.len() - 1])
}

/// A value in the unit that fits.
pub(super) fn scaled(value: f64, units: &Units) -> String {
    let (size, unit) = unit(value, units);
    format!("{} {unit}", number(value / size))
}

/// A round number at an axis, without zeros that say nothing.
pub(super) fn tick(value: f64) -> String {
    if value != 0.0 && value.abs() < 1e-4 || value.abs() >= 1e7 {
        return format!("{value:.0e}");
    }
    format!("{value:.4}").trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// An extent in powers of two where it is one: 512, 16k, 1M.
pub(super) fn extent(value: usize) -> String {
    match value {
        v if v >= 1 << 20 && v % (1 << 20) == 0 => format!("{}M", v >> 20),
        v if v >= 1 << 10 && v % (1 << 10) == 0 => format!("{}k", v >> 10),
        v => v.to_string(),
    }
}

/// How many times as fast.
pub(super) fn times(value: f64) -> String {
    if value >= 9.995 { format!("{}×", number(value)) } else { format!("{value:.2}×") }
}

/// A share as percent.
pub(super) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent >= 10.0 || percent == 0.0 { format!("{percent:.0} %") } else { format!("{percent:.1} %") }
}

/// A number of things.
pub(super) fn count(n: usize, one: &str) -> String {
    format!("{n} {one}{}", if n == 1 { "" } else { "s" })
}

/// `2026-01-31 12:00 UTC` out of a record's `2026-01-31T12:00:00Z`; any other text stays as it is.
pub(super) fn date(created: &str) -> String {
    match created.split_once('T') {
        Some((day, time)) if time.is_ascii() && time.len() == 9 && time.ends_with('Z') => {
            format!("{day} {} UTC", &time[..5])
        }
        _ => created.to_owned(),
    }
}

/// The beginning of a commit's name.
pub(super) fn commit(id: Option<&str>) -> String {
    id.map_or("no commit recorded".to_owned(), |id| id.chars().take(9).collect())
}

/// The beginning of a text that is too long for its place.
pub(super) fn short(text: &str, most: usize) -> String {
    let shortened = || text.chars().take(most - 1).chain(['…']).collect();
    if text.chars().count() <= most { text.to_owned() } else { shortened() }
}

/// A name for a file or an address that is not among `given`: lower case letters, digits, hyphens.
pub(super) fn slug(text: &str, given: &[String]) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c.to_ascii_lowercase() } else { ' ' };
    let letters: String = text.chars().take(80).map(plain).collect();
    let slug = letters.split_whitespace().collect::<Vec<_>>().join("-");
    let slug = if slug.is_empty() { "run".to_owned() } else { slug };
    let mut names = std::iter::once(slug.clone()).chain((2..).map(|n| format!("{slug}-{n}")));
    names.find(|name| !given.contains(name)).unwrap_or_default()
}

/// Text that is safe between tags and between quotes. Control characters, which XML forbids, and those that change the
/// direction in which other text is read are replaced.
pub(super) fn escaped(text: &str) -> String {
    let mut safe = String::new();
    for letter in text.chars() {
        match letter {
            '&' => safe += "&amp;",
            '<' => safe += "&lt;",
            '>' => safe += "&gt;",
            '"' => safe += "&quot;",
            '\'' => safe += "&#39;",
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => safe.push('\u{fffd}'),
            letter if letter.is_control() => safe.push('\u{fffd}'),
            letter => safe.push(letter),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_read_well() {
        let given = ["a-b".to_owned(), "a-b-2".to_owned()];
        let cases = [
            (number(0.0), "0"),
            (number(1234.5), "1234"),
            (number(12.345), "12.3"),
            (number(0.00012), "1.2e-4"),
            (scaled(0.9999e-3, TIME), "1.00 ms"),
            (scaled(3e-12, TIME), "0.003 ns"),
            (scaled(6.627e14, SPEED), "663 TFLOP/s"),
            (tick(200.00000000000003), "200"),
            (tick(1e-6), "1e-6"),
            (extent(16_384), "16k"),
            (extent(1500), "1500"),
            (times(23.46), "23.5×"),
            (percent(0.0123), "1.2 %"),
            (count(2, "run"), "2 runs"),
            (date("2026-11-15T07:16:09Z"), "2026-11-15 07:16 UTC"),
            (date("T12é4567Z"), "T12é4567Z"),
            (commit(Some("0123456789abcdef")), "012345678"),
            (short("a long name", 6), "a lon…"),
            (slug("2026-11 H200 <b>.json", &[]), "2026-11-h200-b-json"),
            (slug("../../é", &[]), "run"),
            (slug("A b", &given), "a-b-3"),
            (escaped("</p>&'\"\u{202e}\u{7}"), "&lt;/p&gt;&amp;&#39;&quot;\u{fffd}\u{fffd}"),
        ];
        for (got, wanted) in cases {
            assert_eq!(got, wanted);
        }
    }
}
