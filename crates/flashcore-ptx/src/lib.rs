//! PTX as data: one instruction table with printer, parser, verifier and layout arithmetic.
#![forbid(unsafe_code)]

pub mod ident;
pub mod launch;
pub mod layout;
pub mod target;
