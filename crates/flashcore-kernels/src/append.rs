//! New keys and values written into a cache, padded or in pages, for every GPU from sm_80 on; keys and queries are turned
//! by their positions on the way.
//!
//! A warp has a row: of the keys, then of the values, then of the queries. Its lanes take one pair of features after
//! another. What the call says (lengths, slots, page numbers) is read here and was checked by nobody: a row without a
//! place is not written. Slots are those of [`crate::slots::append`].

use flashcore_core::{AppendProblem, DType, Layout, Slots};
use flashcore_ptx::{ident::Ident, launch::Slot, sm::REGISTERS, target::Target};
use flashcore_tile::{BuildError, Builder, Extent, F32, Params, Pred, Program, Reg, U32, U64};
use serde::{Deserialize, Serialize};

use crate::{
    parts::elements::{load, store},
    parts::pages::{PageArguments, PageShape},
    slots::append as slots,
};

/// CTAs that share an SM.
const CTAS_PER_SM: u32 = 8;

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// Element type of all tensors.
    pub dtype: DType,
    /// Where new rows go.
    pub slots: Slots,
    /// Whether a table finds the pages of the cache.
    pub paged: bool,
    /// Which features make a pair that is turned, if any are.
    pub rotary: Option<Pairs>,
    /// Whether there are queries to turn.
    pub queries: bool,
    /// How the work is cut.
    pub shape: Shape,
}

/// Which features make a pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Pairs {
    /// Neighbours.
    Neighbours,
    /// Those half of the turned features apart.
    Halves,
}

/// How the work is cut.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Warps of a CTA, each with a row.
    pub warps: u32,
}

impl Config {
    /// The kernel for a problem.
    pub fn of(problem: &AppendProblem) -> Self {
        let spec = problem.spec();
        let pairs = |interleaved| if interleaved { Pairs::Neighbours } else { Pairs::Halves };
        Self {
            dtype: spec.dtype,
            slots: spec.slots,
            paged: spec.pages.is_some(),
            rotary: spec.rotary.map(|rotary| pairs(rotary.interleaved)),
            queries: spec.q.is_some(),
            shape: Shape { warps: 4 },
        }
    }

    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let to = match (self.slots, self.paged) {
            (Slots::Listed, _) => "slots",
            (Slots::Behind, true) => "pages",
            (Slots::Behind, false) => "padded",
        };
        let rotary = match self.rotary {
            None => "",
            Some(Pairs::Neighbours) => "_turned",
            Some(Pairs::Halves) => "_halves",
        };
        let queries = if self.queries { "_q" } else { "" };
        let name = format!("fc_append_{}_{to}{rotary}{queries}_w{}", self.dtype, self.shape.warps);
        Ident::new(name).expect("made of legal parts")
    }

    const fn threads(&self) -> u32 {
        self.shape.warps * 32
    }

    /// Most registers of a thread.
    pub const fn registers(&self) -> u32 {
        REGISTERS / (CTAS_PER_SM * self.threads()) / 8 * 8
    }
}

/// Rows of keys, values and queries together.
pub(crate) fn rows(problem: &AppendProblem) -> usize {
    2 * problem.rows() + problem.query_rows()
}

/// The launch that computes `problem`; `None` where there is nothing to compute.
pub fn extent(cfg: &Config, problem: &AppendProblem) -> Option<Extent> {
    let ctas = rows(problem).div_ceil(cfg.shape.warps as usize) as u32;
    (ctas > 0).then(|| Extent { grid: [ctas, 1, 1], workspace: Vec::new(), dependent: false })
}

/// Builds the kernel.
pub fn append(cfg: &Config) -> Result<Program<AppendProblem>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(Target::Sm80, &name, cfg.threads(), CTAS_PER_SM);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    let (cta, warp) = (b.cta(), b.warp());
    let row = b.let_(cta * cfg.shape.warps + warp);
    args.run(&mut b, cfg, row);
    b.finish(&name, params)
}

/// A tensor: where it starts, bytes between batch entries, heads and rows.
#[derive(Clone, Copy)]
struct Tensor {
    base: Reg<U64>,
    strides: [Reg<U64>; 3],
}

impl Tensor {
    fn declare(
        b: &mut Builder,
        params: &mut Params<AppendProblem>,
        name: &str,
        slot: Slot,
        of: fn(&AppendProblem) -> Option<&Layout>,
    ) -> Self {
        let base = params.buffer(b, name, slot);
        let strides = [("batch", 0), ("head", 1), ("row", 2)].map(|(axis, n)| {
            params.u64(b, &format!("{name}_{axis}"), move |p| {
                of(p).map_or(0, |layout| (layout.strides()[n] * p.spec().dtype.bytes()) as u64)
            })
        });
        Self { base, strides }
    }

