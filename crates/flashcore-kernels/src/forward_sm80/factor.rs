//! Operands of matrix products, and how products of f32 stay as exact as f32.
//!
//! A TF32 number has 11 bits of precision, an f32 has 24. Each f32 operand is therefore the sum of two TF32 numbers, and
//! of the four products of their parts three are taken, small ones first; that of the two small parts is below the last
//! bit. Tensor cores cut off what a sum has beyond 24 bits, always towards zero, which adds up over many keys. The
//! products of a few instructions are therefore summed apart, and added to the whole by additions that round to nearest.

use flashcore_tile::{Acc, Builder, Element, F32, Quad, Reg};

/// Columns of the sums that a pair of instructions adds to.
const PAIR: usize = 16;

/// A left operand, or two right operands side by side.
#[derive(Clone, Copy)]
pub(super) struct Factor {
    large: Quad,
    /// What f32 has beyond `large`; `None` where there are 16 bits and `large` is all.
    small: Option<Quad>,
}

impl Factor {
    fn new(b: &mut Builder, element: Element, quad: Quad) -> Self {
        if element != Element::F32 {
            return Self { large: quad, small: None };
        }
        let parts = quad.map(|value| b.split(value));
        Self { large: parts.map(|[large, _]| large), small: Some(parts.map(|[_, small]| small)) }
    }

    /// What `load` reads at each of some places.
    pub(super) fn each(
        b: &mut Builder,
        element: Element,
        places: &[u32],
        load: impl Fn(&mut Builder, u32) -> Quad,
    ) -> Vec<Self> {
        let mut factor = |&place| {
            let quad = load(b, place);
            Self::new(b, element, quad)
        };
        places.iter().map(&mut factor).collect()
    }

    /// Values of an accumulator as a left operand; f32 go by the order of [`flashcore_tile::WordRows`].
    pub(super) fn of_values(b: &mut Builder, element: Element, values: &[Reg<F32>]) -> Self {
        let quad = match *values {
            [row0, next0, row1, next1] => [row0, row1, next0, next1].map(|value| b.bits(value)),
            _ => std::array::from_fn(|pair| b.pack(element, values[2 * pair], values[2 * pair + 1])),
        };
        Self::new(b, element, quad)
    }
}

/// Instructions along the depth whose products are summed before they meet the whole.
pub(super) const fn steps_per_sum(element: Element) -> usize {
    match element {
        Element::F32 => 4,
        _ => 1,
    }
}

/// Adds the products of `left` and `right`, one after another along the depth, to columns `16 * n .. 16 * n + 16`.
pub(super) fn add_products(
    b: &mut Builder,
    element: Element,
    sums: &Acc,
    n: usize,
    left: &[Factor],
    right: &[Factor],
) {
    if element != Element::F32 {
        for (left, right) in left.iter().zip(right) {
            b.mma_pair(element, sums, n, left.large, right.large);
        }
        return;
    }
    let part = Acc::zero(b, PAIR);
    for (left, right) in left.iter().zip(right) {
        if let (Some(left_small), Some(right_small)) = (left.small, right.small) {
            b.mma_pair(element, &part, 0, left.large, right_small);
            b.mma_pair(element, &part, 0, left_small, right.large);
        }
    }
    for (left, right) in left.iter().zip(right) {
        b.mma_pair(element, &part, 0, left.large, right.large);
    }
    for (&whole, &part) in sums.regs()[n * PAIR / 2..].iter().zip(part.regs()) {
        b.add_to(whole, part);
    }
}
