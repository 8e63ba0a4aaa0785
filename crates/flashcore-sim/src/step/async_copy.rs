//! `cp.async`, its groups, and its arrivals at mbarriers.

use super::{Flow, Outcome, Step, order::Name};
use crate::{
    check::{clock::Knowledge, race::Proxy},
    engine::{Job, LaneCopy, Work},
    finding::FindingKind,
    memory::{Place, resolve},
    program::{Addr, CpAsync, CpLimit, Lanes, Space},
    regfile::lanes_of,
};

impl Step<'_, '_> {
    pub(super) fn cp_async(&mut self, op: &CpAsync) -> Outcome {
        let (targets, sources) = (self.address(&op.dst), self.address(&op.src));
        let limits = self.limits(op);
        let groups = self.machine.warps[self.warp].copies.committed;
        let mut jobs: Vec<(u32, u32, Vec<LaneCopy>)> = Vec::new();
        for lane in lanes_of(self.mask) {
            let copy = self.lane_copy(op, lane, targets[lane], sources[lane], limits[lane] as u32)?;
            match jobs.iter_mut().find(|(group, ..)| *group == groups[lane]) {
                Some((_, mask, copies)) => {
                    *mask |= 1 << lane;
                    copies.push(copy);
                }
                None => jobs.push((groups[lane], 1 << lane, vec![copy])),
            }
        }
        self.count_access(Space::SharedCta, &targets, op.bytes as usize);
        self.count_access(Space::Global, &sources, op.bytes as usize);
        let warp = &mut self.machine.warps[self.warp];
        lanes_of(self.mask).for_each(|lane| warp.copies.issue(lane));
        warp.copies_issued += 1;
        for (group, mask, copies) in jobs {
            self.issue(group, mask, Knowledge::default(), Work::Copy(copies));
        }
        Ok(Flow::Next)
    }

    /// Bytes to read, by lane.
    fn limits(&mut self, op: &CpAsync) -> Lanes {
        let all = u64::from(op.bytes);
        match op.limit {
            CpLimit::All => [all; 32],
            CpLimit::Bytes(src) => self.read(src).map(|n| n & 0xffff_ffff),
            CpLimit::IgnoreIf(src) => self.read(src).map(|p| if p & 1 == 1 { 0 } else { all }),
        }
    }

    fn lane_copy(&mut self, op: &CpAsync, lane: usize, to: u64, from: u64, read: u32) -> Outcome<LaneCopy> {
        let Place::Shared { rank, offset } = resolve(Space::SharedCta, to) else { return Err(super::Halt) };
        self.require_aligned(lane, offset.into(), op.bytes.into())?;
        if read > op.bytes {
            let text = format!("src-size {read} is more than cp-size {}", op.bytes);
            return self.halt(FindingKind::OutOfBounds, lane, text);
        }
        let (cta, range) = self.shared_range(lane, rank, offset, op.bytes as usize, Space::SharedCta)?;
        self.check_mbarrier_bytes(lane, cta, offset, op.bytes as usize);
        let warp = &self.machine.warps[self.warp];
        let agents = self.machine.clusters[self.machine.ctas[self.cta].cluster].agents;
        let clock = warp.copies.committed[lane] + 1;
        let name = Name {
            agent: agents.cp_async(warp.agent),
            clock,
            proxy: Proxy::Generic,
            strong: false,
            within_cta: false,
        };
        self.order_shared(lane, cta, range, true, name);
        if read > 0 {
            self.require_aligned(lane, from, op.bytes.into())?;
            let range = self.global_range(lane, from, read as usize)?;
            let found = self.machine.global.find(from, read as usize).map(|(a, _)| a.written.covers(range));
            self.check_written_global(found == Ok(true), lane, from);
            let name = self.own_name(false);
            self.order_global(lane, from, read as usize, false, name);
        }
        Ok(LaneCopy { offset, source: from, read, fill: op.bytes - read })
    }

    /// Hands work of this instruction to the engine.
    pub(super) fn issue(&mut self, group: u32, mask: u32, knowledge: Knowledge, work: Work) {
        let cluster = self.machine.ctas[self.cta].cluster;
        let job = Job { cluster, cta: self.cta, warp: self.warp, pc: self.pc, mask, group, knowledge, work };
        self.machine.issue(job);
    }

    pub(super) fn cp_commit(&mut self) -> Outcome {
        let groups = &mut self.machine.warps[self.warp].copies;
        lanes_of(self.mask).for_each(|lane| groups.commit(lane));
        Ok(Flow::Next)
    }

    /// Waits until at most `keep` groups of each lane are pending.
    pub(super) fn cp_wait(&mut self, keep: u32, commit: bool) -> Outcome {
        if commit {
            self.cp_commit()?;
        }
        let committed = self.machine.warps[self.warp].copies.committed;
        let (warp, mask) = (self.warp, self.mask);
        self.machine.complete_all(|job| {
            let mine = job.warp == warp && job.mask & mask != 0 && matches!(job.work, Work::Copy(_));
            mine && lanes_of(job.mask & mask).any(|l| job.group < committed[l].saturating_sub(keep))
        });
        let agents = self.machine.clusters[self.machine.ctas[self.cta].cluster].agents;
        let groups = &mut self.machine.warps[warp].copies;
        let done = lanes_of(mask).map(|lane| groups.wait(lane, keep)).min().unwrap_or(0);
        let warp = &mut self.machine.warps[warp];
        warp.clock.waited = warp.clock.waited.max(done);
        let agent = agents.cp_async(warp.agent);
        self.learn_clock(agent, done);
        Ok(Flow::Next)
    }

    /// The acting lanes learn that an agent has come as far as `clock`.
    pub(super) fn learn_clock(&mut self, agent: u32, clock: u32) {
        let mut news = Knowledge::default();
        news.seen.raise(agent, clock);
        self.learn(self.mask, &news);
    }

    pub(super) fn cp_arrive(&mut self, addr: &Addr, space: Space, noinc: bool) -> Outcome {
        let addresses = self.address(addr);
        let space = if space == Space::Generic { space } else { Space::SharedCta };
        let committed = self.machine.warps[self.warp].copies.committed;
        let agents = self.machine.clusters[self.machine.ctas[self.cta].cluster].agents;
        let mut knowledge = self.release();
        let agent = agents.cp_async(self.machine.warps[self.warp].agent);
        let last = lanes_of(self.mask).map(|l| committed[l] + 1).max().unwrap_or(0);
        knowledge.seen.raise(agent, last);
        knowledge.lanes.raise(agent, last);
        for lane in lanes_of(self.mask) {
            let (cta, offset) = self.barrier_place(lane, addresses[lane], space)?;
            let outcome = self.existing(lane, cta, offset)?;
            if !noinc && outcome.add_pending().is_err() {
                let text = format!("too many arrivals pending at mbarrier {offset:#x}");
                return self.halt(FindingKind::MbarrierMisuse, lane, text);
            }
            self.machine.warps[self.warp].copies.hand_over(lane);
            self.issue(committed[lane], 1 << lane, knowledge.clone(), Work::CopyArrive { offset });
        }
        Ok(Flow::Next)
    }
}
