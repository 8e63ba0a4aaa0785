//! Tests of PTX as data: table, printer, parser, verifier, layouts.

mod assemble;
mod foreign;
mod layout;
mod roundtrip;
mod sample;
mod verify;
