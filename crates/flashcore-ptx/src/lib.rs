//! PTX as data: one instruction table with constructors, printer, parser, verifier and layout arithmetic.
//!
//! What ships to a GPU is PTX text. This crate is the only place that knows how that text is written: kernels are
//! built as [`Module`](module::Module)s (by `flashcore-tile`), printed, verified, and executed on the CPU (by
//! `flashcore-sim`) from the same rows of the same table.
//!
//! | concept | where | in one line |
//! | --- | --- | --- |
//! | type | [`types::ScalarType`] | `.f32`, `.b64`, …: width, meaning, which register may hold it |
//! | operation, modifier | [`op::Op`], [`op::Mod`] | `wgmma.mma_async` and its dotted modifiers |
//! | row | [`table::Row`] | one line of the ISA manual: slots for modifiers, operands, target, version, effects |
//! | form | [`table::Form`] | a row with the types of one instruction filled in |
//! | register | [`inst::RegId`] | a type and a number; its text is derived unless it came from elsewhere |
//! | instruction | [`inst::Inst`] | guard, operation, modifiers, operands; [`inst::Inst::new`] checks it |
//! | kernel, module | [`module`] | parameters, registers, statements; header and variables |
//! | provenance | [`provenance::Provenance`] | the Rust line of each statement, beside the text, never in it |
//! | text | [`mod@print`], [`mod@parse`] | exact inverses; the parser also takes what nvcc and Triton print |
//! | verifier | [`verify::verify`] | everything that is wrong, each with instruction, place and fix |
//! | layout | [`layout`] | swizzles, fragments, descriptors, tiles: pure functions |
//! | multiprocessor | [`sm::Sm`] | registers, warps, CTAs and shared memory of each architecture |
//! | launch | [`launch`] | how to start a kernel, as plain data |
//!
//! ```
//! use flashcore_ptx::{ident::Ident, inst::{Inst, Operand}, module::{Kernel, Module, Statement}};
//! use flashcore_ptx::{op::{Mod, Op}, target::Target, types::{ScalarType, SpecialReg}};
//!
//! let mut kernel = Kernel::new(&Ident::new("lane").unwrap());
//! let lane = kernel.registers.add(ScalarType::B32);
//! let inst = Inst::new(Op::Mov, [Mod::Type(ScalarType::U32)], [lane.into(), SpecialReg::Laneid.into()]).unwrap();
//! kernel.body = vec![Statement::Inst(inst), Statement::Inst(Inst::new(Op::Ret, [], []).unwrap())];
//! let mut module = Module::new(Target::Sm80);
//! module.kernels.push(kernel);
//!
//! let text = module.to_string();
//! assert!(text.contains("mov.u32 %r0, %laneid;"));
//! let parsed = flashcore_ptx::parse::parse(&text).unwrap();
//! assert_eq!(parsed.module, module);
//! assert!(flashcore_ptx::verify::verify(&parsed.module, &parsed.provenance).is_empty());
//!
//! let wrong = Inst::new(Op::Add, [Mod::Type(ScalarType::F32)], [lane.into(), lane.into(), Operand::int(1)]);
//! assert!(wrong.unwrap_err().to_string().contains("literal of type `.f32`, not `1`"));
//! ```
#![forbid(unsafe_code)]

mod function;
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
pub mod sm;
pub mod table;
pub mod target;
pub mod types;
pub mod verify;
pub mod version;
