//! Laws of attention that hold whatever the numbers are, over any backend.
//!
//! Most laws say that two problems have the same result: one is run, the oracle computes the other, so the two
//! cannot be wrong in the same way. Bitwise laws compare two runs. Tests of every backend and `flashcore verify` go
//! through [`ALL`].

pub(crate) mod dropout;
pub(crate) mod pages;

use std::ops::Range;

use flashcore_core::{Backend, DType, Data, DataMut, Dims, Element, HostCall, Lengths, Mask, Spec};
use half::{bf16, f16};

use crate::{
    answer::{Answer, Rows},
    bench::{Bench, Trouble},
    cases::{Case, Tag},
    compare::Rule,
    inputs::{Inputs, Placement},
    rng::Rng,
    suite::{Outcome, Step},
};

/// A law that every backend must obey.
#[derive(Clone, Copy, Debug)]
pub struct Property {
    /// What it says.
    pub name: &'static str,
    laws: [Law; 3],
}

type Law = fn(&dyn Backend, u64) -> Result<(), Outcome>;

impl Property {
    /// Checks the law on one backend.
    pub fn check(&self, backend: &dyn Backend, dtype: DType, seed: u64) -> Outcome {
        let law = match dtype {
            DType::F16 => self.laws[0],
            DType::BF16 => self.laws[1],
            DType::F32 => self.laws[2],
            _ => return Outcome::Skipped(format!("the testkit does not know {dtype}")),
        };
        law(backend, seed).err().unwrap_or(Outcome::Passed)
    }
}

macro_rules! properties {
    ($($name:literal => $($law:ident)::+,)*) => {
        /// Every law.
        pub const ALL: &[Property] =
            &[$(Property { name: $name, laws: [$($law)::+::<f16>, $($law)::+::<bf16>, $($law)::+::<f32>] }),*];
    };
}

properties! {
    "values of one give ones" => ones_give_ones,
    "the order of keys does not matter" => key_permutation,
    "a causal row does not depend on later keys, bit for bit" => causal_prefix,
    "a row's bits do not depend on its batch" => batch_invariance,
    "a constant added to all scores changes the LSE alone" => score_shift,
    "parts merged by LSE equal the whole" => lse_merge,
    "grouped heads equal repeated keys and values" => grouped_heads,
    "packed sequences equal single ones" => ragged_equals_single,
    "used lengths equal a shorter problem" => used_equals_shorter,
    "the result is the same without LSE" => lse_is_optional,
    "a dropout of 0 changes no bit" => dropout::nothing_left_out,
    "the seed of dropout decides, and never about the LSE" => dropout::seed_decides,
    "on average nothing is left out" => dropout::mean_is_undropped,
    "padded sequences leave out what packed ones do" => dropout::padded_equals_packed,
    "an f32 output is nearer to f64" => wide_is_nearer,
    "parts that are accumulated equal the whole" => accumulated_parts,
    "accumulating leaves unused rows alone" => unused_rows_stay,
    "keys in pages equal keys together" => pages::equal_keys_together,
    "the order of pages does not matter, bit for bit" => pages::order_does_not_matter,
    "a sequence's bits do not depend on those that it is packed with" => pages::others_do_not_matter,
}

type Values = [Vec<f32>; 3];

fn plain(shape: [usize; 5]) -> Case {
    Case::new(Tag::Random, "property", shape, 64)
}

fn draw(case: &Case, seed: u64) -> Values {
    case.inputs.values([case.q, case.k, case.v()], &mut Rng::new(seed))
}

fn broken(reason: impl std::fmt::Display) -> Outcome {
    Outcome::failed(Step::Correctness, reason)
}

/// Runs `case` on `values`.
fn run<T: Element>(
    backend: &dyn Backend,
    case: &Case,
    values: &Values,
    seed: u64,
) -> Result<Answer, Outcome> {
    let bench = Bench::<T>::holding(case, seed, values)?;
    Ok(bench.run(backend, true)?.answer(bench.problem()))
}

/// Demands that `got` is what the oracle says about another case.
fn expect<T: Element>(got: &Answer, case: &Case, values: &Values, seed: u64) -> Result<(), Outcome> {
    let bench = Bench::<T>::holding(case, seed, values)?;
    let verdict = Rule::of(bench.problem()).judge(got, &bench.oracle(), &bench.yardstick());
    verdict.reason.map_or(Ok(()), |reason| Err(broken(reason)))
}

