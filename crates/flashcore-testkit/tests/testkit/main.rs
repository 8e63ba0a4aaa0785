//! Tests of the test kit: right backends pass, each wrong one is caught.

#[macro_use]
mod faults;
mod append;
mod backward;
mod grouped;
mod merge;
mod moe;
mod mutants;
mod oracle;
mod quantise;
mod suite;
