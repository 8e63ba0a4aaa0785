//! One line per cause: a forgotten fence affects every register of a tile, and a wrong `.target` every
//! instruction, so one mistake gives hundreds of findings that differ only in a register or a line.
//!
//! Called by everything that prints findings of [`verify`](super::verify): the tile language, the `sim` command.

use super::Finding;
use std::{
    collections::{HashMap, HashSet},
    fmt,
};

/// Further lines that are named; the rest is counted.
const LINES_NAMED: usize = 4;
/// Characters of an instruction that are quoted: a wgmma names a hundred registers.
const TEXT_SHOWN: usize = 60;

/// Everything that was said for one cause: the first of it in full, the others by line and number.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Group {
    /// The first place, `file:line`, if it is known.
    pub place: Option<String>,
    /// What is wrong there, and what would be right.
    pub message: String,
    /// How often the same is wrong, the first place included.
    pub count: usize,
    /// Other places, each once, in the order in which they were found.
    pub also: Vec<String>,
}

/// Findings of one cause together, in the order in which causes were first found.
pub fn grouped(findings: &[Finding]) -> Vec<Group> {
    group(findings.iter().map(|f| (f.kernel.as_str(), place(f), message(f), cause(&f.message))))
}

/// The same for messages of any origin, each with its place.
pub fn grouped_messages(messages: impl IntoIterator<Item = (Option<String>, String)>) -> Vec<Group> {
    let with_cause = |(place, message): (Option<String>, String)| {
        let cause = cause(&message);
        ("", place, message, cause)
    };
    group(messages.into_iter().map(with_cause))
}

type Said<'a> = (&'a str, Option<String>, String, String);

fn group<'a>(said: impl Iterator<Item = Said<'a>>) -> Vec<Group> {
    let (mut groups, mut causes, mut places) = (Vec::<Group>::new(), HashMap::new(), HashSet::new());
    for (kernel, place, message, cause) in said {
        let index = *causes.entry((kernel, cause)).or_insert(groups.len());
        let new = places.insert((index, place.clone()));
        match groups.get_mut(index) {
            None => groups.push(Group { place, message, count: 1, also: Vec::new() }),
            Some(group) => {
                group.count += 1;
                group.also.extend(place.filter(|_| new));
            }
        }
    }
    groups
}

/// Where a finding is: its source line, or its statement where no line is known.
fn place(finding: &Finding) -> Option<String> {
    let kernel = &finding.kernel;
    match (&finding.location, finding.statement) {
        (Some(location), _) => Some(location.clone()),
        (None, Some(statement)) => Some(format!("kernel `{kernel}`, statement {statement}")),
        (None, None) if kernel.is_empty() => None,
        (None, None) => Some(format!("kernel `{kernel}`")),
    }
}

fn message(finding: &Finding) -> String {
    let Finding { message, text, .. } = finding;
    match text.char_indices().nth(TEXT_SHOWN) {
        _ if text.is_empty() => message.clone(),
        None => format!("{message}: {text}"),
        Some((end, _)) => format!("{message}: {}…", &text[..end]),
    }
}

/// A message without the names of registers and the numbers of statements, in which findings of one cause differ.
fn cause(message: &str) -> String {
    let mut words = message.split_inclusive(|c: char| !is_name(c));
    let mut cause = String::new();
    while let Some(word) = words.next() {
        cause.push_str(word);
        if (word.ends_with('%') || word == "statement ")
            && let Some(next) = words.next()
        {
            cause.push_str(next.trim_start_matches(is_name));
        }
    }
    cause
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

impl Group {
    /// Other places: lines of the same file by number, anything else as it is.
    fn others(&self) -> String {
        let first = self.place.as_deref().map_or("", file);
        let short = |place: &String| match file(place) == first {
            true => place[first.len()..].to_owned(),
            false => place.clone(),
        };
        let named: Vec<_> = self.also.iter().take(LINES_NAMED).map(short).collect();
        let more = self.also.len().saturating_sub(LINES_NAMED);
        let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}{rest}", named.join(", "))
    }
}

/// A place up to the number it ends in.
fn file(place: &str) -> &str {
    place.trim_end_matches(|c: char| c.is_ascii_digit())
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.place {
            write!(f, "{place}: ")?;
        }
        write!(f, "{}", self.message)?;
        match (self.count, self.also.is_empty()) {
            (1, _) => Ok(()),
            (count, true) => write!(f, " ({count} times)"),
            (count, false) => write!(f, " ({count} times, also at {})", self.others()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(said: &[(&str, &str)], expected: &[&str]) {
        let said = said.iter().map(|&(place, message)| (Some(place.to_owned()), message.to_owned()));
        let lines: Vec<_> = grouped_messages(said).iter().map(ToString::to_string).collect();
        assert_eq!(lines, expected);
    }

    #[test]
    fn registers_and_statements_do_not_part_a_cause() {
        check(
            &[
                ("k.rs:7", "`%f12` is in flight: wait"),
                ("k.rs:7", "`%f13` is in flight: wait"),
                ("k.rs:7", "`%p1` parts at statement 12, `@%p1 bra L1`"),
                ("k.rs:7", "`%p22` parts at statement 345, `@%p22 bra L1`"),
            ],
            &[
                "k.rs:7: `%f12` is in flight: wait (2 times)",
                "k.rs:7: `%p1` parts at statement 12, `@%p1 bra L1` (2 times)",
            ],
        );
    }

    #[test]
    fn instructions_and_labels_do() {
        check(
            &[("a.ptx:1", "`wgmma.fence` needs sm_90a"), ("a.ptx:2", "`setmaxnreg` needs sm_90a")],
            &["a.ptx:1: `wgmma.fence` needs sm_90a", "a.ptx:2: `setmaxnreg` needs sm_90a"],
        );
        check(
            &[("a.ptx:1", "undeclared label `L1`"), ("a.ptx:2", "undeclared label `L2`")],
            &["a.ptx:1: undeclared label `L1`", "a.ptx:2: undeclared label `L2`"],
        );
    }

    #[test]
    fn further_lines_are_named_by_number_and_then_counted() {
        let places: Vec<_> = (10..18).map(|line| format!("a.ptx:{line}")).collect();
        let said: Vec<_> = places.iter().map(|place| (place.as_str(), "wrong")).collect();
        check(&said, &["a.ptx:10: wrong (8 times, also at 11, 12, 13, 14 and 3 more)"]);
        check(
            &[("a.rs:3", "wrong"), ("b.rs:3", "wrong"), ("b.rs:3", "wrong")],
            &["a.rs:3: wrong (3 times, also at b.rs:3)"],
        );
    }

    #[test]
    fn a_long_instruction_is_cut() {
        let finding = Finding {
            rule: super::super::Rule::Form,
            kernel: "k".into(),
            statement: Some(4),
            text: "x".repeat(100),
            location: None,
            message: "no such form".into(),
        };
        let line = grouped(&[finding])[0].to_string();
        assert_eq!(line, format!("kernel `k`, statement 4: no such form: {}…", "x".repeat(60)));
    }
}