/// Requires equal bits of two results of the same extents.
pub(crate) fn expect_same_bits(a: &Answer, b: &Answer) -> Result<(), Outcome> {
    let differ = |a: &[f64], b: &[f64]| a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits());
    let in_lse = differ(&a.lse, &b.lse).map(|row| row * a.grid.dim);
    let at = differ(&a.out, &b.out).or(in_lse);
    at.map_or(Ok(()), |at| Err(broken(format!("other bits at {}", a.grid.position(at)))))
}

/// The given rows of every head, in the given order.
fn pick_rows(values: &[f32], dims: Dims, rows: &[usize]) -> Vec<f32> {
    let heads = values.chunks_exact(dims.seq * dims.dim);
    heads.flat_map(|head| rows.iter().flat_map(|row| &head[row * dims.dim..][..dims.dim])).copied().collect()
}

/// The given heads, counted over all batch entries.
fn pick_heads(values: &[f32], dims: Dims, heads: impl Iterator<Item = usize>) -> Vec<f32> {
    let size = dims.seq * dims.dim;
    heads.flat_map(|head| &values[head * size..][..size]).copied().collect()
}

fn ones_give_ones<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    // Weights are rounded to the tensors' type before they meet V, their sum is not; the result is rounded again.
    let tolerance = spacing_at_one(T::DTYPE) + 8.0 * f64::from(f32::EPSILON);
    for mask in [Mask::NONE, Mask::CAUSAL, Mask::window(20, 3)] {
        let case = Case { inputs: Inputs::Ones, mask, ..plain([1, 2, 2, 70, 150]) };
        let got = run::<T>(backend, &case, &draw(&case, seed), seed)?;
        if let Some(at) = got.out.iter().position(|x| (x - 1.0).abs() > tolerance) {
            return Err(broken(format!("{} at {}", got.out[at], got.grid.position(at))));
        }
    }
    Ok(())
}

fn key_permutation<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let case = plain([2, 2, 2, 33, 150]);
    let [q, k, v] = draw(&case, seed);
    let order = Rng::new(seed).permutation(case.k.seq);
    let shuffled = [q.clone(), pick_rows(&k, case.k, &order), pick_rows(&v, case.v(), &order)];
    expect::<T>(&run::<T>(backend, &case, &shuffled, seed)?, &case, &[q, k, v], seed)
}

fn causal_prefix<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let case = Case { mask: Mask::CAUSAL, ..plain([1, 2, 1, 150, 150]) };
    let [q, k, v] = draw(&case, seed);
    let [_, other_k, other_v] = draw(&case, seed + 1);
    let before = run::<T>(backend, &case, &[q.clone(), k.clone(), v.clone()], seed)?;
    for prefix in [1, 64, 77, 149] {
        let change = |kept: &[f32], other: &[f32]| [&kept[..prefix * 64], &other[prefix * 64..]].concat();
        let changed = [q.clone(), change(&k, &other_k), change(&v, &other_v)];
        let after = run::<T>(backend, &case, &changed, seed)?;
        expect_same_bits(&before.part(0, 0..2, 0..prefix), &after.part(0, 0..2, 0..prefix))?;
    }
    Ok(())
}

fn batch_invariance<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    for [seq_q, seq_kv] in [[70, 70], [1, 1500]] {
        let invariant = |batch, heads_kv| Case {
            mask: Mask::CAUSAL,
            batch_invariant: true,
            ..plain([batch, 2 * heads_kv, heads_kv, seq_q, seq_kv])
        };
        let case = invariant(5, 3);
        let [q, k, v] = draw(&case, seed);
        let whole = run::<T>(backend, &case, &[q.clone(), k.clone(), v.clone()], seed)?;
        for (batch, kv) in [(0, 0..3), (3, 0..3), (4, 1..2)] {
            let alone = invariant(1, kv.len());
            let heads = 2 * kv.start..2 * kv.end;
            let of_q = pick_heads(&q, case.q, heads.clone().map(|head| batch * 6 + head));
            let of_kv = |x: &[f32]| pick_heads(x, case.k, kv.clone().map(|head| batch * 3 + head));
            let got = run::<T>(backend, &alone, &[of_q, of_kv(&k), of_kv(&v)], seed)?;
            expect_same_bits(&got, &whole.part(batch, heads, 0..seq_q))?;
        }
    }
    Ok(())
}

fn score_shift<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let case = Case { mask: Mask::CAUSAL, ..plain([1, 2, 2, 70, 130]) };
    let [mut q, mut k, v] = draw(&case, seed);
    // The scale is 1/8: a last feature of 8 in q and 4 in k adds 4 to every score.
    let set_last = |x: &mut [f32], to: f32| x.chunks_exact_mut(64).for_each(|row| row[63] = to);
    set_last(&mut q, 8.0);
    set_last(&mut k, 0.0);
    let unshifted = [q.clone(), k.clone(), v.clone()];
    set_last(&mut k, 4.0);
    let mut got = run::<T>(backend, &case, &[q, k, v], seed)?;
    got.lse.iter_mut().for_each(|lse| *lse -= 4.0);
    expect::<T>(&got, &case, &unshifted, seed)
}

