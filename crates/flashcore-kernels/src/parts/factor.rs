//! Operands of matrix products, and how products of f32 stay as exact as f32.
//!
//! A TF32 number has 11 bits of precision, an f32 has 24. Each f32 operand is therefore the sum of two TF32 numbers, and
//! of the four products of their parts three are taken, small ones first; that of the two small parts is below the last
//! bit. Tensor cores cut off what a sum has beyond 24 bits, always towards zero, which adds up over many keys. The
//! products of a few instructions are therefore summed apart, and added to the whole by additions that round to nearest.
//!
//! The general kernels of both directions, forward and gradients, multiply here.

use std::{iter::StepBy, ops::Range};

use flashcore_tile::{
    Acc, Builder, Cta, Element, F32, MMA_K, MatrixView, Quad, Reg, Scope, U32, Uniform, Warp,
};

/// Columns of the sums that a pair of instructions adds to.
const PAIR: usize = 16;

/// A left operand, or two right operands side by side.
#[derive(Clone, Copy)]
pub(crate) struct Factor {
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
    pub(crate) fn each(
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
    pub(crate) fn of_values(b: &mut Builder, element: Element, values: &[Reg<F32>]) -> Self {
        let quad = match *values {
            [row0, next0, row1, next1] => [row0, row1, next0, next1].map(|value| b.bits(value)),
            _ => std::array::from_fn(|pair| b.pack(element, values[2 * pair], values[2 * pair + 1])),
        };
        Self::new(b, element, quad)
    }
}

/// Instructions along the depth whose products are summed before they meet the whole.
pub(crate) const fn steps_per_sum(element: Element) -> usize {
    match element {
        Element::F32 => 4,
        _ => 1,
    }
}

/// Where instructions over `depth` elements start; padding beyond the last takes no part.
pub(crate) fn starts(element: Element, depth: u32) -> StepBy<Range<u32>> {
    (0..depth).step_by(element.depth() as usize)
}

/// Features of `dim` that are left to a loop, in whole slabs. Three products each, with operands in two parts, are so much text
/// that the assembler, which moves loads to the front, would run out of registers over all of it. 16-bit features never are.
pub(crate) fn looped(element: Element, dim: u32) -> u32 {
    let slab = element.slab_cols();
    if element == Element::F32 && dim >= 2 * slab { dim / slab * slab } else { 0 }
}

/// Goes over `dim` features: a loop over slabs as far as `looped`, whose text is told the slab, and a text of its own for what
/// is left; each is told where its instructions start.
pub(crate) fn each_slab(
    b: &mut Builder,
    element: Element,
    (dim, looped): (u32, u32),
    multiply: impl Fn(&mut Builder, Option<Reg<U32>>, &[u32]),
) {
    if looped > 0 {
        let (cols, slab) = (element.slab_cols(), b.var_in(Scope::Warp, 0));
        b.do_while(|b| {
            multiply(b, Some(slab), &Vec::from_iter(starts(element, cols)));
            b.add_to(slab, 1);
            b.uniform::<Warp>(slab.lt(looped / cols))
        });
    }
    multiply(b, None, &Vec::from_iter(starts(element, dim).filter(|&depth| depth >= looped)));
}

/// Adds `left·rightᵀ` over the features of the instructions that start at `depths` to scores of every block; `left` reads the
/// operand of a block at a feature.
pub(crate) fn add_across(
    b: &mut Builder,
    element: Element,
    scores: &[Acc],
    left: impl Fn(&mut Builder, u32, u32) -> Quad,
    right: &MatrixView,
    depths: &[u32],
) {
    for depths in depths.chunks(steps_per_sum(element)) {
        let left: Vec<_> = (0..scores.len() as u32)
            .map(|block| Factor::each(b, element, depths, |b, depth| left(b, block, depth)))
            .collect();
        for n in 0..scores[0].cols() as u32 / MMA_K {
            let right = Factor::each(b, element, depths, |b, depth| right.load(b, n * MMA_K, depth));
            for (scores, left) in scores.iter().zip(&left) {
                add_products(b, element, scores, n as usize, left, &right);
            }
        }
    }
}

/// Columns that an output leaves the assembler so few registers for that it must not move the loads of all to the front.
const MANY_COLUMNS: u32 = 128;
/// Pairs of instructions across the columns whose text stays together where it is kept apart.
const PAIRS_APART: usize = 2;

/// Whether products of `dim` columns are to be kept apart, see [`each_pair`].
pub(crate) const fn needs_branches(element: Element, dim: u32) -> bool {
    matches!(element, Element::F32) && dim >= MANY_COLUMNS
}

/// Goes over `items`, so many `together`. `apart`, a condition that holds, keeps the text of some from that of others: the
/// assembler moves nothing across a branch.
pub(crate) fn each_apart(
    b: &mut Builder,
    (items, together): (&[u32], usize),
    apart: Option<Uniform<Cta>>,
    text: impl Fn(&mut Builder, &[u32]),
) {
    match apart.filter(|_| items.len() > together) {
        None => text(b, items),
        Some(holds) => {
            items.chunks(together).for_each(|items| b.if_uniform(holds, |b| text(b, items)));
        }
    }
}

/// Goes over pairs of instructions across `columns`, some of them [apart](each_apart) from others.
pub(crate) fn each_pair(
    b: &mut Builder,
    columns: u32,
    apart: Option<Uniform<Cta>>,
    multiply: impl Fn(&mut Builder, u32),
) {
    let pairs = Vec::from_iter(0..columns / MMA_K);
    each_apart(b, (&pairs, PAIRS_APART), apart, |b, pairs| pairs.iter().for_each(|&n| multiply(b, n)));
}

/// Adds the products of `left` and `right`, one after another along the depth, to columns `16 * n .. 16 * n + 16`.
pub(crate) fn add_products(
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
