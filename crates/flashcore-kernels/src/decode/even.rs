//! All keys of all sequences, shared evenly among as many CTAs as the GPU holds.
//!
//! Turns of all rows, one after another, are cut into ranges of equal length, one for each CTA, whatever the lengths are
//! that the kernel finds. Each CTA counts all turns for itself: the host knows upper bounds at most, and nothing has to be
//! kept from one launch to the next.

use flashcore_tile::{Builder, Cta, Reg, Scope, Shared, U32};

use super::{
    Arguments, Config,
    config::Copies,
    unit::{Sequence, Unit},
};

const WARP: u32 = 32;
/// Sequences at most: their turns are noted in the shared memory of a CTA.
pub const MOST_SEQUENCES: u32 = 2048;

/// Runs `work` for every unit of this CTA.
pub(super) fn each_unit(
    b: &mut Builder,
    cfg: &Config,
    args: &Arguments,
    work: impl FnOnce(&mut Builder, &Unit),
) {
    note_turns(b, cfg, args);
    if cfg.shape.copies == Copies::Tensor {
        b.fence_async();
    }
    b.sync_cta();
    let all = all_turns(b, args);
    let ctas = b.ctas();
    let per = b.let_((all + ctas - 1) / ctas);
    let cta = b.cta();
    let at = b.var_in(Scope::Cta, cta * per);
    let end = b.let_((at + per).min(all));
    let none = b.uniform::<Cta>(at.ge(all));
    b.if_uniform(none, |b| b.exit());
    let place = Place::find(b, args, at);
    // What was noted is overwritten from here on.
    b.sync_cta();
    b.while_(
        |_| at.lt(end),
        |b| {
            let sequence = Sequence::find(b, cfg, args, place.sequence);
            let turns = sequence.turns(b, cfg);
            let to = b.let_((end - at + place.turn).min(turns));
            let start = b.let_(at - place.turn);
            let unit = Unit::of_turns(b, cfg, (sequence, place.head), [place.turn, to], (start, per));
            work(b, &unit);
            b.set(at, at + to - place.turn);
            place.next_row(b, args);
            b.sync_cta();
        },
    );
}

/// The turns of every sequence, in shared memory.
fn note_turns(b: &mut Builder, cfg: &Config, args: &Arguments) {
    let thread = b.thread();
    let index = b.var_in(Scope::Lane, thread);
    b.while_(
        |_| index.lt(args.sequences),
        |b| {
            let turns = Sequence::find(b, cfg, args, index).turns(b, cfg);
            let at = noted(b, index);
            b.store_shared(at, &[turns.into()]);
            b.add_to(index, cfg.shape.threads());
        },
    );
}

/// Where the turns of a sequence are noted.
fn noted(b: &mut Builder, sequence: Reg<U32>) -> Shared {
    let base = b.shared_base();
    b.let_(sequence * 4 + base).into()
}

/// The turns of 32 sequences from `first` on, one for each lane; 0 beyond the last.
fn turns_of_lanes(b: &mut Builder, args: &Arguments, first: Reg<U32>) -> Reg<U32> {
    let lane = b.lane();
    let index = b.let_(first + lane);
    let last = b.let_(args.sequences - 1);
    let at = b.let_(index.min(last));
    let at = noted(b, at);
    let [turns] = b.load_shared::<U32, 1>(at);
    b.let_(index.lt(args.sequences).select(turns, 0))
}

/// The turns of all rows.
fn all_turns(b: &mut Builder, args: &Arguments) -> Reg<U32> {
    let first = b.var_in(Scope::Warp, 0);
    let sum = b.var_in(Scope::Lane, 0);
    b.while_(
        |_| first.lt(args.sequences),
        |b| {
            let turns = turns_of_lanes(b, args, first);
            b.add_to(sum, turns);
            b.add_to(first, WARP);
        },
    );
    let all = b.warp_sum(sum);
    let all = b.let_(all * args.heads_kv);
    b.broadcast(all, Scope::Cta)
}

/// Where a CTA stands: a turn of a key head of a sequence.
struct Place {
    sequence: Reg<U32>,
    head: Reg<U32>,
    turn: Reg<U32>,
}

impl Place {
    /// The place of turn number `at` of all; every warp finds it for itself.
    fn find(b: &mut Builder, args: &Arguments, at: Reg<U32>) -> Self {
        let [first, before] = [(); 2].map(|()| b.var_in(Scope::Warp, 0));
        let turns = b.var_in(Scope::Lane, 0);
        // The group of 32 sequences first, then the sequence in the group by halves.
        b.do_while(|b| {
            let lanes = turns_of_lanes(b, args, first);
            b.set(turns, lanes);
            let group = b.warp_sum(turns);
            let behind = b.let_(before + group);
            let passed = b.let_((behind * args.heads_kv).le(at));
            b.select_into(before, passed, behind, before);
            b.select_into(first, passed, first + WARP, first);
            b.uniform::<flashcore_tile::Warp>(passed)
        });
        let (lane, number) = (b.lane(), b.var_in(Scope::Warp, 0));
        let within = b.var_in(Scope::Warp, before);
        for step in [16, 8, 4, 2, 1] {
            let most = b.let_(number + step);
            let counted = b.let_(lane.lt(most).select(turns, 0));
            let sum = b.warp_sum(counted);
            let behind = b.let_(before + sum);
            let passed = b.let_((behind * args.heads_kv).le(at));
            b.select_into(number, passed, most, number);
            b.select_into(within, passed, behind, within);
        }
        let own = b.let_(lane.eq(number).select(turns, 0));
        let own = b.warp_sum(own);
        let rest = b.let_(at - within * args.heads_kv);
        let values = [b.let_(first + number), b.let_(rest / own), b.let_(rest % own)];
        let [sequence, head, turn] = values.map(|value| {
            let agreed = b.broadcast(value, Scope::Cta);
            b.var_in(Scope::Cta, agreed)
        });
        Self { sequence, head, turn }
    }

    /// Goes on to the first turn of the next key head, or of the next sequence's first.
    fn next_row(&self, b: &mut Builder, args: &Arguments) {
        let next = b.let_(self.head + 1);
        let last = b.let_(next.eq(args.heads_kv));
        b.select_into(self.sequence, last, self.sequence + 1, self.sequence);
        b.select_into(self.head, last, 0, next);
        b.set(self.turn, 0);
    }
}
