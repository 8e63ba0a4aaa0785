//! A thin layer over NVIDIA's driver: compile PTX, cache the machine code, launch kernels.
//!
//! It knows nothing about attention. Its input is PTX text and a [`LaunchSpec`](flashcore_ptx::launch::LaunchSpec);
//! the driver is loaded at run time, so a program without a GPU gets [`Error::NoDriver`] and nothing worse.
//!
//! | step | file |
//! | --- | --- |
//! | find the driver, retain the primary context | `sys.rs`, `api.rs`, `driver.rs`, `props.rs` |
//! | PTX to machine code, with its report | `compile.rs`, `toolchain.rs`, `jit.rs`, `report.rs` |
//! | machine code on disk | `cache/` |
//! | load, prepare, launch | `module.rs`, `launch.rs`, `limits.rs`, `params.rs`, `tensor_map.rs` |
//! | memory and order | `memory.rs`, `stream.rs`, `graph.rs`, `workspace.rs` |
//! | what can go wrong | `error.rs` |
//!
//! ```no_run
//! use flashcore_cuda::{Compiler, Device, DeviceBuffer, Module, Prepared, Stream};
//! # fn run(ptx: &str, spec: &flashcore_ptx::launch::LaunchSpec) -> Result<(), flashcore_cuda::Error> {
//! let device = Device::new(0)?;
//! let cubin = Compiler::from_env()?.compile(ptx, flashcore_ptx::target::Target::Sm90a, device)?;
//! let kernel = Module::load(device, &cubin)?.kernel(spec.entry.as_str())?;
//! let prepared = Prepared::new(&kernel, spec)?;
//! let stream = Stream::new(device)?;
//! let buffer = DeviceBuffer::new(device, 1 << 20)?;
//! // SAFETY: the kernel reads and writes one buffer of 1 MiB, which lives until the stream is waited for.
//! unsafe { prepared.launch(&stream, &[buffer.address()])? };
//! stream.synchronize()
//! # }
//! ```

mod api;
pub mod cache;
mod compile;
mod disassemble;
mod driver;
mod error;
#[cfg(test)]
mod fake;
mod graph;
mod jit;
mod launch;
mod limits;
mod memory;
mod module;
mod params;
mod props;
mod report;
mod stream;
mod sys;
pub mod tensor_map;
pub mod toolchain;
mod workspace;

pub use compile::{Arch, BuildOptions, Compiler, Cubin, Route};
pub use disassemble::disassemble;
pub use driver::{ContextGuard, Device, Driver};
pub use error::{DriverError, Error, FirstCause, Severity, severity};
pub use graph::Graph;
pub use launch::{LaunchError, Prepared, launch_all, launch_all_with};
pub use memory::{DeviceBuffer, PinnedBuffer};
pub use module::{Kernel, KernelAttributes, Module};
pub use props::DeviceProps;
pub use report::{BuildReport, KernelReport};
pub use stream::{Event, Stream};
pub use tensor_map::{TensorMap, TensorMapError};
