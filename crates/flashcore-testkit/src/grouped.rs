//! Grouped products: cases as data, the oracle in f64, and one check for every backend.
//!
//! Elements that no group reads are NaN, and so is everything between rows. The order of the checks is that of
//! [`crate::suite::Step`]; the error rule is that of [`crate::compare`], with sums in f32 as its yardstick.

use std::fmt;

use flashcore_core::{
    Backend, DType, Dims, Element, ExpertLayout, GroupedCall, GroupedInputs, GroupedProblem, GroupedSpec,
    Grouping, Layout, ProblemError,
};
use half::{bf16, f16};

use crate::{
    answer::{Answer, Grid},
    bench::{Trouble, no_memory, run_caught},
    buffers::{Buffer, never_read, same_bits, unwritten},
    compare::Rule,
    moe::plain::widened,
    rng::Rng,
    suite::{self, Outcome, Step, fail_if},
    values,
};

/// Elements after a factor that must not be read.
const TAIL: usize = 64;

/// Where groups end, relative to what is divided among them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ends {
    /// All of it, at random places, some groups being empty.
    Random,
    /// All of it to one group.
    OneGroup,
    /// Some of it to no group.
    Short,
    /// Nothing to any group.
    Nothing,
    /// Negative numbers, numbers beyond the end, and ends before earlier ones.
    Wild,
    /// All of it, at multiples of eight.
    Eighths,
}

/// One set of products, whatever the element type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Case {
    pub name: &'static str,
    pub grouping: Grouping,
    pub groups: usize,
    pub rows: usize,
    pub columns: usize,
    pub depth: usize,
    /// Whether the factors lie the other way: columns of the left, or of the right, are contiguous.
    pub turned: [bool; 2],
    pub ends: Ends,
    /// Elements by which lines, and matrices, are longer than what they hold.
    pub padding: usize,
}

/// 24 rows of 64 for four groups, whose weights lie as those of models: columns contiguous.
const USUAL: Case = Case {
    name: "usual",
    grouping: Grouping::Rows,
    groups: 4,
    rows: 24,
    columns: 48,
    depth: 64,
    turned: [false, true],
    ends: Ends::Random,
    padding: 0,
};

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, grouping, groups, rows, columns, depth, turned, ends, padding } = self;
        write!(
            f,
            "grouped {name}: {grouping:?} of {groups} groups, {rows}x{depth}x{columns}, {ends:?}, turned {turned:?}, padding {padding}"
        )
    }
}

/// All cases.
#[rustfmt::skip] // a table: one case per line
pub fn cases() -> Vec<Case> {
    let columns = Case { grouping: Grouping::Columns, columns: 40, rows: 32, turned: [false, true], ..USUAL };
    let depth = Case { grouping: Grouping::Depth { groups: 4 }, depth: 90, turned: [true, false], ..USUAL };
    let batch = Case { grouping: Grouping::Batch, groups: 3, rows: 20, ..USUAL };
    vec![
        USUAL,
        Case { name: "rows of the right factor", turned: [false, false], ..USUAL },
        Case { name: "one group", groups: 1, ends: Ends::OneGroup, ..USUAL },
        Case { name: "one row", rows: 1, ..USUAL },
        Case { name: "no row", rows: 0, ..USUAL },
        Case { name: "all to one", ends: Ends::OneGroup, rows: 70, ..USUAL },
        Case { name: "rows of nobody", ends: Ends::Short, rows: 40, padding: 8, ..USUAL },
        Case { name: "nothing to anybody", ends: Ends::Nothing, ..USUAL },
        Case { name: "wild offsets", ends: Ends::Wild, groups: 9, rows: 50, ..USUAL },
        Case { name: "many groups", groups: 70, rows: 90, columns: 16, depth: 24, ..USUAL },
        Case { name: "many rows", rows: 300, groups: 2, columns: 136, depth: 136, ..USUAL },
        Case { name: "many rows, turned", rows: 300, groups: 2, columns: 72, depth: 72, turned: [false, false], padding: 8, ..USUAL },
        Case { name: "odd extents", rows: 19, columns: 27, depth: 37, padding: 3, ..USUAL },
        Case { name: "odd extents, turned", rows: 19, columns: 27, depth: 37, turned: [true, false], ..USUAL },
        Case { name: "no depth", depth: 0, ..USUAL },
        Case { name: "columns", ..columns },
        Case { name: "wild offsets of columns", ends: Ends::Wild, groups: 7, columns: 56, ..columns },
        Case { name: "columns of nobody", ends: Ends::Short, padding: 8, ..columns },
        Case { name: "many columns", columns: 270, rows: 72, groups: 2, ..columns },
        Case { name: "depth", ..depth },
        Case { name: "wild offsets of depth", ends: Ends::Wild, grouping: Grouping::Depth { groups: 8 }, groups: 8, padding: 8, ..depth },
        Case { name: "depth of nobody", ends: Ends::Short, ..depth },
        Case { name: "long depth", depth: 700, rows: 16, columns: 24, grouping: Grouping::Depth { groups: 3 }, groups: 3, ..depth },
        Case { name: "depth of many rows", depth: 170, rows: 136, columns: 72, ..depth },
        Case { name: "depth of many rows and of nobody", ends: Ends::Short, depth: 140, rows: 72, columns: 72, padding: 8, ..depth },
        Case { name: "depth of contiguous rows", ends: Ends::Eighths, turned: [false, true], ..depth },
        Case { name: "batch", ..batch },
        Case { name: "batch, turned", turned: [true, false], rows: 24, padding: 8, ..batch },
        Case { name: "batch of many rows, turned", turned: [true, false], rows: 136, columns: 72, depth: 72, ..batch },
        Case { name: "one dense product", groups: 1, rows: 150, columns: 136, depth: 200, ..batch },
    ]
}

