//! Whether gradients are right, in bounded time and memory: on some heads, one at a time, all of dQ, dK and dV.
//!
//! Every row of dK and dV depends on every query, so rows of a large problem cannot be judged individually. What is judged
//! are therefore the gradients for an output gradient that is 0 except in evenly spaced rows: the others add exactly
//! nothing, in f64 as in a kernel, and cost the oracle nothing.

use std::{ops::Range, sync::Arc};

use flashcore_core::{
    BackwardProblem, BackwardSpec, Data, Dims, Instance, Layout, Lengths, Problem, RowTerms, Spec, Values,
};
use flashcore_testkit::{
    Answer, Rows, Rule, Verdict,
    answer::{Grid, Position},
    backward::plain::{Gradients, reference, yardstick},
    plain,
};
use rayon::prelude::*;

use crate::{buffer::Buffer, error::LabError};

/// Multiply-adds of the f64 computation of one head: some five products in f64, and five that are rounded.
const BUDGET: f64 = (1u64 << 26) as f64;
/// Heads of keys that are judged, evenly spaced.
const MOST_HEADS: usize = 6;

/// What the gradients of a problem over dense tensors should come to.
pub struct Expected {
    heads: Vec<Head>,
}

/// A head of keys of one batch entry, and the query heads that use it.
struct Head {
    problem: BackwardProblem,
    /// Where it lies in Q, K and V.
    places: [Range<usize>; 3],
    oracle: Gradients,
    yardstick: Gradients,
}

/// Rows of the output's gradient that are judged.
fn rows(problem: &Problem) -> Rows {
    let heads = (problem.batch() * problem.heads_kv()).max(1) as f64;
    Rows::within(problem, BUDGET * heads)
}

/// How many rows that is, of how many.
pub fn judged_rows(problem: &BackwardProblem) -> usize {
    Grid::of(problem.forward(), rows(problem.forward())).total_rows()
}

/// Sets the rows of an output's gradient that are not judged to 0.
pub fn keep_rows(d_out: &mut Buffer, problem: &BackwardProblem) {
    let (p, dims) = (problem.forward(), problem.d_out().dims());
    let step = Grid::of(p, rows(p)).step;
    let bytes = dims.dim * p.out_dtype().bytes();
    let mut data = d_out.data_mut();
    for (n, row) in data.bytes_mut().chunks_mut(bytes.max(1)).enumerate() {
        if n % dims.seq % step != 0 {
            row.fill(0);
        }
    }
}

