//! One instruction of one warp. `execute` is the flat list of micro-operations; each family has its file.
//!
//! Called by `schedule.rs` through [`Machine::step`]. A [`Step`] sees the whole machine, and acts for the lanes of
//! one group whose guard holds.

mod async_copy;
mod atomic;
mod barrier;
mod bulk;
mod call;
mod control;
mod convert;
mod format;
mod mbarrier;
mod memory;
mod mma;
mod order;
mod print;
mod registers;
mod scalar;
mod sparse;
mod tensor;
mod tensor_map;
mod undefined;
mod visit;
mod warp;
mod wgmma;
mod wmma;

pub(crate) use atomic::reduce_bytes;
pub(crate) use wgmma::wgmma_product;

use crate::{
    error::SimError,
    finding::FindingKind,
    machine::{Culprit, Machine},
    program::Uop,
    warp::{Split, Wait},
};

/// Where the lanes go after an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Flow {
    /// To the next instruction.
    Next,
    /// To the next instruction, but another warp has its turn first.
    Yield,
    /// These lanes continue; the others of the group execute the instruction later.
    NextFor(u32),
    /// To `target`.
    Jump(u32),
    /// These lanes go to the target; the others of the group execute the instruction later.
    JumpFor(u32, u32),
    /// Away.
    Exit,
    /// Nowhere until something happens.
    Wait(Wait),
}

/// A fatal finding was reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Halt;

pub(crate) type Outcome<T = Flow> = Result<T, Halt>;

/// One instruction of one group of lanes.
pub(crate) struct Step<'s, 'm> {
    pub(crate) machine: &'s mut Machine<'m>,
    /// The resident warp and its CTA.
    pub(crate) warp: usize,
    pub(crate) cta: usize,
    pub(crate) pc: u32,
    /// The lanes of the group.
    pub(crate) group: u32,
    /// The lanes of the group whose guard holds.
    pub(crate) mask: u32,
    /// Whether the value being written is there already.
    pub(crate) rewrites: bool,
    /// Whether a racing plain read is reported only where its value is used.
    pub(crate) tolerant: bool,
    /// Whether such a read has raced.
    pub(crate) raced: bool,
}

impl Machine<'_> {
    /// Executes one instruction of a warp; returns whether its turn continues.
    pub(crate) fn step(&mut self, warp: usize) -> bool {
        let Some(at) = self.warps[warp].pick() else { return false };
        // The group is out of the warp while it acts: what it sets free must not move it.
        let split = self.warps[warp].splits.swap_remove(at);
        let (flow, mask) = self.execute(warp, split);
        match flow {
            Ok(flow) => self.move_on(warp, split, mask, flow),
            Err(Halt) => {
                self.warps[warp].splits.push(split);
                false
            }
        }
    }

    fn execute(&mut self, warp: usize, split: Split) -> (Outcome, u32) {
        let Split { pc, mask: group, .. } = split;
        let program = self.context.program;
        let cta = self.warps[warp].cta;
        let mut step = Step {
            machine: self,
            warp,
            cta,
            pc,
            group,
            mask: group,
            rewrites: false,
            tolerant: false,
            raced: false,
        };
        let Some(code) = program.code.get(pc as usize) else { return (step.exit(), group) };
        step.machine.steps += 1;
        step.machine.hits.hit(pc);
        if let Some((slot, negated)) = code.guard {
            step.mask &= step.guard(slot, negated);
        }
        let mask = step.mask;
        let flow = if mask == 0 { Ok(Flow::Next) } else { step.execute(&code.uop) };
        (flow, mask)
    }

    /// Puts the lanes of a group where they go; `mask` are those whose guard held.
    fn move_on(&mut self, warp: usize, split: Split, mask: u32, flow: Flow) -> bool {
        let Split { pc, mask: group, .. } = split;
        let ready = |pc, mask| Split { pc, mask, wait: Wait::Ready };
        let passed_over = group & !mask;
        let (next, elsewhere) = match flow {
            Flow::Next | Flow::Yield => (group, ready(pc, 0)),
            Flow::NextFor(done) => (passed_over | done, ready(pc, mask & !done)),
            Flow::Jump(target) => (passed_over, ready(target, mask)),
            Flow::JumpFor(target, lanes) => (passed_over, ready(target, lanes)),
            Flow::Wait(wait) => (passed_over, Split { pc, mask, wait }),
            Flow::Exit => (passed_over, ready(pc, 0)),
        };
        let later = if let Flow::JumpFor(_, lanes) = flow { mask & !lanes } else { 0 };
        let diverges = next | later != 0 && matches!(flow, Flow::Jump(_) | Flow::JumpFor(..));
        self.counters.divergent_branches += u64::from(diverges);
        let warp = &mut self.warps[warp];
        let places = [ready(pc + 1, next), elsewhere, ready(pc, later)];
        warp.splits.extend(places.into_iter().filter(|s| s.mask != 0));
        warp.merge();
        matches!(flow, Flow::Next | Flow::Jump(_) | Flow::JumpFor(..) | Flow::NextFor(_))
    }
}

