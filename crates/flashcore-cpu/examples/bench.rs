//! Times attention for `bench/cpu/compare.py`: reads one request per line, answers with one line of JSON.
//!
//! A request is `attention B HQ HKV SQ SKV D causal|full f32|f16|bf16|e4m3 REPETITIONS`, `gradients` with the same words but
//! e4m3, `pages SIZE` with those of attention and keys in pages of so many, or `read BYTES REPETITIONS` for the read bandwidth
//! of memory; the answer holds the seconds of each repetition. `causal:0.1` is a mask with dropout.
//! Arguments: the number of threads, and the name of a SIMD level to force.

use std::{
    io::{BufRead, stdin},
    time::Instant,
};

use flashcore_core::{
    BackwardCall, BackwardInputs, BackwardSpec, DType, Dims, Dropout, E4M3, Element, GradientsMut, HostCall,
    Layout, Lengths, Mask, PageTable, Problem, RowTerms, Spec, Values,
};
use flashcore_cpu::{Cpu, Scratch, SimdLevel};
use half::{bf16, f16};
use rayon::prelude::*;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let threads = std::env::args().nth(1).map_or(Ok(0), |n| n.parse())?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let level = match std::env::args().nth(2) {
        Some(name) => SimdLevel::ALL.into_iter().find(|l| l.name() == name).ok_or("unknown level")?,
        None => SimdLevel::detect(),
    };
    let cpu = Cpu::with_pool(pool.into()).with_simd(level)?;
    for line in stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [what @ ("attention" | "gradients"), ref shape @ .., mask, dtype, repetitions] => {
                let what = if what == "gradients" { What::Gradients } else { What::Attention };
                timed(&cpu, what, extents(shape)?, mask, dtype, repetitions.parse()?)?;
            }
            ["pages", size, ref shape @ .., mask, dtype, repetitions] => {
                timed(&cpu, What::Pages(size.parse()?), extents(shape)?, mask, dtype, repetitions.parse()?)?;
            }
            ["read", bytes, repetitions] => read(&cpu, bytes.parse()?, repetitions.parse()?),
            _ => return Err(format!("not a request: {line}").into()),
        }
    }
    Ok(())
}

/// What to time.
#[derive(Clone, Copy)]
enum What {
    Attention,
    Gradients,
    /// Attention to keys in pages of so many.
    Pages(usize),
}

fn extents(words: &[&str]) -> Result<[usize; 6], Failure> {
    let numbers = words.iter().map(|n| n.parse()).collect::<Result<Vec<usize>, _>>()?;
    Ok(numbers.try_into().map_err(|_| "six extents")?)
}

fn timed(
    cpu: &Cpu,
    what: What,
    shape: [usize; 6],
    mask: &str,
    dtype: &str,
    repetitions: usize,
) -> Result<(), Failure> {
    let (mask, dropout) = match mask.split_once(':') {
        Some((mask, probability)) => (mask, Some(Dropout::new(probability.parse()?))),
        None => (mask, None),
    };
    let mask = if mask == "causal" { Mask::CAUSAL } else { Mask::NONE };
    match dtype.parse()? {
        DType::F16 => typed::<f16, f16>(cpu, what, shape, (mask, dropout), repetitions),
        DType::BF16 => typed::<bf16, bf16>(cpu, what, shape, (mask, dropout), repetitions),
        DType::E4M3 => typed::<E4M3, bf16>(cpu, what, shape, (mask, dropout), repetitions),
        _ => typed::<f32, f32>(cpu, what, shape, (mask, dropout), repetitions),
    }
}

fn typed<T: Element, O: Element>(
    cpu: &Cpu,
    what: What,
    shape: [usize; 6],
    (mask, dropout): (Mask, Option<Dropout>),
    repetitions: usize,
) -> Result<(), Failure> {
    let [batch, heads_q, heads_kv, seq_q, seq_kv, dim] = shape;
    let q = Layout::bhsd(Dims::new(batch, heads_q, seq_q, dim))?;
    let kv = Layout::bhsd(Dims::new(batch, heads_kv, seq_kv, dim))?;
    // PyTorch's `is_causal` starts in the top left corner.
    let spec = Spec { mask: mask.top_left(), dropout, ..Spec::new(T::DTYPE, q, kv, kv) };
    let values = Values { seed: dropout.map(|_| 7), ..Values::default() };
    let data = [random::<T>(q.span(), 1), random::<T>(kv.span(), 2), random::<T>(kv.span(), 3)];
    match what {
        What::Attention => forward::<T, O>(cpu, &spec.parse()?, &values, &data, repetitions),
        What::Gradients => backward::<T>(cpu, &spec.parse()?, &values, &data, repetitions),
        What::Pages(size) => {
            // Pages take turns between the sequences, so that neighbours in one are not neighbours in memory.
            let columns = seq_kv.div_ceil(size);
            let table =
                (0..batch * columns).map(|n| (n % columns * batch + n / columns) as i32).collect::<Vec<_>>();
            let lengths = Lengths::keys(vec![u32::try_from(seq_kv)?; batch]);
            let table = Some(PageTable::new(table, columns));
            let values = Values { lengths, table, ..values };
            let pool = Layout::bshd(Dims::new(batch * columns, heads_kv, size, dim))?;
            let data = [random::<T>(q.span(), 1), random::<T>(pool.span(), 2), random::<T>(pool.span(), 3)];
            let problem = Spec { k: pool, v: pool, ..spec }.with(&values).parse()?;
            forward::<T, O>(cpu, &problem, &values, &data, repetitions)
        }
    }
}

