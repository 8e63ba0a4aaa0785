//! `.aligned` instructions are only where all lanes of their group arrive together.
//!
//! For each register the analysis tracks over how large a group of neighbouring threads its value is uniform: its
//! *granule*, the logarithm of the group's size (0 one lane, 5 a warp, 7 a warpgroup, more the whole CTA). A branch
//! on a value of granule g lets threads diverge into groups of that size until the branch's post-dominator; an
//! instruction for a warp needs a granule of 5 around it, one for a warpgroup 7.
//!
//! Assumed here, and checked by the simulator at run time:
//! - neighbouring threads are neighbours along x: a kernel that reads `%tid.y` or declares threads along y or z gets
//!   no credit for `%tid.x >> 7`;
//! - plain loads from one address give all threads one value (otherwise there is a race); volatile, relaxed and
//!   acquire loads, atomics and mbarrier waits do not;
//! - threads that diverged at a branch reconverge at its post-dominator, as ptxas ensures.

use super::{
    Report, Rule,
    dataflow::{Analysis, visit},
    flow::{Flow, Step},
    init::for_each_write,
};
use crate::{
    inst::{Guard, Inst, Operand, RegId},
    module::{Kernel, Space},
    op::{Mod, Op},
    table::{Access, Class, Converge, Form},
    types::SpecialReg,
};

/// Logarithm of the number of neighbouring threads that agree.
type Granule = u8;
const LANE: Granule = 0;
const WARP: Granule = 5;
const WARPGROUP: Granule = 7;
/// At least a whole CTA (1024 threads).
const CTA: Granule = 10;

/// What is known of a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Value {
    granule: Granule,
    /// The value is exactly `%tid.x >> shift`.
    tid_shift: Option<u8>,
}

const fn uniform_over(granule: Granule) -> Value {
    Value { granule, tid_shift: None }
}

const fn tid(shift: u8) -> Value {
    Value { granule: if shift > CTA { CTA } else { shift }, tid_shift: Some(shift) }
}

impl Value {
    fn join(self, other: Self) -> Self {
        if self == other { self } else { uniform_over(self.granule.min(other.granule)) }
    }

    /// The value as seen where only groups of `granule` threads are together.
    fn within(self, granule: Granule) -> Self {
        if granule >= self.granule { self } else { uniform_over(granule) }
    }
}

struct Uniformity<'k> {
    kernel: &'k Kernel,
    one_dimensional: bool,
    /// For each block the granule of the groups that are together in it.
    together: Vec<Granule>,
}

