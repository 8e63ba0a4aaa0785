//! Which warp runs next, for how long; and what is reported if none can.

use crate::{
    finding::FindingKind,
    machine::{Culprit, Machine},
    options::{Schedule, Timing},
    warp::{Split, Wait, Warp},
};

/// Instructions a warp runs before another has its turn.
const TURN: usize = 32;
/// Under priority schedules, every so many turns go round-robin, so polling warps starve no other.
const FAIRNESS: u64 = 16;

impl Machine<'_> {
    /// A warp that can run.
    pub(crate) fn next_warp(&mut self) -> Option<usize> {
        self.engine.turns += 1;
        if self.context.options.timing == Timing::OutOfOrder && self.rng.one_in(4) {
            self.complete_something();
        }
        let fair = self.engine.turns.is_multiple_of(FAIRNESS);
        match self.context.options.schedule {
            Schedule::RoundRobin => self.next_in_turn(),
            Schedule::Random | Schedule::Apart => self.any_ready(),
            _ if fair => self.next_in_turn(),
            Schedule::ProducerFirst => self.best(|w| u64::MAX - w.copies_issued),
            Schedule::ConsumerFirst => self.best(|w| w.copies_issued),
        }
    }

    fn next_in_turn(&mut self) -> Option<usize> {
        let count = self.warps.len();
        let start = self.engine.next_warp;
        let found = (0..count).map(|i| (start + i) % count).find(|&i| self.warps[i].is_ready())?;
        self.engine.next_warp = found + 1;
        Some(found)
    }

    fn any_ready(&mut self) -> Option<usize> {
        let ready: Vec<usize> = (0..self.warps.len()).filter(|&i| self.warps[i].is_ready()).collect();
        if ready.is_empty() { None } else { Some(ready[self.rng.below(ready.len())]) }
    }

    fn best(&mut self, rank: impl Fn(&Warp) -> u64) -> Option<usize> {
        let ready = self.warps.iter().enumerate().filter(|(_, w)| w.is_ready());
        ready.min_by_key(|(_, w)| rank(w)).map(|(i, _)| i)
    }

    /// Runs a warp until it waits or its turn is over.
    pub(crate) fn run_warp(&mut self, index: usize) {
        let turn = match self.context.options.schedule {
            Schedule::Random | Schedule::Apart => 1 + self.rng.below(TURN),
            _ => TURN,
        };
        for _ in 0..turn {
            if self.halted || !self.step(index) {
                return;
            }
        }
    }

    /// Reports that no warp can continue, and what each waits for.
    pub(crate) fn report_stuck(&mut self) {
        let mut waits = Vec::new();
        let mut blame = None;
        for index in 0..self.warps.len() {
            let warp = &self.warps[index];
            for split in &warp.splits {
                blame = blame.or(Some((index, *split)));
                waits.push(self.describe(warp, split));
            }
        }
        let Some((index, split)) = blame else { return };
        let kind = self.stuck_kind();
        let warp = &self.warps[index];
        let by = Culprit { cta: warp.cta, warp: warp.index, lane: split.mask.trailing_zeros() };
        let message = format!("no warp can make progress:\n    {}", waits.join("\n    "));
        self.report(kind, by, Some(split.pc.min(self.context.program.code.len() as u32 - 1)), message);
        self.halted = true;
    }

    /// What the wait of the first stuck lanes amounts to.
    fn stuck_kind(&self) -> FindingKind {
        let all = || self.warps.iter().flat_map(|w| &w.splits);
        match () {
            () if all().any(|s| s.wait == Wait::Lanes) => FindingKind::DivergentAligned,
            () if self.warpgroup_diverged() => FindingKind::DivergentAligned,
            () if all().any(|s| s.wait == Wait::Registers) => FindingKind::RegisterPool,
            () => FindingKind::Deadlock,
        }
    }

    /// Whether two warps of one warpgroup wait for each other at different instructions.
    fn warpgroup_diverged(&self) -> bool {
        let waiting = |w: &Warp| w.splits.iter().find(|s| s.wait == Wait::Warpgroup).map(|s| s.pc);
        let groups = self.warps.chunk_by(|a, b| a.cta == b.cta && a.index / 4 == b.index / 4);
        groups.into_iter().any(|group| {
            let places: Vec<_> = group.iter().filter_map(waiting).collect();
            places.windows(2).any(|pair| pair[0] != pair[1])
        })
    }

    fn describe(&self, warp: &Warp, split: &Split) -> String {
        let cta = &self.ctas[warp.cta];
        let [x, y, z] = cta.id;
        let text = self.context.program.origins.get(split.pc as usize).map_or("end", |o| o.text.as_str());
        let reason = match split.wait {
            Wait::Ready => "spins without effect".to_string(),
            Wait::Lanes => format!("lanes {:#010x} wait for the rest of the warp", split.mask),
            Wait::Named { id, .. } => {
                let (arrived, expected) = cta.named[id as usize].progress();
                format!("barrier {id}: {arrived} of {expected} threads arrived")
            }
            Wait::Mbarrier { offset, phase } => match cta.mbarriers.get(&offset) {
                Some(b) => format!(
                    "mbarrier {offset:#x} phase {phase}: pending {} of {}, tx {}",
                    b.arrivals().0,
                    b.arrivals().1,
                    b.tx()
                ),
                None => format!("mbarrier {offset:#x}, which is gone"),
            },
            Wait::Cluster { generation } => format!("cluster barrier, generation {generation}"),
            Wait::Warpgroup => "the other warps of the warpgroup".to_string(),
            Wait::Registers => format!("registers: the pool has {}", cta.pool),
        };
        format!("CTA ({x},{y},{z}) warp {}: {reason}; at `{text}`", warp.index)
    }
}
