//! The ways to change a kernel: drop, replace, insert, move; one change for each place that fits.

use super::Change;
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

/// One change for each fitting instruction, made by `edit` on a copy; `None` leaves a place out.
pub(super) fn at_each(
    module: &Module,
    fits: impl Fn(&Inst) -> bool,
    edit: impl Fn(&mut Kernel, usize, Inst) -> Option<()>,
) -> Vec<Change> {
    let change = |(index, inst): (usize, &Inst)| {
        let mut copy = module.clone();
        edit(copy.kernels.first_mut()?, index, inst.clone())?;
        Some(Change { site: (index, inst.to_string()), module: copy })
    };
    sites(module, fits).into_iter().filter_map(change).collect()
}

/// Drops the fitting instruction.
pub(super) fn drop_each(module: &Module, fits: impl Fn(&Inst) -> bool) -> Vec<Change> {
    at_each(module, fits, |kernel, at, _| {
        kernel.body.remove(at);
        Some(())
    })
}

/// Changes the fitting instruction in place.
pub(super) fn change_each(
    module: &Module,
    fits: impl Fn(&Inst) -> bool,
    change: impl Fn(&mut Inst) -> Option<()>,
) -> Vec<Change> {
    at_each(module, fits, |kernel, at, mut inst| {
        change(&mut inst)?;
        kernel.body[at] = Statement::Inst(inst);
        Some(())
    })
}

/// Adds `by` to the integer operand `index` of the fitting instruction, whether literal or register.
pub(super) fn add_to_operand(
    module: &Module,
    fits: impl Fn(&Inst) -> bool,
    index: usize,
    by: i64,
) -> Vec<Change> {
    at_each(module, fits, |kernel, at, inst| {
        let old = inst.operands.get(index)?.clone();
        match old.as_int() {
            Some(value) if value + by >= 0 => replace_operand(kernel, at, index, Operand::int(value + by)),
            Some(_) => return None,
            None => {
                let sum = kernel.registers.add(ScalarType::B32);
                let operands = [sum.into(), old, Operand::int(by)];
                insert(kernel, at, instruction(Op::Add, &[ScalarType::U32], operands)?);
                replace_operand(kernel, at + 1, index, sum.into());
            }
        }
        Some(())
    })
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

/// An instruction of `op` with the given types as modifiers.
pub(super) fn instruction(
    op: Op,
    types: &[ScalarType],
    operands: impl IntoIterator<Item = Operand>,
) -> Option<Inst> {
    let mods: Vec<Mod> = types.iter().map(|ty| Mod::Type(*ty)).collect();
    Inst::new(op, mods, operands.into_iter().collect::<Vec<_>>()).ok()
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
            Statement::Inst(_) => {}
        }
    }
    None
}

/// Whether a branch at `at` leads back.
pub(super) fn is_backward(kernel: &Kernel, at: usize, target: &Operand) -> bool {
    let Operand::Label(name) = target else { return false };
    kernel.body[..at].iter().any(|s| matches!(s, Statement::Label(label) if label == name))
}
