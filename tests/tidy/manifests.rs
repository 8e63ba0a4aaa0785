//! Crate manifests and what `cargo metadata` says: versions, layers, licences; called by the rules in `main`.

use std::{collections::BTreeSet, process::Command};

use serde_json::Value;

use crate::repository::{files, root};

/// Crates that must never reach others, however indirectly, with the reason.
const FORBIDDEN: [(&str, &[&str], &str); 6] = [
    ("flashcore-core", &["flashcore-"], "the operation is plain data"),
    ("flashcore-ptx", &["flashcore-"], "what ships depends on nothing"),
    (
        "flashcore-cuda",
        &["flashcore-core", "flashcore-kernels", "flashcore-tile"],
        "the driver layer knows no attention",
    ),
    ("flashcore-kernels", &["flashcore-cuda", "flashcore-sim", "flashcore-cpu"], "kernels know no driver"),
    (
        "flashcore-sim",
        &["flashcore-tile", "flashcore-kernels", "flashcore-core"],
        "the simulator judges text alone",
    ),
    ("flashcore", &["flashcore-sim", "flashcore-testkit", "flashcore-cli"], "users link no test tools"),
];

/// A crate's name and what it depends on, section by section.
pub struct Manifest {
    path: String,
    name: String,
    dependencies: Vec<Dependency>,
}

struct Dependency {
    section: String,
    line: String,
}

impl Dependency {
    fn name(&self) -> &str {
        self.line.split(['.', ' ', '=']).next().unwrap_or_default()
    }

    /// Whether it is part of what users link.
    fn is_linked(&self) -> bool {
        !self.section.contains("dev-dependencies") && !self.section.contains("build-dependencies")
    }
}

impl Manifest {
    fn parse(path: String, text: &str) -> Self {
        let mut section = String::new();
        let mut manifest = Self { path, name: String::new(), dependencies: Vec::new() };
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if line.starts_with('[') {
                section = line.trim_matches(['[', ']']).to_owned();
            } else if section.ends_with("dependencies") {
                manifest.dependencies.push(Dependency { section: section.clone(), line: line.to_owned() });
            } else if let Some(name) = line.strip_prefix("name = ").filter(|_| section == "package") {
                manifest.name = name.trim_matches('"').to_owned();
            }
        }
        manifest
    }

    /// Dependencies that do not take their version from the workspace.
    pub fn own_versions(&self) -> Vec<String> {
        let own = self.dependencies.iter().filter(|d| !d.line.contains("workspace = true"));
        own.map(|d| format!("{}: `{}` must take its version from the workspace", self.path, d.line)).collect()
    }
}

/// Manifests of all crates.
pub fn all() -> Vec<Manifest> {
    let manifests = files().filter(|f| f.path.starts_with("crates/") && f.path.ends_with("/Cargo.toml"));
    manifests.map(|file| Manifest::parse(file.path, &file.text)).collect()
}

