//! Rows and weights on their way into shared memory, by copies of 16 bytes.
//!
//! Eight threads copy the 128 bytes of a line; what lies beyond the weights, and rows that are padding, become zeros
//! without being read.

use flashcore_tile::{
    Builder, CHUNK_BYTES, CopyWidth, Global, Params, Pred, Reg, Scope, Shared, SmemTile, U32, U64, Val,
};

use super::{Arguments, Config, DEPTH, Kind, Layer, NONE, Place, Source, WeightOrder, gate_steps};
use crate::slots::moe as slots;

/// Bytes of an element.
const BYTES: u32 = 2;
/// Threads that share a line of 128 bytes.
const LANES: u32 = 8;

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

/// A thread's place in a line, and its first line.
#[derive(Clone, Copy, Debug)]
struct Share {
    line: Reg<U32>,
    chunk: Reg<U32>,
}

impl Share {
    fn new(b: &mut Builder) -> Self {
        let thread = b.thread();
        Self { line: b.let_(thread / LANES), chunk: b.let_(thread % LANES) }
    }

    /// Where the thread's first chunk goes in the first copy of a tile, but for the tile's own offset.
    fn destination(&self, b: &mut Builder, tile: &SmemTile) -> Reg<U32> {
        let base = b.shared_base();
        tile.chunk(b, base, self.line, self.chunk)
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

/// The bytes of a chunk that are read, where that may be none.
fn present(b: &mut Builder, there: Option<Pred>, inside: Option<Pred>) -> Option<Val<U32>> {
    let both = match (there, inside) {
        (Some(there), Some(inside)) => Some(b.both(there, inside)),
        (one, other) => one.or(other),
    };
    both.map(|both| b.select::<U32>(both, CHUNK_BYTES, 0).into())
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

/// One thread's share of the copies that fill a tile of weights.
pub(super) struct WeightLoad {
    tile: SmemTile,
    order: WeightOrder,
    to: Reg<U32>,
    lines_per_pass: u32,
    /// Lines, or columns, of one matrix of the tile.
    matrix: u32,
    /// Where the thread's first chunk of the next stage comes from: of each matrix.
    from: Vec<Reg<U64>>,
    /// Bytes between lines of neighbouring passes, and from one stage to the next.
    pass: Reg<U64>,
    step: Option<Reg<U64>>,
    /// What to compare with, where weights are not whole tiles.
    bounds: Option<Bounds>,
}

/// Where weights end.
struct Bounds {
    /// First element of the thread along the depth in the next stage, and their number.
    depth: [Reg<U32>; 2],
    /// First element of the thread across the depth, and their number.
    across: [Reg<U32>; 2],
}

impl WeightLoad {
    pub(super) fn new(
        b: &mut Builder,
        cfg: &Config,
        tile: &SmemTile,
        (weights, args): (&WeightArguments, &Arguments),
        place: Place,
    ) -> Self {
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
        Self {
            tile: *tile,
            order: cfg.weights,
            to: share.destination(b, tile),
            lines_per_pass,
            matrix: cfg.matrix_n(),
            from: starts.into_iter().flatten().map(|start| b.var_in(Scope::Lane, start)).collect(),
            pass: b.let_(weights.line * u64::from(lines_per_pass)),
            step: (cfg.weights != WeightOrder::Rows).then(|| b.let_(weights.line * u64::from(DEPTH))),
            bounds,
        }
    }

    /// Starts the copies of the next stage into the copy of the tile `skip` bytes on.
    pub(super) fn issue(&self, b: &mut Builder, skip: impl Into<flashcore_tile::Expr<U32>>) {
        let to = b.let_(self.to + skip.into());
        for (matrix, &from) in (0..).zip(&self.from) {
            match self.order {
                WeightOrder::Rows => self.issue_rows(b, to, matrix, from),
                WeightOrder::Columns | WeightOrder::PairedColumns => self.issue_columns(b, to, matrix, from),
            }
            match self.step {
                Some(step) => b.add_to(from, step),
                None => b.add_to(from, u64::from(DEPTH * BYTES)),
            }
        }
        if let Some(bounds) = &self.bounds {
            b.add_to(bounds.depth[0], DEPTH);
        }
    }

    fn issue_rows(&self, b: &mut Builder, to: Reg<U32>, matrix: u32, from: Reg<U64>) {
        let inside = self.bounds.as_ref().map(|bounds| b.let_(bounds.depth[0].lt(bounds.depth[1])));
        let at = b.var_in(Scope::Lane, from);
        for pass in 0..self.matrix / self.lines_per_pass {
            if pass > 0 {
                b.add_to(at, self.pass);
            }
            let there = self.bounds.as_ref().map(|Bounds { across: [first, limit], .. }| {
                b.let_((*first + pass * self.lines_per_pass).lt(*limit))
            });
            let present = present(b, there, inside);
            let line = matrix * self.matrix + pass * self.lines_per_pass;
            let offset = self.tile.offset() + line * self.tile.slab_width();
            b.copy_async(CopyWidth::B16Of256, Shared { base: to, offset }, Global::from(at), present);
        }
    }

    fn issue_columns(&self, b: &mut Builder, to: Reg<U32>, matrix: u32, from: Reg<U64>) {
        let at = b.var_in(Scope::Lane, from);
        let slabs = self.matrix / self.tile.slab_cols();
        for pass in 0..DEPTH / self.lines_per_pass {
            if pass > 0 {
                b.add_to(at, self.pass);
            }
            let inside = self.bounds.as_ref().map(|Bounds { depth: [first, limit], .. }| {
                b.let_((*first + pass * self.lines_per_pass).lt(*limit))
            });
            for slab in 0..slabs {
                let skipped = slab * self.tile.slab_cols();
                let there = self
                    .bounds
                    .as_ref()
                    .map(|Bounds { across: [first, limit], .. }| b.let_((*first + skipped).lt(*limit)));
                let present = present(b, there, inside);
                let slab_at = (matrix * slabs + slab) * self.tile.slab_bytes();
                let offset =
                    self.tile.offset() + slab_at + pass * self.lines_per_pass * self.tile.slab_width();
                let from = Global::from(at).at((skipped * BYTES) as i32);
                b.copy_async(CopyWidth::B16, Shared { base: to, offset }, from, present);
            }
        }
    }
}
