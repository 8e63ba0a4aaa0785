//! Faults in wgmma, mma, fragments and exchanges inside a warp.

use super::{
    Fault,
    edit::{Edit, first_register, insert, instruction},
    fault,
};
use flashcore_ptx::{
    inst::{Inst, Operand, RegId},
    module::Kernel,
    op::{Mod, Op},
    types::ScalarType,
};

pub(super) const FAULTS: &[Fault] = &[
    fault("wgmma.fence dropped", |i| i.op == Op::WgmmaFence, Edit::Drop),
    fault("wgmma wait dropped", waits_for_wgmma, Edit::Drop),
    fault("wgmma wait leaves one group more", waits_for_wgmma, Edit::Add(0, 1)),
    fault("wgmma commit dropped", |i| i.op == Op::WgmmaCommitGroup, Edit::Drop),
    fault("accumulator read early", is_wgmma, Edit::At(read_early)),
    fault("leading and stride offset swapped", is_wgmma, Edit::Descriptor(0, offsets_swapped)),
    fault("wrong swizzle", is_wgmma, Edit::Descriptor(0, wrong_swizzle)),
    fault("operand moved by one chunk", is_wgmma, Edit::Descriptor(0, operand_moved)),
    fault("operands swapped", is_wgmma, Edit::Change(operands_swapped)),
    fault("old accumulator forgotten", is_wgmma, Edit::Change(accumulator_forgotten)),
    fault("fragment registers swapped", |i| i.op == Op::MmaSync, Edit::Change(fragments_swapped)),
    fault("matrix load transposed the other way", moves_matrix, Edit::Change(transposed)),
    fault("shuffle from another lane", shuffles_between_lanes, Edit::Change(shuffle_lane)),
    fault("shuffle mask lacks a lane", |i| i.op == Op::ShflSync, Edit::Change(shuffle_mask)),
];

fn waits_for_wgmma(inst: &Inst) -> bool {
    inst.op == Op::WgmmaWaitGroup
}

fn is_wgmma(inst: &Inst) -> bool {
    inst.op == Op::WgmmaMmaAsync
}

fn moves_matrix(inst: &Inst) -> bool {
    matches!(inst.op, Op::Ldmatrix | Op::Stmatrix)
}

/// Not where every lane takes from one: what is taken that way is mostly the same in all of them.
fn shuffles_between_lanes(inst: &Inst) -> bool {
    inst.op == Op::ShflSync && !inst.has(Mod::Idx)
}

/// A register of the accumulator is read right behind the wgmma.
fn read_early(kernel: &mut Kernel, at: usize, inst: Inst) -> Option<()> {
    let source = first_register(&inst.operands[0])?;
    let copy = kernel.registers.add(source.ty);
    insert(kernel, at + 1, instruction(Op::Mov, source.ty, [copy.into(), source.into()])?);
    Some(())
}

fn offsets_swapped(kernel: &mut Kernel, at: usize, old: RegId, new: RegId) -> Option<()> {
    let part = kernel.registers.add(ScalarType::B64);
    let bits =
        |op, ty, dst: RegId, a: RegId, b: i64| instruction(op, ty, [dst.into(), a.into(), Operand::int(b)]);
    let join = instruction(Op::Or, ScalarType::B64, [new.into(), new.into(), part.into()])?;
    let (b64, u64) = (ScalarType::B64, ScalarType::U64);
    let steps = [
        bits(Op::And, b64, new, old, !(0x3fff_i64 << 16) & !(0x3fff << 32))?,
        bits(Op::And, b64, part, old, 0x3fff << 16)?,
        bits(Op::Shl, b64, part, part, 16)?,
        join.clone(),
        bits(Op::And, b64, part, old, 0x3fff << 32)?,
        bits(Op::Shr, u64, part, part, 16)?,
        join,
    ];
    steps.into_iter().rev().for_each(|step| insert(kernel, at, step));
    Some(())
}

fn wrong_swizzle(kernel: &mut Kernel, at: usize, old: RegId, new: RegId) -> Option<()> {
    let flip = [new.into(), old.into(), Operand::int(i64::MIN)];
    insert(kernel, at, instruction(Op::Xor, ScalarType::B64, flip)?);
    Some(())
}

fn operand_moved(kernel: &mut Kernel, at: usize, old: RegId, new: RegId) -> Option<()> {
    let sum = [new.into(), old.into(), Operand::int(1)];
    insert(kernel, at, instruction(Op::Add, ScalarType::U64, sum)?);
    Some(())
}

fn operands_swapped(inst: &mut Inst) -> Option<()> {
    let both = inst.operands[1].as_reg().is_some() && inst.operands[2].as_reg().is_some();
    both.then(|| inst.operands.swap(1, 2))
}

fn accumulator_forgotten(inst: &mut Inst) -> Option<()> {
    let old = std::mem::replace(&mut inst.operands[3], Operand::int(0));
    (old != Operand::int(0)).then_some(())
}

fn fragments_swapped(inst: &mut Inst) -> Option<()> {
    let Operand::Vector(registers) = &mut inst.operands[1] else { return None };
    (registers.len() == 4).then(|| registers.swap(1, 2))
}

fn transposed(inst: &mut Inst) -> Option<()> {
    match inst.mods.iter().position(|m| *m == Mod::Trans) {
        Some(at) => drop(inst.mods.remove(at)),
        None => {
            let count = inst.mods.iter().position(|m| matches!(m, Mod::X1 | Mod::X2 | Mod::X4))?;
            inst.mods.insert(count + 1, Mod::Trans);
        }
    }
    Some(())
}

fn shuffle_lane(inst: &mut Inst) -> Option<()> {
    let lane = inst.operands[2].as_int()?;
    inst.operands[2] = Operand::int(lane ^ 4);
    Some(())
}

fn shuffle_mask(inst: &mut Inst) -> Option<()> {
    let mask = inst.operands.last()?.as_int()?;
    *inst.operands.last_mut()? = Operand::int(mask & 0x7fff_ffff);
    Some(())
}
