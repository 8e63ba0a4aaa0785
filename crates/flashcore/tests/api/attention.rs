//! The public API: whatever the arguments, an error or a right result, never a panic.

use std::ops::Range;

use flashcore::{
    Attention, BackendError, BackendKind, Element, Error, Instance, Lengths, Mask, Ran, Tensor, TensorView,
    TensorViewMut, Values, attention, available, backend, bf16, merge, merge_stacked,
};
use flashcore_testkit::{NaiveBackend, Rng, Rows, judge};
use proptest::{prelude::*, strategy::ValueTree};

/// Arguments of a call, good or bad.
#[derive(Clone, Debug)]
struct Arguments {
    dims: [[usize; 4]; 4],
    strides: [[usize; 4]; 4],
    missing: [usize; 4],
    mask: Mask,
    scale: Option<f32>,
    softcap: Option<f32>,
    sinks: Option<Vec<f32>>,
    lengths: Lengths,
    seed: u64,
}

const ELEMENTS: usize = 4096;

/// Extents that fit each other, then changed here and there.
fn arguments() -> impl Strategy<Value = Arguments> {
    let shape = ([0usize..4, 1..4, 1..3, 0..10], [0usize..10, 1..10, 1..10]);
    let changes = proptest::collection::vec((0usize..4, 0usize..4, extent()), 0..2);
    let options = (
        mask(),
        positive(&[1e-39]),
        positive(&[]),
        proptest::option::of(proptest::collection::vec(logit(), 1..7)),
    );
    (shape, strides(), changes, options, lengths(), any::<u64>()).prop_map(
        |(
            ([batch, heads_kv, group, seq_q], [seq_kv, dim, dim_v]),
            strides,
            changes,
            options,
            lengths,
            seed,
        )| {
            let heads_q = heads_kv * group;
            let mut dims = [
                [batch, heads_q, seq_q, dim],
                [batch, heads_kv, seq_kv, dim],
                [batch, heads_kv, seq_kv, dim_v],
                [batch, heads_q, seq_q, dim_v],
            ];
            changes.into_iter().for_each(|(tensor, extent, to)| dims[tensor][extent] = to);
            let mut rng = Rng::new(seed);
            let missing = [(); 4].map(|()| if rng.one_in(20) { rng.range(1..=ELEMENTS) } else { 0 });
            let strides = [0, 1, 2, 3].map(|i| if strides.0 == i { strides.1 } else { dense(dims[i]) });
            let (mask, scale, softcap, sinks) = options;
            Arguments { dims, strides, missing, mask, scale, softcap, sinks, lengths, seed }
        },
    )
}

fn dense([_, heads, seq, dim]: [usize; 4]) -> [usize; 4] {
    let product = |factors: &[usize]| factors.iter().fold(1usize, |a, &b| a.wrapping_mul(b));
    [product(&[heads, seq, dim]), product(&[seq, dim]), dim, 1]
}

fn extent() -> impl Strategy<Value = usize> {
    prop_oneof![3 => 0usize..12, 1 => prop_oneof![Just(usize::MAX), Just(1 << 31), Just(1 << 62), Just(1 << 33)]]
}

/// One tensor's strides: mostly plausible, at times absurd. 0 is left out with the extents beyond memory in mind.
fn strides() -> impl Strategy<Value = (usize, [usize; 4])> {
    let stride = || prop_oneof![6 => 1usize..200, 1 => Just(usize::MAX), 1 => Just(1 << 61)];
    let innermost = prop_oneof![8 => Just(1usize), 1 => 0usize..4];
    (0usize..8, stride(), stride(), stride(), innermost).prop_map(|(i, b, h, s, d)| (i, [b, h, s, d]))
}

fn mask() -> impl Strategy<Value = Mask> {
    let bound = || proptest::option::of(prop_oneof![0u32..12, Just(u32::MAX)]);
    (bound(), bound(), any::<bool>()).prop_map(|(left, right, top_left)| {
        let band = Mask::window(left, right);
        if top_left { band.top_left() } else { band }
    })
}

