//! Pieces of a row, one after another, for bits that do not depend on the batch (see `cuts.rs`).
//!
//! At every cut the warps' parts of the piece are merged in shared memory, and warps start over, while their rings keep
//! running. The CTA with the first piece of a row merges its pieces into its result; other CTAs send theirs to where the
//! whole row is merged: to memory, or to the CTAs of the cluster. All merge with the same arithmetic, one piece at a time.

use flashcore_tile::{Builder, Cta, MMA_M, Reg, S32, Scope, Shared, U32, Uniform, Val};

use super::{
    SharedRows,
    config::part_row,
    cuts::{Pieces, SPAN},
    end::{End, Place, store_row},
    part::{self, COLUMNS, Share},
    products::Block,
};
use crate::parts::row_end::thread_rows;

/// Rows of a thread that lie eight apart belong to halves of a block.
const HALF: u32 = MMA_M / 2;

/// What the pieces of a unit need to know.
pub(super) struct Fold<'a> {
    pub(super) end: End<'a>,
    pieces: Pieces,
    /// Whether the unit has the first piece of the row.
    leads: Uniform<Cta>,
    /// What has been folded at each of the thread's places, where registers hold it; it lies in shared memory elsewhere.
    held: Option<Vec<Share>>,
}

impl<'a> Fold<'a> {
    /// Prepares to fold the unit's pieces.
    pub(super) fn new(b: &mut Builder, end: End<'a>, pieces: Pieces) -> Self {
        let leads = b.uniform::<Cta>(pieces.before.eq(0));
        let held = end.cfg.folds_in_registers();
        let held = held.then(|| (0..end.cfg.places_of_thread()).map(|_| Share::unseen(b)).collect());
        let fold = Self { end, pieces, leads, held };
        if fold.held.is_none() {
            fold.each_place(b, |b, place, _| {
                let row = fold.folded(b, place);
                Share::write_unseen(b, row, part::values_at(row));
            });
        }
        if fold.end.layout.exchange.is_some() {
            b.wait_cluster();
        }
        fold
    }

    /// Runs `work` for every piece with the tile where it ends, after which the blocks hold what it has.
    pub(super) fn each_piece(
        &self,
        b: &mut Builder,
        blocks: &[Block],
        work: impl FnOnce(&mut Builder, Reg<S32>),
    ) {
        let cfg = self.end.cfg;
        let (at, number) = (b.var_in(Scope::Cta, self.pieces.from), b.var_in(Scope::Cta, self.pieces.before));
        b.while_(
            |_| at.lt(self.pieces.to),
            |b| {
                let next = self.pieces.end(b, at);
                let tile = b.let_((next * (SPAN / cfg.shape.tile_n)).signed());
                let tile = b.let_(tile.min(self.end.unit.end));
                work(b, tile);
                self.meet(b, blocks, number);
                blocks.iter().for_each(|block| block.restart(b));
                b.set(at, next);
                b.add_to(number, 1);
            },
        );
    }

    /// Ends the unit.
    pub(super) fn close(&self, b: &mut Builder) {
        let zero = b.var(0);
        match (self.end.layout.exchange, self.end.args.shared) {
            (Some(exchange), _) => {
                b.if_uniform(self.leads, |b| {
                    self.each_place(b, |b, place, held| {
                        let share = self.read_folded(b, place, held);
                        exchange.send_piece(b, &self.end, (&share, place), zero);
                    })
                });
                exchange.fold(b, &self.end);
            }
            (None, Some(shared)) => self.share_row(b, shared),
            (None, None) => unreachable!("units that are no cluster share rows through memory"),
        }
    }

    /// Writes the result where all pieces of the row are this unit's; whoever ends the last of several units folds them.
    fn share_row(&self, b: &mut Builder, shared: SharedRows) {
        let all = b.uniform::<Cta>(self.pieces.count.eq(self.pieces.all));
        b.if_else(
            all,
            |b| {
                self.each_place(b, |b, place, held| {
                    let share = self.read_folded(b, place, held);
                    self.end.finish(b, place, &share);
                })
            },
            |b| {
                b.if_uniform(self.leads, |b| {
                    self.each_place(b, |b, place, held| {
                        let share = self.read_folded(b, place, held);
                        self.end.write_part(b, shared, (&share, place), self.end.unit.first_part);
                    })
                });
                let last = self.end.is_last(b, shared, (self.pieces.count.into(), self.pieces.all));
                b.if_uniform(last, |b| self.end.merge_units(b, shared));
            },
        );
    }

    /// The warps' parts of piece `number` meet, some rows at a time, and go where pieces go.
    fn meet(&self, b: &mut Builder, blocks: &[Block], number: Reg<U32>) {
        let (cfg, met) = (self.end.cfg, self.end.cfg.met_rows());
        let rank = b.let_(number - self.pieces.kept);
        for first in (0..cfg.rows).step_by(met as usize) {
            // What met before has been read.
            b.sync_cta();
            self.store_rows(b, blocks, first);
            b.sync_cta();
            self.each_place_of(b, first, &|b: &mut Builder, place, held| {
                let share = self.of_warps(b, place, first);
                let add = |b: &mut Builder| self.add(b, (place, held), share);
                b.if_else(self.leads, add, |b| self.send(b, (&share, place), rank));
            });
        }
    }

