//! Rules of asynchronous matrix instructions, by dataflow over the text (PTX ISA, "wgmma": asynchronous proxy,
//! `wgmma.fence`, `wgmma.commit_group`, `wgmma.wait_group`).
//!
//! Each register is idle or in flight: as accumulator or as A fragment of a wgmma whose group is the `age`-th most
//! recent (0: not yet committed). `commit_group` ages every group by one, `wait_group N` lands those older than N.
//! Where paths meet, the younger age counts. Touching a register in flight is an error; so is a wgmma on a
//! register that an ordinary instruction touched after the last `wgmma.fence`.

use super::{
    Report, Rule,
    dataflow::{Analysis, visit},
    flow::{EXIT, Flow, Step},
};
use crate::{
    inst::{Inst, Operand, RegId},
    module::Kernel,
    op::Op,
};
use std::collections::HashSet;

/// How a wgmma uses a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Use {
    /// Accumulator of the instruction whose accumulator starts with the register of this number and has this length.
    Accumulator(usize, usize),
    /// Fragment of A.
    Fragment,
}

/// What is known of a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct State {
    flight: Option<(Use, u8)>,
    /// An ordinary instruction touched it after the last fence.
    touched: bool,
}

impl State {
    fn join(self, other: Self) -> Self {
        let flight = match (self.flight, other.flight) {
            (Some(a), Some(b)) => Some(if a.1 <= b.1 { a } else { b }),
            (a, b) => a.or(b),
        };
        Self { flight, touched: self.touched || other.touched }
    }
}

struct InFlight<'k>(&'k Kernel);

impl InFlight<'_> {
    fn index(&self, reg: RegId) -> usize {
        self.0.registers.dense(reg)
    }

    fn regs(&self, operand: Option<&Operand>) -> Vec<usize> {
        let mut regs = Vec::new();
        if let Some(operand) = operand {
            operand.for_each_reg(&mut |reg| regs.push(self.index(reg)));
        }
        regs
    }

    /// The registers of a wgmma with their use: accumulator, and A where it comes in registers.
    fn uses(&self, inst: &Inst) -> Vec<(usize, Use)> {
        let accumulator = self.regs(inst.operands.first());
        let signature = Use::Accumulator(accumulator.first().copied().unwrap_or(0), accumulator.len());
        let fragment = inst.operands.get(1).filter(|a| matches!(a, Operand::Vector(_)));
        let fragment = self.regs(fragment).into_iter().map(|r| (r, Use::Fragment));
        accumulator.into_iter().map(|r| (r, signature)).chain(fragment).collect()
    }

    /// Registers that an instruction touches in the ordinary way.
    fn touches(&self, inst: &Inst) -> Vec<usize> {
        let mut regs = Vec::new();
        let skip = if inst.op == Op::WgmmaMmaAsync { self.async_operands(inst) } else { 0 };
        inst.guard.iter().for_each(|g| regs.push(self.index(g.reg)));
        inst.operands[skip..].iter().for_each(|o| regs.extend(self.regs(Some(o))));
        regs
    }

    /// How many leading operands of a wgmma are accumulator and A registers.
    fn async_operands(&self, inst: &Inst) -> usize {
        if matches!(inst.operands.get(1), Some(Operand::Vector(_))) { 2 } else { 1 }
    }
}

impl Analysis for InFlight<'_> {
    type Facts = Vec<State>;

    fn at_entry(&self) -> Self::Facts {
        vec![State { flight: None, touched: true }; self.0.registers.len()]
    }

    fn join(&self, into: &mut Self::Facts, other: &Self::Facts) {
        into.iter_mut().zip(other).for_each(|(a, b)| *a = a.join(*b));
    }

    fn step(&self, facts: &mut Self::Facts, step: &Step<'_>, _: usize) {
        match step.inst.op {
            Op::WgmmaFence => facts.iter_mut().for_each(|s| s.touched = false),
            Op::WgmmaCommitGroup => {
                let ages = facts.iter_mut().filter_map(|s| s.flight.as_mut());
                ages.for_each(|(_, age)| *age = age.saturating_add(1));
            }
            Op::WgmmaWaitGroup => {
                let depth = wait_depth(step.inst);
                facts.iter_mut().for_each(|s| s.flight = s.flight.filter(|(_, age)| *age <= depth));
            }
            _ => {
                self.touches(step.inst).into_iter().for_each(|r| facts[r].touched = true);
                if step.inst.op == Op::WgmmaMmaAsync {
                    // Touched registers were reported at this instruction; the next one need not repeat it.
                    let used = |u| State { flight: Some((u, 0)), touched: false };
                    self.uses(step.inst).into_iter().for_each(|(r, u)| facts[r] = used(u));
                }
            }
        }
    }
}

