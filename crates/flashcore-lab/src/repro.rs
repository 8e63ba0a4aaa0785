//! Everything about one state of the project in one file, and whether another machine or day reproduces it.
//!
//! A [`Bundle`] is gzipped JSON: a manifest (what was run, and where) with the results of `doctor`, `verify` and
//! `bench`. It is untrusted: read up to a limit and checked. [`compare`] compares two: the same kernels, the same
//! verdicts, times that are not significantly worse. The `repro` command runs the parts.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, Read},
    path::Path,
    process::Command,
};

use flashcore_kernels::untrusted::check_text;
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    error::LabError,
    gate::{self, Demand, Ruling},
    machine::{self, Machine},
    record::Record,
    save, signature,
    task::Task,
};

/// What manifests are called inside, with the version of their format.
const FORMAT: &str = "flashcore-repro-3";
/// Most bytes of a bundle, packed and unpacked.
const MOST_BYTES: u64 = 64 << 20;
/// Longest text in a manifest.
const LONGEST_TEXT: usize = 300;

/// Texts by name.
pub type Facts = BTreeMap<String, String>;

/// Everything that a bundle holds.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Bundle {
    pub manifest: Manifest,
    /// What `doctor --json` said.
    pub doctor: Value,
    /// What `verify --json` said.
    pub verify: Value,
    /// The result file of `bench`.
    pub bench: Record,
}

/// What was run, and where.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: String,
    /// When, in UTC.
    pub created: String,
    /// Versions, the commit, the program's hash, the machine.
    pub environment: Facts,
    /// What was requested; readers of a bundle must check it.
    pub settings: Value,
    /// SHA-256 of the PTX of every kernel of the covering set.
    pub kernels: Facts,
}

impl Manifest {
    /// What this program runs on this machine.
    pub fn new(settings: Value) -> Result<Self, LabError> {
        let (created, environment) = (machine::now(), environment());
        Ok(Self { format: FORMAT.to_owned(), created, environment, settings, kernels: signature::kernels()? })
    }

    /// The name of the bundle: commit and time.
    pub fn file_name(&self) -> String {
        let commit = self.environment.get("commit").and_then(|name| name.get(..12)).unwrap_or("unknown");
        let time: String = self.created.chars().filter(char::is_ascii_alphanumeric).collect();
        format!("flashcore_{commit}_{time}.json.gz")
    }

    fn check(&self) -> Result<(), String> {
        if self.format != FORMAT {
            return Err(format!("its format is not {FORMAT:?}"));
        }
        let facts = [&self.environment, &self.kernels].into_iter().flatten();
        let mut texts = facts.flat_map(|(name, text)| [name, text]).chain([&self.created]);
        texts.try_for_each(|text| check_text(text, LONGEST_TEXT))
    }
}

/// This program and this machine; what is not known is left out.
fn environment() -> Facts {
    let Machine { system, cpu, cores, gpu, driver, .. } = Machine::this(None);
    let facts = [
        ("FlashCore", Some(env!("CARGO_PKG_VERSION").to_owned())),
        ("commit", machine::commit()),
        ("files changed since", machine::changed().map(|changed| changed.to_string())),
        ("compiler", Some(machine::RUSTC.to_owned())),
        ("program", signature::program()),
        ("system", Some(system)),
        ("processor", Some(format!("{cpu}, {cores} cores"))),
        ("GPU", gpu),
        ("driver", driver),
        ("clocks and power limit", clocks()),
    ];
    facts.into_iter().filter_map(|(name, text)| Some((name.to_owned(), text?))).collect()
}

fn clocks() -> Option<String> {
    let query = "--query-gpu=clocks.max.sm,clocks.mem,power.limit";
    let run = Command::new("nvidia-smi").args([query, "--format=csv,noheader", "--id=0"]).output().ok()?;
    Some(String::from_utf8(run.stdout).ok()?.lines().next()?.to_owned())
}

impl Bundle {
    /// Writes it to `path`; whoever reads an old one meanwhile keeps it.
    pub fn save(&self, path: &Path) -> Result<(), LabError> {
        let folder = save::folder(path);
        fs::create_dir_all(folder).map_err(LabError::io("make", folder))?;
        let packed = self.pack().and_then(|bytes| save::replace(path, &[&bytes]));
        packed.map_err(LabError::io("write", path))
    }

