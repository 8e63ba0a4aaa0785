//! The oracle and the error rule tested: against numbers worked out by hand and against the definition spelled out.

use flashcore_core::{DType, Dims, Element, Instance, Layout, Lengths, Mask, Problem, Spec, Values};
use flashcore_testkit::{Answer, Case, Reason, Rng, Rows, Rule, Tag, plain};

fn problem(seq_q: usize, seq_kv: usize, dim: usize, change: impl Fn(&mut Spec)) -> Problem {
    problem_with(seq_q, seq_kv, dim, Values::NONE, change)
}

fn problem_with(
    seq_q: usize,
    seq_kv: usize,
    dim: usize,
    values: &Values,
    change: impl Fn(&mut Spec),
) -> Problem {
    let layout = |seq| Layout::bhsd(Dims::new(1, 1, seq, dim)).unwrap();
    let mut spec = Spec::new(DType::F32, layout(seq_q), layout(seq_kv), layout(seq_kv));
    spec.scale = Some(1.0);
    change(&mut spec);
    spec.with(values).parse().unwrap()
}

fn oracle(problem: &Problem, q: &[f32], k: &[f32], v: &[f32]) -> Answer {
    oracle_with(problem, Values::NONE, q, k, v)
}

fn oracle_with(problem: &Problem, values: &Values, q: &[f32], k: &[f32], v: &[f32]) -> Answer {
    let problem = Instance::new(problem, values).unwrap();
    plain::reference(problem, [q, k, v].map(f32::erase), Rows::ALL)
}

fn close(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() < 1e-12
}

#[test]
fn numbers_worked_out_by_hand() {
    let (one, ln3) = (1.0, 3f32.ln());
    let valued = |values: &Values, change: fn(&mut Spec), out: f64, lse: f64| {
        // Scores 0 and ln 3: weights 1/4 and 3/4.
        let problem = problem_with(1, 2, 1, values, change);
        let got = oracle_with(&problem, values, &[one], &[0.0, ln3], &[8.0, 4.0]);
        let near = |a: f64, b: f64| a == b || (a - b).abs() < 1e-6;
        assert!(near(got.out[0], out) && near(got.lse[0], lse), "{got:?} instead of {out} and {lse}");
    };
    let exactly = |change: fn(&mut Spec), out, lse| valued(Values::NONE, change, out, lse);
    let used = |lengths, out, lse| valued(&Values { lengths, ..Values::default() }, |_| {}, out, lse);
    let sunk = |sink: f32, out, lse| {
        let values = Values { sinks: Some([sink].into()), ..Values::default() };
        valued(&values, |_| {}, out, lse);
    };
    exactly(|_| {}, 5.0, 4f64.ln());
    exactly(|s| s.scale = Some(2.0), (8.0 + 9.0 * 4.0) / 10.0, 10f64.ln());
    // A sink of logit ln 4 takes half: the rest keeps its proportions.
    sunk(4f32.ln(), 2.5, 8f64.ln());
    sunk(f32::NEG_INFINITY, 5.0, 4f64.ln());
    used(Lengths::keys([1]), 8.0, 0.0);
    used(Lengths::keys([0]), 0.0, f64::NEG_INFINITY);
    used(Lengths::used([0], [2]), 0.0, f64::NEG_INFINITY);
    exactly(|s| s.mask = Mask::window(0, 0), 4.0, 3f64.ln());
    exactly(|s| s.mask = Mask::window(0, 0).top_left(), 8.0, 0.0);
    let capped = (2.0 * (3f64.ln() / 2.0).tanh()).exp();
    exactly(|s| s.softcap = Some(2.0), (8.0 + capped * 4.0) / (1.0 + capped), (1.0 + capped).ln());
}

#[test]
fn an_empty_row_with_a_sink_is_zero_and_its_lse_is_the_sink() {
    let values = Values { sinks: Some([1.5].into()), ..Values::default() };
    let with_sink = problem_with(2, 1, 1, &values, |s| s.mask = Mask::CAUSAL);
    let got = oracle_with(&with_sink, &values, &[1.0, 1.0], &[1.0], &[7.0]);
    assert_eq!((got.out[0], got.lse[0]), (0.0, 1.5));
    assert_eq!(got.sees_nothing, [true, false]);
}

#[test]
fn a_row_that_sees_a_nan_is_nan_and_no_other() {
    let problem = problem(2, 2, 1, |s| s.mask = Mask::CAUSAL);
    let clean = oracle(&problem, &[1.0, 1.0], &[1.0, 1.0], &[7.0, 9.0]);
    for (q, k) in [([1.0, f32::NAN], [1.0, 1.0]), ([1.0, 1.0], [1.0, f32::NAN])] {
        let got = oracle(&problem, &q, &k, &[7.0, 9.0]);
        assert_eq!((got.out[0], got.lse[0]), (clean.out[0], clean.lse[0]));
        assert!(got.out[1].is_nan() && got.lse[1].is_nan(), "{got:?}");
        let rule = Rule::of(&problem);
        assert_eq!(rule.judge(&got, &got, &got).reason, None);
        assert!(rule.judge(&clean, &got, &got).reason.is_some(), "an LSE where there is none");
    }
}

