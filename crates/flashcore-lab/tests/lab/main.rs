//! The lab's tests: one program, since each takes longer to link than most of them to run.

mod comparison;
mod contest;
mod gate_honesty;
mod operations;
mod record;
mod report;
mod repro;
mod tune;
mod verify;
