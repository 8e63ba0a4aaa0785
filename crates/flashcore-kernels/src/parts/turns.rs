//! Consumers that multiply in turn.
//!
//! Left alone, consumers drift into lockstep: they wait for the same tiles, multiply at the same time, so each waits for
//! the products of all, and then all do something else while tensor cores are idle. So one consumer at a time owns the
//! tensor cores, and the others do their softmax meanwhile.

use flashcore_tile::{Builder, Mbarrier, Pred, Reg, U32};

/// Warps of a consumer; each passes its turn on for itself.
const WARPS_PER_GROUP: u32 = 4;

/// A barrier for each consumer, at which the one before it arrives when it is done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turns {
    barriers: u32,
    consumers: u32,
}

impl Turns {
    /// Reserves the barriers.
    pub(crate) fn reserve(b: &mut Builder, consumers: u32) -> Self {
        Self { barriers: b.mbarriers(consumers), consumers }
    }

    /// Initialises the barriers; one thread does it, before the CTA synchronises.
    pub(crate) fn init(self, b: &mut Builder) {
        for consumer in 0..self.consumers {
            b.mbarrier_at(self.barriers).nth(consumer).init(b, WARPS_PER_GROUP);
        }
    }

    /// The turn of consumer `group`.
    pub(crate) fn of(self, b: &mut Builder, group: Reg<U32>) -> Turn {
        let after = b.let_(group + 1);
        let after = b.let_(after.eq(self.consumers).select(0, after));
        // On a fresh barrier the phase before the first counts as complete, so that the first consumer begins.
        let phase = b.let_(group.eq(0).select::<U32>(1, 0));
        let [own, next] = [group, after].map(|consumer| b.mbarrier_at(self.barriers).number(b, consumer));
        Turn { own, next, phase: b.var(phase) }
    }
}

/// When a consumer may multiply.
#[derive(Debug)]
pub(crate) struct Turn {
    own: Mbarrier,
    next: Mbarrier,
    /// What the next turn waits for; its lowest bit is the parity.
    phase: Reg<U32>,
}

impl Turn {
    /// Waits until the consumer before has multiplied.
    pub(crate) fn take(&self, b: &mut Builder) {
        self.own.wait(b, self.phase & 1);
        b.add_to(self.phase, 1);
    }

    /// Passes the turn to the next consumer; `leader` is one lane of each warp.
    pub(crate) fn pass(&self, b: &mut Builder, leader: Pred) {
        b.predicated(leader, |b| self.next.arrive(b));
    }
}
