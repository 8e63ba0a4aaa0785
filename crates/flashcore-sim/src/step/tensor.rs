//! Small matrices for the tensor cores: decoding elements, products with k ascending.

use crate::{
    numeric::{BF16, F16},
    program::Element,
};

/// A dense matrix of f32, row by row.
#[derive(Clone, Debug)]
pub(super) struct Matrix {
    pub(super) cols: usize,
    pub(super) values: Vec<f32>,
}

impl Matrix {
    pub(super) fn zero(rows: usize, cols: usize) -> Self {
        Self { cols, values: vec![0.0; rows * cols] }
    }

    pub(super) fn at(&self, row: usize, col: usize) -> f32 {
        self.values[row * self.cols + col]
    }

    pub(super) fn set(&mut self, row: usize, col: usize, value: f32) {
        self.values[row * self.cols + col] = value;
    }

    /// Like [`add_product`](Self::add_product) for 8-bit operands, of whose sums fewer bits are kept.
    pub(super) fn add_narrow_product(&mut self, a: &Self, b: &Self) {
        for (row, sums) in self.values.chunks_exact_mut(self.cols).enumerate() {
            let factors = &a.values[row * a.cols..(row + 1) * a.cols];
            for (col, sum) in sums.iter_mut().enumerate() {
                let column = b.values[col..].iter().step_by(b.cols);
                *sum = narrow_sum(*sum, factors.iter().zip(column).map(|(x, y)| x * y));
            }
        }
    }

    /// `self += a · b`, where `a` is rows × k and `b` is k × cols: each product is exact for 16-bit operands, sums
    /// are rounded to f32 in ascending order of k (the ISA leaves order and rounding open).
    pub(super) fn add_product(&mut self, a: &Self, b: &Self) {
        for (row, sums) in self.values.chunks_exact_mut(self.cols).enumerate() {
            let factors = &a.values[row * a.cols..(row + 1) * a.cols];
            for (factor, b_row) in factors.iter().zip(b.values.chunks_exact(b.cols)) {
                for (sum, value) in sums.iter_mut().zip(b_row) {
                    *sum += factor * value;
                }
            }
        }
    }
}

/// Bits behind the point that tensor cores keep of a sum of products of 8-bit numbers, measured from its largest term.
const NARROW_BITS: i32 = 13;

/// `sum` with products added as tensor cores of sm_90 add those of 8-bit numbers: every term, the sum so far included, is
/// cut off at as many bits below the largest of them, and so is the result below its own first bit.
fn narrow_sum(sum: f32, products: impl Iterator<Item = f32> + Clone) -> f32 {
    let terms = || products.clone().chain([sum]);
    let largest = terms().fold(0.0f32, |largest, term| largest.max(term.abs()));
    if largest == 0.0 || terms().any(|term| !term.is_finite()) {
        return terms().sum();
    }
    let exponent = (largest.to_bits() >> 23) as i32 - 127;
    let quantum = f64::from(NARROW_BITS - exponent).exp2();
    let units: f64 = terms().map(|term| (f64::from(term) * quantum).trunc()).sum();
    let kept = !(u32::MAX >> (9 + NARROW_BITS));
    f32::from_bits(((units / quantum) as f32).to_bits() & kept)
}

/// Turns an element's bits into its value; chosen once for many elements.
pub(super) fn decoder(element: Element) -> Box<dyn Fn(u32) -> f32> {
    match element {
        Element::Small(format, _) if format == BF16 => Box::new(|bits| f32::from_bits(bits << 16)),
        Element::Small(format, _) if format == F16 => {
            Box::new(|bits| half::f16::from_bits(bits as u16).to_f32())
        }
        Element::Small(format, _) => Box::new(move |bits| format.decode(bits) as f32),
        // the tensor core reads 19 bits
        Element::Tf32 => Box::new(|bits| f32::from_bits(bits & 0xffff_e000)),
        Element::U8 => Box::new(|bits| bits as f32),
        Element::S8 => Box::new(|bits| f32::from(bits as i8)),
    }
}

/// Element `i` of those packed into 32-bit words, first in the low bits.
pub(super) fn packed(element: Element) -> impl Fn(u32, u32) -> f32 {
    let (bits, decode) = (element.bits(), decoder(element));
    let mask = u32::MAX >> (32 - bits);
    move |word, i| decode(word >> (bits * i) & mask)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A term of 13 bits below the largest counts, what lies further below is cut off, whatever its sign.
    #[test]
    fn sums_of_narrow_products_are_cut_off() {
        let at = |bits: i32| (-bits as f32).exp2();
        assert_eq!(narrow_sum(1.0, [at(13)].into_iter()), 1.0 + at(13));
        assert_eq!(narrow_sum(1.0, [at(14)].into_iter()), 1.0);
        assert_eq!(narrow_sum(1.0, [-at(14)].into_iter()), 1.0);
        assert_eq!(narrow_sum(1.0, [at(14); 32].into_iter()), 1.0, "each by itself");
        assert_eq!(narrow_sum(0.0, [at(14), at(14)].into_iter()), at(13));
        let carried = narrow_sum(1.0 + at(13), [1.0].into_iter());
        assert_eq!(carried, 2.0, "a sum that has grown by a bit has one less behind the point");
        assert!(narrow_sum(1.0, [f32::NAN].into_iter()).is_nan());
    }
}
