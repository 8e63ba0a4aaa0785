//! The end of a unit: its warps' parts are merged into the result or, if units share rows, a part of it.
//!
//! Units of a row tile count up when done; the last one merges the parts of all, in the order of their keys, so that
//! bits do not depend on timing, and leaves the counter at zero.

use flashcore_tile::{
    Acc, Builder, Cta, Element, F32, Global, MMA_M, Reg, Scope, Shared, U32, U64, Uniform, Val,
};

use super::{
    Arguments, Config, Layout, SharedRows,
    config::part_row,
    narrow,
    part::{self, COLUMNS, Share},
    products::Block,
    unit::Unit,
};
use crate::parts::row_end::thread_rows;

/// Bytes of a thread's columns in f32.
const COLUMN_BYTES: u32 = COLUMNS * 4;

/// Ends a unit.
pub(super) fn run(b: &mut Builder, end: &End<'_>, blocks: &[Block]) {
    let End { cfg, args, layout, unit, .. } = *end;
    if !cfg.shape.parts_fit([cfg.dim_qk, cfg.dim_v], cfg.cache) {
        // Parts are written over what other warps may still read.
        b.sync_cta();
    }
    store_warp(b, cfg, layout, unit, blocks);
    b.sync_cta();
    match (layout.exchange, args.shared) {
        (Some(exchange), _) => exchange.merge(b, end),
        (None, Some(shared)) => end.meet(b, shared),
        (None, None) => unreachable!("units that are no cluster share rows through memory"),
    }
}

/// Writes this warp's part to shared memory.
fn store_warp(b: &mut Builder, cfg: &Config, layout: &Layout, unit: &Unit, blocks: &[Block]) {
    let (warp, lane) = (b.warp(), b.lane());
    let [first, stride] = layout.parts;
    let start = b.let_(warp * stride + b.shared_base() + first);
    let zero = b.var(0);
    let rows = thread_rows(b, zero, lane);
    let column = b.let_((lane & 3) << if cfg.widens() { 4 } else { 3 });
    let is_first = b.let_((lane & 3).eq(0));
    for (n, block) in (0..).zip(blocks) {
        let part = block.softmax.part(b);
        for (half, row) in rows.into_iter().enumerate() {
            let row = b.let_(row + n * MMA_M);
            let there = b.let_(row.lt(unit.sequence.written));
            let at = b.let_(row * part_row(cfg.dim_v) + start);
            let values = part::values_at(Shared::from(b.let_(at + column)));
            let heads = [part.top[half], part.sum[half], part.rounded[half], part.rounded[half]];
            let who = b.both(there, is_first);
            b.predicated(who, |b| b.store_shared(at, &heads.map(Val::from)));
            b.predicated(there, |b| store_row(b, cfg, &block.output, half, values));
        }
    }
}

/// Writes a thread's columns of one of its rows.
pub(super) fn store_row(b: &mut Builder, cfg: &Config, output: &Acc, half: usize, to: Shared) {
    if cfg.widens() {
        let columns = narrow::row_columns(output, half).take(cfg.dim_v as usize / 16);
        return (0..).zip(columns).for_each(|(n, four)| b.store_shared(to.at(n * 64), &four.map(Val::from)));
    }
    let vectors = output.regs().chunks_exact(4).take(cfg.dim_v as usize / 8);
    for (n, vector) in (0..).zip(vectors) {
        let pair = [vector[2 * half], vector[2 * half + 1]];
        b.store_shared(to.at(n * 32), &pair.map(Val::from));
    }
}

/// Four columns of a row, which one thread merges.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) index: Reg<U32>,
    pub(super) row: Reg<U32>,
    pub(super) vector: Reg<U32>,
}

impl Place {
    /// Place number `index` of a tile.
    pub(super) fn new(b: &mut Builder, cfg: &Config, index: Reg<U32>) -> Self {
        let vectors = cfg.dim_v / COLUMNS;
        Self { index, row: b.let_(index / vectors), vector: b.let_(index % vectors) }
    }

    /// Bytes from the first column of a part's row to these.
    fn column(&self, b: &mut Builder) -> Reg<U64> {
        b.let_(self.vector.mul_wide(COLUMN_BYTES))
    }
}

/// What the end of a unit needs to know.
pub(super) struct End<'a> {
    pub(super) cfg: &'a Config,
    pub(super) args: &'a Arguments,
    pub(super) layout: &'a Layout,
    pub(super) unit: &'a Unit,
    /// What values of 8 bits are multiplied by.
    pub(super) factor: Option<Reg<F32>>,
}