fn positive(odd: &[f32]) -> impl Strategy<Value = Option<f32>> {
    let odd = [&[0.0, -1.0, f32::NAN, f32::INFINITY], odd].concat();
    let odd = proptest::sample::select(odd).prop_map(Some);
    prop_oneof![20 => Just(None), 8 => (0.01f32..4.0).prop_map(Some), 1 => odd]
}

fn logit() -> impl Strategy<Value = f32> {
    prop_oneof![20 => -4f32..4.0, 1 => Just(f32::NAN), 1 => Just(f32::NEG_INFINITY), 1 => Just(f32::INFINITY)]
}

fn lengths() -> impl Strategy<Value = Lengths> {
    let list = |range: Range<u32>| proptest::collection::vec(range, 0..5);
    prop_oneof![
        4 => Just(Lengths::Uniform),
        2 => list(0..12).prop_map(Lengths::keys),
        1 => (list(0..12), list(0..12)).prop_map(|(q, kv)| Lengths::used(q, kv)),
        1 => (list(0..10), list(0..10)).prop_map(|(q, kv)| Lengths::ragged(sorted(q), sorted(kv))),
    ]
}

fn sorted(mut offsets: Vec<u32>) -> Vec<u32> {
    offsets.sort_unstable();
    offsets
}

fn described<'a>(arguments: &Arguments, [q, k, v]: [TensorView<'a, f32>; 3]) -> Attention<'a, f32> {
    let call = attention(q, k, v).mask(arguments.mask).lengths(arguments.lengths.clone());
    let call = arguments.scale.into_iter().fold(call, Attention::scale);
    let call = arguments.softcap.into_iter().fold(call, Attention::softcap);
    arguments.sinks.clone().into_iter().fold(call, Attention::sinks)
}

/// Runs the call both ways: an error, or a right result (else the test fails).
fn attempt(arguments: &Arguments) -> Result<(), Error> {
    let mut rng = Rng::new(arguments.seed);
    let mut tensor =
        |i: usize| -> Vec<f32> { (arguments.missing[i]..ELEMENTS).map(|_| rng.normal()).collect() };
    let ([q, k, v], mut out) = ([tensor(0), tensor(1), tensor(2)], tensor(3));
    let view = |data, i: usize| TensorView::strided(data, arguments.dims[i], arguments.strides[i]);
    let views = [view(&q, 0)?, view(&k, 1)?, view(&v, 2)?];
    let problem = described(arguments, views).problem()?;
    let result = described(arguments, views).run()?;
    let data = [&q, &k, &v].map(|x| f32::erase(x));
    let got = f32::erase(result.out.data());
    let values = Values {
        lengths: arguments.lengths.clone(),
        sinks: arguments.sinks.clone().map(Into::into),
        ..Values::default()
    };
    let instance = Instance::new(&problem, &values).expect("the call was computed");
    let verdict = judge(instance, data, got, Some(result.lse.values()), Rows::ALL);
    assert!(verdict.pass(), "{verdict}");
    let (dims, strides) = (arguments.dims[3], arguments.strides[3]);
    described(arguments, views).run_into(TensorViewMut::strided(&mut out, dims, strides)?, None)?;
    assert_same_rows(result.out.view(), TensorView::strided(&out, dims, strides)?);
    Ok(())
}

fn assert_same_rows(a: TensorView<'_, f32>, b: TensorView<'_, f32>) {
    let [batch, heads, seq, _] = a.layout().dims().array();
    for (b_, h, s) in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..seq).map(move |s| (b, h, s))))
    {
        assert_eq!(a.row(b_, h, s), b.row(b_, h, s), "row {b_},{h},{s}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn any_arguments_give_an_error_or_a_right_result(arguments in arguments()) {
        if let Err(error) = attempt(&arguments) {
            prop_assert!(error.to_string().len() > 20, "{error}");
        }
    }
}

