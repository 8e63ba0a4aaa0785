//! One CTA's work: a tile of rows against the tiles of the other side, from the last to the first, head after head.

use flashcore_tile::{
    Acc, Builder, Cta, Element, Half, MMA_M, MatrixOrder, Reg, S32, Scope, U32, Uniform, Warp,
};

use super::{
    Arguments, Config, Layout, Shape,
    epilogue::Gradient,
    products::{add_scores, add_sums, minus_sums, multiply, multiply_kept, operands, weigh, zeros},
    ring::Ring,
    terms::Terms,
};
use crate::{
    backward_rows::ROW_BYTES,
    parts::{
        bias::HeadBias,
        dropout::{StepDropout, WarpDropout},
        load::{self, RowSource, TileLoad},
        mask::{KeyTiles, Visibility, thread_column},
        operand::Across,
        range::Range,
        row_end::{clear_unused, thread_rows},
        schedule::{Side, Tile},
        staged::columns_at,
    },
};

/// Computes the gradients of this CTA's rows.
pub(super) fn row_tile(b: &mut Builder, cfg: &Config, args: &Arguments, layout: &Layout) {
    let tile = args.schedule.tile(b, cfg.tile_rows());
    let beyond = b.uniform::<Cta>(tile.first_row.ge(tile.rows));
    b.if_uniform(beyond, |b| b.exit());

    let rows = Rows::new(b, cfg, &tile);
    let visible = args.mask.over(b, tile.q_len, tile.kv_len);
    let visible = if cfg.side == Side::Keys { visible.transposed(b, tile.q_len) } else { visible };
    load_stationary(b, cfg, args, layout, &tile, rows.there);
    let ring = Ring::new(b, cfg, args, layout, &tile, &visible);
    ring.fill(b);
    let terms = match ring.terms {
        Some(streamed) => Terms::Columns(streamed),
        None => Terms::of_rows(b, cfg, args, &tile, rows.warp, rows.there),
    };
    let sums = Sums::new(b, cfg);
    let bias = args.bias.map(|bias| bias.of_tile(b, &tile));
    let dropout = args.dropout.map(|dropout| {
        let head = dropout.of_tile(b, &args.schedule, &tile);
        head.of_rows(b, cfg.side, rows.thread, cfg.shape.blocks)
    });
    let parts = Parts { ring, terms, sums: &sums, visible, rows, bias, dropout };
    Walk::new(b, (cfg, args), layout, &tile, parts).heads(b);
    // Other warps may still read what gradients are gathered over, and without tiles nobody has waited for any.
    load::wait(b, 0);
    b.sync_cta();
    write(b, cfg, args, layout, &tile, &rows, sums);
}

/// Sums of gradients, for each block of rows.
struct Sums {
    /// Those of dQ or dK.
    first: Vec<Acc>,
    /// Those of dV.
    second: Option<Vec<Acc>>,
    /// What the first are multiplied by.
    range: Option<Range>,
}

impl Sums {
    fn new(b: &mut Builder, cfg: &Config) -> Self {
        let mut zeros = |columns: u32| -> Vec<_> {
            (0..cfg.shape.blocks).map(|_| Acc::zero(b, columns as usize)).collect()
        };
        Self {
            first: zeros(cfg.first_columns().each),
            second: cfg.second_columns().map(|columns| zeros(columns.each)),
            range: (cfg.input == Element::from(Half::F16)).then(|| Range::new(b)),
        }
    }
}

/// Where this thread stands in the row tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    /// First row of the warp in the tile.
    pub(super) warp: Reg<U32>,
    /// Which share of the columns the warp has, where several warps have the same rows.
    pub(super) share: Option<Reg<U32>>,
    /// First rows of the warp and of this thread in the sequence.
    warp_first: Reg<S32>,
    thread: Reg<S32>,
    /// Rows of the tile that are used.
    pub(super) there: Reg<S32>,
    /// Rows of the tile that have gradients.
    pub(super) written: Reg<S32>,
}

