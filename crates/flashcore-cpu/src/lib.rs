//! Attention on the CPU: online softmax over key blocks, SIMD chosen at run time, all cores.
//!
//! [`Cpu`] implements [`flashcore_core::Backend`]. The bits of a row depend on its own query, its keys and the SIMD
//! level alone: not on the number of threads, the batch or the heads.

mod cpu;
mod level;
mod out;
mod rowwise;

pub use cpu::Cpu;
pub use level::SimdLevel;
