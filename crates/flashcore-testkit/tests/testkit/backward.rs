//! The oracle of gradients against finite differences, and the suite against a plain backend, right and wrong in single
//! ways.

use flashcore_core::{
    Backend, BackendError, BackwardCall, DType, Data, Dims, Dropout, DropoutWords, Element, HeadDropout,
    HostCall, Instance, Layout, Lengths, Mask, Problem, Ran, RowTerms, Spec, Values,
};
use flashcore_testkit::{Outcome, Rng, Rows, backward, backward::plain::reference, cases::Cost, plain};

/// A step that all inputs below can be moved by without rounding.
const STEP: f32 = 1.0 / 512.0;

/// A tiny problem: heads over key heads, queries, keys, features of keys and of values.
fn tiny([heads_q, heads_kv, seq_q, seq_kv, dim, dim_v]: [usize; 6], batch: usize) -> Spec {
    let layout = |heads, seq, dim| Layout::bhsd(Dims::new(batch, heads, seq, dim)).unwrap();
    let (q, k) = (layout(heads_q, seq_q, dim), layout(heads_kv, seq_kv, dim));
    Spec::new(DType::F32, q, k, layout(heads_kv, seq_kv, dim_v))
}

/// Multiples of 1/64, about N(0, 1).
fn draw(layout: &Layout, rng: &mut Rng) -> Vec<f32> {
    (0..layout.span()).map(|_| (rng.normal() * 64.0).round() / 64.0).collect()
}

/// What a loss that weighs the output by `d_out` is.
fn loss(problem: &Problem, values: &Values, [q, k, v]: &[Vec<f32>; 3], d_out: &[f32]) -> f64 {
    let instance = Instance::new(problem, values).unwrap();
    let out = plain::reference(instance, [Data::F32(q), Data::F32(k), Data::F32(v)], Rows::ALL).out;
    out.iter().zip(d_out).map(|(a, &b)| a * f64::from(b)).sum()
}

fn check_differences(spec: Spec, values: &Values) {
    let problem = spec.with(values).parse().unwrap();
    let mut rng = Rng::new(11);
    let inputs = [problem.q(), problem.k(), problem.v()].map(|layout| draw(layout, &mut rng));
    let d_out = draw(problem.out(), &mut rng);
    let data = [Data::F32(&inputs[0]), Data::F32(&inputs[1]), Data::F32(&inputs[2])];
    let exact = reference(Instance::new(&problem, values).unwrap(), data, (Data::F32(&d_out), problem.out()));
    let near = |name: &str, n: usize, exact: f64, moved: [f64; 2]| {
        let slope = (moved[1] - moved[0]) / f64::from(2.0 * STEP);
        assert!(
            (slope - exact).abs() < 2e-4,
            "{name} {n}: {exact}, but differences say {slope} ({problem:?})"
        );
    };
    for (tensor, (name, exact)) in exact.named().into_iter().take(3).enumerate() {
        for n in 0..inputs[tensor].len() {
            let moved = [-STEP, STEP].map(|step| {
                let mut inputs = inputs.clone();
                inputs[tensor][n] += step;
                loss(&problem, values, &inputs, &d_out)
            });
            near(name, n, exact.out[n], moved);
        }
    }
    for (head, &sink) in values.sinks.iter().flat_map(|sinks| sinks.iter()).enumerate() {
        let moved = [-STEP, STEP].map(|step| {
            let mut sinks = values.sinks.clone().unwrap().to_vec();
            sinks[head] = sink + step;
            let values = Values { sinks: Some(sinks.into()), ..values.clone() };
            loss(&problem, &values, &inputs, &d_out)
        });
        near("sink", head, exact.d_sinks.out[head], moved);
    }
}

#[test]
fn the_oracle_agrees_with_finite_differences() {
    let sinks = Values { sinks: Some([0.5, -0.25, 1.0, 0.0].into()), ..Values::default() };
    let lengths = |lengths| Values { lengths, ..Values::default() };
    check_differences(tiny([1, 1, 3, 4, 3, 3], 1), Values::NONE);
    check_differences(tiny([4, 2, 3, 5, 3, 2], 1), Values::NONE);
    check_differences(Spec { mask: Mask::CAUSAL, ..tiny([2, 1, 5, 4, 3, 4], 1) }, Values::NONE);
    check_differences(Spec { mask: Mask::window(1, 1), ..tiny([1, 1, 5, 5, 2, 3], 1) }, Values::NONE);
    check_differences(Spec { softcap: Some(0.75), ..tiny([2, 2, 3, 4, 3, 3], 1) }, Values::NONE);
    check_differences(Spec { scale: Some(1.25), ..tiny([1, 1, 3, 4, 3, 3], 1) }, Values::NONE);
    check_differences(Spec { mask: Mask::CAUSAL, ..tiny([4, 2, 3, 4, 3, 3], 2) }, &sinks);
    check_differences(tiny([1, 1, 4, 5, 3, 3], 3), &lengths(Lengths::used([2, 4, 0], [5, 0, 3])));
    check_differences(tiny([2, 1, 6, 7, 3, 3], 1), &lengths(Lengths::ragged([0, 2, 2, 6], [0, 3, 4, 7])));
    let dropped = Spec { dropout: Some(Dropout::new(0.4)), ..tiny([4, 2, 3, 5, 3, 2], 2) };
    check_differences(dropped, &Values { seed: Some(5), ..sinks });
}

