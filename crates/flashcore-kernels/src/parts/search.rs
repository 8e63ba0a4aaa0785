//! Which of many sequences a number falls into, where the kernel reads at run time how many each takes.
//!
//! A warp sums what 32 sequences take at a time, then finds the one among them by binary search. No state is kept between
//! launches, and the host knows upper bounds at most.

use flashcore_tile::{Builder, Reg, Scope, U32, Warp};

const WARP: u32 = 32;

/// The sequence that a number falls into, alike in all lanes of a warp.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    /// Which; some sequence where the number is beyond all.
    pub(crate) index: Reg<U32>,
    /// What the sequences before it take together.
    pub(crate) before: Reg<U32>,
    /// What it takes itself: no more than the number less `before` where the number is beyond all.
    pub(crate) own: Reg<U32>,
}

/// How far a search has come: where numbers only grow, the next one goes on from there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    /// The first sequence that is still looked at.
    first: Reg<U32>,
    /// What those before it take together.
    before: Reg<U32>,
}

impl Progress {
    /// A search that has not begun.
    #[track_caller]
    pub(crate) fn new(b: &mut Builder) -> Self {
        let [first, before] = [(); 2].map(|()| b.var_in(Scope::Warp, 0));
        Self { first, before }
    }
}

/// Finds the sequence of number `at` among `sequences`; `taken` is what a sequence takes, which each lane asks for another.
#[track_caller]
pub(crate) fn find(
    b: &mut Builder,
    at: Reg<U32>,
    sequences: Reg<U32>,
    taken: impl FnMut(&mut Builder, Reg<U32>) -> Reg<U32>,
) -> Found {
    let (lane, last) = (b.lane(), b.let_(sequences - 1));
    let progress = Progress::new(b);
    find_from(b, progress, at, (lane, last), taken)
}

/// As [`find`], from where a search for smaller numbers has come to; with this lane's number and that of the last sequence.
#[track_caller]
pub(crate) fn find_from(
    b: &mut Builder,
    Progress { first, before }: Progress,
    at: Reg<U32>,
    (lane, last): (Reg<U32>, Reg<U32>),
    mut taken: impl FnMut(&mut Builder, Reg<U32>) -> Reg<U32>,
) -> Found {
    let own = b.var_in(Scope::Lane, 0);
    b.do_while(|b| {
        let index = b.let_(first + lane);
        let clamped = b.let_(index.min(last));
        let count = taken(b, clamped);
        b.set(own, index.le(last).select(count, 0));
        let group = b.warp_sum(own);
        let (behind, next) = (b.let_(before + group), b.let_(first + WARP));
        let passed = b.let_(behind.le(at));
        let more = b.let_(next.le(last));
        let goes_on = b.both(passed, more);
        b.select_into(before, goes_on, behind, before);
        b.select_into(first, goes_on, next, first);
        b.uniform::<Warp>(goes_on)
    });
    let number = b.var_in(Scope::Warp, 0);
    let within = b.var_in(Scope::Warp, before);
    for step in [16, 8, 4, 2, 1] {
        let most = b.let_(number + step);
        let counted = b.let_(lane.lt(most).select(own, 0));
        let sum = b.warp_sum(counted);
        let behind = b.let_(before + sum);
        let passed = b.let_(behind.le(at));
        b.select_into(number, passed, most, number);
        b.select_into(within, passed, behind, within);
    }
    let own = b.let_(lane.eq(number).select(own, 0));
    let own = b.warp_sum(own);
    Found { index: b.let_((first + number).min(last)), before: within, own }
}
