//! Vector clocks: what each warp knows about the others' past, and about asynchronous work.
//!
//! An *agent* is anything that acts independently: a warp, a warp's queue of bulk reads, bulk writes or `cp.async`, a
//! warpgroup's wgmma queue, an mbarrier (for the copies it tracks), a named barrier. Agents are numbered inside a
//! cluster; global memory adds the cluster's number. An event of agent `a` at clock `c` is known where `seen[a] >= c`.

use std::collections::BTreeMap;

/// A clock for each agent of a cluster; missing ones are 0.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct VClock(Vec<u32>);

impl VClock {
    pub(crate) fn get(&self, agent: u32) -> u32 {
        self.0.get(agent as usize).copied().unwrap_or(0)
    }

    /// Learns that `agent` has come as far as `clock`.
    pub(crate) fn raise(&mut self, agent: u32, clock: u32) {
        let index = agent as usize;
        if self.0.len() <= index {
            self.0.resize(index + 1, 0);
        }
        self.0[index] = self.0[index].max(clock);
    }

    pub(crate) fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, &theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(theirs);
        }
    }

    /// The lesser of both for each agent: what two observers both know.
    pub(crate) fn meet(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(&a, &b)| a.min(b)).collect())
    }
}

/// What travels along with a release and an acquire.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct Knowledge {
    /// Events inside the cluster that happened before.
    pub(crate) seen: VClock,
    /// For each warp, how far its lanes' writes are known to lanes of that warp itself.
    pub(crate) lanes: VClock,
    /// Those of them that a proxy fence has passed on to the async proxy.
    pub(crate) fenced: VClock,
    /// Events of other clusters.
    pub(crate) foreign: BTreeMap<u32, VClock>,
    /// Those that relaxed reads have met without a fence behind them: enough for volatile and relaxed reads to follow.
    pub(crate) met: BTreeMap<u32, VClock>,
    /// By cluster, the writes to global memory that a proxy fence has passed on to the async proxy.
    pub(crate) passed: BTreeMap<u32, VClock>,
}

/// What is known at a place in global memory.
#[derive(Clone, Default, Debug)]
pub(crate) struct Published {
    /// Events, by cluster.
    seen: BTreeMap<u32, VClock>,
    /// Those of them that a proxy fence has passed on.
    passed: BTreeMap<u32, VClock>,
}

impl Published {
    pub(crate) fn join(&mut self, other: &Self) {
        join_all(&mut self.seen, &other.seen);
        join_all(&mut self.passed, &other.passed);
    }
}

impl Knowledge {
    pub(crate) fn join(&mut self, other: &Self) {
        self.seen.join(&other.seen);
        self.lanes.join(&other.lanes);
        self.fenced.join(&other.fenced);
        join_all(&mut self.foreign, &other.foreign);
        join_all(&mut self.met, &other.met);
        join_all(&mut self.passed, &other.passed);
    }

    /// Whether an event of an agent of `cluster` is known to an observer in cluster `here`.
    pub(crate) fn knows(&self, here: u32, cluster: u32, agent: u32, clock: u32) -> bool {
        if here == cluster {
            return self.seen.get(agent) >= clock;
        }
        self.foreign.get(&cluster).is_some_and(|c| c.get(agent) >= clock)
    }

    /// Like [`knows`](Self::knows), what was met without a fence included.
    pub(crate) fn has_met(&self, cluster: u32, agent: u32, clock: u32) -> bool {
        self.met.get(&cluster).is_some_and(|c| c.get(agent) >= clock)
    }

    /// Whether a proxy fence has passed on a write to global memory by an agent of `cluster`.
    pub(crate) fn has_passed(&self, cluster: u32, agent: u32, clock: u32) -> bool {
        self.passed.get(&cluster).is_some_and(|c| c.get(agent) >= clock)
    }

    /// A proxy fence of an agent of cluster `here`: what it knows, its own past included, is passed on.
    pub(crate) fn pass_on(&mut self, here: u32, agent: u32, now: u32) {
        join_all(&mut self.passed, &self.foreign);
        let own = self.passed.entry(here).or_default();
        own.join(&self.seen);
        own.raise(agent, now);
    }

    /// A fence: what was met is known.
    pub(crate) fn know_what_was_met(&mut self) {
        let met = std::mem::take(&mut self.met);
        join_all(&mut self.foreign, &met);
    }

    /// What it says about the own cluster alone.
    pub(crate) fn at_home(&self) -> Self {
        Self { foreign: BTreeMap::new(), met: BTreeMap::new(), ..self.clone() }
    }

    /// The same knowledge as another cluster receives it.
    pub(crate) fn exported(&self, from: u32) -> Published {
        let mut seen = self.foreign.clone();
        seen.entry(from).or_default().join(&self.seen);
        Published { seen, passed: self.passed.clone() }
    }

    /// Receives what was exported, perhaps by the own cluster.
    pub(crate) fn import(&mut self, here: u32, published: &Published) {
        join_all(&mut self.passed, &published.passed);
        for (&cluster, clock) in &published.seen {
            if cluster == here {
                self.seen.join(clock);
            } else {
                self.foreign.entry(cluster).or_default().join(clock);
            }
        }
    }
}

fn join_all(own: &mut BTreeMap<u32, VClock>, other: &BTreeMap<u32, VClock>) {
    for (&cluster, clock) in other {
        own.entry(cluster).or_default().join(clock);
    }
}

/// The numbering of a cluster's agents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Agents {
    warps: u32,
    ctas: u32,
}

/// What an agent is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AgentKind {
    Warp(u32),
    BulkRead(u32),
    Wgmma(u32),
    CpAsync(u32),
    BulkWrite(u32),
    Named,
    Mbarrier,
}

/// Named barriers of a CTA.
pub(crate) const NAMED_BARRIERS: u32 = 16;

impl Agents {
    /// For a cluster of `ctas` CTAs with `warps` warps altogether.
    pub(crate) const fn new(warps: u32, ctas: u32) -> Self {
        Self { warps, ctas }
    }

    /// How many agents read shared memory; they have the lowest numbers.
    pub(crate) const fn readers(self) -> u32 {
        3 * self.warps
    }

    pub(crate) const fn bulk_read(self, warp: u32) -> u32 {
        self.warps + warp
    }

    /// The queue of the warpgroup led by `leader`.
    pub(crate) const fn wgmma(self, leader: u32) -> u32 {
        2 * self.warps + leader
    }

    pub(crate) const fn cp_async(self, warp: u32) -> u32 {
        3 * self.warps + warp
    }

    pub(crate) const fn bulk_write(self, warp: u32) -> u32 {
        4 * self.warps + warp
    }

    pub(crate) const fn named(self, rank: u32, id: u32) -> u32 {
        5 * self.warps + rank * NAMED_BARRIERS + id
    }

    pub(crate) const fn mbarrier(self, number: u32) -> u32 {
        5 * self.warps + self.ctas * NAMED_BARRIERS + number
    }

    pub(crate) const fn kind(self, agent: u32) -> AgentKind {
        let (family, warp) = (agent / self.warps, agent % self.warps);
        match family {
            0 => AgentKind::Warp(warp),
            1 => AgentKind::BulkRead(warp),
            2 => AgentKind::Wgmma(warp),
            3 => AgentKind::CpAsync(warp),
            4 => AgentKind::BulkWrite(warp),
            _ if agent < self.mbarrier(0) => AgentKind::Named,
            _ => AgentKind::Mbarrier,
        }
    }
}
