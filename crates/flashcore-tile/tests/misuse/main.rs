//! Wrong kernels are refused, and the message names the Rust line that is wrong.
//!
//! Each test builds one wrong kernel; the wrong line says what it expects in a comment behind `//~`, or the line below
//! it does. Mistakes that do not even compile stand in `src/misuse.rs`.

mod barriers;
mod control;
mod interface;
mod matrix;
mod memory;
mod values;

use std::{panic::Location, path::Path};

use flashcore_ptx::{ident::Ident, target::Target};
use flashcore_tile::{BuildError, Builder, Params};

const MARK: &str = "//~ ";

/// The kernel in which a mistake is made.
#[derive(Clone, Copy)]
struct Bench {
    target: Target,
    threads: u32,
    ctas_per_sm: u32,
}

const HOPPER: Bench = Bench { target: Target::Sm90a, threads: 128, ctas_per_sm: 1 };
const AMPERE: Bench = Bench { target: Target::Sm80, ..HOPPER };

/// Expects that a kernel for one warpgroup on sm_90a is refused.
#[track_caller]
fn check(build: impl FnOnce(&mut Builder)) {
    HOPPER.check(build);
}

impl Bench {
    #[track_caller]
    fn check(self, build: impl FnOnce(&mut Builder)) {
        expect(|| {
            let name = Ident::new("k").unwrap();
            let mut b = Builder::new(self.target, &name, self.threads, self.ctas_per_sm);
            build(&mut b);
            b.finish::<()>(&name, Params::default())
        });
    }
}

/// Expects that what `build` makes is refused at the next marked line, with the words behind the mark.
#[track_caller]
fn expect<T: std::fmt::Debug>(build: impl FnOnce() -> Result<T, BuildError>) {
    let here = Location::caller();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(here.file());
    let source = std::fs::read_to_string(path).unwrap();
    let after = source.lines().zip(1..).skip(here.line() as usize - 1);
    let (text, line) =
        after.into_iter().find(|(text, _)| text.contains(MARK)).expect("the wrong line is marked");
    let (code, words) = text.split_once(MARK).unwrap();
    let line = line - u32::from(code.trim().is_empty());
    let error = build().expect_err("a wrong kernel is refused");
    let place = format!("{}:{line}: ", here.file());
    assert!(names(&error, &place, words), "expected {place}{words}, but {error}");
    assert!(!error.to_string().contains("flashcore-tile/src"), "blames the language: {error}");
}

/// Whether an error has these words at this place.
fn names(error: &BuildError, place: &str, words: &str) -> bool {
    let lines = error.faults.iter().map(ToString::to_string);
    lines.into_iter().any(|line| line.starts_with(place) && line.contains(words))
}

/// One message lists everything that is wrong, in order.
#[test]
fn every_fault_is_told_at_once() {
    let name = Ident::new("k").unwrap();
    let mut b = Builder::new(Target::Sm80, &name, 128, 1);
    b.named_barrier(33);
    b.shared(1 << 20, 16);
    let error = b.finish::<()>(&name, Params::default()).unwrap_err();
    assert_eq!(error.faults.len(), 2);
    let text = error.to_string();
    let [first, second] = ["33 threads", "1048576 bytes"].map(|words| text.find(words).unwrap());
    assert!(first < second && text.starts_with("kernel `k` was refused:"), "{text}");
}

/// A mistake in a line that builds many instructions is told once, with its count.
#[test]
fn one_cause_is_one_line() {
    let name = Ident::new("k").unwrap();
    let mut b = Builder::new(Target::Sm80, &name, 128, 1);
    for _ in 0..300 {
        b.named_barrier(33);
    }
    let error = b.finish::<()>(&name, Params::default()).unwrap_err();
    let text = error.to_string();
    assert!(text.lines().count() <= 3 && text.contains(" times)"), "{text}");
}
