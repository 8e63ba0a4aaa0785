//! One warp: its lanes in groups that share a program counter, its registers, its clock, its queues.

use crate::{
    calls::Calls,
    check::{
        clock::{Knowledge, VClock},
        init::Written,
    },
    program::RegisterCounts,
    regfile::{Origin, RegFile},
};
use std::collections::{BTreeMap, VecDeque};

/// Why lanes cannot go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wait {
    /// They can.
    Ready,
    /// The other lanes of the warp, or of the mask, are not here yet.
    Lanes,
    /// A named barrier of the CTA, by id and generation.
    Named { id: u32, generation: u32 },
    /// A phase of an mbarrier.
    Mbarrier { offset: u32, phase: u32 },
    /// The cluster barrier, by generation.
    Cluster { generation: u32 },
    /// The other warps of the warpgroup.
    Warpgroup,
    /// Registers of the CTA's pool.
    Registers,
}

/// Lanes that share a program counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Split {
    pub(crate) pc: u32,
    pub(crate) mask: u32,
    pub(crate) wait: Wait,
}

/// A warp's place in time, and what it knows.
#[derive(Clone, Default, Debug)]
pub(crate) struct WarpClock {
    /// The warp's own clock, from 1.
    pub(crate) now: u32,
    /// The clock at the last warp-wide synchronisation.
    pub(crate) synced: u32,
    /// What every lane knows.
    pub(crate) knowledge: Knowledge,
    /// What some lanes know besides, until the next warp-wide synchronisation.
    pub(crate) ahead: Option<(u32, Knowledge)>,
    /// What relaxed writes publish: knowledge at the last fence.
    pub(crate) at_fence: Knowledge,
    /// The same for relaxed writes that the own CTA reads: knowledge at the last fence of any scope.
    pub(crate) at_cta_fence: Knowledge,
    /// What relaxed reads have met: becomes knowledge at the next fence.
    pub(crate) before_fence: Knowledge,
    /// What a relaxed arrival at the cluster's barrier publishes: initialisations of mbarriers, at their last fence.
    pub(crate) inits_at_fence: VClock,
    /// Initialisations of mbarriers that such arrivals have told of.
    pub(crate) inits: VClock,
    /// Lanes that wrote shared memory since the last warp-wide synchronisation, without a proxy fence of their own.
    pub(crate) unfenced: u32,
    /// Lanes that wrote shared memory since the last warp-wide synchronisation.
    pub(crate) wrote: u32,
    /// The last group of `cp.async` that its lanes have waited for, and the last that all lanes know of.
    pub(crate) waited: u32,
    pub(crate) waited_by_all: u32,
}

impl WarpClock {
    /// What the lanes of `mask` know.
    pub(crate) fn view(&self, mask: u32) -> &Knowledge {
        match &self.ahead {
            Some((lanes, knowledge)) if mask & !lanes == 0 => knowledge,
            _ => &self.knowledge,
        }
    }

    /// Lanes of `mask` out of `live` learn something.
    pub(crate) fn learn(&mut self, mask: u32, live: u32, news: &Knowledge) {
        if mask == live {
            self.knowledge.join(news);
        }
        match &mut self.ahead {
            Some((lanes, knowledge)) => {
                *lanes |= mask;
                knowledge.join(news);
            }
            None if mask != live => {
                let mut knowledge = self.knowledge.clone();
                knowledge.join(news);
                self.ahead = Some((mask, knowledge));
            }
            None => {}
        }
    }

    /// A fence of lanes of `mask` out of `live`: what they met, they know.
    pub(crate) fn know_what_was_met(&mut self, mask: u32, live: u32) {
        match &mut self.ahead {
            Some((lanes, knowledge)) if mask & !*lanes == 0 => knowledge.know_what_was_met(),
            _ if mask == live => self.knowledge.know_what_was_met(),
            _ => {}
        }
    }

    /// What the lanes of `mask` make known, their own past included; the clock goes on.
    pub(crate) fn release(&mut self, agent: u32, mask: u32) -> Knowledge {
        let mut knowledge = self.view(mask).clone();
        knowledge.seen.raise(agent, self.now);
        // Only those who release tell of their own writes.
        let told = if self.wrote & !mask == 0 { self.now } else { self.synced };
        knowledge.lanes.raise(agent, told);
        self.now += 1;
        knowledge
    }

