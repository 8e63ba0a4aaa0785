//! Tests of the simulator: instructions, checks, schedules, faults that must be found.

mod api;
mod cooperative;
mod differs;
mod mutation;
mod ptx;
#[path = "../../../flashcore-ptx/tests/ptx/sample.rs"]
mod sample;
mod table;
mod unknown;
