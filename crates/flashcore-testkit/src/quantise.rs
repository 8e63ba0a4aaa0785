//! Tensors rounded to 8 bits: cases as data, means and factors in f64, and one check for every backend.
//!
//! A result is right if no float is nearer to the exact value, up to f32 rounding on the way. Unused rows hold NaN and
//! must become zeros.

use std::fmt;

use flashcore_core::{
    Backend, COUNTS, DType, Dims, E4M3, E5M2, Element, Granularity, Index, ProblemError, QuantiseCall,
    QuantiseProblem, QuantiseSpec, QuantisedMut, SMALLEST_FACTOR, turned_place,
};
use half::{bf16, f16};

use crate::{
    bench::{Trouble, no_memory, run_caught},
    buffers::{Buffer, never_read, same_bits, unwritten},
    merge::Order,
    rng::Rng,
    suite::{Outcome, Step, fail_if},
    values,
};

/// What the numbers are like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Numbers {
    /// N(0, 1), features with means of their own.
    Normal,
    /// Each head and each row another power of two.
    Uneven,
    /// Heads of zeros between others.
    Zeros,
    /// NaN and infinities of both signs among others.
    Broken,
    /// Magnitudes near the smallest factor.
    Tiny,
    /// Sums of a few overflow.
    Huge,
}

/// One tensor to be quantised, whatever the element types.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Case {
    /// Batch, heads, sequence, dim.
    pub dims: [usize; 4],
    pub order: Order,
    pub per: Granularity,
    pub group: usize,
    pub centred: bool,
    /// Whether batch entries use a part of their rows.
    pub used: bool,
    /// Whether the result is transposed.
    pub turned: bool,
    pub numbers: Numbers,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl Case {
    /// The case as a problem.
    pub fn problem(&self, dtype: DType, to: DType) -> Result<QuantiseProblem, ProblemError> {
        let [batch, heads, seq, dim] = self.dims;
        let layout = self.order.layout(Dims::new(batch, heads, seq, dim))?;
        QuantiseSpec {
            to,
            out: (!self.turned).then_some(layout),
            turned: self.turned,
            per: self.per,
            group: self.group,
            centred: self.centred,
            used: self.used.then_some(Index::I32),
            ..QuantiseSpec::new(dtype, layout)
        }
        .parse()
    }
}

/// All cases.
pub fn cases() -> Vec<Case> {
    use {Granularity::*, Numbers::*, Order::*};
    let case = |dims, per, order, numbers| Case {
        dims,
        order,
        per,
        group: 1,
        centred: false,
        used: false,
        turned: false,
        numbers,
    };
    let mut all = vec![
        case([2, 3, 40, 64], PerTensor, Dense, Normal),
        case([1, 2, 300, 128], PerTensor, Tokens, Uneven),
        Case { group: 2, ..case([2, 4, 33, 64], PerHead, Tokens, Uneven) },
        case([1, 2, 17, 96], PerHead, Padded(3), Normal),
        case([2, 2, 130, 64], PerBlock(64), Dense, Uneven),
        case([1, 3, 50, 16], PerBlock(7), Padded(1), Normal),
        case([2, 2, 70, 80], PerChannel, Tokens, Uneven),
        case([1, 1, 9, 17], PerChannel, Dense, Normal),
        case([1, 1, 5, 1], PerTensor, Dense, Normal),
        case([1, 1, 3, 520], PerBlock(2), Dense, Normal),
        case([2, 2, 0, 32], PerHead, Dense, Normal),
        case([0, 2, 8, 32], PerTensor, Dense, Normal),
    ];
    let centred = [
        case([1, 2, 200, 64], PerBlock(128), Dense, Normal),
        case([2, 1, 65, 128], PerTensor, Tokens, Uneven),
        case([1, 2, 40, 48], PerChannel, Padded(1), Broken),
        case([1, 2, 200, 32], PerHead, Tokens, Huge),
    ];
    all.extend(centred.map(|case| Case { centred: true, ..case }));
    let used = [
        case([3, 2, 140, 64], PerHead, Dense, Normal),
        case([3, 1, 140, 40], PerBlock(32), Tokens, Uneven),
        case([3, 2, 33, 64], PerChannel, Dense, Normal),
        Case { centred: true, ..case([3, 2, 140, 64], PerBlock(64), Dense, Normal) },
    ];
    all.extend(used.map(|case| Case { used: true, ..case }));
    let turned = [
        case([2, 2, 130, 64], PerChannel, Tokens, Uneven),
        Case { used: true, ..case([3, 2, 140, 256], PerChannel, Dense, Normal) },
        Case { group: 2, ..case([2, 4, 33, 48], PerHead, Tokens, Uneven) },
        case([1, 1, 128, 16], PerTensor, Padded(1), Broken),
    ];
    all.extend(turned.map(|case| Case { turned: true, ..case }));
    for numbers in [Zeros, Broken, Tiny] {
        all.push(case([2, 3, 40, 64], PerHead, Dense, numbers));
        all.push(case([1, 2, 40, 32], PerBlock(16), Tokens, numbers));
    }
    all
}

