//! f32 rounded to 8-bit floats, by an instruction where there is one and by integers elsewhere: to nearest, ties to even;
//! overflow saturates at the largest float, NaN stays NaN.

use flashcore_core::DType;
use flashcore_ptx::target::Target;
use flashcore_tile::{B32, Builder, Element, F32, Reg, Scope, U32};

/// Bits of an f32's mantissa, and the bias of its exponent.
const MANTISSA: u32 = 23;
const BIAS: u32 = 127;
/// The bits of infinity; a magnitude with larger ones is NaN.
const INFINITY: u32 = 0x7f80_0000;
/// NaN of either type.
const NAN: u32 = 0x7f;

/// A type of 8-bit floats, and how to get there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Narrow {
    element: Element,
    /// Whether there is an instruction.
    native: bool,
    mantissa: u32,
    bias: u32,
    largest: f32,
}

impl Narrow {
    /// Floats of that type on that architecture.
    pub(crate) fn new(dtype: DType, target: Target) -> Self {
        let (element, mantissa, bias) = match dtype {
            DType::E5M2 => (Element::E5m2, 2, 15),
            _ => (Element::E4m3, 3, 7),
        };
        Self { element, native: target == Target::Sm90a, mantissa, bias, largest: dtype.largest() }
    }

    /// Up to four numbers, the first in the lowest byte.
    #[track_caller]
    pub(crate) fn pack_into(self, b: &mut Builder, to: Reg<B32>, values: &[Reg<F32>]) {
        if self.native {
            let zero = b.var_in::<F32>(Scope::Lane, 0.0);
            let four = std::array::from_fn(|n| values.get(n).copied().unwrap_or(zero));
            return b.pack_four_into(to, self.element, four);
        }
        let bytes: Vec<Reg<U32>> = values.iter().map(|&value| self.byte(b, value)).collect();
        let shifted: Vec<Reg<U32>> = (0..).zip(bytes).map(|(n, byte)| b.let_(byte << (8 * n))).collect();
        let word = shifted.into_iter().reduce(|x, y| b.let_(x | y)).expect("there is a number");
        b.set(to, word.bits());
    }

    /// The byte of a number.
    fn byte(self, b: &mut Builder, value: Reg<F32>) -> Reg<U32> {
        let bits = b.float_bits(value).unsigned();
        let sign = b.let_((bits >> 24) & 0x80);
        let magnitude = b.let_(bits & 0x7fff_ffff);
        let within = b.let_(magnitude.min(self.largest.to_bits()));
        // Half a unit less one, and one more where the last digit is odd, carry into the digits that stay.
        let cut = MANTISSA - self.mantissa;
        let odd = b.let_((within >> cut) & 1);
        let rounded = b.let_((within + odd + ((1 << (cut - 1)) - 1)) >> cut);
        let normal = b.let_(rounded - ((BIAS - self.bias) << self.mantissa));
        // Added to a number whose last digit is the smallest float, small ones lose what lies below.
        let unit = self.smallest_normal() / (1u32 << self.mantissa) as f32;
        let anchor = unit * (1u32 << MANTISSA) as f32;
        let small = b.float_of_bits(within.signed());
        let small = b.let_(small + anchor);
        let small = b.float_bits(small).unsigned();
        let small = b.let_(small - anchor.to_bits());
        let byte = b.let_(within.lt(self.smallest_normal().to_bits()).select(small, normal));
        let byte = b.let_(magnitude.gt(INFINITY).select(NAN, byte));
        b.let_(byte | sign)
    }

    fn smallest_normal(self) -> f32 {
        f32::from_bits((BIAS + 1 - self.bias) << MANTISSA)
    }
}
