//! Where a row of an append goes, and how its elements are rounded to the cache's type. Called by `append`.

use flashcore_core::{AppendProblem, DType};
use flashcore_tile::{Builder, F32, Pred, Reg, U32, U64};

use crate::parts::elements::store;

/// Where a row goes.
#[derive(Clone, Copy)]
pub(super) struct RowTarget {
    pub(super) at: Reg<U64>,
    pub(super) dtype: DType,
    pub(super) divisor: Option<Reg<F32>>,
}

impl RowTarget {
    pub(super) fn write(self, b: &mut Builder, index: Reg<U32>, value: Reg<F32>, who: Option<Pred>) {
        let at = b.let_(self.at + index.mul_wide(self.dtype.bytes() as u32));
        let write = |b: &mut Builder| match self.dtype {
            DType::E4M3 => {
                let value = self.divisor.map_or(value, |divisor| b.divide(value, divisor));
                let byte = to_e4m3(b, value);
                b.store_global_8(at, byte);
            }
            dtype => store(b, dtype, at, &[value]),
        };
        match who {
            Some(who) => b.if_(who, write),
            None => write(b),
        }
    }
}

/// Bytes between neighbouring factors along an axis.
pub(super) fn factor_stride(problem: &AppendProblem, axis: usize) -> u64 {
    let heads = problem.spec().k.dims().heads;
    problem.spec().scales.map_or(0, |scales| 4 * scales.strides(heads)[axis] as u64)
}

/// The bits of the nearest E4M3, ties to even; what is too large becomes the largest, NaN stays NaN. By integers, because
/// GPUs before sm_89 have no instruction for it.
fn to_e4m3(b: &mut Builder, value: Reg<F32>) -> Reg<U32> {
    const NAN: u32 = 0x7f;
    const LARGEST: f32 = 448.0;
    /// Below it the exponent stays, and what is left are multiples of 2⁻⁹: the last digit of this number.
    const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
    const LAST_DIGIT: f32 = 16384.0;
    let bits = |b: &mut Builder, x: Reg<F32>| b.float_bits(x).unsigned();
    let size = b.abs(value);
    let long = bits(b, size);
    let is_nan = b.let_(long.gt(0x7f80_0000));
    let size = b.min(size, LARGEST);
    let long = bits(b, size);
    // Rounds to 3 of 23 digits; exponents differ by 120.
    let normal = b.let_(((long >> 20) & 1) + (long + 0x7_ffff));
    let normal = b.let_((normal >> 20) - (120 << 3));
    let small = b.let_(size + LAST_DIGIT);
    let small = bits(b, small);
    let small = b.let_(small - LAST_DIGIT.to_bits());
    let magnitude = b.let_(size.lt(SMALLEST_NORMAL).select(small, normal));
    let magnitude = b.select(is_nan, NAN, magnitude);
    let sign = bits(b, value);
    b.let_(((sign >> 24) & 0x80) | magnitude)
}
