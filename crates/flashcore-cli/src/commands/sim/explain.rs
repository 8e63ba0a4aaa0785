//! `flashcore sim --explain`: what a kind of finding means, and what to do about it.

use flashcore_sim::{FindingKind, Severity};
use serde_json::json;

use super::SimFailure;
use crate::{
    error::{CliError, Verdict},
    output::{Output, Page, Text, faint},
};

/// Explains one kind, or all of them.
pub fn execute(name: &str, output: &Output) -> Result<Verdict, CliError> {
    let kinds: Vec<FindingKind> = match (name, FindingKind::parse(name)) {
        ("all", _) => FindingKind::all().collect(),
        (_, Some(kind)) => vec![kind],
        _ => return Err(unknown(name).into()),
    };
    let explained = |kind: &FindingKind| {
        json!({
            "kind": kind.to_string(), "severity": severity(*kind),
            "meaning": kind.meaning(), "cure": kind.cure(),
        })
    };
    let answer: Vec<_> = kinds.iter().map(explained).collect();
    output.answer(&answer, || kinds.iter().fold(Page::default(), |page, kind| page.table(rows(*kind))))?;
    Ok(Verdict::Pass)
}

fn severity(kind: FindingKind) -> &'static str {
    if kind.severity() == Severity::Error { "error" } else { "note" }
}

fn rows(kind: FindingKind) -> Vec<Vec<Text>> {
    let head = format!("{kind} ({})", severity(kind));
    vec![
        vec![faint("kind"), head.into()],
        vec![faint("means"), kind.meaning().into()],
        vec![faint("fix"), kind.cure().into()],
    ]
}

fn unknown(name: &str) -> SimFailure {
    let all: Vec<_> = FindingKind::all().map(|kind| kind.to_string()).collect();
    SimFailure::Kind { name: name.to_owned(), all: all.join(", ") }
}
