//! Warpgroup matrix products as tokens: a [`Pending`] result must be waited for before its registers can be touched.
//!
//! The builder counts the groups in flight, so a token knows which `wgmma.wait_group` it needs; the verifier of
//! `flashcore-ptx` re-derives the same rule from the text.

use flashcore_ptx::{
    inst::Operand,
    op::{Mod, Op, shape},
    types::ScalarType,
};

use crate::{
    builder::Builder,
    control::Carried,
    element::Element,
    error::FaultKind,
    fragment::{Acc, Fragment},
    scope::Scope,
    smem::MatrixOperand,
};

/// Rows of one instruction.
const M: u32 = 64;

/// Groups committed so far, and how many of them have been waited for.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Groups {
    committed: usize,
    completed: usize,
}

impl Groups {
    pub(crate) const fn in_flight(self) -> usize {
        self.committed - self.completed
    }
}

/// A result whose registers belong to the tensor cores until it has been waited for.
#[must_use = "the registers stay in flight until `wait`"]
#[derive(Debug)]
pub struct Pending<T> {
    value: T,
    group: usize,
}

impl<T> Pending<T> {
    /// Waits for this product (and all older ones) and releases its registers.
    #[track_caller]
    pub fn wait(self, b: &mut Builder) -> T {
        if self.group >= b.groups.completed {
            b.require("wgmma.wait_group", Scope::Warpgroup);
            let younger = b.groups.committed - self.group - 1;
            b.emit(Op::WgmmaWaitGroup, &[Mod::Sync, Mod::Aligned], [Operand::int(younger as i64)]);
            b.groups.completed = self.group + 1;
        }
        self.value
    }

    /// Waits for all products older than this one, which stays in flight: what they read may be overwritten.
    #[track_caller]
    pub fn wait_for_older(&self, b: &mut Builder) {
        if self.group > b.groups.completed {
            b.require("wgmma.wait_group", Scope::Warpgroup);
            let younger = b.groups.committed - self.group;
            b.emit(Op::WgmmaWaitGroup, &[Mod::Sync, Mod::Aligned], [Operand::int(younger as i64)]);
            b.groups.completed = self.group;
        }
    }
}

impl<T> Pending<T> {
    /// The same result as part of something else.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Pending<U> {
        Pending { value: f(self.value), group: self.group }
    }
}

impl<T: Carried> Carried for Pending<T> {
    fn identity(&self, b: &Builder) -> Vec<u64> {
        let age = (b.groups.committed - self.group) as u64;
        std::iter::once(age).chain(self.value.identity(b)).collect()
    }

    fn twin(&self) -> Self {
        Self { value: self.value.twin(), group: self.group }
    }
}

/// What a product starts from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Start {
    /// The result is the product.
    Zero,
    /// The product is added to what the tile holds.
    Accumulate,
}

impl Builder {
    /// `d (+)= A · B` with both operands in shared memory, over `depth` elements of theirs.
    #[track_caller]
    pub fn wgmma_ss(
        &mut self,
        d: Acc,
        start: Start,
        [left, right]: [&MatrixOperand; 2],
        depth: u32,
    ) -> Pending<Acc> {
        let element = self.wgmma_begin(&d, right, depth);
        left.check(self, depth, M);
        right.check(self, depth, d.cols() as u32);
        for step in 0..depth / element.depth() {
            let a = left.descriptor(self, step);
            let b = right.descriptor(self, step);
            let tail = tail(start, step, &[left, right]);
            self.wgmma_step(&d, [left.element(), element], Operand::Reg(a), Operand::Reg(b), &tail);
        }
        self.wgmma_commit(d)
    }

    /// Adds the product of two operands in shared memory to one that is in flight: the tensor cores do not wait between them.
    #[track_caller]
    pub fn wgmma_ss_onto(
        &mut self,
        sum: Pending<Acc>,
        operands: [&MatrixOperand; 2],
        depth: u32,
    ) -> Pending<Acc> {
        self.wgmma_ss(sum.value, Start::Accumulate, operands, depth)
    }

    /// `d (+)= P · B` with the left operand in registers.
    #[track_caller]
    pub fn wgmma_rs(
        &mut self,
        d: Acc,
        start: Start,
        left: Fragment,
        right: &MatrixOperand,
    ) -> Pending<(Acc, Fragment)> {
        let depth = left.regs().len() as u32 / 4 * right.element().depth();
        let element = self.wgmma_begin(&d, right, depth);
        right.check(self, depth, d.cols() as u32);
        for step in 0..left.regs().len() / 4 {
            let a = Operand::regs(left.slice(step).map(|r| r.id()));
            let b = right.descriptor(self, step as u32);
            let tail = tail(start, step as u32, &[right]);
            self.wgmma_step(&d, [element; 2], a, Operand::Reg(b), &tail);
        }
        self.wgmma_commit((d, left))
    }

    #[track_caller]
    fn wgmma_begin(&mut self, d: &Acc, right: &MatrixOperand, depth: u32) -> Element {
        self.require("wgmma", Scope::Warpgroup);
        let (cols, element) = (d.cols(), right.element());
        let unit = element.depth();
        if depth == 0 || !depth.is_multiple_of(unit) || !(8..=256).contains(&cols) || !cols.is_multiple_of(8)
        {
            self.fault(FaultKind::Product(format!(
                "a product of depth {depth} into {cols} columns: wgmma goes in depths of {unit} and columns of 8, up to 256"
            )));
        }
        self.emit(Op::WgmmaFence, &[Mod::Sync, Mod::Aligned], []);
        element
    }

    #[track_caller]
    fn wgmma_step(&mut self, d: &Acc, elements: [Element; 2], a: Operand, b: Operand, tail: &[Operand]) {
        let [left, right] = elements.map(|element| Mod::Type(element.ptx()));
        let shape = Mod::Shape(shape(M as u16, d.cols() as u16, elements[1].depth() as u16));
        let mods = [Mod::Sync, Mod::Aligned, shape, Mod::Type(ScalarType::F32), left, right];
        let head = [Operand::regs(d.regs().iter().map(|r| r.id())), a, b];
        let operands: Vec<_> = head.into_iter().chain(tail.iter().cloned()).collect();
        self.emit(Op::WgmmaMmaAsync, &mods, operands);
    }

    #[track_caller]
    fn wgmma_commit<T>(&mut self, value: T) -> Pending<T> {
        self.emit(Op::WgmmaCommitGroup, &[Mod::Sync, Mod::Aligned], []);
        self.groups.committed += 1;
        Pending { value, group: self.groups.committed - 1 }
    }
}

/// What follows the operands: whether to accumulate, two signs and, where elements have 16 bits, how each matrix lies.
fn tail(start: Start, step: u32, matrices: &[&MatrixOperand]) -> Vec<Operand> {
    let scale = i64::from(start == Start::Accumulate || step > 0);
    let lie = matrices.iter().filter(|matrix| matrix.element().half().is_some());
    [scale, 1, 1].into_iter().chain(lie.map(|matrix| matrix.transposed())).map(Operand::int).collect()
}
