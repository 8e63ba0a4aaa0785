//! One CTA's work: a tile of query rows against its key tiles, from the last to the first.

use flashcore_tile::{Acc, Builder, Cta, MMA_M, Reg, S32, Scope, SmemTile, U32, Uniform, Warp};

use super::{
    Access, Arguments, Config, Layout, Shape,
    block::{Block, row_end},
    epilogue::{Lse, WideOutput},
    products::{Queries, outputs, scores},
    ring::Ring,
};
use crate::parts::{
    bias::HeadBias,
    dropout::WarpDropout,
    factor::needs_branches,
    load::{self, RowSource, TileLoad},
    mask::{KeyTiles, Visibility, thread_column},
    operand::Across,
    scale::Scale,
    schedule::{Side, Tile},
    softmax::{Finished, Softmax},
    split::{self, SplitRows},
    staged::Output,
};

/// Computes this CTA's row tile.
pub(super) fn row_tile(b: &mut Builder, cfg: &Config, args: &Arguments, layout: &Layout) {
    let (tile, part) = find_tile(b, cfg, args);
    let beyond = b.uniform::<Cta>(tile.first_row.ge(tile.rows));
    b.if_uniform(beyond, |b| b.exit());

    let rows = Rows::new(b, cfg, args, &tile);
    let queries = rows.query(b, tile.q_len.signed()).unsigned();
    let visible = args.mask.over(b, queries, tile.kv_len);
    load_q(b, cfg, args, layout, &tile, rows.there);
    let tiles = key_tiles(b, cfg, &tile, &rows, &visible);
    let tiles = part.map_or(tiles, |part| part.of(b, tiles));
    let ring = Ring::start(b, cfg, args, layout, &tile, &rows, tiles);
    let factors = args.factors.map(|factors| factors.at(b, tile.sequence, tile.head_kv));
    let scale = factors.map_or(args.scale, |[of_keys, _]| args.scale.times(b, of_keys));
    let blocks: Vec<_> = (0..cfg.shape.blocks).map(|_| Block::new(b, cfg, &scale)).collect();
    let queries = Queries::new(b, cfg, layout, rows.warp);
    // Where there are key tiles there are keys, but the assembler does not know.
    let apart = needs_branches(cfg.input, cfg.dim_v).then(|| b.uniform(tile.kv_len.gt(0)));
    let bias = args.bias.map(|bias| bias.of_tile(b, &tile));
    // Scores that are capped have been multiplied by then.
    let bias = match factors {
        Some([of_keys, _]) if !cfg.softcap => bias.map(|bias| bias.before(b, of_keys)),
        _ => bias,
    };
    let dropout = args.dropout.map(|dropout| {
        let head = dropout.of_tile(b, &args.schedule, &tile);
        head.of_rows(b, Side::Queries, rows.thread, cfg.shape.blocks)
    });
    KeyLoop { cfg, scale, ring, blocks: &blocks, queries, visible, rows, apart, bias, dropout }.run(b);

    let sink = args.sinks.map(|sinks| sinks.of_head(b, tile.head));
    let (of_values, of_kept) = (factors.map(|[_, of_values]| of_values), args.dropout.map(|d| d.factor()));
    let factor = of_values.into_iter().chain(of_kept).reduce(|x, y| b.mul(x, y));
    let finished: Vec<_> = (0..)
        .zip(blocks)
        .map(|(n, block)| row_end(b, cfg, block, (sink, factor), rows.thread, tile.q_len, n))
        .collect();
    if let Some(part) = part {
        load::wait(b, 0);
        return part.write(b, cfg, args, (&tile, &rows), &finished);
    }
    let lse = args.lse_of_row(b, &tile);
    let lse = Lse { base: args.lse, to: lse, warp_row: rows.warp, share: rows.share, rows: rows.written };
    let Some(staging) = layout.staging else {
        load::wait(b, 0);
        return wide_output(b, cfg, args, &tile, &rows).write(b, cfg, &lse, &finished);
    };
    lse.write(b, &finished);
    // Other warps may still read what the output is gathered over, and without keys nobody has waited for Q.
    load::wait(b, 0);
    b.sync_cta();
    let tiles: Vec<_> = finished.into_iter().map(|(acc, finished)| (acc, finished.factor)).collect();
    output(b, cfg, args, staging, &tile, &rows).write(b, &tiles);
}

