//! Damaged, exchanged and planted entries.

use crate::{Scene, compile, options, survives, write_script};
use flashcore_cuda::{
    Route,
    cache::{Cache, CacheOptions, Damage, Key, Stored},
};
use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown, symlink},
    path::Path,
    process::Command,
};

fn rewrite(entry: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(entry).unwrap();
    change(&mut bytes);
    fs::write(entry, bytes).unwrap();
}

#[test]
fn truncated_or_extended() {
    for length in [0, 1, 8, 43, 83, 84, 90] {
        survives(|_, entry| rewrite(entry, |bytes| bytes.truncate(length)));
    }
    survives(|_, entry| rewrite(entry, |bytes| bytes.truncate(bytes.len() - 1)));
    survives(|_, entry| rewrite(entry, |bytes| bytes.push(0)));
}

#[test]
fn bits_flipped_anywhere() {
    for at in (0..90).step_by(7) {
        survives(|_, entry| rewrite(entry, |bytes| bytes[at] ^= 1 << (at % 8)));
    }
    survives(|_, entry| rewrite(entry, |bytes| *bytes.last_mut().unwrap() ^= 0x80));
}

#[test]
fn a_length_that_would_exhaust_memory() {
    survives(|_, entry| rewrite(entry, |bytes| bytes[44..52].copy_from_slice(&u64::MAX.to_le_bytes())));
}

#[test]
fn a_link_to_a_sound_entry() {
    survives(|folder, entry| {
        let elsewhere = folder.with_file_name("elsewhere");
        fs::rename(entry, &elsewhere).unwrap();
        symlink(&elsewhere, entry).unwrap();
    });
}

#[test]
fn a_link_is_replaced_and_what_it_points_at_is_left_alone() {
    let scene = Scene::new();
    let victim = scene.root.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    compile(&scene.compiler(), "kernel");
    let entry = scene.entry();
    fs::remove_file(&entry).unwrap();
    symlink(&victim, &entry).unwrap();
    compile(&scene.compiler(), "kernel");
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    assert!(fs::symlink_metadata(&entry).unwrap().is_file());
}

#[test]
fn writable_by_others() {
    for mode in [0o602, 0o620, 0o666] {
        survives(|_, entry| fs::set_permissions(entry, fs::Permissions::from_mode(mode)).unwrap());
    }
}

#[test]
fn a_pipe_does_not_hang_the_reader() {
    survives(|_, entry| {
        fs::remove_file(entry).unwrap();
        assert!(Command::new("mkfifo").arg(entry).status().unwrap().success());
    });
}

#[test]
fn owned_by_somebody_else() {
    let scene = Scene::new();
    compile(&scene.compiler(), "kernel");
    let entry = scene.entry();
    if chown(&entry, Some(12345), None).is_err() {
        println!("notice: only root can give files away; foreign owners are tested on folders alone");
        return;
    }
    let verdict = scene.cache(options()).verify().unwrap();
    assert_eq!(verdict[0].1, Some(Damage::Owner(12345)));
    assert_eq!(compile(&scene.compiler(), "kernel").route(), Route::Ptxas);
    assert_eq!(compile(&scene.compiler(), "kernel").route(), Route::Cache, "replaced by our own");
}

#[test]
fn entries_exchanged_for_one_another() {
    let scene = Scene::new();
    let compiler = scene.compiler();
    let kernels = ["kernel one", "kernel two"];
    kernels.iter().for_each(|ptx| drop(compile(&compiler, ptx)));
    let cache = scene.cache(options());
    let [a, b] = [0, 1].map(|at| scene.folder().join(cache.list().unwrap()[at].key.to_string()));
    let spare = a.with_extension("spare");
    for (from, to) in [(&a, &spare), (&b, &a), (&spare, &b)] {
        fs::rename(from, to).unwrap();
    }
    let damage: Vec<_> = cache.verify().unwrap().into_iter().map(|(_, damage)| damage).collect();
    assert_eq!(damage, [Some(Damage::WrongKey), Some(Damage::WrongKey)]);
    assert_eq!(kernels.map(|ptx| compile(&compiler, ptx).route()), [Route::Ptxas; 2]);
    assert_eq!(kernels.map(|ptx| compile(&compiler, ptx).route()), [Route::Cache; 2]);
}

#[test]
fn a_folder_in_the_place_of_an_entry() {
    let scene = Scene::new();
    compile(&scene.compiler(), "kernel");
    let entry = scene.entry();
    fs::remove_file(&entry).unwrap();
    fs::create_dir(&entry).unwrap();
    let cubin = compile(&scene.compiler(), "kernel");
    assert_eq!(
        (cubin.route(), cubin.notes().len()),
        (Route::Ptxas, 2),
        "not read, not replaced: {:?}",
        cubin.notes()
    );
}

/// Everything that changes the machine code changes the key.
#[test]
fn another_ptxas_option_or_text_is_another_entry() {
    let scene = Scene::new();
    let mut compiler = scene.compiler();
    compile(&compiler, "kernel");
    compiler.options.optimisation = 1;
    assert_eq!(compile(&compiler, "kernel").route(), Route::Ptxas);
    assert_eq!(compile(&compiler, "kernel ").route(), Route::Ptxas);
    write_script(&scene.ptxas(), &(fs::read_to_string(scene.ptxas()).unwrap() + "# newer\n"));
    assert_eq!(compile(&scene.compiler(), "kernel").route(), Route::Ptxas, "a new ptxas at the old place");
}

/// A sound entry with the wrong code: only a rebuild can tell, and `verify` asks for one.
#[test]
fn verify_compares_with_a_fresh_build() {
    let scene = Scene::new();
    let mut compiler = scene.compiler();
    compiler.verify = true;
    let cache = scene.cache(options());
    compile(&compiler, "kernel");
    assert_eq!(compile(&compiler, "kernel").notes().len(), 0);
    let key = cache.list().unwrap()[0].key;
    cache.put(&key, &Stored { cubin: b"\x7fELFother".to_vec(), report: Default::default() }).unwrap();
    let cubin = compile(&compiler, "kernel");
    assert!(cubin.notes()[0].contains("differed"), "{:?}", cubin.notes());
    assert_eq!(compile(&scene.compiler(), "kernel").route(), Route::Cache, "the right one is back");
}

#[test]
fn a_missing_key_is_no_damage() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(&folder.path().join("new"), CacheOptions::default()).unwrap();
    assert_eq!(cache.get(&Key::of(&["nothing"])), Ok(None));
}
