//! What 8-bit tensors are multiplied by, one factor of Q, K and V for each batch entry and key head or one for all.

use flashcore_core::Problem;
use flashcore_tile::{Builder, F32, Params, Reg, U32, U64};

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
        let names = [("factors_batch", 0), ("factors_head", 1)];
        let strides = names.map(|(name, n): (&str, usize)| {
            params.u64(b, name, move |p| {
                p.scales().map_or(0, |scales| scales.strides(p.heads_kv())[n] as u64 * BYTES)
            })
        });
        Self { qkv, strides }
    }

    /// The factors of a batch entry and key head.
    #[track_caller]
    pub(crate) fn at(&self, b: &mut Builder, batch: Reg<U32>, head: Reg<U32>) -> [Reg<F32>; 3] {
        let [of_batch, of_head] = self.strides;
        let skip = b.let_(batch.widen() * of_batch);
        let skip = b.let_(head.widen() * of_head + skip);
        self.qkv.map(|base| {
            let at = b.let_(base + skip);
            let [factor] = b.load_global::<F32, 1>(at);
            factor
        })
    }
}