    fn at(&self, b: &mut Builder, place: [Reg<U64>; 3]) -> Reg<U64> {
        place.into_iter().zip(self.strides).fold(self.base, |at, (index, stride)| b.let_(index * stride + at))
    }
}

/// Extents of tensors that have as many rows: a warp finds its place by them.
#[derive(Clone, Copy)]
struct RowShape {
    heads: Reg<U32>,
    seq: Reg<U32>,
}

impl RowShape {
    fn declare(
        b: &mut Builder,
        params: &mut Params<AppendProblem>,
        name: &str,
        of: fn(&AppendProblem) -> Option<&Layout>,
    ) -> Self {
        let extent = move |p: &AppendProblem, n: usize| {
            of(p).map_or(1, |layout| layout.dims().array()[n]).max(1) as u32
        };
        Self {
            heads: params.u32(b, &format!("{name}_heads"), move |p| extent(p, 1)),
            seq: params.u32(b, &format!("{name}_seq"), move |p| extent(p, 2)),
        }
    }

    /// Batch entry, head and row of row number `n`.
    fn place(&self, b: &mut Builder, n: Reg<U32>) -> [Reg<U32>; 3] {
        let (plane, row) = (b.let_(n / self.seq), b.let_(n % self.seq));
        [b.let_(plane / self.heads), b.let_(plane % self.heads), row]
    }
}

/// Layout of the queries, and of the turned ones.
fn queries(problem: &AppendProblem) -> Option<&Layout> {
    problem.spec().q.as_ref().map(|layouts| &layouts[0])
}

fn turned_queries(problem: &AppendProblem) -> Option<&Layout> {
    problem.spec().q.as_ref().map(|layouts| &layouts[1])
}

/// Rotary embedding, as registers.
#[derive(Clone, Copy)]
struct Turn {
    cos: Reg<U64>,
    sin: Reg<U64>,
    /// Pairs that are turned.
    pairs: Reg<U32>,
    last_position: Reg<U32>,
    /// How far the positions of neighbouring queries are apart: 1, or 0 where they stand together.
    query_step: Reg<U32>,
}

/// What the host passes, as registers.
struct Arguments {
    k: Tensor,
    v: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    new: RowShape,
    /// Rows of the new keys, and of all tensors.
    rows: Reg<U32>,
    all: Reg<U32>,
    dims: [Reg<U32>; 2],
    destination: Destination,
    turn: Option<Turn>,
    queries: Option<(Tensor, Tensor, RowShape)>,
}

/// What says where rows go.
enum Destination {
    /// Behind what is there: lengths and the bytes of one, the positions of a sequence, pages.
    Behind { lengths: Reg<U64>, bytes: Reg<U32>, capacity: Reg<U32>, pages: Option<PageArguments> },
    /// To slots: how many there are, and rows of a page.
    Listed { slots: Reg<U64>, count: Reg<U64>, size: Reg<U64> },
}

impl Destination {
    fn declare(b: &mut Builder, params: &mut Params<AppendProblem>, cfg: &Config) -> Self {
        let pages = |p: &AppendProblem| {
            let (pool, row_stride) =
                (p.spec().cache_k.dims(), p.spec().pages.map_or(0, |pages| pages.row_stride));
            PageShape { pages: pool.batch, size: pool.seq, row_stride }
        };
        match cfg.slots {
            Slots::Behind => Self::Behind {
                lengths: params.buffer(b, "lengths", slots::LENGTHS),
                bytes: params.u32(b, "lengths_bytes", |p| p.spec().index.bytes()),
                capacity: params.u32(b, "capacity", |p| p.capacity() as u32),
                pages: cfg.paged.then(|| PageArguments::declare_for(b, params, slots::TABLE, pages)),
            },
            Slots::Listed => Self::Listed {
                slots: params.buffer(b, "slots", slots::SLOTS),
                count: params.u64(b, "slot_count", |p| {
                    let pool = p.spec().cache_k.dims();
                    (pool.batch * pool.seq) as u64
                }),
                size: params.u64(b, "page_size", |p| p.spec().cache_k.dims().seq.max(1) as u64),
            },
        }
    }

    /// How many keys a sequence has, 0 where it is none, and whether it is one.
    fn length(&self, b: &mut Builder, batch: Reg<U32>) -> Option<(Reg<U32>, Pred)> {
        let Self::Behind { lengths, bytes, .. } = self else { return None };
        let at = b.let_(*lengths + batch.mul_wide(*bytes));
        let [length] = b.load_global::<U32, 1>(at);
        let there = b.let_(length.signed().ge(0));
        Some((b.let_(length.signed().max(0).unsigned()), there))
    }

