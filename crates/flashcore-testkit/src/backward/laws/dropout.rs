//! Laws of gradients where weights are dropped at random.

use flashcore_core::{Backend, Element, Mask};

use super::{super::bench::Bench, broken, case, draw, run};
use crate::{
    properties::dropout::{SEEDS, expect_mean},
    suite::Outcome,
};

/// dQ, dK and dV of the same tensors with some dropout, by the seed of the dropout.
fn gradients<T: Element>(
    backend: &dyn Backend,
    dropout: Option<f32>,
    [tensors, seed]: [u64; 2],
) -> Result<[Vec<f64>; 3], Outcome> {
    let mut case = case([1, 2, 1, 70, 150], 32);
    (case.forward.dropout, case.forward.mask) = (dropout, Mask::CAUSAL);
    let (inputs, d_out) = draw(&case, tensors);
    let got = run(backend, &Bench::<T>::holding(&case, seed, &inputs, &d_out)?)?;
    Ok([got.dq.out, got.dk.out, got.dv.out])
}

pub(super) fn nothing_left_out<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let [without, with] = [None, Some(0.0)].map(|dropout| gradients::<T>(backend, dropout, [seed, seed]));
    if without? == with? { Ok(()) } else { Err(broken("a dropout of 0 changes gradients")) }
}

pub(super) fn seed_decides<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let of = |dropout_seed| gradients::<T>(backend, Some(0.3), [seed, dropout_seed]);
    let first = of(seed)?;
    if first != of(seed)? {
        return Err(broken("the same seed gives other gradients"));
    }
    for other in [of(seed ^ 1)?, of(seed ^ 1 << 40)?] {
        if first.iter().zip(&other).any(|(first, other)| first == other) {
            return Err(broken("another seed leaves out the same weights"));
        }
    }
    Ok(())
}

/// Those of values alone: the others have row sums in them, which are products of two that are left out together.
pub(super) fn mean_is_undropped<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let whole = case([1, 2, 1, 60, 40], 32);
    let (inputs, d_out) = draw(&whole, seed);
    let mut case = whole.clone();
    case.forward.dropout = Some(0.3);
    let one =
        |n| Ok::<_, Outcome>(run(backend, &Bench::<T>::holding(&case, seed + n, &inputs, &d_out)?)?.dv.out);
    let runs = (0..SEEDS).map(one).collect::<Result<Vec<_>, _>>()?;
    expect_mean(&runs, &Bench::<T>::holding(&whole, seed, &inputs, &d_out)?.oracle().dv.out)
}
