//! Kernels of gradients in the simulator, every check on, against the f64 oracle of the testkit.

use std::error::Error;

use flashcore_core::{
    Backend, BackwardCall, BackwardInputs, DType, Data, Element, GradientsMut, Instance, Layout, RowSums,
    RowTerms,
};
use flashcore_kernels::{BackwardMember, Choice, Form, Gpu, covering_backward};
use flashcore_lab::simulator::Simulator;
use flashcore_testkit::{
    Answer, Outcome, Rng, Rows, Rule,
    backward::{self, laws::LAWS, plain},
    cases::{Cost, Tag},
    plain as forward_plain, values,
};
use half::{bf16, f16};

/// Element types that Hopper's kernels take.
const HALVES: [DType; 2] = [DType::F16, DType::BF16];

/// The conformance suite's tiny cases; element types take turns, and so do hostile schedules. Numbers at the ends of ranges are
/// tried in all types. The rest is for `flashcore verify`.
#[test]
fn kernels_pass_the_conformance_suite() {
    let (simulator, cases) = (Simulator::new(Gpu::AMPERE), backward::cases(Cost::Tiny));
    all_pass(&cases, |(n, case)| {
        let known = &case.forward.dtypes;
        let turns = if case.forward.tag == Tag::Extremes { known.len() } else { 1 };
        let dtypes = known.iter().cycle().skip(n + n / 3).take(turns);
        let outcomes = dtypes.map(|&dtype| (dtype, backward::check(&simulator, case, dtype, 1)));
        // Features of f32 end where those of forward do.
        let wide = case.forward.q.dim.max(case.forward.dim_v) > 256;
        let passed = |(dtype, outcome): &(DType, Outcome)| {
            *outcome == Outcome::Passed || (wide && *dtype == DType::F32 && !outcome.is_failure())
        };
        let failed: Vec<_> = outcomes.filter(|outcome| !passed(outcome)).collect();
        (!failed.is_empty()).then(|| format!("{case} {failed:?}"))
    });
}

/// The same for the kernels of a Hopper in both forms, with cases that differ in their numbers rather than in their shapes.
#[test]
fn hopper_kernels_take_any_numbers() {
    let ways = [Form::Split, Form::Fused].into_iter().flat_map(|form| HALVES.map(|dtype| (form, dtype)));
    let cases: Vec<_> = backward::cases(Cost::Tiny)
        .into_iter()
        .filter(|case| case.forward.tag == Tag::Extremes)
        .flat_map(|case| ways.clone().map(move |way| (case.clone(), way)))
        .collect();
    all_pass(&cases, |(n, (case, (form, dtype)))| {
        let simulator = Simulator::seeded(Gpu::HOPPER, n as u64).choosing(Choice::Gradients(*form));
        let outcome = backward::check(&simulator, case, *dtype, 1);
        (outcome != Outcome::Passed).then(|| format!("{case} {dtype} {form:?}: {outcome}"))
    });
}

/// And with cases of wide heads, which a Hopper's kernels take in a way of their own.
#[test]
fn hopper_kernels_take_wide_heads() {
    let simulator = Simulator::new(Gpu::HOPPER);
    let wide = |case: &backward::Case| {
        let dims = [case.forward.q.dim, case.forward.dim_v];
        dims.iter().any(|dim| (129..=256).contains(dim)) && dims.iter().all(|dim| dim.is_multiple_of(8))
    };
    let cases: Vec<_> = backward::cases(Cost::Tiny).into_iter().filter(wide).collect();
    assert!(cases.len() >= 14, "{} cases", cases.len());
    all_pass(&cases, |(n, case)| {
        let dtype = HALVES[n / 2 % 2];
        let outcome = backward::check(&simulator, case, dtype, 1);
        (outcome != Outcome::Passed).then(|| format!("{case} {dtype}: {outcome}"))
    });
}