    /// A new instruction that writes memory: its lanes act at one time, later than all before.
    pub(crate) const fn tick(&mut self) {
        self.now += 1;
    }

    /// All lanes meet: what one knew, all know.
    pub(crate) fn sync(&mut self) {
        if let Some((_, knowledge)) = self.ahead.take() {
            self.knowledge = knowledge;
        }
        self.synced = self.now;
        self.waited_by_all = self.waited;
        self.now += 1;
        self.unfenced = 0;
        self.wrote = 0;
    }

    /// `fence.proxy.async` by the lanes of `mask`: what they know of generic writes, the async proxy knows.
    pub(crate) fn proxy_fence(&mut self, agent: u32, mask: u32) {
        self.unfenced &= !mask;
        let own = if self.unfenced == 0 { self.now } else { self.synced };
        let pass_on = |knowledge: &mut Knowledge| {
            let seen: VClock = knowledge.seen.clone();
            knowledge.fenced.join(&seen);
            knowledge.fenced.raise(agent, own);
        };
        pass_on(&mut self.knowledge);
        if let Some((_, knowledge)) = &mut self.ahead {
            pass_on(knowledge);
        }
        self.now += 1;
    }
}

/// Groups of one kind of asynchronous work, counted for each lane.
#[derive(Clone, Debug, Default)]
pub(crate) struct Groups {
    /// Committed groups of each lane; the open group has this number.
    pub(crate) committed: [u32; 32],
    /// One more than the last group that something was issued into.
    used: [u32; 32],
    /// Groups that were waited for.
    waited: [u32; 32],
}

impl Groups {
    /// A lane issues something into its open group.
    pub(crate) const fn issue(&mut self, lane: usize) {
        self.used[lane] = self.committed[lane] + 1;
    }

    /// A lane closes its open group.
    pub(crate) const fn commit(&mut self, lane: usize) {
        self.committed[lane] += 1;
    }

    /// All but the last `keep` groups of a lane are complete; how many those are.
    pub(crate) fn wait(&mut self, lane: usize, keep: u32) -> u32 {
        let done = self.committed[lane].saturating_sub(keep);
        self.waited[lane] = self.waited[lane].max(done);
        done
    }

    /// Somebody else waits for all that the lane has issued.
    pub(crate) const fn hand_over(&mut self, lane: usize) {
        self.waited[lane] = self.used[lane];
    }

    /// Whether everything issued was waited for.
    pub(crate) fn is_drained(&self) -> bool {
        self.used.iter().zip(&self.waited).all(|(used, waited)| used <= waited)
    }
}

/// Registers of one committed wgmma group.
pub(crate) type GroupRegisters = Vec<u32>;

/// The wgmmas of a warp.
#[derive(Clone, Debug, Default)]
pub(crate) struct WgmmaQueue {
    /// Groups committed so far.
    pub(crate) committed: u32,
    /// Registers of wgmmas issued since.
    pub(crate) open: GroupRegisters,
    /// Registers of groups committed but not waited for, oldest first.
    pub(crate) pending: VecDeque<GroupRegisters>,
}

impl WgmmaQueue {
    /// Whether every wgmma was waited for.
    pub(crate) fn is_drained(&self) -> bool {
        self.open.is_empty() && self.pending.is_empty()
    }
}

/// One warp of a resident CTA.
#[derive(Debug)]
pub(crate) struct Warp {
    /// The resident CTA it belongs to.
    pub(crate) cta: usize,
    /// Its number in the CTA.
    pub(crate) index: u32,
    /// Its number in the cluster: its agent.
    pub(crate) agent: u32,
    /// Lanes that exist.
    pub(crate) lanes: u32,
    pub(crate) exited: u32,
    pub(crate) splits: Vec<Split>,
    pub(crate) registers: RegFile,
    /// Local memory, lane by lane.
    pub(crate) local: Vec<u8>,
    /// Bytes of it that somebody wrote.
    pub(crate) local_written: Written,
    /// Where what was stored there came from, if it meant nothing.
    pub(crate) local_origins: BTreeMap<usize, Origin>,
    /// The carry of each lane.
    pub(crate) carries: u32,
    /// Functions that lanes are in.
    pub(crate) calls: Box<Calls>,
    pub(crate) clock: WarpClock,
    pub(crate) copies: Groups,
    pub(crate) bulk: Groups,
    pub(crate) wgmma: WgmmaQueue,
    /// Registers of a thread that `setmaxnreg` has left it.
    pub(crate) budget: u32,
    /// Asynchronous copies issued, for schedules.
    pub(crate) copies_issued: u64,
    /// Whether the last `try_wait` failed for no reason: it does not do so twice in a row.
    pub(crate) failed_spuriously: bool,
    /// Lanes whose next `try_wait` runs out of time.
    pub(crate) timed_out: u32,
    /// Turns taken while several groups of lanes could run.
    pub(crate) turns: u32,
}

