//! Tiny problems on the portable path, small enough for miri, which sees every access of every pointer:
//! `MIRIFLAGS=-Zmiri-disable-isolation cargo +nightly miri test -p flashcore-cpu --test tiny`.

use flashcore_core::{
    Backend, BackwardCall, BackwardInputs, BackwardSpec, Dims, Dropout, Element, GradientsMut, HeadDropout,
    HostCall, Instance, Layout, Lengths, Mask, RowTerms, Spec, Values,
};
use flashcore_cpu::{Cpu, SimdLevel};
use half::{bf16, f16};

/// Of dropout, where a problem has it.
const SEED: u64 = 3;

/// Numbers in [−1, 1).
fn numbers<T: Element>(layout: &Layout, seed: usize) -> Vec<T> {
    (0..layout.span()).map(|i| T::from_f32(((i * 7 + seed * 5) % 16) as f32 / 8.0 - 1.0)).collect()
}

/// Row `i` of `head` in sequence `n`, by definition.
fn reference<T: Element>(problem: Instance<'_>, [q, k, v]: [&[T]; 3], [n, head, i]: [usize; 3]) -> Vec<f64> {
    let (s, kv_head) = (problem.sequence(n), head / problem.group());
    let at = |data: &[T], start: usize, d: usize| f64::from(data[start + d].to_f32());
    let q_row = problem.q().row(s.batch, head, s.q_start + i);
    let mut out = vec![0.0; problem.dim_v()];
    let (dropout, mut sum) = (problem.dropout_of(n, head), 0.0);
    for key in problem.mask().keys(i, s.q_len, s.kv_len) {
        let k_row = problem.k().row(s.batch, kv_head, s.kv_start + key);
        let v_row = problem.v().row(s.batch, kv_head, s.kv_start + key);
        let dot: f64 = (0..problem.dim_qk()).map(|d| at(q, q_row, d) * at(k, k_row, d)).sum();
        let score = dot * f64::from(problem.scale());
        let weight =
            problem.softcap().map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh()).exp();
        sum += weight;
        let kept = |dropout: HeadDropout| if dropout.keeps(i, key) { dropout.factor().into() } else { 0.0 };
        let weight = weight * dropout.map_or(1.0, kept);
        out.iter_mut().enumerate().for_each(|(d, out)| *out += weight * at(v, v_row, d));
    }
    out.iter_mut().for_each(|out| *out /= if sum > 0.0 { sum } else { 1.0 });
    out
}

fn check_as<T: Element>(
    [batch, heads_q, heads_kv, seq_q, seq_kv, dim]: [usize; 6],
    lengths: &Lengths,
    change: &dyn Fn(&mut Spec),
) {
    let layout = |heads, seq| Layout::bhsd(Dims::new(batch, heads, seq, dim)).unwrap();
    let mut spec =
        Spec::new(T::DTYPE, layout(heads_q, seq_q), layout(heads_kv, seq_kv), layout(heads_kv, seq_kv));
    change(&mut spec);
    let values = Values { lengths: lengths.clone(), seed: Some(SEED), ..Values::default() };
    let problem = spec.with(&values).parse().unwrap();
    let problem = Instance::new(&problem, &values).unwrap();
    let (q, k, v) =
        (numbers::<T>(problem.q(), 1), numbers::<T>(problem.k(), 2), numbers::<T>(problem.v(), 3));
    let mut out = vec![T::from_f32(f32::NAN); problem.out().span()];
    let cpu = Cpu::new().with_simd(SimdLevel::Portable).unwrap();
    cpu.forward(&mut HostCall::bind(problem.problem(), &values, [&q, &k, &v], &mut out, None).unwrap())
        .unwrap();
    for (n, head) in (0..problem.sequences()).flat_map(|n| (0..heads_q).map(move |head| (n, head))) {
        let s = problem.sequence(n);
        for i in 0..s.q_len {
            let row = problem.out().row(s.batch, head, s.q_start + i);
            let expected = reference(problem, [&q, &k, &v], [n, head, i]);
            for (got, expected) in out[row..].iter().zip(expected) {
                assert!(
                    (f64::from(got.to_f32()) - expected).abs() < 1e-2,
                    "{got:?}, not {expected}: {problem:?}"
                );
            }
        }
    }
}

fn check(shape: [usize; 6], change: impl Fn(&mut Spec)) {
    check_with(shape, &Lengths::Uniform, &change);
}

fn check_with(shape: [usize; 6], lengths: &Lengths, change: &dyn Fn(&mut Spec)) {
    check_as::<f32>(shape, lengths, change);
    check_as::<f16>(shape, lengths, change);
    check_as::<bf16>(shape, lengths, change);
}

