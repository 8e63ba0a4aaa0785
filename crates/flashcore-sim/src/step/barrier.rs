//! Named barriers and cluster barriers.

use super::{Flow, Outcome, Step};
use crate::{
    check::clock::NAMED_BARRIERS,
    finding::FindingKind,
    machine::Machine,
    named::{Arrival, Completed, Fault},
    program::{BarVote, Dst, Src, Uop},
    warp::Wait,
};

impl Step<'_, '_> {
    pub(super) fn barrier(
        &mut self,
        id: Src,
        count: Option<Src>,
        wait: bool,
        vote: Option<(BarVote, Dst, Src)>,
        aligned: bool,
    ) -> Outcome {
        if let (true, Some(flow)) = (aligned, if aligned { self.aligned("a barrier")? } else { None }) {
            return Ok(flow);
        }
        if self.mask == self.live() {
            self.meet();
        }
        let lane = self.first_lane();
        let id = self.read(id)[lane] as u32;
        let named_count = count.map(|c| self.read(c)[lane] as u32);
        let yes = vote.map(|(_, _, src)| self.read_mask(src) & self.mask);
        self.check_barrier(lane, id, named_count)?;
        self.check_recycling(lane, id, wait);
        let knowledge = self.release();
        let arrival = Arrival {
            warp: self.machine.warps[self.warp].index,
            lanes: self.mask,
            live: self.live(),
            expected: named_count.unwrap_or_else(|| self.threads_left()),
            whole_cta: named_count.is_none(),
            knowledge: &knowledge,
            votes: (yes.unwrap_or(0).count_ones(), self.mask.count_ones()),
        };
        let barrier = &mut self.machine.ctas[self.cta].named[id as usize];
        let generation = barrier.generation;
        let outcome = barrier.arrive(&arrival);
        self.machine.effect();
        match outcome {
            Err(fault) => self.count_fault(lane, id, arrival.expected, fault),
            Ok(done) => Ok(self.after_arrival(id, generation, wait, done)),
        }
    }

    /// Threads that a barrier of the whole CTA waits for: those of warps that have not ended.
    fn threads_left(&mut self) -> u32 {
        let cta = self.cta;
        32 * self.machine.warps_of(cta).iter().filter(|w| w.live() != 0).count() as u32
    }

    fn after_arrival(&mut self, id: u32, generation: u32, wait: bool, done: Option<Completed>) -> Flow {
        let Some(done) = done else {
            return if wait { Flow::Wait(Wait::Named { id, generation }) } else { Flow::Next };
        };
        self.machine.open_barrier(self.cta, id, &done);
        if wait {
            let news = self.machine.barrier_news(self.cta, id, &done);
            self.learn(self.mask, &news);
            self.meet();
            self.machine.deliver_votes(self.warp, self.pc, self.mask, done.votes);
        }
        Flow::Next
    }

    fn check_barrier(&mut self, lane: usize, id: u32, count: Option<u32>) -> Outcome<()> {
        let threads = self.machine.context.geometry.warps * 32;
        let text = match count {
            _ if id >= NAMED_BARRIERS => format!("barrier {id}; a CTA has 0 to 15"),
            Some(n) if n == 0 || n % 32 != 0 => format!("{n} threads are not a multiple of a warp"),
            Some(n) if n > threads => format!("{n} threads; the CTA has {threads}"),
            _ => return Ok(()),
        };
        self.halt(FindingKind::BarrierCount, lane, text)
    }

    /// A warp that arrived without waiting must know that the barrier has completed before it arrives again.
    fn check_recycling(&mut self, lane: usize, id: u32, wait: bool) {
        let (agent, warp) = self.barrier_agent(id);
        let known = self.machine.warps[self.warp].clock.union(self.mask).seen.get(agent);
        let barrier = &mut self.machine.ctas[self.cta].named[id as usize];
        let before = barrier.arrived_without_wait.iter().position(|(w, _)| *w == warp);
        let unsure = before.is_some_and(|at| barrier.arrived_without_wait[at].1 >= known);
        let twice = barrier.arrived(warp) & self.mask != 0;
        let barrier = &mut self.machine.ctas[self.cta].named[id as usize];
        if let Some(at) = before {
            barrier.arrived_without_wait.swap_remove(at);
        }
        if !wait {
            barrier.arrived_without_wait.push((warp, barrier.generation));
        }
        if (unsure || twice) && self.machine.context.options.checks.barrier {
            let text = format!(
                "the warp arrives at barrier {id} again before it can know that the barrier has completed"
            );
            self.report(FindingKind::BarrierRecycled, lane, text);
        }
    }

    fn barrier_agent(&self, id: u32) -> (u32, u32) {
        let cta = &self.machine.ctas[self.cta];
        let agents = self.machine.clusters[cta.cluster].agents;
        (agents.named(cta.rank, id), self.machine.warps[self.warp].index)
    }

    fn count_fault(&mut self, lane: usize, id: u32, expected: u32, fault: Fault) -> Outcome {
        let text = match fault {
            Fault::Count { before } => {
                format!("barrier {id}: {expected} threads here, {before} at an earlier arrival")
            }
            Fault::TooMany => format!("barrier {id}: more than {expected} threads arrived"),
        };
        self.halt(FindingKind::BarrierCount, lane, text)
    }

