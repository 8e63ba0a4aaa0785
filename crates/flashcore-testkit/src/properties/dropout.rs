//! Laws of weights that are dropped at random.

use flashcore_core::{Backend, Dims, Element, Lengths, Mask};

use super::{broken, draw, expect, expect_same_bits, plain, run};
use crate::{
    answer::{Answer, Grid, Rows},
    bench::Bench,
    cases::{Case, Tag},
    suite::Outcome,
};

/// Seeds over which results are averaged.
pub(crate) const SEEDS: u64 = 16;

/// A prompt and single queries over so many keys that they are split.
const SHAPES: [[usize; 5]; 2] = [[2, 4, 2, 70, 130], [1, 4, 2, 1, 1500]];

fn with(dropout: Option<f32>, shape: [usize; 5]) -> Case {
    Case { dropout, mask: Mask::CAUSAL, ..plain(shape) }
}

pub(super) fn nothing_left_out<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    for shape in SHAPES {
        let case = with(None, shape);
        let values = draw(&case, seed);
        let without = run::<T>(backend, &case, &values, seed)?;
        expect_same_bits(&without, &run::<T>(backend, &with(Some(0.0), shape), &values, seed)?)?;
    }
    Ok(())
}

pub(super) fn seed_decides<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    for shape in SHAPES {
        let case = with(Some(0.3), shape);
        let values = draw(&case, seed);
        let first = run::<T>(backend, &case, &values, seed)?;
        expect_same_bits(&first, &run::<T>(backend, &case, &values, seed)?)?;
        // Either half of a seed counts.
        for other in [seed ^ 1, seed ^ 1 << 40] {
            let other = run::<T>(backend, &case, &values, other)?;
            if first.out == other.out {
                return Err(broken("another seed leaves out the same weights"));
            }
            // Whatever is left out, it was summed.
            let of_lse = |answer: &Answer| Answer { out: answer.lse.clone(), ..answer.clone() };
            expect_same_bits(&of_lse(&first), &of_lse(&other))?;
        }
    }
    Ok(())
}

pub(super) fn mean_is_undropped<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let whole = plain([1, 2, 1, 40, 70]);
    let values = draw(&whole, seed);
    let case = Case { dropout: Some(0.3), ..whole.clone() };
    let one = |n| Ok::<_, Outcome>(run::<T>(backend, &case, &values, seed + n)?.out);
    let runs = (0..SEEDS).map(one).collect::<Result<Vec<_>, _>>()?;
    expect_mean(&runs, &Bench::<T>::holding(&whole, seed, &values)?.oracle().out)
}

/// Demands that results of several seeds scatter about what they should be on average: that the distances of the means, in
/// standard errors, are on average about 1.
pub(crate) fn expect_mean(runs: &[Vec<f64>], expected: &[f64]) -> Result<(), Outcome> {
    let count = runs.len() as f64;
    let square = |(at, expected): (usize, &f64)| {
        let of_runs = || runs.iter().map(|run| run[at]);
        let mean = of_runs().sum::<f64>() / count;
        let variance = of_runs().map(|x| (x - mean).powi(2)).sum::<f64>() / (count - 1.0);
        (mean - expected).powi(2) / (variance / count).max(f64::MIN_POSITIVE)
    };
    let distance = expected.iter().enumerate().map(square).sum::<f64>() / expected.len() as f64;
    if (0.7..1.6).contains(&distance) {
        return Ok(());
    }
    Err(broken(format!("means over {count} seeds are {distance:.2} squared standard errors from the mean")))
}

/// Padded sequences judged as if they had been packed.
pub(super) fn padded_equals_packed<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let pairs = [(40, 70), (64, 5), (3, 130)];
    let lengths = Lengths::used(pairs.map(|pair| pair.0), pairs.map(|pair| pair.1));
    let padded = Case { lengths, ..with(Some(0.3), [3, 2, 1, 64, 130]) };
    let [q, k, v] = draw(&padded, seed);
    let got = run::<T>(backend, &padded, &[q.clone(), k.clone(), v.clone()], seed)?;
    let ragged = Case::ragged(Tag::Random, "property", &pairs, [2, 1], 64);
    let packed = Case { dropout: padded.dropout, mask: padded.mask, ..ragged };
    let queries = pairs.map(|pair| pair.0 as usize);
    let keys = pairs.map(|pair| pair.1 as usize);
    let values = [pack(&q, padded.q, queries), pack(&k, padded.k, keys), pack(&v, padded.k, keys)];
    let grid = Grid::of(Bench::<T>::holding(&packed, seed, &values)?.problem(), Rows::ALL);
    let mut moved = Answer::empty(grid);
    for (head, batch) in (0..2).flat_map(|head| (0..3).map(move |batch| (head, batch))) {
        let part = got.part(batch, head..head + 1, 0..queries[batch]);
        moved.out.extend(part.out);
        moved.lse.extend(part.lse);
    }
    expect::<T>(&moved, &packed, &values, seed)
}

/// The first rows of each batch entry, one entry after another.
fn pack(values: &[f32], dims: Dims, rows: [usize; 3]) -> Vec<f32> {
    let of_head = |head: usize, batch: usize| {
        let first = (batch * dims.heads + head) * dims.seq * dims.dim;
        &values[first..first + rows[batch] * dims.dim]
    };
    let places = (0..dims.heads).flat_map(|head| (0..dims.batch).map(move |batch| (head, batch)));
    places.flat_map(|(head, batch)| of_head(head, batch)).copied().collect()
}