#[test]
fn tiles() {
    check([1, 2, 1, 9, 11, 5], |spec| spec.mask = Mask::CAUSAL);
    check([1, 1, 1, 17, 17, 3], |spec| spec.mask = Mask::window(2, 1).top_left());
    check([1, 1, 1, 5, 9, 2], |spec| spec.softcap = Some(2.0));
    check([1, 2, 1, 9, 11, 5], |spec| spec.dropout = Some(Dropout::new(0.3)));
}

#[test]
fn rows() {
    check([2, 2, 1, 1, 9, 8], |_| ());
    check([1, 1, 1, 2, 40, 3], |spec| spec.mask = Mask::CAUSAL);
    check([2, 2, 1, 1, 40, 8], |spec| spec.dropout = Some(Dropout::new(0.3)));
}

#[test]
fn parts() {
    check([1, 1, 1, 1, 600, 1], |_| ());
}

#[test]
fn lengths() {
    check_with([2, 1, 1, 6, 6, 4], &Lengths::used([0, 5], [3, 2]), &|_| ());
    check_with([1, 1, 1, 7, 9, 4], &Lengths::ragged([0, 1, 1, 7], [0, 4, 5, 9]), &|_| ());
}

/// The gradients of all values add up to those of all outputs, each times what the weights of its row add up to: 1, or with
/// dropout what values of one give.
fn check_gradients<T: Element>(
    [heads_q, seq_q, seq_kv, dim]: [usize; 4],
    mask: Mask,
    dropout: Option<Dropout>,
) {
    let layout = |heads, seq| Layout::bhsd(Dims::new(1, heads, seq, dim)).unwrap();
    let (q_layout, kv_layout) = (layout(heads_q, seq_q), layout(1, seq_kv));
    let spec = Spec { mask, dropout, ..Spec::new(T::DTYPE, q_layout, kv_layout, kv_layout) };
    let values = Values { seed: Some(SEED), ..Values::default() };
    let (forward, problem) = (spec.clone().parse().unwrap(), BackwardSpec::new(spec).parse().unwrap());
    let [q, k, v] =
        [(q_layout, 1), (kv_layout, 2), (kv_layout, 3)].map(|(layout, seed)| numbers::<T>(&layout, seed));
    let (d_out, mut out) = (numbers::<T>(&q_layout, 4), numbers::<T>(&q_layout, 5));
    let mut lse = vec![0.0; forward.rows()];
    let cpu = Cpu::new().with_simd(SimdLevel::Portable).unwrap();
    let (mut sums, ones) = (out.clone(), vec![T::from_f32(1.0); v.len()]);
    for (v, out) in [(&ones, &mut sums), (&v, &mut out)] {
        cpu.forward(&mut HostCall::bind(&forward, &values, [&q, &k, v], out, Some(&mut lse)).unwrap())
            .unwrap();
    }
    let qkv = [&q, &k, &v].map(|tensor| T::erase(tensor));
    let inputs =
        BackwardInputs { qkv, lse: &lse, terms: RowTerms::Out(T::erase(&out)), d_out: T::erase(&d_out) };
    let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|tensor| vec![T::from_f32(f32::NAN); tensor.len()]);
    let grads = GradientsMut { qkv: [&mut dq, &mut dk, &mut dv].map(|grad| T::erase_mut(grad)), sinks: None };
    cpu.backward(&mut BackwardCall::bind(&problem, &values, inputs, grads).unwrap()).unwrap();
    assert!(dq.iter().chain(&dk).all(|x| x.to_f32().is_finite()));
    for feature in 0..dim {
        let of = |rows: &[T]| rows.iter().skip(feature).step_by(dim).map(|x| x.to_f32()).collect::<Vec<_>>();
        let expected: f32 = of(&d_out).iter().zip(of(&sums)).map(|(x, sum)| x * sum).sum();
        let got: f32 = of(&dv).iter().sum();
        assert!((got - expected).abs() < 0.1, "{got} and {expected}");
    }
}

#[test]
fn gradients() {
    let dropout = Some(Dropout::new(0.3));
    for (shape, mask, dropout) in [
        ([2, 9, 11, 5], Mask::CAUSAL, None),
        ([1, 3, 130, 8], Mask::NONE, dropout),
        ([1, 67, 3, 2], Mask::NONE, None),
        ([2, 9, 11, 5], Mask::CAUSAL, dropout),
    ] {
        check_gradients::<f32>(shape, mask, dropout);
        check_gradients::<f16>(shape, mask, dropout);
        check_gradients::<bf16>(shape, mask, dropout);
    }
}
