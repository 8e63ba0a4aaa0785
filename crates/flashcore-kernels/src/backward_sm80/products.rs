//! The matrix products of a step, and what happens to scores between them. 16-bit operands are multiplied as they are, f32
//! ones in two parts, see [`crate::parts::factor`].

use flashcore_tile::{Acc, Builder, Cta, F32, MMA_K, MMA_M, Reg, Uniform};

use super::{
    Config,
    terms::{StepTerms, VALUES},
};
use crate::parts::{
    dropout::StepDropout,
    factor::{
        Factor, add_across, add_products, each_apart, each_pair, each_slab, looped, starts, steps_per_sum,
    },
    operand::{Across, AlongView},
};

/// Left operands: for each block, instruction after instruction along the depth.
pub(super) type Lefts = Vec<Vec<Factor>>;

/// Accumulators of a step's scores, for each block.
pub(super) fn zeros(b: &mut Builder, cfg: &Config) -> Vec<Acc> {
    (0..cfg.shape.blocks).map(|_| Acc::zero(b, cfg.shape.step as usize)).collect()
}

/// Adds `left·rightᵀ` over `dim` features to scores of every block. Features that no loop takes, more than are summed at
/// once, are kept `apart`.
pub(super) fn add_scores(
    b: &mut Builder,
    cfg: &Config,
    scores: &[Acc],
    [left, right]: [&Across; 2],
    dim: u32,
    apart: Option<Uniform<Cta>>,
) {
    let input = cfg.input;
    each_slab(b, input, (dim, looped(input, dim)), |b, slab, depths| {
        let [left, right] = [left, right].map(|rows| rows.at_slab(b, slab));
        let left = |b: &mut Builder, block: u32, depth| left.load(b, block * MMA_M, depth);
        each_apart(b, (depths, steps_per_sum(input)), apart, |b, depths| {
            add_across(b, input, scores, left, &right, depths);
        });
    });
}

/// Adds `left·right` over the rows of a step to sums of every block; `apart` where registers would hold no more.
pub(super) fn add_sums(
    b: &mut Builder,
    cfg: &Config,
    sums: &[Acc],
    left: &Lefts,
    right: &AlongView,
    apart: Option<Uniform<Cta>>,
) {
    let (input, each) = (cfg.input, steps_per_sum(cfg.input));
    let apart = apart.filter(|_| cfg.crowded());
    let rows = Vec::from_iter(starts(input, cfg.shape.step));
    for (chunk, rows) in rows.chunks(each).enumerate() {
        each_pair(b, sums[0].cols() as u32, apart, |b, n| {
            let right = Factor::each(b, input, rows, |b, row| right.load(b, row, n * MMA_K));
            for (sums, left) in sums.iter().zip(left) {
                add_products(b, input, sums, n as usize, &left[chunk * each..][..rows.len()], &right);
            }
        });
    }
}

/// Turns scores, capped and masked, into what `dP` is multiplied by to become `dS`; gives the probabilities as left
/// operands. The second scores are those that only the cap has changed.
///
/// What dropout leaves out is 0 there, and of the factors of `dP` those are negated, which are none otherwise: a
/// sign is a condition that takes no register.
pub(super) fn weigh(
    b: &mut Builder,
    cfg: &Config,
    scale: Reg<F32>,
    (scores, capped): (&[Acc], &[Acc]),
    terms: &StepTerms<'_>,
    dropout: Option<&StepDropout<'_>>,
) -> Lefts {
    let mut left: Lefts = scores.iter().map(|_| Vec::new()).collect();
    for n in 0..cfg.shape.step / MMA_K {
        let offsets = terms.offsets(b, n * MMA_K);
        let dropout = dropout.map(|dropout| dropout.values(b, n as usize * VALUES, VALUES));
        let tiles = scores.iter().zip(capped).zip(offsets).zip(&mut left);
        for (block, (((scores, capped), offsets), left)) in tiles.enumerate() {
            let probabilities: [_; VALUES] = std::array::from_fn(|i| {
                let score = values(scores, n)[i];
                let probability = b.fma(score, scale, offsets[i]);
                b.exp2_into(probability, probability);
                weight(b, cfg, [score, values(capped, n)[i]], probability);
                let Some(dropout) = &dropout else { return probability };
                let stays = dropout.keeps(b, block, i);
                b.select_into(score, stays, score, -score);
                b.select(stays, probability, 0.0)
            });
            left.extend(factors(b, cfg, &probabilities));
        }
    }
    left
}