impl End<'_> {
    /// Runs `body` for every place of the tile, spread over all threads.
    pub(super) fn each_place(&self, b: &mut Builder, body: impl FnOnce(&mut Builder, Place)) {
        let vectors = self.cfg.dim_v / COLUMNS;
        let all = b.let_(self.unit.sequence.written * vectors);
        let thread = b.thread();
        let index = b.var_in(Scope::Lane, thread);
        b.while_(
            |_| index.lt(all),
            |b| {
                let place = Place::new(b, self.cfg, index);
                body(b, place);
                b.add_to(index, self.cfg.shape.threads());
            },
        );
    }

    /// A place of all warps' parts together.
    pub(super) fn of_warps(&self, b: &mut Builder, place: Place) -> Share {
        let [first, stride] = self.layout.parts;
        let row = b.let_(place.row * part_row(self.cfg.dim_v) + b.shared_base());
        let values = b.let_(place.vector * COLUMN_BYTES + row);
        let part = |warp: u32| {
            let skip = first + warp * stride;
            Share::read(b, Shared::from(row).at(skip), part::values_at(Shared::from(values)).at(skip))
        };
        let parts: Vec<_> = (0..self.cfg.shape.warps).map(part).collect();
        Share::join(b, &parts)
    }

    /// Writes the result, or this unit's part of it; the last unit of a row merges all.
    fn meet(&self, b: &mut Builder, shared: SharedRows) {
        let alone = b.uniform::<Cta>(self.unit.count.eq(1));
        b.if_else(
            alone,
            |b| {
                self.each_place(b, |b, place| {
                    let share = self.of_warps(b, place);
                    self.finish(b, place, &share);
                })
            },
            |b| {
                self.store_unit(b, shared);
                let last = self.is_last(b, shared, (Val::Const(1), self.unit.count));
                b.if_uniform(last, |b| self.merge_units(b, shared));
            },
        );
    }

    /// Where a place's row is in part number `part`.
    fn in_part(&self, b: &mut Builder, shared: SharedRows, part: Reg<U32>, place: Place) -> Reg<U64> {
        let rows = b.let_(part.mul_wide(self.args.rows));
        let row = b.let_(rows + place.row.widen());
        b.let_(row * u64::from(part_row(self.cfg.dim_v)) + shared.parts)
    }

    /// Writes what the warps made together as this unit's part.
    fn store_unit(&self, b: &mut Builder, shared: SharedRows) {
        self.each_place(b, |b, place| {
            let share = self.of_warps(b, place);
            self.write_part(b, shared, (&share, place), self.unit.part);
        });
    }

    /// Writes a place of part number `part`.
    pub(super) fn write_part(
        &self,
        b: &mut Builder,
        shared: SharedRows,
        (share, place): (&Share, Place),
        part: Reg<U32>,
    ) {
        let row = self.in_part(b, shared, part, place);
        let column = place.column(b);
        let values = part::values_at(Global::from(b.let_(row + column)));
        share.write(b, row.into(), values, || place.vector.eq(0));
    }

    /// Counts `own` of `all` parts done, and says whether these were the last.
    pub(super) fn is_last(
        &self,
        b: &mut Builder,
        shared: SharedRows,
        (own, all): (Val<U32>, Reg<U32>),
    ) -> Uniform<Cta> {
        b.sync_cta();
        let thread = b.thread();
        let row_tile = self.unit.row_tile(b, self.args);
        let counter = b.let_(shared.done + row_tile.mul_wide(4));
        let found = b.shared_at(self.layout.found);
        let last = b.let_(all - own);
        b.if_(thread.eq(0), |b| {
            let before = b.atomic_add_ordered(counter, own);
            b.store_shared(found, &[before.into()]);
            b.predicated(before.eq(last), |b| b.store_global::<U32>(counter, &[Val::Const(0)]));
        });
        b.sync_cta();
        let [before] = b.load_shared::<U32, 1>(found);
        b.uniform(before.eq(last))
    }

    /// Merges the parts of all units.
    pub(super) fn merge_units(&self, b: &mut Builder, shared: SharedRows) {
        self.each_place(b, |b, place| {
            let [first, second] = [self.unit.first_part, self.unit.second_part]
                .map(|part| self.in_part(b, shared, part, place));
            let row_bytes = part_row(self.cfg.dim_v) * self.unit.part_step;
            let stride = b.let_(self.args.rows.mul_wide(row_bytes));
            let column = place.column(b);
            let count = (self.unit.count, self.cfg.invariant);
            let share = Share::join_all(b, [first, second], stride, column, count);
            self.finish(b, place, &share);
        });
    }

    /// Writes a place of the result, and the row's LSE.
    pub(super) fn finish(&self, b: &mut Builder, place: Place, share: &Share) {
        let (cfg, args, unit) = (self.cfg, self.args, self.unit);
        let head = unit.head_of(b, args, place.row);
        let query = unit.query_of(b, args, place.row);
        let at = unit.sequence.place_of(b, query);
        let sink = args.sinks.map(|sinks| sinks.of_head(b, head));
        let (mut factor, mut lse) = share.close(b, sink);
        if cfg.lengths.cuts_queries() {
            let unused = b.let_(query.ge(unit.sequence.queries));
            factor = b.select(unused, 0.0, factor);
            lse = b.select(unused, f32::NEG_INFINITY, lse);
        }
        let empty = b.let_(factor.eq(0.0));
        let factor = self.factor.map_or(factor, |of_values| b.mul(factor, of_values));
        let values = share.values.map(|value| {
            let value = b.mul(value, factor);
            b.select(empty, 0.0, value)
        });
        let row = args.out.at(b, unit.sequence.batch, head, at);
        let to = b.let_(row + place.vector.mul_wide(COLUMNS * cfg.output.bytes()));
        match cfg.output {
            Element::F32 => b.store_global(to, &values.map(Val::from)),
            output => {
                let words = [0, 2].map(|n| b.pack(output, values[n], values[n + 1]));
                b.store_global(to, &words.map(Val::from));
            }
        }
        let [batch, head, heads, seq, at] =
            [unit.sequence.batch, head, args.heads, args.lengths.seq_q, at].map(|x| b.let_(x.widen()));
        let index = b.let_((batch * heads + head) * seq + at);
        let to = b.let_(index * 4 + args.lse);
        b.predicated(place.vector.eq(0) & args.lse.ne(0), |b| b.store_global(to, &[lse.into()]));
    }
}