/// The tile of this CTA, and its part of the keys where others have parts of them too.
fn find_tile(b: &mut Builder, cfg: &Config, args: &Arguments) -> (Tile, Option<Part>) {
    let tile = match (args.split, cfg.parts, args.long) {
        (Some(rows), Some(parts), _) => {
            let cta = b.cta();
            let (index, number) = (b.let_(cta / parts), b.let_(cta % parts));
            let tile = args.schedule.tile_number(b, index, cfg.tile_m());
            return (tile, Some(Part { rows, parts, number }));
        }
        (_, _, Some(long)) => args.schedule.long_tile(b, cfg.tile_m(), long),
        _ => args.schedule.tile(b, cfg.tile_m()),
    };
    (tile, None)
}

/// One of several parts of a row tile's keys.
#[derive(Clone, Copy)]
struct Part {
    rows: SplitRows,
    parts: u32,
    number: Reg<U32>,
}

impl Part {
    /// The key tiles of this part: neighbours, as many as in the others but for the last ones.
    fn of(&self, b: &mut Builder, tiles: KeyTiles) -> KeyTiles {
        let first = tiles.begin.unwrap_or_else(|| b.var(0));
        let count = b.let_((tiles.end - first).max(0).unsigned());
        let each = b.let_(count.div_ceil(self.parts));
        let begin = b.let_((first + (self.number * each).signed()).min(tiles.end));
        let end = b.let_((begin + each.signed()).min(tiles.end));
        KeyTiles { begin: Some(begin), end, ..tiles }
    }

    /// Leaves rows and their LSE for `combine`.
    fn write(
        &self,
        b: &mut Builder,
        cfg: &Config,
        args: &Arguments,
        (tile, rows): (&Tile, &Rows),
        finished: &[(Acc, Finished)],
    ) {
        let first = split::first_row(b, &args.schedule, tile);
        let [to, lse] = self.rows.place(b, self.number, first);
        let stride = b.var(u64::from(self.rows.row_bytes()));
        let (warp_row, share, written) = (rows.warp, rows.share, rows.written);
        let lse = Lse { base: lse, to: lse, warp_row, share, rows: written };
        let pairs = self.rows.pairs();
        WideOutput { to, stride, warp_row, share, rows: written, pairs }.write(b, cfg, &lse, finished);
    }
}

fn output(
    b: &mut Builder,
    cfg: &Config,
    args: &Arguments,
    staging: SmemTile,
    tile: &Tile,
    rows: &Rows,
) -> Output {
    let first_row = b.let_(tile.q_start + tile.first_row);
    Output {
        element: cfg.output,
        access: cfg.access,
        dim: cfg.dim_v,
        columns: cfg.columns().each,
        share: rows.share,
        staging,
        to: tile.row_address(b, &args.out, tile.head, first_row),
        stride: args.out.row,
        warp_row: rows.warp,
        rows: rows.written,
    }
}

fn wide_output(b: &mut Builder, cfg: &Config, args: &Arguments, tile: &Tile, rows: &Rows) -> WideOutput {
    let first_row = b.let_(tile.q_start + tile.first_row);
    WideOutput {
        to: tile.row_address(b, &args.out, tile.head, first_row),
        stride: args.out.row,
        warp_row: rows.warp,
        share: rows.share,
        // Rows that are not used are left alone where others are added to.
        rows: if cfg.accumulate { rows.there } else { rows.written },
        pairs: cfg.access >= Access::B8,
    }
}

