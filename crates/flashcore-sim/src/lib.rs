//! Runs PTX launches on the CPU, under adversarial schedules, with every check on.
//!
//! ```text
//! Launch { module, spec, buffers, provenance }.run(&options)  →  Outcome { buffers, findings, counters }
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
//! | `machine`, `schedule`, `engine` | who runs next; asynchronous work in flight |
//! | `step/` | what each micro-operation does, one file for each family |
//! | `warp`, `regfile`, `cta`, `mbarrier`, `named`, `memory/` | state |
//! | `check/` | vector clocks, shadows, the rules by which accesses are judged |
//! | `numeric/` | numbers bit for bit |
#![forbid(unsafe_code)]

mod check;
mod counters;
mod cta;
mod engine;
mod error;
mod finding;
mod geometry;
mod launch;
mod machine;
mod mbarrier;
mod memory;
mod named;
mod numeric;
mod options;
mod program;
mod regfile;
mod rng;
mod schedule;
mod step;
mod tensor_map;
mod warp;

pub use counters::Counters;
pub use error::SimError;
pub use finding::{Finding, FindingKind, Severity, Site};
pub use launch::{Buffer, Launch, Outcome};
pub use options::{CheckSet, Options, Schedule, Timing};
