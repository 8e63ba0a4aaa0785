//! What the simulator counted and found, as commands show it; `sim`, `run --backend sim` and `profile` use it.

use flashcore_sim::{Finding, Outcome, Severity};
use serde_json::{Value, json};

use crate::output::{Page, Text, bad, faint, good};

/// Counts and findings of one simulated launch.
pub fn json(outcome: &Outcome) -> Value {
    let c = &outcome.counters;
    let found = |finding: &Finding| {
        let site = finding.site.as_ref();
        json!({
            "severity": if is_error(finding) { "error" } else { "note" },
            "kind": format!("{:?}", finding.kind),
            "message": finding.message,
            "instruction": site.map(|site| &site.text),
            "source": site.map(|site| &site.source),
            "function": site.and_then(|site| site.function.as_ref()), "fix": finding.kind.cure(),
            "cta": finding.cta, "warp": finding.warp, "lane": finding.lane, "count": finding.count,
        })
    };
    json!({
        "clean": outcome.is_clean(),
        "halted": outcome.halted,
        "printed": outcome.printed,
        "findings": outcome.findings.iter().map(found).collect::<Vec<_>>(),
        "counters": {
            "instructions": c.total_instructions(),
            "by_class": classes(outcome).collect::<serde_json::Map<_, _>>(),
            "shared_wavefronts": c.shared_wavefronts, "bank_conflicts": c.bank_conflicts,
            "global_sectors": c.global_sectors, "async_bytes": c.async_bytes, "tensor_macs": c.tensor_macs,
            "divergent_branches": c.divergent_branches,
        },
    })
}

fn classes(outcome: &Outcome) -> impl Iterator<Item = (String, Value)> {
    outcome.counters.instructions.iter().map(|(class, n)| (format!("{class:?}").to_lowercase(), (*n).into()))
}

fn is_error(finding: &Finding) -> bool {
    finding.severity() == Severity::Error
}

/// Adds counts and findings to a page.
pub fn add_to(page: Page, outcome: &Outcome) -> Page {
    let c = &outcome.counters;
    let fixed = [
        ("shared wavefronts", c.shared_wavefronts),
        ("bank conflicts", c.bank_conflicts),
        ("global sectors", c.global_sectors),
        ("async bytes", c.async_bytes),
        ("tensor multiply-adds", c.tensor_macs),
        ("divergent branches", c.divergent_branches),
    ];
    let all = [("warp instructions".to_owned(), c.total_instructions().into())];
    let rows = all.into_iter().chain(classes(outcome).map(|(class, n)| (format!("  {class}"), n)));
    let rows = rows.chain(fixed.map(|(name, n)| (name.to_owned(), n.into())));
    let page = page.table(rows.map(|(name, n): (String, Value)| vec![faint(name), n.to_string().into()]));
    add_findings(page, outcome)
}

/// Adds what the kernel printed and what was found to a page.
pub fn add_findings(page: Page, outcome: &Outcome) -> Page {
    let lines = outcome.printed.lines().map(|line| vec![faint("printed"), line.into()]);
    let page = page.table(lines);
    outcome.findings.iter().fold(page, |page, finding| page.table(rows_of(finding)))
}

fn rows_of(finding: &Finding) -> Vec<Vec<Text>> {
    let [x, y, z] = finding.cta;
    let mut rows =
        vec![vec![if is_error(finding) { bad("error") } else { "note".into() }, said(finding).into()]];
    if let Some(site) = &finding.site {
        rows.push(vec![faint("at"), site.text.as_str().into()]);
        rows.extend(site.source.iter().map(|source| vec![faint("from"), source.as_str().into()]));
    }
    let times = if finding.count > 1 { format!(", {} times", finding.count) } else { String::new() };
    let place = format!("CTA ({x},{y},{z}) warp {} lane {}{times}", finding.warp, finding.lane);
    rows.push(vec![faint("in"), place.into()]);
    rows.push(vec![faint("fix"), finding.kind.cure().into()]);
    rows
}

fn said(finding: &Finding) -> String {
    format!("{:?}: {}", finding.kind, finding.message)
}

/// The first thing that is wrong.
pub fn fault(outcome: &Outcome) -> Option<String> {
    outcome.findings.iter().find(|finding| is_error(finding)).map(said)
}

/// How it went, in a few words.
pub fn verdict(outcome: &Outcome) -> Text {
    match outcome.findings.iter().filter(|finding| is_error(finding)).count() {
        0 => good("clean"),
        1 => bad("1 kind of fault"),
        n => bad(format!("{n} kinds of fault")),
    }
}

/// An object with the fields of both.
pub fn merged(mut one: Value, other: Value) -> Value {
    if let (Value::Object(one), Value::Object(other)) = (&mut one, other) {
        one.extend(other);
    }
    one
}
