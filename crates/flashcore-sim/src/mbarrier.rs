//! The state machine of an mbarrier (PTX ISA, "mbarrier"), and the faults it can see.

use crate::check::clock::Knowledge;

/// Largest count of arrivals or transaction bytes.
const LIMIT: i64 = (1 << 20) - 1;

/// One initialised mbarrier.
#[derive(Clone, Debug)]
pub(crate) struct Mbarrier {
    /// Completed phases.
    pub(crate) phase: u32,
    expected: i64,
    pending: i64,
    tx: i64,
    /// Its agent: the writer of the copies it tracks.
    pub(crate) agent: u32,
    /// What arrivals of the current phase know.
    gathered: Knowledge,
    /// What whoever observed the last completed phase knows.
    pub(crate) published: Knowledge,
    /// The warp that initialised it, and when.
    pub(crate) made_by: (u32, u32),
    /// Completed phases after which all copies issued so far have arrived.
    pub(crate) claimed: u32,
}

/// What an operation must not do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    OverArrival,
    Range,
    CompletedPhase,
}

impl Mbarrier {
    /// `mbarrier.init`; `None` where the count is not allowed.
    pub(crate) fn new(count: u32, agent: u32, made_by: (u32, u32)) -> Option<Self> {
        let expected = i64::from(count);
        let valid = (1..=LIMIT).contains(&expected);
        valid.then(|| Self {
            phase: 0,
            expected,
            pending: expected,
            tx: 0,
            agent,
            gathered: Knowledge::default(),
            published: Knowledge::default(),
            made_by,
            claimed: 0,
        })
    }

    /// A copy is issued that the current phase counts; the clock under which it is entered.
    pub(crate) const fn claim(&mut self) -> u32 {
        self.claimed = self.phase + 1;
        self.claimed
    }

    /// More transaction bytes to come.
    pub(crate) fn expect(&mut self, bytes: u32) -> Result<(), Fault> {
        self.tx += i64::from(bytes);
        if self.tx > LIMIT { Err(Fault::Range) } else { Ok(()) }
    }

    /// Transaction bytes that came; true if the phase completed. `released` is what the copy makes known.
    pub(crate) fn complete(&mut self, bytes: u32, released: Option<&Knowledge>) -> Result<bool, Fault> {
        if let Some(knowledge) = released {
            self.gathered.join(knowledge);
        }
        self.tx -= i64::from(bytes);
        if self.tx < -LIMIT { Err(Fault::Range) } else { Ok(self.try_complete()) }
    }

    /// Arrivals; true if the phase completed. `released` is what the arriver makes known.
    pub(crate) fn arrive(&mut self, count: u32, released: Option<&Knowledge>) -> Result<bool, Fault> {
        let count = i64::from(count);
        if let Some(knowledge) = released {
            self.gathered.join(knowledge);
        }
        if count < 1 || count > self.pending {
            return Err(Fault::OverArrival);
        }
        self.pending -= count;
        Ok(self.try_complete())
    }

    /// Like [`arrive`](Self::arrive), but from the next phase on fewer arrivals are expected.
    pub(crate) fn arrive_drop(&mut self, count: u32, released: Option<&Knowledge>) -> Result<bool, Fault> {
        self.expected -= i64::from(count);
        if self.expected < 0 { Err(Fault::OverArrival) } else { self.arrive(count, released) }
    }

    /// One more arrival is pending in this phase alone (`cp.async.mbarrier.arrive` without `.noinc`).
    pub(crate) fn add_pending(&mut self) -> Result<(), Fault> {
        self.pending += 1;
        if self.pending > LIMIT { Err(Fault::Range) } else { Ok(()) }
    }

    fn try_complete(&mut self) -> bool {
        if self.pending != 0 || self.tx != 0 {
            return false;
        }
        self.phase += 1;
        self.pending = self.expected;
        self.gathered.seen.raise(self.agent, self.phase);
        let gathered = std::mem::take(&mut self.gathered);
        self.published.join(&gathered);
        true
    }

    /// Whether the phase of that parity has completed.
    pub(crate) const fn passed(&self, parity: u32) -> bool {
        self.phase & 1 != parity & 1
    }

    /// The phase a waiter means that knows `known` phases to be complete and asks for `parity`: the last one it
    /// knows of, or the next.
    pub(crate) const fn meant_phase(known: u32, parity: u32) -> i64 {
        let last = known as i64 - 1;
        if last & 1 == parity as i64 & 1 { last } else { last + 1 }
    }

    /// Transaction bytes still expected, or negative: come too many.
    pub(crate) const fn tx(&self) -> i64 {
        self.tx
    }

    /// `(pending, expected)` arrivals.
    pub(crate) const fn arrivals(&self) -> (i64, i64) {
        (self.pending, self.expected)
    }

    /// The opaque state of `mbarrier.arrive`: phase, and what is pending.
    pub(crate) const fn state(&self) -> u64 {
        (self.phase as u64) << 32 | self.pending as u64
    }

    /// Whether the phase that `state` was taken in has completed.
    pub(crate) const fn passed_state(&self, state: u64) -> bool {
        self.phase != (state >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn barrier(count: u32) -> Mbarrier {
        Mbarrier::new(count, 7, (0, 1)).expect("a count in range")
    }

    #[test]
    fn a_phase_needs_all_arrivals_and_all_bytes_in_any_order() {
        let mut b = barrier(2);
        assert_eq!(b.complete(64, None), Ok(false));
        assert_eq!(b.arrive(1, None), Ok(false));
        assert_eq!(b.expect(64), Ok(()));
        assert!(b.passed(1) && !b.passed(0));
        assert_eq!(b.arrive(1, None), Ok(true));
        assert!(b.passed(0) && !b.passed(1));
        assert_eq!(b.published.seen.get(7), 1);
    }

    #[test]
    fn too_many_arrivals_are_seen() {
        let mut b = barrier(1);
        assert_eq!(b.expect(16), Ok(()));
        assert_eq!(b.arrive(1, None), Ok(false));
        assert_eq!(b.arrive(1, None), Err(Fault::OverArrival));
        assert!(Mbarrier::new(0, 0, (0, 0)).is_none());
    }

    #[test]
    fn a_waiter_means_the_phase_it_knows_or_the_next() {
        assert_eq!(Mbarrier::meant_phase(0, 1), -1);
        assert_eq!(Mbarrier::meant_phase(0, 0), 0);
        assert_eq!(Mbarrier::meant_phase(3, 0), 2);
        assert_eq!(Mbarrier::meant_phase(3, 1), 3);
    }
}
