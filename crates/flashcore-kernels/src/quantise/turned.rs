//! Rounds values to transposed 8-bit floats, for attention that reads the keys of a feature contiguously: the last stage
//! for values. A CTA has 128 rows of a head.

use flashcore_core::{Granularity, QuantiseProblem};
use flashcore_tile::{Builder, F32, Params, Reg, Scope, Shared, U32, U64};

use super::{Arguments, BYTES, Config, planes, slots, word};
use crate::parts::{
    elements::Raw,
    narrow::Narrow,
    tensor::TensorArgument,
    turner::{CHUNK, Chunk, KEYS, Turner},
};

/// Words of values that a thread loads at a time.
const WORDS: u32 = 32;

pub(super) fn build(b: &mut Builder, params: &mut Params<QuantiseProblem>, cfg: &Config, args: &Arguments) {
    let x = TensorArgument::declare(b, params, "x", slots::X, |p| (p.x(), p.spec().dtype));
    let out = TensorArgument::declare(b, params, "out", slots::OUT, |p| (p.out(), p.spec().to));
    let factors = params.buffer(b, "factors", slots::FACTORS);
    let tiles = params.u32(b, "tiles", |p| p.out().dims().dim as u32 / KEYS);
    let sharing = params.u32(b, "sharing", planes_of_factor);
    let inverses = b.shared(cfg.turned * BYTES, CHUNK);
    let inverses = b.shared_at(inverses);
    let turner = Turner::reserve(b, cfg.turned);
    let thread = b.thread();
    let [batch, head, tile] = place(b, cfg, args, tiles);
    let plane = b.let_(batch * args.heads + head);
    let share = if cfg.channels { b.let_(plane * args.dim + thread) } else { b.let_(plane / sharing) };
    invert(b, cfg, factors, share, inverses);
    let first = b.let_(tile * KEYS);
    let (start, used) = (x.at(b, batch, head, first), args.used(b, batch));
    let left = b.let_(used.max(first) - first);
    let zero = b.var(0);
    let to = out.at(b, batch, head, zero);
    let to = b.let_(to + first.widen());
    let chunks = turner.chunks(b, thread);
    let at_once = (WORDS * BYTES / (CHUNK * cfg.from.bytes() as u32)) as usize;
    for chunks in chunks.chunks(at_once) {
        let asked: Vec<_> = chunks.iter().map(|chunk| ask(b, cfg, (start, x.row), left, chunk)).collect();
        for (chunk, parts) in chunks.iter().zip(asked) {
            let words = rounded(b, cfg, chunk, &parts, inverses);
            turner.put(b, chunk, words);
        }
    }
    turner.write(b, (to, out.row), thread);
}

/// Heads of all batch entries that share a factor, unless features have one.
fn planes_of_factor(problem: &QuantiseProblem) -> u32 {
    match problem.spec().per {
        Granularity::PerTensor => planes(problem).max(1) as u32,
        _ => problem.spec().group as u32,
    }
}

/// The batch entry, head and tile of this CTA: from the end on, which the kernel before has read last.
fn place(b: &mut Builder, cfg: &Config, args: &Arguments, tiles: Reg<U32>) -> [Reg<U32>; 3] {
    let (cta, ctas) = (b.cta(), b.ctas());
    let turn = b.let_(ctas - cta - 1);
    let [inner, outer] = if cfg.by_token { [args.heads, tiles] } else { [tiles, args.heads] };
    let (rest, first) = (b.let_(turn / inner), b.let_(turn % inner));
    let (batch, second) = (b.let_(rest / outer), b.let_(rest % outer));
    if cfg.by_token { [batch, first, second] } else { [batch, second, first] }
}

/// One over the factor of each feature, in shared memory.
fn invert(b: &mut Builder, cfg: &Config, factors: Reg<U64>, share: Reg<U32>, inverses: Shared) {
    let thread = b.thread();
    b.if_(thread.lt(cfg.turned), |b| {
        let at = b.let_(factors + share.mul_wide(BYTES));
        let [factor] = b.load_global::<F32, 1>(at);
        let inverse = b.rcp(factor);
        let to = word(b, inverses, thread);
        b.store_shared(to, &[inverse.into()]);
    });
    b.sync_cta();
}

/// Asks for the numbers of a chunk; those behind the rows that are left are zeros.
fn ask(
    b: &mut Builder,
    cfg: &Config,
    (start, row): (Reg<U64>, Reg<U64>),
    left: Reg<U32>,
    chunk: &Chunk,
) -> Vec<Raw> {
    let (width, bytes) = (cfg.shape.width, cfg.from.bytes() as u32);
    let there = b.let_(chunk.there & chunk.key.lt(left));
    let at = b.let_(chunk.key.widen() * row + start);
    let at = b.var_in(Scope::Lane, at + chunk.column.mul_wide(bytes));
    let part = |_| {
        let part = Raw::load_if(b, cfg.from, width, at, there);
        b.add_to(at, u64::from(width * bytes));
        part
    };
    (0..CHUNK / width).map(part).collect()
}

/// The floats of a chunk.
fn rounded(b: &mut Builder, cfg: &Config, chunk: &Chunk, parts: &[Raw], inverses: Shared) -> [Reg<U32>; 4] {
    let narrow = Narrow::new(cfg.to, cfg.target);
    let values: Vec<Reg<F32>> = parts.iter().flat_map(|part| part.values(b)).collect();
    let factors = word(b, inverses, chunk.column);
    std::array::from_fn(|n| {
        let inverses = b.load_shared::<F32, 4>(factors.at(n as u32 * CHUNK));
        let four: Vec<_> =
            values[4 * n..][..4].iter().zip(inverses).map(|(&x, inverse)| b.let_(x * inverse)).collect();
        let word = b.var_in::<U32>(Scope::Lane, 0);
        narrow.pack_into(b, word.bits(), &four);
        word
    })
}
