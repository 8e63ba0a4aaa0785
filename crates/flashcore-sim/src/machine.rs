//! The machine: what is resident, what is in flight, what was found. Runs a launch from first to last cluster.
//!
//! Called by `launch.rs`; asks `schedule.rs` which warp runs next, `step/` to execute one instruction of it, and
//! `engine.rs` to complete asynchronous work.

use crate::{
    check::clock::{Agents, Knowledge, Published},
    counters::{Counters, PerInstruction},
    cta::{Cluster, ClusterBarrier, Cta},
    engine::Engine,
    error::SimError,
    excuse::Deferred,
    finding::{Finding, FindingKind, Findings, Site},
    geometry::Geometry,
    memory::{GlobalMemory, SharedMemory},
    options::Options,
    program::Program,
    rng::Rng,
    suspect::Suspects,
    warp::{Split, Wait, Warp, WarpSetup},
};
use flashcore_ptx::provenance::{Provenance, Unit};
use std::{collections::BTreeMap, ops::Range};

/// What stays the same during a launch.
pub(crate) struct Context<'m> {
    pub(crate) program: &'m Program,
    pub(crate) options: &'m Options,
    pub(crate) geometry: Geometry,
    /// The parameter block.
    pub(crate) params: Vec<u8>,
    /// Source lines.
    pub(crate) provenance: Option<&'m Provenance>,
    /// Polled now and then: whether to continue.
    pub(crate) going: &'m (dyn Fn() -> bool + Sync),
    /// Reads that runs before have met with a write.
    pub(crate) suspects: Suspects,
    /// Whether there may be another run.
    pub(crate) may_run_again: bool,
}

/// The state of a launch.
pub(crate) struct Machine<'m> {
    pub(crate) context: &'m Context<'m>,
    pub(crate) global: GlobalMemory,
    /// Resident CTAs, cluster by cluster.
    pub(crate) ctas: Vec<Cta>,
    pub(crate) clusters: Vec<Cluster>,
    /// Resident warps, CTA by CTA.
    pub(crate) warps: Vec<Warp>,
    pub(crate) engine: Engine,
    pub(crate) findings: Findings,
    pub(crate) counters: Counters,
    pub(crate) hits: PerInstruction,
    pub(crate) rng: Rng,
    /// What global locations used for synchronisation publish.
    pub(crate) global_sync: BTreeMap<u64, Published>,
    /// The same for one cluster alone: what was published with the scope of a CTA.
    pub(crate) cta_sync: BTreeMap<(u64, u32), Published>,
    /// Whether any thread has written global memory so far; before that, proxy fences have none of it to pass on.
    pub(crate) wrote_global: bool,
    /// Tensor maps in global memory that the launch has changed, and how often.
    pub(crate) changed_maps: BTreeMap<u64, u32>,
    /// Findings that a compare-and-swap would excuse.
    pub(crate) deferred: Vec<Deferred>,
    /// Plain reads that raced, by their instruction, in words.
    pub(crate) races: BTreeMap<u32, String>,
    /// Reads that a write has met in this run.
    pub(crate) suspects: Suspects,
    /// What the kernel printed.
    pub(crate) printed: String,
    /// A finding ended the launch.
    pub(crate) halted: bool,
    /// An instruction ended it that cannot be simulated.
    pub(crate) refusal: Option<SimError>,
    /// Warp instructions executed.
    pub(crate) steps: u64,
    /// `steps` when something last changed that others can see.
    pub(crate) last_effect: u64,
    next_cluster: u32,
    /// The clusters that run here end before this one.
    end: u32,
    /// `steps` at the next poll of whether to continue.
    ask_at: u64,
    /// Where every warp was when none could make progress, and when something last happened.
    stuck: (u64, Vec<Split>),
}

/// Instructions without visible effect after which the launch counts as stuck, for each resident warp.
const SPIN_LIMIT: u64 = 20_000;
/// Instructions between two polls of whether to continue: a fraction of a second.
const ASK_EVERY: u64 = 1 << 17;

