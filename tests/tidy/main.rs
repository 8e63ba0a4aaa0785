//! What reviewers would otherwise have to watch: sizes, openings, leftovers, layers, versions, licences, links.
//!
//! Part of `cargo test`. Each test applies one rule to the whole repository and lists every place that breaks it.
//! [`repository`] finds files, [`source`] reads Rust well enough to measure functions, [`manifests`] reads `Cargo.toml`
//! files and `cargo metadata`.
#![allow(unreachable_pub)]

mod manifests;
mod repository;
mod source;

use repository::{File, files, rust_files};

/// Longest file, in lines.
const FILE_LINES: usize = 500;
/// Longest function, in lines, unless it is a flat `match` or a table.
const FUNCTION_LINES: usize = 60;
/// Crates that may hold `unsafe` blocks: SIMD, the driver, Python.
const UNSAFE_CRATES: [&str; 3] = ["flashcore-cpu", "flashcore-cuda", "flashcore-python"];
/// Documents that may stand in the root folder; all others belong into `docs/`, next to their code, or nowhere.
const ROOT_DOCUMENTS: [&str; 5] =
    ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"];

/// Fails with all complaints at once.
#[track_caller]
fn check(complaints: impl IntoIterator<Item = String>) {
    let complaints: Vec<_> = complaints.into_iter().collect();
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[test]
fn files_are_short() {
    let long = rust_files().filter(|file| file.text.lines().count() > FILE_LINES);
    check(long.map(|f| {
        format!("{}: {} lines, at most {FILE_LINES}: split it by subject", f.path, f.text.lines().count())
    }));
}

#[test]
fn functions_are_short() {
    let long = rust_files().flat_map(|file| {
        let functions = source::functions(&file.text).into_iter();
        let long = functions.filter(|f| f.lines > FUNCTION_LINES && !f.flat);
        long.map(|f| {
            format!("{}:{}: {} has {} lines, at most {FUNCTION_LINES}", file.path, f.line, f.name, f.lines)
        })
        .collect::<Vec<_>>()
    });
    check(long);
}

#[test]
fn environment_variables_are_documented() {
    let page =
        files().find(|file| file.path == "docs/environment.md").map(|file| file.text).unwrap_or_default();
    let sources = rust_files().filter(|file| file.path.contains("/src/"));
    check(sources.flat_map(|file| {
        let read = file.text.lines().filter(|line| !line.contains("env!(")).flat_map(source::variables);
        let unknown = read.filter(|name| !page.contains(&format!("`{name}`")));
        unknown.map(|name| format!("{}: {name} is not in docs/environment.md", file.path)).collect::<Vec<_>>()
    }));
}

#[test]
fn files_say_what_they_are() {
    let silent = rust_files().filter(|file| !file.text.starts_with("//! "));
    check(
        silent.map(|f| {
            format!("{}: open it with `//! ` and what it does, who calls it, what it calls", f.path)
        }),
    );
}

#[test]
fn nothing_is_left_for_later() {
    // Written in two parts so that this file does not find itself.
    let leftovers =
        [["TO", "DO"], ["FIX", "ME"], ["X", "XX"], ["to", "do!("], ["unimpl", "emented!("], ["#[ig", "nore"]];
    let leftovers = leftovers.map(|parts| parts.concat());
    let found = files().filter(File::is_text).flat_map(|file| {
        let lines = file.text.lines().enumerate();
        let bad = lines.filter(|(_, line)| leftovers.iter().any(|word| contains_word(line, word)));
        bad.map(|(n, line)| format!("{}:{}: {}", file.path, n + 1, line.trim())).collect::<Vec<_>>()
    });
    check(found);
}

fn contains_word(line: &str, word: &str) -> bool {
    let joins = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let ends_open = word.ends_with(|c: char| c.is_alphanumeric());
    let joined = |at: usize| {
        let (before, after) = (&line[..at], &line[at + word.len()..]);
        joins(before.chars().next_back()) || ends_open && joins(after.chars().next())
    };
    line.match_indices(word).any(|(at, _)| !joined(at))
}

#[test]
fn documents_are_about_the_product() {
    let stray = files().filter(|file| file.path.ends_with(".md") && !file.path.contains('/'));
    let stray = stray.filter(|file| !ROOT_DOCUMENTS.contains(&file.path.as_str()));
    check(stray.map(|f| format!("{}: not a root document; history belongs to git, guides to docs/", f.path)));
}

#[test]
fn links_lead_somewhere() {
    let documents: Vec<_> = files().filter(|file| file.path.ends_with(".md")).collect();
    let dead = documents.iter().flat_map(|file| {
        let links = repository::links(&file.text).into_iter();
        links.filter(|link| !file.resolves(link)).map(|link| format!("{}: no such file: {link}", file.path))
    });
    check(dead);
}

#[test]
fn unsafe_code_stays_where_it_belongs() {
    let roots = rust_files().filter(|f| f.path.ends_with("src/lib.rs") || f.path.ends_with("src/main.rs"));
    let open = roots.filter(|f| !UNSAFE_CRATES.iter().any(|name| f.path.contains(&format!("/{name}/"))));
    // Where a crate denies instead of forbidding, each exception says `#[allow(unsafe_code)]`.
    let open = open.filter(|f| {
        !["forbid", "deny"].iter().any(|how| f.text.contains(&format!("#![{how}(unsafe_code)]")))
    });
    check(open.map(|f| format!("{}: add #![forbid(unsafe_code)], or deny and allow it by name", f.path)));
}

#[test]
fn versions_are_in_one_place() {
    check(manifests::all().iter().flat_map(manifests::Manifest::own_versions));
}

#[test]
fn published_crates_say_what_they_are() {
    check(manifests::unfit_for_publication());
    check(manifests::versions_out_of_step());
}

#[test]
fn dependencies_point_one_way() {
    check(manifests::forbidden_dependencies(&manifests::all()));
}

#[test]
fn licences_are_compatible() {
    check(manifests::refused_licences());
}