fn wait_depth(inst: &Inst) -> u8 {
    inst.operands.first().and_then(Operand::as_int).and_then(|n| u8::try_from(n).ok()).unwrap_or(0)
}

/// Reports every broken rule; of the many instructions that touch one accumulator too early, the first of a block.
pub(super) fn check(flow: &Flow<'_>, report: &mut Report<'_>) {
    if !flow.kernel.instructions().any(|(_, inst)| inst.op == Op::WgmmaMmaAsync) {
        return;
    }
    let analysis = InFlight(flow.kernel);
    let mut told = HashSet::new();
    let names: Vec<String> = flow.kernel.registers.iter().map(|r| flow.kernel.registers.name(r)).collect();
    visit(flow, &analysis, |facts, step, block| {
        let found = match step.inst.op {
            Op::WgmmaMmaAsync => check_mma(&analysis, facts, step.inst, &names)
                .or_else(|| check_touch(&analysis, facts, step.inst, &names)),
            Op::WgmmaWaitGroup => check_wait(facts, &names),
            Op::WgmmaFence | Op::WgmmaCommitGroup => None,
            _ if ends_thread(flow, step, block) => check_end(facts, &names),
            _ => check_touch(&analysis, facts, step.inst, &names).filter(|_| told.insert(block)),
        };
        if let Some((rule, message)) = found {
            report.at(rule, step.statement, message);
        }
    });
}

fn ends_thread(flow: &Flow<'_>, step: &Step<'_>, block: usize) -> bool {
    let last = flow.blocks[block].statements.end - 1 == step.statement;
    last && flow.blocks[block].next.contains(&EXIT)
}

type Broken = (Rule, String);

fn check_mma(analysis: &InFlight<'_>, facts: &[State], inst: &Inst, names: &[String]) -> Option<Broken> {
    let uses = analysis.uses(inst);
    let clash =
        uses.iter().find(|(reg, wanted)| matches!(facts[*reg].flight, Some((used, _)) if used != *wanted));
    if let Some(&(reg, _)) = clash {
        let message = format!(
            "`{}` is in flight in another wgmma; only accumulation on the same registers and shape may overlap: wait first",
            names[reg]
        );
        return Some((Rule::WgmmaInFlight, message));
    }
    let touched = uses.iter().find(|(reg, _)| facts[*reg].touched)?.0;
    let message = format!(
        "`{}` may have been touched since the last wgmma.fence: put `wgmma.fence.sync.aligned` before this wgmma",
        names[touched]
    );
    Some((Rule::WgmmaFence, message))
}

fn check_touch(analysis: &InFlight<'_>, facts: &[State], inst: &Inst, names: &[String]) -> Option<Broken> {
    let touches = analysis.touches(inst);
    let (reg, (used, age)) = touches.into_iter().find_map(|r| Some((r, facts[r].flight?)))?;
    let role = if used == Use::Fragment { "A fragment" } else { "accumulator" };
    let cure = match age {
        0 => "commit its group and wait for it".into(),
        age => format!("`wgmma.wait_group {}` or less must come first", age - 1),
    };
    Some((Rule::WgmmaInFlight, format!("`{}` is in flight as {role} of a wgmma: {cure}", names[reg])))
}

fn check_wait(facts: &[State], names: &[String]) -> Option<Broken> {
    let open = facts.iter().position(|s| matches!(s.flight, Some((_, 0))))?;
    let message = format!(
        "the wgmma on `{}` is not committed: `wgmma.commit_group` must come before the wait",
        names[open]
    );
    Some((Rule::WgmmaCommit, message))
}

fn check_end(facts: &[State], names: &[String]) -> Option<Broken> {
    let open = facts.iter().position(|s| s.flight.is_some())?;
    Some((
        Rule::WgmmaCommit,
        format!("the kernel ends while the wgmma on `{}` is in flight: wait for it", names[open]),
    ))
}
