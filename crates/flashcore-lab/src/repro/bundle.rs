//! Packing and unpacking: a gzipped tar of a few known files with a checksum beside it.
//!
//! Nothing of an archive reaches the file system. It is read into memory, entry by entry, and refused as soon as a name
//! is not one of [`PARTS`], an entry is not a plain file, or there is more than any bundle has.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
};

use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use tar::{Archive, Builder, EntryType, Header};

use super::{BundleError, Fault};
use crate::{error::LabError, save, signature};

/// What a bundle is made of; all but the last are always there.
pub const PARTS: [&str; 5] = [MANIFEST, DOCTOR, VERIFY, BENCH, PROFILE];
/// What was run, and where.
pub const MANIFEST: &str = "manifest.json";
/// What `doctor` said.
pub const DOCTOR: &str = "doctor.json";
/// What `verify` said.
pub const VERIFY: &str = "verify.json";
/// The result file of `bench`.
pub const BENCH: &str = "bench.json";
/// What `profile` said, where it could say anything.
pub const PROFILE: &str = "profile.json";

/// Largest bundle that is read, packed and unpacked.
const MOST_PACKED: u64 = 64 << 20;
const MOST_UNPACKED: u64 = 256 << 20;
/// Largest part.
const MOST_PART: u64 = 64 << 20;
/// What every file of an archive may be read by.
const MODE: u32 = 0o644;

/// The parts of a bundle by name.
pub type Parts = BTreeMap<String, Vec<u8>>;

/// Writes `parts` to `path` and its checksum beside it.
pub fn pack(parts: &Parts, path: &Path) -> Result<(), LabError> {
    let failed = |e| LabError::io("write", path)(e);
    let bytes = packed(parts).map_err(failed)?;
    let folder = save::folder(path);
    fs::create_dir_all(folder).map_err(LabError::io("make", folder))?;
    // The checksum comes last: a bundle without one was not finished.
    save::replace(path, &[&bytes]).map_err(failed)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let line = format!("{}  {name}\n", signature::hash(&bytes));
    let beside = checksum_path(path);
    save::replace(&beside, &[line.as_bytes()]).map_err(LabError::io("write", &beside))
}

fn packed(parts: &Parts) -> std::io::Result<Vec<u8>> {
    let mut builder = Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
    for (name, bytes) in parts {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_size(bytes.len() as u64);
        header.set_mode(MODE);
        builder.append_data(&mut header, name, &bytes[..])?;
    }
    let mut gzip = builder.into_inner()?;
    gzip.flush()?;
    gzip.finish()
}

/// Whether bundles can be written to `folder`, which need not be there yet; asked before anything is measured.
pub fn check_folder(folder: &Path) -> Result<(), LabError> {
    let there = folder.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    save::temporary(&there.join("bundle")).map(drop).map_err(LabError::io("make files in", folder))
}

fn checksum_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".sha256");
    name.into()
}

/// Reads a bundle whose checksum is right.
pub fn unpack(path: &Path) -> Result<Parts, LabError> {
    let read = || {
        let bytes = read_limited(File::open(path)?, MOST_PACKED, "bytes")?;
        check_sum(path, &bytes)?;
        parts(&bytes)
    };
    read().map_err(|fault| BundleError { path: path.to_owned(), fault }.into())
}

/// All there is to read, if it is at most `most` bytes.
fn read_limited(from: impl Read, most: u64, what: &'static str) -> Result<Vec<u8>, Fault> {
    let mut bytes = Vec::new();
    from.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most { Err(Fault::TooMuch { what, most }) } else { Ok(bytes) }
}

fn check_sum(path: &Path, bytes: &[u8]) -> Result<(), Fault> {
    const LONGEST: u64 = 4096;
    let beside = checksum_path(path);
    let missing = || Fault::NoChecksum(beside.clone());
    let file = File::open(&beside).map_err(|_| missing())?;
    let text = String::from_utf8(read_limited(file, LONGEST, "bytes of checksum")?).map_err(|_| missing())?;
    let expected = text.split_whitespace().next().unwrap_or_default().to_ascii_lowercase();
    if expected.len() != 64 || !expected.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(missing());
    }
    let found = signature::hash(bytes);
    if found == expected { Ok(()) } else { Err(Fault::Checksum { expected, found }) }
}

/// The parts of an archive.
fn parts(bytes: &[u8]) -> Result<Parts, Fault> {
    // The limit is on what comes out: a few bytes can unpack to anything.
    let limited = GzDecoder::new(bytes).take(MOST_UNPACKED);
    let mut archive = Archive::new(limited);
    let mut parts = Parts::new();
    for entry in archive.entries()? {
        let entry = entry?;
        let name = name(&entry.path_bytes())?;
        if entry.header().entry_type() != EntryType::Regular {
            return Err(Fault::Kind(name));
        }
        if parts.contains_key(&name) {
            return Err(Fault::Twice(name));
        }
        let size = entry.size();
        if size > MOST_PART {
            return Err(Fault::TooMuch { what: "bytes in a part", most: MOST_PART });
        }
        let bytes = read_limited(entry, MOST_PART, "bytes in a part")?;
        if bytes.len() as u64 != size {
            return Err(Fault::TooMuch { what: "bytes unpacked", most: MOST_UNPACKED });
        }
        parts.insert(name, bytes);
    }
    let missing = PARTS[..PARTS.len() - 1].iter().find(|part| !parts.contains_key(**part));
    missing.map_or(Ok(parts), |part| Err(Fault::Missing(part)))
}

