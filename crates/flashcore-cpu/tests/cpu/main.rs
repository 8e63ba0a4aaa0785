//! Tests of the CPU backend. What counts allocations and what miri runs are programs of their own.

/// A test for each level of SIMD, named after it.
macro_rules! at_every_level {
    ($check:ident) => {
        at_every_level!($check: portable Portable, neon Neon, avx2 Avx2, avx512 Avx512, avx512bf16 Avx512Bf16, amx Amx);
    };
    ($check:ident: $($name:ident $level:ident),*) => {
        $(#[test]
        fn $name() {
            $check(SimdLevel::$level);
        })*
    };
}

mod backward;
mod conformance;
mod dropout;
mod pages;
mod threads;