/// Where this thread stands in the row tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    /// First row of the warp in the tile.
    warp: Reg<U32>,
    /// Which share of the columns the warp has, where several warps have the same rows.
    pub(super) share: Option<Reg<U32>>,
    /// First rows of the warp and of this thread in the sequence.
    warp_first: Reg<S32>,
    thread: Reg<S32>,
    /// Rows of the tile that are queries.
    there: Reg<S32>,
    /// Rows of the tile that the output has.
    written: Reg<S32>,
    /// Rows of each query, where heads of a group are rows.
    group: Option<Reg<U32>>,
}

impl Rows {
    fn new(b: &mut Builder, cfg: &Config, args: &Arguments, tile: &Tile) -> Self {
        let warp = b.warp();
        let warp = b.uniform_register(warp);
        let side_by_side = cfg.shape.warps / cfg.columns().groups;
        let shared = side_by_side < cfg.shape.warps;
        let share = shared.then(|| b.let_(warp / side_by_side));
        let warp = if shared { b.let_(warp % side_by_side) } else { warp };
        let warp = b.let_(warp * (cfg.shape.blocks * MMA_M));
        let lane = b.lane();
        let quad = b.let_(lane >> 2);
        let warp_first = b.let_(tile.first_row + warp);
        let thread = b.let_(warp_first + quad);
        let left = |b: &mut Builder, rows: Reg<U32>| b.let_((rows - tile.first_row).signed());
        let [warp_first, thread] = [warp_first, thread].map(Reg::signed);
        let (there, written) = (left(b, tile.q_len), left(b, tile.rows));
        let group = args.split.map(|_| args.schedule.group());
        Self { warp, share, warp_first, thread, there, written, group }
    }

    /// The query that a row is of.
    fn query(&self, b: &mut Builder, row: Reg<S32>) -> Reg<S32> {
        self.group.map_or(row, |group| b.let_((row.unsigned() / group).signed()))
    }
}

fn load_q(b: &mut Builder, cfg: &Config, args: &Arguments, layout: &Layout, tile: &Tile, there: Reg<S32>) {
    let row = b.let_(tile.q_start + tile.first_row);
    let rows = match args.q_step {
        None => RowSource::Strided(tile.row_address(b, &args.q, tile.head, row), args.q.row),
        Some(step) => {
            let zero = b.var(0u32);
            let first = tile.row_address(b, &args.q, tile.head, zero);
            RowSource::Strided(b.let_(row.widen() * step + first), step)
        }
    };
    let load = TileLoad::new(b, cfg.copies(), &layout.q, cfg.dim_qk, rows);
    load.issue(b, 0, Some(there), None);
    load::commit(b);
}

/// The key tiles of the row tile; none for rows beyond the queries.
fn key_tiles(b: &mut Builder, cfg: &Config, tile: &Tile, rows: &Rows, visible: &Visibility) -> KeyTiles {
    let end = b.let_(tile.first_row + cfg.tile_m());
    let last = b.let_((end.min(tile.q_len) - 1).signed());
    let queries = [tile.first_row.signed(), last].map(|row| rows.query(b, row));
    let tiles = visible.key_tiles(b, queries, cfg.shape.tile_n);
    KeyTiles { end: b.let_(tile.first_row.ge(tile.q_len).select(0, tiles.end)), ..tiles }
}

/// The loop over key tiles.
struct KeyLoop<'a> {
    cfg: &'a Config,
    scale: Scale,
    ring: Ring,
    blocks: &'a [Block],
    queries: Queries,
    visible: Visibility,
    rows: Rows,
    apart: Option<Uniform<Cta>>,
    bias: Option<HeadBias>,
    dropout: Option<WarpDropout>,
}

/// Whether a key tile hides keys from some rows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Cut,
    Whole,
}

