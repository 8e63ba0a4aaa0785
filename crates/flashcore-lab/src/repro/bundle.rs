//! The file: a gzipped tar of a manifest and the answers that it names by their hashes.
//!
//! Nothing of an archive reaches the file system, and nothing of it is believed: it is read into memory up to a limit,
//! and refused if an entry is anything but one of the known plain files.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    path::Path,
    process::Command,
};

use flashcore_kernels::untrusted::check_text;
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tar::{Archive, Builder, EntryType, Header};

use super::{BundleError, Fault};
use crate::{
    error::LabError,
    machine::{self, Machine},
    save, signature,
};

const MANIFEST: &str = "manifest.json";
/// What `doctor` said.
pub const DOCTOR: &str = "doctor.json";
/// What `verify` said.
pub const VERIFY: &str = "verify.json";
/// The result file of `bench`.
pub const BENCH: &str = "bench.json";
/// The files beside the manifest.
const FILES: [&str; 3] = [DOCTOR, VERIFY, BENCH];

/// What manifests are called inside, with the version of their format.
const FORMAT: &str = "flashcore-repro-2";
/// Most bytes of a bundle, packed and unpacked.
pub(super) const MOST_BYTES: u64 = 64 << 20;
/// Longest text in a manifest.
const LONGEST_TEXT: usize = 300;

/// Texts by name.
pub type Facts = BTreeMap<String, String>;

/// Everything that a bundle holds.
#[derive(Clone, PartialEq, Debug)]
pub struct Bundle {
    /// What was run, and where.
    pub manifest: Manifest,
    /// The answers by name.
    pub files: BTreeMap<&'static str, Vec<u8>>,
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
    /// What was asked for; who reads a bundle has to check it.
    pub settings: Value,
    /// SHA-256 of the PTX of every kernel of the covering set.
    pub kernels: Facts,
    /// SHA-256 of the other files.
    pub files: Facts,
}

impl Manifest {
    fn parse(bytes: &[u8]) -> Result<Self, Fault> {
        let manifest: Self = serde_json::from_slice(bytes).map_err(|e| Fault::content(MANIFEST, e))?;
        if manifest.format != FORMAT {
            return Err(Fault::content(MANIFEST, format!("its format is not {FORMAT:?}")));
        }
        let facts = [&manifest.environment, &manifest.kernels, &manifest.files].into_iter().flatten();
        let mut texts = facts.flat_map(|(name, text)| [name, text]).chain([&manifest.created]);
        let checked = texts.try_for_each(|text| check_text(text, LONGEST_TEXT));
        drop(texts);
        checked.map_err(|reason| Fault::content(MANIFEST, reason))?;
        Ok(manifest)
    }

    /// The name of the bundle: commit and time.
    pub fn file_name(&self) -> String {
        let commit = self.environment.get("commit").and_then(|name| name.get(..12)).unwrap_or("unknown");
        let time: String = self.created.chars().filter(char::is_ascii_alphanumeric).collect();
        format!("flashcore_{commit}_{time}.tar.gz")
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
    /// Answers of this program on this machine.
    pub fn new(settings: Value, files: BTreeMap<&'static str, Vec<u8>>) -> Result<Self, LabError> {
        let hashes = files.iter().map(|(name, bytes)| ((*name).to_owned(), signature::hash(bytes)));
        let manifest = Manifest {
            format: FORMAT.to_owned(),
            created: machine::now(),
            environment: environment(),
            settings,
            kernels: signature::kernels()?,
            files: hashes.collect(),
        };
        Ok(Self { manifest, files })
    }

    /// Writes it to `path`; whoever reads an old one meanwhile keeps it.
    pub fn save(&self, path: &Path) -> Result<(), LabError> {
        let folder = save::folder(path);
        fs::create_dir_all(folder).map_err(LabError::io("make", folder))?;
        let packed = self.pack().and_then(|bytes| save::replace(path, &[&bytes]));
        packed.map_err(LabError::io("write", path))
    }

    fn pack(&self) -> io::Result<Vec<u8>> {
        let manifest = serde_json::to_vec_pretty(&self.manifest)?;
        let mut builder = Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
        let files = self.files.iter().map(|(name, bytes)| (*name, bytes));
        for (name, bytes) in files.chain([(MANIFEST, &manifest)]) {
            let mut header = Header::new_gnu();
            header.set_size(bytes.len() as u64);
            header.set_mode(0o644);
            builder.append_data(&mut header, name, &bytes[..])?;
        }
        builder.into_inner()?.finish()
    }

    /// Reads a bundle that is whole.
    pub fn load(path: &Path) -> Result<Self, LabError> {
        let read = || Self::unpack(&read_all(File::open(path)?)?);
        read().map_err(|fault| BundleError { path: path.to_owned(), fault }.into())
    }

    fn unpack(bytes: &[u8]) -> Result<Self, Fault> {
        // The limit is on what comes out: a few bytes can unpack to anything.
        let tar = read_all(GzDecoder::new(bytes))?;
        let mut entries = BTreeMap::new();
        for entry in Archive::new(&tar[..]).entries()? {
            let mut entry = entry?;
            let told = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            let name = FILES.into_iter().chain([MANIFEST]).find(|name| *name == told);
            let plain = entry.header().entry_type() == EntryType::Regular;
            let name = name.filter(|name| plain && !entries.contains_key(name));
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes)?;
            entries.insert(name.ok_or(Fault::Entry(told))?, bytes);
        }
        let manifest = Manifest::parse(&entries.remove(MANIFEST).ok_or(Fault::File(MANIFEST))?)?;
        let packed = |name: &&str| {
            let hash = entries.get(name).map(|bytes| signature::hash(bytes));
            hash.is_some() && hash.as_ref() == manifest.files.get(*name)
        };
        match FILES.into_iter().find(|name| !packed(name)) {
            Some(name) => Err(Fault::File(name)),
            None => Ok(Self { manifest, files: entries }),
        }
    }
}

