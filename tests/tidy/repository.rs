//! The files of the repository, without what is built or downloaded; called by the rules in `main`.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Folders that hold no sources.
const SKIPPED: [&str; 7] =
    ["target", ".git", ".venv", "artifacts", "node_modules", "__pycache__", "proptest-regressions"];
/// Endings of files that people write.
const TEXT: [&str; 9] = ["rs", "md", "toml", "py", "ptx", "yml", "yaml", "sh", "pyi"];

/// A file and its path from the root, with `/` between folders.
pub struct File {
    pub path: String,
    pub text: String,
}

impl File {
    /// Whether people write it.
    pub fn is_text(&self) -> bool {
        self.path.ends_with(".ci/run") || TEXT.iter().any(|ending| self.path.ends_with(&format!(".{ending}")))
    }

    /// Whether a link in this file leads to a file or folder of the repository, or out of it.
    pub fn resolves(&self, link: &str) -> bool {
        let target = link.split('#').next().unwrap_or_default();
        let folder = root().join(&self.path).parent().map(Path::to_path_buf).unwrap_or_default();
        target.is_empty()
            || target.contains("://")
            || target.starts_with("mailto:")
            || folder.join(target).exists()
    }
}

/// The folder of the workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every file that is text.
pub fn files() -> impl Iterator<Item = File> {
    let mut found = Vec::new();
    collect(&root(), "", &mut found);
    found.into_iter()
}

/// Every Rust source.
pub fn rust_files() -> impl Iterator<Item = File> {
    files().filter(|file| file.path.ends_with(".rs"))
}

fn collect(folder: &Path, prefix: &str, found: &mut Vec<File>) {
    let mut entries: Vec<_> = fs::read_dir(folder).into_iter().flatten().flatten().collect();
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{prefix}{name}");
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && !SKIPPED.contains(&name.as_str()) => {
                collect(&entry.path(), &format!("{path}/"), found);
            }
            Ok(kind) if kind.is_file() => {
                found.extend(fs::read_to_string(entry.path()).ok().map(|text| File { path, text }));
            }
            _ => {}
        }
    }
}

/// Targets of the links in a Markdown text, outside of code blocks.
pub fn links(text: &str) -> Vec<String> {
    let mut in_code = false;
    let mut found = Vec::new();
    for line in text.lines() {
        in_code ^= line.trim_start().starts_with("```");
        let parts = line.split("](").skip(1).filter(|_| !in_code);
        found.extend(parts.filter_map(|part| part.split_once(')')).map(|(target, _)| target.to_owned()));
    }
    found
}

#[test]
fn the_repository_is_found() {
    let paths: Vec<_> = files().map(|file| file.path).collect();
    for expected in
        ["Cargo.toml", "README.md", ".ci/run", "tests/tidy/main.rs", "crates/flashcore-core/src/lib.rs"]
    {
        assert!(
            paths.iter().any(|path| path == expected),
            "{expected} is missing among {} files",
            paths.len()
        );
    }
}

#[test]
fn links_are_found() {
    let text = "[a](b.md#c) and [d](https://e)\n```\n[no](link)\n```\n![i](j.svg)";
    assert_eq!(links(text), ["b.md#c", "https://e", "j.svg"]);
}
