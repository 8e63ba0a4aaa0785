//! What every FlashCore backend is tested with: oracle, error rule, cases, properties, random problems.
//!
//! The path of one check, in reading order:
//!
//! | file | what it holds |
//! | --- | --- |
//! | [`cases`] | the named and adversarial cases, as data |
//! | [`suite`] | runs one case on one backend and says what went wrong first |
//! | [`kinds`] | kinds of data, for error and for time |
//! | [`compare`] | the error rule |
//! | [`plain`] | attention computed plainly, row by row: in f64 the oracle, in the tensors' own precision the yardstick |
//! | [`pages`] | keys in pages: cases, and what their tables say |
//! | [`cache`] | queries of 16 bits over keys and values of 8 |
//! | [`properties`] | laws that hold whatever the numbers are |
//! | [`backward`] | cases, oracle, check and laws of gradients |
//! | [`merge`] | cases, oracle and check of merging partial results |
//! | [`append`] | cases, oracle and check of new rows of a cache |
//! | [`quantise`] | cases, oracle and check of tensors rounded to 8 bits |
//! | [`moe`] | cases, oracle and check of mixtures of experts |
//! | [`grouped`] | cases, oracle and check of grouped products |
//! | [`mutate`] | single faults made in kernels, for judging the checkers |
//! | [`ptxtest`] | tests written as PTX files, for simulator and GPU |
//! | [`random`] | random legal problems, for fuzzing |
//! | [`fuzz`] | random PTX programs |
//!
//! Nothing here is published; the command line links it for its `run` and `verify` commands.
#![forbid(unsafe_code)]
// Fields whose name and type say all have no words of their own.
#![allow(missing_docs)]

pub mod answer;
pub mod append;
pub mod backward;
pub mod bench;
pub mod buffers;
pub mod cache;
pub mod cases;
pub mod compare;
pub mod fuzz;
pub mod grouped;
pub mod inputs;
pub mod kinds;
pub mod merge;
pub mod moe;
pub mod mutate;
pub mod naive;
pub mod narrow;
pub mod pages;
pub mod plain;
pub mod properties;
pub mod ptxtest;
pub mod quantise;
pub mod random;
pub mod rng;
pub mod suite;
pub mod values;

pub use answer::{Answer, Position, Rows};
pub use cases::{Case, Tag};
pub use compare::{Reason, Rule, Verdict, judge};
pub use kinds::Kind;
pub use naive::NaiveBackend;
pub use rng::Rng;
pub use suite::{CaseReport, Outcome, Step, check_case, check_case_runs};
