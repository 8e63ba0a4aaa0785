//! What was run and where: enough to run it again, and to tell what has changed since.

use std::{collections::BTreeMap, process::Command};

use flashcore_kernels::untrusted::{self, Head};
use serde::{Deserialize, Serialize};

use super::{
    Fault,
    bundle::{MANIFEST, PARTS, Parts},
};
use crate::{
    error::LabError,
    machine::{self, Machine},
    signature,
    suites::Suite,
};

/// What manifests are called inside.
pub const SCHEMA: &str = "flashcore-repro";
/// The version of the format.
pub const VERSION: u32 = 1;
/// Longest text in a manifest.
const LONGEST_TEXT: usize = 300;
/// Most kernels that are signed.
const MOST_KERNELS: usize = 1000;

/// What was run and where.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    schema: String,
    version: u32,
    /// When, in UTC.
    pub created: String,
    /// Version of FlashCore.
    pub flashcore: String,
    /// Commit that the program was built from.
    pub commit: Option<String>,
    /// Whether files of it had been changed.
    pub changed: Option<bool>,
    /// The compiler that built the program.
    pub rustc: String,
    /// SHA-256 of the program.
    pub program: Option<String>,
    /// The machine, its GPU and driver.
    pub machine: Machine,
    /// Clocks and power limit of the GPU, as `nvidia-smi` prints them.
    pub clocks: Option<String>,
    /// What was asked for.
    pub settings: Settings,
    /// SHA-256 of the PTX of every kernel of the covering set.
    pub kernels: BTreeMap<String, String>,
    /// SHA-256 of the other parts.
    pub parts: BTreeMap<String, String>,
}

/// What is verified and measured; nothing else of a bundle decides what runs.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The backend.
    pub backend: String,
    /// Whether checks that take long are left out.
    pub quick: bool,
    /// Only checks whose names contain this.
    pub checks: Option<String>,
    /// The suite that is measured.
    pub suite: String,
    /// Only problems whose names contain this.
    pub filter: Option<String>,
    /// Seconds of timing per problem.
    pub seconds: f64,
    /// Seed of the inputs.
    pub seed: u64,
}

impl Settings {
    /// Backends that can be asked for.
    pub const BACKENDS: [&str; 3] = ["auto", "cpu", "cuda"];

    fn check(&self) -> Result<(), String> {
        let texts = [&self.checks, &self.filter].into_iter().flatten();
        texts.into_iter().try_for_each(|text| check_text(text))?;
        if !Self::BACKENDS.contains(&self.backend.as_str()) {
            return Err(format!("no such backend: {:?}", self.backend));
        }
        if !Suite::ALL.iter().any(|suite| suite.name() == self.suite) {
            return Err(format!("no such suite: {:?}", self.suite));
        }
        if self.seconds > 0.0 && self.seconds <= 600.0 { Ok(()) } else { Err("no such time".to_owned()) }
    }
}

impl Manifest {
    /// A manifest of this program and machine, without parts yet.
    pub fn new(settings: Settings) -> Result<Self, LabError> {
        Ok(Self {
            schema: SCHEMA.to_owned(),
            version: VERSION,
            created: machine::now(),
            flashcore: env!("CARGO_PKG_VERSION").to_owned(),
            commit: machine::commit(),
            changed: machine::changed(),
            rustc: machine::RUSTC.to_owned(),
            program: signature::program(),
            machine: Machine::this(None),
            clocks: clocks(),
            settings,
            kernels: signature::kernels()?,
            parts: BTreeMap::new(),
        })
    }

    /// Signs the parts and joins them.
    pub fn seal(mut self, mut parts: Parts) -> Result<(Self, Parts), LabError> {
        self.parts = parts.iter().map(|(name, bytes)| (name.clone(), signature::hash(bytes))).collect();
        let failed = |e: serde_json::Error| LabError::io("write", MANIFEST)(e.into());
        parts.insert(MANIFEST.to_owned(), serde_json::to_vec_pretty(&self).map_err(failed)?);
        Ok((self, parts))
    }