/// Whether query `i` sees key `j`, straight from the definition of a band.
fn sees(mask: Mask, i: i64, j: i64, len_q: i64, len_kv: i64) -> bool {
    let corner = if mask == mask.top_left() && !mask.is_none() { 0 } else { len_kv - len_q };
    let diagonal = i + corner + i64::from(mask.shift());
    let left = mask.left().is_none_or(|left| j >= diagonal - i64::from(left));
    let right = mask.right().is_none_or(|right| j <= diagonal + i64::from(right));
    left && right
}

/// The definition spelled out: every pair looked at, nothing shared with the oracle but the inputs.
fn by_definition(
    case: &Case,
    scale: f64,
    [q, k, v]: &[Vec<f32>; 3],
    at: [usize; 3],
    lens: [usize; 2],
) -> Vec<f64> {
    let [batch, head, i] = at;
    let kv_head = batch * case.k.heads + head * case.k.heads / case.q.heads;
    let row = |x: &[f32], plane: usize, dims: Dims, seq: usize| -> Vec<f64> {
        let start = (plane * dims.seq + seq) * dims.dim;
        x[start..start + dims.dim].iter().map(|&x| f64::from(x)).collect()
    };
    let query = row(q, batch * case.q.heads + head, case.q, i);
    let (mut sum, mut out) = (0.0, vec![0.0; case.dim_v]);
    for j in (0..lens[1]).filter(|&j| sees(case.mask, i as i64, j as i64, lens[0] as i64, lens[1] as i64)) {
        let key = row(k, kv_head, case.k, j);
        let weight = (scale * query.iter().zip(&key).map(|(a, b)| a * b).sum::<f64>()).exp();
        sum += weight;
        out.iter_mut().zip(row(v, kv_head, case.v(), j)).for_each(|(out, v)| *out += weight * v);
    }
    out.into_iter().map(|x| if sum == 0.0 || i >= lens[0] { 0.0 } else { x / sum }).collect()
}

#[test]
fn the_oracle_is_the_definition() {
    let bounds = [None, Some(0), Some(1), Some(3)];
    let bands = bounds.into_iter().flat_map(|left| bounds.map(|right| Mask::window(left, right)));
    for (index, mask) in bands.flat_map(|mask| [mask, mask.top_left(), mask.shifted(-2)]).enumerate() {
        let mut rng = Rng::new(index as u64);
        let [seq_q, seq_kv] = [rng.range(1..=9), rng.range(1..=9)];
        let used = [0, 1].map(|_| [rng.range(0..=seq_q), rng.range(0..=seq_kv)]);
        let case = Case {
            mask,
            dim_v: 5,
            lengths: Lengths::used(used.map(|u| u[0] as u32), used.map(|u| u[1] as u32)),
            ..Case::new(Tag::Random, "definition", [2, 4, 2, seq_q, seq_kv], 6)
        };
        let problem = case.problem(DType::F32).unwrap();
        let values = case.inputs.values([case.q, case.k, case.v()], &mut rng);
        let got = oracle_with(&problem, &case.values(0), &values[0], &values[1], &values[2]);
        for (row, out) in got.out.chunks(5).enumerate() {
            let at = got.grid.position(row * 5);
            let place = [at.batch, at.head, at.seq];
            let expected = by_definition(&case, f64::from(problem.scale()), &values, place, used[at.batch]);
            assert!(
                out.iter().zip(&expected).all(|(a, b)| close(*a, *b)),
                "{mask} at {at}: {out:?} {expected:?}"
            );
        }
    }
}

#[test]
fn sampled_rows_are_rows_of_the_whole() {
    let case = Case::new(Tag::Random, "sampled", [2, 2, 1, 37, 20], 8);
    let problem = case.problem(DType::F32).unwrap();
    let values = case.inputs.values([case.q, case.k, case.v()], &mut Rng::new(5));
    let data = [&values[0], &values[1], &values[2]].map(|x| f32::erase(x));
    let whole = plain::reference(Instance::new(&problem, Values::NONE).unwrap(), data, Rows::ALL);
    let rows = Rows::within(&problem, problem.flops() / 2.0 / 4.0);
    let sampled = plain::reference(Instance::new(&problem, Values::NONE).unwrap(), data, rows);
    assert_eq!((sampled.grid.step, sampled.grid.rows), (5, 8));
    for (row, out) in sampled.out.chunks(8).enumerate() {
        let at = sampled.grid.position(row * 8);
        let index = problem.lse_index(at.batch, at.head, at.seq);
        assert_eq!(out, &whole.out[index * 8..][..8], "{at}");
        assert_eq!(sampled.lse[row], whole.lse[index]);
    }
}

