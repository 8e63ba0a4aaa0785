//! Machine code kept on disk: one checksummed file per kernel in a folder that only its user can write.
//!
//! `compile.rs` looks here first and stores what it built; the command line lists, verifies and clears. A bad entry
//! is a miss, never a wrong kernel and never a failed launch. The checksum guards against damage, not against an
//! attacker who can write the folder; that is what the folder's permissions are for.

mod entry;
mod folder;
mod key;

pub use entry::{Damage, Stored};
pub use key::Key;

use folder::Folder;
use std::{
    ffi::OsString,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// Room that a cache takes unless told otherwise: some two thousand kernels.
const DEFAULT_MAX_BYTES: u64 = 512 << 20;
/// The variable that overrides it.
const MAX_MIB: &str = "FLASHCORE_CACHE_MAX_MIB";
/// A temporary file this old was left by a process that died.
const ABANDONED: Duration = Duration::from_secs(3600);

/// Why a cache cannot be used at all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// No place for a cache is known.
    #[error("no cache folder: set FLASHCORE_CACHE_DIR, XDG_CACHE_HOME or HOME")]
    NoFolder,
    /// The folder could be tampered with.
    #[error("cache folder {} is refused: {reason}", path.display())]
    Refused {
        /// The folder.
        path: PathBuf,
        /// What is wrong, and how to put it right.
        reason: String,
    },
    /// The system said no.
    #[error("cache {}: {reason}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        reason: String,
    },
    /// An unknown mode.
    #[error("FLASHCORE_CACHE is {given:?}: set it to `off` or `verify`, or leave it unset")]
    Use {
        /// What was set.
        given: OsString,
    },
    /// A limit that is none.
    #[error("{MAX_MIB} is {given:?}: set it to a whole number of MiB, or leave it unset")]
    Limit {
        /// What was set.
        given: OsString,
    },
    /// An entry that can never fit.
    #[error("an entry of {bytes} bytes exceeds the cache's limit of {limit}")]
    TooLarge {
        /// The entry's size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
}

impl CacheError {
    fn io(path: &Path, error: io::Error) -> Self {
        Self::Io { path: path.to_owned(), reason: error.to_string() }
    }
}

/// How the user wants the cache used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Kernels are kept and found again.
    Kept,
    /// Nothing is kept.
    Off,
    /// What is found is compiled again and compared.
    Verify,
}

impl Use {
    /// What `FLASHCORE_CACHE` says.
    pub fn from_env() -> Result<Self, CacheError> {
        Self::named(std::env::var_os("FLASHCORE_CACHE").unwrap_or_default())
    }

    fn named(given: OsString) -> Result<Self, CacheError> {
        match given.to_str() {
            Some("") => Ok(Self::Kept),
            Some("off") => Ok(Self::Off),
            Some("verify") => Ok(Self::Verify),
            _ => Err(CacheError::Use { given }),
        }
    }
}

/// Limits of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// Most bytes of all entries together; the entries not used for longest go first.
    pub max_bytes: u64,
    /// The user whose files are trusted.
    pub owner: u32,
}

impl Default for CacheOptions {
    /// 512 MiB; files of this process's user.
    fn default() -> Self {
        Self { max_bytes: DEFAULT_MAX_BYTES, owner: folder::current_user() }
    }
}

/// An entry as listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryInfo {
    /// Its key.
    pub key: Key,
    /// Its size on disk.
    pub bytes: u64,
    /// When it was last stored or used.
    pub used: SystemTime,
}

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: Folder,
    options: CacheOptions,
}

impl Cache {
    /// The user's cache: `$FLASHCORE_CACHE_DIR`, `$XDG_CACHE_HOME/flashcore` or `~/.cache/flashcore`, with
    /// `$FLASHCORE_CACHE_MAX_MIB` as its limit.
    pub fn open_default() -> Result<Self, CacheError> {
        Use::from_env()?;
        let var = |name: &str| std::env::var_os(name);
        let max_bytes = default_limit(var)?;
        Self::open(&default_folder(var)?, CacheOptions { max_bytes, ..CacheOptions::default() })
    }

