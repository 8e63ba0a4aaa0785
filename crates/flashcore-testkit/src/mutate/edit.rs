//! The ways to change a kernel: drop, replace, insert, move.

use flashcore_ptx::{
    inst::{Inst, Operand, RegId},
    module::{Kernel, Module, Statement},
    op::{Mod, Op},
    types::ScalarType,
};

/// Statements of the first kernel whose instruction fits.
pub(super) fn sites(module: &Module, fits: impl Fn(&Inst) -> bool) -> Vec<(usize, &Inst)> {
    let kernel = module.kernels.first();
    kernel.into_iter().flat_map(Kernel::instructions).filter(|(_, inst)| fits(inst)).collect()
}

/// How a kernel is changed at an instruction; `None` leaves the place out.
#[derive(Clone, Copy, Debug)]
pub(super) enum Edit {
    /// Drops the instruction.
    Drop,
    /// Adds to the integer operand of that index, whether literal or register.
    Add(usize, i64),
    /// Changes the instruction in place.
    Change(fn(&mut Inst) -> Option<()>),
    /// Changes the kernel about the instruction at that statement.
    At(fn(&mut Kernel, usize, Inst) -> Option<()>),
    /// Makes another descriptor of that operand by instructions put before the wgmma; 0 stands for each of them.
    Descriptor(usize, fn(&mut Kernel, usize, RegId, RegId) -> Option<()>),
}

impl Edit {
    /// The edits that it stands for: of a descriptor, that of the left operand (where it is one) and of the right one.
    pub(super) fn each(self) -> Vec<Self> {
        match self {
            Self::Descriptor(0, edit) => [1, 2].map(|index| Self::Descriptor(index, edit)).to_vec(),
            other => vec![other],
        }
    }

    /// Changes `kernel` at statement `at`, which is `inst`.
    pub(super) fn apply(self, kernel: &mut Kernel, at: usize, mut inst: Inst) -> Option<()> {
        match self {
            Self::Drop => drop(kernel.body.remove(at)),
            Self::Add(index, by) => add(kernel, at, index, by, inst.operands.get(index)?.clone())?,
            Self::Change(change) => {
                change(&mut inst)?;
                kernel.body[at] = Statement::Inst(inst);
            }
            Self::At(edit) => edit(kernel, at, inst)?,
            Self::Descriptor(index, edit) => {
                let old = inst.operands.get(index)?.as_reg()?;
                let (new, length) = (kernel.registers.add(ScalarType::B64), kernel.body.len());
                edit(kernel, at, old, new)?;
                replace_operand(kernel, at + kernel.body.len() - length, index, new.into());
            }
        }
        Some(())
    }
}

fn add(kernel: &mut Kernel, at: usize, index: usize, by: i64, old: Operand) -> Option<()> {
    match old.as_int() {
        Some(value) if value + by >= 0 => replace_operand(kernel, at, index, Operand::int(value + by)),
        Some(_) => return None,
        None => {
            let sum = kernel.registers.add(ScalarType::B32);
            insert(kernel, at, instruction(Op::Add, ScalarType::U32, [sum.into(), old, Operand::int(by)])?);
            replace_operand(kernel, at + 1, index, sum.into());
        }
    }
    Some(())
}

/// Replaces an operand of the instruction at statement `at`.
pub(super) fn replace_operand(kernel: &mut Kernel, at: usize, index: usize, operand: Operand) {
    if let Statement::Inst(inst) = &mut kernel.body[at] {
        inst.operands[index] = operand;
    }
}

/// Puts an instruction before statement `at`.
pub(super) fn insert(kernel: &mut Kernel, at: usize, inst: Inst) {
    kernel.body.insert(at, Statement::Inst(inst));
}

/// An instruction of `op` with a type as its modifier.
pub(super) fn instruction<const N: usize>(op: Op, ty: ScalarType, operands: [Operand; N]) -> Option<Inst> {
    Inst::new(op, [Mod::Type(ty)], operands.to_vec()).ok()
}

/// The first register of a vector operand.
pub(super) fn first_register(operand: &Operand) -> Option<RegId> {
    match operand {
        Operand::Vector(items) => items.first()?.as_reg(),
        other => other.as_reg(),
    }
}

/// The index of the last statement before `at` whose instruction fits, if no label lies between.
pub(super) fn before_in_block(kernel: &Kernel, at: usize, fits: impl Fn(&Inst) -> bool) -> Option<usize> {
    for index in (0..at).rev() {
        match &kernel.body[index] {
            Statement::Label(_) => return None,
            Statement::Inst(inst) if fits(inst) => return Some(index),
            Statement::Inst(_) | Statement::Unknown(_) => {}
        }
    }
    None
}

/// Whether a branch at `at` leads back.
pub(super) fn is_backward(kernel: &Kernel, at: usize, target: &Operand) -> bool {
    let Operand::Label(name) = target else { return false };
    kernel.body[..at].iter().any(|s| matches!(s, Statement::Label(label) if label == name))
}
