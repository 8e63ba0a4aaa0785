//! Gradients: the suite with each SIMD level forced in turn, bits that do not depend on threads, memory that is linear.

use flashcore_core::{
    Backend, BackwardCall, BackwardInputs, BackwardProblem, BackwardSpec, DType, Dims, Element, GradientsMut,
    Layout, Mask, RowTerms, Spec, Values,
};
use flashcore_cpu::{Cpu, Scratch, SimdLevel};
use flashcore_testkit::{Rng, backward, cases::Cost};
use half::{bf16, f16};

/// Runs the suite on `level`; says so where the machine lacks it.
fn check(level: SimdLevel) {
    let Ok(cpu) = Cpu::with_threads(2).unwrap().with_simd(level) else {
        println!("this machine has no {level}: nothing checked");
        return;
    };
    // The level that users get is checked in every type, except in an emulator, which takes its time. Others get each third
    // case, and so some of every subject.
    let emulated = std::env::var_os("QEMU_LD_PREFIX").is_some();
    let most = level == SimdLevel::detect() && !emulated;
    let (step, randoms) = if most { (1, 40) } else { (3, if emulated { 10 } else { 40 }) };
    let all = backward::cases(Cost::Tiny);
    let cases: Vec<_> = all.iter().step_by(step).cloned().collect();
    let is_left = |tag| cases.iter().any(|case| case.forward.tag == tag);
    assert!(all.iter().all(|case| is_left(case.forward.tag)), "a subject is left out");
    let per_case = if most { 3 } else { 1 };
    let failures = backward::failures(&cpu, &cases, per_case, randoms);
    assert!(failures.is_empty(), "{level}: {} failures\n{}", failures.len(), failures.join("\n"));
}

at_every_level!(check);

/// Gradients with the tensors that they are computed from.
struct Run<T> {
    problem: BackwardProblem,
    qkv: [Vec<T>; 3],
    d_out: Vec<T>,
    lse: Vec<f32>,
}

impl<T: Element> Run<T> {
    fn new(shape: [usize; 5], mask: Mask) -> Self {
        Self::with_batch(1, shape, mask)
    }

    fn with_batch(batch: usize, [heads_q, heads_kv, seq_q, seq_kv, dim]: [usize; 5], mask: Mask) -> Self {
        let layout = |heads, seq| Layout::bhsd(Dims::new(batch, heads, seq, dim)).unwrap();
        let (q, kv) = (layout(heads_q, seq_q), layout(heads_kv, seq_kv));
        let problem = BackwardSpec::new(Spec { mask, ..Spec::new(T::DTYPE, q, kv, kv) }).parse().unwrap();
        let mut rng = Rng::new(3);
        let mut draw =
            |layout: Layout| (0..layout.span()).map(|_| T::from_f32(rng.normal())).collect::<Vec<T>>();
        let (qkv, d_out) = ([draw(q), draw(kv), draw(kv)], draw(q));
        // Any LSE will do for bits and memory.
        Self { problem, qkv, d_out, lse: vec![6.0; batch * heads_q * seq_q] }
    }

    fn call<R>(&self, run: impl FnOnce(&mut BackwardCall<'_>) -> R) -> ([Vec<T>; 3], R) {
        let [q, k, v] = &self.qkv;
        let out = T::erase(&self.d_out);
        let inputs = BackwardInputs {
            qkv: [q, k, v].map(|x| T::erase(x)),
            lse: &self.lse,
            terms: RowTerms::Out(out),
            d_out: out,
        };
        let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| vec![T::from_f32(f32::NAN); x.len()]);
        let grads = GradientsMut { qkv: [&mut dq, &mut dk, &mut dv].map(|x| T::erase_mut(x)), sinks: None };
        let ran = run(&mut BackwardCall::bind(&self.problem, Values::NONE, inputs, grads).unwrap());
        ([dq, dk, dv], ran)
    }
}

/// Few heads and many key blocks, so that threads meet in one head.
fn bits_follow_no_threads<T: Element>() {
    for shape in [[1, 1, 200, 900, 40], [4, 2, 130, 300, 64]] {
        for mask in [Mask::NONE, Mask::CAUSAL, Mask::window(100, 20)] {
            let run = Run::<T>::new(shape, mask);
            for level in SimdLevel::ALL.into_iter().filter(|level| level.is_available()) {
                let on = |threads| {
                    let cpu = Cpu::with_threads(threads).unwrap().with_simd(level).unwrap();
                    run.call(|call| cpu.backward(call).unwrap()).0
                };
                let one = on(1);
                for threads in [2, 3, 8] {
                    assert!(one == on(threads), "{} {shape:?} {mask} {level} {threads} threads", T::DTYPE);
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    bits_follow_no_threads::<f32>();
    bits_follow_no_threads::<f16>();
    bits_follow_no_threads::<bf16>();
}

#[test]
fn bits_do_not_depend_on_the_batch() {
    let (shape, cpu) = ([4, 2, 130, 300, 64], Cpu::with_threads(2).unwrap());
    let three = Run::<f32>::with_batch(3, shape, Mask::CAUSAL);
    let (all, _) = three.call(|call| cpu.backward(call).unwrap());
    let mut one = Run::<f32>::new(shape, Mask::CAUSAL);
    // The last entry of the batch, by itself.
    let last = |data: &[f32]| data[data.len() / 3 * 2..].to_vec();
    (one.qkv, one.d_out) = (three.qkv.each_ref().map(|data| last(data)), last(&three.d_out));
    let (alone, _) = one.call(|call| cpu.backward(call).unwrap());
    assert!(alone.iter().zip(&all).all(|(alone, all)| *alone == last(all)));
}

#[test]
fn working_memory_does_not_grow_with_the_sequence() {
    let cpu = Cpu::with_threads(2).unwrap();
    for (dim, limit) in [(64, 1 << 20), (128, 2 << 20), (256, 3 << 20)] {
        let mut scratch = Scratch::new();
        for seq in [300, 5000] {
            // A narrow band keeps the test short; memory depends on the shape alone.
            let run = Run::<f32>::new([2, 1, seq, seq, dim], Mask::window(30, 0));
            run.call(|call| cpu.backward_with(call, &mut scratch).unwrap());
        }
        assert!(scratch.bytes() < 2 * limit, "{} bytes for two threads, dim {dim}", scratch.bytes());
    }
}

#[test]
fn kernels_name_their_instructions() {
    let name = |level| {
        let run = Run::<bf16>::new([1, 1, 9, 9, 8], Mask::NONE);
        run.call(|call| Cpu::new().with_simd(level).unwrap().backward(call).unwrap().kernel).1
    };
    for level in SimdLevel::ALL.into_iter().filter(|level| level.is_available()) {
        // Matrix units have no part in gradients.
        let used = if level == SimdLevel::Amx { SimdLevel::Avx512 } else { level };
        assert_eq!(name(level), format!("backward-{used}"));
    }
    assert_eq!(DType::BF16, bf16::DTYPE);
}
