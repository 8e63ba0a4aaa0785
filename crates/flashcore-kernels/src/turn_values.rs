//! Values of 8 bits, turned: the keys of a feature next to each other, as Hopper's tensor cores want them.
//!
//! A CTA turns 128 keys of a head by way of shared memory. Keys come out in another order inside of each sixteen, that
//! in which probabilities lie in registers (see [`crate::parts::softmax`]): place 4q + i holds key 2q + (i & 1) + 8 (i >> 1).
//! Keys that are not used, and those up to a multiple of 128, become zeros, so that nothing that lies there is multiplied.
//! Behind the features of a head there are rows of constants, by which probabilities are added up, and rows of zeros up to
//! eight.

use flashcore_core::{Dims, Layout, Problem};
use flashcore_ptx::{
    ident::Ident,
    launch::{TensorMapSpec, Workspace},
    target::Target,
};
use flashcore_tile::{
    BuildError, Builder, Element, Extent, Global, Params, Program, Reg, Scope, Shared, U32, U64, Val,
};

use crate::{
    parts::{
        lengths::{LengthArguments, LengthsKind},
        maps::slab_map,
        tensor::TensorArgument,
    },
    slots,
};

/// Rows behind the features, of which the first have a constant for every key.
pub(crate) const COUNTED: u32 = 8;
/// The constants of the first rows, as floats and four of each as bits. Tensor cores cut off bits of products, and a product
/// with 1 has few; with these, about as much is lost as of products with values: over 256 keys both differ by less than
/// 0.1 % of the sum, with ones by up to 0.2 %.
const COUNTS: [(f32, u32); 2] = [(1.5, 0x3c3c_3c3c), (1.75, 0x3e3e_3e3e)];
/// What a probability of 1 adds to the sum of all counts.
pub(crate) const COUNTED_SUM: f32 = COUNTS[0].0 + COUNTS[1].0;
/// Most rows that a tensor copy moves.
const MOST_ROWS: u32 = 256;
/// Keys that a CTA turns.
const KEYS: u32 = 128;
/// Keys whose order changes among themselves.
const SIXTEEN: u32 = 16;
/// Sixteens of a CTA.
const SIXTEENS: u32 = KEYS / SIXTEEN;
const THREADS: u32 = 256;
/// Bytes of one load or store.
const CHUNK: u32 = 16;

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// Features of values: a multiple of 16.
    pub dim: u32,
    /// How the rows of sequences are told.
    pub lengths: LengthsKind,
}

impl Config {
    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let used = if self.lengths.cuts_keys() { format!("_{}", self.lengths.name()) } else { String::new() };
        Ident::new(format!("fc_turn_values_d{}{used}", self.dim)).expect("made of legal parts")
    }

    /// Most registers of a thread.
    pub const fn registers(&self) -> u32 {
        64
    }

    /// Bytes from a key's features to the next key's in shared memory, such that eight keys' words lie in banks of their own.
    const fn pitch(&self) -> u32 {
        self.dim.next_multiple_of(32) + CHUNK
    }
}

/// Keys of a head in the workspace.
fn padded_keys(problem: &Problem) -> usize {
    problem.seq_kv().next_multiple_of(KEYS as usize)
}

/// Rows of a head in the workspace.
fn rows(problem: &Problem) -> usize {
    problem.dim_v() + COUNTED as usize
}

/// The workspace that holds the turned values.
pub(crate) fn workspace(problem: &Problem) -> Workspace {
    let features = problem.batch() * problem.heads_kv() * rows(problem);
    Workspace { slot: slots::TURNED, bytes: features as u64 * padded_keys(problem) as u64, zeroed: false }
}

/// Tensor copies that bring all rows of a head with `dim` features, and the rows of each: as many as one may move, in eights.
pub(crate) const fn copies(dim: u32) -> (u32, u32) {
    let rows = dim + COUNTED;
    let mut count = rows.div_ceil(MOST_ROWS);
    while !rows.is_multiple_of(8 * count) {
        count += 1;
    }
    (count, rows / count)
}

