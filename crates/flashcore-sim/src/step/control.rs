//! Convergence, exits and register budgets.

use super::{Flow, Outcome, Step};
use crate::{
    engine::Work,
    finding::FindingKind,
    machine::Machine,
    warp::{Wait, Warp},
};

impl Step<'_, '_> {
    /// For `.aligned`: `None` if all live lanes are here, else where to wait.
    pub(super) fn aligned(&mut self, what: &str) -> Outcome<Option<Flow>> {
        let live = self.live();
        if self.mask == live {
            return Ok(None);
        }
        if self.mask != self.group {
            let text = format!(
                "{what} is .aligned, but its guard holds in lanes {:#010x} of {live:#010x}",
                self.mask
            );
            return self.halt(FindingKind::DivergentAligned, self.first_lane(), text);
        }
        Ok(Some(Flow::Wait(Wait::Lanes)))
    }

    /// Like [`aligned`](Self::aligned), for instructions that need all 32 lanes alive.
    pub(super) fn whole_warp(&mut self, what: &str) -> Outcome<Option<Flow>> {
        if self.live() != u32::MAX {
            let text = format!("{what} needs 32 lanes; those alive are {:#010x}", self.live());
            return self.halt(FindingKind::DivergentAligned, self.first_lane(), text);
        }
        self.aligned(what)
    }

    /// The lanes leave. The last ones of a warp must leave nothing in flight.
    pub(super) fn exit(&mut self) -> Outcome {
        let warp = &mut self.machine.warps[self.warp];
        warp.exited |= self.mask;
        warp.wake(|wait| wait == Wait::Lanes);
        let (over, agent) = (warp.live() == 0, warp.agent);
        self.say_farewell();
        let threads = self.mask.count_ones();
        self.machine.ctas[self.cta].live_threads -= threads;
        if over {
            self.check_drained();
            self.end_warp();
            self.machine.forget_warp(self.cta);
        } else {
            self.machine.forget_lanes(self.warp);
        }
        let cluster = self.machine.ctas[self.cta].cluster;
        self.machine.clusters[cluster].barrier.leave(agent, self.mask);
        self.machine.try_open_cluster_barrier(cluster);
        self.machine.effect();
        Ok(Flow::Exit)
    }

    fn check_drained(&mut self) {
        let warp = &self.machine.warps[self.warp];
        let what = match () {
            () if !warp.copies.is_drained() => "a cp.async was not waited for",
            () if !warp.bulk.is_drained() => "a bulk store may still read shared memory",
            () if !warp.wgmma.is_drained() => "a wgmma was not waited for",
            () => return,
        };
        if self.machine.context.options.checks.in_flight {
            self.report(FindingKind::Undrained, self.first_lane(), format!("the warp ends, but {what}"));
        }
    }

    fn end_warp(&mut self) {
        let cluster = self.machine.ctas[self.cta].cluster;
        self.machine.clusters[cluster].live_warps -= 1;
        // Bulk stores finish by themselves; copies that nobody waited for have no meaning any more.
        let warp = self.warp;
        self.machine.complete_all(|job| job.warp == warp && matches!(job.work, Work::Store { .. }));
        if self.machine.ctas[self.cta].live_threads == 0 {
            self.end_cta();
        }
    }

    fn end_cta(&mut self) {
        let (cta, checks) = (self.cta, self.machine.context.options.checks);
        let lands_here = |work: &Work| match work {
            Work::Load { ctas, .. } => ctas.contains(&cta),
            Work::Remote { to, .. } | Work::Send { to, .. } => *to == cta,
            _ => false,
        };
        let unfinished = self.load_was_forgotten();
        if unfinished && checks.in_flight {
            let text = "the CTA ends, but a copy into its shared memory is unfinished".into();
            self.report(FindingKind::Undrained, self.first_lane(), text);
        }
        self.check_visits();
        self.check_resizes();
        // What still comes counts: an mbarrier may have been told to expect less.
        self.machine.complete_all(|job| lands_here(&job.work));
        let leftover = self.machine.ctas[cta].mbarriers.iter().find(|(_, b)| b.tx() != 0);
        if let (Some((at, barrier)), true) = (leftover, checks.barrier) {
            let text =
                format!("the CTA ends, but mbarrier {at:#x} has {} transaction bytes left", barrier.tx());
            self.report(FindingKind::MbarrierLeftover, self.first_lane(), text);
        }
        // What is on its way to others needs nothing of this CTA any more.
        let leaves = |work: &Work| matches!(work, Work::Load { .. } | Work::Send { .. });
        self.machine.engine.discard(|job| job.cta == cta && !leaves(&job.work));
    }

    /// Whether copies came, or will come, into this CTA that none of its warps has waited for.
    fn load_was_forgotten(&mut self) -> bool {
        let cta = self.cta;
        let claims = self.machine.ctas[cta].mbarriers.values().map(|b| (b.agent, b.claimed));
        let claims: Vec<_> = claims.filter(|(_, claimed)| *claimed > 0).collect();
        let warps = self.machine.warps_of(cta);
        let known = |agent| warps.iter().map(|w| w.clock.union(u32::MAX).seen.get(agent)).max().unwrap_or(0);
        claims.into_iter().any(|(agent, clock)| known(agent) < clock)
    }
}

impl Machine<'_> {
    /// Lanes of a warp have ended: where all others of it have come to a barrier, the warp has.
    fn forget_lanes(&mut self, warp: usize) {
        let Warp { cta, index, .. } = self.warps[warp];
        let live = self.warps[warp].live();
        for id in 0..self.ctas[cta].named.len() {
            if let Some(done) = self.ctas[cta].named[id].forget_lanes(index, live) {
                self.open_barrier(cta, id as u32, &done);
            }
        }
    }

    /// A warp has ended: barriers of the whole CTA wait for one less.
    fn forget_warp(&mut self, cta: usize) {
        for id in 0..self.ctas[cta].named.len() {
            if let Some(done) = self.ctas[cta].named[id].forget(32) {
                self.open_barrier(cta, id as u32, &done);
            }
        }
    }
}
