//! Neighbouring elements of any float type between global memory and f32 registers, for kernels without matrix products.

use flashcore_core::DType;
use flashcore_tile::{Builder, F32, Global, Half, Pred, Reg, Scope, Shared, U32, U64, Val};

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

/// Neighbouring elements as they lie in memory: what is in flight takes no more registers than it has bytes.
pub(crate) struct Raw {
    dtype: DType,
    width: u32,
    words: Vec<Reg<U32>>,
}

impl Raw {
    /// Reads 1, 4 or 8 elements of up to 16 bytes where the condition holds; elsewhere they are zeros.
    #[track_caller]
    pub(crate) fn load_if(b: &mut Builder, dtype: DType, width: u32, at: Reg<U64>, there: Pred) -> Self {
        let bytes = width * dtype.bytes() as u32;
        let words: Vec<_> = (0..bytes.div_ceil(4)).map(|_| b.var_in::<U32>(Scope::Lane, 0)).collect();
        b.predicated(there, |b| match words[..] {
            [word] if bytes == 2 => b.load_global_16_into(word, at),
            [word] => b.load_global_into([word], at),
            [w0, w1] => b.load_global_into([w0, w1], at),
            [w0, w1, w2, w3] => b.load_global_into([w0, w1, w2, w3], at),
            _ => unreachable!("{width} elements of {dtype} are no vector"),
        });
        Self { dtype, width, words }
    }

    /// Leaves the elements in shared memory, from a multiple of their bytes on.
    #[track_caller]
    pub(crate) fn put_down(&self, b: &mut Builder, at: Shared) {
        let words: Vec<_> = self.words.iter().map(|&word| Val::from(word)).collect();
        b.store_shared(at, &words);
    }

    /// The elements that [`put_down`](Self::put_down) left there.
    #[track_caller]
    pub(crate) fn taken_up(&self, b: &mut Builder, at: Shared) -> Self {
        let words = match self.words.len() {
            1 => b.load_shared::<U32, 1>(at).to_vec(),
            2 => b.load_shared::<U32, 2>(at).to_vec(),
            _ => b.load_shared::<U32, 4>(at).to_vec(),
        };
        Self { words, ..*self }
    }

    /// The elements as f32.
    pub(crate) fn values(&self, b: &mut Builder) -> Vec<Reg<F32>> {
        let words = self.words.iter();
        match half(self.dtype) {
            None => words.map(|&word| b.float_of_bits(word.signed())).collect(),
            Some(half) => words.flat_map(|&word| b.unpack(half, word)).take(self.width as usize).collect(),
        }
    }
}
