//! Which tile a CTA works on next, how the producer tells its consumers, and which streamed tiles the tile needs.

use flashcore_tile::{Builder, Cond, Pred, Reg, S32, Shared, U32, Val};

use super::{Arguments, Config, Side};
use crate::parts::mask::{KeyTiles, Visibility};

/// What a tile takes when it is posted: where it is, and where and how long its sequence is.
pub(super) const INFO_BYTES: u32 = 32;

/// A held tile: which rows of which head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    /// Number of the tile in its head.
    pub(super) block: Reg<U32>,
    /// Key head or query head, by the side that is held.
    pub(super) head: Reg<U32>,
    /// Batch entry.
    pub(super) batch: Reg<U32>,
    /// Queries that the batch entry uses.
    pub(super) q_len: Reg<U32>,
    /// Keys that the batch entry uses.
    pub(super) kv_len: Reg<U32>,
    /// First query and first key of its sequence, where sequences are packed.
    pub(super) starts: Option<[Reg<U32>; 2]>,
    /// Where dQ of packed sequences is summed: tiles of a head of all sequences before, and streamed tiles of which sums have
    /// places before those of its own.
    pub(super) before: Option<[Reg<U32>; 2]>,
}

/// The streamed tiles of a held one, `begin..end`: those in `whole_begin..whole_end` mask nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Streamed {
    pub(super) begin: Reg<S32>,
    pub(super) whole_begin: Reg<S32>,
    pub(super) whole_end: Reg<S32>,
    pub(super) end: Reg<S32>,
}

impl Streamed {
    /// Does `body` with every tile of `heads` heads: head after head, or, where dQ is summed, all heads of a tile and then
    /// those of the next. Keys that few queries see would otherwise wait for those that many see before each head.
    pub(super) fn each(
        &self,
        b: &mut Builder,
        cfg: Config,
        heads: Reg<U32>,
        mut body: impl FnMut(&mut Builder, Reg<U32>, Reg<S32>),
    ) {
        let step = Self::step(cfg);
        let tiles = |b: &mut Builder, each: &mut dyn FnMut(&mut Builder, Reg<S32>)| {
            let block = self.first(b, cfg);
            b.while_(
                |_| self.there(cfg, block),
                |b| {
                    each(b, block);
                    b.add_to(block, step);
                },
            );
        };
        let members = |b: &mut Builder, each: &mut dyn FnMut(&mut Builder, Reg<U32>)| {
            let member = b.var(0);
            b.while_(
                |_| member.lt(heads),
                |b| {
                    each(b, member);
                    b.add_to(member, 1);
                },
            );
        };
        if cfg.fused() {
            tiles(b, &mut |b, block| members(b, &mut |b, member| body(b, member, block)));
        } else {
            members(b, &mut |b, member| tiles(b, &mut |b, block| body(b, member, block)));
        }
    }

    /// The tile that comes first: the last, where dQ is summed, so that those who see a tile add to it in the order in
    /// which CTAs take them without waiting longer than they must.
    pub(super) fn first(&self, b: &mut Builder, cfg: Config) -> Reg<S32> {
        if cfg.fused() { b.var(self.end - 1) } else { b.var(self.begin) }
    }

    /// Whether there is a tile number `block`, the next after the last one.
    fn there(&self, cfg: Config, block: Reg<S32>) -> Cond {
        if cfg.fused() { block.ge(self.begin) } else { block.lt(self.end) }
    }

    /// From one tile to the next.
    const fn step(cfg: Config) -> i32 {
        if cfg.fused() { -1 } else { 1 }
    }

    /// Moves on to the next tile of the order of [`Self::each`]; `left` counts the heads that a tile still has, of `heads`.
    pub(super) fn advance(&self, b: &mut Builder, block: Reg<S32>, left: Option<Reg<U32>>, heads: Reg<U32>) {
        let Some(left) = left else {
            let after = b.let_(block + 1);
            return b.set(block, after.eq(self.end).select(self.begin, after));
        };
        b.set(block, left.eq(1).select(block - 1, block));
        b.set(left, left.eq(1).select(heads, left - 1));
    }
}

impl Tile {
    /// Tile number `index`.
    pub(super) fn numbered(b: &mut Builder, cfg: Config, args: &Arguments, index: Reg<U32>) -> Self {
        let (block, flat) = args.sections(cfg).find(b, index);
        let (head, batch) = (b.let_(flat % args.heads), b.let_(flat / args.heads));
        let [q_len, kv_len] = args.lengths.used(b, batch);
        Self { block, head, batch, q_len, kv_len, starts: None, before: None }
    }

    /// Where in the held tensors a row of the sequence lies.
    pub(super) fn held_place(&self, b: &mut Builder, cfg: Config, row: Reg<U32>) -> Reg<U32> {
        self.starts.map_or(row, |starts| b.let_(starts[cfg.side as usize] + row))
    }

    /// Where in the streamed tensors a row of the sequence lies.
    pub(super) fn streamed_place(&self, b: &mut Builder, cfg: Config, row: Reg<U32>) -> Reg<U32> {
        self.starts.map_or(row, |starts| b.let_(starts[1 - cfg.side as usize] + row))
    }

    /// First row of the tile.
    pub(super) fn first_row(&self, b: &mut Builder, cfg: Config) -> Reg<U32> {
        b.let_(self.block * cfg.held())
    }

