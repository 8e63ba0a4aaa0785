//! One module per command; each has `Flags` (what clap parses) and `execute` (what is done), called by [`crate::cli`].

pub mod cache;
pub mod completions;
pub mod doctor;
pub mod run;