#[test]
fn kernels_obey_the_laws() {
    let simulator = Simulator::new(Gpu::AMPERE);
    all_pass(LAWS, |(n, law)| {
        let dtype = DType::COMMON[n % DType::COMMON.len()];
        let outcome = law.check(&simulator, dtype, 1);
        (outcome != Outcome::Passed).then(|| format!("{} {dtype}: {outcome}", law.name))
    });
}

/// Checks everything, on all cores, and reports all failures together.
fn all_pass<T: Sync>(items: &[T], check: impl Fn((usize, &T)) -> Option<String> + Sync + Send) {
    use rayon::prelude::*;
    let failures: Vec<_> = items.par_iter().enumerate().filter_map(check).collect();
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), items.len(), failures.join("\n"));
}

/// Every kernel of the covering set, once tamely and once under a hostile schedule.
#[test]
fn kernels_are_right_under_every_schedule() {
    let members = covering_backward().unwrap();
    all_pass(&members, |(n, member)| {
        let error = match (member.problem.forward().dtype(), member.problem.grad_dtype()) {
            (DType::F32, _) => wrong::<f32, f32>(member, n),
            (DType::F16, DType::F32) => wrong::<f16, f32>(member, n),
            (DType::F16, _) => wrong::<f16, f16>(member, n),
            (_, DType::F32) => wrong::<bf16, f32>(member, n),
            _ => wrong::<bf16, bf16>(member, n),
        };
        error.map(|error| format!("{:?} by {:?}: {error}", member.problem, member.choice))
    });
}

/// What is wrong with a member's gradients, if anything.
fn wrong<T: Element, G: Element>(member: &BackwardMember, seed: usize) -> Option<String> {
    let given = Given::<T>::new(member);
    let simulator = Simulator::seeded(member.gpu, seed as u64).choosing(member.choice.clone());
    let run = || given.run::<G>(&simulator, member);
    let (first, again) = match run().and_then(|first| Ok((first, run()?))) {
        Ok(both) => both,
        Err(error) => return Some(error),
    };
    if first.bytes() != again.bytes() {
        return Some("gradients depend on the schedule".to_owned());
    }
    let instance = Instance::new(member.problem.forward(), &member.values).ok()?;
    let (qkv, d_out) = (given.qkv(), (T::erase(&given.d_out), member.problem.d_out()));
    let oracle = plain::reference(instance, qkv, d_out);
    let yardstick = plain::yardstick(instance, qkv, d_out, given.terms(member)).map(|x| G::DTYPE.round(x));
    let rule = Rule::of_gradients(&member.problem);
    let judge = |(n, ((name, oracle), (_, yardstick))): (usize, Pair<'_>)| {
        let got = first.answer(member, n, oracle)?;
        let reason = rule.judge(&got, oracle, yardstick).reason?;
        Some(format!("{name}: {reason}"))
    };
    oracle.named().into_iter().zip(yardstick.named()).enumerate().find_map(judge)
}

/// Two answers with their names.
type Pair<'a> = ((&'static str, &'a Answer), (&'static str, &'a Answer));

/// The tensors of a member: standard normal numbers, NaN between rows.
struct Given<T> {
    qkv: [Vec<T>; 3],
    out: Vec<T>,
    d_out: Vec<T>,
    lse: Vec<f32>,
    sums: Vec<f32>,
}

impl<T: Element> Given<T> {
    fn new(member: &BackwardMember) -> Self {
        let (forward, mut rng) = (member.problem.forward(), Rng::new(7));
        let mut drawn = |layout: &Layout| tensor::<T>(layout, || rng.normal());
        let (qkv, d_out) =
            ([forward.q(), forward.k(), forward.v()].map(&mut drawn), drawn(member.problem.d_out()));
        let instance = Instance::new(forward, &member.values).expect("values of the member");
        let exact = forward_plain::reference(instance, qkv.each_ref().map(|x| T::erase(x)), Rows::ALL);
        let mut at = 0;
        let out = tensor::<T>(forward.out(), || {
            at += 1;
            exact.out[at - 1] as f32
        });
        let held = values::gather(T::erase(&d_out), member.problem.d_out());
        let products = exact.out.iter().zip(&held).map(|(a, &b)| a * f64::from(b)).collect::<Vec<_>>();
        let sums = products.chunks(forward.dim_v()).map(|row| row.iter().sum::<f64>() as f32).collect();
        let lse = exact.lse.iter().map(|&x| x as f32).collect();
        Self { qkv, out, d_out, lse, sums }
    }