/// How tensor copies see the turned values: `keys` keys of all features of a head at once, or of a part of them.
pub(crate) fn turned_map(problem: &Problem, keys: u32) -> TensorMapSpec {
    let dims = Dims::new(problem.batch(), problem.heads_kv(), rows(problem), padded_keys(problem));
    let layout = Layout::bhsd(dims).expect("the plan has seen that the workspace can be indexed");
    let swizzle = Element::E4m3.swizzle(keys);
    let (_, rows) = copies(problem.dim_v() as u32);
    slab_map(&layout, Element::E4m3, slots::TURNED, (rows, swizzle))
}

/// Where a CTA works.
struct Place {
    /// First of its keys.
    first: Reg<U32>,
    head: Reg<U32>,
    batch: Reg<U32>,
    thread: Reg<U32>,
}

/// Builds the kernel.
pub fn turn_values(cfg: &Config) -> Result<Program<Problem>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(Target::Sm90a, &name, THREADS, 4);
    let mut params = Params::<Problem>::default();
    let v = TensorArgument::declare(&mut b, &mut params, "v", slots::V, |p: &Problem| (p.v(), p.dtype()));
    let turned = params.buffer(&mut b, "turned", slots::TURNED);
    let padded = params.u64(&mut b, "padded_keys", |p| padded_keys(p) as u64);
    let heads = params.u32(&mut b, "heads", |p| p.heads_kv() as u32);
    let tiles = params.u32(&mut b, "tiles", |p| padded_keys(p) as u32 / KEYS);
    let seq_q = params.u32(&mut b, "seq_q", |p| p.seq_q() as u32);
    let seq_kv = params.u32(&mut b, "seq_kv", |p| p.seq_kv() as u32);
    let lengths = LengthArguments::declare(&mut b, &mut params, cfg.lengths, [seq_q, seq_kv]);
    let memory = b.shared(KEYS * cfg.pitch(), CHUNK);
    let memory = b.shared_at(memory);
    b.wait_for_predecessor();
    b.launch_dependents();
    let (index, thread) = (b.cta(), b.thread());
    let flat_head = b.let_(index / tiles);
    let first = b.let_((index % tiles) * KEYS);
    let place = Place { first, head: b.let_(flat_head % heads), batch: b.let_(flat_head / heads), thread };
    let [_, used] = lengths.used(&mut b, place.batch);
    gather(&mut b, cfg, &v, memory, used, &place);
    b.sync_cta();
    let features = b.let_(flat_head * (cfg.dim + COUNTED));
    let start = b.let_(features.widen() * padded + first.widen());
    let start = b.let_(turned + start);
    scatter(&mut b, cfg, memory, (start, padded), thread);
    count(&mut b, cfg, (start, padded), thread);
    b.finish(&name, params)
}

/// Brings the features of all keys to shared memory: those of one place of every sixteen next to each other.
fn gather(b: &mut Builder, cfg: &Config, v: &TensorArgument, memory: Shared, used: Reg<U32>, place: &Place) {
    let chunks = cfg.dim / CHUNK;
    // All are asked for before the first is put down.
    let ask = |first: u32| {
        let chunk = b.let_(place.thread + first);
        let (key, column) = (b.let_(chunk / chunks), b.let_((chunk % chunks) * CHUNK));
        let row = b.let_(place.first + key);
        let words = [(); 4].map(|()| b.var_in::<U32>(Scope::Lane, 0));
        let at = v.at(b, place.batch, place.head, row);
        let at = b.let_(at + column.widen());
        b.predicated(row.lt(used), |b| b.load_global_into(words, at));
        (chunk, key, column, words)
    };
    let asked: Vec<_> = (0..KEYS * chunks).step_by(THREADS as usize).map(ask).collect();
    for (chunk, key, column, words) in asked {
        let line = b.let_((key % SIXTEEN) * SIXTEENS + key / SIXTEEN);
        let to = b.let_(line * cfg.pitch() + column);
        let to = memory.plus(b, to);
        b.predicated(chunk.lt(KEYS * chunks), |b| b.store_shared(to, &words.map(Val::from)));
    }
}

