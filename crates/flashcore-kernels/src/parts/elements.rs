//! Neighbouring elements of any float type between global memory and f32 registers, for kernels without matrix products.

use flashcore_core::DType;
use flashcore_tile::{Builder, F32, Global, Half, Reg, U32, U64, Val};

/// Most bytes of one load or store.
pub(crate) const WIDEST: u32 = 16;

pub(crate) const fn half(dtype: DType) -> Option<Half> {
    match dtype {
        DType::F16 => Some(Half::F16),
        DType::BF16 => Some(Half::Bf16),
        _ => None,
    }
}

/// Reads `width` neighbouring elements as f32.
pub(crate) fn load(b: &mut Builder, dtype: DType, width: u32, at: Reg<U64>) -> Vec<Reg<F32>> {
    let Some(half) = half(dtype) else {
        return match width {
            1 => b.load_global::<F32, 1>(at).to_vec(),
            2 => b.load_global::<F32, 2>(at).to_vec(),
            _ => b.load_global::<F32, 4>(at).to_vec(),
        };
    };
    let words = match width {
        1 => vec![b.load_global_16(at)],
        2 => b.load_global::<U32, 1>(at).to_vec(),
        4 => b.load_global::<U32, 2>(at).to_vec(),
        _ => b.load_global::<U32, 4>(at).to_vec(),
    };
    let values = words.into_iter().flat_map(|word| b.unpack(half, word));
    values.take(width as usize).collect()
}

/// Writes neighbouring elements, rounded.
pub(crate) fn store(b: &mut Builder, dtype: DType, at: Reg<U64>, values: &[Reg<F32>]) {
    let Some(half) = half(dtype) else {
        for (n, values) in values.chunks(4).enumerate() {
            let values: Vec<Val<F32>> = values.iter().map(|&value| value.into()).collect();
            b.store_global(Global::from(at).at(n as i32 * WIDEST as i32), &values);
        }
        return;
    };
    let pack = |pair: &[Reg<F32>]| match pair {
        [low, high] => b.pack(half, *low, *high),
        _ => b.pack(half, pair[0], 0.0),
    };
    let words: Vec<_> = values.chunks(2).map(pack).collect();
    if values.len() == 1 {
        return b.store_global_16(at, words[0]);
    }
    let words: Vec<_> = words.into_iter().map(Val::from).collect();
    b.store_global(at, &words);
}
