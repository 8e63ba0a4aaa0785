//! Resident CTAs and clusters: shared memory, barriers, register pool.

use crate::{
    check::clock::{Agents, Knowledge, NAMED_BARRIERS, VClock},
    machine::Culprit,
    mbarrier::Mbarrier,
    memory::SharedMemory,
    named::Named,
    regfile::lanes_of,
};
use std::collections::BTreeMap;

/// One resident CTA.
#[derive(Debug)]
pub(crate) struct Cta {
    /// Its index in the grid.
    pub(crate) id: [u32; 3],
    /// The resident cluster it belongs to.
    pub(crate) cluster: usize,
    /// Its rank in the cluster.
    pub(crate) rank: u32,
    pub(crate) shared: SharedMemory,
    /// Live mbarriers by offset.
    pub(crate) mbarriers: BTreeMap<u32, Mbarrier>,
    pub(crate) named: Vec<Named>,
    /// Threads that have not exited.
    pub(crate) live_threads: u32,
    /// Registers (of a thread, summed over warps) that `setmaxnreg.dec` has given back.
    pub(crate) pool: u32,
    /// Every `setmaxnreg` of each warpgroup, in order.
    pub(crate) resizes: BTreeMap<u32, Vec<Resize>>,
    /// What the shared-memory locations used for synchronisation publish.
    pub(crate) sync: BTreeMap<u32, Knowledge>,
    /// Tensor maps in global memory for which it has executed `fence.proxy.tensormap`, and how often they had been
    /// changed then.
    pub(crate) fenced_maps: BTreeMap<u64, u32>,
    /// The last use of its shared memory by each warp of another CTA.
    pub(crate) visits: BTreeMap<u32, Visit>,
    /// What its threads knew when they ended or passed the cluster's barrier.
    pub(crate) farewell: VClock,
}

/// A `setmaxnreg` of a warpgroup.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resize {
    pub(crate) pc: u32,
    /// The registers that it names.
    pub(crate) count: u32,
    /// The warps of the group that have executed it, as bits.
    pub(crate) warps: u32,
}

/// A use of shared memory by a warp of another CTA.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Visit {
    /// The warp's clock.
    pub(crate) clock: u32,
    pub(crate) pc: u32,
    pub(crate) by: Culprit,
}

impl Cta {
    pub(crate) fn new(id: [u32; 3], cluster: usize, rank: u32, shared: SharedMemory, threads: u32) -> Self {
        Self {
            id,
            cluster,
            rank,
            shared,
            mbarriers: BTreeMap::new(),
            named: vec![Named::default(); NAMED_BARRIERS as usize],
            live_threads: threads,
            pool: 0,
            resizes: BTreeMap::new(),
            sync: BTreeMap::new(),
            fenced_maps: BTreeMap::new(),
            visits: BTreeMap::new(),
            farewell: VClock::default(),
        }
    }

    /// The mbarrier whose bytes overlap `offset..offset + len`, if any.
    pub(crate) fn mbarrier_at(&self, offset: u32, len: u32) -> Option<u32> {
        let before = self.mbarriers.range(..offset + len).next_back();
        before.map(|(&at, _)| at).filter(|at| at + 8 > offset)
    }
}

/// The barrier of a cluster.
#[derive(Clone, Default, Debug)]
pub(crate) struct ClusterBarrier {
    pub(crate) generation: u32,
    arrived: u32,
    gathered: Knowledge,
    /// Initialisations of mbarriers, published by arrivals behind their fence.
    gathered_inits: VClock,
    /// What those who wait receive.
    pub(crate) published: Knowledge,
    pub(crate) published_inits: VClock,
    /// How far everybody had come on arrival, whatever the order of memory: what ends later is still there.
    gathered_arrivals: VClock,
    pub(crate) published_arrivals: VClock,
    /// For each lane of a warp, the generation it last arrived for.
    arrivals: BTreeMap<u32, [Option<u32>; 32]>,
}

impl ClusterBarrier {
    /// Lanes arrive; false if some of them had arrived already.
    pub(crate) fn arrive(&mut self, agent: u32, mask: u32, knowledge: Option<&Knowledge>) -> bool {
        let now = Some(self.generation);
        let lanes = self.arrivals.entry(agent).or_default();
        let fresh = lanes_of(mask).all(|lane| lanes[lane] != now);
        lanes_of(mask).for_each(|lane| lanes[lane] = now);
        self.arrived += mask.count_ones();
        if let Some(knowledge) = knowledge {
            self.gathered.join(knowledge);
        }
        fresh
    }

    /// What an arrival tells of initialised mbarriers.
    pub(crate) fn tell_inits(&mut self, inits: &VClock) {
        self.gathered_inits.join(inits);
    }

    /// How far those who arrive have come.
    pub(crate) fn tell_arrival(&mut self, seen: &VClock) {
        self.gathered_arrivals.join(seen);
    }

    /// Lanes end: their arrivals no longer stand for those of others.
    pub(crate) fn leave(&mut self, agent: u32, mask: u32) {
        let Some(lanes) = self.arrivals.get_mut(&agent) else { return };
        for lane in lanes_of(mask) {
            if lanes[lane].take() == Some(self.generation) {
                self.arrived -= 1;
            }
        }
    }

    /// The generation for which the lanes have arrived; the latest, if they have for several.
    pub(crate) fn arrived_for(&self, agent: u32, mask: u32) -> Option<u32> {
        let lanes = self.arrivals.get(&agent)?;
        let latest = |latest: u32, lane: usize| Some(latest.max(lanes[lane]?));
        lanes_of(mask).try_fold(0, latest)
    }

    /// Completes the generation once all live threads have arrived.
    pub(crate) fn try_complete(&mut self, live_threads: u32) -> bool {
        if self.arrived == 0 || self.arrived < live_threads {
            return false;
        }
        self.generation += 1;
        self.arrived = 0;
        let gathered = std::mem::take(&mut self.gathered);
        self.published.join(&gathered);
        let inits = std::mem::take(&mut self.gathered_inits);
        self.published_inits.join(&inits);
        let arrivals = std::mem::take(&mut self.gathered_arrivals);
        self.published_arrivals.join(&arrivals);
        true
    }
}

/// One resident cluster.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// Its linear number in the grid.
    pub(crate) number: u32,
    pub(crate) agents: Agents,
    pub(crate) barrier: ClusterBarrier,
    /// mbarriers initialised so far: each gets an agent.
    pub(crate) mbarriers: u32,
    /// Warps that have not ended.
    pub(crate) live_warps: u32,
}
