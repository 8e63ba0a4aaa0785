//! mbarriers: operations of warps, transactions of copies, deferred arrivals of `cp.async`.

use super::{Flow, Outcome, Step};
use crate::{
    engine::Job,
    finding::FindingKind,
    machine::{Culprit, Machine},
    mbarrier::{Fault, Mbarrier},
    memory::{Place, resolve},
    program::{Addr, Dst, Lanes, MbarrierOp, Space, Src, WaitPhase},
    regfile::lanes_of,
    warp::Wait,
};

impl Step<'_, '_> {
    /// Lanes act one after the other; a wait that fails in any lane may hold all of them.
    pub(super) fn mbarrier(&mut self, op: &MbarrierOp, addr: &Addr, space: Space) -> Outcome {
        let addresses = self.address(addr);
        match op {
            MbarrierOp::Wait { done, phase, may_block, acquire } => {
                self.wait(&addresses, space, *done, *phase, *may_block, *acquire)
            }
            MbarrierOp::Init { count } => {
                let counts = self.read(*count);
                self.each(&addresses, space, |step, lane, cta, at| {
                    step.init(lane, cta, at, counts[lane] as u32)
                })
            }
            MbarrierOp::Inval => self.each(&addresses, space, |step, lane, cta, at| {
                step.existing(lane, cta, at)?;
                step.machine.ctas[cta].mbarriers.remove(&at);
                Ok(())
            }),
            MbarrierOp::ExpectTx { bytes } => {
                let bytes = self.read(*bytes);
                self.each(&addresses, space, |step, lane, cta, at| {
                    let outcome = step.existing(lane, cta, at)?.expect(bytes[lane] as u32);
                    step.settle(lane, cta, at, outcome.map(|()| false))
                })
            }
            MbarrierOp::CompleteTx { bytes } => {
                let bytes = self.read(*bytes);
                self.each(&addresses, space, |step, lane, cta, at| {
                    let outcome = step.existing(lane, cta, at)?.complete(bytes[lane] as u32, None);
                    step.settle(lane, cta, at, outcome)
                })
            }
            MbarrierOp::Arrive { .. } => self.arrive(op, &addresses, space),
        }
    }

    fn each(
        &mut self,
        addresses: &Lanes,
        space: Space,
        mut act: impl FnMut(&mut Self, usize, usize, u32) -> Outcome<()>,
    ) -> Outcome {
        for lane in lanes_of(self.mask) {
            let (cta, at) = self.barrier_place(lane, addresses[lane], space)?;
            self.visit(lane, cta);
            act(self, lane, cta, at)?;
        }
        self.machine.effect();
        Ok(Flow::Next)
    }

    /// The CTA and offset of an mbarrier address.
    pub(super) fn barrier_place(&mut self, lane: usize, address: u64, space: Space) -> Outcome<(usize, u32)> {
        let Place::Shared { rank, offset } = resolve(space, address) else {
            let text = format!("address {address:#x} is not in shared memory");
            return self.halt(FindingKind::MbarrierMisuse, lane, text);
        };
        self.require_aligned(lane, offset.into(), 8)?;
        let (cta, _) = self.shared_range(lane, rank, offset, 8, space)?;
        Ok((cta, offset))
    }

    fn init(&mut self, lane: usize, cta: usize, at: u32, count: u32) -> Outcome<()> {
        if self.machine.ctas[cta].mbarriers.contains_key(&at) && self.machine.context.options.checks.barrier {
            let text = format!("the mbarrier at {at:#x} is alive; mbarrier.inval comes first");
            self.report(FindingKind::MbarrierReinit, lane, text);
        }
        let name = self.own_name(false);
        if let Ok(range) = self.machine.ctas[cta].shared.range(at, 8) {
            self.order_shared(lane, cta, range, true, name);
        }
        let cluster = &mut self.machine.clusters[self.machine.ctas[cta].cluster];
        let agent = cluster.agents.mbarrier(cluster.mbarriers);
        cluster.mbarriers += 1;
        match Mbarrier::new(count, agent, (name.agent, name.clock)) {
            Some(barrier) => {
                self.machine.ctas[cta].mbarriers.insert(at, barrier);
                Ok(())
            }
            None => self.halt(
                FindingKind::MbarrierMisuse,
                lane,
                format!("{count} arrivals; 1 to 2^20-1 are allowed"),
            ),
        }
    }

    /// The mbarrier at a place; ends the launch where there is none. Its initialisation must be known here.
    pub(super) fn existing(&mut self, lane: usize, cta: usize, at: u32) -> Outcome<&mut Mbarrier> {
        let Some(barrier) = self.machine.ctas[cta].mbarriers.get(&at) else {
            let text = format!("no mbarrier was initialised at {at:#x}");
            return self.halt(FindingKind::MbarrierUninit, lane, text);
        };
        let (maker, when) = barrier.made_by;
        let warp = &self.machine.warps[self.warp];
        let (seen, inits) = (&warp.clock.view(1 << lane).seen, &warp.clock.inits);
        let known = maker == warp.agent || seen.get(maker) >= when || inits.get(maker) >= when;
        if !known && self.machine.context.options.checks.race {
            let text = format!("the initialisation of mbarrier {at:#x} by warp {maker} is not visible here");
            self.report(FindingKind::SharedRace, lane, text);
        }
        match self.machine.ctas[cta].mbarriers.get_mut(&at) {
            Some(barrier) => Ok(barrier),
            None => Err(super::Halt),
        }
    }

