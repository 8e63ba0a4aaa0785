//! Rows and weights on their way into shared memory, by copies of 16 bytes.
//!
//! Eight threads copy the 128 bytes of a line; data beyond the weights and padding rows become zeros without being
//! read.

use flashcore_tile::{
    Builder, CHUNK_BYTES, CopyWidth, Global, Params, Pred, Reg, Scope, Shared, SmemTile, U32, U64,
};

use super::{Arguments, Config, DEPTH, Kind, Layer, NONE, Place, Source, WeightOrder, gate_steps};
use crate::{
    parts::lines::{Bounds, LineLoad, Share, present},
    slots::moe as slots,
};

/// Bytes of an element.
const BYTES: u32 = 2;

/// Where rows come from, as registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowArguments {
    base: Reg<U64>,
    stride: Reg<U64>,
    top_k: Reg<U32>,
}

impl RowArguments {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Layer>, cfg: &Config) -> Self {
        let (slot, kind) = match (cfg.kind, cfg.source) {
            (Kind::Up(_), _) => (slots::X, cfg.kind),
            (Kind::Down, Source::All) => (slots::SHARED_JOINED, cfg.kind),
            (Kind::Down, _) => (slots::JOINED, cfg.kind),
        };
        Self {
            base: params.buffer(b, "rows", slot),
            stride: params.u64(b, "row_stride", move |layer| {
                let elements = match kind {
                    Kind::Up(_) => layer.problem.x().strides()[2],
                    Kind::Down => layer.problem.intermediate(),
                };
                elements as u64 * u64::from(BYTES)
            }),
            top_k: params.u32(b, "top_k", |layer| layer.problem.top_k() as u32),
        }
    }
}

/// One thread's share of the copies that fill a tile of rows.
pub(super) struct RowLoad {
    tile: SmemTile,
    to: Reg<U32>,
    rows_per_pass: u32,
    /// Where each of the thread's rows comes from, and whether it is there, where some are not.
    rows: Vec<(Reg<U64>, Option<Pred>)>,
    /// First element of the thread in the next stage, where the depth is not whole stages.
    depth: Option<(Reg<U32>, Reg<U32>)>,
}

impl RowLoad {
    pub(super) fn new(
        b: &mut Builder,
        cfg: &Config,
        tile: &SmemTile,
        (from, args): (&RowArguments, &Arguments),
        place: Place,
    ) -> Self {
        let (share, rows_per_pass) = (Share::new(b), cfg.shape.rows_per_pass());
        let within = b.let_(share.chunk.mul_wide(CHUNK_BYTES) + from.base);
        let rows = (0..tile.rows() / rows_per_pass).map(|pass| {
            let row = b.let_(share.line + pass * rows_per_pass);
            let (number, there) = row_number(b, cfg, (from, args), place, row);
            let address = b.let_(number.widen() * from.stride + within);
            (b.var_in(Scope::Lane, address), there)
        });
        let rows = rows.collect();
        let depth = (!cfg.whole).then(|| {
            let first = b.let_(share.chunk * (CHUNK_BYTES / BYTES));
            (b.var_in(Scope::Lane, first), args.depth)
        });
        Self { tile: *tile, to: share.destination(b, tile), rows_per_pass, rows, depth }
    }

    /// Starts the copies of the next stage into the copy of the tile `skip` bytes on.
    pub(super) fn issue(&self, b: &mut Builder, skip: impl Into<flashcore_tile::Expr<U32>>) {
        let to = b.let_(self.to + skip.into());
        let inside = self.depth.map(|(first, depth)| {
            let inside: Pred = b.let_(first.lt(depth));
            b.add_to(first, DEPTH);
            inside
        });
        for (pass, &(from, there)) in (0..).zip(&self.rows) {
            let present = present(b, there, inside);
            let offset = self.tile.offset() + pass * self.rows_per_pass * self.tile.slab_width();
            b.copy_async(CopyWidth::B16, Shared { base: to, offset }, Global::from(from), present);
            b.add_to(from, u64::from(DEPTH * BYTES));
        }
    }
}

