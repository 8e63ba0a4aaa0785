//! Exactly what was run: hashes of the program and of the kernels it builds. `tune` and `repro` keep them.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    path::Path,
};

use flashcore_kernels::covering_set;
use sha2::{Digest, Sha256};

use crate::error::LabError;

/// Bytes that are hashed at a time.
const PIECE: usize = 1 << 20;

/// A SHA-256 in hexadecimal digits.
pub fn hash(bytes: &[u8]) -> String {
    hex(Sha256::digest(bytes).as_slice())
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The hash of a file.
pub fn hash_file(path: &Path) -> Result<String, LabError> {
    digest(path).map_err(LabError::io("read", path))
}

fn digest(path: &Path) -> io::Result<String> {
    let (mut file, mut hasher, mut piece) = (File::open(path)?, Sha256::new(), vec![0; PIECE]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(hex(hasher.finalize().as_slice())),
            n => hasher.update(&piece[..n]),
        }
    }
}

/// The hash of this program; `None` where its file cannot be read.
pub fn program() -> Option<String> {
    digest(&std::env::current_exe().ok()?).ok()
}

/// The hash of the PTX of every kernel of the covering set, by name.
pub fn kernels() -> Result<BTreeMap<String, String>, LabError> {
    let failed = |e: &dyn std::fmt::Display| LabError::Failed {
        competitor: "the covering set".to_owned(),
        reason: e.to_string(),
    };
    let members = covering_set()?;
    let sign = |member: &flashcore_kernels::Member| {
        let program = member.plan().map_err(|e| failed(&e))?.kernel().program().map_err(|e| failed(&e))?;
        Ok((program.entry().to_string(), hash(program.text().as_bytes())))
    };
    members.iter().map(sign).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_sha256() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(hash(b""), empty);
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(hash_file(file.path()).unwrap(), empty);
        assert!(hash_file("/no/such/file".as_ref()).is_err());
        assert_eq!(program().map(|hash| hash.len()), Some(64));
    }

    #[test]
    fn every_kernel_is_signed() {
        let kernels = kernels().unwrap();
        assert!(kernels.len() >= 36 && kernels.values().all(|hash| hash.len() == 64), "{}", kernels.len());
    }
}