/// The `index`-th random case of a seed, which GPUs take.
pub fn random(seed: u64, index: u64) -> Case {
    let mut rng = Rng::new(seed.wrapping_mul(0x2000_0003).wrapping_add(index));
    let groups = rng.pick(&[1, 2, 3, 5, 8, 33]);
    let eights = [8, 16, 40, 64, 72, 136, 200];
    let grouping = rng.pick(&[
        Grouping::Batch,
        Grouping::Rows,
        Grouping::Rows,
        Grouping::Columns,
        Grouping::Depth { groups },
    ]);
    let (right, both) = (rng.one_in(2), rng.one_in(2));
    Case {
        name: "random",
        grouping,
        groups,
        rows: if grouping == Grouping::Rows { rng.range(0..=150) } else { rng.pick(&eights) },
        columns: if grouping == Grouping::Columns { rng.range(0..=150) } else { rng.pick(&eights) },
        depth: if matches!(grouping, Grouping::Depth { .. }) {
            rng.range(0..=200)
        } else {
            rng.pick(&eights)
        },
        // What offsets divide must not be what is contiguous.
        turned: match grouping {
            Grouping::Batch => [both, right],
            Grouping::Rows => [false, right],
            Grouping::Columns => [both, true],
            Grouping::Depth { .. } => [true, false],
        },
        ends: rng.pick(&[Ends::Random, Ends::Random, Ends::OneGroup, Ends::Short, Ends::Wild, Ends::Nothing]),
        padding: rng.pick(&[0, 0, 8]),
    }
}

impl Case {
    /// The case as a problem.
    pub fn problem(&self, dtype: DType) -> Result<GroupedProblem, ProblemError> {
        let Self { grouping, groups, rows, columns, depth, .. } = *self;
        let of = |operand: usize| match grouping {
            Grouping::Batch => groups,
            Grouping::Rows if operand == 1 => groups,
            Grouping::Columns if operand == 0 => groups,
            _ => 1,
        };
        let a = self.factor([of(0), rows, depth], self.turned[0])?;
        let b = self.factor([of(1), depth, columns], self.turned[1])?;
        let matrices = if matches!(grouping, Grouping::Rows | Grouping::Columns) { 1 } else { groups };
        let line = columns + self.padding;
        let strides = [rows * line + self.padding, 0, line, 1];
        let out = Layout::strided(Dims::new(matrices, 1, rows, columns), strides)?;
        GroupedSpec { out: Some(out), ..GroupedSpec::new(dtype, a, b, grouping) }.parse()
    }

    fn factor(
        &self,
        [matrices, rows, columns]: [usize; 3],
        turned: bool,
    ) -> Result<ExpertLayout, ProblemError> {
        let (outer, inner) = if turned { (columns, rows) } else { (rows, columns) };
        let line = inner + self.padding;
        let each = outer * line + self.padding;
        let strides = if turned { [each, 1, line] } else { [each, line, 1] };
        ExpertLayout::strided([matrices, rows, columns], strides)
    }

