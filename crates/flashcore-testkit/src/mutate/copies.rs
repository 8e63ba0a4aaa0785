//! Faults in asynchronous copies, their groups and coordinates, and in the bounds of loops and tiles.

use super::{
    Fault,
    edit::{Edit, insert, instruction, is_backward, replace_operand},
    fault,
};
use flashcore_ptx::{
    inst::{Inst, Operand, RegId},
    module::{Kernel, Statement},
    op::{Mod, Op},
    types::ScalarType,
};

pub(super) const FAULTS: &[Fault] = &[
    fault("cp.async wait dropped", waits_for_copies, Edit::Drop),
    fault("cp.async wait leaves one group more", waits_for_copies, Edit::Add(0, 1)),
    fault("cp.async commit dropped", |i| i.op == Op::CpAsyncCommitGroup, Edit::Drop),
    fault("bulk wait dropped", |i| i.op == Op::CpAsyncBulkWaitGroup, Edit::Drop),
    fault("bulk commit dropped", |i| i.op == Op::CpAsyncBulkCommitGroup, Edit::Drop),
    fault("tensor copy dropped", copies_tensor, Edit::Drop),
    fault("sent store dropped", |i| i.op == Op::StAsync, Edit::Drop),
    fault("tensor coordinate off by one", copies_tensor, Edit::At(coordinate_off_by_one)),
    fault("copy destination off by 128 bytes", copies, Edit::Change(destination_off)),
    fault("loop runs once too often", is_bound, Edit::At(loop_bound)),
    fault("tile bound off by one", is_bound, Edit::At(tile_bound)),
];

fn waits_for_copies(inst: &Inst) -> bool {
    inst.op == Op::CpAsyncWaitGroup
}

fn copies_tensor(inst: &Inst) -> bool {
    inst.op == Op::CpAsyncBulkTensor
}

fn copies(inst: &Inst) -> bool {
    matches!(inst.op, Op::CpAsyncBulkTensor | Op::CpAsync | Op::StAsync)
}

/// The second coordinate of a box is one too high.
fn coordinate_off_by_one(kernel: &mut Kernel, at: usize, inst: Inst) -> Option<()> {
    let index = inst.operands.iter().position(|o| matches!(o, Operand::Tensor(_)))?;
    let Operand::Tensor(mut tensor) = inst.operands[index].clone() else { return None };
    let row = kernel.registers.add(ScalarType::B32);
    let old = std::mem::replace(tensor.coords.get_mut(1)?, row.into());
    insert(kernel, at, instruction(Op::Add, ScalarType::S32, [row.into(), old, Operand::int(1)])?);
    replace_operand(kernel, at + 1, index, Operand::Tensor(tensor));
    Some(())
}

fn destination_off(inst: &mut Inst) -> Option<()> {
    let Operand::Address(address) = inst.operands.first_mut()? else { return None };
    address.offset += 128;
    Some(())
}

/// The comparison that ends a loop lets it run once more.
fn loop_bound(kernel: &mut Kernel, at: usize, inst: Inst) -> Option<()> {
    let predicate = inst.operands[0].as_reg()?;
    let (branch, target) = guarded_branch(kernel, at, predicate)?;
    is_backward(kernel, branch, &target).then(|| loosen(kernel, at, inst))
}

/// The comparison that keeps a thread inside a tile admits one row too many.
fn tile_bound(kernel: &mut Kernel, at: usize, inst: Inst) -> Option<()> {
    let predicate = inst.operands[0].as_reg()?;
    let (branch, target) = guarded_branch(kernel, at, predicate)?;
    let is_store = |s: &Statement| matches!(s, Statement::Inst(i) if i.op == Op::St);
    let stores = kernel.body[branch..].iter().take(24).any(is_store);
    (!is_backward(kernel, branch, &target) && stores).then(|| loosen(kernel, at, inst))
}

fn is_bound(inst: &Inst) -> bool {
    let ordered = [Mod::Lt, Mod::Ge].into_iter().any(|m| inst.mods.first() == Some(&m));
    inst.op == Op::Setp && ordered && inst.ty(0).is_some_and(ScalarType::is_integer)
}

fn loosen(kernel: &mut Kernel, at: usize, mut inst: Inst) {
    inst.mods[0] = if inst.mods[0] == Mod::Lt { Mod::Le } else { Mod::Gt };
    kernel.body[at] = Statement::Inst(inst);
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