impl Uniformity<'_> {
    fn reg(&self, facts: &[Value], reg: RegId) -> Value {
        facts[self.kernel.registers.dense(reg)]
    }

    fn operand(&self, facts: &[Value], operand: &Operand) -> Value {
        if let Operand::Special(special) = operand {
            return self.special(*special);
        }
        if let Operand::Reg(reg) = operand {
            return self.reg(facts, *reg);
        }
        let mut granule = CTA;
        operand.for_each_reg(&mut |reg| granule = granule.min(self.reg(facts, reg).granule));
        uniform_over(granule)
    }

    fn special(&self, special: SpecialReg) -> Value {
        use SpecialReg as S;
        match special {
            S::TidX if self.one_dimensional => tid(0),
            S::TidY | S::TidZ if self.one_dimensional => uniform_over(CTA),
            S::Warpid if self.one_dimensional => uniform_over(WARP),
            S::TidX | S::TidY | S::TidZ | S::Warpid | S::Laneid => uniform_over(LANE),
            S::LanemaskEq | S::LanemaskLe | S::LanemaskLt | S::LanemaskGe | S::LanemaskGt => {
                uniform_over(LANE)
            }
            S::Clock | S::ClockHi | S::Clock64 | S::Globaltimer | S::GlobaltimerLo | S::GlobaltimerHi => {
                uniform_over(LANE)
            }
            _ => uniform_over(CTA),
        }
    }

    /// The granule of what an instruction reads.
    fn sources(&self, facts: &[Value], step: &Step<'_>) -> Granule {
        let read = step.accesses.iter().filter(|(access, _)| *access != Access::Dst);
        read.map(|(_, operand)| self.operand(facts, operand).granule).min().unwrap_or(CTA)
    }

    /// What an instruction leaves in its results.
    fn result(&self, facts: &[Value], step: &Step<'_>) -> Value {
        let inst = step.inst;
        let sources = self.sources(facts, step);
        match inst.op {
            Op::Mov | Op::Cvt => self.copied(facts, inst, sources),
            Op::Shr | Op::Div | Op::Bfe | Op::And => {
                self.coarsened(facts, inst).unwrap_or(uniform_over(sources))
            }
            Op::Setp => self.compared(facts, inst).unwrap_or(uniform_over(sources)),
            Op::ShflSync => uniform_over(self.shuffled(facts, inst, sources)),
            Op::VoteSync | Op::ReduxSync => uniform_over(sources.max(WARP)),
            Op::BarRed | Op::BarrierRed => uniform_over(CTA),
            Op::Ld if self.is_argument(inst) => uniform_over(LANE),
            Op::Ld => uniform_over(loaded(inst, sources)),
            _ if differs_by_lane(&step.form) => uniform_over(LANE),
            _ => uniform_over(sources),
        }
    }

    /// Whether an instruction loads what a call passes or returns: memory of each thread.
    fn is_argument(&self, inst: &Inst) -> bool {
        inst.has(Mod::Param) && self.kernel.variables.iter().any(|v| v.space == Space::Param)
    }

    fn copied(&self, facts: &[Value], inst: &Inst, sources: Granule) -> Value {
        match inst.operands.as_slice() {
            [Operand::Reg(_), source] if !inst.has(Mod::Sat) => self.operand(facts, source),
            _ => uniform_over(sources),
        }
    }

    /// Operations that drop low bits of `%tid.x >> s`.
    fn coarsened(&self, facts: &[Value], inst: &Inst) -> Option<Value> {
        let shift = self.operand(facts, inst.operands.get(1)?).tid_shift?;
        let by = inst.operands.get(2)?.as_int()?;
        match inst.op {
            Op::Shr => Some(tid(shift.saturating_add(u8::try_from(by).ok()?))),
            Op::Div if by > 0 && by.count_ones() == 1 => Some(tid(shift + by.trailing_zeros() as u8)),
            Op::Bfe => Some(uniform_over(shift.saturating_add(u8::try_from(by).ok()?).min(CTA))),
            Op::And => Some(uniform_over(shift.saturating_add(by.trailing_zeros() as u8).min(CTA))),
            _ => None,
        }
    }

    /// `%tid.x >> s` below (or not below) a multiple of 2^k is decided by groups of 2^(s+k).
    fn compared(&self, facts: &[Value], inst: &Inst) -> Option<Value> {
        let shift = self.operand(facts, inst.operands.get(1)?).tid_shift?;
        let bound = inst.operands.get(2)?.as_int()?;
        let edge = match inst.mods.first()? {
            Mod::Lt | Mod::Ge | Mod::Lo | Mod::Hs => bound,
            Mod::Le | Mod::Gt | Mod::Ls | Mod::Hi => bound.checked_add(1)?,
            _ => return None,
        };
        let combined = inst.operands.get(3).map_or(CTA, |p| self.operand(facts, p).granule);
        Some(uniform_over(shift.saturating_add(edge.trailing_zeros() as u8).min(combined).min(CTA)))
    }

    /// A shuffle from one lane makes a value uniform over the warp, or keeps it uniform over more.
    fn shuffled(&self, facts: &[Value], inst: &Inst, sources: Granule) -> Granule {
        let from_one_lane =
            inst.has(Mod::Idx) && inst.operands[2..].iter().all(|o| self.operand(facts, o).granule >= WARP);
        if from_one_lane { self.operand(facts, &inst.operands[1]).granule.max(WARP) } else { sources }
    }

    /// The granule of the groups into which a branch may part its threads.
    fn parts(&self, facts: &[Value], step: &Step<'_>) -> Granule {
        let guard = self.guard(facts, step.inst.guard);
        if step.inst.op == Op::BrxIdx { guard.min(self.sources(facts, step)) } else { guard }
    }

    fn guard(&self, facts: &[Value], guard: Option<Guard>) -> Granule {
        guard.map_or(CTA, |g| self.reg(facts, g.reg).granule)
    }
}

fn loaded(inst: &Inst, address: Granule) -> Granule {
    let may_change = inst.has(Mod::Volatile) || inst.has(Mod::Relaxed) || inst.has(Mod::Acquire);
    if may_change || inst.has(Mod::Local) { LANE } else { address }
}

/// Results that differ from lane to lane whatever the operands are.
fn differs_by_lane(form: &Form) -> bool {
    matches!(form.row.class, Class::Atomic | Class::Barrier | Class::Warp | Class::Tensor | Class::Load)
}