impl Rows {
    fn new(b: &mut Builder, cfg: &Config, tile: &Tile) -> Self {
        let warp = b.warp();
        let warp = b.uniform_register(warp);
        let side_by_side = cfg.shape.warps / cfg.groups();
        let shared = cfg.groups() > 1;
        let share = shared.then(|| b.let_(warp / side_by_side));
        let warp = if shared { b.let_(warp % side_by_side) } else { warp };
        let warp = b.let_(warp * (cfg.shape.blocks * MMA_M));
        let lane = b.lane();
        let warp_first = b.let_(tile.first_row + warp);
        let thread = b.let_(warp_first + (lane >> 2));
        let left = |b: &mut Builder, rows: Reg<U32>| b.let_((rows - tile.first_row).signed());
        let used = if cfg.side == Side::Queries { tile.q_len } else { tile.kv_len };
        let [warp_first, thread] = [warp_first, thread].map(Reg::signed);
        Self { warp, share, warp_first, thread, there: left(b, used), written: left(b, tile.rows) }
    }
}

fn load_stationary(
    b: &mut Builder,
    cfg: &Config,
    args: &Arguments,
    layout: &Layout,
    tile: &Tile,
    there: Reg<S32>,
) {
    let (start, head) = match cfg.side {
        Side::Queries => (tile.q_start, tile.head),
        Side::Keys => (tile.kv_start, tile.head_kv),
    };
    let row = b.let_(start + tile.first_row);
    for (n, dim) in [cfg.dim_qk, cfg.dim_v].into_iter().enumerate() {
        let tensor = &args.stationary[n];
        let from = tensor.at(b, tile.batch, head, row);
        let load =
            TileLoad::new(b, cfg.copies(), &layout.stationary[n], dim, RowSource::Strided(from, tensor.row));
        load.issue(b, 0, Some(there), None);
    }
    load::commit(b);
}

fn write(
    b: &mut Builder,
    cfg: &Config,
    args: &Arguments,
    layout: &Layout,
    tile: &Tile,
    rows: &Rows,
    sums: Sums,
) {
    let (head, start) = match cfg.side {
        Side::Queries => (tile.head, tile.q_start),
        Side::Keys => (tile.head_kv, tile.kv_start),
    };
    let (dim, columns) = (cfg.dim_qk, cfg.first_columns());
    let factor = match sums.range.map(|range| range.inverse(b)) {
        Some(inverse) => b.let_(args.factor * inverse),
        None => args.factor,
    };
    let staging = |n: usize| layout.staging.map(|tiles| tiles[n]);
    let first = Gradient { tensor: &args.first, head, start, dim, columns, factor, staging: staging(0) };
    first.write(b, cfg, tile, rows, sums.first);
    let second = args.second.as_ref().zip(cfg.second_columns()).zip(sums.second);
    let Some(((tensor, columns), sums)) = second else { return };
    if layout.staging.is_some() {
        b.sync_cta();
    }
    let (dim, factor) = (cfg.dim_v, args.dropout.map_or_else(|| b.var(1.0), |dropout| dropout.factor()));
    Gradient { tensor, head, start, dim, columns, factor, staging: staging(1) }
        .write(b, cfg, tile, rows, sums);
}

/// What a walk is made of.
struct Parts<'a> {
    ring: Ring,
    terms: Terms,
    sums: &'a Sums,
    visible: Visibility,
    rows: Rows,
    bias: Option<HeadBias>,
    dropout: Option<WarpDropout>,
}

/// The loop over streamed tiles.
struct Walk<'a> {
    cfg: &'a Config,
    args: &'a Arguments,
    parts: Parts<'a>,
    /// The warp's rows of the stationary tiles.
    left: [Across; 2],
    /// Where the warp's columns of the streamed tiles start, where it does not have all.
    columns_at: [Option<Reg<U32>>; 2],
    /// Holds, where operands in two parts are so much text that some of it is kept apart.
    apart: Option<Uniform<Cta>>,
}

/// Whether a tile hides something from some rows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Cut,
    Whole,
}