#[test]
fn the_yardstick_errs_about_as_much_as_its_type() {
    let case = Case::new(Tag::Random, "yardstick", [1, 2, 2, 64, 128], 64);
    let values = case.inputs.values([case.q, case.k, case.v()], &mut Rng::new(5));
    let error = |dtype: DType| {
        let problem = case.problem(dtype).unwrap();
        let rounded =
            values.clone().map(|x| x.iter().map(|&x| dtype.round(f64::from(x)) as f32).collect::<Vec<_>>());
        let data = [&rounded[0], &rounded[1], &rounded[2]].map(|x| f32::erase(x));
        let instance = Instance::new(&problem, Values::NONE).unwrap();
        let [a, b] =
            [plain::reference(instance, data, Rows::ALL), plain::yardstick(instance, data, Rows::ALL)];
        a.out.iter().zip(b.out).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    };
    for (dtype, range) in [(DType::F32, 1e-8..1e-6), (DType::F16, 1e-5..2e-3), (DType::BF16, 1e-4..2e-2)] {
        assert!(range.contains(&error(dtype)), "{dtype}: {}", error(dtype));
    }
}

/// An oracle of three rows of two features; the first row sees nothing.
fn three_rows() -> (Rule, Answer) {
    let problem = problem(3, 2, 2, |s| s.mask = Mask::CAUSAL);
    let oracle = oracle(&problem, &[1.0; 6], &[0.5, 1.0, 0.25, 0.5], &[1.0, 2.0, 3.0, 4.0]);
    (Rule::of(&problem), oracle)
}

#[test]
fn what_the_error_rule_refuses() {
    let (rule, oracle) = three_rows();
    let judge = |change: fn(&mut Answer)| {
        let mut got = oracle.clone();
        change(&mut got);
        rule.judge(&got, &oracle, &oracle).reason
    };
    assert_eq!(judge(|_| {}), None);
    assert_eq!(judge(|got| got.out[3] += 1e-8), None, "rounding noise is allowed");
    assert!(
        matches!(judge(|got| got.out[3] += 1e-3), Some(Reason::MaxError { at, .. }) if at.seq == 1 && at.dim == 1)
    );
    assert!(matches!(judge(|got| got.out[2] = f64::NAN), Some(Reason::NotFinite { .. })));
    assert!(matches!(judge(|got| got.out[2] = f64::INFINITY), Some(Reason::NotFinite { .. })));
    assert!(
        matches!(judge(|got| got.out[1] = 1e-30), Some(Reason::EmptyRowNotZero { at, .. }) if at.seq == 0)
    );
    assert_eq!(judge(|got| got.lse[1] += 0.9e-3), None);
    assert!(matches!(judge(|got| got.lse[1] += 1.1e-3), Some(Reason::Lse { at, .. }) if at.seq == 1));
    assert!(matches!(judge(|got| got.lse[0] = -1e30), Some(Reason::Lse { .. })), "only -inf is -inf");
    assert!(matches!(judge(|got| got.lse[1] = f64::NEG_INFINITY), Some(Reason::Lse { .. })));
    assert!(matches!(judge(|got| got.lse[1] = f64::NAN), Some(Reason::Lse { .. })));
    assert_eq!(judge(|got| got.lse.clear()), None, "no LSE asked for");
}

#[test]
fn the_yardstick_widens_the_tolerance_and_softcap_more_so() {
    let (rule, oracle) = three_rows();
    let mut yardstick = oracle.clone();
    yardstick.out[2] += 1e-3;
    let mut got = oracle.clone();
    got.out[3] += 1.9e-3;
    assert!(rule.judge(&got, &oracle, &yardstick).pass());
    got.out[3] += 0.5e-3;
    assert!(!rule.judge(&got, &oracle, &yardstick).pass());
    let capped = Rule::of(&problem(3, 2, 2, |s| s.softcap = Some(30.0)));
    assert!(capped.judge(&got, &oracle, &yardstick).pass());
    // The mean has a rule of its own: many errors, each within the largest allowed.
    let mut many = oracle.clone();
    many.out[2..].iter_mut().for_each(|x| *x += 1.9e-3);
    assert_eq!(rule.judge(&many, &oracle, &yardstick).reason, Some(Reason::MeanError));
    // A yardstick that overflowed allows nothing.
    yardstick.out[2] = f64::NAN;
    assert!(!rule.judge(&got, &oracle, &yardstick).pass());
}