impl Analysis for Uniformity<'_> {
    type Facts = Vec<Value>;

    fn at_entry(&self) -> Self::Facts {
        vec![uniform_over(CTA); self.kernel.registers.len()]
    }

    fn join(&self, into: &mut Self::Facts, other: &Self::Facts) {
        into.iter_mut().zip(other).for_each(|(a, b)| *a = a.join(*b));
    }

    fn step(&self, facts: &mut Self::Facts, step: &Step<'_>, block: usize) {
        let guard = self.guard(facts, step.inst.guard);
        let result = self.result(facts, step).within(self.together[block]);
        for_each_write(step, |reg| {
            let fact = &mut facts[self.kernel.registers.dense(reg)];
            *fact = if step.inst.guard.is_some() { fact.join(result).within(guard) } else { result };
        });
    }
}

/// Whether threads lie in a row: then `%tid.x >> 7` numbers warpgroups.
fn is_one_dimensional(kernel: &Kernel) -> bool {
    let declared = kernel.directives.required_threads.or(kernel.directives.max_threads);
    let reads = |special| {
        let operand = Operand::Special(special);
        kernel.instructions().any(|(_, inst)| inst.operands.contains(&operand))
    };
    match declared {
        Some([_, y, z]) => y == 1 && z == 1,
        None => !reads(SpecialReg::TidY) && !reads(SpecialReg::TidZ),
    }
}

/// Solves for values and for who is together in turn, until neither changes: granules only ever shrink.
fn solve<'k>(flow: &Flow<'k>) -> Uniformity<'k> {
    let mut uniformity = Uniformity {
        kernel: flow.kernel,
        one_dimensional: is_one_dimensional(flow.kernel),
        together: vec![CTA; flow.blocks.len()],
    };
    loop {
        let mut together = vec![CTA; flow.blocks.len()];
        visit(flow, &uniformity, |facts, step, block| {
            let parts = flow.branch(block).is_some_and(|b| b.statement == step.statement);
            if parts {
                let granule = uniformity.parts(facts, step);
                part(flow, block, granule, &mut together);
            }
        });
        if together == uniformity.together {
            return uniformity;
        }
        uniformity.together = together;
    }
}

/// Threads part at the end of `block` into groups of the granule, up to the block's post-dominator.
fn part(flow: &Flow<'_>, block: usize, granule: Granule, together: &mut [Granule]) {
    if granule >= CTA {
        return;
    }
    let apart = flow.reachable(&flow.blocks[block].next, flow.post_dominator[block]);
    for (slot, _) in together.iter_mut().zip(apart).filter(|(_, apart)| *apart) {
        *slot = granule.min(*slot);
    }
}

/// The granule that an instruction needs around it.
fn needed(step: &Step<'_>) -> Option<(Granule, &'static str)> {
    match step.form.row.converge {
        Converge::Warp => Some((WARP, "warp")),
        Converge::WarpIfAligned if step.inst.has(Mod::Aligned) => Some((WARP, "warp")),
        Converge::Warpgroup => Some((WARPGROUP, "warpgroup")),
        Converge::None | Converge::Mask | Converge::WarpIfAligned => None,
    }
}

fn size(granule: Granule) -> String {
    match granule {
        LANE => "single lanes".into(),
        WARP => "single warps".into(),
        other => format!("groups of {} threads", 1u32 << other),
    }
}

/// Reports instructions for a group of threads that may not be together.
pub(super) fn check(flow: &Flow<'_>, report: &mut Report<'_>) {
    let uniformity = solve(flow);
    visit(flow, &uniformity, |facts, step, block| {
        let Some((needed, group)) = needed(step) else { return };
        let guard = uniformity.guard(facts, step.inst.guard);
        let around = uniformity.together[block];
        let message = if guard < needed {
            format!("needs the whole {group}, but its guard differs between {}", size(guard))
        } else if around < needed {
            let from = parted_at(flow, &uniformity, block, needed);
            format!("needs the whole {group}, but {} may arrive here{from}", size(around))
        } else {
            return;
        };
        report.at(Rule::Divergence, step.statement, message);
    });
}

/// Where the threads in `block` parted, for the message.
fn parted_at(flow: &Flow<'_>, uniformity: &Uniformity<'_>, block: usize, needed: Granule) -> String {
    let mut found = String::new();
    visit(flow, uniformity, |facts, step, at| {
        let parts = found.is_empty() && flow.branch(at).is_some_and(|b| b.statement == step.statement);
        if parts && uniformity.parts(facts, step) < needed {
            let mut together = vec![CTA; flow.blocks.len()];
            part(flow, at, LANE, &mut together);
            if together[block] == LANE {
                let branch = crate::print::inst_text(step.inst, &flow.kernel.registers);
                found = format!(": they part at statement {}, `{branch}`", step.statement);
            }
        }
    });
    found
}
