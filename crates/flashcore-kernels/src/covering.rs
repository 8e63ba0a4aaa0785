//! The covering set: small problems whose kernels together contain every option, and every pair of options, of each
//! kernel family.
//!
//! Tests print, verify, assemble, hash and simulate the kernels of this set, so that an option that works alone but
//! not together with another cannot ship. Rows are made greedily from the axes below, which is all there is to change
//! when an option is added. Tiles that the rules give to large problems alone are tried on small ones.

use std::{cmp::Reverse, collections::BTreeSet};

use flashcore_core::{DType, Dims, Layout, Lengths, Mask, PageTable, Problem, ProblemError, Spec, Values};

use crate::{
    covering_bias, covering_dropout,
    plan::{Gpu, Misfit, Plan, plan, plan_tile},
};

/// A problem, and the GPU that it runs on.
#[derive(Clone, PartialEq, Debug)]
pub struct Member {
    /// A small problem.
    pub problem: Problem,
    /// Its lengths and sinks.
    pub values: Values,
    /// Where it would run.
    pub gpu: Gpu,
    /// The large problem whose tile, on a whole Hopper, it gets; `None` for its own.
    pub like: Option<Problem>,
}

impl Member {
    /// The plan that the member stands for.
    pub fn plan(&self) -> Result<Plan, Misfit> {
        let Some(large) = &self.like else { return Ok(plan(&self.problem, &self.gpu, ALIGNMENT)?) };
        let tile = plan(large, &Gpu::HOPPER, ALIGNMENT)?.kernel().tile();
        plan_tile(&self.problem, &self.gpu, ALIGNMENT, tile)
    }
}

/// Every option of a kernel family.
struct Axes {
    gpus: &'static [Gpu],
    dtypes: &'static [DType],
    /// Features of queries and keys, and of values.
    dims: &'static [(usize, usize)],
    /// Elements by which rows are longer than their features: what rows are aligned to.
    padding: &'static [usize],
    lengths: &'static [Kind],
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    Uniform,
    Used,
    UsedKeys,
    Ragged,
    /// Padded queries, keys in pages of so many.
    Paged(usize),
    /// Packed queries, keys in pages of so many.
    PackedQueries(usize),
}

/// What becomes of the result.
#[derive(Clone, Copy)]
enum Output {
    /// It is written in the inputs' type.
    Same,
    /// It is written in f32.
    Wide,
    /// It is merged into an f32 output.
    Accumulated,
}

impl Output {
    fn spec(self, spec: Spec) -> Spec {
        let (out_dtype, accumulate) = match self {
            Self::Same => (None, false),
            Self::Wide => (Some(DType::F32), false),
            Self::Accumulated => (Some(DType::F32), true),
        };
        Spec { out_dtype, accumulate, ..spec }
    }
}

/// Results in f32.
const WIDE: [Output; 2] = [Output::Wide, Output::Accumulated];
/// What becomes of results of f32 tensors.
const OF_SINGLES: [Output; 2] = [Output::Same, Output::Accumulated];
pub(crate) const DTYPES: [DType; 2] = [DType::F16, DType::BF16];
pub(crate) const FLAGS: [bool; 2] = [false, true];
/// Types of sinks, where there are any.
pub(crate) const SINKS: [Option<DType>; 3] = [None, Some(DType::F32), Some(DType::BF16)];
pub(crate) const MASKS: usize = 4;
/// The axis of element types.
const TYPE: usize = 5;
/// Queries of a sequence: more and fewer than the smallest row tile has.
pub(crate) const QUERIES: [usize; 2] = [70, 40];
/// Keys for tiles of large problems: two wide steps and a ragged end, or a part for each CTA of a small cluster.
const FEW_STEPS: usize = 530;
/// Rows for tiles of large problems that one CTA works through: two tall ones and some more.
const FEW_TILES: usize = 450;
/// Addresses of a member's tensors are multiples of this many bytes.
const ALIGNMENT: u64 = 16;
/// Keys: more than one key tile of every kernel, and a ragged end.
pub(crate) const KEYS: usize = 150;

