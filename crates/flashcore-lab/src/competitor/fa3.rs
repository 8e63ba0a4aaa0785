//! FlashAttention-3 as a peer: a folder with its library, which the Python process of [`super::torch`] loads.
//!
//! The library registers an operator with PyTorch; it is not part of FlashCore, and users say where theirs is.

use std::path::{self, Path, PathBuf};

use serde_json::{Value, json};

use crate::{error::LabError, signature};

/// The name used on the command line and in results.
pub const NAME: &str = "fa3";
/// The library, as it is or packed.
const LIBRARIES: [&str; 2] = ["fa3.so", "fa3.so.xz"];
/// The CUDA runtime that the library was linked with.
const RUNTIME: &str = "libcudart.so.12";
/// Digits of a hash that tell libraries apart.
const DIGITS: usize = 12;

/// The files of a folder.
#[derive(Clone, PartialEq, Debug)]
pub struct Library {
    path: PathBuf,
    runtime: PathBuf,
}

impl Library {
    /// What lies in `folder`, or what is missing there.
    pub fn find(folder: &Path) -> Result<Self, LabError> {
        let missing = |what: &str| LabError::Unavailable {
            competitor: NAME.to_owned(),
            reason: format!(
                "{} has no {what}; name a folder with {} and {RUNTIME}",
                folder.display(),
                LIBRARIES.join(" or ")
            ),
        };
        let whole = path::absolute(folder).map_err(LabError::io("find", folder))?;
        let file = |name: &str| Some(whole.join(name)).filter(|path| path.is_file());
        let path = LIBRARIES.into_iter().find_map(file).ok_or_else(|| missing(&LIBRARIES.join(" or ")))?;
        let runtime = file(RUNTIME).ok_or_else(|| missing(RUNTIME))?;
        Ok(Self { path, runtime })
    }

    /// Which library it is, for the record.
    pub fn describe(&self) -> Result<String, LabError> {
        let hash = signature::hash_file(&self.path)?;
        let name = self.path.file_name().unwrap_or_default().display();
        Ok(format!("FlashAttention-3 ({name}, SHA-256 {}…)", &hash[..DIGITS]))
    }

    /// What the process is asked.
    pub fn request(&self) -> Value {
        json!({ "op": "fa3", "library": self.path, "runtime": self.runtime })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_folder_is_taken_whole_or_says_what_it_lacks() {
        let folder = tempfile::tempdir().unwrap();
        let lacks = || Library::find(folder.path()).unwrap_err().to_string();
        assert!(lacks().contains("has no fa3.so or fa3.so.xz; name a folder"), "{}", lacks());
        fs::write(folder.path().join("fa3.so.xz"), b"").unwrap();
        assert!(lacks().contains("has no libcudart.so.12;"), "{}", lacks());
        fs::write(folder.path().join(RUNTIME), b"").unwrap();
        let packed = Library::find(folder.path()).unwrap();
        assert_eq!(packed.describe().unwrap(), "FlashAttention-3 (fa3.so.xz, SHA-256 e3b0c44298fc…)");
        fs::write(folder.path().join("fa3.so"), b"").unwrap();
        let found = Library::find(folder.path()).unwrap();
        assert!(found.path.ends_with("fa3.so"), "what is unpacked already is taken: {found:?}");
    }
}