faults! {
    /// The row sum is left out.
    RowSum,
    /// dK is not scaled.
    Scale,
    /// The slope of the cap is left out.
    Slope,
    /// Keys beyond the mask take part.
    Mask,
    /// The last of the heads that share keys overwrites what the others added.
    Group,
    /// What is there is overwritten.
    Accumulate,
    /// Rows that are not used are not written.
    Unwritten,
    /// Gradients of scores have five bits.
    Imprecise,
    /// Sinks have the gradient of a key.
    SinkSign,
    /// A row whose LSE is −∞ is computed like the others.
    EmptyRow,
    /// Row sums come from the output, even where they are given.
    GivenSums,
    /// All weights stay.
    Dropout,
    /// Weights are left out with another probability.
    Probability,
    /// Weights that stay are not scaled.
    Factor,
}

/// Gradients in f32, plainly, in f64 inside.
struct Plain(Fault);

/// dQ, dK, dV and d sinks, dense.
type Sums = [Vec<f64>; 4];

impl Backend for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn forward(&self, _: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        unreachable!("only gradients are asked for")
    }

    fn backward(&self, call: &mut BackwardCall<'_>) -> Result<Ran, BackendError> {
        let p = call.instance();
        let count = |layout: &Layout| vec![0.0; layout.dims().count().unwrap()];
        let mut sums = [count(p.q()), count(p.k()), count(p.v()), vec![0.0; p.heads_q()]];
        for (number, s) in (0..p.sequences()).map(|n| (n, p.sequence(n))) {
            for head in 0..p.heads_q() {
                if self.0 == Fault::Group && head % p.group() > 0 {
                    let (kv_head, rows) = (head / p.group(), s.kv_start..s.kv_start + s.kv_len);
                    for (tensor, dim) in [(1, p.dim_qk()), (2, p.dim_v())] {
                        let first = (s.batch * p.heads_kv() + kv_head) * p.seq_kv();
                        sums_of(&mut sums[tensor], first + rows.start..first + rows.end, dim).fill(0.0);
                    }
                }
                (0..s.q_len).for_each(|i| self.query(call, (number, &s), [head, i], &mut sums));
            }
        }
        self.write(call, &sums);
        Ok(Ran { kernel: "plain".to_owned() })
    }
}

fn sums_of(sums: &mut [f64], rows: std::ops::Range<usize>, dim: usize) -> &mut [f64] {
    &mut sums[rows.start * dim..rows.end * dim]
}

