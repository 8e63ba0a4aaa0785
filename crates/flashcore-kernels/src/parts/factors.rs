//! Scale factors of 8-bit tensors: one of Q, K and V for each batch entry and key head or one for all, or factors of
//! blocks of rows and of features.

use flashcore_core::{Problem, Scales};
use flashcore_tile::{Builder, Element, F32, Params, Reg, U32, U64};

use crate::slots::{self, Slot};

/// Bytes of a factor.
const BYTES: u64 = size_of::<f32>() as u64;

/// What Q, K and V are multiplied by, in memory.
const SLOTS: [(&str, Slot); 3] =
    [("factors_q", slots::FACTORS_Q), ("factors_k", slots::FACTORS_K), ("factors_v", slots::FACTORS_V)];

/// Where the factors of Q, K and V lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FactorArguments {
    qkv: [Reg<U64>; 3],
    /// Bytes from a batch entry to the next, and from a head to the next.
    strides: [Reg<U64>; 2],
}

impl FactorArguments {
    #[track_caller]
    pub(crate) fn declare(b: &mut Builder, params: &mut Params<Problem>) -> Self {
        let qkv = SLOTS.map(|(name, slot)| params.buffer(b, name, slot));
        Self { qkv, strides: strides(b, params) }
    }

    /// The factors of a batch entry and key head.
    #[track_caller]
    pub(crate) fn at(&self, b: &mut Builder, batch: Reg<U32>, head: Reg<U32>) -> [Reg<F32>; 3] {
        load(b, self.qkv, self.strides, [batch, head])
    }
}

/// Where the factors of K and V lie, where those are a cache under queries that have none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheFactors {
    kv: [Reg<U64>; 2],
    strides: [Reg<U64>; 2],
}

impl CacheFactors {
    #[track_caller]
    pub(crate) fn declare(b: &mut Builder, params: &mut Params<Problem>) -> Self {
        let slots = [("factors_k", slots::FACTORS_K), ("factors_v", slots::FACTORS_V)];
        let kv = slots.map(|(name, slot)| params.buffer(b, name, slot));
        Self { kv, strides: strides(b, params) }
    }

    /// The factors of a sequence and key head.
    #[track_caller]
    pub(crate) fn at(&self, b: &mut Builder, sequence: Reg<U32>, head: Reg<U32>) -> [Reg<F32>; 2] {
        load(b, self.kv, self.strides, [sequence, head])
    }
}

/// What the name of a kernel says of a cache: nothing where keys are made of what queries are.
pub(crate) const fn cache_name(cache: Element, scaled: bool) -> &'static str {
    match (cache.bytes(), scaled) {
        (1, true) => "_e4m3x",
        (1, false) => "_e4m3",
        _ => "",
    }
}

/// Bytes from a batch entry's factors to the next one's, and from a head's.
#[track_caller]
fn strides(b: &mut Builder, params: &mut Params<Problem>) -> [Reg<U64>; 2] {
    let names = [("factors_batch", 0), ("factors_head", 1)];
    names.map(|(name, n): (&str, usize)| {
        params.u64(b, name, move |p| {
            p.scales().map_or(0, |scales| scales.strides(p.heads_kv())[n] as u64 * BYTES)
        })
    })
}

#[track_caller]
fn load<const N: usize>(
    b: &mut Builder,
    tensors: [Reg<U64>; N],
    [of_batch, of_head]: [Reg<U64>; 2],
    [batch, head]: [Reg<U32>; 2],
) -> [Reg<F32>; N] {
    let skip = b.let_(batch.widen() * of_batch);
    let skip = b.let_(head.widen() * of_head + skip);
    tensors.map(|base| {
        let at = b.let_(base + skip);
        let [factor] = b.load_global::<F32, 1>(at);
        factor
    })
}

/// Where factors of blocks of Q and K and of features of V lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockArguments {
    qkv: [Reg<U64>; 3],
    /// Factors of a head.
    each: [Reg<U32>; 3],
    /// Rows of a block of Q.
    rows_q: Reg<U32>,
    /// Key tiles of a block of K.
    tiles_k: Reg<U32>,
    heads: [Reg<U32>; 2],
}

impl BlockArguments {
    /// For tiles of `tile_n` keys, of which blocks are made.
    #[track_caller]
    pub(crate) fn declare(b: &mut Builder, params: &mut Params<Problem>, tile_n: u32) -> Self {
        let qkv = SLOTS.map(|(name, slot)| params.buffer(b, name, slot));
        let names = [("blocks_q", 0), ("blocks_k", 1), ("features_v", 2)];
        let each = names.map(|(name, n): (&str, usize)| {
            params.u32(b, name, move |p| p.scales().map_or(0, |scales| scales.of_share(p)[n] as u32))
        });
        let rows = |p: &Problem| match p.scales() {
            Some(Scales::PerBlock { q, k }) => [q, k].map(|rows| rows.min(i32::MAX as usize) as u32),
            _ => [1; 2],
        };
        Self {
            qkv,
            each,
            rows_q: params.u32(b, "rows_q", move |p| rows(p)[0]),
            tiles_k: params.u32(b, "tiles_k", move |p| rows(p)[1].div_ceil(tile_n)),
            heads: [
                params.u32(b, "all_heads_q", |p| p.heads_q() as u32),
                params.u32(b, "all_heads_kv", |p| p.heads_kv() as u32),
            ],
        }
    }

    /// Address of the first factor of a head of Q, K or V.
    #[track_caller]
    fn of_head(&self, b: &mut Builder, n: usize, batch: Reg<U32>, head: Reg<U32>) -> Reg<U64> {
        let heads = self.heads[n.min(1)];
        let share = b.let_(batch * heads + head);
        let factors = b.let_(share.mul_wide(self.each[n]));
        b.let_(factors * BYTES + self.qkv[n])
    }

    /// The factor of the block with row `row` of a query head.
    #[track_caller]
    pub(crate) fn of_query(&self, b: &mut Builder, [batch, head]: [Reg<U32>; 2], row: Reg<U32>) -> Reg<F32> {
        let first = self.of_head(b, 0, batch, head);
        // A tile may have rows beyond the last block, for nobody.
        let last = b.let_(self.each[0] - 1);
        let block = b.let_((row / self.rows_q).min(last));
        let at = b.let_(first + block.mul_wide(BYTES as u32));
        let [factor] = b.load_global::<F32, 1>(at);
        factor
    }

    /// Address of the first factor of a key head.
    #[track_caller]
    pub(crate) fn keys(&self, b: &mut Builder, batch: Reg<U32>, head: Reg<U32>) -> Reg<U64> {
        self.of_head(b, 1, batch, head)
    }

    /// The factor of a key tile, where `keys` is the address of the first.
    #[track_caller]
    pub(crate) fn of_tile(&self, b: &mut Builder, keys: Reg<U64>, tile: Reg<U32>) -> Reg<F32> {
        let at = b.let_(keys + (tile / self.tiles_k).mul_wide(BYTES as u32));
        let [factor] = b.load_global::<F32, 1>(at);
        factor
    }

    /// Address of the first factor of the features of a value head.
    #[track_caller]
    pub(crate) fn features(&self, b: &mut Builder, batch: Reg<U32>, head: Reg<U32>) -> Reg<U64> {
        self.of_head(b, 2, batch, head)
    }
}