    fn offsets(&self, problem: &GroupedProblem, rng: &mut Rng) -> Option<Vec<i32>> {
        let (all, groups) = (problem.divided() as i32, problem.groups());
        let mut any = |most: i32| rng.range(0..=most as usize) as i32;
        let mut ends: Vec<i32> = (0..groups).map(|_| any(all)).collect();
        ends.sort_unstable();
        match self.ends {
            Ends::Random => ends[groups - 1] = all,
            Ends::OneGroup => (0..groups).for_each(|n| ends[n] = if n < groups / 2 { 0 } else { all }),
            Ends::Short => ends.iter_mut().for_each(|end| *end /= 2),
            Ends::Nothing => ends.fill(0),
            Ends::Wild => {
                let wild = [i32::MIN, -1, all / 2, i32::MAX, all / 3, all, 0];
                ends = (0..groups).map(|n| wild[n % wild.len()]).collect();
                ends.rotate_left(any(2) as usize % groups.max(1));
            }
            Ends::Eighths => {
                ends.iter_mut().for_each(|end| *end = *end / 8 * 8);
                ends[groups - 1] = all;
            }
        }
        (problem.grouping() != Grouping::Batch).then_some(ends)
    }
}

/// Runs every case on a backend, each with every one of `dtypes`, and says what failed.
pub fn failures(backend: &dyn Backend, dtypes: &[DType], seed: u64) -> Vec<String> {
    suite::failures(&cases(), dtypes, |case, dtype| check(backend, case, dtype, seed))
}

/// Checks one case on one backend.
pub fn check(backend: &dyn Backend, case: &Case, dtype: DType, seed: u64) -> Outcome {
    let problem = match case.problem(dtype) {
        Ok(problem) => problem,
        Err(error) => return Outcome::failed(Step::Launch, format!("the case is refused: {error}")),
    };
    let checked = match dtype {
        DType::F16 => Products::<f16>::new(case, problem, seed).check(backend),
        DType::BF16 => Products::<bf16>::new(case, problem, seed).check(backend),
        DType::F32 => Products::<f32>::new(case, problem, seed).check(backend),
        other => Err(Outcome::Skipped(format!("the testkit does not know {other}"))),
    };
    checked.err().unwrap_or(Outcome::Passed)
}

/// The tensors of a call.
struct Products<T> {
    problem: GroupedProblem,
    a: Vec<T>,
    b: Vec<T>,
    offsets: Option<Vec<i32>>,
}

impl<T: Element> Products<T> {
    fn new(case: &Case, problem: GroupedProblem, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let offsets = case.offsets(&problem, &mut rng);
        let mut products =
            Self { problem, a: filled(problem.a(), &mut rng), b: filled(problem.b(), &mut rng), offsets };
        products.spoil();
        products
    }

    /// What no group reads becomes NaN.
    fn spoil(&mut self) {
        let (problem, owners) = (self.problem, self.owners());
        let nobody = |n: usize| owners[n].is_none();
        let spoil = |data: &mut [T], layout: &ExpertLayout, [rows, cols]: [bool; 2]| {
            for (row, col) in (0..layout.rows()).flat_map(|row| (0..layout.cols()).map(move |col| (row, col)))
            {
                if rows && nobody(row) || cols && nobody(col) {
                    data[layout.at(0, row, col)] = never_read();
                }
            }
        };
        let unused = |data: &mut [T], layout: &ExpertLayout| {
            for n in (0..layout.experts()).filter(|n| !owners.contains(&Some(*n))) {
                for (row, col) in
                    (0..layout.rows()).flat_map(|row| (0..layout.cols()).map(move |col| (row, col)))
                {
                    data[layout.at(n, row, col)] = never_read();
                }
            }
        };
        match problem.grouping() {
            Grouping::Batch => {}
            Grouping::Rows => {
                spoil(&mut self.a, problem.a(), [true, false]);
                unused(&mut self.b, problem.b());
            }
            Grouping::Columns => {
                spoil(&mut self.b, problem.b(), [false, true]);
                unused(&mut self.a, problem.a());
            }
            Grouping::Depth { .. } => {
                spoil(&mut self.a, problem.a(), [false, true]);
                spoil(&mut self.b, problem.b(), [true, false]);
            }
        }
    }

    /// The group of each row, column or element of depth that is divided: the first one that ends after it, where no
    /// earlier end was beyond.
    fn owners(&self) -> Vec<Option<usize>> {
        let offsets = self.offsets.as_deref().unwrap_or(&[]);
        let owner = |n: usize| offsets.iter().position(|&end| i64::from(end) > n as i64);
        (0..self.problem.divided()).map(owner).collect()
    }

