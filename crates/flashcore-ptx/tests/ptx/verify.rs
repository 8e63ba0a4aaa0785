//! `tests/ptx/verify/*.ptx`: correct kernels are silent; in broken ones every line marked `// error: …` has a finding
//! with that text, and no other line has one. `// kernel error:` and `// module error:` stand for findings without a
//! line.

use flashcore_ptx::{
    parse::parse_all,
    verify::{Finding, verify},
};
use std::path::{Path, PathBuf};

/// A finding, or the expectation of one: line (0 for none) and text.
type Said = (u32, String);

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/ptx/verify")
}

fn expected(text: &str) -> Vec<Said> {
    let marks = ["// error: ", "// kernel error: ", "// module error: "];
    let of_line = |(i, line): (usize, &str)| {
        let (mark, message) = marks.iter().find_map(|m| Some((*m, line.split_once(m)?.1)))?;
        let number = if mark == marks[0] { i as u32 + 1 } else { 0 };
        Some((number, message.trim().to_owned()))
    };
    text.lines().enumerate().filter_map(of_line).collect()
}

fn line_of(finding: &Finding) -> u32 {
    finding.location.as_ref().and_then(|l| l.rsplit(':').next()?.parse().ok()).unwrap_or(0)
}

fn found(text: &str) -> Vec<Said> {
    match parse_all("test.ptx", text) {
        Ok(parsed) => {
            let findings = verify(&parsed.module, &parsed.provenance);
            findings.into_iter().map(|f| (line_of(&f), f.message)).collect()
        }
        Err((first, rest)) => {
            std::iter::once(first).chain(rest).map(|e| (e.line, e.kind.to_string())).collect()
        }
    }
}

fn check(path: &Path) {
    let text = std::fs::read_to_string(path).unwrap();
    let (expected, found) = (expected(&text), found(&text));
    let matches = |e: &Said, f: &Said| e.0 == f.0 && f.1.contains(&e.1);
    let missing: Vec<_> = expected.iter().filter(|e| !found.iter().any(|f| matches(e, f))).collect();
    let surplus: Vec<_> = found.iter().filter(|f| !expected.iter().any(|e| matches(e, f))).collect();
    assert!(
        missing.is_empty() && surplus.is_empty(),
        "{}: not found: {missing:#?}\nfound instead: {surplus:#?}",
        path.display()
    );
    assert!(!expected.is_empty(), "{}: no broken twin", path.display());
}

#[test]
fn findings_are_those_marked() {
    let mut files: Vec<_> = std::fs::read_dir(folder()).unwrap().map(|f| f.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 8);
    files.iter().filter(|f| f.extension().is_some_and(|e| e == "ptx")).for_each(|f| check(f));
}