    /// Page (or batch entry) and row that a new row goes to, whether it has a place, and its position.
    fn place(&self, b: &mut Builder, batch: Reg<U32>, row: Reg<U32>) -> ([Reg<U64>; 2], Pred, Reg<U32>) {
        match self {
            Self::Behind { capacity, pages, .. } => {
                let (length, there) = self.length(b, batch).expect("rows go behind others");
                let position = b.let_(length + row);
                let inside = b.let_(position.lt(*capacity));
                let there = b.both(there, inside);
                let Some(pages) = pages else {
                    return ([b.let_(batch.widen()), b.let_(position.widen())], there, position);
                };
                let (page, there, row) = pages.follow(b, batch, position, there);
                ([b.let_(page.widen()), b.let_(row.widen())], there, position)
            }
            Self::Listed { slots, count, size } => {
                let at = b.let_(*slots + row.mul_wide(8));
                // A slot below 0 is beyond all others.
                let [slot] = b.load_global::<U64, 1>(at);
                let there = b.let_(slot.lt(*count));
                let page = b.let_(slot / *size);
                ([page, b.let_(slot - page * *size)], there, row)
            }
        }
    }
}

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<AppendProblem>, cfg: &Config) -> Self {
        Self {
            k: Tensor::declare(b, params, "k", slots::K, |p| Some(&p.spec().k)),
            v: Tensor::declare(b, params, "v", slots::V, |p| Some(&p.spec().v)),
            cache_k: Tensor::declare(b, params, "cache_k", slots::CACHE_K, |p| Some(&p.spec().cache_k)),
            cache_v: Tensor::declare(b, params, "cache_v", slots::CACHE_V, |p| Some(&p.spec().cache_v)),
            new: RowShape::declare(b, params, "new", |p| Some(&p.spec().k)),
            rows: params.u32(b, "rows", |p| p.rows() as u32),
            all: params.u32(b, "all", |p| rows(p) as u32),
            dims: [
                params.u32(b, "dim_k", |p| p.spec().k.dims().dim as u32),
                params.u32(b, "dim_v", |p| p.spec().v.dims().dim as u32),
            ],
            destination: Destination::declare(b, params, cfg),
            turn: cfg.rotary.map(|_| Turn::declare(b, params)),
            queries: cfg.queries.then(|| {
                let tensors = (
                    Tensor::declare(b, params, "q", slots::Q, queries),
                    Tensor::declare(b, params, "out", slots::OUT, turned_queries),
                );
                (tensors.0, tensors.1, RowShape::declare(b, params, "q", queries))
            }),
        }
    }

    /// What one warp does.
    fn run(&self, b: &mut Builder, cfg: &Config, row: Reg<U32>) {
        b.if_(row.lt(self.rows), |b| self.key(b, cfg, row));
        let of_v = b.let_(row - self.rows);
        b.if_(of_v.lt(self.rows), |b| self.value(b, cfg, of_v));
        if let Some((from, to, shape)) = &self.queries {
            let before = b.let_(self.rows + self.rows);
            let query = b.let_(row - before);
            b.if_(row.ge(before) & row.lt(self.all), |b| self.query(b, cfg, query, (from, to, shape)));
        }
    }

    fn key(&self, b: &mut Builder, cfg: &Config, row: Reg<U32>) {
        let place = self.new.place(b, row);
        let (to, there, position) = self.destination.place(b, place[0], place[2]);
        let (from, to) = self.addresses(b, place, (&self.k, &self.cache_k), to);
        b.if_(there, |b| self.copy(b, cfg, [from, to], self.dims[0], self.turn.map(|turn| (turn, position))));
    }

    fn value(&self, b: &mut Builder, cfg: &Config, row: Reg<U32>) {
        let place = self.new.place(b, row);
        let (to, there, _) = self.destination.place(b, place[0], place[2]);
        let (from, to) = self.addresses(b, place, (&self.v, &self.cache_v), to);
        b.if_(there, |b| self.copy(b, cfg, [from, to], self.dims[1], None));
    }

    fn addresses(
        &self,
        b: &mut Builder,
        place: [Reg<U32>; 3],
        (from, to): (&Tensor, &Tensor),
        [page, at]: [Reg<U64>; 2],
    ) -> (Reg<U64>, Reg<U64>) {
        let [batch, head, row] = place.map(|index| b.let_(index.widen()));
        (from.at(b, [batch, head, row]), to.at(b, [page, head, at]))
    }

    fn query(
        &self,
        b: &mut Builder,
        cfg: &Config,
        row: Reg<U32>,
        (from, to, shape): (&Tensor, &Tensor, &RowShape),
    ) {
        let place = shape.place(b, row);
        let position = self.destination.length(b, place[0]).zip(self.turn).map(|((length, _), turn)| {
            let position = b.let_(place[2] * turn.query_step + length);
            (turn, position)
        });
        let place = place.map(|index| b.let_(index.widen()));
        let (from, to) = (from.at(b, place), to.at(b, place));
        self.copy(b, cfg, [from, to], self.dims[0], position);
    }

    /// Copies a row of `dim` features, of which the first pairs are turned.
    fn copy(
        &self,
        b: &mut Builder,
        cfg: &Config,
        [from, to]: [Reg<U64>; 2],
        dim: Reg<U32>,
        turn: Option<(Turn, Reg<U32>)>,
    ) {
        let turn = turn.map(|(turn, position)| (turn, turn.angles(b, cfg, position)));
        let lane = b.lane();
        let pair = b.var_in(flashcore_tile::Scope::Lane, lane);
        b.while_(
            |_| (pair << 1).lt(dim),
            |b| {
                let turned = turn.map(|(turn, angles)| (b.let_(pair.lt(turn.pairs)), turn, angles));
                let first = b.let_(pair << 1);
                let second = b.let_(first + 1);
                let [first, second] = match turned {
                    Some((turned, turn, _)) if cfg.rotary == Some(Pairs::Halves) => {
                        let other = b.let_(pair + turn.pairs);
                        [b.select(turned, pair, first), b.select(turned, other, second)]
                    }
                    _ => [first, second],
                };
                let whole = b.let_(second.lt(dim));
                let place = Place { dtype: cfg.dtype, bytes: cfg.dtype.bytes() as u32 };
                let x = place.read(b, from, first, None);
                let y = place.read(b, from, second, Some(whole));
                let [x, y] = match turned {
                    Some((turned, _, angles)) => Turn::turned(b, place, turned, angles, pair, [x, y]),
                    None => [x, y],
                };
                place.write(b, to, first, x, None);
                place.write(b, to, second, y, Some(whole));
                b.add_to(pair, 32);
            },
        );
    }
}