    fn inputs(&self) -> GroupedInputs<'_> {
        GroupedInputs { a: T::erase(&self.a), b: T::erase(&self.b), offsets: self.offsets.as_deref() }
    }

    fn check(&self, backend: &dyn Backend) -> Result<(), Outcome> {
        let first = self.run(backend)?;
        let unwritten = first.first_unwritten_row();
        fail_if(Step::Sanity, unwritten.map(|row| format!("row {row} was not written")))?;
        fail_if(Step::Correctness, self.first_wrong(&first))?;
        let again = self.run(backend)?;
        let same = first.slice().iter().zip(again.slice()).all(|(&a, &b)| same_bits(a, b));
        fail_if(Step::Determinism, (!same).then(|| "a second run has other bits".to_owned()))?;
        let disturbed = first.first_disturbed().or_else(|| again.first_disturbed());
        fail_if(Step::Isolation, disturbed.map(|at| format!("element {at} outside of all rows was written")))
    }

    fn run(&self, backend: &dyn Backend) -> Result<Buffer<T>, Trouble> {
        let mut out = Buffer::<T>::filled(*self.problem.out(), 0, unwritten()).ok_or_else(no_memory)?;
        let mut call = GroupedCall::bind(&self.problem, self.inputs(), T::erase_mut(out.slice_mut()))?;
        run_caught(|| backend.grouped(&mut call))?;
        Ok(out)
    }

    fn first_wrong(&self, out: &Buffer<T>) -> Option<String> {
        let Dims { batch, seq, dim, .. } = self.problem.out().dims();
        let grid = Grid { batch, heads: 1, rows: seq, step: 1, dim: dim.max(1) };
        let answer = |out: Vec<f64>| Answer { out, ..Answer::empty(grid) };
        let got =
            values::gather(T::erase(out.slice()), self.problem.out()).into_iter().map(f64::from).collect();
        let owners = self.owners();
        let nobodys = |row: usize| self.problem.grouping() == Grouping::Rows && owners[row].is_none();
        let sees_nothing = (0..batch * seq).map(|row| nobodys(row % seq)).collect();
        let oracle = Answer { sees_nothing, ..answer(self.plain(|x| x)) };
        let yardstick = answer(self.plain(|x| f64::from(x as f32)));
        let rounded = yardstick.out.iter().map(|&x| self.problem.dtype().round(x)).collect();
        let verdict = Rule::new(self.problem.dtype(), 2.0).judge(&answer(got), &oracle, &answer(rounded));
        (!verdict.pass()).then(|| verdict.to_string())
    }

    /// Every element of the result, each sum rounded as `round` does.
    fn plain(&self, round: impl Fn(f64) -> f64) -> Vec<f64> {
        let (problem, owners) = (&self.problem, self.owners());
        let [a, b] = [&self.a, &self.b].map(|data| widened(T::erase(data)));
        let Dims { batch, seq, dim, .. } = problem.out().dims();
        let mut out = Vec::new();
        for (n, row, col) in
            (0..batch).flat_map(|n| (0..seq).flat_map(move |row| (0..dim).map(move |col| (n, row, col))))
        {
            let (left, right) = match problem.grouping() {
                Grouping::Batch => (Some(n), Some(n)),
                Grouping::Rows => (Some(0), owners[row]),
                Grouping::Columns => (owners[col], Some(0)),
                Grouping::Depth { .. } => (Some(0), Some(0)),
            };
            let mut sum = 0.0;
            if let Some((left, right)) = left.zip(right) {
                let by_depth = matches!(problem.grouping(), Grouping::Depth { .. });
                for k in (0..problem.depth()).filter(|&k| !by_depth || owners[k] == Some(n)) {
                    let product = f64::from(a[problem.a().at(left, row, k)])
                        * f64::from(b[problem.b().at(right, k, col)]);
                    sum = round(sum + product);
                }
            }
            out.push(sum);
        }
        out
    }
}

/// Matrices whose products are of the size of 1, NaN between them.
fn filled<T: Element>(layout: &ExpertLayout, rng: &mut Rng) -> Vec<T> {
    let mut data = vec![never_read::<T>(); layout.span() + TAIL];
    for n in 0..layout.experts() {
        for row in 0..layout.rows() {
            for col in 0..layout.cols() {
                data[layout.at(n, row, col)] = T::from_f32(0.5 * rng.normal());
            }
        }
    }
    data
}