    fn arrive(&mut self, op: &MbarrierOp, addresses: &Lanes, space: Space) -> Outcome {
        let MbarrierOp::Arrive { state, count, expect, drop, no_complete, release } = op else {
            return Ok(Flow::Next);
        };
        let counts = self.read(*count);
        let bytes = expect.map(|e| self.read(e));
        let knowledge = release.then(|| self.release());
        let mut states = [0; 32];
        self.each(addresses, space, |step, lane, cta, at| {
            step.check_phase_known(lane, cta, at);
            let barrier = step.existing(lane, cta, at)?;
            states[lane] = barrier.state();
            let expected = bytes.map_or(Ok(()), |b| barrier.expect(b[lane] as u32));
            let arrived = match drop {
                true => barrier.arrive_drop(counts[lane] as u32, knowledge.as_ref()),
                false => barrier.arrive(counts[lane] as u32, knowledge.as_ref()),
            };
            let outcome = expected.and(arrived);
            let outcome =
                if *no_complete && outcome == Ok(true) { Err(Fault::CompletedPhase) } else { outcome };
            step.settle(lane, cta, at, outcome)
        })?;
        self.write(*state, &states);
        Ok(Flow::Next)
    }

    /// Whoever arrives must know that the phases before are complete: else the arrival may count for one of them.
    fn check_phase_known(&mut self, lane: usize, cta: usize, at: u32) {
        let Some(barrier) = self.machine.ctas[cta].mbarriers.get(&at) else { return };
        let known = self.machine.warps[self.warp].clock.view(1 << lane).seen.get(barrier.agent);
        let phase = barrier.phase;
        if known < phase && self.machine.context.options.checks.barrier {
            let text = format!(
                "an arrival in phase {phase} of mbarrier {at:#x}; only {known} are known to be complete"
            );
            self.report(FindingKind::MbarrierWrongPhase, lane, text);
        }
    }

    /// Reports a fault, or wakes those who wait for a phase that has completed.
    fn settle(&mut self, lane: usize, cta: usize, at: u32, outcome: Result<bool, Fault>) -> Outcome<()> {
        match outcome {
            Ok(true) => self.machine.phase_completed(cta, at),
            Ok(false) => {}
            Err(fault) => {
                let (kind, text) = fault_text(at, fault);
                if self.machine.context.options.checks.barrier || kind.is_fatal() {
                    self.report(kind, lane, text);
                }
            }
        }
        if self.machine.halted { Err(super::Halt) } else { Ok(()) }
    }

    fn wait(
        &mut self,
        addresses: &Lanes,
        space: Space,
        done: Dst,
        phase: WaitPhase,
        may_block: bool,
        acquire: bool,
    ) -> Outcome {
        let (WaitPhase::Parity(src) | WaitPhase::State(src)) = phase;
        let wanted = self.read(src);
        let mut results = [0; 32];
        let (mut blocked, mut observed) = (None, Vec::new());
        for lane in lanes_of(self.mask) {
            let (cta, at) = self.barrier_place(lane, addresses[lane], space)?;
            if cta != self.cta {
                let text = "a wait on another CTA's mbarrier".into();
                return self.halt(FindingKind::MbarrierMisuse, lane, text);
            }
            let barrier = self.existing(lane, cta, at)?;
            let passed = match phase {
                WaitPhase::Parity(_) => barrier.passed(wanted[lane] as u32),
                WaitPhase::State(_) => barrier.passed_state(wanted[lane]),
            };
            let now = barrier.phase;
            if let WaitPhase::Parity(_) = phase {
                self.check_alias(lane, at, wanted[lane] as u32);
            }
            results[lane] = passed.into();
            if !passed {
                blocked = Some(Wait::Mbarrier { offset: at, phase: now });
            } else if acquire {
                add_lane(&mut observed, at, lane);
            }
        }
        let gives_up = may_block && (self.ran_out_of_time() || self.fails_spuriously());
        let unlucky = if gives_up && blocked.is_none() { self.unlucky_lanes() } else { 0 };
        for (at, lanes) in observed {
            let news = self.machine.ctas[self.cta].mbarriers[&at].published.clone();
            self.learn(lanes & !unlucky, &news);
        }
        if let (Some(wait), true) = (blocked, may_block && !gives_up) {
            return Ok(Flow::Wait(wait));
        }
        lanes_of(unlucky).for_each(|lane| results[lane] = 0);
        self.write(done, &results);
        Ok(if blocked.is_some() { Flow::Yield } else { Flow::Next })
    }