fn row(data: Data<'_>, layout: &Layout, [batch, head, seq]: [usize; 3]) -> Vec<f64> {
    let start = layout.row(batch, head, seq);
    let row = &data.slice::<f32>().unwrap()[start..start + layout.dims().dim];
    row.iter().map(|&x| f64::from(x)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl Plain {
    fn query(
        &self,
        call: &BackwardCall<'_>,
        (number, s): (usize, &flashcore_core::Sequence),
        [head, i]: [usize; 2],
        sums: &mut Sums,
    ) {
        let (p, inputs, fault) = (call.instance(), call.inputs(), self.0);
        let place = [s.batch, head, s.q_start + i];
        let index = p.lse_index(s.batch, head, s.q_start + i);
        let lse = f64::from(inputs.lse[index]);
        if lse == f64::NEG_INFINITY && fault != Fault::EmptyRow {
            return;
        }
        let (q, d_out) = (row(inputs.qkv[0], p.q(), place), row(inputs.d_out, call.problem().d_out(), place));
        let sum = match inputs.terms {
            _ if fault == Fault::RowSum => 0.0,
            RowTerms::Out(out) => dot(&row(out, p.out(), place), &d_out),
            RowTerms::Sums(_) if fault == Fault::GivenSums => dot(&d_out, &d_out),
            RowTerms::Sums(sums) => f64::from(sums[index]),
        };
        let (scale, kv_head) = (f64::from(p.scale()), head / p.group());
        let seen = p.mask().keys(i, s.q_len, s.kv_len);
        let keys = if fault == Fault::Mask { 0..s.kv_len } else { seen };
        for key in keys.map(|key| s.kv_start + key) {
            let place = [s.batch, kv_head, key];
            let (k, v) = (row(inputs.qkv[1], p.k(), place), row(inputs.qkv[2], p.v(), place));
            let (score, slope) = match p.softcap().map(f64::from) {
                Some(cap) => {
                    let t = (scale * dot(&q, &k) / cap).tanh();
                    (cap * t, if fault == Fault::Slope { 1.0 } else { 1.0 - t * t })
                }
                None => (scale * dot(&q, &k), 1.0),
            };
            let bias = p.bias_of(number, head).map_or(0.0, |bias| bias.at(i, key - s.kv_start));
            let weight = (score + bias - lse).exp();
            let kept = self.kept(p, (number, head), [i, key - s.kv_start]);
            let grad = weight * (kept * dot(&d_out, &v) - sum) * slope;
            let grad = if fault == Fault::Imprecise { DType::BF16.round(grad) } else { grad };
            let mut add = |tensor: usize, at: usize, factor: f64, from: &[f64]| {
                let to = &mut sums[tensor][at * from.len()..][..from.len()];
                to.iter_mut().zip(from).for_each(|(to, x)| *to += factor * x);
            };
            let row_kv = (s.batch * p.heads_kv() + kv_head) * p.seq_kv() + key;
            add(0, index, scale * grad, &k);
            add(1, row_kv, if fault == Fault::Scale { grad } else { scale * grad }, &q);
            add(2, row_kv, kept * weight, &d_out);
        }
        if let Some(sinks) = p.sink_logits() {
            let share = (f64::from(sinks[head]) - lse).exp() * sum;
            sums[3][head] += if fault == Fault::SinkSign { share } else { -share };
        }
    }

    /// What dropout multiplies the weight of a query and a key by.
    fn kept(&self, p: Instance<'_>, (sequence, head): (usize, usize), [query, key]: [usize; 2]) -> f64 {
        let Some(seed) = p.values().seed.filter(|_| self.0 != Fault::Dropout) else { return 1.0 };
        let asked = p.dropout().map_or(0.0, Dropout::probability);
        let dropout = Dropout::new(if self.0 == Fault::Probability { asked + 0.03 } else { asked });
        let plane = sequence * p.heads_q() + head;
        let of_head = HeadDropout::new(DropoutWords::of_plane(seed, plane as u32), dropout);
        let factor = if self.0 == Fault::Factor { 1.0 } else { f64::from(dropout.factor()) };
        if of_head.keeps(query, key) { factor } else { 0.0 }
    }

    fn write(&self, call: &mut BackwardCall<'_>, sums: &Sums) {
        let (problem, p) = (call.problem(), call.instance());
        let add = problem.accumulate() && self.0 != Fault::Accumulate;
        let layouts = [problem.dq(), problem.dk(), problem.dv()];
        let grads = call.gradients();
        for (tensor, (grad, layout)) in grads.qkv.into_iter().zip(layouts).enumerate() {
            let (grad, dims) = (grad.into_slice::<f32>().unwrap(), layout.dims());
            for (n, from) in sums[tensor].chunks_exact(dims.dim).enumerate() {
                let place = [n / dims.seq / dims.heads, n / dims.seq % dims.heads, n % dims.seq];
                let last = n % dims.seq + 1 == dims.seq && from.iter().all(|&x| x == 0.0);
                if self.0 == Fault::Unwritten && last {
                    continue;
                }
                let to = &mut grad[layout.row(place[0], place[1], place[2])..][..dims.dim];
                to.iter_mut()
                    .zip(from)
                    .for_each(|(to, &x)| *to = if add { *to + x as f32 } else { x as f32 });
            }
        }
        for (to, &x) in grads.sinks.into_iter().flatten().zip(&sums[3]).take(p.heads_q()) {
            *to = if add { *to + x as f32 } else { x as f32 };
        }
    }
}

/// Laws and cases in f32 that a backend fails, as they are found.
fn failures(fault: Fault) -> impl Iterator<Item = String> {
    let cases = backward::cases(Cost::Tiny).into_iter().map(move |case| {
        let outcome = backward::check(&Plain(fault), &case, DType::F32, 1);
        (case.to_string(), outcome)
    });
    let laws = backward::laws::LAWS
        .iter()
        .map(move |law| (law.name.to_owned(), law.check(&Plain(fault), f32::DTYPE, 1)));
    let failed = laws.chain(cases).filter(|(_, outcome)| outcome.is_failure());
    failed.map(|(name, outcome)| format!("{name}: {outcome}"))
}

#[test]
fn plain_gradients_pass() {
    let failures: Vec<_> = failures(Fault::None).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn every_fault_is_found() {
    for &fault in FAULTS {
        assert!(failures(fault).next().is_some(), "{fault:?} passes");
    }
}

#[test]
fn every_law_is_broken_by_a_fault() {
    for law in backward::laws::LAWS {
        let breaks = |fault: &Fault| law.check(&Plain(*fault), DType::F32, 1).is_failure();
        assert!(FAULTS.iter().any(breaks), "no fault breaks `{}`", law.name);
    }
}

#[test]
fn a_backend_without_gradients_is_no_failure() {
    struct Without;
    impl Backend for Without {
        fn name(&self) -> &'static str {
            "without"
        }
        fn forward(&self, _: &mut HostCall<'_>) -> Result<Ran, BackendError> {
            unreachable!("only gradients are asked for")
        }
    }
    let outcome = backward::check(&Without, &backward::cases(Cost::Tiny)[0], DType::F32, 1);
    assert!(matches!(&outcome, Outcome::Skipped(reason) if reason.contains("cpu backend")), "{outcome}");
}