/// The general kernel: GPUs with much and with little shared memory, dims of every swizzle and every row of the table,
/// rows that end inside a chunk, outputs that two warps share.
const GENERAL: Axes = Axes {
    gpus: &[Gpu::AMPERE, Gpu::CONSUMER, Gpu::BLACKWELL],
    dtypes: &DTYPES,
    dims: &[
        (64, 64),
        (128, 128),
        (256, 256),
        (8, 8),
        (24, 40),
        (96, 80),
        (128, 64),
        (192, 256),
        (60, 100),
        (63, 39),
        (512, 512),
        (40, 300),
    ],
    padding: &[0, 4, 2, 1],
    lengths: &[Kind::Uniform, Kind::Used, Kind::UsedKeys, Kind::Ragged],
};

/// The general kernel for f32: every row of its own table, on GPUs with much, less and little shared memory.
const SINGLES: Axes = Axes {
    gpus: &[Gpu::BLACKWELL, Gpu::AMPERE, Gpu::CONSUMER],
    dtypes: &[DType::F32],
    dims: &[(64, 64), (128, 128), (256, 256), (8, 8), (23, 41), (192, 96)],
    padding: &[0, 2, 1],
    lengths: &[Kind::Uniform, Kind::Used, Kind::UsedKeys, Kind::Ragged],
};

/// The general kernel over pages: rows that are aligned and such that are not, pages smaller and larger than a tile of keys.
const PAGED: Axes = Axes {
    gpus: &[Gpu::AMPERE, Gpu::CONSUMER, Gpu::HOPPER],
    dtypes: &DTYPES,
    dims: &[(64, 64), (128, 128), (256, 256), (63, 39)],
    padding: &[0, 2, 1],
    lengths: &[Kind::PackedQueries(16), Kind::Paged(1), Kind::PackedQueries(3), Kind::Paged(96)],
};

/// The same without asynchronous copies.
const PAGED_TURING: Axes = Axes {
    gpus: &[Gpu::TURING],
    dtypes: &[DType::F16],
    dims: &[(64, 64), (63, 100)],
    padding: &[0, 1],
    lengths: &[Kind::PackedQueries(16), Kind::Paged(3)],
};

/// f32 in pages.
const PAGED_SINGLES: Axes = Axes {
    gpus: &[Gpu::AMPERE],
    dtypes: &[DType::F32],
    dims: &[(64, 64), (128, 128)],
    padding: &[0, 1],
    lengths: &[Kind::PackedQueries(16), Kind::Paged(3)],
};

/// The general kernel without asynchronous copies: dims of every row of its table there.
const TURING: Axes = Axes {
    gpus: &[Gpu::TURING],
    dtypes: &[DType::F16],
    dims: &[(64, 64), (128, 128), (256, 256), (63, 100)],
    padding: &[0, 4, 1],
    lengths: &[Kind::Uniform, Kind::Used, Kind::Ragged],
};

/// A Hopper so small that even small problems have more tiles than it has SMs, which makes its kernels persistent.
pub(crate) const BUSY_HOPPER: Gpu = Gpu { sms: 2, ..Gpu::HOPPER };

/// The Hopper kernel: dims of every row of its table, whole and padded; few tiles and many.
const HOPPER: Axes = Axes {
    gpus: &[BUSY_HOPPER, Gpu::HOPPER],
    dtypes: &DTYPES,
    dims: &[(64, 64), (128, 128), (192, 128), (256, 256), (40, 48), (160, 192)],
    padding: &[0],
    lengths: &[Kind::Uniform, Kind::Used, Kind::UsedKeys],
};

/// f32 outputs of the general kernel: rows of every width and alignment, all kinds of lengths.
const WIDE_GENERAL: Axes = Axes {
    gpus: &[Gpu::AMPERE, Gpu::BLACKWELL],
    dtypes: &DTYPES,
    dims: &[(64, 64), (128, 128), (256, 256), (24, 40), (63, 59), (40, 301)],
    padding: &[0, 2, 1],
    lengths: &[Kind::Uniform, Kind::Used, Kind::UsedKeys, Kind::Ragged],
};

/// f32 outputs of the Hopper kernel: few accumulators and as many as there can be.
const WIDE_HOPPER: Axes = Axes {
    gpus: &[BUSY_HOPPER, Gpu::HOPPER],
    dtypes: &DTYPES,
    dims: &[(64, 64), (128, 128), (256, 256)],
    padding: &[0],
    lengths: &[Kind::Uniform, Kind::Used, Kind::UsedKeys],
};

