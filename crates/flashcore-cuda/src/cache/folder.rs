//! The cache's folder: opened only if nobody but its user can have written to it.

use super::{CacheError, Damage};
use std::{
    fs::{self, File, Metadata, OpenOptions},
    io::ErrorKind,
    path::{Path, PathBuf},
};

const TEMPORARY: &str = ".writing-";

/// A folder that passed the checks, and whose files are trusted.
#[derive(Clone, Debug)]
pub(super) struct Folder {
    path: PathBuf,
    owner: u32,
}

impl Folder {
    pub(super) fn open(path: &Path, owner: u32) -> Result<Self, CacheError> {
        let folder = Self { path: path.to_owned(), owner };
        if fs::symlink_metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound) {
            system::create_private(path).map_err(|error| CacheError::io(path, error))?;
        }
        folder.check()?;
        Ok(folder)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses a folder that is a link, somebody else's, or writable by others. Repeated before each use.
    pub(super) fn check(&self) -> Result<(), CacheError> {
        let refuse = |reason: String| Err(CacheError::Refused { path: self.path.clone(), reason });
        let meta = fs::symlink_metadata(&self.path).map_err(|error| CacheError::io(&self.path, error))?;
        if !meta.is_dir() {
            return refuse("it is a link or a file; name the folder itself".into());
        }
        if system::owner(&meta) != self.owner {
            return refuse(format!(
                "it belongs to user {}, not to user {}",
                system::owner(&meta),
                self.owner
            ));
        }
        if system::others_write(&meta) {
            let mode = system::mode(&meta);
            return refuse(format!(
                "others can write to it (mode {mode:o}); run `chmod 700 {}`",
                self.path.display()
            ));
        }
        let parent = self.path.parent().and_then(|parent| fs::metadata(parent).ok());
        if parent.is_some_and(|parent| system::others_replace(&parent)) {
            return refuse("anyone can write to its parent folder".into());
        }
        Ok(())
    }

    /// Opens an entry that is a plain file of the owner's; `None` where there is none.
    pub(super) fn open_entry(&self, name: &str) -> Result<Option<File>, Damage> {
        self.check().map_err(|error| Damage::Unreadable(error.to_string()))?;
        let path = self.path.join(name);
        let Some(seen) = found(fs::symlink_metadata(&path))? else { return Ok(None) };
        self.check_entry(&seen)?;
        let Some(file) = found(File::open(&path))? else { return Ok(None) };
        // What was opened must be what was looked at. If not, it was replaced in between: by a writer, or by a link.
        let opened = file.metadata().map_err(unreadable)?;
        Ok(system::same_file(&seen, &opened).then_some(file))
    }

    fn check_entry(&self, meta: &Metadata) -> Result<(), Damage> {
        if !meta.is_file() {
            return Err(Damage::NotAFile);
        }
        if system::owner(meta) != self.owner {
            return Err(Damage::Owner(system::owner(meta)));
        }
        if system::others_write(meta) { Err(Damage::Mode(system::mode(meta))) } else { Ok(()) }
    }

    /// A new file under an unpredictable, unused name.
    pub(super) fn create_temporary(&self) -> Result<(PathBuf, File), CacheError> {
        let path = self.path.join(format!("{TEMPORARY}{}-{:016x}", std::process::id(), random()));
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        system::private(&mut options);
        let file = options.open(&path).map_err(|error| CacheError::io(&path, error))?;
        Ok((path, file))
    }

    pub(super) fn is_temporary(name: &str) -> bool {
        name.starts_with(TEMPORARY)
    }
}

/// `None` for what is not there, or no longer.
fn found<T>(result: std::io::Result<T>) -> Result<Option<T>, Damage> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => other.map(Some).map_err(unreadable),
    }
}

fn unreadable(error: std::io::Error) -> Damage {
    Damage::Unreadable(error.to_string())
}

/// The standard library seeds each hasher from the system's randomness.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

/// The user this process acts as.
pub(super) fn current_user() -> u32 {
    system::current_user()
}

#[cfg(unix)]
mod system {
    use std::{
        fs::{DirBuilder, Metadata, OpenOptions},
        io,
        os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
        path::Path,
    };

    pub(super) fn create_private(path: &Path) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)
    }

    pub(super) fn private(options: &mut OpenOptions) {
        options.mode(0o600);
    }

    pub(super) fn owner(meta: &Metadata) -> u32 {
        meta.uid()
    }

    pub(super) fn mode(meta: &Metadata) -> u32 {
        meta.mode() & 0o7777
    }

    pub(super) fn others_write(meta: &Metadata) -> bool {
        meta.mode() & 0o022 != 0
    }

    /// Whether any user can put another folder in the place of one in this folder.
    pub(super) fn others_replace(meta: &Metadata) -> bool {
        const STICKY: u32 = 0o1000;
        meta.mode() & 0o002 != 0 && meta.mode() & STICKY == 0
    }

    pub(super) fn same_file(a: &Metadata, b: &Metadata) -> bool {
        (a.dev(), a.ino()) == (b.dev(), b.ino())
    }

    pub(super) fn current_user() -> u32 {
        unsafe extern "C" {
            safe fn geteuid() -> u32;
        }
        geteuid()
    }
}

/// Elsewhere owners and modes cannot be checked, so no folder is trusted and every kernel is compiled anew.
#[cfg(not(unix))]
mod system {
    use std::{
        fs::{Metadata, OpenOptions},
        io,
        path::Path,
    };

    pub(super) fn create_private(_: &Path) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "owners of files cannot be checked on this system"))
    }

    pub(super) fn private(_: &mut OpenOptions) {}

    pub(super) fn owner(_: &Metadata) -> u32 {
        u32::MAX
    }

    pub(super) fn mode(_: &Metadata) -> u32 {
        0
    }

    pub(super) fn others_write(_: &Metadata) -> bool {
        true
    }

    pub(super) fn others_replace(_: &Metadata) -> bool {
        true
    }

    pub(super) fn same_file(_: &Metadata, _: &Metadata) -> bool {
        false
    }

    pub(super) fn current_user() -> u32 {
        0
    }
}
