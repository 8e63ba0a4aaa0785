//! Keys in pages give the bits that the same keys give together, whatever the size of a page.

use flashcore_core::{
    DType, Dims, Element, HostCall, Layout, Lengths, Mask, PageTable, Problem, Spec, Values,
};
use flashcore_cpu::Cpu;
use flashcore_testkit::Rng;
use half::{bf16, f16};

const HEADS: [usize; 2] = [4, 2];
const DIM: usize = 64;
/// Queries and keys of each sequence: a prompt, a part of one, single queries, nothing.
const PAIRS: [(u32, u32); 5] = [(150, 150), (40, 333), (1, 700), (1, 31), (0, 5)];

fn offsets(of: fn(&(u32, u32)) -> u32) -> Vec<u32> {
    let ends = PAIRS.iter().scan(0, |end, pair| {
        *end += of(pair);
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

fn run<T: Element>(problem: &Problem, values: &Values, qkv: [&[T]; 3]) -> (Vec<T>, Vec<f32>) {
    let mut out = vec![T::from_f32(f32::NAN); problem.out().span()];
    let mut lse = vec![f32::NAN; problem.rows()];
    let mut call = HostCall::bind(problem, values, qkv, &mut out, Some(&mut lse)).unwrap();
    flashcore_core::Backend::forward(&Cpu::with_threads(2).unwrap(), &mut call).unwrap();
    (out, lse)
}

fn normal<T: Element>(rng: &mut Rng, dims: Dims) -> Vec<T> {
    (0..dims.count().unwrap()).map(|_| T::from_f32(rng.normal())).collect()
}

/// Rows of packed keys (sequence, heads, dim) moved into pages that run backwards through the pool.
fn into_pages<T: Element>(rows: &[T], size: usize) -> (Vec<T>, PageTable, usize) {
    let width = HEADS[1] * DIM;
    let needed = PAIRS.map(|pair| (pair.1 as usize).div_ceil(size));
    let (pages, columns) = (needed.iter().sum::<usize>(), *needed.iter().max().unwrap());
    let mut pool = vec![T::from_f32(f32::NAN); pages * size * width];
    let (mut numbers, mut next, mut first) = (Vec::new(), pages, 0);
    for ((_, keys), needed) in PAIRS.into_iter().zip(needed) {
        let keys = keys as usize;
        next -= needed;
        let row = (0..columns).map(|n| if n < needed { (next + needed - 1 - n) as i32 } else { -1 });
        numbers.extend(row);
        for key in 0..keys {
            let to = (next + needed - 1 - key / size) * size + key % size;
            pool[to * width..][..width].copy_from_slice(&rows[(first + key) * width..][..width]);
        }
        first += keys;
    }
    (pool, PageTable::new(numbers, columns), pages)
}

fn check<T: Element>(dtype: DType, mask: Mask) {
    let (of_q, of_kv) = (offsets(|pair| pair.0), offsets(|pair| pair.1));
    let dims = |heads, rows: u32| Dims::new(1, heads, rows as usize, DIM);
    let (dims_q, dims_kv) = (dims(HEADS[0], of_q[PAIRS.len()]), dims(HEADS[1], of_kv[PAIRS.len()]));
    let mut rng = Rng::new(5);
    let (q, k, v) = (normal::<T>(&mut rng, dims_q), normal(&mut rng, dims_kv), normal(&mut rng, dims_kv));
    let [lay_q, lay_kv] = [dims_q, dims_kv].map(|dims| Layout::bshd(dims).unwrap());
    let together = Values { lengths: Lengths::ragged(of_q.clone(), of_kv), ..Values::default() };
    let spec = Spec { mask, ..Spec::new(dtype, lay_q, lay_kv, lay_kv) };
    let expected = run(&spec.clone().with(&together).parse().unwrap(), &together, [&q[..], &k, &v]);
    for size in [1, 3, 16, 32, 128, 1000] {
        let ((k, table, pages), (v, ..)) = (into_pages(&k, size), into_pages(&v, size));
        let lengths = Lengths::packed_queries(of_q.clone(), PAIRS.map(|pair| pair.1));
        let paged = Values { lengths, table: Some(table), ..Values::default() };
        let pool = Layout::bshd(Dims::new(pages, HEADS[1], size, DIM)).unwrap();
        let spec = Spec { k: pool, v: pool, ..spec.clone() }.with(&paged);
        let got = run(&spec.parse().unwrap(), &paged, [&q[..], &k, &v]);
        assert!(got == expected, "{dtype}, {mask}, pages of {size}");
    }
}

#[test]
fn pages_change_no_bits() {
    for mask in [Mask::NONE, Mask::CAUSAL, Mask::window(100, 0)] {
        check::<f32>(DType::F32, mask);
        check::<f16>(DType::F16, mask);
        check::<bf16>(DType::BF16, mask);
    }
}
