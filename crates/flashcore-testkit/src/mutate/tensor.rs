//! Faults in wgmma, mma, fragments and exchanges inside a warp.

use super::{
    Change, Fault,
    edit::{add_to_operand, at_each, change_each, drop_each, first_register, insert, instruction},
};
use flashcore_ptx::{
    inst::{Inst, Operand, RegId},
    module::{Kernel, Module, Statement},
    op::{Mod, Op},
    types::ScalarType,
};

pub(super) const FAULTS: &[Fault] = &[
    Fault { name: "wgmma.fence dropped", apply: |m| drop_each(m, |i| i.op == Op::WgmmaFence) },
    Fault { name: "wgmma wait dropped", apply: |m| drop_each(m, waits_for_wgmma) },
    Fault { name: "wgmma wait leaves one group more", apply: |m| add_to_operand(m, waits_for_wgmma, 0, 1) },
    Fault { name: "wgmma commit dropped", apply: |m| drop_each(m, |i| i.op == Op::WgmmaCommitGroup) },
    Fault { name: "accumulator read early", apply: read_early },
    Fault { name: "leading and stride offset swapped", apply: offsets_swapped },
    Fault { name: "wrong swizzle", apply: wrong_swizzle },
    Fault { name: "operand moved by one chunk", apply: operand_moved },
    Fault { name: "operands swapped", apply: operands_swapped },
    Fault { name: "old accumulator forgotten", apply: accumulator_forgotten },
    Fault { name: "fragment registers swapped", apply: fragments_swapped },
    Fault { name: "matrix load transposed the other way", apply: transposed },
    Fault { name: "shuffle from another lane", apply: shuffle_lane },
    Fault { name: "shuffle mask lacks a lane", apply: shuffle_mask },
];

fn waits_for_wgmma(inst: &Inst) -> bool {
    inst.op == Op::WgmmaWaitGroup
}

fn is_wgmma(inst: &Inst) -> bool {
    inst.op == Op::WgmmaMmaAsync
}

fn is_mma(inst: &Inst) -> bool {
    inst.op == Op::MmaSync
}

/// A register of the accumulator is read right behind the wgmma.
fn read_early(module: &Module) -> Vec<Change> {
    at_each(module, is_wgmma, |kernel, at, inst| {
        let source = first_register(&inst.operands[0])?;
        let copy = kernel.registers.add(source.ty);
        insert(kernel, at + 1, instruction(Op::Mov, &[source.ty], [copy.into(), source.into()])?);
        Some(())
    })
}

/// Changes a copy of the descriptor in operand `index` by instructions put before the wgmma.
fn edit_descriptor(
    module: &Module,
    index: usize,
    edit: impl Fn(&mut Kernel, usize, RegId, RegId) -> Option<()>,
) -> Vec<Change> {
    at_each(module, is_wgmma, |kernel, at, inst| {
        let old = inst.operands.get(index)?.as_reg()?;
        let new = kernel.registers.add(ScalarType::B64);
        let length = kernel.body.len();
        edit(kernel, at, old, new)?;
        let moved = at + kernel.body.len() - length;
        let Statement::Inst(wgmma) = &mut kernel.body[moved] else { return None };
        wgmma.operands[index] = new.into();
        Some(())
    })
}

/// The faults of a descriptor, for the left operand (where it is one) and the right one.
fn edit_descriptors(
    module: &Module,
    edit: impl Fn(&mut Kernel, usize, RegId, RegId) -> Option<()> + Copy,
) -> Vec<Change> {
    [1, 2].into_iter().flat_map(|index| edit_descriptor(module, index, edit)).collect()
}

fn offsets_swapped(module: &Module) -> Vec<Change> {
    edit_descriptors(module, |kernel, at, old, new| {
        let part = kernel.registers.add(ScalarType::B64);
        let bits = |op, ty, dst: RegId, a: RegId, b: i64| {
            instruction(op, &[ty], [dst.into(), a.into(), Operand::int(b)])
        };
        let join = |dst: RegId, a: RegId, b: RegId| {
            instruction(Op::Or, &[ScalarType::B64], [dst.into(), a.into(), b.into()])
        };
        let (b64, u64) = (ScalarType::B64, ScalarType::U64);
        let steps = [
            bits(Op::And, b64, new, old, !(0x3fff_i64 << 16) & !(0x3fff << 32))?,
            bits(Op::And, b64, part, old, 0x3fff << 16)?,
            bits(Op::Shl, b64, part, part, 16)?,
            join(new, new, part)?,
            bits(Op::And, b64, part, old, 0x3fff << 32)?,
            bits(Op::Shr, u64, part, part, 16)?,
            join(new, new, part)?,
        ];
        steps.into_iter().rev().for_each(|step| insert(kernel, at, step));
        Some(())
    })
}

fn wrong_swizzle(module: &Module) -> Vec<Change> {
    edit_descriptors(module, |kernel, at, old, new| {
        let flip = [new.into(), old.into(), Operand::int(i64::MIN)];
        insert(kernel, at, instruction(Op::Xor, &[ScalarType::B64], flip)?);
        Some(())
    })
}

fn operand_moved(module: &Module) -> Vec<Change> {
    edit_descriptors(module, |kernel, at, old, new| {
        let sum = [new.into(), old.into(), Operand::int(1)];
        insert(kernel, at, instruction(Op::Add, &[ScalarType::U64], sum)?);
        Some(())
    })
}

fn operands_swapped(module: &Module) -> Vec<Change> {
    change_each(module, is_wgmma, |inst| {
        let both = inst.operands[1].as_reg().is_some() && inst.operands[2].as_reg().is_some();
        both.then(|| inst.operands.swap(1, 2))
    })
}

fn accumulator_forgotten(module: &Module) -> Vec<Change> {
    change_each(module, is_wgmma, |inst| {
        let forgotten = Operand::int(0);
        let changes = inst.operands[3] != forgotten;
        inst.operands[3] = forgotten;
        changes.then_some(())
    })
}

fn fragments_swapped(module: &Module) -> Vec<Change> {
    change_each(module, is_mma, |inst| match &mut inst.operands[1] {
        Operand::Vector(registers) if registers.len() == 4 => {
            registers.swap(1, 2);
            Some(())
        }
        _ => None,
    })
}

fn transposed(module: &Module) -> Vec<Change> {
    change_each(
        module,
        |i| matches!(i.op, Op::Ldmatrix | Op::Stmatrix),
        |inst| {
            match inst.mods.iter().position(|m| *m == Mod::Trans) {
                Some(at) => drop(inst.mods.remove(at)),
                None => {
                    let count = inst.mods.iter().position(|m| matches!(m, Mod::X1 | Mod::X2 | Mod::X4))?;
                    inst.mods.insert(count + 1, Mod::Trans);
                }
            }
            Some(())
        },
    )
}

/// Not where every lane takes from one: what is taken that way is mostly the same in all of them.
fn shuffle_lane(module: &Module) -> Vec<Change> {
    change_each(
        module,
        |i| i.op == Op::ShflSync && !i.has(Mod::Idx),
        |inst| {
            let lane = inst.operands[2].as_int()?;
            inst.operands[2] = Operand::int(lane ^ 4);
            Some(())
        },
    )
}

fn shuffle_mask(module: &Module) -> Vec<Change> {
    change_each(
        module,
        |i| i.op == Op::ShflSync,
        |inst| {
            let mask = inst.operands.last()?.as_int()?;
            *inst.operands.last_mut()? = Operand::int(mask & 0x7fff_ffff);
            Some(())
        },
    )
}
