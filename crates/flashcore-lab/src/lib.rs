//! The lab: evidence about attention kernels on CPU, simulator and GPU alike.
//!
//! | question | files, in reading order |
//! | --- | --- |
//! | is it right? | [`verify`]: stages, case groups in child processes, a watchdog |
//! | how fast is it? | [`task`], [`suites`], [`competitor`] (who competes), [`contest`], [`protocol`], [`burst`], [`record`], [`standing`], [`comparison`] |
//! | may it be taken? | [`gate`], on [`bootstrap`] |
//! | what limits it? | [`ceiling`], [`profile`] |
//! | which tile is fastest? | [`tune`] |
//! | is it reproducible elsewhere? | [`repro`] |
//! | how does it all look? | [`report`] |
//!
//! The `flashcore` command is the only caller; nothing here prints.
#![deny(unsafe_code)]
// Fields whose name and type say all have no words of their own; docs/lab.md says what files and answers hold.
#![allow(missing_docs)]

pub mod bootstrap;
pub mod buffer;
pub mod burst;
pub mod ceiling;
pub mod comparison;
pub mod competitor;
pub mod contest;
mod error;
pub mod figures;
pub mod gate;
pub mod judge;
pub mod latency;
mod lines;
pub mod machine;
pub mod memory;
pub mod profile;
pub mod protocol;
pub mod record;
pub mod report;
pub mod repro;
pub mod save;
pub mod sensors;
pub mod signature;
pub mod simulator;
pub mod standing;
pub mod stats;
pub mod suites;
pub mod task;
pub mod tune;
pub mod verify;
pub mod workload;

pub use error::LabError;
