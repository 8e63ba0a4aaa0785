//! One warp: its lanes in groups that share a program counter, its registers, its clock, its queues.

use crate::{
    calls::Calls,
    check::{awareness::WarpClock, init::Written},
    program::RegisterCounts,
    regfile::{Origin, RegFile},
    rng::mix,
};
use std::collections::{BTreeMap, VecDeque};

/// Why lanes cannot continue.
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

    /// Another warp waits for everything the lane has issued.
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
    /// Bytes of it that were written.
    pub(crate) local_written: Written,
    /// Where what was stored there came from, if it meant nothing.
    pub(crate) local_origins: BTreeMap<usize, Origin>,
    /// Bytes of local memory that mean nothing, as they would be if what nobody wrote were something else.
    pub(crate) local_others: BTreeMap<usize, u8>,
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
    /// The seed by which groups of lanes run apart, where they do not join by themselves.
    pub(crate) apart: Option<u64>,
}

/// Turns after which other groups come first, where lanes run apart.
const LEAD: u32 = 256;

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
            local_others: BTreeMap::new(),
            carries: 0,
            calls: Box::default(),
            clock: WarpClock::started(),
            copies: Groups::default(),
            bulk: Groups::default(),
            wgmma: WgmmaQueue::default(),
            budget: setup.budget,
            copies_issued: 0,
            failed_spuriously: false,
            timed_out: 0,
            turns: 0,
            apart: setup.apart,
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

    /// The group to run.
    pub(crate) fn pick(&mut self) -> Option<usize> {
        if let [only] = self.splits.as_slice() {
            return (only.wait == Wait::Ready).then_some(0);
        }
        self.turns = self.turns.wrapping_add(1);
        self.apart.map_or_else(|| self.pick_last(), |seed| self.pick_leader(seed))
    }

    /// The lowest program counter, so that groups meet again; now and then the highest, so that no group starves behind
    /// a loop.
    fn pick_last(&self) -> Option<usize> {
        let ready = self.splits.iter().enumerate().filter(|(_, s)| s.wait == Wait::Ready);
        let by_pc = |(_, s): &(usize, &Split)| s.pc;
        let found = if self.turns % 256 == 255 { ready.max_by_key(by_pc) } else { ready.min_by_key(by_pc) };
        found.map(|(at, _)| at)
    }

    /// Groups in an order of the seed's choice, so that some run as far ahead of the others as they can; another order
    /// after a while, so that none waits forever for those behind it.
    fn pick_leader(&self, seed: u64) -> Option<usize> {
        let age = u64::from(self.turns / LEAD);
        // By its first lane, so that one lane leads as often as the 31 others of its warp.
        let rank = |s: &Split| {
            mix(seed ^ age << 40 ^ u64::from(self.agent) << 8 ^ u64::from(s.mask.trailing_zeros()))
        };
        let ready = self.splits.iter().enumerate().filter(|(_, s)| s.wait == Wait::Ready);
        ready.min_by_key(|(_, s)| rank(s)).map(|(at, _)| at)
    }

    /// Joins groups that have come to the same place; those that waited for lanes look again. Where lanes run apart, only
    /// those join that wait for each other.
    pub(crate) fn merge(&mut self) {
        if self.splits.len() < 2 {
            return;
        }
        let apart = self.apart.is_some();
        let meets = |s: &Split| s.wait == Wait::Lanes || (!apart && s.wait == Wait::Ready);
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
    /// See [`Warp::apart`].
    pub(crate) apart: Option<u64>,
}
