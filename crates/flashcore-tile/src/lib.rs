//! A typed language of tiles, pipelines and warp roles that builds PTX.
//!
//! A kernel is a Rust function over a [`Builder`]. What the language adds to PTX exists only while the program is
//! built: types, scopes of agreement, tokens for matrix products in flight, pipelines. The result is a [`Program`]:
//! PTX text and how to launch it, both plain data. `docs/writing-a-kernel.md` walks through a whole kernel.
//!
//! | concept | type | what it prevents |
//! | --- | --- | --- |
//! | register of a type | [`Reg`] | mixing integers, floats and predicates |
//! | arithmetic on registers | [`Expr`], [`Cond`] | one builder call for each instruction; computing twice |
//! | threads that agree | [`Scope`], [`Uniform`] | an `.aligned` instruction under divergence |
//! | what a tile is made of | [`Element`] | sizes, swizzles and depths as bare numbers |
//! | matrix tile in registers | [`Acc`], [`Fragment`] | wrong fragment layouts |
//! | matrix product in flight | [`Pending`] | touching registers the tensor cores own |
//! | tile in shared memory | [`SmemTile`], [`MatrixOperand`] | box, swizzle and descriptor that disagree |
//! | tile as a source of `ldmatrix` | [`MatrixRows`], [`MatrixView`] | swizzled addresses computed twice |
//! | tile of f32 as a right operand | [`WordRows`], [`WordView`] | the same, for V in PV |
//! | ring of tiles | [`Pipeline`] | wrong phases, stages and byte counts |
//! | hardware barrier | [`NamedBarrier`], [`Mbarrier`] | ids and counts as bare numbers |
//! | roles | [`Roles`] | register budgets that do not add up |
//! | parameters | [`Params`] | host and kernel that disagree on an argument |
#![forbid(unsafe_code)]

mod barrier;
mod builder;
mod control;
mod cp_async;
mod element;
mod error;
mod expr;
mod fragment;
mod lower;
mod memory;
#[cfg(doctest)]
mod misuse;
mod mma;
mod pack;
mod pipeline;
mod program;
mod roles;
mod scalar;
mod scope;
mod smem;
mod tf32;
mod tma;
mod value;
mod warp;
mod wgmma;

pub use barrier::{Mbarrier, NamedBarrier};
pub use builder::{Builder, shared_limit};
pub use control::{Carried, Uniform};
pub use cp_async::CopyWidth;
pub use element::{CHUNK_BYTES, Element};
pub use error::{BuildError, Fault, FaultKind};
pub use expr::{Cond, Expr};
pub use fragment::{Acc, Fragment, ROWS_PER_THREAD};
pub use lower::Term;
pub use memory::{Global, Shared};
pub use mma::{MMA_K, MMA_M, MatrixOrder, MatrixRows, MatrixView, Quad};
pub use pipeline::{Pipeline, Stage};
pub use program::{Code, Extent, Params, Program};
pub use roles::{RegisterBudget, Roles, WARPGROUP};
pub use scalar::{Cmp, Half};
pub use scope::{Cta, Scope, UniformScope, Warp, Warpgroup};
pub use smem::{Major, MatrixOperand, SmemTile};
pub use tf32::{WordRows, WordView};
pub use tma::TensorMap;
pub use value::{B16, B32, Bits, F32, Integer, Number, Packed, Pred, Reg, S32, Type, U32, U64, Val};
pub use wgmma::{Pending, Start};

/// The guide's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/writing-a-kernel.md")]
struct Guide;
