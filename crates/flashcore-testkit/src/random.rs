//! Random legal problems: random extents, strides, paddings, masks, lengths and options, from a seed.
//!
//! [`crate::suite::check_case`] runs them like any other case, guard bands and poisoned outputs included.

use flashcore_core::{Lengths, Mask};

use crate::{
    cases::{Case, Sinks, Tag},
    inputs::{Inputs, Placement},
    pages::Paging,
    rng::Rng,
};

/// What random problems may be like.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Limits {
    /// Multiply-adds of a problem, about.
    pub work: usize,
    pub seq: usize,
    /// Queries of a sequence.
    pub queries: usize,
    /// Head dimensions to draw from; Q and V draw separately once in a while.
    pub dims: &'static [usize],
}

impl Limits {
    /// Any dimensions, a few milliseconds each.
    pub const SMALL: Self = Self {
        work: 2_000_000,
        seq: 300,
        queries: 300,
        dims: &[1, 3, 8, 16, 20, 32, 40, 59, 64, 64, 64, 72, 96, 111, 128, 192, 256, 320, 512],
    };
    /// Few queries over many keys.
    pub const DECODE: Self =
        Self { work: 4_000_000, seq: 3000, queries: 6, dims: &[64, 128, 128, 128, 256, 40, 96] };
}

/// The `index`-th random case of a seed.
pub fn case(seed: u64, index: u64, limits: Limits) -> Case {
    let mut rng = Rng::new(seed.wrapping_mul(0x1000_0001).wrapping_add(index));
    let name = format!("random {seed}/{index}");
    let dim = rng.pick(limits.dims);
    let shape = shape(&mut rng, dim, limits);
    let mut case = Case::new(Tag::Random, name.clone(), shape, dim);
    let kind = rng.range(0..=3);
    if kind == 0 {
        let pairs = pairs(&mut rng, [shape[3], shape[4]]);
        case = Case::ragged(Tag::Random, name, &pairs, [shape[1], shape[2]], dim);
    } else if kind == 1 {
        case.lengths = used(&mut rng, shape);
    }
    if rng.one_in(4) {
        case.dim_v = rng.pick(limits.dims);
    }
    options(&mut rng, &mut case);
    case.dropout = rng.one_in(4).then(|| rng.pick(&[0.03, 0.17, 0.5, 0.85]));
    case
}

/// The `index`-th random case of a seed, every fourth of them with keys in pages.
pub fn any(seed: u64, index: u64, limits: Limits) -> Case {
    if index % 4 == 3 { paged(seed, index, limits) } else { case(seed, index, limits) }
}

/// The `index`-th random case of a seed with keys in pages.
fn paged(seed: u64, index: u64, limits: Limits) -> Case {
    let mut rng = Rng::new(seed.wrapping_mul(0x2000_0001).wrapping_add(index));
    let dim = rng.pick(limits.dims);
    let [_, heads_q, heads_kv, seq_q, seq_kv] = shape(&mut rng, dim, limits);
    let pairs = pairs(&mut rng, [seq_q, seq_kv]);
    let size = rng.pick(&[1, 2, 3, 5, 8, 16, 16, 32, 64, 100, 128, 256]);
    let paging = Paging { size, packed: rng.one_in(2), shared: rng.pick(&[0, 0, 1, 3]) };
    let mut case =
        Case::paged(format!("random pages {seed}/{index}"), paging, &pairs, [heads_q, heads_kv], dim);
    if rng.one_in(4) {
        case.dim_v = rng.pick(limits.dims);
    }
    options(&mut rng, &mut case);
    case
}

/// Batch, query heads, key heads, queries, keys: as large as the work allows, now and then 0.
fn shape(rng: &mut Rng, dim: usize, limits: Limits) -> [usize; 5] {
    let heads_kv = rng.range(1..=3);
    let heads_q = heads_kv * rng.pick(&[1, 1, 2, 3, 4, 5]);
    let batch = if rng.one_in(40) { 0 } else { rng.range(1..=3) };
    let pairs = limits.work / (2 * dim * heads_q * batch.max(1));
    let seq_q = if rng.one_in(4) {
        rng.range(0..=3)
    } else {
        rng.range(0..=limits.queries.min(limits.seq).min(pairs))
    };
    let seq_kv = rng.range(0..=limits.seq.min(pairs / seq_q.max(1)));
    [batch, heads_q, heads_kv, seq_q, seq_kv]
}

fn pairs(rng: &mut Rng, [seq_q, seq_kv]: [usize; 2]) -> Vec<(u32, u32)> {
    let (mut left_q, mut left_kv) = (seq_q, seq_kv);
    let mut take = |left: &mut usize| {
        let len = rng.range(0..=*left);
        *left -= len;
        len as u32
    };
    (0..4).map(|_| (take(&mut left_q), take(&mut left_kv))).collect()
}

fn used(rng: &mut Rng, [batch, _, _, seq_q, seq_kv]: [usize; 5]) -> Lengths {
    let mut lengths = |seq: usize| -> Vec<u32> { (0..batch).map(|_| rng.range(0..=seq) as u32).collect() };
    let (q, kv) = (lengths(seq_q), lengths(seq_kv));
    match rng.range(0..=2) {
        0 => Lengths::keys(kv),
        1 => Lengths::Used { q: Some(q.into()), kv: None },
        _ => Lengths::used(q, kv),
    }
}

fn options(rng: &mut Rng, case: &mut Case) {
    case.mask = mask(rng);
    case.scale = rng.one_in(4).then(|| rng.pick(&[1e-3, 0.05, 0.5]));
    case.softcap = rng.one_in(5).then(|| rng.pick(&[1.0, 20.0]));
    case.sinks =
        rng.pick(&[Sinks::None, Sinks::None, Sinks::None, Sinks::Normal, Sinks::Strong, Sinks::Nothing]);
    case.batch_invariant = rng.one_in(4);
    case.inputs = rng.pick(&[Inputs::Normal, Inputs::EqualKeys, Inputs::Rising, Inputs::Falling]);
    case.placement = Placement::Random(rng.next_u64());
}

fn mask(rng: &mut Rng) -> Mask {
    let bound = |rng: &mut Rng| (!rng.one_in(3)).then(|| rng.pick(&[0u32, 1, 7, 16, 63, 64, 100, 1000]));
    let mask = match rng.range(0..=3) {
        0 => Mask::NONE,
        1 => Mask::CAUSAL,
        _ => Mask::window(bound(rng), bound(rng)),
    };
    let mask = if rng.one_in(3) { mask.top_left() } else { mask };
    if rng.one_in(5) { mask.shifted(rng.pick(&[-200, -64, -3, 1, 50, 128])) } else { mask }
}