/// Runs every case on a backend and says what failed.
pub fn failures(backend: &dyn Backend, dtypes: &[DType], seed: u64) -> Vec<String> {
    let all = cases().into_iter().enumerate();
    let failed = all.flat_map(|(n, case)| {
        let to = if case.turned { DType::E4M3 } else { [DType::E4M3, DType::E5M2][n % 2] };
        dtypes.iter().filter_map(move |&dtype| {
            let outcome = check(backend, &case, [dtype, to], seed);
            (outcome != Outcome::Passed).then(|| format!("{case} {dtype} to {to}: {outcome}"))
        })
    });
    failed.collect()
}

/// Checks one case on one backend, from one type to another.
pub fn check(backend: &dyn Backend, case: &Case, [dtype, to]: [DType; 2], seed: u64) -> Outcome {
    let problem = match case.problem(dtype, to) {
        Ok(problem) => problem,
        Err(wrong) => return Outcome::failed(Step::Correctness, wrong),
    };
    check_problem(backend, &problem, case.numbers, seed)
}

/// Checks one problem on one backend.
pub fn check_problem(
    backend: &dyn Backend,
    problem: &QuantiseProblem,
    numbers: Numbers,
    seed: u64,
) -> Outcome {
    let spec = problem.spec();
    let checked = match (spec.dtype, spec.to) {
        (DType::F16, DType::E4M3) => check_as::<f16, E4M3>(backend, problem, numbers, seed),
        (DType::F16, _) => check_as::<f16, E5M2>(backend, problem, numbers, seed),
        (DType::BF16, DType::E4M3) => check_as::<bf16, E4M3>(backend, problem, numbers, seed),
        (DType::BF16, _) => check_as::<bf16, E5M2>(backend, problem, numbers, seed),
        (_, DType::E4M3) => check_as::<f32, E4M3>(backend, problem, numbers, seed),
        (..) => check_as::<f32, E5M2>(backend, problem, numbers, seed),
    };
    checked.err().unwrap_or(Outcome::Passed)
}

fn check_as<T: Element, N: Element>(
    backend: &dyn Backend,
    problem: &QuantiseProblem,
    numbers: Numbers,
    seed: u64,
) -> Result<(), Outcome> {
    let bench = Bench::<T>::new(problem, numbers, seed);
    let first = bench.run::<N>(backend)?;
    let unwritten = first.out.first_unwritten_row().map(|row| format!("row {row} was not written"));
    fail_if(Step::Correctness, unwritten)?;
    fail_if(Step::Correctness, bench.first_wrong(&first))?;
    let again = bench.run::<N>(backend)?;
    let same = first.out.slice().iter().zip(again.out.slice()).all(|(&a, &b)| same_bits(a, b))
        && first.factors == again.factors
        && first.means == again.means;
    fail_if(Step::Determinism, (!same).then(|| "two runs differ".to_owned()))?;
    let disturbed = first.out.first_disturbed();
    fail_if(Step::Isolation, disturbed.map(|at| format!("element {at} lies outside and was written")))
}

/// What a backend wrote.
struct Written<N> {
    out: Buffer<N>,
    factors: Vec<f32>,
    means: Vec<f32>,
}