    /// Whether the lanes have waited for as long as `try_wait` does.
    fn ran_out_of_time(&mut self) -> bool {
        let timed_out = &mut self.machine.warps[self.warp].timed_out;
        let over = *timed_out & self.mask != 0;
        *timed_out &= !self.mask;
        over
    }

    /// Whether this `try_wait` is one of those that give up; never two in a row.
    fn fails_spuriously(&mut self) -> bool {
        if !self.machine.context.options.spurious_failures {
            return false;
        }
        let before = self.machine.warps[self.warp].failed_spuriously;
        let fails = !before && self.machine.rng.one_in(3);
        self.machine.warps[self.warp].failed_spuriously = fails;
        fails
    }

    /// The lanes for which a `try_wait` gives up: all, or, where lanes run apart, any.
    fn unlucky_lanes(&mut self) -> u32 {
        match self.machine.context.options.apart() {
            Some(_) if self.machine.rng.one_in(2) => self.mask & self.machine.rng.next() as u32,
            _ => self.mask,
        }
    }

    /// A parity means the current phase or the one before; a waiter further behind is fooled by the next parity.
    fn check_alias(&mut self, lane: usize, at: u32, parity: u32) {
        let barrier = &self.machine.ctas[self.cta].mbarriers[&at];
        let known = self.machine.warps[self.warp].clock.view(1 << lane).seen.get(barrier.agent);
        let meant = Mbarrier::meant_phase(known, parity);
        let now = i64::from(barrier.phase);
        if meant < now - 1 && self.machine.context.options.checks.barrier {
            let text = format!("a wait for phase {meant} of mbarrier {at:#x}, which is in phase {now}");
            self.report(FindingKind::MbarrierParityAlias, lane, text);
        }
    }

    pub(super) fn pending_count(&mut self, dst: Dst, state: Src) -> Outcome {
        let states = self.read(state);
        self.write(dst, &states.map(|s| s & 0xffff_ffff));
        Ok(Flow::Next)
    }
}

/// Notes that `lane` has observed the mbarrier at `at`.
fn add_lane(observed: &mut Vec<(u32, u32)>, at: u32, lane: usize) {
    match observed.iter_mut().find(|(o, _)| *o == at) {
        Some((_, lanes)) => *lanes |= 1 << lane,
        None => observed.push((at, 1 << lane)),
    }
}

fn fault_text(at: u32, fault: Fault) -> (FindingKind, String) {
    match fault {
        Fault::OverArrival => {
            let text = format!("more arrivals at mbarrier {at:#x} than its phase expects");
            (FindingKind::MbarrierOverArrival, text)
        }
        Fault::Range => {
            (FindingKind::MbarrierMisuse, format!("a count of mbarrier {at:#x} leaves its range"))
        }
        Fault::CompletedPhase => (
            FindingKind::MbarrierMisuse,
            format!("a .noComplete arrival completes the phase of mbarrier {at:#x}"),
        ),
    }
}

impl Machine<'_> {
    /// Wakes the warps that wait for a phase of an mbarrier.
    fn phase_completed(&mut self, cta: usize, at: u32) {
        self.effect();
        for warp in self.warps_of(cta) {
            warp.wake(|wait| matches!(wait, Wait::Mbarrier { offset, .. } if offset == at));
        }
    }

    /// A copy has delivered bytes that an mbarrier counts.
    pub(crate) fn transaction(&mut self, job: &Job, cta: usize, at: u32, bytes: u32) {
        let outcome = self.ctas[cta].mbarriers.get_mut(&at).map(|b| b.complete(bytes, Some(&job.knowledge)));
        self.settle_job(job, cta, at, outcome);
    }

    /// All `cp.async` of a lane before a `cp.async.mbarrier.arrive` have completed.
    pub(crate) fn deferred_arrival(&mut self, job: &Job, at: u32) {
        let outcome = self.ctas[job.cta].mbarriers.get_mut(&at).map(|b| b.arrive(1, Some(&job.knowledge)));
        self.settle_job(job, job.cta, at, outcome);
    }

    fn settle_job(&mut self, job: &Job, cta: usize, at: u32, outcome: Option<Result<bool, Fault>>) {
        match outcome {
            Some(Ok(true)) => self.phase_completed(cta, at),
            Some(Ok(false)) => {}
            Some(Err(fault)) => {
                let (kind, text) = fault_text(at, fault);
                self.report_job(job, kind, text);
            }
            None => {
                let text = format!("an asynchronous completion at {at:#x}, where no mbarrier is");
                self.report_job(job, FindingKind::MbarrierUninit, text);
            }
        }
    }

    fn report_job(&mut self, job: &Job, kind: FindingKind, text: String) {
        let by = Culprit { cta: job.cta, warp: self.warps[job.warp].index, lane: job.mask.trailing_zeros() };
        self.report(kind, by, Some(job.pc), text);
    }
}
