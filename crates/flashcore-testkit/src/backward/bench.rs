//! Gradients of one case in memory: tensors between guard bands, ready to run on any backend any number of times.
//!
//! Output and LSE come from the oracle, rounded, so an error in forward is not an error in backward.

use flashcore_core::{
    Backend, BackwardCall, BackwardInputs, BackwardProblem, Data, Dims, Element, GradientsMut, Instance,
    Layout, RowSums, RowTerms,
};

use super::{
    Case,
    plain::{self, Gradients},
};
use crate::{
    answer::{Answer, Grid, Position},
    bench::{self, Trouble, no_memory, run_caught},
    buffers::{Buffer, never_read, same_bits, unwritten},
    rng::Rng,
    values,
};

/// A problem with inputs in guarded memory.
#[derive(Debug)]
pub struct Bench<T> {
    problem: BackwardProblem,
    forward: bench::Bench<T>,
    out: Buffer<T>,
    d_out: Buffer<T>,
    lse: Vec<f32>,
    /// Exact row sums, rounded to f32.
    sums: Vec<f32>,
    seed: u64,
}

impl<T: Element> Bench<T> {
    /// The tensors of `case`, filled from `seed`.
    pub fn new(case: &Case, seed: u64) -> Result<Self, Trouble> {
        let inputs = case
            .forward
            .inputs
            .values([case.forward.q, case.forward.k, case.forward.v()], &mut Rng::new(seed));
        let mut rng = Rng::new(seed ^ 0xd0);
        let count = case.forward.out().count().unwrap_or(0);
        let d_out: Vec<f32> = (0..count).map(|_| rng.normal() * case.loss).collect();
        Self::holding(case, seed, &inputs, &d_out)
    }

    /// The tensors of `case`, holding the given values (dense batch, heads, sequence, dim).
    pub fn holding(case: &Case, seed: u64, inputs: &[Vec<f32>; 3], d_out: &[f32]) -> Result<Self, Trouble> {
        let forward = bench::Bench::<T>::holding(&case.forward, seed, inputs)?;
        let problem = case.problem(T::DTYPE)?;
        let answer = forward.oracle();
        let fill = |layout: &Layout, values: &[f32]| {
            let mut buffer = Buffer::filled(*layout, 0, never_read()).ok_or_else(no_memory)?;
            values::scatter(values, buffer.slice_mut(), layout, |batch, seq| forward.is_used(batch, seq));
            Ok::<_, Trouble>(buffer)
        };
        let narrow = |values: &[f64]| -> Vec<f32> { values.iter().map(|&x| x as f32).collect() };
        let (out, d_out) =
            (fill(problem.forward().out(), &narrow(&answer.out))?, fill(problem.d_out(), d_out)?);
        let held = values::gather(T::erase(d_out.slice()), problem.d_out());
        let dim = answer.grid.dim;
        let row_sum = |row: usize| {
            let products = answer.out[row * dim..][..dim].iter().zip(&held[row * dim..]);
            products.map(|(a, &b)| a * f64::from(b)).sum::<f64>() as f32
        };
        // What belongs to rows beyond the used ones is never looked at.
        let used = |row: usize| {
            let Position { batch, seq, .. } = answer.grid.position(row * dim);
            forward.is_used(batch, seq)
        };
        let known = |row: usize, value: f32| if used(row) { value } else { f32::NAN };
        let rows = 0..answer.lse.len();
        let sums = rows.clone().map(|row| known(row, row_sum(row))).collect();
        let lse = rows.map(|row| known(row, answer.lse[row] as f32)).collect();
        Ok(Self { problem, forward, out, d_out, lse, sums, seed })
    }

    /// The problem.
    pub const fn problem(&self) -> &BackwardProblem {
        &self.problem
    }

