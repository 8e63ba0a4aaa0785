//! Laws of gradients that hold whatever the numbers are, over any backend.
//!
//! Most say that two problems have the same gradients: one is run, the oracle computes the other.

mod dropout;

use flashcore_core::{
    Backend, BackwardCall, BackwardInputs, BackwardSpec, DType, Dims, Element, GradientsMut, Layout, Mask,
    RowSums, RowTerms, Spec,
};
use half::{bf16, f16};

use super::{Case, Wish, bare, bench::Bench, plain::Gradients};
use crate::{
    answer::{Answer, Grid},
    cases::{self, Sinks, Tag},
    compare::Rule,
    inputs::Inputs,
    rng::Rng,
    suite::{Outcome, Step},
};

/// A law that the gradients of every backend obey.
#[derive(Clone, Copy, Debug)]
pub struct Law {
    /// What it says.
    pub name: &'static str,
    checks: [Check; 3],
}

type Check = fn(&dyn Backend, u64) -> Result<(), Outcome>;

impl Law {
    /// Checks the law on one backend.
    pub fn check(&self, backend: &dyn Backend, dtype: DType, seed: u64) -> Outcome {
        let check = match dtype {
            DType::F16 => self.checks[0],
            DType::BF16 => self.checks[1],
            DType::F32 => self.checks[2],
            _ => return Outcome::Skipped(format!("the testkit does not know {dtype}")),
        };
        check(backend, seed).err().unwrap_or(Outcome::Passed)
    }
}

macro_rules! laws {
    ($($name:literal => $($law:ident)::+,)*) => {
        /// Every law.
        pub const LAWS: &[Law] =
            &[$(Law { name: $name, checks: [$($law)::+::<f16>, $($law)::+::<bf16>, $($law)::+::<f32>] }),*];
    };
}

laws! {
    "gradients of a row's scores sum to 0" => scores_sum_to_zero,
    "a one-hot output gradient picks a row of the weights" => one_hot_picks_weights,
    "what nobody sees has no gradient" => hidden_is_zero,
    "grouped heads add up what repeated ones have" => grouped_heads,
    "gradients of packed sequences equal those of single ones" => packed_equals_single,
    "gradients of parts of the keys add up to the whole" => parts_add_up,
    "a dropout of 0 changes no bit of gradients" => dropout::nothing_left_out,
    "the seed of dropout decides about gradients" => dropout::seed_decides,
    "on average nothing is left out of the gradient of values" => dropout::mean_is_undropped,
}

type Values = [Vec<f32>; 3];

fn case(shape: [usize; 5], dim: usize) -> Case {
    Case::new(cases::Case::new(Tag::Random, "law of gradients", shape, dim), Wish::Plain)
}

fn draw(case: &Case, seed: u64) -> (Values, Vec<f32>) {
    let forward = &case.forward;
    let mut rng = Rng::new(seed);
    let inputs = forward.inputs.values([forward.q, forward.k, forward.v()], &mut rng);
    let d_out = (0..forward.out().count().unwrap_or(0)).map(|_| rng.normal()).collect();
    (inputs, d_out)
}

fn broken(reason: impl std::fmt::Display) -> Outcome {
    Outcome::failed(Step::Correctness, reason)
}

/// Requires that one result is close to another, by the yardstick of a bench.
fn expect<T: Element>(
    bench: &Bench<T>,
    got: &Answer,
    oracle: &Answer,
    yardstick: &Answer,
) -> Result<(), Outcome> {
    let verdict = Rule::of_gradients(bench.problem()).judge(got, oracle, yardstick);
    verdict.reason.map_or(Ok(()), |reason| Err(broken(reason)))
}

fn run<T: Element>(backend: &dyn Backend, bench: &Bench<T>) -> Result<Gradients, Outcome> {
    Ok(bench.run::<T>(backend)?.gradients(bench.problem()))
}

/// Keys that are all the same turn the sum of a row of gradients of scores into dQ.
fn scores_sum_to_zero<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    for mask in [Mask::NONE, Mask::CAUSAL, Mask::window(30, 4)] {
        let mut case = case([1, 2, 1, 70, 150], 64);
        (case.forward.inputs, case.forward.mask) = (Inputs::EqualKeys, mask);
        let bench = Bench::<T>::new(&case, seed)?;
        let (got, yardstick) = (run(backend, &bench)?, bench.yardstick().map(|x| T::DTYPE.round(x)));
        let oracle = bench.oracle();
        let zero = Answer { out: vec![0.0; oracle.dq.out.len()], ..oracle.dq };
        expect(&bench, &got.dq, &zero, &yardstick.dq)?;
    }
    Ok(())
}

