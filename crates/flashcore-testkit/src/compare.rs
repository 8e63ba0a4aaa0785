//! The error rule: how far a result may be from the f64 oracle.
//!
//! A result passes if its largest error is at most twice (with softcap three times) that of the plain computation in
//! the tensors' own precision, plus twice the rounding noise of that precision; its mean error likewise; if its LSE
//! is within 1e-3 and 4 ulp; if it has no NaN or Inf where the oracle has none; and if rows that see no key are
//! exactly zero with LSE −∞.
//!
//! With few elements, or in f32, the yardstick may by luck have almost no error. So no result need be closer than
//! one unit in the last place of its type plus the effect of f32 arithmetic on the weights; with more than a handful
//! of elements in f16 and bf16 the yardstick allows more than that anyway. Gradients of a row are correlated through
//! its row sum, so few are independent: four standard deviations of rounding error are always allowed, two for the
//! mean.
//!
//! [`crate::suite`], [`crate::properties`] and the command line call this.

use std::fmt;

use flashcore_core::{BackwardProblem, DType, Data, Instance, Problem};

use crate::{
    answer::{Answer, Position, Rows},
    plain::{reference, yardstick},
};

/// Applies the error rule to the result of `problem`.
pub fn judge(
    problem: Instance<'_>,
    inputs: [Data<'_>; 3],
    out: Data<'_>,
    lse: Option<&[f32]>,
    rows: Rows,
) -> Verdict {
    let oracle = reference(problem, inputs, rows);
    let yardstick = yardstick(problem, inputs, rows);
    Rule::of(&problem).judge(&Answer::gather(&problem, out, lse, rows), &oracle, &yardstick)
}

/// The parts of the rule that depend on the problem.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rule {
    dtype: DType,
    factor: f64,
    /// What an LSE may be off, as a share of its size, beside what is allowed anyway.
    lse: f64,
}

impl Rule {
    /// The rule for results of a type: so many times the yardstick's error.
    pub const fn new(dtype: DType, factor: f64) -> Self {
        Self { dtype, factor, lse: 0.0 }
    }

    /// The same with so much more error of the LSE, as a share of its size.
    #[must_use]
    pub const fn with_lse(self, lse: f64) -> Self {
        Self { lse, ..self }
    }

    /// The rule for results of `problem`.
    pub fn of(problem: &Problem) -> Self {
        Self::new(problem.dtype(), if problem.softcap().is_some() { 3.0 } else { 2.0 })
    }

    /// The rule for gradients of `problem`.
    pub fn of_gradients(problem: &BackwardProblem) -> Self {
        Self { dtype: problem.grad_dtype(), ..Self::of(problem.forward()) }
    }

    /// Compares a result with the oracle, by the yardstick; an empty `got.lse` means that no LSE was asked for.
    pub fn judge(&self, got: &Answer, oracle: &Answer, yardstick: &Answer) -> Verdict {
        let errors = Summary::of(got.out.iter().zip(&oracle.out).map(|(a, b)| (a - b).abs()));
        let allowed = Summary::of(yardstick.out.iter().zip(&oracle.out).map(|(a, b)| (a - b).abs()));
        let noise = Summary::of(oracle.out.iter().map(|&x| self.rounding_noise(x)));
        let size = Summary::of(oracle.out.iter().map(|x| x.abs()));
        let f32_noise = Summary::of(oracle.f32_noise.iter().copied());
        let chance = Summary::of(oracle.chance.iter().copied());
        let tolerance = |allowed: f64, noise: f64, size: f64, f32_noise: f64| {
            (self.factor * allowed + 2.0 * noise).max(unit_in_last_place(self.dtype, size) + f32_noise)
        };
        let mut verdict = Verdict {
            max_error: errors.max,
            tolerance: tolerance(allowed.max, noise.max, size.max, f32_noise.max + 4.0 * chance.max),
            mean_error: errors.mean,
            relative_rms: errors.rms / size.rms.max(f64::MIN_POSITIVE),
            mean_tolerance: tolerance(
                allowed.mean,
                noise.mean,
                size.mean,
                f32_noise.mean + 2.0 * chance.mean,
            ),
            lse_error: lse_errors(got, oracle).fold(0.0, |max, (_, error)| error.max(max)),
            worst: errors.at.map(|at| got.grid.position(at)),
            reason: None,
        };
        verdict.reason =
            first_wrong(got, oracle, self.lse).or_else(|| verdict.beyond_tolerance(got, oracle, errors.at));
        verdict
    }

    /// |(x + 0.3 − 0.3) − x| in the tensors' own precision.
    fn rounding_noise(&self, x: f64) -> f64 {
        let x = self.dtype.round(x);
        (self.dtype.round(self.dtype.round(x + 0.3) - 0.3) - x).abs()
    }
}

/// The distance between neighbouring numbers of `dtype` about `size`; 0 at 0.
fn unit_in_last_place(dtype: DType, size: f64) -> f64 {
    let digits = match dtype {
        DType::F16 => 10,
        DType::BF16 => 7,
        _ => 23,
    };
    if size > 0.0 { size.log2().floor().exp2() * 0.5f64.powi(digits) } else { 0.0 }
}

/// Largest, mean and root mean square of finite numbers; others say nothing about precision.
struct Summary {
    max: f64,
    mean: f64,
    rms: f64,
    at: Option<usize>,
}

