//! Tests of the public API on the CPU.
#![cfg(feature = "cpu")]

mod attention;
mod conformance;
mod gradients;
mod grouped;
mod moe;
mod quantise;
