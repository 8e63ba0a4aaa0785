//! Bits do not depend on the threads, pools can be shared and nested, and missing instructions are an error.

use std::sync::Arc;

use flashcore_core::{Backend, DType, Dims, HostCall, Layout, Mask, Problem, Spec, Values};
use flashcore_cpu::{Cpu, SimdLevel, Tiles};
use flashcore_testkit::Rng;
use rayon::prelude::*;

struct Run {
    problem: Problem,
    inputs: [Vec<f32>; 3],
}

impl Run {
    fn new([batch, heads_q, heads_kv, seq_q, seq_kv, dim]: [usize; 6], mask: Mask) -> Self {
        let layout = |heads, seq| Layout::bhsd(Dims::new(batch, heads, seq, dim)).unwrap();
        let (q, kv) = (layout(heads_q, seq_q), layout(heads_kv, seq_kv));
        let problem = Spec { mask, ..Spec::new(DType::F32, q, kv, kv) }.parse().unwrap();
        let mut rng = Rng::new(3);
        let inputs = [q, kv, kv].map(|l| (0..l.span()).map(|_| rng.normal()).collect());
        Self { problem, inputs }
    }

    fn bits(&self, backend: &Cpu) -> Vec<u32> {
        let [q, k, v] = &self.inputs;
        let mut out = vec![f32::NAN; self.problem.out().span()];
        let mut lse = vec![f32::NAN; self.problem.rows()];
        backend
            .forward(
                &mut HostCall::bind(&self.problem, Values::NONE, [q, k, v], &mut out, Some(&mut lse))
                    .unwrap(),
            )
            .unwrap();
        out.iter().chain(&lse).map(|x| x.to_bits()).collect()
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let shapes = [[1, 3, 1, 200, 300, 64], [2, 8, 2, 1, 3000, 48], [1, 2, 2, 40, 4100, 32]];
    for (shape, mask) in shapes.into_iter().flat_map(|s| [(s, Mask::NONE), (s, Mask::CAUSAL)]) {
        let run = Run::new(shape, mask);
        for level in SimdLevel::ALL.into_iter().filter(|l| l.is_available()) {
            let one = run.bits(&Cpu::with_threads(1).unwrap().with_simd(level).unwrap());
            for threads in [2, 3, 8] {
                let many = run.bits(&Cpu::with_threads(threads).unwrap().with_simd(level).unwrap());
                assert!(one == many, "{shape:?} {mask} {level} {threads} threads");
            }
        }
    }
}

#[test]
fn calls_nest_in_a_rayon_program() {
    let run = Run::new([1, 4, 2, 130, 150, 64], Mask::CAUSAL);
    let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap());
    let expected = run.bits(&Cpu::with_threads(1).unwrap());
    for backend in [Cpu::new(), Cpu::with_pool(pool.clone()), Cpu::with_threads(2).unwrap()] {
        let same = |_| run.bits(&backend) == expected;
        assert!((0..16).into_par_iter().map(same).all(|same| same), "from the global pool");
        assert!(pool.install(|| (0..16).into_par_iter().map(same).all(|same| same)), "from the shared pool");
    }
}

#[test]
fn missing_instructions_are_an_error() {
    for level in SimdLevel::ALL {
        let made = Cpu::new().with_simd(level);
        assert_eq!(made.is_ok(), level.is_available(), "{level}");
    }
    assert!(SimdLevel::detect().is_available());
}

#[test]
fn block_sizes_change_no_more_than_rounding() {
    for shape in [[1, 3, 1, 200, 300, 64], [1, 2, 2, 40, 4100, 32]] {
        let run = Run::new(shape, Mask::CAUSAL);
        let cpu = Cpu::with_threads(2).unwrap();
        let usual = run.bits(&cpu);
        let close = |bits: &[u32]| {
            let pairs = bits.iter().zip(&usual).map(|(a, b)| (f32::from_bits(*a), f32::from_bits(*b)));
            pairs.into_iter().all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs().max(1.0))
        };
        for (keys, chunk) in Tiles::KEYS.into_iter().flat_map(|keys| Tiles::CHUNKS.map(|chunk| (keys, chunk)))
        {
            let tiles = Tiles::new(keys, chunk).unwrap();
            let bits = run.bits(&cpu.clone().with_tiles(tiles));
            assert!(close(&bits), "{shape:?} {tiles}");
            assert!(
                keys != Tiles::USUAL.keys() || bits == usual,
                "{shape:?} {tiles}: a chunk changes no bits"
            );
        }
    }
    assert_eq!((Tiles::new(100, 4), Tiles::new(128, 0), Tiles::new(usize::MAX, 1)), (None, None, None));
}