/// The tensor of a case.
struct Bench<'a, T> {
    problem: &'a QuantiseProblem,
    x: Vec<T>,
    used: Option<Vec<u32>>,
}

impl<'a, T: Element> Bench<'a, T> {
    fn new(problem: &'a QuantiseProblem, numbers: Numbers, seed: u64) -> Self {
        let (dims, mut rng) = (problem.dims(), Rng::new(seed));
        let lengths = || (0..dims.batch).map(|n| [dims.seq / 2 + 1, 0, dims.seq][n % 3] as u32).collect();
        let used: Option<Vec<u32>> = problem.spec().used.map(|_| lengths());
        let mut x = vec![never_read::<T>(); problem.x().span()];
        values::for_each_row(problem.x(), |[batch, head, seq], start| {
            if used.as_ref().is_some_and(|used| seq >= used[batch] as usize) {
                return;
            }
            for n in 0..dims.dim {
                x[start + n] = T::from_f32(number(numbers, &mut rng, [head, seq, n]));
            }
        });
        Self { problem, x, used }
    }

    /// Quantises into memory that holds NaN; a panic of the backend is a failure.
    fn run<N: Element>(&self, backend: &dyn Backend) -> Result<Written<N>, Trouble> {
        let mut out = Buffer::filled(*self.problem.out(), 0, unwritten::<N>()).ok_or_else(no_memory)?;
        let mut factors = vec![f32::NAN; self.problem.factors()];
        let mut means = vec![f32::NAN; self.problem.means()];
        let into = QuantisedMut {
            out: N::erase_mut(out.slice_mut()),
            factors: &mut factors,
            means: self.problem.spec().centred.then_some(&mut means[..]),
        };
        let mut call = QuantiseCall::bind(self.problem, T::erase(&self.x), self.used.as_deref(), into)?;
        run_caught(|| backend.quantise(&mut call))?;
        Ok(Written { out, factors, means })
    }

    /// The numbers of a row; none where it is not used.
    fn row(&self, [batch, _, seq]: [usize; 3], start: usize) -> Option<Vec<f64>> {
        let used = self.used.as_ref().map_or(self.problem.dims().seq, |used| used[batch] as usize);
        let row = &self.x[start..][..self.problem.dims().dim];
        (seq < used).then(|| row.iter().map(|x| f64::from(x.to_f32())).collect())
    }