/// A name that is one of the parts; nothing else can be in a bundle, least of all a way out of it.
fn name(bytes: &[u8]) -> Result<String, Fault> {
    let name = String::from_utf8_lossy(bytes).into_owned();
    if PARTS.contains(&name.as_str()) { Ok(name) } else { Err(Fault::Name(name)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    fn good() -> Parts {
        PARTS.iter().map(|part| ((*part).to_owned(), format!("{{\"{part}\":1}}").into_bytes())).collect()
    }

    /// An archive of raw entries: name, kind, size told, contents.
    fn archive(entries: &[(&str, EntryType, u64, &[u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (name, kind, size, contents) in entries {
            let mut header = Header::new_ustar();
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_entry_type(*kind);
            header.set_size(*size);
            header.set_mode(MODE);
            if kind.is_symlink() || kind.is_hard_link() {
                header.as_old_mut().linkname[..11].copy_from_slice(b"/etc/passwd");
            }
            header.set_cksum();
            bytes.extend_from_slice(header.as_bytes());
            bytes.extend_from_slice(contents);
            bytes.resize(bytes.len().next_multiple_of(512), 0);
        }
        bytes.resize(bytes.len() + 1024, 0);
        zipped(&bytes)
    }

    fn zipped(bytes: &[u8]) -> Vec<u8> {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
        gzip.write_all(bytes).unwrap();
        gzip.finish().unwrap()
    }

    #[track_caller]
    fn refused(bytes: &[u8], words: &str) {
        let text = parts(bytes).unwrap_err().to_string();
        assert!(text.contains(words), "`{text}` instead of `{words}`");
    }

    #[test]
    fn bundles_come_back_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("artifacts/flashcore_x.tar.gz");
        pack(&good(), &path).unwrap();
        assert_eq!(unpack(&path).unwrap(), good());
        // Who reads the old bundle meanwhile keeps it.
        let link = folder.path().join("old.tar.gz");
        fs::hard_link(&path, &link).unwrap();
        let old = fs::read(&link).unwrap();
        let mut without = good();
        without.remove(PROFILE);
        pack(&without, &path).unwrap();
        assert_eq!(unpack(&path).unwrap(), without, "a profile need not be there");
        assert_eq!(fs::read(&link).unwrap(), old);
    }

    #[test]
    fn a_bundle_must_be_the_one_that_was_promised() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("b.tar.gz");
        pack(&good(), &path).unwrap();
        let refused = |words: &str| {
            let text = unpack(&path).unwrap_err().to_string();
            assert!(text.contains(words), "`{text}` instead of `{words}`");
        };
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, &bytes).unwrap();
        refused("was promised");
        fs::write(checksum_path(&path), "0123  b.tar.gz").unwrap();
        refused("no checksum");
        fs::write(checksum_path(&path), vec![b'a'; 5000]).unwrap();
        refused("checksum");
        fs::remove_file(checksum_path(&path)).unwrap();
        refused("no checksum");
        assert!(unpack(Path::new("/no/such/bundle")).is_err());
    }

    #[test]
    fn ways_out_of_the_archive_are_refused() {
        for name in
            ["../manifest.json", "/etc/passwd", "a/../../b", "./manifest.json", "manifest.json/x", "", "x"]
        {
            refused(&archive(&[(name, EntryType::Regular, 1, b"x")]), "plain names");
        }
    }

    #[test]
    fn only_plain_files_are_taken() {
        for kind in [
            EntryType::Symlink,
            EntryType::Link,
            EntryType::Char,
            EntryType::Block,
            EntryType::Fifo,
            EntryType::Directory,
            EntryType::Continuous,
            EntryType::GNUSparse,
        ] {
            let text = parts(&archive(&[(MANIFEST, kind, 0, b"")])).unwrap_err().to_string();
            assert!(text.contains("plain file") || text.contains("cannot be read"), "{kind:?}: {text}");
        }
    }

    #[test]
    fn duplicates_and_gaps_are_refused() {
        let one = (MANIFEST, EntryType::Regular, 1, &b"x"[..]);
        refused(&archive(&[one, one]), "twice");
        refused(&archive(&[one]), "missing");
        refused(&archive(&[]), "missing");
        refused(b"", "cannot be read");
        refused(b"PK\x03\x04 not a tar", "cannot be read");
        refused(&zipped(&[0xff; 4096]), "cannot be read");
    }

    #[test]
    fn sizes_are_limited_whatever_they_claim_to_be() {
        refused(&archive(&[(MANIFEST, EntryType::Regular, MOST_PART + 1, b"")]), "bytes in a part");
        refused(&archive(&[(MANIFEST, EntryType::Regular, 8 << 30, b"")]), "bytes in a part");
        let short = parts(&archive(&[(MANIFEST, EntryType::Regular, 60 << 20, b"x")])).unwrap_err();
        assert!(matches!(short, Fault::Io(_) | Fault::TooMuch { .. }), "{short}");
    }

    #[test]
    fn bombs_do_not_go_off() {
        // Names that lead nowhere, for ever: refused at the first.
        let names: Vec<_> = (0..50_000).map(|_| ("x", EntryType::Regular, 0, &b""[..])).collect();
        refused(&archive(&names), "plain names");
        // A part of zeros that unpacks to a thousand times its size, told honestly: too large.
        let mut head = Header::new_ustar();
        head.as_old_mut().name[..MANIFEST.len()].copy_from_slice(MANIFEST.as_bytes());
        head.set_entry_type(EntryType::Regular);
        head.set_size(MOST_UNPACKED);
        head.set_cksum();
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(head.as_bytes()).unwrap();
        io::copy(&mut io::repeat(0).take(1 << 24), &mut gzip).unwrap();
        refused(&gzip.finish().unwrap(), "bytes in a part");
    }
}