/// Elements of one type.
#[derive(Clone, Copy)]
struct Place {
    dtype: DType,
    bytes: u32,
}

impl Place {
    /// An element, 0 where `who` does not hold.
    fn read(self, b: &mut Builder, from: Reg<U64>, index: Reg<U32>, who: Option<Pred>) -> Reg<F32> {
        // What is not there is read at the start of the row instead.
        let index = who.map_or(index, |who| b.select(who, index, 0));
        let at = b.let_(from + index.mul_wide(self.bytes));
        load(b, self.dtype, 1, at)[0]
    }

    fn write(self, b: &mut Builder, to: Reg<U64>, index: Reg<U32>, value: Reg<F32>, who: Option<Pred>) {
        let at = b.let_(to + index.mul_wide(self.bytes));
        match who {
            Some(who) => b.if_(who, |b| store(b, self.dtype, at, &[value])),
            None => store(b, self.dtype, at, &[value]),
        }
    }
}

impl Turn {
    fn declare(b: &mut Builder, params: &mut Params<AppendProblem>) -> Self {
        let rotary = |p: &AppendProblem| p.spec().rotary;
        Self {
            cos: params.buffer(b, "cos", slots::COS),
            sin: params.buffer(b, "sin", slots::SIN),
            pairs: params.u32(b, "pairs", move |p| rotary(p).map_or(0, |r| r.dim as u32 / 2)),
            last_position: params.u32(b, "last_position", move |p| {
                rotary(p).map_or(0, |r| r.positions.saturating_sub(1) as u32)
            }),
            query_step: params.u32(b, "query_step", move |p| rotary(p).map_or(0, |r| u32::from(!r.together))),
        }
    }

    /// Where the cosines and sines of a position start.
    fn angles(&self, b: &mut Builder, cfg: &Config, position: Reg<U32>) -> [Reg<U64>; 2] {
        let position = b.let_(position.min(self.last_position));
        let first = b.let_(position.mul_wide(self.pairs));
        let bytes = b.let_(first * cfg.dtype.bytes() as u64);
        [b.let_(self.cos + bytes), b.let_(self.sin + bytes)]
    }

    /// A pair, turned where it is one of those.
    fn turned(
        b: &mut Builder,
        place: Place,
        turned: Pred,
        [cos, sin]: [Reg<U64>; 2],
        pair: Reg<U32>,
        [x, y]: [Reg<F32>; 2],
    ) -> [Reg<F32>; 2] {
        let [cos, sin] = [cos, sin].map(|table| place.read(b, table, pair, Some(turned)));
        let (from_y, from_x) = (b.let_(y * sin), b.let_(x * sin));
        let minus = b.neg(from_y);
        let [new_x, new_y] = [b.fma(x, cos, minus), b.fma(y, cos, from_x)];
        [b.select(turned, new_x, x), b.select(turned, new_y, y)]
    }
}
