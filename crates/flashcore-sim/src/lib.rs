//! Runs PTX launches on the CPU, under adversarial schedules, with every check on.
//!
//! ```text
//! Launch { module, spec, buffers, provenance }.run(&options)  →  Outcome { buffers, findings, counters }
//! ```
//!
//! ```
//! use flashcore_ptx::{ident::Ident, launch::{LaunchSpec, Param, Slot}, parse::parse};
//! use flashcore_sim::{Buffer, FindingKind, Launch, Options};
//!
//! // Two warps write one word of shared memory, and nothing orders them.
//! let parsed = parse("
//!     .version 8.0
//!     .target sm_90
//!     .address_size 64
//!     .visible .entry both(.param .u64 dst)
//!     {
//!         .shared .align 4 .b32 cell;
//!         .reg .b64 %d; .reg .b32 %t;
//!         mov.u32 %t, %warpid; st.shared.u32 [cell], %t;
//!         bar.sync 0;
//!         ld.param.u64 %d, [dst]; ld.shared.u32 %t, [cell]; st.global.u32 [%d], %t;
//!         ret;
//!     }").unwrap();
//! let spec = LaunchSpec {
//!     entry: Ident::new("both").unwrap(),
//!     grid: [1, 1, 1],
//!     block: [64, 1, 1],
//!     cluster: [1, 1, 1],
//!     shared_bytes: 0,
//!     dependent: false,
//!     params: vec![Param::Buffer(Slot(0))],
//!     workspace: vec![],
//! };
//! let buffers = vec![Buffer::output(Slot(0), 4)];
//! let launch = Launch { module: &parsed.module, provenance: Some(&parsed.provenance), spec: &spec, buffers };
//! let outcome = launch.run(&Options::new()).unwrap();
//! assert_eq!(outcome.findings[0].kind, FindingKind::SharedRace);
//! ```
//!
//! The program is the text that ships ([`flashcore_ptx::module::Module`]); the launch is the same plain data that
//! a GPU executes ([`flashcore_ptx::launch::LaunchSpec`]). A [`Finding`] is something the kernel did wrong; a
//! [`SimError`] is a launch that could not be simulated.
//!
//! | file | what |
//! | --- | --- |
//! | `launch` | arguments and buffers in, outcome out |
//! | `program/` | instructions decoded once into micro-operations |
//! | `parts` | grids on all cores |
//! | `machine`, `schedule`, `engine` | who runs next; asynchronous work in flight |
//! | `step/` | what each micro-operation does, one file for each family |
//! | `warp`, `calls`, `regfile`, `cta`, `mbarrier`, `named`, `memory/` | state |
//! | `check/` | vector clocks, shadows, the rules for accesses |
//! | `numeric/` | numbers bit for bit |
#![forbid(unsafe_code)]

mod calls;
mod check;
mod counters;
mod cta;
mod engine;
mod error;
mod excuse;
mod explain;
mod finding;
mod geometry;
mod launch;
mod machine;
mod mbarrier;
mod memory;
mod named;
mod numeric;
mod options;
mod parts;
mod program;
mod regfile;
mod rng;
mod schedule;
mod step;
mod suspect;
mod tensor_map;
mod unreached;
mod warp;

pub use counters::Counters;
pub use error::SimError;
pub use finding::{Finding, FindingKind, Severity, Site};
pub use launch::{Buffer, Launch, Outcome};
pub use options::{CheckSet, Options, Schedule, Timing};