/// What a crate that is published lacks: crates.io and docs.rs show nothing else to those who look for it.
pub fn unfit_for_publication() -> Vec<String> {
    let fields = ["description", "readme", "keywords", "categories", "include", "[package.metadata.docs.rs]"];
    let manifests = files().filter(|f| f.path.starts_with("crates/") && f.path.ends_with("/Cargo.toml"));
    let published = manifests.filter(|file| !file.text.contains("publish = false"));
    published
        .flat_map(|file| {
            let has = |field: &&str| file.text.lines().any(|line| line.starts_with(field));
            let lacks = fields.into_iter().filter(|field| !has(field));
            lacks
                .map(|field| format!("{}: no `{field}`, or `publish = false`", file.path))
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Crates of the workspace whose version, as others ask for it, is not that of the workspace.
pub fn versions_out_of_step() -> Vec<String> {
    let root = files().find(|file| file.path == "Cargo.toml").expect("the root has a manifest");
    let version = root.text.lines().find_map(|line| line.strip_prefix("version = ")).unwrap_or_default();
    let exact = format!("version = \"={}\"", version.trim_matches('"'));
    let ours = root.text.lines().filter(|line| line.starts_with("flashcore") && line.contains("version"));
    ours.filter(|line| !line.contains(&exact))
        .map(|line| format!("Cargo.toml: {line}, not {exact}"))
        .collect()
}

/// Chains of dependencies that [`FORBIDDEN`] rules out.
pub fn forbidden_dependencies(manifests: &[Manifest]) -> Vec<String> {
    let rules = FORBIDDEN.iter().flat_map(|&(from, to, why)| to.iter().map(move |&to| (from, to, why)));
    let broken = rules.flat_map(|(from, to, why)| {
        let hit = move |name: &&String| if to.ends_with('-') { name.starts_with(to) } else { *name == to };
        let reached = reachable(manifests, from);
        let hits: Vec<_> = reached.iter().filter(hit).cloned().collect();
        hits.into_iter().map(move |name| format!("{from} depends on {name}, but {why}"))
    });
    broken.collect()
}

fn reachable(manifests: &[Manifest], from: &str) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from.to_owned()];
    while let Some(name) = open.pop() {
        let linked = manifests.iter().filter(|m| m.name == name).flat_map(|m| &m.dependencies);
        let ours = linked.filter(|d| d.is_linked() && d.name().starts_with("flashcore"));
        open.extend(ours.map(|d| d.name().to_owned()).filter(|name| reached.insert(name.clone())));
    }
    reached
}

/// Packages whose licence none of those in `deny.toml` covers.
pub fn refused_licences() -> Vec<String> {
    let allowed = allowed_licences();
    assert!(allowed.iter().any(|name| name == "MIT"), "deny.toml allows nothing: {allowed:?}");
    let metadata = metadata();
    let packages = metadata["packages"].as_array().expect("cargo metadata lists packages");
    assert!(packages.len() > 20, "cargo metadata lists only {} packages", packages.len());
    let refused = packages
        .iter()
        .filter(|package| !is_allowed(package["license"].as_str().unwrap_or("none"), &allowed));
    refused.map(|package| format!("{}: licence {}", package["name"], package["license"])).collect()
}

/// The quoted names in the `allow` list of `deny.toml`.
fn allowed_licences() -> Vec<String> {
    let file = files().find(|file| file.path == "deny.toml").expect("deny.toml is in the root folder");
    let list =
        file.text.split_once("allow = [").and_then(|(_, rest)| rest.split_once(']')).map(|(list, _)| list);
    list.unwrap_or_default().split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Packages of the lock file for this platform; the network is used only if one of them was never downloaded.
fn metadata() -> Value {
    let args = ["metadata", "--format-version", "1", "--locked", "--filter-platform", host()];
    let run = Command::new(env!("CARGO")).args(args).current_dir(root()).output().expect("cargo runs");
    assert!(run.status.success(), "cargo metadata failed: {}", String::from_utf8_lossy(&run.stderr));
    serde_json::from_slice(&run.stdout).expect("cargo metadata prints JSON")
}

fn host() -> &'static str {
    match (std::env::consts::ARCH, std::env::consts::OS) {
        ("aarch64", "macos") => "aarch64-apple-darwin",
        ("aarch64", _) => "aarch64-unknown-linux-gnu",
        (_, "windows") => "x86_64-pc-windows-msvc",
        (_, "macos") => "x86_64-apple-darwin",
        _ => "x86_64-unknown-linux-gnu",
    }
}

/// Whether a licence expression is covered: one side of each OR, both of each AND.
fn is_allowed(expression: &str, allowed: &[String]) -> bool {
    let text = expression.replace('/', " OR ").replace(['(', ')'], " ");
    let known = |name: &str| allowed.iter().any(|licence| licence == name.trim());
    // AND binds tighter than OR; the only bracketed form in use, `(A OR B) AND C`, is read as stricter than it is.
    if expression.contains('(') {
        return text.split(" AND ").all(|side| side.split(" OR ").any(known));
    }
    text.split(" OR ").any(|side| side.split(" AND ").all(known))
}

#[test]
fn licence_expressions_are_read() {
    let allowed = ["MIT", "Apache-2.0", "Unicode-3.0"].map(str::to_owned);
    for good in
        ["MIT", "MIT OR GPL-3.0", "Apache-2.0/MIT", "(MIT OR GPL-3.0) AND Unicode-3.0", "MIT AND Apache-2.0"]
    {
        assert!(is_allowed(good, &allowed), "{good}");
    }
    for bad in ["none", "GPL-3.0", "MIT AND GPL-3.0", "(MIT OR Apache-2.0) AND GPL-3.0"] {
        assert!(!is_allowed(bad, &allowed), "{bad}");
    }
}

#[test]
fn layers_are_followed_through() {
    let manifest = |name: &str, on: &str| {
        let text =
            format!("[package]\nname = \"{name}\"\n[dependencies]\n{on}.workspace = true\nserde = \"1\"\n");
        Manifest::parse(format!("{name}/Cargo.toml"), &text)
    };
    let manifests =
        [manifest("flashcore", "flashcore-kernels"), manifest("flashcore-kernels", "flashcore-sim")];
    let broken = forbidden_dependencies(&manifests);
    assert!(broken.iter().any(|line| line.starts_with("flashcore depends on flashcore-sim")), "{broken:?}");
    assert_eq!(manifests[0].own_versions().len(), 1, "serde has its own version");
}