impl Summary {
    fn of(errors: impl Iterator<Item = f64>) -> Self {
        let (mut max, mut at, mut sum, mut squares, mut count) = (0.0, None, 0.0, 0.0, 0usize);
        for (index, error) in errors.enumerate().filter(|(_, error)| error.is_finite()) {
            sum += error;
            squares += error * error;
            count += 1;
            if error > max || at.is_none() {
                (max, at) = (error, Some(index));
            }
        }
        let count = count.max(1) as f64;
        Self { max, mean: sum / count, rms: (squares / count).sqrt(), at }
    }
}

/// What is wrong in itself, however large the tolerance.
fn first_wrong(got: &Answer, oracle: &Answer, lse: f64) -> Option<Reason> {
    let outs = got.out.iter().copied().zip(&oracle.out).enumerate();
    let not_finite = outs.clone().find(|(_, (got, oracle))| oracle.is_finite() && !got.is_finite());
    if let Some((at, (got_here, _))) = not_finite {
        return Some(Reason::NotFinite { at: got.grid.position(at), got: got_here });
    }
    let empty = |row: usize| oracle.sees_nothing[row];
    let leaked = outs.clone().find(|&(at, (got_here, _))| empty(at / got.grid.dim) && got_here != 0.0);
    if let Some((at, (got_here, _))) = leaked {
        return Some(Reason::EmptyRowNotZero { at: got.grid.position(at), got: got_here });
    }
    let (row, _) = lse_errors(got, oracle)
        .find(|&(row, error)| error.is_nan() || error > lse_tolerance(oracle.lse[row], lse))?;
    let (at, expected) = (got.grid.position(row * got.grid.dim), oracle.lse[row]);
    Some(Reason::Lse { at, got: got.lse[row], expected })
}

/// |LSE − oracle| by row; 0 where both are −∞ or NaN.
fn lse_errors(got: &Answer, oracle: &Answer) -> impl Iterator<Item = (usize, f64)> {
    let same = |got: f64, oracle: f64| got == oracle || got.is_nan() && oracle.is_nan();
    let error =
        move |(&got, &oracle): (&f64, &f64)| if same(got, oracle) { 0.0 } else { (got - oracle).abs() };
    got.lse.iter().zip(&oracle.lse).map(error).enumerate()
}

/// 1e-3 and 4 ulp of an f32; −∞ must be met exactly.
fn lse_tolerance(lse: f64, share: f64) -> f64 {
    if !lse.is_finite() {
        return 0.0;
    }
    let magnitude = (lse as f32).abs();
    1e-3 + 4.0 * f64::from(magnitude.next_up() - magnitude) + share * f64::from(magnitude)
}

/// What the error rule says about a result.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Verdict {
    /// Largest |out − oracle|.
    pub max_error: f64,
    /// What it may be.
    pub tolerance: f64,
    /// Mean |out − oracle|.
    pub mean_error: f64,
    /// What it may be.
    pub mean_tolerance: f64,
    /// Root mean square of out − oracle over that of the oracle.
    pub relative_rms: f64,
    /// Largest |LSE − oracle| over rows that see something; 0 when no LSE was asked for.
    pub lse_error: f64,
    /// Where the largest error is.
    pub worst: Option<Position>,
    /// Why the result does not pass; `None` when it does.
    pub reason: Option<Reason>,
}

impl Verdict {
    /// Whether the result passes.
    pub const fn pass(&self) -> bool {
        self.reason.is_none()
    }

    fn beyond_tolerance(&self, got: &Answer, oracle: &Answer, worst: Option<usize>) -> Option<Reason> {
        let worst = worst.filter(|_| self.max_error > self.tolerance);
        let too_large = worst.map(|at| Reason::MaxError {
            at: got.grid.position(at),
            got: got.out[at],
            expected: oracle.out[at],
        });
        too_large.or_else(|| (self.mean_error > self.mean_tolerance).then_some(Reason::MeanError))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { max_error, tolerance, mean_error, mean_tolerance, lse_error, .. } = self;
        write!(
            f,
            "max error {max_error:.3e} of {tolerance:.3e}, mean {mean_error:.3e} of {mean_tolerance:.3e}, "
        )?;
        write!(f, "LSE {lse_error:.3e}")?;
        self.reason.as_ref().map_or(Ok(()), |reason| write!(f, ": {reason}"))
    }
}

/// Why a result does not pass.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Reason {
    /// NaN or Inf where the oracle has a number.
    NotFinite { at: Position, got: f64 },
    /// A row that sees nothing is not exactly zero.
    EmptyRowNotZero { at: Position, got: f64 },
    /// The LSE of a row is off.
    Lse { at: Position, got: f64, expected: f64 },
    /// The largest error is beyond tolerance.
    MaxError { at: Position, got: f64, expected: f64 },
    /// The mean error is beyond tolerance although the largest is not.
    MeanError,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFinite { at, got } => write!(f, "{got} at {at}, where the oracle has a number"),
            Self::EmptyRowNotZero { at, got } => {
                write!(f, "{got} at {at}, a row that sees no key and must be 0")
            }
            Self::Lse { at, got, expected } => {
                write!(
                    f,
                    "LSE {got} instead of {expected} at batch {} head {} row {}",
                    at.batch, at.head, at.seq
                )
            }
            Self::MaxError { at, got, expected } => write!(f, "{got} instead of {expected} at {at}"),
            Self::MeanError => f.write_str("the mean error is beyond tolerance"),
        }
    }
}