/// Packed sequences on Hopper: tiles of all rows of the table, and such for short sequences.
const PACKED_HOPPER: Axes = Axes {
    gpus: &[BUSY_HOPPER, Gpu::HOPPER],
    dtypes: &DTYPES,
    dims: &[(64, 64), (128, 128), (256, 256), (192, 128), (40, 48)],
    padding: &[0],
    lengths: &[Kind::Ragged],
};

/// Keys in pages on Hopper: pages smaller and larger than a tile of keys.
const PAGED_HOPPER: Axes = Axes {
    dims: &[(64, 64), (128, 128), (256, 256), (160, 192)],
    lengths: &[Kind::PackedQueries(64), Kind::Paged(128)],
    ..PACKED_HOPPER
};

/// Pages so small on Hopper that lanes share the copies of a key tile: as few rows as a copy may bring and more, pages that
/// are one copy and such that are several.
const SMALL_PAGES: Axes = Axes {
    lengths: &[Kind::PackedQueries(16), Kind::Paged(8), Kind::PackedQueries(24), Kind::Paged(32)],
    ..PAGED_HOPPER
};

/// A problem too large to be simulated, whose tile small ones do not get.
struct Large {
    heads: usize,
    rows: usize,
    keys: usize,
    dim: usize,
    /// As [`mask_of`] counts them.
    mask: usize,
}

/// What the rules of the Hopper kernel give to many tiles, to long sequences, and to few rows of many keys.
const LARGE: [Large; 7] = [
    Large { heads: 64, rows: 2048, keys: 2048, dim: 128, mask: 0 },
    Large { heads: 64, rows: 2048, keys: 2048, dim: 128, mask: 1 },
    Large { heads: 32, rows: 16384, keys: 16384, dim: 64, mask: 0 },
    Large { heads: 32, rows: 16384, keys: 16384, dim: 64, mask: 3 },
    Large { heads: 16, rows: 16384, keys: 16384, dim: 128, mask: 0 },
    Large { heads: 16, rows: 16384, keys: 16384, dim: 128, mask: 1 },
    Large { heads: 4, rows: 64, keys: 8192, dim: 128, mask: 1 },
];

/// The set: at most 290 members.
pub fn covering_set() -> Result<Vec<Member>, ProblemError> {
    let members = |axes: &'static Axes| rows(&axes.extents()).into_iter().map(|row| axes.half_member(&row));
    let singles = rows(&SINGLES.single_extents()).into_iter().map(|row| SINGLES.single_member(&row));
    let wide = |axes: &'static Axes| rows(&axes.wide_extents()).into_iter().map(|row| axes.wide_member(&row));
    let large = (0..).zip(&LARGE).map(|(n, large)| large.member(DTYPES[n % DTYPES.len()], Output::Same));
    // The last is cut among the CTAs of a cluster.
    let split =
        WIDE.into_iter().zip(DTYPES).map(|(output, dtype)| LARGE[LARGE.len() - 1].member(dtype, output));
    let all = members(&GENERAL).chain(members(&TURING)).chain(members(&HOPPER)).chain(large);
    let paged = members(&PAGED).chain(wide(&PAGED_TURING)).chain(wide(&PAGED_SINGLES));
    let packed_wide = wide(&PACKED_HOPPER);
    let wide = wide(&WIDE_GENERAL).chain(wide(&WIDE_HOPPER));
    let packed = members(&PACKED_HOPPER).chain(packed_wide).chain(members(&PAGED_HOPPER));
    let packed = packed.chain(members(&SMALL_PAGES));
    all.chain(wide)
        .chain(split)
        .chain(singles)
        .chain(paged)
        .chain(covering_bias::forward())
        .chain(covering_dropout::forward())
        .chain(packed)
        .collect()
}

impl Axes {
    /// Number of options on each axis, in the order in which [`Axes::half_member`] reads a row.
    fn extents(&self) -> [usize; 9] {
        let [masks, caps, sinks] = [MASKS, FLAGS.len(), SINKS.len()];
        let (gpus, dims, dtypes) = (self.gpus.len(), self.dims.len(), self.dtypes.len());
        [dims, masks, self.padding.len(), self.lengths.len(), gpus, dtypes, caps, sinks, QUERIES.len()]
    }