    /// The manifest among `parts`, if it is sound and the parts are those that it names.
    pub fn read(parts: &Parts) -> Result<Self, Fault> {
        let damaged = |reason: String| Fault::Part { part: MANIFEST, reason };
        let bytes = parts.get(MANIFEST).ok_or(Fault::Missing(MANIFEST))?;
        let head: Head = serde_json::from_slice(bytes).map_err(|e| damaged(e.to_string()))?;
        if head.schema != SCHEMA {
            return Err(damaged("not a manifest of `flashcore repro`".to_owned()));
        }
        if head.version != VERSION {
            return Err(Fault::Version { got: head.version });
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(|e| damaged(e.to_string()))?;
        manifest.check().map_err(damaged)?;
        let signed = |(name, bytes): &(&String, &Vec<u8>)| {
            manifest.parts.get(*name).is_some_and(|hash| *hash == signature::hash(bytes))
        };
        let others = parts.iter().filter(|(name, _)| *name != MANIFEST);
        let stray = others.into_iter().find(|part| !signed(part));
        stray.map_or(Ok(manifest.clone()), |(name, _)| Err(Fault::Changed(name.clone())))
    }

    fn check(&self) -> Result<(), String> {
        self.settings.check()?;
        let machine = &self.machine;
        let texts = [&self.created, &self.flashcore, &self.rustc, &machine.system, &machine.cpu];
        let optional =
            [&self.commit, &self.program, &self.clocks, &machine.gpu, &machine.driver, &machine.peers];
        let texts = texts.into_iter().chain(optional.into_iter().flatten());
        let maps = self.kernels.iter().chain(&self.parts).flat_map(|(name, hash)| [name, hash]);
        texts.chain(maps).try_for_each(|text| check_text(text))?;
        let known = self.parts.keys().all(|name| PARTS.contains(&name.as_str()));
        if known && self.kernels.len() <= MOST_KERNELS { Ok(()) } else { Err("too many names".to_owned()) }
    }

    /// The name of the bundle: commit and time.
    pub fn file_name(&self) -> String {
        let commit = self.commit.as_deref().filter(|name| name.bytes().all(|b| b.is_ascii_hexdigit()));
        let commit = commit.map_or("unknown", |name| name.get(..12).unwrap_or(name));
        let time: String = self.created.chars().filter(char::is_ascii_alphanumeric).collect();
        format!("flashcore_{commit}_{time}.tar.gz")
    }
}

fn check_text(text: &str) -> Result<(), String> {
    untrusted::check_text(text, LONGEST_TEXT)
}

fn output(program: &str, args: &[&str]) -> Option<String> {
    let run = Command::new(program).args(args).output().ok().filter(|run| run.status.success())?;
    Some(String::from_utf8(run.stdout).ok()?.trim().to_owned())
}

fn clocks() -> Option<String> {
    let query = "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,power.limit";
    let text = output("nvidia-smi", &[query, "--format=csv,noheader", "--id=0"])?;
    text.lines().next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repro::bundle::{BENCH, DOCTOR, VERIFY};

    fn sealed() -> (Manifest, Parts) {
        let settings = Settings {
            backend: "cpu".to_owned(),
            quick: true,
            checks: None,
            suite: "cpu".to_owned(),
            filter: Some("1x2".to_owned()),
            seconds: 0.1,
            seed: 0,
        };
        let parts = [DOCTOR, VERIFY, BENCH].map(|part| (part.to_owned(), part.as_bytes().to_vec()));
        Manifest::new(settings).unwrap().seal(parts.into()).unwrap()
    }

    #[test]
    fn manifests_come_back_and_name_their_parts() {
        let (manifest, mut parts) = sealed();
        assert_eq!(Manifest::read(&parts).unwrap(), manifest);
        assert!(manifest.file_name().starts_with("flashcore_") && !manifest.file_name().contains('/'));
        parts.insert(BENCH.to_owned(), b"other".to_vec());
        assert!(matches!(Manifest::read(&parts), Err(Fault::Changed(name)) if name == BENCH));
        let (_, mut parts) = sealed();
        parts.insert("profile.json".to_owned(), b"stray".to_vec());
        assert!(matches!(Manifest::read(&parts), Err(Fault::Changed(_))));
    }

    #[test]
    fn manifests_that_cannot_be_are_refused() {
        let (_, parts) = sealed();
        let text = String::from_utf8(parts[MANIFEST].clone()).unwrap();
        for (from, to, words) in [
            ("flashcore-repro", "flashcore-bench", "not a manifest"),
            ("\"version\": 1", "\"version\": 9", "version 9"),
            ("\"backend\": \"cpu\"", "\"backend\": \"--out\"", "no such backend"),
            ("\"suite\": \"cpu\"", "\"suite\": \"/etc\"", "no such suite"),
            ("\"seconds\": 0.1", "\"seconds\": -1", "no such time"),
            ("\"1x2\"", "\"\\u001b[2J\"", "control characters"),
            ("\"rustc\"", "\"run\"", "damaged"),
            ("{", "[", "damaged"),
        ] {
            let mut parts = parts.clone();
            parts.insert(MANIFEST.to_owned(), text.replacen(from, to, 1).into_bytes());
            let error = Manifest::read(&parts).unwrap_err().to_string();
            assert!(error.contains(words), "`{error}` instead of `{words}`");
        }
    }
}
