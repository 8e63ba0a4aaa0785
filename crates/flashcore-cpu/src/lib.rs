//! Attention on the CPU: online softmax over key blocks, SIMD chosen at run time, all cores.
//!
//! [`Cpu`] implements [`flashcore_core::Backend`]. The bits of a row depend only on its own query, its keys and the
//! SIMD level: not on the number of threads, nor on its place in the batch.
//!
//! The path of a call: `cpu` (threads, memory) → `forward` (typed call, units on threads) → `plan` (which units) →
//! `prefill` with `panels` and `matrices`, or `decode` (one unit) → `simd` (kernels, generic over the instruction set).
//!
//! Gradients: `cpu` → `backward` (units, tiles) → `simd`. Mixtures of experts and grouped products: `cpu` → `moe`,
//! `grouped` → `matmul` (all products of a call) → `factors` (how they are packed) → `simd`.
//!
//! Unsafe code is in `simd` (instructions, pointers inside kernels), `append`, `output`, `merge`, `moe`, `matmul` and `backward` (threads
//! write rows of one tensor) and `crew` (threads of another library).
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod append;
mod backward;
mod cache;
mod cpu;
#[allow(unsafe_code)]
mod crew;
mod decode;
mod factors;
mod forward;
mod grouped;
mod level;
#[allow(unsafe_code)]
mod matmul;
mod matrices;
#[allow(unsafe_code)]
mod merge;
#[allow(unsafe_code)]
mod moe;
mod narrow;
#[allow(unsafe_code)]
mod output;
mod panels;
mod peak;
mod plan;
mod prefill;
#[allow(unsafe_code)]
mod quantise;
mod scratch;
#[allow(unsafe_code)]
mod simd;
mod tiles;

pub use cpu::Cpu;
pub use level::SimdLevel;
pub use scratch::Scratch;
pub use tiles::Tiles;
