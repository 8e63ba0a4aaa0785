//! PTX as data: one instruction table with printer, parser, verifier and layout arithmetic.
#![forbid(unsafe_code)]

pub mod ident;
pub mod inst;
pub mod launch;
pub mod layout;
pub mod module;
mod names;
pub mod op;
pub mod parse;
pub mod print;
pub mod provenance;
pub mod table;
pub mod target;
pub mod types;
pub mod verify;
pub mod version;