impl Step<'_, '_> {
    fn execute(&mut self, uop: &Uop) -> Outcome {
        match uop {
            Uop::Alu { f, dst, srcs } => self.alu(f, *dst, srcs),
            Uop::Pack { f, dst, srcs } => self.pack(f, *dst, srcs),
            Uop::Carry { op, dst, srcs } => self.carry(*op, *dst, srcs),
            Uop::Compare { f, p, q, srcs, packed, combine } => {
                self.compare(f, *p, *q, srcs, *packed, *combine)
            }
            Uop::Move { dst, src } => self.move_value(*dst, *src),
            Uop::Copy { dsts, srcs } => self.copy(dsts, srcs),
            Uop::Unpack { dsts, src, bits } => self.unpack(dsts, *src, *bits),
            Uop::ToGeneric { dst, src, space } => self.make_generic(*dst, *src, *space),
            Uop::FromGeneric { dst, src, space } => self.leave_generic(*dst, *src, *space),
            Uop::IsSpace { dst, src, space } => self.is_space(*dst, *src, *space),
            Uop::MapA { dst, src, rank, generic } => self.map_address(*dst, *src, *rank, *generic),
            Uop::CtaRank { dst, src } => self.cta_rank(*dst, *src),
            Uop::Load { access, dsts } => self.load(access, dsts),
            Uop::Store { access, srcs } => self.store(access, srcs),
            Uop::Atomic(op) => self.atomic(op),
            Uop::Discard { addr } => self.discard(addr),
            Uop::LoadMatrix { space, addr, dsts, transpose } => {
                self.load_matrix(*space, addr, dsts, *transpose)
            }
            Uop::StoreMatrix { space, addr, srcs, transpose } => {
                self.store_matrix(*space, addr, srcs, *transpose)
            }
            Uop::Shuffle { mode, dst, ok, value, lane, clamp, mask } => {
                self.shuffle(*mode, (*dst, *ok), *value, (*lane, *clamp), *mask)
            }
            Uop::Vote { mode, dst, value, mask } => self.vote(*mode, *dst, *value, *mask),
            Uop::Match { all, dst, ok, value, mask } => self.match_lanes(*all, (*dst, *ok), *value, *mask),
            Uop::Redux { op, signed, dst, value, mask } => self.redux(*op, *signed, *dst, *value, *mask),
            Uop::Elect { dst, ok, mask } => self.elect(*dst, *ok, *mask),
            Uop::ActiveMask { dst } => self.active_mask(*dst),
            Uop::WarpSync { mask } => self.warp_sync(*mask),
            Uop::MoveMatrix { dst, src } => self.move_matrix(*dst, *src),
            Uop::WmmaLoad { fragment, place, dsts } => self.wmma_load(*fragment, place, dsts),
            Uop::WmmaStore { fragment, place, srcs } => self.wmma_store(*fragment, place, srcs),
            Uop::Wmma(op) => self.wmma(op),
            Uop::MmaOther(op) => self.mma_other(op),
            Uop::Mma(op) => self.mma(op),
            Uop::Wgmma(op) => self.wgmma(op),
            Uop::WgmmaFence => self.wgmma_fence(),
            Uop::WgmmaCommit => self.wgmma_commit(),
            Uop::WgmmaWait { keep } => self.wgmma_wait(*keep),
            Uop::CpAsync(op) => self.cp_async(op),
            Uop::CpCommit => self.cp_commit(),
            Uop::CpWait { keep, commit } => self.cp_wait(*keep, *commit),
            Uop::CpArrive { mbarrier, space, noinc } => self.cp_arrive(mbarrier, *space, *noinc),
            Uop::Bulk(op) => self.bulk(op),
            Uop::ReplaceField { place, space, field, value } => {
                self.replace_field(place, *space, *field, *value)
            }
            Uop::CopyMap { dst, src } => self.copy_map(dst, src),
            Uop::AcquireMap { place } => self.acquire_map(place),
            Uop::BulkCommit => self.bulk_commit(),
            Uop::BulkWait { keep, read_only } => self.bulk_wait(*keep, *read_only),
            Uop::Mbarrier { op, addr, space } => self.mbarrier(op, addr, *space),
            Uop::PendingCount { dst, state } => self.pending_count(*dst, *state),
            Uop::Fence(kind) => self.fence(*kind),
            Uop::Barrier { id, count, wait, vote, aligned } => {
                self.barrier(*id, *count, *wait, *vote, *aligned)
            }
            Uop::ClusterArrive { release, aligned } => self.cluster_arrive(*release, *aligned),
            Uop::ClusterWait { acquire, aligned } => self.cluster_wait(*acquire, *aligned),
            Uop::SetMaxReg { count, grow } => self.set_max_registers(*count, *grow),
            Uop::Branch { target } => Ok(Flow::Jump(*target)),
            Uop::BranchTo { index, targets } => self.branch_to(*index, targets),
            Uop::Call(call) => self.call(call),
            Uop::Return { routine } => self.return_from(*routine),
            Uop::Exit => self.exit(),
            Uop::Alloca { dst, bytes, align } => self.alloca(*dst, *bytes, *align),
            Uop::StackSave { dst } => self.stack_save(*dst),
            Uop::StackRestore { src } => self.stack_restore(*src),
            Uop::Trap => self.halt(FindingKind::Trap, 0, "the kernel executed `trap`".into()),
            Uop::Refused(error) => self.refuse(error),
            Uop::Nop => Ok(Flow::Next),
        }
    }