impl KeyLoop<'_> {
    /// Tiles that the right bound or the end cuts, whole tiles, tiles that the left bound cuts.
    fn run(&self, b: &mut Builder) {
        let KeyTiles { clean_end, clean_begin, .. } = self.ring.tiles;
        self.pass(b, Kind::Cut, Some(clean_end));
        self.pass(b, Kind::Whole, clean_begin);
        if clean_begin.is_some() {
            self.pass(b, Kind::Cut, None);
        }
    }

    /// Key tiles from where the last pass ended down to `first`.
    fn pass(&self, b: &mut Builder, kind: Kind, first: Option<Reg<S32>>) {
        b.while_(
            |b| {
                let needed = self.ring.not_below_begin(b, self.ring.tile).pred();
                match first {
                    Some(first) => needed & self.ring.tile.ge(first),
                    None => needed.into(),
                }
            },
            |b| self.turn(b, kind),
        );
    }

    /// One key tile.
    fn turn(&self, b: &mut Builder, kind: Kind) {
        let ring = &self.ring;
        ring.turn(b);
        let [k_stage, v_stage] = ring.tiles_of_turn(b);
        let stage = [k_stage, ring.columns_at.map_or(v_stage, |at| b.let_(v_stage + at))];
        let Shape { tile_n, step_n, .. } = self.cfg.shape;
        let first = b.var_in(Scope::Cta, tile_n - step_n);
        b.do_while(|b| {
            match kind {
                Kind::Whole => self.step(b, kind, stage, first),
                Kind::Cut => {
                    let seen = self.seen(b, first);
                    b.if_uniform(seen, |b| self.step(b, kind, stage, first));
                }
            }
            let more = b.uniform::<Cta>(first.ne(0));
            b.set(first, first - step_n);
            more
        });
        ring.advance(b);
    }

    /// One step of the softmax, over the keys from `first` on of the key tile.
    fn step(&self, b: &mut Builder, kind: Kind, [k_stage, v_stage]: [Reg<U32>; 2], first: Reg<U32>) {
        let ring = &self.ring;
        let skip = b.let_(first * ring.row_bytes[0] + k_stage);
        let keys = Across::new(b, ring.keys, skip);
        let scores = scores(b, self.cfg, &self.queries, &keys);
        scores.iter().for_each(|tile| self.scale.cap(b, tile.regs()));
        if self.bias.is_some() || kind == Kind::Cut {
            self.change(b, kind, &scores, first);
        }
        let tiles: Vec<_> =
            self.blocks.iter().zip(&scores).map(|(block, scores)| block.tile(scores)).collect();
        Softmax::raise(b, &tiles);
        let skip = b.let_(first * ring.row_bytes[1] + v_stage);
        let values = ring.values.at(b, skip);
        let dropout = self.dropout.as_ref().map(|dropout| {
            let key = self.step_key(b, first);
            dropout.step(b, key, self.cfg.shape.step_n)
        });
        outputs(b, self.cfg, self.blocks, &scores, &values, self.apart, dropout.as_ref());
    }

    /// The first key of a step of this turn.
    fn step_key(&self, b: &mut Builder, first: Reg<U32>) -> Reg<S32> {
        b.let_(self.ring.tile * self.cfg.shape.tile_n as i32 + first.signed())
    }

    /// Whether any row of this warp sees any key of a step.
    fn seen(&self, b: &mut Builder, first: Reg<U32>) -> Uniform<Warp> {
        let key = self.step_key(b, first);
        let last_row = b.let_(self.rows.warp_first + ((self.cfg.shape.blocks * MMA_M) as i32 - 1));
        let queries = [self.rows.warp_first, last_row].map(|row| self.rows.query(b, row));
        let seen = self.visible.any(b, queries, key, self.cfg.shape.step_n);
        b.uniform(seen)
    }

    /// Adds the bias, and hides keys where the mask or the end cuts.
    fn change(&self, b: &mut Builder, kind: Kind, scores: &[Acc], first: Reg<U32>) {
        let key = self.step_key(b, first);
        let lane = b.lane();
        let column = thread_column(b, lane);
        let key = b.let_(key + column);
        for (n, scores) in (0..).zip(scores) {
            let row = b.let_(self.rows.thread + n * MMA_M as i32);
            let rows = [row, b.let_(row + 8)];
            if let Some(bias) = &self.bias {
                bias.add(b, Side::Queries, scores, rows, key);
            }
            if kind == Kind::Cut {
                let queries = rows.map(|row| self.rows.query(b, row));
                self.visible.of_thread(b, queries).hide(b, scores, key);
            }
        }
    }
}
