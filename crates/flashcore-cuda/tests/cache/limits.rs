//! Room: the size cap, and a disk that is full.

use crate::{Scene, compile, compiler, options};
use flashcore_cuda::{
    Route,
    cache::{CacheError, CacheOptions, Key, Stored},
};
use std::{
    fs::{self, File},
    process::Command,
    time::{Duration, SystemTime},
};

fn stored(bytes: usize) -> Stored {
    Stored { cubin: vec![7; bytes], report: Default::default() }
}

#[test]
fn the_least_recently_used_entries_go_first() {
    let scene = Scene::new();
    let cache = scene.cache(CacheOptions { max_bytes: 3500, ..options() });
    let keys = ["a", "b", "c", "d"].map(|name| Key::of(&[name]));
    let hour = Duration::from_secs(3600);
    for (key, age) in keys[..3].iter().zip([3, 2, 1]) {
        cache.put(key, &stored(1000)).unwrap();
        let file = File::options().write(true).open(scene.folder().join(key.to_string())).unwrap();
        file.set_modified(SystemTime::now() - hour * age).unwrap();
    }
    assert!(cache.get(&keys[0]).unwrap().is_some(), "used again, so no longer the oldest");
    cache.put(&keys[3], &stored(1000)).unwrap();
    let left = keys.map(|key| cache.get(&key).unwrap().is_some());
    assert_eq!(left, [true, false, true, true]);
    let total: u64 = cache.list().unwrap().iter().map(|entry| entry.bytes).sum();
    assert!(total <= 3500, "{total}");
}

#[test]
fn an_entry_larger_than_the_cache_is_not_stored() {
    let scene = Scene::new();
    let cache = scene.cache(CacheOptions { max_bytes: 500, ..options() });
    let refused = cache.put(&Key::of(&["large"]), &stored(1000));
    assert!(matches!(refused, Err(CacheError::TooLarge { limit: 500, .. })), "{refused:?}");
    let cubin = compile(&compiler(&scene.ptxas(), cache), &"large kernel ".repeat(100));
    assert_eq!((cubin.route(), cubin.notes().len()), (Route::Ptxas, 1));
}

#[test]
fn files_of_writers_that_died_are_swept() {
    let scene = Scene::new();
    let cache = scene.cache(options());
    let [old, young] = [".writing-1-0", ".writing-2-0"].map(|name| scene.folder().join(name));
    for path in [&old, &young] {
        fs::write(path, "half an entry").unwrap();
    }
    let before = SystemTime::now() - Duration::from_secs(7200);
    File::options().write(true).open(&old).unwrap().set_modified(before).unwrap();
    cache.put(&Key::of(&["x"]), &stored(10)).unwrap();
    assert!(!old.exists() && young.exists(), "a living writer is left alone");
}

/// The system refuses writes past a few hundred bytes, as a full disk does: in a child, whose limits are its own.
#[test]
fn a_full_disk_costs_a_miss_and_leaves_nothing_behind() {
    const CHILD: &str = "FLASHCORE_TEST_FULL_DISK";
    let kernel = "a kernel that does not fit ".repeat(1000);
    if let Some(folder) = std::env::var_os(CHILD) {
        let scene = std::path::PathBuf::from(folder);
        let cache = flashcore_cuda::cache::Cache::open(&scene.join("cache"), options()).unwrap();
        let cubin = compile(&compiler(&scene.join("ptxas"), cache), &kernel);
        assert_eq!((cubin.route(), cubin.notes().len()), (Route::Ptxas, 1), "{:?}", cubin.notes());
        return;
    }
    let scene = Scene::new();
    scene.cache(options());
    let limited = "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\"";
    let this_test = ["limits::a_full_disk_costs_a_miss_and_leaves_nothing_behind", "--exact", "--nocapture"];
    let child = Command::new("sh")
        .args(["-c", limited])
        .arg(std::env::current_exe().unwrap())
        .args(this_test)
        .env(CHILD, scene.root.path())
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
    assert_eq!(fs::read_dir(scene.folder()).unwrap().count(), 0, "no half-written file stays");
    assert_eq!(compile(&scene.compiler(), &kernel).route(), Route::Ptxas);
    assert_eq!(compile(&scene.compiler(), &kernel).route(), Route::Cache, "with room again, it is kept");
}