    /// Whether the environment disables it: `FLASHCORE_CACHE=off`.
    pub fn is_off() -> bool {
        Use::from_env() == Ok(Use::Off)
    }

    /// The cache at `folder`, created for this user alone if it is not there.
    pub fn open(folder: &Path, options: CacheOptions) -> Result<Self, CacheError> {
        Ok(Self { folder: Folder::open(folder, options.owner)?, options })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Looks up an entry; `Err` says what is wrong with one that cannot be used, which counts as a miss.
    pub fn get(&self, key: &Key) -> Result<Option<Stored>, Damage> {
        let Some(mut file) = self.folder.open_entry(&key.file_name())? else { return Ok(None) };
        let stored = entry::read(&mut file, key)?;
        // Best effort: the date only decides what is evicted first.
        let _ = file.set_modified(SystemTime::now());
        Ok(Some(stored))
    }

    /// Stores an entry: written under another name, then renamed, so that no reader ever sees half of it.
    pub fn put(&self, key: &Key, stored: &Stored) -> Result<(), CacheError> {
        self.folder.check()?;
        let bytes = entry::encode(key, stored);
        if bytes.len() as u64 > self.options.max_bytes {
            return Err(CacheError::TooLarge { bytes: bytes.len() as u64, limit: self.options.max_bytes });
        }
        let (temporary, mut file) = self.folder.create_temporary()?;
        let place = self.path().join(key.file_name());
        let written = file.write_all(&bytes).and_then(|()| fs::rename(&temporary, &place));
        if let Err(error) = written {
            // The error that matters is the one above.
            let _ = fs::remove_file(&temporary);
            return Err(CacheError::io(&place, error));
        }
        self.evict(key)
    }

    /// All entries, the least recently used first.
    pub fn list(&self) -> Result<Vec<EntryInfo>, CacheError> {
        self.folder.check()?;
        let mut entries: Vec<EntryInfo> = self
            .files()?
            .filter_map(|(name, meta)| {
                let (key, used) = (Key::from_file_name(&name)?, meta.modified().ok()?);
                Some(EntryInfo { key, bytes: meta.len(), used })
            })
            .collect();
        entries.sort_by_key(|entry| entry.used);
        Ok(entries)
    }

    /// Reads every entry and says what is wrong with it, if anything.
    pub fn verify(&self) -> Result<Vec<(EntryInfo, Option<Damage>)>, CacheError> {
        let check = |info: EntryInfo| {
            let read = self.folder.open_entry(&info.key.file_name()).and_then(|file| match file {
                Some(mut file) => entry::read(&mut file, &info.key).map(drop),
                None => Ok(()), // removed by somebody else meanwhile
            });
            (info, read.err())
        };
        Ok(self.list()?.into_iter().map(check).collect())
    }

    /// Removes all entries and abandoned temporary files; returns how many entries there were.
    pub fn clear(&self) -> Result<usize, CacheError> {
        let entries = self.list()?;
        entries.iter().try_for_each(|entry| self.remove(&entry.key))?;
        self.sweep()?;
        Ok(entries.len())
    }

    /// Keeps the cache below its limit, sparing `newest`.
    fn evict(&self, newest: &Key) -> Result<(), CacheError> {
        let entries = self.list()?;
        let mut total: u64 = entries.iter().map(|entry| entry.bytes).sum();
        for entry in entries.iter().filter(|entry| entry.key != *newest) {
            if total <= self.options.max_bytes {
                break;
            }
            self.remove(&entry.key)?;
            total -= entry.bytes;
        }
        self.sweep()
    }

    fn sweep(&self) -> Result<(), CacheError> {
        let now = SystemTime::now();
        let abandoned = |meta: &fs::Metadata| {
            meta.modified().ok().and_then(|at| now.duration_since(at).ok()).is_some_and(|age| age > ABANDONED)
        };
        for (name, _) in self.files()?.filter(|(name, meta)| Folder::is_temporary(name) && abandoned(meta)) {
            gone(&self.path().join(name))?;
        }
        Ok(())
    }

    fn remove(&self, key: &Key) -> Result<(), CacheError> {
        gone(&self.path().join(key.file_name()))
    }

    /// Names in the folder with what they are themselves, links not followed.
    fn files(&self) -> Result<impl Iterator<Item = (String, fs::Metadata)>, CacheError> {
        let entries = fs::read_dir(self.path()).map_err(|error| CacheError::io(self.path(), error))?;
        Ok(entries.flatten().filter_map(|entry| {
            let meta = entry.metadata().ok().filter(|meta| !meta.is_dir())?;
            Some((entry.file_name().into_string().ok()?, meta))
        }))
    }
}

/// Removes a file; it may already be gone.
fn gone(path: &Path) -> Result<(), CacheError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(CacheError::io(path, error)),
        _ => Ok(()),
    }
}

