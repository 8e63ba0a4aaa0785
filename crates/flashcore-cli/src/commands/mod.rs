//! One module per command; each has `Flags` (what clap parses) and `execute` (what is done), called by [`crate::cli`].

pub mod bench;
pub mod cache;
pub mod completions;
pub mod doctor;
pub mod gate;
pub mod inspect;
pub mod profile;
pub mod report;
pub mod repro;
pub mod run;
pub mod sim;
pub mod tune;
pub mod verify;
pub mod warm;