fn one_hot_picks_weights<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    const QUERY: usize = 41;
    let mut case = case([1, 1, 1, 70, 90], 32);
    (case.forward.mask, case.forward.sinks) = (Mask::CAUSAL, Sinks::Normal);
    let (inputs, mut d_out) = draw(&case, seed);
    d_out.fill(0.0);
    d_out[QUERY * 32 + 5] = 1.0;
    let bench = Bench::<T>::holding(&case, seed, &inputs, &d_out)?;
    let got = run(backend, &bench)?;
    let round = |x: f32| f64::from(T::from_f32(x).to_f32());
    let seen = bench.instance().mask().keys(QUERY, 70, 90);
    for key in 0..90 {
        let features = inputs[0][QUERY * 32..][..32].iter().zip(&inputs[1][key * 32..]);
        let score: f64 = features.map(|(&q, &k)| round(q) * round(k)).sum::<f64>() / 32f64.sqrt();
        let weight = if seen.contains(&key) { (score - f64::from(bench.lse()[QUERY])).exp() } else { 0.0 };
        let found = got.dv.out[key * 32 + 5];
        // Rounded once as a factor and once as a result; f32 before that.
        let tolerance = (weight * (spacing_at_one(T::DTYPE) + 2e-6)).max(1e-7);
        if (found - weight).abs() > tolerance {
            return Err(broken(format!("dv of key {key} is {found} and not its weight {weight}")));
        }
        if got.dv.out[key * 32..][..32].iter().enumerate().any(|(n, &x)| n != 5 && x != 0.0) {
            return Err(broken(format!(
                "dv of key {key} has other features than the one that was asked for"
            )));
        }
    }
    Ok(())
}

/// The distance from 1 to the next number.
fn spacing_at_one(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 0.5f64.powi(10),
        DType::BF16 => 0.5f64.powi(7),
        _ => 0.5f64.powi(23),
    }
}

fn hidden_is_zero<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    // Keys from 40 on are behind the diagonal of every query; of 90 queries over 20 keys the first 70 see nothing.
    let later = (Mask::CAUSAL.top_left(), [1, 2, 1, 40, 100], 0..90, 40..100);
    let before = (Mask::CAUSAL, [1, 2, 1, 90, 20], 0..70, 0..0);
    for (mask, shape, queries, keys) in [later, before] {
        let mut case = case(shape, 64);
        case.forward.mask = mask;
        let got = run(backend, &Bench::<T>::new(&case, seed)?)?;
        let hidden = |answer: &Answer, rows: &std::ops::Range<usize>| {
            let grid = answer.grid;
            let at = (0..answer.out.len()).filter(|&at| rows.contains(&grid.position(at).seq));
            at.map(|at| answer.out[at]).find(|&x| x != 0.0)
        };
        let of_queries = if shape[3] > shape[4] { hidden(&got.dq, &queries) } else { None };
        let found = of_queries.or_else(|| hidden(&got.dk, &keys)).or_else(|| hidden(&got.dv, &keys));
        found.map_or(Ok(()), |x| Err(broken(format!("{x} where nothing is seen ({mask})"))))?;
    }
    Ok(())
}

fn grouped_heads<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let (mut grouped, mut repeated) = (case([2, 6, 2, 50, 70], 32), case([2, 6, 6, 50, 70], 32));
    (grouped.forward.mask, repeated.forward.mask) = (Mask::CAUSAL, Mask::CAUSAL);
    let ([q, k, v], d_out) = draw(&grouped, seed);
    let repeat = |values: &[f32]| -> Vec<f32> {
        values.chunks_exact(70 * 32).flat_map(|head| head.repeat(3)).collect()
    };
    let inputs = [q.clone(), repeat(&k), repeat(&v)];
    let bench = Bench::<T>::holding(&grouped, seed, &[q, k, v], &d_out)?;
    let whole = Bench::<T>::holding(&repeated, seed, &inputs, &d_out)?;
    let (got, oracle) = (run(backend, &bench)?, whole.oracle());
    let yardstick = bench.yardstick().map(|x| T::DTYPE.round(x));
    let add_up = |answer: &Answer, like: &Answer| {
        let size = 70 * 32;
        let heads: Vec<&[f64]> = answer.out.chunks_exact(size).collect();
        let sum = |three: &[&[f64]]| {
            (0..size).map(|n| three.iter().map(|head| head[n]).sum()).collect::<Vec<f64>>()
        };
        Answer { out: heads.chunks_exact(3).flat_map(sum).collect(), ..like.clone() }
    };
    let own = bench.oracle();
    expect(&bench, &got.dq, &oracle.dq, &yardstick.dq)?;
    expect(&bench, &got.dk, &add_up(&oracle.dk, &own.dk), &yardstick.dk)?;
    expect(&bench, &got.dv, &add_up(&oracle.dv, &own.dv), &yardstick.dv)
}

