//! The `flashcore` binary as users see it: what it prints, which exit code it ends with, which files it leaves.

#![allow(unreachable_pub)]

mod bad_input;
mod files;
mod kernels;
mod lab;
mod operations;
mod output;
mod report;
mod repro;
mod sim;
mod tune;
mod workplace;
