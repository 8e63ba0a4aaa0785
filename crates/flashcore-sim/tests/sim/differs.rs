//! Random programs whose answers from a GPU the simulator does not share, since ptxas made something else of them:
//! `tests/ptx/fuzz/differs.txt` says what, and with that in its place the answers are the same.

use crate::ptx::{judge, programs};
use flashcore_sim::Options;
use flashcore_testkit::ptxtest::read;

/// Where the programs and the reasons are.
const PROGRAMS: &str = "differs.txt.gz";
const REASONS: &str = include_str!("../../../../tests/ptx/fuzz/differs.txt");

/// The replacements of a program, if the file has any word of it.
fn replacements(name: &str) -> Option<Vec<(&'static str, &'static str)>> {
    let section = REASONS.split("\n= ").skip(1).find(|section| section.lines().next() == Some(name))?;
    let starting = |mark: &'static str| section.lines().filter_map(move |line| line.strip_prefix(mark));
    Some(starting("- ").zip(starting("+ ")).collect())
}

/// Replaces each text, which must stand there once.
fn replaced(text: &str, replacements: &[(&str, &str)]) -> Result<String, String> {
    replacements.iter().try_fold(text.to_owned(), |text, (old, new)| match text.matches(old).count() {
        1 => Ok(text.replace(old, new)),
        count => Err(format!("`{old}` stands there {count} times")),
    })
}

/// Whether lanes that a recursive call has led apart are asked to act together.
fn recurses_before_lanes_meet(text: &str) -> bool {
    let kernel = text.split(".visible .entry").nth(1).unwrap_or_default();
    kernel.split_once("again, (a, b)").is_some_and(|(_, behind)| behind.contains(".sync"))
}

fn answers_are_shared(name: &str, text: &str) -> Result<(), String> {
    let cases = read(name, text).map_err(|e| e.to_string())?;
    judge(&cases[0], &Options::new())
}

/// What is wrong with the reason that is given for a program.
fn unexplained(name: &str, text: &str) -> Option<String> {
    let Some(replacements) = replacements(name) else { return Some(format!("{name} has no reason")) };
    if answers_are_shared(name, text).is_ok() {
        return Some(format!("{name} agrees: it belongs to the other programs"));
    }
    if replacements.is_empty() {
        let apart = recurses_before_lanes_meet(text);
        return (!apart).then(|| format!("{name}: no lanes come apart, and no replacement is given"));
    }
    let outcome = replaced(text, &replacements).and_then(|text| answers_are_shared(name, &text));
    outcome.err().map(|error| format!("{name}, replaced: {error}"))
}

#[test]
fn every_difference_is_explained() {
    let programs = programs(|file| file == PROGRAMS);
    assert_eq!(programs.len(), 17);
    assert_eq!(REASONS.matches("\n= ").count(), programs.len(), "reasons");
    let wrong: Vec<_> = programs.iter().filter_map(|(name, text)| unexplained(name, text)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