fn forward<T: Element, O: Element>(
    cpu: &Cpu,
    problem: &Problem,
    values: &Values,
    [q, k, v]: &[Vec<T>; 3],
    repetitions: usize,
) -> Result<(), Failure> {
    let mut out = vec![O::from_f32(0.0); problem.out().span()];
    let mut scratch = Scratch::new();
    repeat(repetitions, problem.flops(), || {
        let mut call = HostCall::bind(problem, values, [q, k, v], &mut out, None)?;
        Ok((cpu.run_with(&mut call, &mut scratch)?, scratch.bytes()))
    })
}

fn backward<T: Element>(
    cpu: &Cpu,
    forward: &Problem,
    values: &Values,
    [q, k, v]: &[Vec<T>; 3],
    repetitions: usize,
) -> Result<(), Failure> {
    let problem = BackwardSpec::new(forward.spec().clone()).parse()?;
    let (mut out, mut lse) = (vec![T::from_f32(0.0); q.len()], vec![0.0; forward.rows()]);
    let mut scratch = Scratch::new();
    let mut call = HostCall::bind(forward, values, [q, k, v], &mut out, Some(&mut lse))?;
    cpu.run_with(&mut call, &mut scratch)?;
    let (d_out, terms) = (random::<T>(q.len(), 4), RowTerms::Out(T::erase(&out)));
    let [mut dq, mut dk, mut dv] = [q, k, v].map(Clone::clone);
    repeat(repetitions, problem.flops(), || {
        let qkv = [q, k, v].map(|tensor| T::erase(tensor));
        let inputs = BackwardInputs { qkv, lse: &lse, terms, d_out: T::erase(&d_out) };
        let qkv = [&mut dq, &mut dk, &mut dv].map(|grad| T::erase_mut(grad));
        let grads = GradientsMut { qkv, sinks: None };
        let mut call = BackwardCall::bind(&problem, values, inputs, grads)?;
        Ok((cpu.backward_with(&mut call, &mut scratch)?, scratch.bytes()))
    })
}

/// Runs something once more than `repetitions` times and prints how long it took, without the first.
fn repeat(
    repetitions: usize,
    flops: f64,
    mut run: impl FnMut() -> Result<(&'static str, usize), Failure>,
) -> Result<(), Failure> {
    let (mut seconds, mut ran) = (Vec::new(), ("", 0));
    for _ in 0..=repetitions {
        let start = Instant::now();
        ran = run()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    let (kernel, scratch) = ran;
    println!(
        r#"{{"kernel": "{kernel}", "flops": {flops}, "scratch": {scratch}, "seconds": {:?}}}"#,
        &seconds[1..]
    );
    Ok(())
}

/// Values in [−2, 2) with the spread of a normal distribution, from a small generator.
fn random<T: Element>(len: usize, seed: u64) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut draw = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 22) as f32 - 2.0
    };
    (0..len).map(|_| T::from_f32(draw())).collect()
}

/// Reads memory from all threads, as fast as it goes.
fn read(cpu: &Cpu, bytes: usize, repetitions: usize) {
    let data = vec![1u64; bytes / 8];
    let mut seconds = Vec::new();
    for _ in 0..repetitions {
        let start = Instant::now();
        let sum: u64 = cpu.install(|| {
            data.par_chunks(1 << 16).map(|chunk| chunk.iter().fold(0u64, |a, x| a.wrapping_add(*x))).sum()
        });
        seconds.push(start.elapsed().as_secs_f64());
        assert_eq!(sum, data.len() as u64, "all was read");
    }
    println!(r#"{{"bytes": {bytes}, "seconds": {seconds:?}}}"#);
}