    /// Adds a piece to what has been folded.
    fn add(&self, b: &mut Builder, (place, held): (Place, Option<Share>), share: Share) {
        let before = self.read_folded(b, place, held);
        let whole = Share::join(b, &[before, share]);
        if let Some(held) = held {
            return held.set(b, &whole);
        }
        let row = self.folded(b, place);
        b.store_shared(part::values_at(row), &whole.values.map(Val::from));
        b.store_shared(row, &whole.head().map(Val::from));
    }

    /// Sends a piece, number `rank` of those that the first unit does not have, to where the row is folded.
    fn send(&self, b: &mut Builder, (share, place): (&Share, Place), rank: Reg<U32>) {
        match (self.end.layout.exchange, self.end.args.shared) {
            (Some(exchange), _) => {
                let number = b.let_(rank + 1);
                exchange.send_piece(b, &self.end, (share, place), number);
            }
            (None, Some(shared)) => {
                let part = b.let_(self.end.unit.second_part + rank);
                self.end.write_part(b, shared, (share, place), part);
            }
            (None, None) => unreachable!("units that are no cluster share rows through memory"),
        }
    }

    /// Runs `body` for every place, in the threads that have them whenever rows meet, with what they hold of it.
    fn each_place(&self, b: &mut Builder, body: impl Fn(&mut Builder, Place, Option<Share>)) {
        let (rows, met) = (self.end.cfg.rows, self.end.cfg.met_rows());
        (0..rows).step_by(met as usize).for_each(|first| self.each_place_of(b, first, &body));
    }

    /// Runs `body` for every place of the rows that meet from `first` on.
    fn each_place_of(&self, b: &mut Builder, first: u32, body: &impl Fn(&mut Builder, Place, Option<Share>)) {
        let (cfg, vectors) = (self.end.cfg, self.end.cfg.dim_v / COLUMNS);
        let end = b.let_(self.end.unit.sequence.written.min(first + cfg.met_rows()) * vectors);
        let (thread, threads) = (b.thread(), cfg.shape.threads());
        let Some(held) = &self.held else {
            let index = b.var_in(Scope::Lane, thread + first * vectors);
            return b.while_(
                |_| index.lt(end),
                |b| {
                    let place = Place::new(b, cfg, index);
                    body(b, place, None);
                    b.add_to(index, threads);
                },
            );
        };
        let each = cfg.turns_of_places();
        let own = held.iter().skip((first / cfg.met_rows() * each) as usize);
        for (turn, share) in (0..each).zip(own) {
            let index = b.let_(thread + (first * vectors + turn * threads));
            b.if_(index.lt(end), |b| {
                let place = Place::new(b, cfg, index);
                body(b, place, Some(*share));
            });
        }
    }

    /// Writes this warp's rows from `first` on, as many as meet at once.
    fn store_rows(&self, b: &mut Builder, blocks: &[Block], first: u32) {
        let (cfg, met) = (self.end.cfg, self.end.cfg.met_rows());
        let (warp, lane) = (b.warp(), b.lane());
        let [place, stride] = self.end.layout.parts;
        let start = b.let_(warp * stride + b.shared_base() + place);
        let zero = b.var(0);
        let [row, _] = thread_rows(b, zero, lane);
        let column = b.let_((lane & 3) << if cfg.widens() { 4 } else { 3 });
        let is_first = b.let_((lane & 3).eq(0));
        for (n, block) in (0..).zip(blocks) {
            let part = block.softmax.part(b);
            for half in 0..2 {
                let skipped = n * MMA_M + half * HALF;
                if !(first..first + met).contains(&skipped) {
                    continue;
                }
                let there = b.let_((row + skipped).lt(self.end.unit.sequence.written));
                let at = b.let_((row + (skipped - first)) * part_row(cfg.dim_v) + start);
                let values = part::values_at(Shared::from(b.let_(at + column)));
                let half = half as usize;
                let heads = [part.top[half], part.sum[half], part.rounded[half], part.rounded[half]];
                let who = b.both(there, is_first);
                b.predicated(who, |b| b.store_shared(at, &heads.map(Val::from)));
                b.predicated(there, |b| store_row(b, cfg, &block.output, half, values));
            }
        }
    }

    /// A place of all warps' parts together, where rows from `first` on have met.
    fn of_warps(&self, b: &mut Builder, place: Place, first: u32) -> Share {
        let row = b.let_(place.row - first);
        self.end.of_warps(b, Place { row, ..place })
    }

    /// Where this thread keeps what has been folded at a place.
    fn folded(&self, b: &mut Builder, place: Place) -> Shared {
        let start = self.end.layout.folded.unwrap_or_default();
        b.shared_at(start).plus(b, place.index * FOLDED_BYTES)
    }

    fn read_folded(&self, b: &mut Builder, place: Place, held: Option<Share>) -> Share {
        held.unwrap_or_else(|| {
            let row = self.folded(b, place);
            Share::read(b, row, part::values_at(row))
        })
    }
}

/// Bytes of a place that has been folded: a head and four columns.
pub(super) const FOLDED_BYTES: u32 = 32;
