//! Figures as people read them: three digits that mean something, with a unit that fits. Used by plots and tables.

use std::fmt::Write;

/// Three significant digits, without an exponent.
pub fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 99.95 || v == 0.0 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        v if v >= 0.9995 => format!("{value:.2}"),
        v if v >= 0.001 => format!("{value:.3}"),
        _ => format!("{value:.1e}"),
    }
}

fn scaled(value: f64, units: &[(f64, &str)]) -> String {
    let (size, unit) = unit(value, units);
    format!("{} {unit}", number(value / size))
}

/// A round number as a tick of an axis: without zeros that say nothing.
pub fn tick(value: f64) -> String {
    if value != 0.0 && value.abs() < 1e-4 {
        return format!("{value:.0e}");
    }
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// The same with thousands as `k`.
pub fn tick_thousands(value: f64) -> String {
    if value >= 1000.0 { format!("{}k", tick(value / 1000.0)) } else { tick(value) }
}

/// A time as a tick of an axis.
pub fn tick_seconds(value: f64) -> String {
    let (size, unit) = unit(value, &TIME);
    format!("{} {unit}", tick(value / size))
}

/// The unit that fits a value.
pub fn unit<'u>(value: f64, units: &[(f64, &'u str)]) -> (f64, &'u str) {
    let fits = |&&(size, _): &&(f64, &str)| value >= 0.9995 * size;
    *units.iter().find(fits).unwrap_or(&units[units.len() - 1])
}

/// Units of time, in seconds.
const TIME: [(f64, &str); 4] = [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")];
/// Units of speed, in operations per second.
pub const SPEED: [(f64, &str); 3] = [(1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")];

/// A time.
pub fn seconds(value: f64) -> String {
    scaled(value, &TIME)
}

/// Operations per second.
pub fn flops(value: f64) -> String {
    scaled(value, &SPEED)
}

/// Bytes per second.
pub fn rate(value: f64) -> String {
    scaled(value, &[(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")])
}

/// An extent in powers of two where it is one: 512, 16k, 1M.
pub fn extent(value: usize) -> String {
    match value {
        v if v >= 1 << 20 && v % (1 << 20) == 0 => format!("{}M", v >> 20),
        v if v >= 1 << 10 && v % (1 << 10) == 0 => format!("{}k", v >> 10),
        v => v.to_string(),
    }
}

/// How many times as fast.
pub fn times(value: f64) -> String {
    if value >= 9.995 { format!("{}×", number(value)) } else { format!("{value:.2}×") }
}

/// An error: two digits and an exponent.
pub fn error(value: f64) -> String {
    if value == 0.0 { "0".to_owned() } else { format!("{value:.1e}") }
}

/// A share as percent.
pub fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent >= 10.0 || percent == 0.0 { format!("{percent:.0} %") } else { format!("{percent:.1} %") }
}

/// A number of things.
pub fn count(n: usize, one: &str) -> String {
    format!("{n} {one}{}", if n == 1 { "" } else { "s" })
}

/// `2026-01-31 12:00 UTC` out of a record's `2026-01-31T12:00:00Z`; whatever else stands there as it is.
pub fn date(created: &str) -> String {
    match created.split_once('T') {
        Some((day, time)) if time.is_ascii() && time.len() == 9 && time.ends_with('Z') => {
            format!("{day} {} UTC", &time[..5])
        }
        _ => created.to_owned(),
    }
}

/// The beginning of a commit's name.
pub fn commit(id: Option<&str>) -> String {
    id.map_or("no commit recorded".to_owned(), |id| id.chars().take(9).collect())
}

/// A name that can stand in a file name or an address: lower case letters, digits, hyphens.
pub fn slug(text: &str) -> String {
    let mut slug = String::new();
    for letter in text.chars().flat_map(char::to_lowercase).take(80) {
        match letter {
            'a'..='z' | '0'..='9' | '_' => slug.push(letter),
            _ if slug.ends_with('-') || slug.is_empty() => {}
            _ => slug.push('-'),
        }
    }
    slug.truncate(slug.trim_end_matches('-').len());
    if slug.is_empty() { "run".to_owned() } else { slug }
}

/// The beginning of a text that is too long for its place.
pub fn short(text: &str, most: usize) -> String {
    let shortened = || text.chars().take(most - 1).chain(['…']).collect();
    if text.chars().count() <= most { text.to_owned() } else { shortened() }
}

/// How wide a text is set, in letters of usual width; rather too wide than too narrow.
pub fn width(text: &str) -> f64 {
    let letter = |letter| match letter {
        'i' | 'j' | 'l' | 'f' | 't' | 'r' | ' ' | '.' | ',' | ':' | ';' | '\'' | '(' | ')' | '|' => 0.7,
        'm' | 'w' | 'M' | 'W' | '@' | '%' | '<' | '>' | '=' | '+' => 1.6,
        'A'..='Z' => 1.2,
        letter if letter.is_ascii() => 1.05,
        _ => 1.6,
    };
    text.chars().map(letter).sum()
}

/// A list for people: `a, b and c`.
pub fn list(words: &[String]) -> String {
    let mut text = String::new();
    for (n, word) in words.iter().enumerate() {
        let gap = if n == 0 {
            ""
        } else if n + 1 == words.len() {
            " and "
        } else {
            ", "
        };
        let _ = write!(text, "{gap}{word}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_read_well() {
        let cases = [
            (number(0.0), "0"),
            (number(1234.5), "1234"),
            (number(99.96), "100"),
            (number(12.345), "12.3"),
            (number(0.5), "0.500"),
            (number(0.00012), "1.2e-4"),
            (seconds(5.94e-6), "5.94 µs"),
            (seconds(0.9999e-3), "1.00 ms"),
            (seconds(3e-12), "0.003 ns"),
            (seconds(90.0), "90.0 s"),
            (tick(200.00000000000003), "200"),
            (tick(0.5), "0.5"),
            (tick(1e-6), "1e-6"),
            (tick_thousands(5000.0), "5k"),
            (tick_thousands(500.0), "500"),
            (tick_seconds(2e-4), "200 µs"),
            (flops(6.627e14), "663 TFLOP/s"),
            (flops(1.5e10), "15.0 GFLOP/s"),
            (rate(4.24e12), "4.24 TB/s"),
            (extent(512), "512"),
            (extent(16_384), "16k"),
            (extent(1 << 20), "1M"),
            (extent(1500), "1500"),
            (times(1.114), "1.11×"),
            (times(23.46), "23.5×"),
            (error(2.03e-4), "2.0e-4"),
            (percent(0.123), "12 %"),
            (percent(0.0123), "1.2 %"),
            (count(1, "run"), "1 run"),
            (count(2, "run"), "2 runs"),
            (date("2026-11-15T07:16:09Z"), "2026-11-15 07:16 UTC"),
            (date("yesterday"), "yesterday"),
            (date("T12é4567Z"), "T12é4567Z"),
            (commit(Some("0123456789abcdef")), "012345678"),
            (slug("2026-11 H200 <b>.json"), "2026-11-h200-b-json"),
            (slug("../../é"), "run"),
            (short("naive", 5), "naive"),
            (short("a long name", 6), "a lon…"),
            (list(&["a".into(), "b".into(), "c".into()]), "a, b and c"),
        ];
        for (got, wanted) in cases {
            assert_eq!(got, wanted);
        }
    }

    #[test]
    fn wide_letters_take_more_room() {
        assert!(width("illi") < width("abcd") && width("abcd") < width("wwww"));
    }
}