    fn pack(&self) -> io::Result<Vec<u8>> {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
        serde_json::to_writer(&mut gzip, self)?;
        gzip.finish()
    }

    /// Reads a bundle that is whole.
    pub fn load(path: &Path) -> Result<Self, LabError> {
        let file = File::open(path).map_err(LabError::io("read", path))?;
        Self::unpack(file).map_err(|reason| LabError::Bundle { path: path.to_owned(), reason })
    }

    fn unpack(packed: impl Read) -> Result<Self, String> {
        let mut bytes = Vec::new();
        // The limit is on what comes out: a few bytes can unpack to anything.
        let unpacked = GzDecoder::new(packed.take(MOST_BYTES)).take(MOST_BYTES + 1).read_to_end(&mut bytes);
        unpacked.map_err(|error| format!("cannot be read: {error}"))?;
        if bytes.len() as u64 > MOST_BYTES {
            return Err(format!("more than {} MiB, the limit for a bundle", MOST_BYTES >> 20));
        }
        let bundle: Self =
            serde_json::from_slice(&bytes).map_err(|e| format!("damaged, or not a bundle: {e}"))?;
        bundle.manifest.check()?;
        bundle.bench.check().map_err(|fault| fault.to_string())?;
        Ok(bundle)
    }

    /// Verdicts of `verify` by backend and group.
    fn verdicts(&self) -> Result<Facts, String> {
        let damaged = |error| format!("what `verify` said is damaged: {error}");
        let verified = Verified::deserialize(&self.verify).map_err(damaged)?;
        let groups = verified.backends.iter().flat_map(|b| b.groups.iter().map(move |g| (&b.backend, g)));
        let verdict = |g: &Group| format!("{} passed and {} failed", g.passed, g.failed);
        Ok(groups.map(|(backend, g)| (format!("{backend}/{}", g.group), verdict(g))).collect())
    }
}

/// Whether bundles can be written to `folder`, which need not be there yet; asked before anything is measured.
pub fn check_folder(folder: &Path) -> Result<(), LabError> {
    let there = folder.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    save::temporary(&there.join("bundle")).map(drop).map_err(LabError::io("make files in", folder))
}

/// What `verify --json` says, as far as it is compared.
#[derive(Deserialize)]
struct Verified {
    backends: Vec<Backend>,
}

#[derive(Deserialize)]
struct Backend {
    backend: String,
    groups: Vec<Group>,
}

#[derive(Deserialize)]
struct Group {
    group: String,
    passed: usize,
    failed: usize,
}

/// What was found.
#[derive(Clone, PartialEq, Serialize, Debug, Default)]
pub struct Comparison {
    /// Differences that should not be there.
    pub differences: Vec<String>,
    /// Differences that are allowed.
    pub remarks: Vec<String>,
    /// Kernels whose PTX is the same.
    pub kernels: usize,
    /// Groups of checks whose verdict is the same.
    pub groups: usize,
    /// Times that were compared.
    pub rulings: Vec<Ruling>,
}

/// Holds `now` against `then`; our times may be worse by `margin`.
///
/// Another machine is said plainly and is no failure: times are not compared then, and backends that one of the two
/// does not have are left out.
pub fn compare(then: &Bundle, now: &Bundle, margin: f64) -> Result<Comparison, String> {
    let mut found = Comparison::default();
    let kernels = changes(&then.manifest.kernels, &now.manifest.kernels);
    found.kernels = now.manifest.kernels.keys().filter(|name| !kernels.contains_key(*name)).count();
    found.differences.extend(kernels.into_values().map(|text| format!("the PTX of {text}")));
    let environment = changes(&then.manifest.environment, &now.manifest.environment);
    found.remarks.extend(environment.into_values());
    found.verdicts(&then.verdicts()?, &now.verdicts()?);
    found.times(&then.bench, &now.bench, margin);
    Ok(found)
}

/// What is not the same in both, by name and in words.
fn changes(then: &Facts, now: &Facts) -> BTreeMap<String, String> {
    let names: BTreeSet<_> = then.keys().chain(now.keys()).collect();
    let text = |facts: &Facts, name| facts.get(name).map_or("missing", String::as_str).to_owned();
    let changed = names.into_iter().filter(|name| then.get(*name) != now.get(*name));
    changed
        .map(|name| (name.clone(), format!("{name} was {} and is {}", text(then, name), text(now, name))))
        .collect()
}