    /// Ends the launch with an error; where faults were found before, they are the answer.
    fn refuse(&mut self, error: &SimError) -> Outcome {
        if self.machine.findings.has_errors() {
            let text = format!("the launch ended here: {error}");
            return self.halt(FindingKind::NotJudged, self.first_lane(), text);
        }
        self.machine.refusal = Some(error.clone());
        self.machine.halted = true;
        Err(Halt)
    }

    /// Reports something about this instruction.
    pub(crate) fn report(&mut self, kind: FindingKind, lane: usize, message: String) {
        let by = Culprit { cta: self.cta, warp: self.machine.warps[self.warp].index, lane: lane as u32 };
        self.machine.report(kind, by, Some(self.pc), message);
    }

    /// Reports something that ends the launch.
    pub(crate) fn halt<T>(&mut self, kind: FindingKind, lane: usize, message: String) -> Outcome<T> {
        self.report(kind, lane, message);
        self.machine.halted = true;
        Err(Halt)
    }

    /// The lowest lane that acts.
    pub(crate) const fn first_lane(&self) -> usize {
        self.mask.trailing_zeros() as usize
    }

    /// Lanes of the warp that have not exited.
    pub(crate) fn live(&self) -> u32 {
        self.machine.warps[self.warp].live()
    }
}
