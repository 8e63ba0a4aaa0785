//! Folders that must not be trusted: refused with a reason, and compiling goes on without them.

use crate::{Scene, compile, compiler, options};
use flashcore_cuda::{
    Route,
    cache::{Cache, CacheError, CacheOptions},
};
use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Opening is refused for a reason that contains `reason`.
#[track_caller]
fn refused(folder: &Path, options: CacheOptions, reason: &str) {
    match Cache::open(folder, options) {
        Err(CacheError::Refused { reason: given, .. }) if given.contains(reason) => {}
        other => panic!("{other:?}"),
    }
}

/// A cache that was fine when opened and is then tampered with: neither read nor written, and the kernel is right.
#[track_caller]
fn abandoned(attack: impl FnOnce(&Path)) {
    let scene = Scene::new();
    let compiler = compiler(&scene.ptxas(), scene.cache(options()));
    compile(&compiler, "kernel");
    attack(&scene.folder());
    let before = listing(&scene.folder());
    let cubin = compile(&compiler, "kernel");
    assert_eq!((cubin.route(), cubin.notes().len()), (Route::Ptxas, 2), "{:?}", cubin.notes());
    assert_eq!(listing(&scene.folder()), before, "nothing was written");
    assert!(compiler.cache.unwrap().list().is_err());
}

fn listing(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
}

#[test]
fn a_new_folder_is_for_its_user_alone() {
    let scene = Scene::new();
    compile(&scene.compiler(), "kernel");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&scene.folder()), mode(&scene.entry())), (0o700, 0o600));
}

#[test]
fn links_and_files_are_refused() {
    let scene = Scene::new();
    let real = scene.root.path().join("real");
    fs::create_dir(&real).unwrap();
    symlink(&real, scene.folder()).unwrap();
    refused(&scene.folder(), options(), "link");
    fs::remove_file(scene.folder()).unwrap();
    fs::write(scene.folder(), "").unwrap();
    refused(&scene.folder(), options(), "file");
    fs::remove_file(scene.folder()).unwrap();
    symlink(scene.root.path().join("nowhere"), scene.folder()).unwrap();
    refused(&scene.folder(), options(), "link");
}

#[test]
fn loose_permissions_are_refused() {
    let scene = Scene::new();
    for mode in [0o777, 0o770, 0o702, 0o1777] {
        fs::create_dir_all(scene.folder()).unwrap();
        set_mode(&scene.folder(), mode);
        refused(&scene.folder(), options(), "chmod 700");
    }
    set_mode(&scene.folder(), 0o755);
    assert!(Cache::open(&scene.folder(), options()).is_ok(), "others may read");
}

#[test]
fn a_folder_that_anybody_can_replace_is_refused() {
    let scene = Scene::new();
    set_mode(scene.root.path(), 0o777);
    refused(&scene.folder(), options(), "anyone can write to its parent folder");
    set_mode(scene.root.path(), 0o1777);
    assert!(Cache::open(&scene.folder(), options()).is_ok(), "as in /tmp, where only owners rename");
}

#[test]
fn another_users_folder_is_refused() {
    let scene = Scene::new();
    let me = options().owner;
    scene.cache(options());
    refused(&scene.folder(), CacheOptions { owner: me + 1, ..options() }, &format!("belongs to user {me}"));
}

#[test]
fn tampering_after_opening_is_noticed() {
    abandoned(|folder| set_mode(folder, 0o777));
    abandoned(|folder| fs::remove_dir_all(folder).unwrap());
    abandoned(|folder| {
        let moved = folder.with_file_name("moved");
        fs::rename(folder, &moved).unwrap();
        symlink(&moved, folder).unwrap();
    });
}

#[test]
fn clear_removes_entries_and_nothing_else() {
    let scene = Scene::new();
    let compiler = scene.compiler();
    ["a", "b", "c"].iter().for_each(|ptx| drop(compile(&compiler, ptx)));
    fs::write(scene.folder().join("README"), "not ours").unwrap();
    assert_eq!(scene.cache(options()).clear(), Ok(3));
    assert_eq!(listing(&scene.folder()), ["README"]);
    assert_eq!(compile(&compiler, "a").route(), Route::Ptxas);
}