    pub(super) fn cluster_arrive(&mut self, release: bool, aligned: bool) -> Outcome {
        if let (true, Some(flow)) = (aligned, if aligned { self.aligned("barrier.cluster")? } else { None }) {
            return Ok(flow);
        }
        if self.mask == self.live() {
            self.meet();
        }
        let knowledge = self.release();
        let warp = &self.machine.warps[self.warp];
        let (agent, inits) = (warp.agent, warp.clock.inits_at_fence.clone());
        let cluster = self.machine.ctas[self.cta].cluster;
        let barrier = &mut self.machine.clusters[cluster].barrier;
        barrier.tell_inits(&inits);
        barrier.tell_arrival(&knowledge.seen);
        let fresh = barrier.arrive(agent, self.mask, release.then_some(&knowledge));
        if !fresh && self.machine.context.options.checks.barrier {
            let text = "the warp arrives at the cluster barrier twice in one generation".into();
            self.report(FindingKind::ClusterBarrier, self.first_lane(), text);
        }
        self.machine.effect();
        self.machine.try_open_cluster_barrier(cluster);
        Ok(Flow::Next)
    }

    pub(super) fn cluster_wait(&mut self, acquire: bool, aligned: bool) -> Outcome {
        if let (true, Some(flow)) = (aligned, if aligned { self.aligned("barrier.cluster")? } else { None }) {
            return Ok(flow);
        }
        let agent = self.machine.warps[self.warp].agent;
        let cluster = self.machine.ctas[self.cta].cluster;
        let barrier = &self.machine.clusters[cluster].barrier;
        let Some(generation) = barrier.arrived_for(agent, self.mask) else {
            let text = "barrier.cluster.wait without a preceding arrive".into();
            self.report(FindingKind::ClusterBarrier, self.first_lane(), text);
            return Ok(Flow::Next);
        };
        if generation >= barrier.generation {
            return Ok(Flow::Wait(Wait::Cluster { generation }));
        }
        self.machine.ctas[self.cta].farewell.join(&barrier.published_arrivals);
        if acquire {
            let (news, inits) = (barrier.published.clone(), barrier.published_inits.clone());
            self.learn(self.mask, &news);
            self.machine.warps[self.warp].clock.inits.join(&inits);
        }
        self.meet();
        Ok(Flow::Next)
    }
}

impl Machine<'_> {
    /// What those who passed a barrier know: all that was known on arrival, and that this generation is complete.
    fn barrier_news(&self, cta: usize, id: u32, done: &Completed) -> crate::check::clock::Knowledge {
        let state = &self.ctas[cta];
        let agents = self.clusters[state.cluster].agents;
        let mut news = done.knowledge.clone();
        news.seen.raise(agents.named(state.rank, id), state.named[id as usize].generation);
        news
    }

    /// Lets the warps pass that wait at a barrier which has completed.
    pub(super) fn open_barrier(&mut self, cta: usize, id: u32, done: &Completed) {
        let news = self.barrier_news(cta, id, done);
        let generation = self.ctas[cta].named[id as usize].generation - 1;
        let first = cta * self.context.geometry.warps as usize;
        for index in first..first + self.context.geometry.warps as usize {
            let here = |wait| wait == Wait::Named { id, generation };
            let Some(split) = self.warps[index].splits.iter().find(|s| here(s.wait)).copied() else {
                continue;
            };
            let passed = self.warps[index].pass(here);
            let live = self.warps[index].live();
            self.warps[index].clock.learn(passed, live, &news);
            if passed == live {
                self.warps[index].clock.sync();
            }
            self.deliver_votes(index, split.pc, passed, done.votes);
        }
    }

    /// Writes the result of `bar.red` at `pc`, if that is what the lanes passed.
    fn deliver_votes(&mut self, warp: usize, pc: u32, mask: u32, (yes, voters): (u32, u32)) {
        let program = self.context.program;
        let Uop::Barrier { vote: Some((kind, Some(dst), _)), .. } = &program.code[pc as usize].uop else {
            return;
        };
        let result = match kind {
            BarVote::And => u32::from(yes == voters),
            BarVote::Or => u32::from(yes > 0),
            BarVote::Popc => yes,
        };
        self.warps[warp].registers.write(*dst, mask, &[result.into(); 32]);
    }

    /// Wakes the cluster's warps once all its live threads have arrived.
    pub(super) fn try_open_cluster_barrier(&mut self, cluster: usize) {
        let size = self.context.geometry.cluster_ctas as usize;
        let ctas = cluster * size..(cluster + 1) * size;
        let live = ctas.clone().map(|cta| self.ctas[cta].live_threads).sum();
        if !self.clusters[cluster].barrier.try_complete(live) {
            return;
        }
        for cta in ctas {
            for warp in self.warps_of(cta) {
                warp.wake(|wait| matches!(wait, Wait::Cluster { .. }));
            }
        }
    }
}