    /// As [`Axes::extents`] for f32 outputs: what of the other options concerns them.
    fn wide_extents(&self) -> [usize; 7] {
        let (gpus, dims, padding) = (self.gpus.len(), self.dims.len(), self.padding.len());
        [WIDE.len(), dims, padding, self.lengths.len(), gpus, self.dtypes.len(), QUERIES.len()]
    }

    /// As [`Axes::extents`] for f32 tensors: there is one type, and two things become of results.
    fn single_extents(&self) -> [usize; 9] {
        let [dims, masks, padding, lengths, gpus, _, caps, sinks, queries] = self.extents();
        [dims, masks, padding, lengths, gpus, OF_SINGLES.len(), caps, sinks, queries]
    }

    fn half_member(&self, row: &[usize; 9]) -> Result<Member, ProblemError> {
        self.member(row, self.dtypes[row[TYPE]], Output::Same)
    }

    fn single_member(&self, row: &[usize; 9]) -> Result<Member, ProblemError> {
        self.member(row, DType::F32, OF_SINGLES[row[TYPE]])
    }

    fn wide_member(&self, row: &[usize; 7]) -> Result<Member, ProblemError> {
        let [output, dims, padding, lengths, gpu, dtype, queries] = *row;
        // Sinks take part in the LSE that parts are weighed by; masks leave rows without keys.
        let (cap, sink, mask) =
            (dims % FLAGS.len(), (dims + lengths) % SINKS.len(), (dims + 2 * gpu) % MASKS);
        let row = [dims, mask, padding, lengths, gpu, dtype, cap, sink, queries];
        self.member(&row, self.dtypes[dtype], WIDE[output])
    }

    fn member(&self, row: &[usize; 9], dtype: DType, output: Output) -> Result<Member, ProblemError> {
        let [dims, mask, padding, lengths, gpu, _, cap, sink, queries] = *row;
        let (dim_qk, dim_v) = self.dims[dims];
        let (kind, queries) = (self.lengths[lengths], QUERIES[queries]);
        let (batch, heads) = (kind.batch(), 2);
        let layout = |heads, seq, dim| padded(Dims::new(batch, heads, seq, dim), self.padding[padding]);
        let (pool, rows) = kind.pages().unwrap_or((batch, KEYS));
        let keys = |dim| padded(Dims::new(pool, 1, rows, dim), self.padding[padding]);
        let spec = Spec {
            out: Some(layout(heads, queries, dim_v)?),
            mask: mask_of(mask),
            softcap: FLAGS[cap].then_some(20.0),
            ..Spec::new(dtype, layout(heads, queries, dim_qk)?, keys(dim_qk)?, keys(dim_v)?)
        };
        let sinks = SINKS[sink].map(|_| [0.5, -1.0].into());
        let values =
            Values { lengths: kind.lengths(queries), sinks, table: kind.table(), ..Values::default() };
        let spec = output.spec(Spec { sinks: SINKS[sink], ..spec.with(&values) });
        Ok(Member { problem: spec.parse()?, values, gpu: self.gpus[gpu], like: None })
    }
}

impl Large {
    /// A small problem with the tile of this one.
    fn member(&self, dtype: DType, output: Output) -> Result<Member, ProblemError> {
        let spec = |heads, rows, keys| {
            let layout = |seq| padded(Dims::new(1, heads, seq, self.dim), 0);
            let (q, kv) = (layout(rows)?, layout(keys)?);
            output.spec(Spec { mask: mask_of(self.mask), ..Spec::new(dtype, q, kv, kv) }).parse()
        };
        // Many rows keep a CTA busy for several tiles; where they are few, each tile has its own.
        let rows = if self.heads * self.rows > FEW_TILES * 10 { FEW_TILES } else { QUERIES[0] };
        Ok(Member {
            problem: spec(2, rows, self.keys.min(FEW_STEPS))?,
            values: Values::default(),
            gpu: BUSY_HOPPER,
            like: Some(spec(self.heads, self.rows, self.keys)?),
        })
    }
}

