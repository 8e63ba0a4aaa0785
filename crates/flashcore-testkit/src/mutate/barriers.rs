//! Faults in barriers, fences, mbarriers and phases.

use super::{
    Fault,
    edit::{Edit, before_in_block, insert, instruction, is_backward, replace_operand},
    fault,
};
use flashcore_ptx::{
    inst::{Inst, Operand},
    module::{Kernel, Statement},
    op::{Mod, Op},
    types::ScalarType,
};

pub(super) const FAULTS: &[Fault] = &[
    fault("proxy fence dropped", |i| i.op == Op::FenceProxy, Edit::Drop),
    fault("barrier dropped", |i| is_barrier(i, true), Edit::Drop),
    fault("barrier arrival dropped", |i| is_barrier(i, false), Edit::Drop),
    fault("warp barrier dropped", |i| i.op == Op::BarWarpSync, Edit::Drop),
    fault("named barrier waits for one warp more", counted, Edit::Add(1, 32)),
    fault("named barrier waits for one warp less", counts_two_warps, Edit::Add(1, -32)),
    fault("named barrier with another's id", arrives_alone, Edit::Add(0, 1)),
    fault("mbarrier expects 16 bytes more", expects_bytes, Edit::Add(2, 16)),
    fault("mbarrier expects 16 bytes less", expects_bytes, Edit::Add(2, -16)),
    fault("mbarrier expects one arrival more", is_init, Edit::Add(1, 1)),
    fault("mbarrier expects one arrival less", expects_several, Edit::Add(1, -1)),
    fault("mbarrier initialisation dropped", is_init, Edit::Drop),
    fault("mbarrier arrival dropped", |i| i.op == Op::MbarrierArrive, Edit::Drop),
    fault("mbarrier arrival doubled", only_arrives, Edit::At(doubled)),
    fault("phase not flipped", is_wait, Edit::Change(phase_not_flipped)),
    fault("phase inverted", is_wait, Edit::At(phase_inverted)),
    fault("wait dropped", is_wait, Edit::At(wait_dropped)),
    fault(
        "spurious failure taken as success",
        |i| i.op == Op::Bra && i.guard.is_some(),
        Edit::At(retry_dropped),
    ),
    fault("stage released early", only_arrives, Edit::At(early_release)),
    fault("register budget raised", |i| i.op == Op::Setmaxnreg && i.has(Mod::Inc), Edit::Add(0, 8)),
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

fn only_arrives(inst: &Inst) -> bool {
    inst.op == Op::MbarrierArrive && !inst.has(Mod::ExpectTx)
}

fn is_wait(inst: &Inst) -> bool {
    matches!(inst.op, Op::MbarrierTryWait | Op::MbarrierTestWait) && inst.has(Mod::Parity)
}

fn counted(inst: &Inst) -> bool {
    (is_barrier(inst, true) || is_barrier(inst, false)) && inst.operands.len() == 2
}

fn counts_two_warps(inst: &Inst) -> bool {
    counted(inst) && inst.operands[1].as_int().is_none_or(|threads| threads > 32)
}

/// An arrival that can have another id than those who wait for it use. Where nobody arrives without waiting, everybody
/// would meet under the new name.
fn arrives_alone(inst: &Inst) -> bool {
    is_barrier(inst, false) && inst.operands[0].as_int().is_some_and(|id| id < 15)
}

fn expects_several(inst: &Inst) -> bool {
    is_init(inst) && inst.operands[1].as_int().is_none_or(|arrivals| arrivals > 1)
}

fn doubled(kernel: &mut Kernel, at: usize, inst: Inst) -> Option<()> {
    insert(kernel, at, inst);
    Some(())
}

fn phase_not_flipped(inst: &mut Inst) -> Option<()> {
    inst.operands[2].as_reg()?;
    inst.operands[2] = Operand::int(0);
    Some(())
}

fn phase_inverted(kernel: &mut Kernel, at: usize, inst: Inst) -> Option<()> {
    let flipped = kernel.registers.add(ScalarType::B32);
    let flip = [flipped.into(), inst.operands[2].clone(), Operand::int(1)];
    insert(kernel, at, instruction(Op::Xor, ScalarType::B32, flip)?);
    replace_operand(kernel, at + 1, 2, flipped.into());
    Some(())
}

/// The wait succeeds at once.
fn wait_dropped(kernel: &mut Kernel, at: usize, inst: Inst) -> Option<()> {
    let operands = vec![inst.operands[0].clone(), Operand::int(0), Operand::int(0)];
    let yes = Inst::new(Op::Setp, [Mod::Eq, Mod::Type(ScalarType::U32)], operands).ok()?;
    kernel.body[at] = Statement::Inst(Inst { guard: inst.guard, ..yes });
    Some(())
}

/// The branch back to a failed wait is dropped.
fn retry_dropped(kernel: &mut Kernel, at: usize, inst: Inst) -> Option<()> {
    let waits = before_in_block(kernel, at, is_wait)?;
    let close = at - waits <= 3 && is_backward(kernel, at, inst.operands.first()?);
    close.then(|| drop(kernel.body.remove(at)))
}

/// The arrival that frees a stage comes before the wait for what still reads it.
fn early_release(kernel: &mut Kernel, at: usize, _: Inst) -> Option<()> {
    let wait = before_in_block(kernel, at, |i| i.op == Op::WgmmaWaitGroup)?;
    // The wait moves behind the arrival, so that its operands stay computed.
    let statement = kernel.body.remove(wait);
    kernel.body.insert(at, statement);
    Some(())
}