    fn qkv(&self) -> [Data<'_>; 3] {
        self.qkv.each_ref().map(|x| T::erase(x))
    }

    fn terms(&self, member: &BackwardMember) -> RowTerms<'_> {
        match member.problem.row_sums() {
            RowSums::Computed => RowTerms::Out(T::erase(&self.out)),
            RowSums::Given => RowTerms::Sums(&self.sums),
        }
    }

    fn run<G: Element>(&self, simulator: &Simulator, member: &BackwardMember) -> Result<Run<G>, String> {
        let mut run = Run::<G>::new(member);
        let d_out = T::erase(&self.d_out);
        let inputs = BackwardInputs { qkv: self.qkv(), lse: &self.lse, terms: self.terms(member), d_out };
        let [dq, dk, dv] = &mut run.grads;
        let grads =
            GradientsMut { qkv: [dq, dk, dv].map(|x| G::erase_mut(x)), sinks: run.d_sinks.as_deref_mut() };
        let call = BackwardCall::bind(&member.problem, &member.values, inputs, grads);
        let mut call = call.map_err(|error| error.to_string())?;
        simulator
            .backward(&mut call)
            .map_err(|error| format!("{error}: {:?}", Error::source(&error).map(ToString::to_string)))?;
        Ok(run)
    }
}

/// Gradients of one run; they start as NaN, or as 1 where they are added to.
struct Run<G> {
    grads: [Vec<G>; 3],
    d_sinks: Option<Vec<f32>>,
    old: f32,
}

impl<G: Element> Run<G> {
    fn new(member: &BackwardMember) -> Self {
        let (problem, forward) = (&member.problem, member.problem.forward());
        let old = if problem.accumulate() { 1.0 } else { f32::NAN };
        let grads = [problem.dq(), problem.dk(), problem.dv()].map(|layout| tensor::<G>(layout, || old));
        Self { grads, d_sinks: forward.sinks().map(|_| vec![old; forward.heads_q()]), old }
    }

    fn bytes(&self) -> (Vec<&[u8]>, Option<Vec<u32>>) {
        let bits = |sinks: &Vec<f32>| sinks.iter().map(|x| x.to_bits()).collect();
        (self.grads.iter().map(|x| G::erase(x).bytes()).collect(), self.d_sinks.as_ref().map(bits))
    }

    /// Gradient `n` as the oracle has it; the last are those of the sinks, where there are any.
    fn answer(&self, member: &BackwardMember, n: usize, oracle: &Answer) -> Option<Answer> {
        let problem = &member.problem;
        let values = match n {
            3 => self.d_sinks.clone()?,
            _ => values::gather(G::erase(&self.grads[n]), [problem.dq(), problem.dk(), problem.dv()][n]),
        };
        let old = if self.old.is_nan() { 0.0 } else { f64::from(self.old) };
        Some(Answer { out: values.iter().map(|&x| f64::from(x) - old).collect(), ..oracle.clone() })
    }
}

/// A tensor whose rows hold `value`s and whose gaps hold NaN.
fn tensor<T: Element>(layout: &Layout, mut value: impl FnMut() -> f32) -> Vec<T> {
    let mut elements = vec![T::from_f32(f32::NAN); layout.span()];
    values::for_each_row(layout, |_, start| {
        elements[start..start + layout.dims().dim].fill_with(|| T::from_f32(value()));
    });
    elements
}