    /// Means of all features, how far f32 may be from them, and the largest magnitudes of shares about these means.
    fn expected(&self) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let dims = self.problem.dims();
        let mut means = vec![0.0; dims.batch * dims.heads * dims.dim];
        let mut noise = means.clone();
        let plane = |[batch, head, _]: [usize; 3]| (batch * dims.heads + head) * dims.dim;
        let centred = self.problem.spec().centred;
        values::for_each_row(self.problem.x(), |place, start| {
            let Some(row) = self.row(place, start).filter(|_| centred) else { return };
            let rows = self.used.as_ref().map_or(dims.seq, |used| used[place[0]] as usize) as f64;
            for (n, x) in row.into_iter().enumerate().filter(|(_, x)| x.is_finite()) {
                means[plane(place) + n] += x / rows;
                // Every addition of f32 rounds a sum that is no larger than all magnitudes together.
                noise[plane(place) + n] += x.abs() * f64::from(f32::EPSILON);
            }
        });
        let mut largest = vec![0.0f64; self.problem.factors()];
        values::for_each_row(self.problem.x(), |place, start| {
            let Some(row) = self.row(place, start) else { return };
            for (n, x) in row.into_iter().enumerate().filter(|(_, x)| x.is_finite()) {
                let share = &mut largest[self.problem.factor_index(place, n)];
                *share = share.max((x - means[plane(place) + n]).abs());
            }
        });
        (means, noise, largest)
    }

    /// What is first wrong: a mean, a factor or a number.
    fn first_wrong<N: Element>(&self, written: &Written<N>) -> Option<String> {
        let (means, noise, largest) = self.expected();
        let spec = self.problem.spec();
        for (n, (&got, (&mean, &noise))) in written.means.iter().zip(means.iter().zip(&noise)).enumerate() {
            let near = (f64::from(got) - mean).abs() <= noise + 1e-6 * mean.abs();
            if !near {
                return Some(format!("mean {n} is {got} instead of {mean}"));
            }
        }
        let worst = noise.iter().copied().fold(0.0, f64::max);
        for (n, (&got, &largest)) in written.factors.iter().zip(&largest).enumerate() {
            let exact = (largest / f64::from(spec.to.largest())).max(SMALLEST_FACTOR.into());
            let near = (f64::from(got) - exact).abs() <= 1e-6 * exact + worst / f64::from(spec.to.largest());
            if !near {
                return Some(format!("factor {n} is {got} instead of {exact}"));
            }
        }
        self.first_wrong_number(written, (&means, &noise))
    }

    /// Where a number lies in the result.
    fn place_of(&self, [batch, head, seq]: [usize; 3], feature: usize) -> usize {
        let out = self.problem.out();
        match self.problem.spec().turned {
            true => out.row(batch, head, feature) + turned_place(seq),
            false => out.row(batch, head, seq) + feature,
        }
    }

    /// What is wrong with the rows behind the features of a turned result, or with the keys behind the last.
    fn first_wrong_count<N: Element>(&self, written: &Written<N>) -> Option<String> {
        let (out, dims, mut wrong) = (self.problem.out(), self.problem.dims(), None);
        if !self.problem.spec().turned {
            return None;
        }
        values::for_each_row(out, |[batch, head, row], start| {
            let counts = row.checked_sub(dims.dim).map(|n| COUNTS.get(n).map_or(0.0, |count| count.to_f32()));
            let first = if counts.is_some() { 0 } else { dims.seq };
            for place in (first..out.dims().dim).map(turned_place) {
                let got = written.out.slice()[start + place].to_f32();
                if got.to_bits() != counts.unwrap_or(0.0).to_bits() {
                    wrong = Some(format!("{got} at place {place} of row {row} of {batch}, {head}"));
                }
            }
        });
        wrong
    }

    fn first_wrong_number<N: Element>(
        &self,
        written: &Written<N>,
        (means, noise): (&[f64], &[f64]),
    ) -> Option<String> {
        let (dims, mut wrong) = (self.problem.dims(), self.first_wrong_count(written));
        values::for_each_row(self.problem.x(), |place, start| {
            let row = self.row(place, start);
            for n in 0..dims.dim {
                let got = f64::from(written.out.slice()[self.place_of(place, n)].to_f32());
                let at = (place[0] * dims.heads + place[1]) * dims.dim + n;
                let factor = f64::from(written.factors[self.problem.factor_index(place, n)]);
                let exact = row.as_ref().map_or(0.0, |row| (row[n] - means[at]) / factor);
                if wrong.is_none() && !is_nearest(N::DTYPE, got, exact, noise[at] / factor) {
                    wrong = Some(format!("{got} instead of {exact} at {place:?}, feature {n}"));
                }
            }
        });
        wrong
    }
}

/// Whether no float is nearer to a number than `got`, but for what f32 rounds: NaN stays, what is too large saturates.
fn is_nearest(to: DType, got: f64, exact: f64, noise: f64) -> bool {
    if exact.is_nan() {
        return got.is_nan();
    }
    let most = f64::from(to.largest());
    let exact = exact.clamp(-most, most);
    let slack = 4.0 * f64::from(f32::EPSILON) * exact.abs() + 2.0 * noise;
    (got - exact).abs() <= (to.round(exact) - exact).abs() + slack
}

fn number(numbers: Numbers, rng: &mut Rng, [head, seq, feature]: [usize; 3]) -> f32 {
    let normal = rng.normal() + (feature % 5) as f32 - 2.0;
    match numbers {
        Numbers::Normal => normal,
        Numbers::Uneven => normal * 2f32.powi((5 * head + seq / 16 + feature) as i32 % 11 - 5),
        Numbers::Zeros => {
            if head % 2 == 0 {
                0.0
            } else {
                normal
            }
        }
        Numbers::Broken => match rng.range(0..=40) {
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => f32::NEG_INFINITY,
            _ => normal,
        },
        Numbers::Tiny => normal * 2f32.powi(-16 * (1 + head as i32)),
        Numbers::Huge => 2e38 + normal * 1e37,
    }
}