fn packed_equals_single<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let pairs = [(33, 33), (0, 5), (64, 70), (7, 1)];
    let mut packed = Case::new(cases::Case::ragged(Tag::Random, "packed", &pairs, [2, 1], 32), Wish::Plain);
    packed.forward.mask = Mask::CAUSAL;
    let (inputs, d_out) = draw(&packed, seed);
    let whole = Bench::<T>::holding(&packed, seed, &inputs, &d_out)?;
    let got = run(backend, &whole)?;
    let (mut first_q, mut first_kv) = (0, 0);
    for (q, kv) in pairs.map(|(q, kv)| (q as usize, kv as usize)) {
        let mut single = case([1, 2, 1, q, kv], 32);
        single.forward.mask = Mask::CAUSAL;
        let rows = |values: &[f32], seq: usize, first: usize, count: usize| -> Vec<f32> {
            values
                .chunks_exact(seq * 32)
                .flat_map(|head| &head[first * 32..(first + count) * 32])
                .copied()
                .collect()
        };
        let (all_q, all_kv) = (packed.forward.q.seq, packed.forward.k.seq);
        let [of_k, of_v] = [1, 2].map(|n| rows(&inputs[n], all_kv, first_kv, kv));
        let part = [rows(&inputs[0], all_q, first_q, q), of_k, of_v];
        let bench = Bench::<T>::holding(&single, seed, &part, &rows(&d_out, all_q, first_q, q))?;
        let (oracle, yardstick) = (bench.oracle(), bench.yardstick().map(|x| T::DTYPE.round(x)));
        expect(&bench, &cut(&got.dq, first_q, q), &oracle.dq, &yardstick.dq)?;
        expect(&bench, &cut(&got.dk, first_kv, kv), &oracle.dk, &yardstick.dk)?;
        expect(&bench, &cut(&got.dv, first_kv, kv), &oracle.dv, &yardstick.dv)?;
        (first_q, first_kv) = (first_q + q, first_kv + kv);
    }
    Ok(())
}

/// Some rows of every head.
fn cut(answer: &Answer, first: usize, count: usize) -> Answer {
    let grid = Grid { rows: count, ..answer.grid };
    let (dim, rows) = (grid.dim, answer.grid.rows);
    let heads = answer.out.chunks_exact((rows * dim).max(1));
    bare(grid, heads.flat_map(|head| &head[first * dim..(first + count) * dim]).copied().collect())
}

/// Ring attention: each part of the keys by itself, with the LSE and row sums of all keys, added up in f32.
fn parts_add_up<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let whole = Case { wish: Wish::GivenSums, ..case([2, 2, 1, 60, 128], 32) };
    let ([q, k, v], d_out) = draw(&whole, seed);
    let bench = Bench::<T>::holding(&whole, seed, &[q.clone(), k.clone(), v.clone()], &d_out)?;
    let [q, k, v, d_out] =
        [q, k, v, d_out].map(|values| values.into_iter().map(T::from_f32).collect::<Vec<T>>());
    let dims = |heads, seq| Dims::new(2, heads, seq, 32);
    let (mut dq, mut dk, mut dv) = (vec![0f32; q.len()], vec![0f32; k.len()], vec![0f32; v.len()]);
    for half in 0..2 {
        let refused = |error| broken(format!("refused: {error}"));
        let all = Layout::bhsd(dims(1, 128)).map_err(refused)?;
        let part = Layout::strided(dims(1, 64), all.strides()).map_err(refused)?;
        let (spec, first) =
            (Spec::new(T::DTYPE, Layout::bhsd(dims(2, 60)).map_err(refused)?, part, part), half * 64 * 32);
        let spec = BackwardSpec {
            dk: Some(part),
            dv: Some(part),
            grad_dtype: Some(DType::F32),
            accumulate: true,
            row_sums: RowSums::Given,
            ..BackwardSpec::new(spec)
        };
        let problem = spec.parse().map_err(refused)?;
        let qkv = [&q[..], &k[first..], &v[first..]].map(T::erase);
        let inputs = BackwardInputs {
            qkv,
            lse: bench.lse(),
            terms: RowTerms::Sums(bench.sums()),
            d_out: T::erase(&d_out),
        };
        let qkv = [&mut dq[..], &mut dk[first..], &mut dv[first..]].map(f32::erase_mut);
        let values = flashcore_core::Values::default();
        let grads = GradientsMut { qkv, sinks: None };
        let mut call = BackwardCall::bind(&problem, &values, inputs, grads).map_err(refused)?;
        backend.backward(&mut call).map_err(|error| Outcome::from(crate::bench::Trouble::from(error)))?;
    }
    let (oracle, yardstick) = (bench.oracle(), bench.yardstick());
    for (got, (oracle, yardstick)) in [dq, dk, dv].iter().zip([
        (&oracle.dq, &yardstick.dq),
        (&oracle.dk, &yardstick.dk),
        (&oracle.dv, &yardstick.dv),
    ]) {
        let got = bare(oracle.grid, got.iter().map(|&x| f64::from(x)).collect());
        expect(&bench, &got, oracle, yardstick)?;
    }
    Ok(())
}