impl Comparison {
    /// Whether it is the same.
    pub const fn pass(&self) -> bool {
        self.differences.is_empty()
    }

    /// Whether it is the same but for being slower.
    pub fn is_slower(&self) -> bool {
        let slower = self.rulings.iter().filter(|ruling| !ruling.pass()).count();
        slower > 0 && slower == self.differences.len()
    }

    fn verdicts(&mut self, then: &Facts, now: &Facts) {
        let backend = |name: &str| name.split('/').next().unwrap_or_default().to_owned();
        let has = |facts: &Facts, name: &str| facts.keys().any(|other| backend(other) == backend(name));
        let changes = changes(then, now);
        self.groups = now.keys().filter(|name| !changes.contains_key(*name)).count();
        for (name, text) in changes {
            let on_both = has(then, &name) && has(now, &name);
            if on_both { &mut self.differences } else { &mut self.remarks }.push(text);
        }
    }

    fn times(&mut self, then: &Record, now: &Record, margin: f64) {
        if let Err(reason) = gate::check_baseline(then, now) {
            return self.remarks.push(format!("times are not compared: {reason}"));
        }
        for ours in now.measurements.iter().filter(|m| !m.stretches.is_empty()) {
            let Ok(task) = Task::parse(ours.task.clone()) else { continue };
            match gate::against_baseline(&task, ours, &now.protocol, then, Demand::NotInferior(margin)) {
                Ok(ruling) => {
                    let slower = ruling.reason.as_ref().map(|reason| format!("{}: {reason}", ruling.task));
                    self.differences.extend(slower);
                    self.rulings.push(ruling);
                }
                Err(LabError::TooFew { .. }) => {
                    self.remarks.push(format!("too few times of {task} to compare"))
                }
                Err(error) => self.differences.push(error.to_string()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Mode, Protocol};
    use std::io::Write;

    fn bundle() -> Bundle {
        let bench = Record::new(Protocol::new(Mode::Sustained, 0.1), None);
        Bundle {
            manifest: Manifest::new(Value::Null).unwrap(),
            doctor: Value::Null,
            verify: Value::Null,
            bench,
        }
    }

    fn zipped(bytes: &[u8]) -> Vec<u8> {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(bytes).unwrap();
        gzip.finish().unwrap()
    }

    #[track_caller]
    fn refused(bytes: &[u8], words: &str) {
        let text = Bundle::unpack(bytes).unwrap_err();
        assert!(text.contains(words), "`{text}` instead of `{words}`");
    }

    #[test]
    fn bundles_come_back_whole() {
        let (folder, bundle) = (tempfile::tempdir().unwrap(), bundle());
        let path = folder.path().join("artifacts").join(bundle.manifest.file_name());
        bundle.save(&path).unwrap();
        assert_eq!(Bundle::load(&path).unwrap(), bundle);
        assert!(Bundle::load(Path::new("/no/such/bundle")).is_err());
        let mut bytes = fs::read(&path).unwrap();
        refused(&bytes[..bytes.len() / 2], "cannot be read");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        assert!(Bundle::unpack(&bytes[..]).is_err(), "every bit counts");
    }

    #[test]
    fn bundles_that_cannot_be_are_refused() {
        refused(b"PK\x03\x04 not gzip", "cannot be read");
        refused(&zipped(&vec![0; MOST_BYTES as usize + 1]), "more than 64 MiB");
        let text = serde_json::to_string(&bundle()).unwrap();
        for (from, to, words) in [
            (FORMAT, "flashcore-bench", "format"),
            ("\"system\":\"", "\"system\":\"\\u001b[2J", "control characters"),
            ("\"created\"", "\"run\"", "damaged"),
            ("\"verify\"", "\"../verify\"", "damaged"),
            ("\"seconds\":0.1", "\"seconds\":-1.0", "the length of a turn"),
            ("{", "[", "damaged"),
        ] {
            refused(&zipped(text.replacen(from, to, 1).as_bytes()), words);
        }
    }
}