fn lse_merge<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let case = plain([1, 2, 1, 70, 150]);
    let [q, k, v] = draw(&case, seed);
    let run_part = |keys: Range<usize>| {
        let rows: Vec<usize> = keys.collect();
        let part = plain([1, 2, 1, 70, rows.len()]);
        let values = [q.clone(), pick_rows(&k, case.k, &rows), pick_rows(&v, case.k, &rows)];
        run::<T>(backend, &part, &values, seed)
    };
    let (left, right) = (run_part(0..61)?, run_part(61..150)?);
    let values = [q.clone(), k.clone(), v.clone()];
    let merged = right.onto(&left, Bench::<T>::holding(&case, seed, &values)?.instance());
    expect::<T>(&merged, &case, &values, seed)
}

fn grouped_heads<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let case = Case { mask: Mask::CAUSAL, ..plain([2, 6, 2, 70, 130]) };
    let [q, k, v] = draw(&case, seed);
    let got = run::<T>(backend, &case, &[q.clone(), k.clone(), v.clone()], seed)?;
    let repeat = |x: &[f32]| pick_heads(x, case.k, (0..12).map(|head| head / 3));
    let repeated = Case { mask: Mask::CAUSAL, ..plain([2, 6, 6, 70, 130]) };
    expect::<T>(&got, &repeated, &[q, repeat(&k), repeat(&v)], seed)
}

fn ragged_equals_single<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let pairs = [(5, 5), (64, 130), (0, 3), (70, 33), (1, 200)];
    let case = Case { mask: Mask::CAUSAL, ..Case::ragged(Tag::Random, "property", &pairs, [2, 1], 64) };
    let [q, k, v] = draw(&case, seed);
    let got = run::<T>(backend, &case, &[q.clone(), k.clone(), v.clone()], seed)?;
    let (mut first_q, mut first_kv) = (0, 0);
    for (of_q, of_kv) in pairs.map(|(of_q, of_kv)| (of_q as usize, of_kv as usize)) {
        let single = Case { mask: Mask::CAUSAL, ..plain([1, 2, 1, of_q, of_kv]) };
        let rows = |first, len| -> Vec<usize> { (first..first + len).collect() };
        let of_keys = |x: &[f32]| pick_rows(x, case.k, &rows(first_kv, of_kv));
        let values = [pick_rows(&q, case.q, &rows(first_q, of_q)), of_keys(&k), of_keys(&v)];
        expect::<T>(&got.part(0, 0..2, first_q..first_q + of_q), &single, &values, seed)?;
        (first_q, first_kv) = (first_q + of_q, first_kv + of_kv);
    }
    Ok(())
}

fn used_equals_shorter<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let used = [(40, 70), (64, 1), (3, 130)];
    let lengths = Lengths::used(used.map(|u| u.0), used.map(|u| u.1));
    let case = Case { lengths, mask: Mask::CAUSAL, ..plain([3, 2, 1, 64, 130]) };
    let [q, k, v] = draw(&case, seed);
    let got = run::<T>(backend, &case, &[q.clone(), k.clone(), v.clone()], seed)?;
    for (batch, (of_q, of_kv)) in
        used.map(|(of_q, of_kv)| (of_q as usize, of_kv as usize)).into_iter().enumerate()
    {
        let shorter = Case { mask: Mask::CAUSAL, ..plain([1, 2, 1, of_q, of_kv]) };
        let cut = |x: &[f32], dims: Dims, rows: usize| {
            let entry = pick_heads(x, dims, batch * dims.heads..(batch + 1) * dims.heads);
            pick_rows(&entry, dims, &(0..rows).collect::<Vec<_>>())
        };
        let values = [cut(&q, case.q, of_q), cut(&k, case.k, of_kv), cut(&v, case.k, of_kv)];
        expect::<T>(&got.part(batch, 0..2, 0..of_q), &shorter, &values, seed)?;
    }
    Ok(())
}

fn lse_is_optional<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let case = Case { placement: Placement::Padded, mask: Mask::CAUSAL, ..plain([2, 4, 2, 70, 130]) };
    let values = draw(&case, seed);
    let bench = Bench::<T>::holding(&case, seed, &values)?;
    expect::<T>(&bench.run(backend, false)?.answer(bench.problem()), &case, &values, seed)
}