    /// What was computed forward, with its lengths and sinks.
    pub fn instance(&self) -> Instance<'_> {
        self.forward.instance()
    }

    fn d_out(&self) -> (Data<'_>, &Layout) {
        (T::erase(self.d_out.slice()), self.problem.d_out())
    }

    fn terms(&self) -> RowTerms<'_> {
        match self.problem.row_sums() {
            RowSums::Computed => RowTerms::Out(T::erase(self.out.slice())),
            RowSums::Given => RowTerms::Sums(&self.sums),
        }
    }

    /// The LSE of each row.
    pub fn lse(&self) -> &[f32] {
        &self.lse
    }

    /// The exact sum of each row of the output times its gradient, rounded to f32.
    pub fn sums(&self) -> &[f32] {
        &self.sums
    }

    /// What the gradients should be.
    pub fn oracle(&self) -> Gradients {
        plain::reference(self.instance(), self.forward.data(), self.d_out())
    }

    /// What a plain computation in the tensors' own precision makes of them.
    pub fn yardstick(&self) -> Gradients {
        plain::yardstick(self.instance(), self.forward.data(), self.d_out(), self.terms())
    }

    /// Runs the problem into fresh outputs: poisoned ones, or N(0, 1) where gradients are added to what is there.
    pub fn run<G: Element>(&self, backend: &dyn Backend) -> Result<Run<G>, Trouble> {
        self.run_with(backend, self.lse(), self.terms())
    }

    /// Like [`Self::run`] with another LSE and other row terms.
    pub fn run_with<G: Element>(
        &self,
        backend: &dyn Backend,
        lse: &[f32],
        terms: RowTerms<'_>,
    ) -> Result<Run<G>, Trouble> {
        let problem = &self.problem;
        let mut run = Run::new(problem, self.seed)?;
        let inputs =
            BackwardInputs { qkv: self.forward.data(), lse, terms, d_out: T::erase(self.d_out.slice()) };
        let heads = problem.forward().heads_q();
        let [dq, dk, dv] = &mut run.grads;
        let grads = GradientsMut {
            qkv: [dq, dk, dv].map(|buffer| G::erase_mut(buffer.slice_mut())),
            sinks: run.d_sinks.as_mut().map(|sinks| &mut sinks.slice_mut()[..heads]),
        };
        let mut call = BackwardCall::bind(problem, self.forward.values(), inputs, grads)?;
        run_caught(|| backend.backward(&mut call))?;
        Ok(run)
    }

    /// Says what a run changed in the inputs or around them.
    pub fn disturbed(&self) -> Option<String> {
        let around = |name, buffer: &Buffer<T>| {
            buffer.first_disturbed().map(|at| format!("the memory around {name} was written at element {at}"))
        };
        self.forward.disturbed().or_else(|| around("out", &self.out)).or_else(|| around("d_out", &self.d_out))
    }
}

/// The gradients of one run.
#[derive(Debug)]
pub struct Run<G> {
    /// Those of Q, K and V.
    pub grads: [Buffer<G>; 3],
    /// Those of the sinks, where there are any.
    pub d_sinks: Option<Buffer<f32>>,
    /// What was there before, where gradients are added to it.
    old: Option<[Vec<f32>; 4]>,
}

const NAMES: [&str; 3] = ["dq", "dk", "dv"];

impl<G: Element> Run<G> {
    fn new(problem: &BackwardProblem, seed: u64) -> Result<Self, Trouble> {
        let heads = problem.forward().heads_q();
        let mut d_sinks = match problem.forward().sinks() {
            Some(_) => {
                let layout = Layout::bhsd(Dims::new(1, 1, 1, heads))?;
                Some(Buffer::filled(layout, 0, unwritten()).ok_or_else(no_memory)?)
            }
            None => None,
        };
        let fresh = |layout: &Layout| Buffer::filled(*layout, 1, unwritten()).ok_or_else(no_memory);
        let mut grads = [fresh(problem.dq())?, fresh(problem.dk())?, fresh(problem.dv())?];
        if !problem.accumulate() {
            return Ok(Self { grads, d_sinks, old: None });
        }
        let mut rng = Rng::new(seed ^ 0xacc);
        let mut draw = |len: usize| -> Vec<f32> { (0..len).map(|_| rng.normal()).collect() };
        let old = [problem.dq(), problem.dk(), problem.dv()].map(|l| draw(l.dims().count().unwrap_or(0)));
        for (buffer, values) in grads.iter_mut().zip(&old) {
            let layout = *buffer.layout();
            values::scatter(values, buffer.slice_mut(), &layout, |_, _| true);
        }
        let [dq, dk, dv] = old;
        let sinks = draw(heads);
        d_sinks.iter_mut().for_each(|buffer| buffer.slice_mut()[..heads].copy_from_slice(&sinks));
        Ok(Self { grads, d_sinks, old: Some([dq, dk, dv, sinks]) })
    }