impl Kind {
    pub(crate) fn lengths(self, queries: usize) -> Lengths {
        let queries = queries as u32;
        match self {
            Self::Uniform => Lengths::Uniform,
            Self::Used => Lengths::used([queries, 33], [150, 77]),
            Self::UsedKeys => Lengths::keys([77, 150]),
            Self::Ragged => Lengths::ragged([0, 30, 30, queries], [0, 100, 130, 150]),
            Self::Paged(_) => Lengths::used([queries, 33], [150, 77]),
            Self::PackedQueries(_) => Lengths::packed_queries([0, 30, 30, 31, queries], [100, 30, 150, 77]),
        }
    }

    /// Batch of the queries.
    pub(crate) const fn batch(self) -> usize {
        if matches!(self, Self::Ragged | Self::PackedQueries(_)) { 1 } else { 2 }
    }

    /// Pages, and keys of each, where keys lie in pages.
    pub(crate) const fn pages(self) -> Option<(usize, usize)> {
        match self {
            Self::Paged(size) | Self::PackedQueries(size) => Some((KEYS.div_ceil(size) + 1, size)),
            _ => None,
        }
    }

    /// Every sequence has all pages but one, each beginning with another, from the last to the first.
    pub(crate) fn table(self) -> Option<PageTable> {
        let (pages, columns) = (self.pages()?.0, self.pages()?.0 - 1);
        let sequences = if self.batch() == 1 { 4 } else { 2 };
        let row = |n: usize| (0..columns).map(move |column| ((2 * pages - 1 - n - column) % pages) as i32);
        Some(PageTable::new((0..sequences).flat_map(row).collect::<Vec<_>>(), columns))
    }
}

pub(crate) fn mask_of(index: usize) -> Mask {
    [Mask::NONE, Mask::CAUSAL, Mask::window(40, None), Mask::window(24, 9)][index]
}

/// Batch × heads × sequence × dim with `padding` elements behind each row.
pub(crate) fn padded(dims: Dims, padding: usize) -> Result<Layout, ProblemError> {
    let row = dims.dim + padding;
    Layout::strided(dims, [dims.heads * dims.seq * row, dims.seq * row, row, 1])
}

/// Two options on two axes.
type Pair = [(usize, usize); 2];

/// Rows that together contain every pair of options on different axes; greedy, so not the fewest, but few.
pub(crate) fn rows<const N: usize>(extents: &[usize; N]) -> Vec<[usize; N]> {
    let mut missing: BTreeSet<Pair> = every_pair(extents).collect();
    let mut rows = Vec::new();
    while let Some(&first) = missing.first() {
        let row = best_row(extents, first, &missing, rows.len());
        missing.retain(|pair| pair.iter().any(|&(axis, option)| row[axis] != option));
        rows.push(row);
    }
    rows
}

fn every_pair(extents: &[usize]) -> impl Iterator<Item = Pair> {
    let options = |axis: usize| (0..extents[axis]).map(move |option| (axis, option));
    let axes = (0..extents.len()).flat_map(|a| (a + 1..extents.len()).map(move |b| (a, b)));
    axes.flat_map(move |(a, b)| options(a).flat_map(move |x| options(b).map(move |y| [x, y])))
}

/// A row with the pair `first`; on every other axis the option that meets most missing pairs. Among equals the `turn`
/// decides, so that rows differ also where no pair asks for it.
fn best_row<const N: usize>(
    extents: &[usize; N],
    first: Pair,
    missing: &BTreeSet<Pair>,
    turn: usize,
) -> [usize; N] {
    let mut chosen: [Option<usize>; N] = [None; N];
    first.iter().for_each(|&(axis, option)| chosen[axis] = Some(option));
    for axis in 0..N {
        let gain = |option: usize| {
            let meets = |(other, fixed): (usize, Option<usize>)| {
                let mut pair = [(axis, option), (other, fixed?)];
                pair.sort_unstable();
                missing.contains(&pair).then_some(())
            };
            chosen.iter().copied().enumerate().filter_map(meets).count()
        };
        if chosen[axis].is_none() {
            let options = (0..extents[axis]).map(|option| (option + turn) % extents[axis]);
            chosen[axis] = options.min_by_key(|&option| Reverse(gain(option)));
        }
    }
    chosen.map(Option::unwrap_or_default)
}