/// Makes the factor of `dP` of a probability: with a cap times its slope, `1 − tanh²`.
fn weight(b: &mut Builder, cfg: &Config, [score, tangent]: [Reg<F32>; 2], probability: Reg<F32>) {
    if !cfg.softcap {
        return b.set(score, probability);
    }
    // Where a score is hidden, its tangent is −∞.
    let tangent = b.let_(tangent.max(-1.0));
    let negated = b.neg(tangent);
    let slope = b.fma(tangent, negated, 1.0);
    b.mul_into(score, probability, slope);
}

/// Accumulators of `dP` that start with minus the sums.
pub(super) fn minus_sums(b: &mut Builder, cfg: &Config, terms: &StepTerms<'_>) -> Vec<Acc> {
    let accs: Vec<_> = (0..cfg.shape.blocks).map(|_| Acc::new(b, cfg.shape.step as usize)).collect();
    for n in 0..cfg.shape.step / MMA_K {
        for (acc, sums) in accs.iter().zip(terms.minus_sums(b, n * MMA_K)) {
            values(acc, n).iter().zip(sums).for_each(|(&value, sum)| b.set(value, sum));
        }
    }
    accs
}

/// Turns `dP` less the sums into `dS`.
pub(super) fn multiply(b: &mut Builder, weights: &[Acc], d_probabilities: &[Acc]) {
    let pairs = d_probabilities.iter().flat_map(Acc::regs).zip(weights.iter().flat_map(Acc::regs));
    pairs.for_each(|(&value, &weight)| b.mul_into(value, value, weight));
}

/// The same of `dP` as it comes out of the product, where weights are left out: those that stay are scaled, of the others only
/// the sums are left. Signs of weights tell which are which, see [`weigh`].
pub(super) fn multiply_kept(
    b: &mut Builder,
    cfg: &Config,
    weights: &[Acc],
    d_probabilities: &[Acc],
    terms: &StepTerms<'_>,
    factor: Reg<F32>,
) {
    for n in 0..cfg.shape.step / MMA_K {
        let tiles = weights.iter().zip(d_probabilities).zip(terms.minus_sums(b, n * MMA_K));
        for ((weights, d_probabilities), sums) in tiles {
            let pairs = values(weights, n).iter().zip(values(d_probabilities, n));
            for ((&weight, &value), sum) in pairs.zip(sums) {
                let scaled = b.fma(value, factor, sum);
                let bits = b.float_bits(weight);
                b.select_into(value, bits.ge(0), scaled, sum);
                let weight = b.abs(weight);
                b.mul_into(value, value, weight);
            }
        }
    }
}

/// `dS` as left operands: rounded, or in two parts.
pub(super) fn operands(b: &mut Builder, cfg: &Config, slopes: &[Acc]) -> Lefts {
    slopes.iter().map(|acc| factors(b, cfg, acc.regs())).collect()
}

/// Values of an accumulator, from a column on that an instruction starts at, as left operands.
fn factors(b: &mut Builder, cfg: &Config, values: &[Reg<F32>]) -> Vec<Factor> {
    let each = cfg.input.depth() as usize / 2;
    values.chunks(each).map(|values| Factor::of_values(b, cfg.input, values)).collect()
}

/// A thread's values of columns `16 * n .. 16 * n + 16`.
fn values(acc: &Acc, n: u32) -> &[Reg<F32>] {
    &acc.regs()[n as usize * VALUES..][..VALUES]
}