impl<'m> Machine<'m> {
    /// A machine for some clusters of the grid, with the first of them loaded.
    pub(crate) fn new(context: &'m Context<'m>, global: GlobalMemory, clusters: Range<u32>) -> Self {
        let mut machine = Self {
            context,
            global,
            ctas: Vec::new(),
            clusters: Vec::new(),
            warps: Vec::new(),
            engine: Engine::default(),
            findings: Findings::default(),
            changed_maps: BTreeMap::new(),
            counters: Counters::default(),
            hits: PerInstruction::new(context.program.code.len()),
            rng: Rng::new(context.options.seed),
            global_sync: BTreeMap::new(),
            cta_sync: BTreeMap::new(),
            wrote_global: false,
            deferred: Vec::new(),
            races: BTreeMap::new(),
            suspects: Suspects::new(),
            printed: String::new(),
            halted: false,
            refusal: None,
            steps: 0,
            last_effect: 0,
            next_cluster: clusters.start,
            end: clusters.end,
            ask_at: ASK_EVERY,
            stuck: (0, Vec::new()),
        };
        let all = clusters.end - clusters.start;
        let cooperative = context.program.cooperative;
        let resident = if cooperative { all } else { context.options.resident_clusters.clamp(1, all) };
        for slot in 0..resident as usize {
            machine.load_cluster(slot);
        }
        machine
    }

    /// Puts the next cluster of the grid into a slot.
    fn load_cluster(&mut self, slot: usize) {
        let geometry = &self.context.geometry;
        let number = self.next_cluster;
        self.next_cluster += 1;
        let warps = geometry.warps * geometry.cluster_ctas;
        let agents = Agents::new(warps, geometry.cluster_ctas);
        let cluster =
            Cluster { number, agents, barrier: ClusterBarrier::default(), mbarriers: 0, live_warps: warps };
        put(&mut self.clusters, slot, cluster);
        for rank in 0..geometry.cluster_ctas {
            self.load_cta(slot, number, rank, agents);
        }
    }

    fn load_cta(&mut self, slot: usize, number: u32, rank: u32, agents: Agents) {
        let geometry = &self.context.geometry;
        let track = self.context.options.checks.tracks_order();
        let at = slot * geometry.cluster_ctas as usize + rank as usize;
        let shared = SharedMemory::new(
            geometry.shared_bytes,
            self.context.program.layout.reserved_shared,
            agents,
            track,
        );
        put(
            &mut self.ctas,
            at,
            Cta::new(geometry.cta_id(number, rank), slot, rank, shared, geometry.threads),
        );
        let setup = WarpSetup {
            entry: self.context.program.entry,
            registers: self.context.program.registers,
            local_bytes: self.context.program.layout.local_bytes,
            budget: geometry.registers,
            apart: self.context.options.apart(),
        };
        for index in 0..geometry.warps {
            let threads = (geometry.threads - index * 32).min(32);
            let lanes = u32::MAX >> (32 - threads);
            let warp = Warp::new(at, index, rank * geometry.warps + index, lanes, &setup);
            put(&mut self.warps, at * geometry.warps as usize + index as usize, warp);
        }
    }

    /// Runs until the grid is done or a finding ended it.
    pub(crate) fn run(&mut self) -> Result<(), SimError> {
        while !self.halted {
            if let Some(warp) = self.next_warp() {
                self.run_warp(warp);
            } else if !self.replace_finished_clusters() {
                if self.is_over() {
                    break;
                }
                if !self.complete_something() && !self.time_out() {
                    self.report_stuck();
                }
            }
            self.check_limits()?;
        }
        self.report_deferred();
        self.refusal.take().map_or(Ok(()), Err)
    }

    /// Whether every cluster has run and ended.
    fn is_over(&self) -> bool {
        let all_loaded = self.next_cluster == self.end;
        all_loaded && self.clusters.iter().all(|c| c.live_warps == 0)
    }

    fn check_limits(&mut self) -> Result<(), SimError> {
        let limit = self.context.options.step_limit;
        if self.steps > limit {
            let kernel = self.context.program.kernel.clone();
            return Err(SimError::StepLimit { kernel, steps: self.steps, place: self.busiest() });
        }
        if self.steps >= self.ask_at {
            self.ask_at = self.steps + ASK_EVERY;
            if !(self.context.going)() {
                return Err(SimError::Interrupted { kernel: self.context.program.kernel.clone() });
            }
        }
        if self.steps - self.last_effect > SPIN_LIMIT * self.warps.len() as u64 {
            // spinning without effect: unfinished copies may be what everybody polls for
            self.last_effect = self.steps;
            if !self.complete_something() {
                self.report_stuck();
            }
            while self.complete_something() {}
        }
        Ok(())
    }

