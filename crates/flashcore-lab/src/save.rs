//! Atomic file writes: results, tables, bundles, and what the command line writes.
//!
//! A file is written next to its destination, synced to disk and renamed, so readers see the old or the new one, and a
//! process that is stopped at any moment leaves one of them.

use std::{
    fs,
    io::{self, Write},
    path::Path,
};

use tempfile::NamedTempFile;

/// Writes `parts`, one behind another, to a file that must not be there yet.
pub fn create(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    written(path, parts)?.persist_noclobber(path).map(drop).map_err(|e| e.error)
}

/// Writes `parts`, one behind another; a file that is there gives way, and its permissions stay.
pub fn replace(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let file = written(path, parts)?;
    if let Ok(old) = fs::metadata(path) {
        file.as_file().set_permissions(old.permissions())?;
    }
    file.persist(path).map(drop).map_err(|e| e.error)
}

/// Whether two paths lead to one file, be it there or not.
pub fn same(a: &Path, b: &Path) -> bool {
    let real = |path: &Path| {
        let beside = || Some(folder(path).canonicalize().ok()?.join(path.file_name()?));
        path.canonicalize().ok().or_else(beside)
    };
    real(a).is_some_and(|a| real(b) == Some(a))
}

/// A file in the folder of `path` that removes itself unless it is moved to its place.
pub fn temporary(path: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".flashcore-");
    // As any new file has them; by itself it would be for its owner alone.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder(path))
}

/// The folder that a file is in.
pub fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn written(path: &Path, parts: &[&[u8]]) -> io::Result<NamedTempFile> {
    let mut file = temporary(path)?;
    parts.iter().try_for_each(|part| file.write_all(part))?;
    file.as_file().sync_all()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_created_once_and_replaced_whole() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("a");
        create(&path, &[b"one", b" two"]).unwrap();
        let error = create(&path, &[b"three"]).unwrap_err();
        assert_eq!(
            (error.kind(), &fs::read(&path).unwrap()[..]),
            (io::ErrorKind::AlreadyExists, &b"one two"[..])
        );
        // Who has the old file open keeps it.
        let link = place.path().join("b");
        fs::hard_link(&path, &link).unwrap();
        replace(&path, &[b"three"]).unwrap();
        assert_eq!([fs::read(&path).unwrap(), fs::read(&link).unwrap()], [&b"three"[..], b"one two"]);
        assert!(replace(&place.path().join("no/such"), &[b""]).is_err());
        assert!(replace(place.path(), &[b""]).is_err(), "a folder is no file");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 2, "no temporary files are left");
    }

    #[cfg(unix)]
    #[test]
    fn permissions_are_those_of_any_file_or_stay() {
        use std::os::unix::fs::PermissionsExt;
        let place = tempfile::tempdir().unwrap();
        let [path, plain] = ["a", "b"].map(|name| place.path().join(name));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        fs::write(&plain, "").unwrap();
        create(&path, &[]).unwrap();
        assert_eq!(mode(&path), mode(&plain));
        fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        replace(&path, &[]).unwrap();
        assert_eq!(mode(&path) & 0o777, 0o640);
    }
}