impl<'a> Walk<'a> {
    fn new(
        b: &mut Builder,
        (cfg, args): (&'a Config, &'a Arguments),
        layout: &Layout,
        tile: &Tile,
        parts: Parts<'a>,
    ) -> Self {
        let rows = parts.rows;
        let left = layout.stationary.map(|tile| {
            let skip = b.let_(rows.warp * tile.slab_width());
            let rows = tile.matrix_rows(b, MatrixOrder::RowsFirst);
            Across::new(b, rows, skip)
        });
        let each = [Some(cfg.first_columns()), cfg.second_columns()];
        let columns_at = [0, 1].map(|n| {
            let (share, columns) = rows.share.zip(each[n])?;
            Some(columns_at(b, &layout.streamed[n], share, columns.each))
        });
        // Where there are pairs of tiles there are keys, but the assembler does not know.
        let apart = (cfg.input == Element::F32).then(|| b.uniform(tile.kv_len.gt(0)));
        Self { cfg, args, parts, left, columns_at, apart }
    }

    /// All heads whose rows are streamed: one, or all that share the keys.
    fn heads(&self, b: &mut Builder) {
        if self.cfg.side == Side::Queries {
            return self.tiles(b);
        }
        let left = b.var_in(Scope::Cta, self.args.schedule.group());
        let terms_step = b.let_(self.args.terms.stride().mul_wide(ROW_BYTES));
        b.do_while(|b| {
            self.tiles(b);
            b.set(left, left - 1);
            let more = b.uniform::<Cta>(left.ne(0));
            b.if_uniform(more, |b| {
                self.parts.ring.next_head(b, terms_step);
                if let Some(bias) = &self.parts.bias {
                    bias.next_head(b);
                }
                if let Some(dropout) = &self.parts.dropout {
                    dropout.head().next_head(b);
                }
            });
            more
        });
    }

    /// Tiles that the right bound or the end cuts, whole tiles, tiles that the left bound cuts.
    fn tiles(&self, b: &mut Builder) {
        let KeyTiles { clean_end, clean_begin, .. } = self.parts.ring.tiles;
        self.pass(b, Kind::Cut, Some(clean_end));
        self.pass(b, Kind::Whole, clean_begin);
        if clean_begin.is_some() {
            self.pass(b, Kind::Cut, None);
        }
    }

    /// Tiles from where the last pass ended down to `first`.
    fn pass(&self, b: &mut Builder, kind: Kind, first: Option<Reg<S32>>) {
        let ring = &self.parts.ring;
        b.while_(
            |b| {
                let needed = ring.not_below_begin(b, ring.tile).pred();
                match first {
                    Some(first) => needed & ring.tile.ge(first),
                    None => needed.into(),
                }
            },
            |b| self.turn(b, kind),
        );
    }

    /// One streamed tile.
    fn turn(&self, b: &mut Builder, kind: Kind) {
        self.parts.ring.turn(b);
        let Shape { tile, step, .. } = self.cfg.shape;
        let first = b.var_in(Scope::Cta, tile - step);
        b.do_while(|b| {
            match kind {
                Kind::Whole => self.step(b, kind, first),
                Kind::Cut => {
                    let seen = self.seen(b, first);
                    b.if_uniform(seen, |b| self.step(b, kind, first));
                }
            }
            let more = b.uniform::<Cta>(first.ne(0));
            b.set(first, first - step);
            more
        });
        self.parts.ring.advance(b);
    }

