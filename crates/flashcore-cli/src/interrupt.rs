//! Ctrl-C: the first asks long work to stop after its current step and show what there is, the second ends at once. Work
//! that cannot be asked does not [`watch`], and the first ends it.

use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering::Relaxed},
};

static STOPPED: AtomicBool = AtomicBool::new(false);
static WATCHED: OnceLock<()> = OnceLock::new();

/// Exit code of a program that was interrupted, by convention.
const INTERRUPTED: i32 = 130;

/// Catches Ctrl-C from now on; where that is not possible it ends the program as usual.
pub fn watch() {
    WATCHED.get_or_init(|| {
        let _ = ctrlc::set_handler(|| {
            if STOPPED.swap(true, Relaxed) {
                std::process::exit(INTERRUPTED);
            }
        });
    });
}

/// Whether Ctrl-C was pressed.
pub fn stopped() -> bool {
    STOPPED.load(Relaxed)
}