    /// Rows of the held side that the batch entry uses.
    pub(super) fn held_len(&self, cfg: Config) -> Reg<U32> {
        match cfg.side {
            Side::Keys => self.kv_len,
            Side::Queries => self.q_len,
        }
    }

    /// Rows of the streamed side that the batch entry uses.
    pub(super) fn streamed_len(&self, cfg: Config) -> Reg<U32> {
        match cfg.side {
            Side::Keys => self.q_len,
            Side::Queries => self.kv_len,
        }
    }

    /// What held rows see of the streamed ones.
    pub(super) fn visibility(&self, b: &mut Builder, cfg: Config, args: &Arguments) -> Visibility {
        let seen = args.mask.over(b, self.q_len, self.kv_len);
        match cfg.side {
            Side::Keys => seen.transposed(b, self.q_len),
            Side::Queries => seen,
        }
    }

    /// The streamed tiles that held rows see something of.
    pub(super) fn streamed(&self, b: &mut Builder, cfg: Config, args: &Arguments) -> Streamed {
        let (first, rows) = (self.first_row(b, cfg), cfg.held());
        let len = self.held_len(cfg);
        let last = b.let_(((first + rows).min(len) - 1).signed());
        let seen = self.visibility(b, cfg, args);
        let KeyTiles { end, clean_end, begin, clean_begin } =
            seen.key_tiles(b, [first.signed(), last], cfg.shape.step);
        // Rows beyond those in use see nothing.
        let end = b.let_(first.lt(len).select(end, 0));
        let begin = match begin {
            Some(begin) => b.let_(begin.min(end)),
            None => b.var(0),
        };
        let within = |b: &mut Builder, tile: Reg<S32>| b.let_(tile.max(begin).min(end));
        let whole_begin = clean_begin.map_or(begin, |tile| within(b, tile));
        let whole_begin = match cfg.hides_others() {
            true => b.let_((first + rows).gt(len).select(end, whole_begin)),
            false => whole_begin,
        };
        // Where queries stream, those beyond the last have no probabilities, so that the last tile hides nothing.
        let whole = cfg.side == Side::Keys && !cfg.edges()[1];
        let whole_end = if whole { end } else { within(b, clean_end) };
        Streamed { begin, whole_begin, whole_end, end }
    }

    /// Signals to consumers that this is their next tile.
    pub(super) fn post(&self, b: &mut Builder, cfg: Config, to: Shared) {
        // The tile is counted from one, so that zero says that there is none.
        let block = b.let_(self.block + 1);
        let [first, second] = self.before.unwrap_or([self.batch; 2]);
        b.store_shared(to, &[block, self.head, first, second].map(Val::from));
        if cfg.cuts() {
            let lengths = [self.q_len, self.kv_len];
            match self.starts {
                Some([q, kv]) => b.store_shared(to.at(16), &[lengths[0], lengths[1], q, kv].map(Val::from)),
                None => b.store_shared(to.at(16), &lengths.map(Val::from)),
            }
        }
    }

    /// Signals to consumers that there is no further tile.
    pub(super) fn post_end(b: &mut Builder, cfg: Config, to: Shared) {
        b.store_shared::<U32>(to, &[Val::Const(0); 4]);
        if cfg.cuts() {
            // Consumers read all of it before they know that it is the end.
            let words = if cfg.packed() { 4 } else { 2 };
            b.store_shared::<U32>(to.at(16), &[Val::Const(0); 4][..words]);
        }
    }

    /// Reads what the producer posted: the tile, and whether there is one.
    pub(super) fn read(b: &mut Builder, cfg: Config, args: &Arguments, from: Shared) -> (Self, Pred) {
        let [block, head, batch, second] = b.load_shared::<U32, 4>(from);
        if cfg.packed() {
            return Self::read_packed(b, cfg, from, [block, head], [batch, second]);
        }
        let [q_len, kv_len] = if cfg.cuts() {
            b.load_shared::<U32, 2>(from.at(16)).map(|len| b.uniform_register(len))
        } else {
            [args.lengths.seq_q, args.lengths.seq_kv]
        };
        // Loops and branches depend on the tile and the lengths alone.
        let block = b.uniform_register(block);
        let there = b.let_(block.ne(0));
        (Self { block: b.let_(block - 1), head, batch, q_len, kv_len, starts: None, before: None }, there)
    }

    /// The rest of what the producer posted, where sequences are packed.
    fn read_packed(
        b: &mut Builder,
        cfg: Config,
        from: Shared,
        [block, head]: [Reg<U32>; 2],
        before: [Reg<U32>; 2],
    ) -> (Self, Pred) {
        let [q_len, kv_len, mut q, mut kv] = b.load_shared::<U32, 4>(from.at(16));
        let [q_len, kv_len] = [q_len, kv_len].map(|len| b.uniform_register(len));
        let held = if cfg.side == Side::Keys { &mut kv } else { &mut q };
        if !cfg.fused() {
            *held = b.uniform_register(*held);
        }
        let block = b.uniform_register(block);
        let there = b.let_(block.ne(0));
        let (block, batch) = (b.let_(block - 1), b.var(0));
        let before = cfg.fused().then_some(before);
        (Self { block, head, batch, q_len, kv_len, starts: Some([q, kv]), before }, there)
    }
}
