//! Shared memory of other CTAs of the cluster: it exists until the last thread of its CTA exits, so every access must be
//! known to have finished before that.

use super::Step;
use crate::{cta::Visit, finding::FindingKind, machine::Culprit};

impl Step<'_, '_> {
    /// A lane uses shared memory of `cta`.
    pub(super) fn visit(&mut self, lane: usize, cta: usize) {
        if cta == self.cta || !self.machine.context.options.checks.race {
            return;
        }
        let warp = &self.machine.warps[self.warp];
        let by = Culprit { cta: self.cta, warp: warp.index, lane: lane as u32 };
        let visit = Visit { clock: warp.clock.now, pc: self.pc, by };
        if self.machine.ctas[cta].live_threads == 0 {
            return self.report_visit(cta, visit);
        }
        self.machine.ctas[cta].visits.insert(warp.agent, visit);
    }

    /// Threads of the CTA end: what they know, the CTA has waited for.
    pub(super) fn say_farewell(&mut self) {
        let clock = &self.machine.warps[self.warp].clock;
        let known = clock.union(u32::MAX).seen;
        self.machine.ctas[self.cta].farewell.join(&known);
    }

    /// The CTA ends: nobody may use its shared memory at the same time.
    pub(super) fn check_visits(&mut self) {
        let cta = &self.machine.ctas[self.cta];
        let unknown = cta.visits.iter().filter(|(agent, visit)| cta.farewell.get(**agent) < visit.clock);
        let unknown: Vec<Visit> = unknown.map(|(_, visit)| *visit).collect();
        for visit in unknown {
            self.report_visit(self.cta, visit);
        }
    }

    fn report_visit(&mut self, cta: usize, visit: Visit) {
        let rank = self.machine.ctas[cta].rank;
        let text = format!(
            "shared memory of CTA {rank} of the cluster, which may have ended: it does not wait for this access"
        );
        self.machine.report(FindingKind::EndedPeer, visit.by, Some(visit.pc), text);
    }
}