impl Expected {
    /// Computes the gradients of some heads in f64 and plainly, from an output's gradient that [`keep_rows`] went over.
    pub fn new(
        problem: &BackwardProblem,
        values: &Values,
        inputs: [Data<'_>; 3],
        d_out: Data<'_>,
    ) -> Result<Self, LabError> {
        let p = problem.forward();
        let (all, rows) = (p.batch() * p.heads_kv(), rows(p));
        let count = all.min(MOST_HEADS);
        let numbers = (0..count).into_par_iter().map(|n| n * (all - 1) / (count - 1).max(1));
        let heads = numbers.map(|n| Head::new(problem, values, inputs, d_out, (n, rows)));
        Ok(Self { heads: heads.collect::<Result<_, _>>()? })
    }

    /// Applies the error rule; the verdict is that of the worst of all gradients.
    pub fn judge(&self, gradients: [Data<'_>; 3]) -> Option<Verdict> {
        let verdicts = self.heads.iter().flat_map(|head| head.judge(gradients));
        let share = |verdict: &Verdict| match verdict.pass() {
            true => verdict.max_error / verdict.tolerance.max(f64::MIN_POSITIVE),
            false => f64::INFINITY,
        };
        verdicts.max_by(|a, b| share(a).total_cmp(&share(b)))
    }
}

impl Head {
    fn new(
        problem: &BackwardProblem,
        values: &Values,
        inputs: [Data<'_>; 3],
        d_out: Data<'_>,
        (number, rows): (usize, Rows),
    ) -> Result<Self, LabError> {
        let p = problem.forward();
        let values = own_values(p, values, number);
        let own = own_problem(problem, &values)?;
        let dense = |layout: &Layout| layout.dims().count().unwrap_or_default();
        let place = |layout: &Layout| number * dense(layout)..(number + 1) * dense(layout);
        let forward = own.forward();
        let places = [place(forward.q()), place(forward.k()), place(forward.v())];
        let [q, k, v] = [0, 1, 2].map(|n| part(inputs[n], places[n].clone()));
        let (inputs, d_out) = ([q, k, v], (part(d_out, place(own.d_out())), own.d_out()));
        let instance = Instance::new(forward, &values)?;
        let out = plain_output(instance, inputs, rows)?;
        let yardstick = yardstick(instance, inputs, d_out, RowTerms::Out(out.data()));
        let dtype = own.grad_dtype();
        let oracle = reference(instance, inputs, d_out);
        Ok(Self { yardstick: yardstick.map(|x| dtype.round(x)), oracle, places, problem: own })
    }

    fn judge(&self, gradients: [Data<'_>; 3]) -> Vec<Verdict> {
        let rule = Rule::of_gradients(&self.problem);
        let (oracle, yardstick) = (self.oracle.named(), self.yardstick.named());
        let one = |n: usize| {
            let mut numbers = Vec::new();
            let got = part(gradients[n], self.places[n].clone());
            flashcore_testkit::values::row(got, 0, got.len(), &mut numbers);
            let out = numbers.into_iter().map(f64::from).collect();
            let got = Answer { out, ..Answer::empty(oracle[n].1.grid) };
            rule.judge(&got, oracle[n].1, yardstick[n].1)
        };
        [0, 1, 2].map(one).into()
    }
}

/// The problem of one head of keys, by its lengths and sinks.
fn own_problem(problem: &BackwardProblem, values: &Values) -> Result<BackwardProblem, LabError> {
    let p = problem.forward();
    let layout = |heads, of: &Layout| Layout::bhsd(Dims { batch: 1, heads, ..of.dims() });
    let (q, k, v) = (layout(p.group(), p.q())?, layout(1, p.k())?, layout(1, p.v())?);
    let forward = Spec { q, k, v, out: None, ..p.spec().clone() }.with(values);
    Ok(BackwardSpec { grad_dtype: Some(problem.grad_dtype()), ..BackwardSpec::new(forward) }.parse()?)
}

/// Its lengths, sinks and seed. It is one of packed sequences, those before it empty: then it has the number, counted in
/// planes, that dropout goes by. Queries that are not used see no key after it, and keys no query.
fn own_values(p: &Problem, values: &Values, number: usize) -> Values {
    let (batch, head) = (number / p.heads_kv(), number % p.heads_kv());
    let of_batch = |used: &Option<Arc<[u32]>>| used.as_ref().map(|used| used[batch]);
    let [used_q, used_kv] = match &values.lengths {
        Lengths::Used { q, kv } => [of_batch(q), of_batch(kv)],
        _ => [None, None],
    };
    let [all_q, all_kv] = [p.seq_q(), p.seq_kv()].map(|all| all as u32);
    let (used_q, used_kv) = (used_q.unwrap_or(all_q), used_kv.unwrap_or(all_kv));
    let offsets = |ends: [u32; 3]| [vec![0; number + 1], ends.to_vec()].concat();
    let lengths = Lengths::ragged(offsets([used_q, all_q, all_q]), offsets([used_kv, used_kv, all_kv]));
    let sinks = values.sinks.as_ref().map(|sinks| sinks[head * p.group()..][..p.group()].into());
    Values { lengths, sinks, seed: values.seed, ..Values::default() }
}

/// The output of the rows that are judged, computed plainly and rounded; 0 elsewhere.
fn plain_output(instance: Instance<'_>, inputs: [Data<'_>; 3], rows: Rows) -> Result<Buffer, LabError> {
    let answer = plain::yardstick(instance, inputs, rows);
    let layout = instance.out();
    let mut out = vec![0.0; layout.span()];
    for (n, row) in answer.out.chunks(answer.grid.dim).enumerate() {
        let Position { batch, head, seq, .. } = answer.grid.position(n * answer.grid.dim);
        out[layout.row(batch, head, seq)..][..row.len()].copy_from_slice(row);
    }
    Buffer::rounded(instance.out_dtype(), &out)
}

/// Some elements of a tensor.
fn part(data: Data<'_>, range: Range<usize>) -> Data<'_> {
    match data {
        Data::F16(all) => Data::F16(&all[range]),
        Data::BF16(all) => Data::BF16(&all[range]),
        Data::F32(all) => Data::F32(&all[range]),
        other => other,
    }
}
