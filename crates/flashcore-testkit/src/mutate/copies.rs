//! Faults in asynchronous copies, their groups and coordinates, and in the bounds of loops and tiles.

use super::{
    Change, Fault,
    edit::{
        add_to_operand, at_each, change_each, drop_each, insert, instruction, is_backward, replace_operand,
    },
};
use flashcore_ptx::{
    inst::{Inst, Operand, RegId},
    module::{Kernel, Module, Statement},
    op::{Mod, Op},
    types::ScalarType,
};

pub(super) const FAULTS: &[Fault] = &[
    Fault { name: "cp.async wait dropped", apply: |m| drop_each(m, waits_for_copies) },
    Fault {
        name: "cp.async wait leaves one group more",
        apply: |m| add_to_operand(m, waits_for_copies, 0, 1),
    },
    Fault { name: "cp.async commit dropped", apply: |m| drop_each(m, |i| i.op == Op::CpAsyncCommitGroup) },
    Fault { name: "bulk wait dropped", apply: |m| drop_each(m, |i| i.op == Op::CpAsyncBulkWaitGroup) },
    Fault { name: "bulk commit dropped", apply: |m| drop_each(m, |i| i.op == Op::CpAsyncBulkCommitGroup) },
    Fault { name: "tensor copy dropped", apply: |m| drop_each(m, |i| i.op == Op::CpAsyncBulkTensor) },
    Fault { name: "sent store dropped", apply: |m| drop_each(m, |i| i.op == Op::StAsync) },
    Fault { name: "tensor coordinate off by one", apply: coordinate_off_by_one },
    Fault { name: "copy destination off by 128 bytes", apply: destination_off },
    Fault { name: "loop runs once too often", apply: loop_bound },
    Fault { name: "tile bound off by one", apply: tile_bound },
];

fn waits_for_copies(inst: &Inst) -> bool {
    inst.op == Op::CpAsyncWaitGroup
}

/// The second coordinate of a box is one too high.
fn coordinate_off_by_one(module: &Module) -> Vec<Change> {
    at_each(
        module,
        |i| i.op == Op::CpAsyncBulkTensor,
        |kernel, at, inst| {
            let index = inst.operands.iter().position(|o| matches!(o, Operand::Tensor(_)))?;
            let Operand::Tensor(mut tensor) = inst.operands[index].clone() else { return None };
            let row = kernel.registers.add(ScalarType::B32);
            let old = std::mem::replace(tensor.coords.get_mut(1)?, row.into());
            let sum = [row.into(), old, Operand::int(1)];
            insert(kernel, at, instruction(Op::Add, &[ScalarType::S32], sum)?);
            replace_operand(kernel, at + 1, index, Operand::Tensor(tensor));
            Some(())
        },
    )
}

fn destination_off(module: &Module) -> Vec<Change> {
    let loads = |i: &Inst| matches!(i.op, Op::CpAsyncBulkTensor | Op::CpAsync | Op::StAsync);
    change_each(module, loads, |inst| match inst.operands.first_mut()? {
        Operand::Address(address) => {
            address.offset += 128;
            Some(())
        }
        _ => None,
    })
}

/// The comparison that ends a loop lets it run once more.
fn loop_bound(module: &Module) -> Vec<Change> {
    at_each(module, is_bound, |kernel, at, inst| {
        let predicate = inst.operands[0].as_reg()?;
        let closes = guarded_branch(kernel, at, predicate)
            .is_some_and(|(at, target)| is_backward(kernel, at, &target));
        (closes && loosen(kernel, at, inst)).then_some(())
    })
}

/// The comparison that keeps a thread inside of a tile lets one row more pass.
fn tile_bound(module: &Module) -> Vec<Change> {
    at_each(module, is_bound, |kernel, at, inst| {
        let predicate = inst.operands[0].as_reg()?;
        let (branch, target) = guarded_branch(kernel, at, predicate)?;
        let stores =
            kernel.body[branch..].iter().take(24).any(|s| matches!(s, Statement::Inst(i) if i.op == Op::St));
        (!is_backward(kernel, branch, &target) && stores && loosen(kernel, at, inst)).then_some(())
    })
}

fn is_bound(inst: &Inst) -> bool {
    let ordered = [Mod::Lt, Mod::Ge].into_iter().any(|m| inst.mods.first() == Some(&m));
    inst.op == Op::Setp && ordered && inst.ty(0).is_some_and(ScalarType::is_integer)
}

fn loosen(kernel: &mut Kernel, at: usize, mut inst: Inst) -> bool {
    inst.mods[0] = if inst.mods[0] == Mod::Lt { Mod::Le } else { Mod::Gt };
    kernel.body[at] = Statement::Inst(inst);
    true
}

/// The next branch that a predicate guards, before it is written again.
fn guarded_branch(kernel: &Kernel, at: usize, predicate: RegId) -> Option<(usize, Operand)> {
    for (index, statement) in kernel.body.iter().enumerate().skip(at + 1) {
        let Statement::Inst(inst) = statement else { return None };
        if inst.op == Op::Bra && inst.guard.is_some_and(|g| g.reg == predicate) {
            return Some((index, inst.operands.first()?.clone()));
        }
        if inst.operands.first().and_then(Operand::as_reg) == Some(predicate) {
            return None;
        }
    }
    None
}
