//! One case in memory: its tensors between guard bands, ready to run on any backend any number of times.
//!
//! [`crate::suite`] and [`crate::properties`] build benches; a bench calls the backend and the oracle.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
};

use flashcore_core::{
    Backend, BackendError, Data, Dims, Element, HostCall, Instance, Layout, Problem, ProblemError, Ran,
    Sequences, Values,
};

use crate::{
    answer::{Answer, Rows},
    buffers::{Buffer, never_read, same_bits, unwritten},
    cases::Case,
    pages, plain,
    rng::Rng,
    values,
};

/// A problem with inputs in guarded memory.
#[derive(Debug)]
pub struct Bench<T> {
    problem: Problem,
    bound: Values,
    inputs: [Buffer<T>; 3],
    /// What the inputs hold, to see whether a backend changed them.
    held: [Vec<f32>; 3],
    out_shift: usize,
}

/// Why a case could not be set up or run.
#[derive(Debug)]
pub enum Trouble {
    /// Not on this machine or not on this backend.
    Skipped(String),
    /// The backend should have computed it and did not.
    Failed(String),
}

impl From<ProblemError> for Trouble {
    fn from(error: ProblemError) -> Self {
        Self::Failed(format!("the case is refused: {error}"))
    }
}

impl From<BackendError> for Trouble {
    fn from(error: BackendError) -> Self {
        match error {
            BackendError::Unsupported { .. } | BackendError::Unavailable { .. } => {
                Self::Skipped(error.to_string())
            }
            BackendError::Failed { ref source, .. } => Self::Failed(format!("{error}: {source}")),
            _ => Self::Failed(error.to_string()),
        }
    }
}

pub(crate) fn no_memory() -> Trouble {
    Trouble::Skipped("this machine has no memory for the tensors".to_owned())
}

impl<T: Element> Bench<T> {
    /// The tensors of `case`, filled from `seed`.
    pub fn new(case: &Case, seed: u64) -> Result<Self, Trouble> {
        let values = case.inputs.values([case.q, case.k, case.v()], &mut Rng::new(seed));
        Self::holding(case, seed, &values)
    }

    /// The tensors of `case`, holding the given values (dense batch, heads, sequence, dim).
    ///
    /// What lies around the tensors and beyond used lengths is NaN or Inf.
    pub fn holding(case: &Case, seed: u64, values: &[Vec<f32>; 3]) -> Result<Self, Trouble> {
        let (problem, bound) = (case.problem(T::DTYPE)?, case.values(seed));
        let instance = Instance::new(&problem, &bound)?;
        let [q, k, v, (_, out_shift)] = case.places()?;
        let fill = |(layout, shift): (Layout, usize), index: usize| {
            let mut buffer = Buffer::filled(layout, shift, never_read()).ok_or_else(no_memory)?;
            let used = |batch, seq| is_used(instance, index, batch, seq);
            let beyond = beyond_used(layout.dims());
            // Rows in use come last: where strides of 0 make both share memory, they win.
            values::scatter(&beyond, buffer.slice_mut(), &layout, |batch, seq| !used(batch, seq));
            values::scatter(&values[index], buffer.slice_mut(), &layout, used);
            Ok::<_, Trouble>(buffer)
        };
        let inputs = [fill(q, 0)?, fill(k, 1)?, fill(v, 2)?];
        let held = [0, 1, 2].map(|i| values::gather(T::erase(inputs[i].slice()), inputs[i].layout()));
        Ok(Self { problem, bound, inputs, held, out_shift })
    }

