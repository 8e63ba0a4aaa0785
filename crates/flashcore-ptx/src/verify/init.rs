//! Registers that some path through the kernel reads before any write.
//!
//! A guarded write counts as a write: how guards are related is not known here.

use super::{
    Report, Rule,
    dataflow::{Analysis, visit},
    flow::{Flow, Step},
};
use crate::{
    inst::{Inst, Operand, RegId},
    module::Registers,
    op::Op,
    table::Access,
};

struct Written<'k>(&'k Registers);

impl Analysis for Written<'_> {
    /// For each register whether every way here has written it.
    type Facts = Vec<bool>;

    fn at_entry(&self) -> Self::Facts {
        vec![false; self.0.len()]
    }

    fn join(&self, into: &mut Self::Facts, other: &Self::Facts) {
        into.iter_mut().zip(other).for_each(|(a, b)| *a &= b);
    }

    fn step(&self, facts: &mut Self::Facts, step: &Step<'_>, _: usize) {
        for_each_write(step, |reg| facts[self.0.dense(reg)] = true);
    }
}

/// Calls `visit` for each register that an instruction writes.
pub(super) fn for_each_write(step: &Step<'_>, mut visit: impl FnMut(RegId)) {
    for &(access, operand) in step.accesses {
        if access != Access::Src {
            operand.for_each_reg(&mut visit);
        }
    }
}

/// Calls `visit` for each register that an instruction reads. A wgmma whose `scale-d` may be false need not read
/// its accumulator.
pub(super) fn for_each_read(step: &Step<'_>, mut visit: impl FnMut(RegId)) {
    step.inst.guard.iter().for_each(|guard| visit(guard.reg));
    for &(access, operand) in step.accesses {
        let read = match access {
            Access::Src => true,
            Access::Dst => false,
            Access::InOut => always_accumulates(step.inst),
        };
        if read {
            operand.for_each_reg(&mut visit);
        }
    }
}

fn always_accumulates(inst: &Inst) -> bool {
    inst.op != Op::WgmmaMmaAsync || inst.operands.get(3).and_then(Operand::as_int) == Some(1)
}

/// Reports each register once, at its first read.
pub(super) fn check(flow: &Flow<'_>, report: &mut Report<'_>) {
    let registers = &flow.kernel.registers;
    let mut told = vec![false; registers.len()];
    visit(flow, &Written(registers), |facts, step, _| {
        for_each_read(step, |reg| {
            let index = registers.dense(reg);
            if !facts[index] && !std::mem::replace(&mut told[index], true) {
                let message =
                    format!("`{}` is read here before anything is written to it", registers.name(reg));
                report.at(Rule::Uninitialised, step.statement, message);
            }
        });
    });
}