/// All there is to read, if that is not too much.
fn read_all(from: impl Read) -> Result<Vec<u8>, Fault> {
    let mut bytes = Vec::new();
    from.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MOST_BYTES { Err(Fault::Size) } else { Ok(bytes) }
}

/// Whether bundles can be written to `folder`, which need not be there yet; asked before anything is measured.
pub fn check_folder(folder: &Path) -> Result<(), LabError> {
    let there = folder.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    save::temporary(&there.join("bundle")).map(drop).map_err(LabError::io("make files in", folder))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn bundle() -> Bundle {
        let files = FILES.map(|name| (name, name.as_bytes().to_vec()));
        Bundle::new(Value::Null, files.into()).unwrap()
    }

    fn zipped(bytes: &[u8]) -> Vec<u8> {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(bytes).unwrap();
        gzip.finish().unwrap()
    }

    /// An archive of one raw entry: what it is called and is, how large it claims to be.
    fn archive(name: &str, kind: EntryType, size: u64) -> Vec<u8> {
        let mut header = Header::new_ustar();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(kind);
        header.set_size(size);
        header.set_cksum();
        zipped(&[header.as_bytes(), &[0; 1536][..]].concat())
    }

    #[track_caller]
    fn refused(bytes: &[u8], words: &str) {
        let text = Bundle::unpack(bytes).unwrap_err().to_string();
        assert!(text.contains(words), "`{text}` instead of `{words}`");
    }

    #[test]
    fn bundles_come_back_whole() {
        let (folder, bundle) = (tempfile::tempdir().unwrap(), bundle());
        let path = folder.path().join("artifacts").join(bundle.manifest.file_name());
        bundle.save(&path).unwrap();
        assert_eq!(Bundle::load(&path).unwrap(), bundle);
        assert!(Bundle::load(Path::new("/no/such/bundle")).is_err());
        let bytes = fs::read(&path).unwrap();
        refused(&bytes[..bytes.len() / 2], "cannot be read");
    }

    #[test]
    fn only_the_known_plain_files_are_taken() {
        for name in
            ["../manifest.json", "/etc/passwd", "a/../../b", "./manifest.json", "manifest.json/x", "x"]
        {
            refused(&archive(name, EntryType::Regular, 1), "not a plain file of a bundle");
        }
        for kind in
            [EntryType::Symlink, EntryType::Link, EntryType::Char, EntryType::Fifo, EntryType::Directory]
        {
            refused(&archive(MANIFEST, kind, 0), "not a plain file");
        }
        refused(&archive(DOCTOR, EntryType::Regular, 1), "manifest.json is missing");
        refused(&archive(DOCTOR, EntryType::Regular, 8 << 30), "cannot be read");
        refused(b"PK\x03\x04 not a tar", "cannot be read");
        refused(&zipped(&vec![0; MOST_BYTES as usize + 1]), "more than 64 MiB");
    }

    #[test]
    fn files_are_those_that_the_manifest_names() {
        let mut changed = bundle();
        changed.files.insert(BENCH, b"other".to_vec());
        refused(&changed.pack().unwrap(), "bench.json is missing or is not the file");
        changed.files.remove(BENCH);
        refused(&changed.pack().unwrap(), "bench.json is missing");
    }

    #[test]
    fn manifests_that_cannot_be_are_refused() {
        let text = serde_json::to_string(&bundle().manifest).unwrap();
        for (from, to, words) in [
            (FORMAT, "flashcore-bench", "format"),
            ("\"system\":\"", "\"system\":\"\\u001b[2J", "control characters"),
            ("\"created\"", "\"run\"", "damaged"),
            ("{", "[", "damaged"),
        ] {
            let error = Manifest::parse(text.replacen(from, to, 1).as_bytes()).unwrap_err().to_string();
            assert!(error.contains(words), "`{error}` instead of `{words}`");
        }
    }
}