fn default_folder(var: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, CacheError> {
    let absolute = |name| var(name).map(PathBuf::from).filter(|path| path.is_absolute());
    if let Some(named) = var("FLASHCORE_CACHE_DIR").filter(|name| !name.is_empty()) {
        return std::path::absolute(&named).map_err(|error| CacheError::io(Path::new(&named), error));
    }
    let base = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
    base.map(|base| base.join("flashcore")).ok_or(CacheError::NoFolder)
}

fn default_limit(var: impl Fn(&str) -> Option<OsString>) -> Result<u64, CacheError> {
    let Some(given) = var(MAX_MIB).filter(|text| !text.is_empty()) else { return Ok(DEFAULT_MAX_BYTES) };
    let mib = given.to_str().and_then(|text| text.parse::<u64>().ok());
    mib.map(|mib| mib.saturating_mul(1 << 20)).ok_or(CacheError::Limit { given })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_is_one_that_is_known() {
        let named = |text: &str| Use::named(text.into());
        let known = [named(""), named("off"), named("verify")];
        assert_eq!(known, [Ok(Use::Kept), Ok(Use::Off), Ok(Use::Verify)]);
        assert_eq!(named("Off"), Err(CacheError::Use { given: "Off".into() }));
    }

    #[test]
    fn a_limit_is_a_number() {
        let limit = |text: &str| default_limit(|_| Some(text.into()));
        assert_eq!([default_limit(|_| None), limit("")], [Ok(512 << 20), Ok(512 << 20)]);
        assert_eq!(limit("3"), Ok(3 << 20));
        assert_eq!(limit(&u64::MAX.to_string()), Ok(u64::MAX));
        for text in ["1G", "-1", "1.5", " 3"] {
            let message = limit(text).unwrap_err().to_string();
            assert!(message.contains(text) && message.contains("MiB"), "{message}");
        }
    }

    #[test]
    fn the_folder_comes_from_the_environment_and_never_from_tmp() {
        let cases = [
            ("FLASHCORE_CACHE_DIR=/a XDG_CACHE_HOME=/b HOME=/c", Some("/a")),
            ("XDG_CACHE_HOME=/b HOME=/c", Some("/b/flashcore")),
            ("XDG_CACHE_HOME=relative HOME=/c", Some("/c/.cache/flashcore")),
            ("FLASHCORE_CACHE_DIR= HOME=/c", Some("/c/.cache/flashcore")),
            ("TMPDIR=/tmp", None),
            ("", None),
        ];
        for (vars, expected) in cases {
            let pairs = vars.split(' ').filter_map(|pair| pair.split_once('='));
            let var = |name: &str| pairs.clone().find(|(n, _)| *n == name).map(|(_, value)| value.into());
            assert_eq!(default_folder(var).ok(), expected.map(PathBuf::from), "{vars}");
        }
    }
}
