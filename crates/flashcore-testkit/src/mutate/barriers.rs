//! Faults in barriers, fences, mbarriers and phases.

use super::{
    Change, Fault,
    edit::{
        add_to_operand, at_each, before_in_block, change_each, drop_each, insert, instruction, is_backward,
        replace_operand,
    },
};
use flashcore_ptx::{
    inst::{Inst, Operand},
    module::{Module, Statement},
    op::{Mod, Op},
    types::ScalarType,
};

pub(super) const FAULTS: &[Fault] = &[
    Fault { name: "proxy fence dropped", apply: |m| drop_each(m, |i| i.op == Op::FenceProxy) },
    Fault { name: "barrier dropped", apply: |m| drop_each(m, |i| is_barrier(i, true)) },
    Fault { name: "barrier arrival dropped", apply: |m| drop_each(m, |i| is_barrier(i, false)) },
    Fault { name: "warp barrier dropped", apply: |m| drop_each(m, |i| i.op == Op::BarWarpSync) },
    Fault { name: "named barrier waits for one warp more", apply: |m| barrier_count(m, 32) },
    Fault { name: "named barrier waits for one warp less", apply: |m| barrier_count(m, -32) },
    Fault { name: "named barrier with another's id", apply: barrier_id },
    Fault { name: "mbarrier expects 16 bytes more", apply: |m| add_to_operand(m, expects_bytes, 2, 16) },
    Fault { name: "mbarrier expects 16 bytes less", apply: |m| add_to_operand(m, expects_bytes, 2, -16) },
    Fault { name: "mbarrier expects one arrival more", apply: |m| add_to_operand(m, is_init, 1, 1) },
    Fault { name: "mbarrier expects one arrival less", apply: fewer_arrivals },
    Fault { name: "mbarrier initialisation dropped", apply: |m| drop_each(m, is_init) },
    Fault { name: "mbarrier arrival dropped", apply: |m| drop_each(m, |i| i.op == Op::MbarrierArrive) },
    Fault { name: "mbarrier arrival doubled", apply: arrival_doubled },
    Fault { name: "phase not flipped", apply: phase_not_flipped },
    Fault { name: "phase inverted", apply: phase_inverted },
    Fault { name: "wait dropped", apply: wait_dropped },
    Fault { name: "spurious failure taken as success", apply: retry_dropped },
    Fault { name: "stage released early", apply: early_release },
    Fault { name: "register budget raised", apply: |m| add_to_operand(m, grows_registers, 0, 8) },
];

fn is_barrier(inst: &Inst, waits: bool) -> bool {
    let ops = if waits { [Op::BarSync, Op::BarrierSync] } else { [Op::BarArrive, Op::BarrierArrive] };
    ops.contains(&inst.op)
}

fn is_init(inst: &Inst) -> bool {
    inst.op == Op::MbarrierInit
}

fn expects_bytes(inst: &Inst) -> bool {
    inst.op == Op::MbarrierArrive && inst.has(Mod::ExpectTx)
}

fn is_wait(inst: &Inst) -> bool {
    matches!(inst.op, Op::MbarrierTryWait | Op::MbarrierTestWait) && inst.has(Mod::Parity)
}

fn grows_registers(inst: &Inst) -> bool {
    inst.op == Op::Setmaxnreg && inst.has(Mod::Inc)
}

fn counted(inst: &Inst) -> bool {
    (is_barrier(inst, true) || is_barrier(inst, false)) && inst.operands.len() == 2
}

fn barrier_count(module: &Module, by: i64) -> Vec<Change> {
    let big = |i: &Inst| counted(i) && i.operands[1].as_int().is_none_or(|n| n + by > 0);
    add_to_operand(module, big, 1, by)
}

/// An arrival under another id than those who wait for it use. Where nobody arrives without waiting, everybody would
/// meet under the new name.
fn barrier_id(module: &Module) -> Vec<Change> {
    let lonely = |i: &Inst| is_barrier(i, false) && i.operands[0].as_int().is_some_and(|id| id < 15);
    add_to_operand(module, lonely, 0, 1)
}

fn fewer_arrivals(module: &Module) -> Vec<Change> {
    let several = |i: &Inst| is_init(i) && i.operands[1].as_int().is_none_or(|n| n > 1);
    add_to_operand(module, several, 1, -1)
}

fn arrival_doubled(module: &Module) -> Vec<Change> {
    let plain = |i: &Inst| i.op == Op::MbarrierArrive && !i.has(Mod::ExpectTx);
    at_each(module, plain, |kernel, at, inst| {
        insert(kernel, at, inst);
        Some(())
    })
}

fn phase_not_flipped(module: &Module) -> Vec<Change> {
    change_each(module, is_wait, |inst| {
        inst.operands[2].as_reg()?;
        inst.operands[2] = Operand::int(0);
        Some(())
    })
}

fn phase_inverted(module: &Module) -> Vec<Change> {
    at_each(module, is_wait, |kernel, at, inst| {
        let parity = inst.operands[2].clone();
        let flipped = kernel.registers.add(ScalarType::B32);
        let flip = [flipped.into(), parity, Operand::int(1)];
        insert(kernel, at, instruction(Op::Xor, &[ScalarType::B32], flip)?);
        replace_operand(kernel, at + 1, 2, flipped.into());
        Some(())
    })
}

/// The wait answers yes at once.
fn wait_dropped(module: &Module) -> Vec<Change> {
    at_each(module, is_wait, |kernel, at, inst| {
        let operands = vec![inst.operands[0].clone(), Operand::int(0), Operand::int(0)];
        let yes = Inst::new(Op::Setp, [Mod::Eq, Mod::Type(ScalarType::U32)], operands).ok()?;
        kernel.body[at] = Statement::Inst(Inst { guard: inst.guard, ..yes });
        Some(())
    })
}

/// The branch back to a failed wait is dropped.
fn retry_dropped(module: &Module) -> Vec<Change> {
    at_each(
        module,
        |i| i.op == Op::Bra && i.guard.is_some(),
        |kernel, at, inst| {
            let waits = before_in_block(kernel, at, is_wait)?;
            let close = at - waits <= 3 && is_backward(kernel, at, inst.operands.first()?);
            close.then(|| drop(kernel.body.remove(at)))
        },
    )
}

/// The arrival that frees a stage comes before the wait for what still reads it.
fn early_release(module: &Module) -> Vec<Change> {
    let frees = |i: &Inst| i.op == Op::MbarrierArrive && !i.has(Mod::ExpectTx);
    at_each(module, frees, |kernel, at, _| {
        let wait = before_in_block(kernel, at, |i| i.op == Op::WgmmaWaitGroup)?;
        // the wait moves behind the arrival, so that its operands stay computed
        let statement = kernel.body.remove(wait);
        kernel.body.insert(at, statement);
        Some(())
    })
}
