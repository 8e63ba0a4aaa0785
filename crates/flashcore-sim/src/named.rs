//! Named barriers of a CTA (`bar.sync`, `bar.arrive`, `bar.red`), and the faults they can see.

use crate::check::clock::Knowledge;

/// One of a CTA's sixteen barriers.
#[derive(Clone, Default, Debug)]
pub(crate) struct Named {
    /// Completed generations.
    pub(crate) generation: u32,
    /// Threads that make it complete, once somebody has said so.
    expected: Option<u32>,
    /// Whether that number is "all threads of the CTA".
    whole_cta: bool,
    arrived: u32,
    /// Warps that arrived in this generation, with those lanes of theirs that did.
    warps: Vec<(u32, u32)>,
    gathered: Knowledge,
    /// What `bar.red` collects: lanes that voted true, lanes that voted.
    votes: (u32, u32),
    /// For each warp that arrived without waiting, the generation it arrived in.
    pub(crate) arrived_without_wait: Vec<(u32, u32)>,
}

/// One warp's arrival.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival<'a> {
    pub(crate) warp: u32,
    pub(crate) lanes: u32,
    /// Lanes of the warp that have not ended: once all have arrived, it counts as a whole warp.
    pub(crate) live: u32,
    /// Threads the barrier is to wait for, and whether that is the whole CTA.
    pub(crate) expected: u32,
    pub(crate) whole_cta: bool,
    pub(crate) knowledge: &'a Knowledge,
    /// True votes and voters of `bar.red`.
    pub(crate) votes: (u32, u32),
}

/// What is wrong with an arrival.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// Another number of threads than an earlier arrival named.
    Count { before: u32 },
    /// More threads than expected.
    TooMany,
}

/// A generation that completed: what those released by it know, and the votes.
#[derive(Clone, Debug)]
pub(crate) struct Completed {
    pub(crate) knowledge: Knowledge,
    pub(crate) votes: (u32, u32),
}

impl Named {
    /// The lanes of `warp` that have already arrived in this generation.
    pub(crate) fn arrived(&self, warp: u32) -> u32 {
        self.warps.iter().find(|(w, _)| *w == warp).map_or(0, |(_, lanes)| *lanes)
    }

    /// Adds an arrival; the generation's outcome if it was the last.
    pub(crate) fn arrive(&mut self, arrival: &Arrival<'_>) -> Result<Option<Completed>, Fault> {
        if let Some(before) = self.expected.filter(|&e| e != arrival.expected) {
            return Err(Fault::Count { before });
        }
        self.expected = Some(arrival.expected);
        self.whole_cta = arrival.whole_cta;
        let before = self.arrived(arrival.warp);
        let lanes = before | arrival.lanes;
        let counted = if before & arrival.lanes == 0 { before.count_ones() } else { 0 };
        self.arrived += if lanes == arrival.live { 32 - counted } else { arrival.lanes.count_ones() };
        self.warps.retain(|(warp, _)| *warp != arrival.warp);
        self.warps.push((arrival.warp, lanes));
        self.gathered.join(arrival.knowledge);
        self.votes.0 += arrival.votes.0;
        self.votes.1 += arrival.votes.1;
        if self.arrived > arrival.expected {
            return Err(Fault::TooMany);
        }
        Ok(self.try_complete())
    }

    /// A warp ended: a barrier of the whole CTA waits for fewer threads.
    pub(crate) fn forget(&mut self, threads: u32) -> Option<Completed> {
        if !self.whole_cta || self.arrived == 0 {
            return None;
        }
        self.expected = self.expected.map(|e| e.saturating_sub(threads));
        self.try_complete()
    }

    /// Lanes of a warp ended: if all others have arrived, it counts as a whole warp.
    pub(crate) fn forget_lanes(&mut self, warp: u32, live: u32) -> Option<Completed> {
        let lanes = self.arrived(warp);
        if lanes == 0 || lanes != live {
            return None;
        }
        self.arrived += 32 - lanes.count_ones();
        self.try_complete()
    }

    fn try_complete(&mut self) -> Option<Completed> {
        if self.expected != Some(self.arrived) {
            return None;
        }
        self.generation += 1;
        self.expected = None;
        self.arrived = 0;
        self.warps.clear();
        let votes = std::mem::take(&mut self.votes);
        Some(Completed { knowledge: std::mem::take(&mut self.gathered), votes })
    }

    /// `(arrived, expected)` threads, for reports.
    pub(crate) fn progress(&self) -> (u32, u32) {
        (self.arrived, self.expected.unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrive(barrier: &mut Named, warp: u32, expected: u32) -> Result<bool, Fault> {
        let knowledge = &Knowledge::default();
        let arrival = Arrival {
            warp,
            lanes: u32::MAX,
            live: u32::MAX,
            expected,
            whole_cta: false,
            knowledge,
            votes: (0, 0),
        };
        barrier.arrive(&arrival).map(|done| done.is_some())
    }

    #[test]
    fn generations_complete_and_counts_must_agree() {
        let mut b = Named::default();
        assert_eq!(arrive(&mut b, 0, 64), Ok(false));
        assert_eq!(arrive(&mut b, 1, 96), Err(Fault::Count { before: 64 }));
        assert_eq!(arrive(&mut b, 1, 64), Ok(true));
        assert_eq!(arrive(&mut b, 2, 32), Ok(true));
        assert_eq!(b.generation, 2);
    }
}