    /// The streamed rows from `first` on of a tile.
    fn step(&self, b: &mut Builder, kind: Kind, first: Reg<U32>) {
        let (cfg, Parts { ring, terms, sums, .. }) = (self.cfg, &self.parts);
        let terms = terms.at(b, ring.read, first, cfg.shape.blocks);
        let scores = zeros(b, cfg);
        let right = ring.across(b, 0, first);
        add_scores(b, cfg, &scores, [&self.left[0], &right], cfg.dim_qk, self.apart);
        scores.iter().for_each(|tile| self.args.scale.cap(b, tile.regs()));
        let tangents = self.tangents(b, &scores);
        let weights = scores;
        if self.parts.bias.is_some() || kind == Kind::Cut {
            self.change(b, kind, &weights, first);
        }
        let dropout = self.dropout(b, first);
        let scores = (&*weights, tangents.as_deref().unwrap_or(&weights));
        let probabilities = weigh(b, cfg, self.args.scale.log2, scores, &terms, dropout.as_ref());
        if let Some(sums) = &sums.second {
            let right = ring.along(b, 1, first, self.columns_at[1]);
            add_sums(b, cfg, sums, &probabilities, &right, self.apart);
        }
        let d_probabilities = match &dropout {
            None => minus_sums(b, cfg, &terms),
            Some(_) => zeros(b, cfg),
        };
        let right = ring.across(b, 1, first);
        add_scores(b, cfg, &d_probabilities, [&self.left[1], &right], cfg.dim_v, self.apart);
        match &dropout {
            None => multiply(b, &weights, &d_probabilities),
            Some(dropout) => multiply_kept(b, cfg, &weights, &d_probabilities, &terms, dropout.factor()),
        }
        let slopes = d_probabilities;
        if let Some(range) = sums.range {
            if cfg.side == Side::Keys {
                self.clear_beyond(b, &slopes);
            }
            range.keep(b, &slopes, &sums.first);
        }
        let left = operands(b, cfg, &slopes);
        let right = ring.along(b, 0, first, self.columns_at[0]);
        add_sums(b, cfg, &sums.first, &left, &right, self.apart);
    }

    /// Zeros for keys beyond the last: their numbers may be as large as they like, and must not move the range of others.
    fn clear_beyond(&self, b: &mut Builder, slopes: &[Acc]) {
        let Rows { warp, there, .. } = self.parts.rows;
        let end = b.let_((warp + self.cfg.shape.blocks * MMA_M).signed());
        let some = b.uniform::<Warp>(end.gt(there));
        b.if_uniform(some, |b| {
            let lane = b.lane();
            for (block, slopes) in (0..).zip(slopes) {
                let first = b.let_(warp + block * MMA_M);
                let beyond = thread_rows(b, first, lane).map(|row| b.let_(row.signed().ge(there)));
                clear_unused(b, beyond, slopes);
            }
        });
    }

    /// The first streamed row of a step of this turn.
    fn step_row(&self, b: &mut Builder, first: Reg<U32>) -> Reg<S32> {
        b.let_(self.parts.ring.tile * self.cfg.shape.tile as i32 + first.signed())
    }

    /// Whether any row of this warp meets any row of a step.
    fn seen(&self, b: &mut Builder, first: Reg<U32>) -> Uniform<Warp> {
        let (row, own) = (self.step_row(b, first), self.parts.rows.warp_first);
        let last = b.let_(own + ((self.cfg.shape.blocks * MMA_M) as i32 - 1));
        let seen = self.parts.visible.any(b, [own, last], row, self.cfg.shape.step);
        b.uniform(seen)
    }

    /// Capped scores in registers of their own, where a bias moves the scores: the slope of the cap is made of them.
    fn tangents(&self, b: &mut Builder, scores: &[Acc]) -> Option<Vec<Acc>> {
        let moved = self.cfg.softcap && self.parts.bias.is_some();
        let mut copy = |scores: &Acc| Acc::over(scores.regs().iter().map(|&score| b.var(score)).collect());
        moved.then(|| scores.iter().map(&mut copy).collect())
    }

    /// What is left out of the weights of a step.
    fn dropout(&self, b: &mut Builder, first: Reg<U32>) -> Option<StepDropout<'_>> {
        let dropout = self.parts.dropout.as_ref()?;
        let row = self.step_row(b, first);
        Some(dropout.step(b, row, self.cfg.shape.step))
    }

    /// Adds the bias, and hides what the mask or the end cuts.
    fn change(&self, b: &mut Builder, kind: Kind, scores: &[Acc], first: Reg<U32>) {
        let row = self.step_row(b, first);
        let lane = b.lane();
        let column = thread_column(b, lane);
        let first = b.let_(row + column);
        for (n, scores) in (0..).zip(scores) {
            let row = b.let_(self.parts.rows.thread + n * MMA_M as i32);
            let rows = [row, b.let_(row + 8)];
            if let Some(bias) = &self.parts.bias {
                bias.add(b, self.cfg.side, scores, rows, first);
            }
            if kind == Kind::Cut {
                self.parts.visible.of_thread(b, rows).hide(b, scores, first);
            }
        }
    }
}