/// Which row of its tensor a row of the tile is, and whether it is there.
fn row_number(
    b: &mut Builder,
    cfg: &Config,
    (from, args): (&RowArguments, &Arguments),
    place: Place,
    row: Reg<U32>,
) -> (Reg<U32>, Option<Pred>) {
    let all = b.let_(place.tile * cfg.shape.tile_m + row);
    match (cfg.kind, cfg.source) {
        (Kind::Down, _) => (all, None),
        (Kind::Up(_), Source::Sorted) => {
            let at = b.let_(args.index.entries + all.mul_wide(4));
            let [entry] = b.load_global::<U32, 1>(at);
            let there: Pred = b.let_(entry.ne(NONE));
            let token = b.let_(entry / from.top_k);
            (b.select(there, token, 0), Some(there))
        }
        (Kind::Up(_), Source::Pairs) => {
            let there = b.let_(row.eq(0));
            (b.let_(place.tile / from.top_k), Some(there))
        }
        (Kind::Up(_), Source::All) => {
            let tokens = args.tokens.expect("kernels for all tokens know their number");
            let there: Pred = b.let_(all.lt(tokens));
            (b.select(there, all, 0), Some(there))
        }
    }
}

/// Where weights come from, as registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct WeightArguments {
    base: Reg<U64>,
    /// Bytes from one expert to the next, from one line to the next, and from gate to up.
    expert: Reg<U64>,
    line: Reg<U64>,
    up: Option<Reg<U64>>,
}

impl WeightArguments {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Layer>, cfg: &Config) -> Self {
        let (kind, order) = (cfg.kind, cfg.weights);
        let layout = move |layer: &Layer| match kind {
            Kind::Up(_) => *layer.problem.gate_up(),
            Kind::Down => *layer.problem.down(),
        };
        let slot = match (kind, cfg.source) {
            (Kind::Down, Source::All) => slots::SHARED_DOWN,
            (Kind::Down, _) => slots::DOWN,
            (Kind::Up(_), Source::All) => slots::SHARED_GATE_UP,
            (Kind::Up(_), _) => slots::GATE_UP,
        };
        let bytes = |elements: u64| elements * u64::from(BYTES);
        Self {
            base: params.buffer(b, "weights", slot),
            expert: params.u64(b, "expert_stride", move |layer| bytes(layout(layer).strides()[0] as u64)),
            line: params.u64(b, "line_stride", move |layer| {
                let [_, row, col] = layout(layer).strides().map(|stride| stride as u64);
                match (order, kind) {
                    (WeightOrder::Rows, Kind::Up(_)) => bytes(row * gate_steps(layer)[0]),
                    (WeightOrder::Rows, Kind::Down) => bytes(row),
                    _ => bytes(col),
                }
            }),
            up: (cfg.matrices() == 2).then(|| {
                params.u64(b, "up", move |layer| {
                    bytes(layout(layer).strides()[1] as u64 * gate_steps(layer)[1])
                })
            }),
        }
    }
}

/// This thread's share of the copies of weights.
pub(super) fn weight_load(
    b: &mut Builder,
    cfg: &Config,
    tile: &SmemTile,
    (weights, args): (&WeightArguments, &Arguments),
    place: Place,
) -> LineLoad {
    let share = Share::new(b);
    let elements = CHUNK_BYTES / BYTES;
    let along = b.let_(share.chunk * elements);
    let start = b.let_(place.expert.widen() * weights.expert + weights.base);
    // Of a line and a column, one is along the depth and one across.
    let (line, column, depth, across, limit) = match cfg.weights {
        WeightOrder::Rows => {
            let line = b.let_(place.feature + share.line);
            (line, along, along, line, args.features)
        }
        WeightOrder::Columns => {
            let column = b.let_(place.feature + along);
            (share.line, column, share.line, column, args.features)
        }
        WeightOrder::PairedColumns => {
            let column = b.let_(place.feature * 2 + along);
            (share.line, column, share.line, column, b.let_(args.features * 2))
        }
    };
    let gate = b.let_(line.widen() * weights.line + start);
    let gate = b.let_(gate + column.mul_wide(BYTES));
    let starts = [Some(gate), weights.up.map(|up| b.let_(gate + up))];
    let bounds = (!cfg.whole)
        .then(|| Bounds { depth: [b.var_in(Scope::Lane, depth), args.depth], across: [across, limit] });
    let lines_per_pass = cfg.shape.rows_per_pass();
    LineLoad {
        tile: *tile,
        along: cfg.weights == WeightOrder::Rows,
        to: share.destination(b, tile),
        lines_per_pass,
        matrix: cfg.matrix_n(),
        from: starts.into_iter().flatten().map(|start| b.var_in(Scope::Lane, start)).collect(),
        pass: b.let_(weights.line * u64::from(lines_per_pass)),
        step: (cfg.weights != WeightOrder::Rows).then(|| b.let_(weights.line * u64::from(DEPTH))),
        bounds,
    }
}
