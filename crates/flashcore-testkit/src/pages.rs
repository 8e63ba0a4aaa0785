//! Keys in pages: cases, and the same problem with every sequence's keys contiguous, which the oracle computes.

use flashcore_core::{DType, Data, Dims, Instance, Layout, Lengths, PageTable, Problem, Spec, Values};

use crate::{
    cases::{Case, Tag},
    rng::Rng,
    values,
};

/// How the keys of a case lie in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Paging {
    /// Keys of a page.
    pub size: usize,
    /// Whether queries are packed, not padded.
    pub packed: bool,
    /// Pages at the start that all sequences share, as far as they have so many.
    pub shared: usize,
}

impl Paging {
    /// Pages of so many keys, padded queries, nothing shared.
    pub const fn of(size: usize) -> Self {
        Self { size, packed: false, shared: 0 }
    }
}

/// Numbers in table entries that must not be read.
const GARBAGE: [i32; 4] = [-1, i32::MAX, i32::MIN, 1 << 20];

impl Case {
    /// Sequences of `(queries, keys)` whose keys lie in pages, in an order drawn from the case's name.
    pub fn paged(
        name: impl Into<String>,
        paging: Paging,
        pairs: &[(u32, u32)],
        [heads_q, heads_kv]: [usize; 2],
        dim: usize,
    ) -> Self {
        let name = name.into();
        let seed = name.bytes().fold(7, |sum: u64, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        let (table, pages) = table(paging, pairs, &mut Rng::new(seed));
        let (q, kv): (Vec<u32>, Vec<u32>) = pairs.iter().copied().unzip();
        let longest = q.iter().copied().max().unwrap_or(0) as usize;
        let total = q.iter().sum::<u32>() as usize;
        let [batch, rows] = if paging.packed { [1, total] } else { [pairs.len(), longest] };
        let lengths = match paging.packed {
            true => Lengths::packed_queries(offsets(&q), kv),
            false if q.iter().all(|&len| len as usize == longest) => Lengths::keys(kv),
            false => Lengths::used(q, kv),
        };
        let shape = [batch, heads_q, heads_kv, rows, paging.size];
        let case = Self::new(Tag::Pages, name, shape, dim);
        Self { k: Dims { batch: pages, ..case.k }, lengths, table: Some(table), ..case }
    }
}

/// Where packed rows of the given lengths start, and where the last end.
pub(crate) fn offsets(lengths: &[u32]) -> Vec<u32> {
    let ends = lengths.iter().scan(0, |end, len| {
        *end += len;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// A table with a column more than the longest sequence needs, and the number of pages, of which some are free.
fn table(paging: Paging, pairs: &[(u32, u32)], rng: &mut Rng) -> (PageTable, usize) {
    let needed: Vec<usize> = pairs.iter().map(|pair| (pair.1 as usize).div_ceil(paging.size)).collect();
    let columns = needed.iter().max().unwrap_or(&0) + 1;
    let pages = paging.shared + needed.iter().sum::<usize>() + 2;
    let order = rng.permutation(pages);
    let (shared, mut own) = (&order[..paging.shared], order[paging.shared..].iter());
    let mut numbers = Vec::with_capacity(pairs.len() * columns);
    for &used in &needed {
        let garbage = (0..).map(|n| GARBAGE[n % GARBAGE.len()]);
        let pages = shared.iter().chain(own.by_ref()).take(used);
        let row: Vec<i32> = pages.map(|&page| page as i32).chain(garbage).take(columns).collect();
        numbers.extend(row);
    }
    (PageTable::new(numbers, columns), pages)
}

/// Whether a row of a page holds a key of some sequence.
pub(crate) fn holds_key(problem: Instance<'_>, page: usize, row: usize) -> bool {
    let (Some(table), Some(size)) = (&problem.values().table, problem.page_size()) else { return false };
    (0..problem.sequences()).any(|n| {
        let keys = problem.sequence(n).kv_len;
        let used = table.row(n).iter().take(keys.div_ceil(size)).enumerate();
        used.into_iter().any(|(column, &number)| number as usize == page && column * size + row < keys)
    })
}

/// A paged problem, or one of packed keys, with every sequence's keys together; those of a cache of 8 bits multiplied by
/// their factors.
#[derive(Debug)]
pub(crate) struct Together {
    problem: Problem,
    values: Values,
    kv: [Vec<f32>; 2],
}

impl Together {
    /// Follows the table of a paged problem.
    pub(crate) fn of(paged: Instance<'_>, kv: [Data<'_>; 2]) -> Self {
        let keys: Vec<u32> = (0..paged.sequences()).map(|n| paged.sequence(n).kv_len as u32).collect();
        let (longest, total) = (keys.iter().max().copied().unwrap_or(0), keys.iter().sum::<u32>());
        let (lengths, batch, rows) = match &paged.values().lengths {
            Lengths::PackedQueries { q, .. } | Lengths::Ragged { q, .. } => {
                (Lengths::ragged(q.clone(), offsets(&keys)), 1, total)
            }
            Lengths::Used { q, .. } => {
                let kv = Some(keys.clone().into());
                (Lengths::Used { q: q.clone(), kv }, keys.len(), longest)
            }
            _ => unreachable!("pages come with lengths"),
        };
        let cached = paged.spec().kv_dtype.is_some();
        let factors = paged.values().factors.clone().filter(|_| !cached);
        let values = Values { lengths, table: None, factors, ..paged.values().clone() };
        let dims = |dims: Dims| Dims { batch, seq: rows as usize, ..dims };
        let [k, v] = [paged.k(), paged.v()].map(|layout| Layout::bhsd(dims(layout.dims())));
        let (k, v) = (k.expect("fits in memory"), v.expect("fits in memory"));
        let spec = Spec { k, v, kv_dtype: None, out: None, ..paged.spec().clone() }.with(&values);
        let spec = Spec { sinks: paged.sinks(), ..spec };
        let problem = spec.parse().expect("the same problem without pages");
        let kv = [
            gather(paged, (1, paged.k(), kv[0]), (&k, &values)),
            gather(paged, (2, paged.v(), kv[1]), (&v, &values)),
        ];
        Self { problem, values, kv }
    }

    pub(crate) fn instance(&self) -> Instance<'_> {
        Instance::new(&self.problem, &self.values).expect("the same problem without pages")
    }

    /// Keys and values.
    pub(crate) fn kv(&self) -> [Data<'_>; 2] {
        [Data::F32(&self.kv[0]), Data::F32(&self.kv[1])]
    }
}

/// The rows of all keys, where `to` has them.
fn gather(
    paged: Instance<'_>,
    (operand, from, data): (usize, &Layout, Data<'_>),
    (to, values): (&Layout, &Values),
) -> Vec<f32> {
    let cached = paged.spec().kv_dtype.is_some();
    let mut rows = vec![0.0; to.span()];
    let packed = matches!(values.lengths, Lengths::Ragged { .. });
    let mut first = 0;
    let mut row = Vec::new();
    for n in 0..paged.sequences() {
        let (keys, len) = (paged.keys(n), paged.sequence(n).kv_len);
        for (head, key) in (0..from.dims().heads).flat_map(|head| (0..len).map(move |key| (head, key))) {
            let (page, at) = keys.place(key);
            row.clear();
            values::row(data, from.row(page, head, at), from.dims().dim, &mut row);
            if cached {
                let factor = paged.factors(n, head)[operand];
                row.iter_mut().for_each(|x| *x *= factor);
            }
            let (batch, seq) = if packed { (0, first + key) } else { (n, key) };
            rows[to.row(batch, head, seq)..][..row.len()].copy_from_slice(&row);
        }
        first += len;
    }
    rows
}

/// Cases of every page size, length and option; `flashcore verify` and the tests of every backend run them.
#[rustfmt::skip] // a table: one case per line
pub(crate) fn cases() -> Vec<Case> {
    use flashcore_core::Mask;
    use crate::{cases::Sinks, inputs::Placement};
    const DECODE: [(u32, u32); 4] = [(1, 130), (1, 64), (1, 1), (1, 0)];
    const MIXED: [(u32, u32); 6] = [(1, 130), (70, 70), (0, 40), (1, 1), (33, 150), (5, 0)];
    const SHORT: [(u32, u32); 3] = [(3, 3), (2, 20), (1, 45)];
    const PROMPTS: [(u32, u32); 5] = [(1, 30), (20, 20), (0, 7), (13, 40), (2, 0)];
    let sizes = [1, 3, 8, 16, 32, 64, 128].into_iter().flat_map(|size| {
        let packed = Paging { packed: true, ..Paging::of(size) };
        let causal = |case| Case { mask: Mask::CAUSAL, ..case };
        [
            causal(Case::paged(format!("pages of {size}, decode"), Paging::of(size), &DECODE, [4, 2], 64)),
            causal(Case::paged(format!("pages of {size}, mixed"), packed, &MIXED, [4, 2], 64)),
        ]
    });
    let packed = |name: &str, size, dim| {
        Case::paged(format!("pages, {name}"), Paging { packed: true, ..Paging::of(size) }, &MIXED, [4, 2], dim)
    };
    let padded = |name: &str, size, dim| Case::paged(format!("pages, {name}"), Paging::of(size), &MIXED, [6, 2], dim);
    let tiny = |name: &str, paging, dim| Case::paged(format!("pages, {name}"), paging, &SHORT, [3, 1], dim);
    let shared = Paging { shared: 2, ..Paging::of(16) };
    let options = [
        padded("padded queries", 16, 64),
        Case { mask: Mask::CAUSAL.top_left(), ..padded("causal top-left", 8, 64) },
        Case { mask: Mask::window(20, 0), ..packed("window", 16, 64) },
        Case { mask: Mask::window(7, 3), ..padded("window both ways", 3, 64) },
        Case { softcap: Some(20.0), mask: Mask::CAUSAL, ..packed("softcap", 16, 64) },
        Case { sinks: Sinks::Normal, mask: Mask::CAUSAL, ..packed("sinks", 16, 64) },
        Case { mask: Mask::CAUSAL, ..Case::paged("pages, shared", shared, &MIXED, [4, 2], 64) },
        Case { mask: Mask::CAUSAL, ..Case::paged("pages, shared and packed", Paging { packed: true, ..shared }, &MIXED, [4, 2], 64) },
        Case { batch_invariant: true, mask: Mask::CAUSAL, ..packed("batch invariant", 16, 64) },
        Case { placement: Placement::Interleaved, mask: Mask::CAUSAL, ..packed("heads inside rows", 16, 64) },
        Case { placement: Placement::Padded, mask: Mask::CAUSAL, ..packed("apart", 8, 128) },
        Case { placement: Placement::Unaligned, mask: Mask::CAUSAL, ..packed("unaligned", 8, 64) },
        Case { dim_v: 40, mask: Mask::CAUSAL, ..packed("other dim of values", 16, 72) },
        Case { mask: Mask::CAUSAL, ..packed("dim 256", 16, 256) },
        Case { mask: Mask::CAUSAL, ..packed("odd dim", 4, 59) },
        Case { dim_v: 512, mask: Mask::CAUSAL, ..Case::paged("pages, latent", Paging::of(16), &SHORT, [4, 1], 576) },
        tiny("tiny padded", Paging::of(2), 32),
        tiny("tiny packed", Paging { packed: true, ..Paging::of(16) }, 32),
        Case { mask: Mask::CAUSAL, ..Case::paged("pages, tiny mixed", Paging { packed: true, ..Paging::of(4) }, &PROMPTS, [3, 1], 32) },
        Case { mask: Mask::window(9, 2), batch_invariant: true, ..Case::paged("pages, tiny mixed, batch invariant", Paging { packed: true, ..Paging::of(16) }, &PROMPTS, [3, 1], 32) },
        Case { mask: Mask::CAUSAL, ..Case::paged("pages of 64, prompts", Paging { packed: true, ..Paging::of(64) }, &PROMPTS, [4, 2], 64) },
        Case { mask: Mask::CAUSAL, ..Case::paged("pages of 24, prompts", Paging { packed: true, ..Paging::of(24) }, &PROMPTS, [4, 2], 64) },
        Case { mask: Mask::window(9, 2), ..Case::paged("pages of 8, prompts, padded", Paging::of(8), &PROMPTS, [3, 1], 64) },
        Case { batch_invariant: true, ..Case::paged("pages of 64, prompts, batch invariant", Paging { packed: true, ..Paging::of(64) }, &PROMPTS, [3, 1], 128) },
        Case { mask: Mask::window(9, 2), ..Case::paged("pages of 128, prompts, padded", Paging::of(128), &PROMPTS, [3, 1], 64) },
        Case::paged("pages, no sequences", Paging { packed: true, ..Paging::of(16) }, &[], [4, 2], 64),
        Case::paged("pages, no keys", Paging::of(16), &[(2, 0), (2, 0)], [4, 2], 64),
        Case { placement: Placement::Sparse, ..Case::paged("pages, far apart", Paging::of(2), &[(2, 5), (2, 9)], [4, 2], 64) },
    ];
    sizes.chain(options).map(|case| Case { dtypes: &DType::COMMON, ..case }).collect()
}
