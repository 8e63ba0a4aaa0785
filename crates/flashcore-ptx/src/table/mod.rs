//! THE table: one row for each form of each instruction, written like a line of the ISA manual.
//!
//! Constructors ([`crate::inst::Inst::new`]), printer, parser, verifier and simulator all read it through
//! [`form_of`]. Rows are grouped into files by family; adding an instruction is adding a row (and a test line in
//! `tests/`): see `docs/adding-an-instruction.md`.

mod arith;
mod async_copy;
mod convert;
mod fit;
mod form;
mod half;
mod logic;
mod matrix;
mod memory;
mod needs;
mod sparse;
pub mod spec;
mod sync;
mod warp;
mod wmma;

pub use form::{Expected, Form, FormError, form_of, pair_operands};
pub use needs::Needs;
pub use spec::{Access, Class, Completion, Converge, Count, Kind, Memory, OperandSpec, Row, Slot, Ty};

use crate::op::Op;
use std::{collections::HashMap, sync::LazyLock};

/// The rows by family.
const FAMILIES: &[&[Row]] = &[
    arith::INTEGER,
    arith::CARRY,
    arith::VIDEO,
    arith::VIDEO_SET,
    arith::FLOAT,
    half::HALF,
    logic::LOGIC,
    logic::SELECT,
    convert::CONVERT,
    convert::PACK,
    convert::MOVE,
    memory::LOAD_STORE,
    memory::ATOMICS,
    memory::CACHE,
    memory::MATRICES,
    async_copy::CP_ASYNC,
    async_copy::BULK,
    async_copy::TENSOR_COPY,
    async_copy::TENSOR_MAPS,
    sync::MBARRIER,
    sync::FENCES,
    sync::BARRIERS,
    warp::WARP,
    warp::CONTROL,
    matrix::MMA,
    wmma::WMMA_MEMORY,
    wmma::WMMA,
    matrix::WGMMA_GROUPS,
];

/// Every row.
pub fn rows() -> impl Iterator<Item = &'static Row> {
    FAMILIES
        .iter()
        .chain(logic::COMPARE)
        .chain(logic::COMPARE_HALVES)
        .chain(sync::ARRIVALS)
        .chain(matrix::WGMMA)
        .chain(sparse::SPARSE)
        .flat_map(|family| family.iter())
}

/// The rows of one operation.
pub fn rows_of(op: Op) -> &'static [&'static Row] {
    static BY_OP: LazyLock<HashMap<Op, Vec<&'static Row>>> = LazyLock::new(|| {
        let mut by_op = HashMap::<Op, Vec<_>>::new();
        rows().for_each(|row| by_op.entry(row.op).or_default().push(row));
        by_op
    });
    BY_OP.get(&op).map_or(&[], Vec::as_slice)
}