impl Warp {
    /// A warp at the start of the program.
    pub(crate) fn new(cta: usize, index: u32, agent: u32, lanes: u32, setup: &WarpSetup) -> Self {
        Self {
            cta,
            index,
            agent,
            lanes,
            exited: 0,
            splits: vec![Split { pc: setup.entry, mask: lanes, wait: Wait::Ready }],
            registers: RegFile::new(setup.registers),
            local: vec![0; setup.local_bytes as usize * 32],
            local_written: Written::new(setup.local_bytes as usize * 32, false),
            local_origins: BTreeMap::new(),
            carries: 0,
            calls: Box::default(),
            clock: WarpClock { now: 1, ..WarpClock::default() },
            copies: Groups::default(),
            bulk: Groups::default(),
            wgmma: WgmmaQueue::default(),
            budget: setup.budget,
            copies_issued: 0,
            failed_spuriously: false,
            timed_out: 0,
            turns: 0,
        }
    }

    /// Lanes that have not exited.
    pub(crate) const fn live(&self) -> u32 {
        self.lanes & !self.exited
    }

    /// Whether some lanes can run.
    pub(crate) fn is_ready(&self) -> bool {
        self.splits.iter().any(|s| s.wait == Wait::Ready)
    }

    /// The group to run: the lowest program counter, so that groups meet again; now and then the highest, so that
    /// no group starves behind a loop.
    pub(crate) fn pick(&mut self) -> Option<usize> {
        if let [only] = self.splits.as_slice() {
            return (only.wait == Wait::Ready).then_some(0);
        }
        self.turns = self.turns.wrapping_add(1);
        let ready = self.splits.iter().enumerate().filter(|(_, s)| s.wait == Wait::Ready);
        let by_pc = |(_, s): &(usize, &Split)| s.pc;
        let found = if self.turns % 256 == 255 { ready.max_by_key(by_pc) } else { ready.min_by_key(by_pc) };
        found.map(|(at, _)| at)
    }

    /// Joins groups that have come to the same place; those that waited for lanes look again.
    pub(crate) fn merge(&mut self) {
        if self.splits.len() < 2 {
            return;
        }
        let meets = |s: &Split| matches!(s.wait, Wait::Ready | Wait::Lanes);
        let mut merged: Vec<Split> = Vec::with_capacity(self.splits.len());
        for split in self.splits.drain(..) {
            match merged.iter_mut().find(|m| m.pc == split.pc && meets(m) && meets(&split)) {
                Some(other) => {
                    other.mask |= split.mask;
                    other.wait = Wait::Ready;
                }
                None => merged.push(split),
            }
        }
        self.splits = merged;
    }

    /// Wakes the groups that wait for `reason`: they look again.
    pub(crate) fn wake(&mut self, reason: impl Fn(Wait) -> bool) {
        for split in self.splits.iter_mut().filter(|s| reason(s.wait)) {
            split.wait = Wait::Ready;
        }
    }

    /// Wakes the groups that wait for `reason`: they have passed. Returns their lanes.
    pub(crate) fn pass(&mut self, reason: impl Fn(Wait) -> bool) -> u32 {
        let mut lanes = 0;
        for split in self.splits.iter_mut().filter(|s| reason(s.wait)) {
            split.wait = Wait::Ready;
            split.pc += 1;
            lanes |= split.mask;
        }
        self.merge();
        lanes
    }
}

/// What every warp of a launch starts with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WarpSetup {
    pub(crate) entry: u32,
    pub(crate) registers: RegisterCounts,
    pub(crate) local_bytes: u32,
    pub(crate) budget: u32,
}
