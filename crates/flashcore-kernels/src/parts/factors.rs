//! What 8-bit tensors are multiplied by, one factor of Q, K and V for each batch entry and key head or one for all.

use flashcore_core::Problem;
use flashcore_tile::{Builder, Element, F32, Params, Reg, U32, U64};

use crate::slots;

/// Bytes of a factor.
const BYTES: u64 = size_of::<f32>() as u64;

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
        let slots = [
            ("factors_q", slots::FACTORS_Q),
            ("factors_k", slots::FACTORS_K),
            ("factors_v", slots::FACTORS_V),
        ];
        let qkv = slots.map(|(name, slot)| params.buffer(b, name, slot));
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