#[test]
fn random_arguments_are_neither_all_good_nor_all_bad() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let draw = |runner: &mut _| arguments().new_tree(runner).expect("arguments can be drawn").current();
    let good = (0..300).filter(|_| attempt(&draw(&mut runner)).is_ok()).count();
    assert!((30..270).contains(&good), "{good} of 300 are good");
}

fn sample() -> Tensor<f32> {
    let mut rng = Rng::new(1);
    Tensor::bhsd((0..2 * 3 * 20 * 16).map(|_| rng.normal()).collect(), [2, 3, 20, 16])
        .expect("enough elements")
}

#[test]
fn auto_is_the_best_backend_found() {
    let best = available().into_iter().find(|found| found.backend.is_ok()).expect("the CPU is always there");
    assert_eq!(backend(BackendKind::Auto).expect("a backend").name(), best.kind.name());
    let x = sample();
    let result = attention(x.view(), x.view(), x.view()).run().expect("a result");
    assert!(!result.ran.kernel.is_empty());
}

#[test]
fn a_backend_of_ones_own_is_used() {
    let x = sample();
    let own = attention(x.view(), x.view(), x.view()).on(&NaiveBackend).run().expect("a result");
    let cpu = attention(x.view(), x.view(), x.view()).backend(BackendKind::Cpu).run().expect("a result");
    assert_eq!(own.ran, Ran { kernel: "unfused".to_owned() });
    let near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-5;
    assert!(own.out.data().iter().zip(cpu.out.data()).all(near));
    assert!(own.lse.values().iter().zip(cpu.lse.values()).all(near));
    assert_eq!(own.lse.dims(), [2, 3, 20]);
}

#[test]
fn backends_are_named() {
    for kind in BackendKind::ALL {
        assert_eq!(kind.to_string().parse(), Ok(kind));
    }
    let error = "gpu".parse::<BackendKind>().expect_err("no such backend");
    assert_eq!(error.to_string(), "unknown backend `gpu`; use auto, cpu or cuda");
}

#[test]
fn a_backend_that_is_not_there_says_why() {
    let cuda = available().into_iter().find(|found| found.kind == BackendKind::Cuda);
    let built = cuda.is_some();
    if cuda.is_some_and(|found| found.backend.is_ok()) {
        return;
    }
    let x = sample();
    let run = attention(x.view(), x.view(), x.view()).backend(BackendKind::Cuda).run();
    let Err(Error::Backend(BackendError::Unavailable { backend: "cuda", reason })) = run else {
        panic!("{run:?}");
    };
    assert!(!reason.is_empty() && built != reason.contains("enable the cargo feature"), "{reason}");
}

#[cfg(feature = "cuda")]
#[test]
fn only_what_the_user_set_wrongly_is_not_passed_over() {
    use flashcore::cuda::{Error, driver};
    let [absent, wrong] = [
        driver::Error::NoDriver,
        driver::Error::BadTool { variable: "FLASHCORE_PTXAS", path: "/no/ptxas".into() },
    ]
    .map(|error| Error::from(error).on_opening());
    assert!(
        matches!(&absent, BackendError::Unavailable { reason, .. } if reason.contains("driver")),
        "{absent}"
    );
    assert!(matches!(wrong, BackendError::Failed { .. }), "{wrong}");
}

/// They take no memory, so that nothing keeps a caller from having 2^62 of them.
#[test]
fn empty_sequences_take_no_time() {
    let none: [f32; 0] = [];
    let most = i32::MAX as usize;
    let x = TensorView::bhsd(&none, [most, most, 0, 64]).expect("a legal view");
    let result = attention(x, x, x).run().expect("nothing to do");
    assert!(result.out.data().is_empty() && result.lse.values().is_empty());
}