/// An f32 output and its LSE.
type Held = (Vec<f32>, Vec<f32>);

/// Runs the bench's problem with an f32 output, dense, or accumulates it onto what is held.
fn run_wide<T: Element>(
    backend: &dyn Backend,
    bench: &Bench<T>,
    accumulate: bool,
    held: &mut Held,
) -> Result<Answer, Outcome> {
    let spec = Spec { out: None, out_dtype: Some(DType::F32), accumulate, ..bench.problem().spec().clone() };
    let problem = spec.parse().map_err(Trouble::from)?;
    let (out, lse) = (DataMut::F32(&mut held.0), Some(held.1.as_mut_slice()));
    let call = HostCall::bind_erased(&problem, bench.instance().values(), bench.data(), out, lse);
    backend.forward(&mut call.map_err(Trouble::from)?).map_err(Trouble::from)?;
    Ok(Answer::gather(&problem, Data::F32(&held.0), Some(&held.1), Rows::ALL))
}

/// Memory for the bench's result that holds nothing yet: an LSE of −∞ says so, whatever the rows hold.
fn nothing_held<T: Element>(bench: &Bench<T>) -> Held {
    let rows = bench.problem().rows();
    (vec![f32::NAN; rows * bench.problem().dim_v()], vec![f32::NEG_INFINITY; rows])
}

fn wide_is_nearer<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let case = Case { mask: Mask::CAUSAL, ..plain([1, 2, 1, 70, 150]) };
    let values = draw(&case, seed);
    let bench = Bench::<T>::holding(&case, seed, &values)?;
    let wide = run_wide(backend, &bench, false, &mut nothing_held(&bench))?;
    expect::<T>(&wide, &case, &values, seed)?;
    let (narrow, oracle) = (bench.run(backend, true)?.answer(bench.problem()), bench.oracle());
    let error = |answer: &Answer| answer.out.iter().zip(&oracle.out).map(|(a, b)| (a - b).abs()).sum::<f64>();
    let nearer = T::DTYPE == DType::F32 || error(&wide) < error(&narrow);
    if nearer { Ok(()) } else { Err(broken(format!("off by {} in f32, {}", error(&wide), error(&narrow)))) }
}

fn accumulated_parts<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    for heads in [2, 4] {
        let case = plain([2, heads, 1, 70 / heads * 2, 150]);
        let [q, k, v] = draw(&case, seed);
        let mut held = nothing_held(&Bench::<T>::holding(&case, seed, &[q.clone(), k.clone(), v.clone()])?);
        let mut got = None;
        for keys in [0..61, 61..64, 64..150] {
            let rows: Vec<usize> = keys.collect();
            let part = Case { k: Dims { seq: rows.len(), ..case.k }, ..case.clone() };
            let values = [q.clone(), pick_rows(&k, case.k, &rows), pick_rows(&v, case.k, &rows)];
            let bench = Bench::<T>::holding(&part, seed, &values)?;
            got = Some(run_wide(backend, &bench, true, &mut held)?);
        }
        got.map_or(Ok(()), |got| expect::<T>(&got, &case, &[q, k, v], seed))?;
    }
    Ok(())
}

fn unused_rows_stay<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let lengths = Lengths::used([40, 64, 0], [70, 1, 130]);
    let case = Case { lengths, mask: Mask::CAUSAL, ..plain([3, 2, 1, 64, 130]) };
    let bench = Bench::<T>::holding(&case, seed, &draw(&case, seed))?;
    let (mut held, mut rng) = (nothing_held(&bench), Rng::new(seed));
    // Every second row holds something.
    for (row, lse) in held.0.chunks_exact_mut(64).zip(&mut held.1).step_by(2) {
        row.fill_with(|| rng.normal());
        *lse = 3.0 * rng.normal();
    }
    let old = Answer::gather(bench.problem(), Data::F32(&held.0), Some(&held.1), Rows::ALL);
    let got = run_wide(backend, &bench, true, &mut held)?;
    let [oracle, yardstick] =
        [bench.oracle(), bench.yardstick()].map(|answer| answer.onto(&old, bench.instance()));
    let verdict = Rule::of(bench.problem()).judge(&got, &oracle, &yardstick);
    verdict.reason.map_or(Ok(()), |reason| Err(broken(reason)))?;
    let rows = |answer: &Answer| answer.part(0, 0..2, 40..64);
    expect_same_bits(&rows(&got), &rows(&old))
}

/// The distance from 1 to the next number.
const fn spacing_at_one(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 1.0 / 1024.0,
        DType::BF16 => 1.0 / 128.0,
        _ => f32::EPSILON as f64,
    }
}