    /// The problem.
    pub const fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The problem with its lengths and sinks.
    pub fn instance(&self) -> Instance<'_> {
        Instance::new(&self.problem, &self.bound).expect("checked when the bench was made")
    }

    /// The inputs as the oracle reads them.
    pub fn data(&self) -> [Data<'_>; 3] {
        [0, 1, 2].map(|i| T::erase(self.inputs[i].slice()))
    }

    /// What the problem's result should be.
    pub fn oracle(&self) -> Answer {
        plain::reference(self.instance(), self.data(), Rows::ALL)
    }

    /// What a plain computation in the tensors' own precision makes of it.
    pub fn yardstick(&self) -> Answer {
        plain::yardstick(self.instance(), self.data(), Rows::ALL)
    }

    /// Runs the problem into fresh, poisoned outputs; a panic of the backend is a failure.
    pub fn run(&self, backend: &dyn Backend, want_lse: bool) -> Result<Run<T>, Trouble> {
        let rows = Layout::bhsd(Dims { dim: 1, ..self.problem.q().dims() })?;
        let mut out =
            Buffer::filled(*self.problem.out(), self.out_shift, unwritten()).ok_or_else(no_memory)?;
        let mut lse = Buffer::filled(rows, 0, unwritten()).ok_or_else(no_memory)?;
        let [q, k, v] = &self.inputs;
        let wanted = want_lse.then(|| &mut lse.slice_mut()[..self.problem.rows()]);
        let inputs = [q.slice(), k.slice(), v.slice()];
        let mut call = HostCall::bind(&self.problem, &self.bound, inputs, out.slice_mut(), wanted)?;
        let ran = run_caught(|| backend.forward(&mut call))?;
        Ok(Run { out, lse: want_lse.then_some(lse), kernel: ran.kernel })
    }

    /// The lengths and sinks.
    pub const fn values(&self) -> &Values {
        &self.bound
    }

    /// Whether a row of Q, and of the output, takes part in the problem.
    pub fn is_used(&self, batch: usize, seq: usize) -> bool {
        is_used(self.instance(), 0, batch, seq)
    }

    /// Says what a run changed in the inputs or around them.
    pub fn disturbed(&self) -> Option<String> {
        let names = ["q", "k", "v"];
        for ((buffer, held), name) in self.inputs.iter().zip(&self.held).zip(names) {
            if let Some(index) = buffer.first_disturbed() {
                return Some(format!("the memory around {name} was written at element {index}"));
            }
            let now = values::gather(T::erase(buffer.slice()), buffer.layout());
            if now.iter().zip(held).any(|(now, held)| now.to_bits() != held.to_bits()) {
                return Some(format!("{name} was changed"));
            }
        }
        None
    }
}

/// The outputs of one run.
#[derive(Debug)]
pub struct Run<T> {
    /// The output tensor.
    pub out: Buffer<T>,
    /// The LSE of each row, if asked for.
    pub lse: Option<Buffer<f32>>,
    /// The kernel that ran.
    pub kernel: String,
}

impl<T: Element> Run<T> {
    /// The result in logical order.
    pub fn answer(&self, problem: &Problem) -> Answer {
        let lse = self.lse.as_ref().map(|lse| &lse.slice()[..problem.rows()]);
        Answer::gather(problem, T::erase(self.out.slice()), lse, Rows::ALL)
    }

    /// The first row, counted in the order batch, heads, sequence, that was not written completely.
    pub fn unwritten_row(&self) -> Option<usize> {
        let lse = || self.lse.as_ref().and_then(Buffer::first_unwritten_row);
        self.out.first_unwritten_row().or_else(lse)
    }

    /// Says what was written outside the outputs' rows.
    pub fn overrun(&self) -> Option<String> {
        let lse = self.lse.as_ref().and_then(Buffer::first_disturbed);
        let written =
            |name| move |index| format!("element {index} of {name} lies outside its rows and was written");
        self.out.first_disturbed().map(written("out")).or_else(|| lse.map(written("lse")))
    }

    /// The first row whose bits differ from another run's.
    pub fn first_difference(&self, other: &Self) -> Option<usize> {
        let lse = self.lse.as_ref().zip(other.lse.as_ref()).and_then(|(a, b)| differing_row(a, b));
        differing_row(&self.out, &other.out).or(lse)
    }
}

fn differing_row<T: Element>(a: &Buffer<T>, b: &Buffer<T>) -> Option<usize> {
    let dim = a.layout().dims().dim;
    let (mut row, mut differing) = (0, None);
    values::for_each_row(a.layout(), |_, start| {
        let [a, b] = [a, b].map(|buffer| &buffer.slice()[start..start + dim]);
        if differing.is_none() && a.iter().zip(b).any(|(&a, &b)| !same_bits(a, b)) {
            differing = Some(row);
        }
        row += 1;
    });
    differing
}

/// Whether a row of Q (operand 0), K or V takes part in the problem.
pub(crate) fn is_used(problem: Instance<'_>, operand: usize, batch: usize, seq: usize) -> bool {
    if operand > 0 && problem.pages().is_some() {
        return pages::holds_key(problem, batch, seq);
    }
    if !matches!(problem.sequences_kind(), Sequences::Used { .. }) {
        return true;
    }
    let sequence = problem.sequence(batch);
    seq < if operand == 0 { sequence.q_len } else { sequence.kv_len }
}

/// Values that must never reach a result.
fn beyond_used(dims: Dims) -> Vec<f32> {
    let hostile = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    (0..dims.count().unwrap_or(0)).map(|i| hostile[i % 3]).collect()
}

/// Runs a backend; its panic is a failure.
pub(crate) fn run_caught(run: impl FnOnce() -> Result<Ran, BackendError>) -> Result<Ran, Trouble> {
    let ran = catch_unwind(AssertUnwindSafe(run));
    let failed = |panic: Box<dyn Any + Send>| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Trouble::Failed(format!("the backend panicked: {text}"))
    };
    Ok(ran.map_err(failed)??)
}