#[test]
fn extents_beyond_memory_are_an_error() {
    // One element seen 2^59 times over: a legal input whose output cannot exist.
    let one = [1.0_f32];
    let q = TensorView::strided(&one, [1 << 29, 1, 1 << 30, 1], [0, 0, 0, 1]).expect("a legal view");
    let kv = TensorView::strided(&one, [1 << 29, 1, 1, 1], [0, 0, 0, 1]).expect("a legal view");
    let error = attention(q, kv, kv).run().expect_err("no memory");
    assert!(error.to_string().contains("cannot allocate"), "{error}");
}

#[test]
fn results_do_not_change_with_the_call() {
    let x = sample();
    let twice =
        [0, 1].map(|_| attention(x.view(), x.view(), x.view()).mask(Mask::CAUSAL).run().expect("a result"));
    assert_eq!(twice[0], twice[1]);
}

/// Two and three parts of the keys, at addresses of their own and stacked, against attention over all keys.
#[test]
fn merged_parts_are_the_whole() -> Result<(), Error> {
    let mut rng = Rng::new(3);
    let mut tensor = |seq: usize| {
        Tensor::bhsd((0..2 * seq * 16).map(|_| rng.normal()).collect::<Vec<f32>>(), [1, 2, seq, 16])
    };
    let (q, kv) = (tensor(5)?, tensor(90)?);
    let part = |keys: Range<usize>| {
        let layout = [2 * 90 * 16, 90 * 16, 16, 1];
        let view = TensorView::strided(&kv.data()[keys.start * 16..], [1, 2, keys.len(), 16], layout)?;
        attention(q.view(), view, view).backend(BackendKind::Cpu).run()
    };
    let (whole, a, b) = (part(0..90)?, part(0..31)?, part(31..90)?);
    let near = |got: &[f32], tolerance: f32| {
        got.iter().zip(whole.out.data()).all(|(x, y)| (x - y).abs() < tolerance)
    };
    let views = [a.out.view(), b.out.view()];
    let listed = merge(&views, &[a.lse.values(), b.lse.values()]).backend(BackendKind::Cpu).run()?;
    assert!(near(listed.out.data(), 1e-6));
    assert!(listed.lse.values().iter().zip(whole.lse.values()).all(|(x, y)| (x - y).abs() < 1e-5));
    let (data, lses) = ([a.out.data(), b.out.data()].concat(), [a.lse.values(), b.lse.values()].concat());
    let stack = TensorView::bhsd(&data, [2, 2, 5, 16])?;
    assert_eq!(merge_stacked(stack, 2, &lses).backend(BackendKind::Cpu).run()?.out, listed.out);
    let mut out = vec![bf16::ZERO; 160];
    let into = TensorViewMut::bshd(&mut out, [1, 2, 5, 16])?;
    merge(&views, &[a.lse.values(), b.lse.values()]).backend(BackendKind::Cpu).run_into(into, None)?;
    assert!((out[16].to_f32() - whole.out.data()[5 * 16]).abs() < 1e-2, "the second head of the first row");
    Ok(())
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let (data, lse) = ([0f32; 64], [0f32; 4]);
    let view = |dims| TensorView::bhsd(&data, dims).unwrap();
    let (part, other) = (view([1, 1, 4, 8]), view([1, 2, 2, 8]));
    let says = |attempt: Result<flashcore::Output<f32>, Error>| attempt.unwrap_err().to_string();
    assert!(says(merge::<f32>(&[], &[]).run()).contains("0 parts"));
    assert!(says(merge(&[part; 17], &[lse.as_slice(); 17]).run()).contains("1 to 16"));
    assert!(says(merge(&[part, other], &[lse.as_slice(); 2]).run()).contains("part 1 differs from part 0"));
    assert!(says(merge(&[part, part], &[&lse]).run()).contains("1 buffers for the lse"));
    assert!(
        says(merge_stacked(view([4, 1, 1, 8]), 3, &lse).run()).contains("batch 4 cannot be split into 3")
    );
    assert!(says(merge_stacked(view([4, 1, 1, 8]), 0, &lse).run()).contains("0 parts"));
    assert!(says(merge_stacked(view([4, 1, 1, 8]), 2, &lse[..3]).run()).contains("lse holds 3 values"));
}
