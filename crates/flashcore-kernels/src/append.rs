//! New keys and values written into a cache, padded or in pages, for every GPU from sm_80 on; keys and queries get rotary
//! embedding on the way.
//!
//! A warp handles one row: of the keys, then of the values, then of the queries. Its lanes take one pair of features
//! after another. Lengths, slots and page numbers of the call are read here, unchecked before: a row without a valid
//! place is not written. Slots are those of [`crate::slots::append`].

mod target;
mod turn;

use flashcore_core::{AppendProblem, DType, Layout, Slots};
use flashcore_ptx::{ident::Ident, launch::Slot, sm::REGISTERS, target::Target};
use flashcore_tile::{BuildError, Builder, Extent, F32, Params, Pred, Program, Reg, U32, U64};
use serde::{Deserialize, Serialize};
use target::{RowTarget, factor_stride};
use turn::{Place, Turn};

use crate::{
    parts::pages::{PageArguments, PageShape},
    slots::append as slots,
};

/// CTAs that share an SM.
const CTAS_PER_SM: u32 = 8;

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// Element type of all tensors but the cache.
    pub dtype: DType,
    /// Element type of the cache.
    pub cache: DType,
    /// Whether what is written into a cache of 8 bits is divided by factors.
    pub scaled: bool,
    /// Where new rows go.
    pub slots: Slots,
    /// Whether a table finds the pages of the cache.
    pub paged: bool,
    /// Which features form a rotated pair, if any are rotated.
    pub rotary: Option<Pairs>,
    /// Whether there are queries to turn.
    pub queries: bool,
    /// How the work is split.
    pub shape: Shape,
}

/// Which features make a pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Pairs {
    /// Neighbours.
    Neighbours,
    /// Those half of the rotated features apart.
    Halves,
}

/// How the work is split.
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
            cache: problem.cache_dtype(),
            scaled: spec.scales.is_some(),
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
        let cache = match (self.cache == self.dtype, self.scaled) {
            (true, _) => "",
            (false, false) => "_e4m3",
            (false, true) => "_e4m3x",
        };
        let name = format!("fc_append_{}{cache}_{to}{rotary}{queries}_w{}", self.dtype, self.shape.warps);
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
        dtype: fn(&AppendProblem) -> DType,
    ) -> Self {
        let base = params.buffer(b, name, slot);
        let strides = [("batch", 0), ("head", 1), ("row", 2)].map(|(axis, n)| {
            params.u64(b, &format!("{name}_{axis}"), move |p| {
                of(p).map_or(0, |layout| (layout.strides()[n] * dtype(p).bytes()) as u64)
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

/// Layout of the queries, and of the rotated ones.
fn queries(problem: &AppendProblem) -> Option<&Layout> {
    problem.spec().q.as_ref().map(|layouts| &layouts[0])
}

fn turned_queries(problem: &AppendProblem) -> Option<&Layout> {
    problem.spec().q.as_ref().map(|layouts| &layouts[1])
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
    factors: Option<FactorArguments>,
}

/// Where the factors of keys and values lie.
struct FactorArguments {
    tensors: [Reg<U64>; 2],
    /// Bytes from a batch entry's to the next one's, and from a head's.
    strides: [Reg<U64>; 2],
}

/// What says where rows go.
enum Destination {
    /// After what is there: lengths and the bytes of one, the positions of a sequence, pages.
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
        let of_rows: fn(&AppendProblem) -> DType = |p| p.spec().dtype;
        let of_cache: fn(&AppendProblem) -> DType = AppendProblem::cache_dtype;
        Self {
            k: Tensor::declare(b, params, "k", slots::K, |p| Some(&p.spec().k), of_rows),
            v: Tensor::declare(b, params, "v", slots::V, |p| Some(&p.spec().v), of_rows),
            cache_k: Tensor::declare(
                b,
                params,
                "cache_k",
                slots::CACHE_K,
                |p| Some(&p.spec().cache_k),
                of_cache,
            ),
            cache_v: Tensor::declare(
                b,
                params,
                "cache_v",
                slots::CACHE_V,
                |p| Some(&p.spec().cache_v),
                of_cache,
            ),
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
                    Tensor::declare(b, params, "q", slots::Q, queries, of_rows),
                    Tensor::declare(b, params, "out", slots::OUT, turned_queries, of_rows),
                );
                (tensors.0, tensors.1, RowShape::declare(b, params, "q", queries))
            }),
            factors: cfg.scaled.then(|| {
                let names = [("factors_k", slots::FACTORS_K), ("factors_v", slots::FACTORS_V)];
                let tensors = names.map(|(name, slot)| params.buffer(b, name, slot));
                let names = [("factors_batch", 0), ("factors_head", 1)];
                let stride = |(name, n)| params.u64(b, name, move |p| factor_stride(p, n));
                FactorArguments { tensors, strides: names.map(stride) }
            }),
        }
    }

    /// What keys (tensor 0) or values of a place are divided by.
    fn divisor(&self, b: &mut Builder, tensor: usize, place: [Reg<U32>; 3]) -> Option<Reg<F32>> {
        let FactorArguments { tensors, strides: [of_batch, of_head] } = *self.factors.as_ref()?;
        let of_batch = b.let_(place[0].widen() * of_batch + tensors[tensor]);
        let at = b.let_(place[1].widen() * of_head + of_batch);
        let [factor] = b.load_global::<F32, 1>(at);
        Some(factor)
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
        let turn = self.turn.map(|turn| (turn, position));
        b.if_(there, |b| {
            let to = RowTarget { at: to, dtype: cfg.cache, divisor: self.divisor(b, 0, place) };
            self.copy(b, cfg, (from, to), self.dims[0], turn);
        });
    }

    fn value(&self, b: &mut Builder, cfg: &Config, row: Reg<U32>) {
        let place = self.new.place(b, row);
        let (to, there, _) = self.destination.place(b, place[0], place[2]);
        let (from, to) = self.addresses(b, place, (&self.v, &self.cache_v), to);
        b.if_(there, |b| {
            let to = RowTarget { at: to, dtype: cfg.cache, divisor: self.divisor(b, 1, place) };
            self.copy(b, cfg, (from, to), self.dims[1], None);
        });
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
        let to = RowTarget { at: to, dtype: cfg.dtype, divisor: None };
        self.copy(b, cfg, (from, to), self.dims[0], position);
    }

    /// Copies a row of `dim` features, of which the first pairs are rotated.
    fn copy(
        &self,
        b: &mut Builder,
        cfg: &Config,
        (from, to): (Reg<U64>, RowTarget),
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
                to.write(b, first, x, None);
                to.write(b, second, y, Some(whole));
                b.add_to(pair, 32);
            },
        );
    }
}