    /// The gradients of Q, K and V with their names.
    pub fn named(&self) -> [(&'static str, &Buffer<G>); 3] {
        let [dq, dk, dv] = &self.grads;
        [(NAMES[0], dq), (NAMES[1], dk), (NAMES[2], dv)]
    }

    /// The gradients in logical order.
    pub fn gradients(&self, problem: &BackwardProblem) -> Gradients {
        let answer = |buffer: &Buffer<G>| {
            let Dims { batch, heads, seq, dim } = buffer.layout().dims();
            let out = values::gather(G::erase(buffer.slice()), buffer.layout());
            let grid = Grid { batch, heads, rows: seq, step: 1, dim };
            super::bare(grid, out.into_iter().map(f64::from).collect())
        };
        let heads = problem.forward().heads_q();
        let sinks = self.d_sinks.as_ref().map_or(vec![0.0; heads], |sinks| sinks.slice()[..heads].to_vec());
        let grid = Grid { batch: 1, heads: 1, rows: 1, step: 1, dim: heads };
        let d_sinks = super::bare(grid, sinks.into_iter().map(f64::from).collect());
        let [dq, dk, dv] = &self.grads;
        Gradients { dq: answer(dq), dk: answer(dk), dv: answer(dv), d_sinks }
    }

    /// What was expected, on top of what was there: a row that nothing adds to holds exactly that.
    pub(super) fn without_old(&self, name: &str, [got, oracle, yardstick]: [&Answer; 3]) -> [Answer; 3] {
        let mut answers = [got.clone(), oracle.clone(), yardstick.clone()];
        let index = NAMES.iter().position(|other| *other == name).unwrap_or(3);
        let Some(old) = self.old.as_ref().map(|old| &old[index]) else { return answers };
        let dim = got.grid.dim;
        for (n, &old) in old.iter().enumerate() {
            let old = f64::from(old);
            if oracle.sees_nothing[n / dim] {
                answers[0].out[n] -= old;
            } else {
                answers[1].out[n] += old;
                answers[2].out[n] += old;
            }
        }
        answers
    }

    /// Says what was written outside the outputs' rows.
    pub fn overrun(&self) -> Option<String> {
        let written = |(name, at)| format!("element {at} of {name} lies outside its rows and was written");
        let found =
            self.named().into_iter().find_map(|(name, buffer)| Some((name, buffer.first_disturbed()?)));
        let sinks = || Some(("d_sinks", self.d_sinks.as_ref()?.first_disturbed()?));
        found.or_else(sinks).map(written)
    }

    /// Says where another run's bits differ.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let differ = |a: &[G], b: &[G]| a.iter().zip(b).position(|(&a, &b)| !same_bits(a, b));
        let found = self.named().into_iter().zip(&other.grads).find_map(|((name, a), b)| {
            differ(a.slice(), b.slice())
                .map(|at| format!("element {at} of {name} has other bits in a second run"))
        });
        let sinks = self.d_sinks.as_ref().zip(other.d_sinks.as_ref());
        let differ_sinks =
            sinks.is_some_and(|(a, b)| a.slice().iter().zip(b.slice()).any(|(&a, &b)| !same_bits(a, b)));
        found.or_else(|| differ_sinks.then(|| "d_sinks has other bits in a second run".to_owned()))
    }
}