    /// The instruction that was executed most, in words.
    fn busiest(&self) -> String {
        let site = self.context.site(self.hits.busiest());
        site.source.map_or_else(|| site.text.clone(), |source| format!("{} ({source})", site.text))
    }

    /// Makes every `try_wait` time out, as it does after a while. False if that was tried before and changed nothing.
    fn time_out(&mut self) -> bool {
        let standing = self.warps.iter().flat_map(|w| w.splits.iter().copied()).collect();
        let state = (self.last_effect, standing);
        if state == self.stuck {
            return false;
        }
        self.stuck = state;
        let mut any = false;
        for warp in &mut self.warps {
            let waiting = |s: &&Split| matches!(s.wait, Wait::Mbarrier { .. });
            warp.timed_out = warp.splits.iter().filter(waiting).fold(0, |mask, s| mask | s.mask);
            warp.wake(|wait| matches!(wait, Wait::Mbarrier { .. }));
            any |= warp.timed_out != 0;
        }
        any
    }

    /// Loads the next clusters where resident ones have ended; whether any was loaded.
    fn replace_finished_clusters(&mut self) -> bool {
        let mut loaded = false;
        for slot in 0..self.clusters.len() {
            let more = self.next_cluster < self.end;
            if more && self.clusters[slot].live_warps == 0 && !self.engine.has_work_of(slot) {
                self.load_cluster(slot);
                loaded = true;
            }
        }
        loaded
    }

    /// Something changed that another warp can see.
    pub(crate) const fn effect(&mut self) {
        self.last_effect = self.steps;
    }

    /// The resident CTA of `rank` in the same cluster as `cta`.
    pub(crate) fn peer(&self, cta: usize, rank: u32) -> Option<usize> {
        let size = self.context.geometry.cluster_ctas;
        (rank < size).then(|| self.ctas[cta].cluster * size as usize + rank as usize)
    }

    /// The resident warps of a CTA.
    pub(crate) fn warps_of(&mut self, cta: usize) -> &mut [Warp] {
        let warps = self.context.geometry.warps as usize;
        &mut self.warps[cta * warps..(cta + 1) * warps]
    }

    /// Adds a finding about the instruction at `pc`, or about none.
    pub(crate) fn report(&mut self, kind: FindingKind, by: Culprit, pc: Option<u32>, message: String) {
        let finding = Finding {
            kind,
            kernel: self.context.program.kernel.clone(),
            cta: self.ctas[by.cta].id,
            warp: by.warp,
            lane: by.lane,
            site: pc.map(|pc| self.context.site(pc)),
            message,
            count: 1,
        };
        self.findings.add(finding);
        self.halted |= kind.is_fatal();
    }

    /// Knowledge published at a global address.
    pub(crate) fn publish_global(&mut self, address: u64, cluster: u32, wide: &Knowledge, near: &Knowledge) {
        let everywhere = self.global_sync.entry(address).or_default();
        let here = self.cta_sync.entry((address, cluster)).or_default();
        let wide = wide.exported(cluster);
        everywhere.join(&wide);
        here.join(&wide);
        here.join(&near.exported(cluster));
    }
}

impl Context<'_> {
    /// The instruction at `pc` for a report; behind the last one is the end of the kernel.
    pub(crate) fn site(&self, pc: u32) -> Site {
        let Some(origin) = self.program.origins.get(pc as usize) else {
            let statement = self.program.origins.last().map_or(0, |origin| origin.statement);
            let text = "the end of the kernel".to_owned();
            return Site { function: None, statement, text, source: None };
        };
        let line = self.provenance.and_then(|table| table.location(origin.unit, origin.statement));
        let routine = self.program.routines.iter().find(|r| origin.unit == Unit::Function(r.function));
        Site {
            function: routine.map(|r| r.name.clone()),
            statement: origin.statement,
            text: origin.text.clone(),
            source: line.map(|l| l.to_string()),
        }
    }
}

/// Who did it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Culprit {
    /// The resident CTA.
    pub(crate) cta: usize,
    pub(crate) warp: u32,
    pub(crate) lane: u32,
}

fn put<T>(list: &mut Vec<T>, at: usize, item: T) {
    if at < list.len() {
        list[at] = item;
    } else {
        list.push(item);
    }
}