/// Writes the keys of every feature: a thread has four features of sixteen keys.
fn scatter(
    b: &mut Builder,
    cfg: &Config,
    memory: Shared,
    (start, padded): (Reg<U64>, Reg<U64>),
    thread: Reg<U32>,
) {
    let units = cfg.dim / 4 * SIXTEENS;
    for first in (0..units).step_by(THREADS as usize) {
        let unit = b.let_(thread + first);
        let (four, sixteen) = (b.let_((unit / SIXTEENS) * 4), b.let_(unit % SIXTEENS));
        b.if_(unit.lt(units), |b| {
            let from = b.let_(sixteen * cfg.pitch() + four);
            let from = memory.plus(b, from);
            let mut features = [const { Vec::new() }; 4];
            for quad in 0..4 {
                let words = [0, 1, 2, 3].map(|i| {
                    let key = 2 * quad + (i & 1) + 8 * (i >> 1);
                    let [word] = b.load_shared::<U32, 1>(from.at(key * SIXTEENS * cfg.pitch()));
                    word
                });
                let turned = turn(b, words);
                features.iter_mut().zip(turned).for_each(|(feature, word)| feature.push(word.into()));
            }
            let skip = b.let_(four.widen() * padded + (sixteen * SIXTEEN).widen());
            let to = b.var_in(Scope::Lane, start + skip);
            for feature in features {
                let feature: Vec<Val<U32>> = feature;
                b.store_global(Global::from(to), &feature);
                b.add_to(to, padded);
            }
        });
    }
}

/// Writes the rows of constants and the zeros behind: a thread has sixteen places of one row. What is hidden has a
/// probability of zero, so that it counts for nothing.
fn count(b: &mut Builder, cfg: &Config, (start, padded): (Reg<U64>, Reg<U64>), thread: Reg<U32>) {
    b.if_(thread.lt(COUNTED * SIXTEENS), |b| {
        let (row, sixteen) = (b.let_(thread / SIXTEENS), b.let_((thread % SIXTEENS) * SIXTEEN));
        let [(_, first), (_, second)] = COUNTS;
        let word = b.let_(row.eq(1).select(second, 0));
        let word = b.let_(row.eq(0).select(first, word));
        let skip = b.let_((row + cfg.dim).widen() * padded + sixteen.widen());
        let to = b.let_(start + skip);
        b.store_global(Global::from(to), &[Val::from(word); 4]);
    });
}

/// Turns four words of four bytes: byte `i` of word `j` becomes byte `j` of word `i`.
fn turn(b: &mut Builder, [w0, w1, w2, w3]: [Reg<U32>; 4]) -> [Reg<U32>; 4] {
    let [low, high] =
        [[w0, w1], [w2, w3]].map(|[x, y]| [0x5140, 0x7362].map(|order| b.bytes_of(x, y, order)));
    let out = |b: &mut Builder, n: usize, order| b.bytes_of(low[n], high[n], order);
    [out(b, 0, 0x5410), out(b, 0, 0x7632), out(b, 1, 0x5410), out(b, 1, 0x7632)]
}

/// The launch that turns the values of `problem` into `workspace`; `None` where there are none.
pub(crate) fn extent(problem: &Problem, workspace: Vec<Workspace>) -> Option<Extent> {
    let tiles = padded_keys(problem) / KEYS as usize * problem.heads_kv() * problem.batch();
    (tiles > 0).then_some(Extent { grid: [tiles as u32, 1, 1], workspace, dependent: true })
}
