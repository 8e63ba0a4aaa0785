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
use crate::parts::{search, share::Share};

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
            let turns = sequence.turns(b, cfg, args);
            let to = b.let_((end - at + place.turn).min(turns));
            let start = b.let_(at - place.turn);
            let unit = Unit::of_turns(b, (cfg, args), (sequence, place.head), [place.turn, to], (start, per));
            match (cfg.share, unit.pieces) {
                (Share::All, None) => work(b, &unit),
                // Sequences of others have no turns, and pieces may start before this CTA and end behind it.
                (_, pieces) => {
                    let some = pieces.map_or(turns, |pieces| unit.sequence.if_mine(b, pieces.count));
                    let some = b.uniform::<Cta>(some.gt(0));
                    b.if_uniform(some, |b| work(b, &unit));
                }
            }
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
            let turns = Sequence::find(b, cfg, args, index).turns(b, cfg, args);
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

/// The turns of a sequence, as noted; each lane may ask for another.
fn turns_of(b: &mut Builder, sequence: Reg<U32>) -> Reg<U32> {
    let at = noted(b, sequence);
    let [turns] = b.load_shared::<U32, 1>(at);
    turns
}

/// The turns of all rows.
fn all_turns(b: &mut Builder, args: &Arguments) -> Reg<U32> {
    let (lane, sum) = (b.lane(), b.var_in(Scope::Lane, 0));
    let index = b.var_in(Scope::Lane, lane);
    b.while_(
        |_| index.lt(args.sequences),
        |b| {
            let turns = turns_of(b, index);
            b.add_to(sum, turns);
            b.add_to(index, WARP);
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
        let of_heads = b.let_(at / args.heads_kv);
        let found = search::find(b, of_heads, args.sequences, turns_of);
        let rest = b.let_(at - found.before * args.heads_kv);
        let values = [found.index, b.let_(rest / found.own), b.let_(rest % found.own)];
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
