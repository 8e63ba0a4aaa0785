//! Transposes values of 8 bits: the keys of a feature become contiguous, as Hopper's tensor cores need them.
//!
//! A CTA transposes 128 keys of a head through shared memory (`parts/turner.rs`). Unused keys, and padding up to a
//! multiple of 128, become zeros, so that stale data is never multiplied.

use flashcore_core::{Dims, Layout, Problem, turned_dims};
use flashcore_ptx::{
    ident::Ident,
    launch::{TensorMapSpec, Workspace},
    target::Target,
};
use flashcore_tile::{BuildError, Builder, Element, Extent, Params, Program, Reg, Scope, U32};

use crate::{
    parts::{
        lengths::{LengthArguments, LengthsKind},
        maps::slab_map,
        tensor::TensorArgument,
        turner::{COUNTED, KEYS, THREADS, Turner},
    },
    slots,
};

/// Most rows that a tensor copy moves.
const MOST_ROWS: u32 = 256;

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
}

/// Extents of the transposed values: batch, heads, rows, keys.
fn dims(problem: &Problem) -> Dims {
    turned_dims(Dims::new(problem.batch(), problem.heads_kv(), problem.seq_kv(), problem.dim_v()))
}

/// The workspace that holds the transposed values.
pub(crate) fn workspace(problem: &Problem) -> Workspace {
    let Dims { batch, heads, seq, dim } = dims(problem);
    Workspace { slot: slots::TURNED, bytes: (batch * heads * seq) as u64 * dim as u64, zeroed: false }
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

/// How tensor copies see the turned values, the caller's or those in the workspace: `keys` keys of all features of a head at
/// once, or of a part of them.
pub(crate) fn turned_map(problem: &Problem, keys: u32) -> TensorMapSpec {
    let scratch =
        || Layout::bhsd(dims(problem)).expect("the plan has seen that the workspace can be indexed");
    let (slot, layout) = if problem.turned() { (slots::V, *problem.v()) } else { (slots::TURNED, scratch()) };
    let (_, rows) = copies(problem.dim_v() as u32);
    slab_map(&layout, Element::E4m3, slot, (rows, Element::E4m3.swizzle(keys)))
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
    let padded = params.u64(&mut b, "padded_keys", |p| dims(p).dim as u64);
    let heads = params.u32(&mut b, "heads", |p| p.heads_kv() as u32);
    let tiles = params.u32(&mut b, "tiles", |p| dims(p).dim as u32 / KEYS);
    let seq_q = params.u32(&mut b, "seq_q", |p| p.seq_q() as u32);
    let seq_kv = params.u32(&mut b, "seq_kv", |p| p.seq_kv() as u32);
    let lengths = LengthArguments::declare(&mut b, &mut params, cfg.lengths, [seq_q, seq_kv]);
    let turner = Turner::reserve(&mut b, cfg.dim);
    b.wait_for_predecessor();
    b.launch_dependents();
    let (index, thread) = (b.cta(), b.thread());
    let flat_head = b.let_(index / tiles);
    let first = b.let_((index % tiles) * KEYS);
    let place = Place { first, head: b.let_(flat_head % heads), batch: b.let_(flat_head / heads), thread };
    let [_, used] = lengths.used(&mut b, place.batch);
    gather(&mut b, &turner, &v, used, &place);
    let features = b.let_(flat_head * (cfg.dim + COUNTED));
    let start = b.let_(features.widen() * padded + first.widen());
    let start = b.let_(turned + start);
    turner.write(&mut b, (start, padded), thread);
    b.finish(&name, params)
}

/// Brings the features of all keys; all are asked for before the first is put down.
fn gather(b: &mut Builder, turner: &Turner, v: &TensorArgument, used: Reg<U32>, place: &Place) {
    let chunks = turner.chunks(b, place.thread).into_iter();
    let asked: Vec<_> = chunks
        .map(|chunk| {
            let row = b.let_(place.first + chunk.key);
            let words = [(); 4].map(|()| b.var_in::<U32>(Scope::Lane, 0));
            let at = v.at(b, place.batch, place.head, row);
            let at = b.let_(at + chunk.column.widen());
            b.predicated(row.lt(used), |b| b.load_global_into(words, at));
            (chunk, words)
        })
        .collect();
    asked.into_iter().for_each(|(chunk, words)| turner.put(b, &chunk, words));
}

/// The launch that turns the values of `problem` into `workspace`; `None` where there are none.
pub(crate) fn extent(problem: &Problem, workspace: Vec<Workspace>) -> Option<Extent> {
    let tiles = dims(problem).dim / KEYS as usize * problem.heads_kv() * problem.batch();
    (tiles > 0).then_some(Extent { grid: [tiles as u32, 1, 1], workspace, dependent: true })
}
