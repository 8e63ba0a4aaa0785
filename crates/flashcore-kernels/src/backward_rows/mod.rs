//! What the gradients' kernels have to know of each row, for every GPU from sm_80 on: `−lse` in powers of two and minus the
//! sum of `dO ∘ O`, in one workspace that both kernel families read. `sinks` makes the sinks' gradients of it.
//!
//! A row that has no gradients, because it is not used or sees no key, has −∞ and 0 there, so that its probabilities and
//! everything made of them are exactly 0. Rows of a head are padded to a multiple of [`PADDING`] such rows: whole tiles may
//! be copied. Rows of packed tensors that belong to no sequence hold anything. Of packed tensors there is a second copy, in which
//! all rows lie one place further up: bulk copies start at multiples of two rows, and sequences at any. `outside` clears gradients
//! of rows that no sequence has.
//!
//! Neighbouring lanes share a row, each with as many neighbouring features as one load brings, as in [`crate::merge`].

mod outside;
pub mod sinks;

use std::f32::consts::LOG2_E;

use flashcore_core::{BackwardProblem, DType, Layout, Problem, RowSums};
use flashcore_ptx::{ident::Ident, launch::Workspace, sm::REGISTERS, target::Target};
use flashcore_tile::{BuildError, Builder, Extent, F32, Params, Pred, Program, Reg, Scope, U32, U64};
use serde::{Deserialize, Serialize};

use crate::{
    backward_sm90::Ending,
    parts::{
        elements::{WIDEST, load},
        lengths::{LengthArguments, LengthsKind},
        tensor::TensorArgument,
    },
    slots::backward as slots,
};
use outside::Outside;

/// Threads of a CTA.
const THREADS: u32 = 128;
/// CTAs that share an SM.
const CTAS_PER_SM: u32 = 8;
/// Rows of a head are padded to a multiple of this.
pub const PADDING: u32 = 128;
/// Bytes of the terms of a row: two f32.
pub const ROW_BYTES: u32 = 8;

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// Element type of the output and its gradient.
    pub element: DType,
    /// Where the sums come from.
    pub sums: RowSums,
    /// Whether batch entries use a part of their queries.
    pub cuts_queries: bool,
    /// Where sequences are packed, what becomes of gradients: terms are then written twice, the second time one row further up.
    pub packed: Option<Ending>,
    /// How rows are cut.
    pub shape: Shape,
}

/// How rows are cut.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Features that a lane reads at once: a power of two that divides the features of a row.
    pub width: u32,
    /// Lanes that share a row: a power of two up to 32.
    pub lanes: u32,
}

impl Config {
    /// The kernel for a problem whose addresses are multiples of `alignment` bytes.
    pub fn of(problem: &BackwardProblem, alignment: u64) -> Self {
        let forward = problem.forward();
        let shape = match problem.row_sums() {
            RowSums::Given => Shape { width: 1, lanes: 1 },
            RowSums::Computed => widest(problem, alignment),
        };
        let cuts_queries = LengthsKind::of(forward).is_some_and(LengthsKind::cuts_queries);
        let packed = is_packed(forward).then(|| Ending::of(problem));
        Self { element: forward.out_dtype(), sums: problem.row_sums(), cuts_queries, packed, shape }
    }

    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let Shape { width, lanes } = self.shape;
        let sums = if self.sums == RowSums::Given { "given" } else { "computed" };
        let used = if self.cuts_queries { "_used_q" } else { "" };
        let packed = self.packed.map_or(String::new(), |ending| format!("_packed{}", ending.suffix()));
        let name = format!("fc_backward_rows_{}_{sums}_w{width}l{lanes}{used}{packed}", self.element);
        Ident::new(name).expect("made of legal parts")
    }

    /// Most registers of a thread.
    pub const fn registers(&self) -> u32 {
        REGISTERS / (CTAS_PER_SM * THREADS) / 8 * 8
    }

    /// Rows of a CTA.
    const fn rows(&self) -> u32 {
        THREADS / self.shape.lanes
    }
}

/// The widest loads that layouts and addresses allow.
fn widest(problem: &BackwardProblem, alignment: u64) -> Shape {
    let (forward, bytes) = (problem.forward(), problem.forward().out_dtype().bytes() as u32);
    let dim = forward.dim_v() as u32;
    let steps = |layout: &Layout| {
        let used = layout.dims().array().into_iter().zip(layout.strides()).take(3);
        used.filter(|&(extent, _)| extent > 1).fold(0, |bits, (_, stride)| bits | stride as u64)
    };
    let bits = alignment | ((steps(forward.out()) | steps(problem.d_out())) * u64::from(bytes));
    let serves = |width: &u32| {
        width * bytes <= WIDEST && dim.is_multiple_of(*width) && bits.is_multiple_of((width * bytes).into())
    };
    let width = [8, 4, 2].into_iter().find(serves).unwrap_or(1);
    Shape { width, lanes: (dim / width).next_power_of_two().min(32) }
}

/// Whether sequences are packed one after another.
fn is_packed(problem: &Problem) -> bool {
    LengthsKind::of(problem).is_some_and(LengthsKind::packs_queries)
}

/// Rows of a head in the workspace. A tile of a packed sequence starts anywhere, so that the last ends anywhere.
pub fn padded_rows(problem: &Problem) -> u64 {
    let tile = if is_packed(problem) { u64::from(PADDING) } else { 0 };
    (problem.seq_q() as u64 + tile).next_multiple_of(PADDING.into())
}

/// Rows of all heads in the workspace.
pub fn all_rows(problem: &Problem) -> u64 {
    padded_rows(problem) * problem.batch() as u64 * problem.heads_q() as u64
}

/// The workspace that holds the terms of all rows.
pub fn workspace(problem: &Problem) -> Workspace {
    let copies = 1 + u64::from(is_packed(problem));
    let bytes = copies * all_rows(problem) * u64::from(ROW_BYTES);
    Workspace { slot: slots::ROW_TERMS, bytes, zeroed: false }
}

/// The launch that computes `problem`, which has at most 2³¹ − 1 rows in `workspace`; `None` where there are none.
pub fn extent(cfg: &Config, problem: &BackwardProblem, workspace: &[Workspace]) -> Option<Extent> {
    let ctas = all_rows(problem.forward()).div_ceil(cfg.rows().into()) as u32;
    (ctas > 0).then(|| Extent { grid: [ctas, 1, 1], workspace: workspace.to_vec(), dependent: false })
}

/// Builds the kernel.
pub fn backward_rows(cfg: &Config) -> Result<Program<BackwardProblem>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(Target::Sm80, &name, THREADS, CTAS_PER_SM);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    let (thread, cta) = (b.thread(), b.cta());
    let row = b.let_(cta * cfg.rows() + thread / cfg.shape.lanes);
    let lane = b.let_(thread % cfg.shape.lanes);
    args.row(&mut b, cfg, row, lane);
    args.outside.iter().for_each(|outside| outside.clear(&mut b, &args.terms, row, (lane, cfg.shape.lanes)));
    b.finish(&name, params)
}

/// Where the terms of rows lie: declared by every kernel that reads or writes them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TermsArgument {
    base: Reg<U64>,
    heads: Reg<U32>,
    /// Rows of a head.
    stride: Reg<U32>,
}

impl TermsArgument {
    #[track_caller]
    pub(crate) fn declare<A: AsRef<Problem>>(b: &mut Builder, params: &mut Params<A>) -> Self {
        Self {
            base: params.buffer(b, "row_terms", slots::ROW_TERMS),
            heads: params.u32(b, "terms_heads", |p| p.as_ref().heads_q() as u32),
            stride: params.u32(b, "terms_stride", |p| padded_rows(p.as_ref()) as u32),
        }
    }

    /// Rows of a head.
    pub(crate) const fn stride(&self) -> Reg<U32> {
        self.stride
    }

    /// Address of the terms of a row; `ROW_BYTES` further on are those of the next one.
    #[track_caller]
    pub(crate) fn at(&self, b: &mut Builder, batch: Reg<U32>, head: Reg<U32>, row: Reg<U32>) -> Reg<U64> {
        let plane = b.let_(batch * self.heads + head);
        let index = b.let_(plane.mul_wide(self.stride) + row.widen());
        b.let_(self.base + index * u64::from(ROW_BYTES))
    }

    /// The same of a packed tensor for bulk copies: in the second copy, odd rows lie at multiples of 16 bytes.
    #[track_caller]
    pub(crate) fn bulk_at(&self, b: &mut Builder, head: Reg<U32>, row: Reg<U32>) -> Reg<U64> {
        let all = b.let_(self.heads * self.stride - 1);
        let plane = b.let_(head * self.stride + row);
        let index = b.let_((row & 1).mul_wide(all) + plane.widen());
        b.let_(self.base + index * u64::from(ROW_BYTES))
    }

    /// Where row number `row` of all heads has its second copy; the first has none.
    #[track_caller]
    fn second_at(&self, b: &mut Builder, row: Reg<U32>) -> Reg<U64> {
        let index = b.let_((self.heads * self.stride - 1).widen() + row.widen());
        b.let_(self.base + index * u64::from(ROW_BYTES))
    }
}

/// What the host passes, as registers.
struct Arguments {
    /// Output and its gradient, where sums are computed.
    tensors: Option<[TensorArgument; 2]>,
    /// Sums, where they are given.
    sums: Option<Reg<U64>>,
    lse: Reg<U64>,
    terms: TermsArgument,
    lengths: LengthArguments,
    rows: Reg<U32>,
    dim: Reg<U32>,
    /// Rows that no sequence has, where their gradients are written.
    outside: Option<Outside>,
}

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<BackwardProblem>, cfg: &Config) -> Self {
        let given = cfg.sums == RowSums::Given;
        let tensors = (!given).then(|| {
            [
                TensorArgument::declare(b, params, "out", slots::OUT, |p| {
                    (p.forward().out(), p.forward().dtype())
                }),
                TensorArgument::declare(b, params, "d_out", slots::D_OUT, |p| {
                    (p.d_out(), p.forward().dtype())
                }),
            ]
        });
        let seq_q = params.u32(b, "seq_q", |p| p.forward().seq_q() as u32);
        let kind =
            if cfg.cuts_queries { LengthsKind::Used { q: true, kv: false } } else { LengthsKind::Uniform };
        Self {
            tensors,
            sums: given.then(|| params.buffer(b, "row_sums", slots::ROW_SUMS)),
            lse: params.buffer(b, "lse", slots::LSE),
            terms: TermsArgument::declare(b, params),
            lengths: LengthArguments::declare(b, params, kind, [seq_q, seq_q]),
            rows: params.u32(b, "rows", |p| all_rows(p.forward()) as u32),
            dim: params.u32(b, "dim", |p| p.forward().dim_v() as u32),
            outside: Outside::declare(b, params, cfg, seq_q),
        }
    }

    /// Writes the terms of a row, of which this is one lane.
    fn row(&self, b: &mut Builder, cfg: &Config, row: Reg<U32>, lane: Reg<U32>) {
        let TermsArgument { heads, stride, .. } = self.terms;
        let (plane, seq) = (b.let_(row / stride), b.let_(row % stride));
        let (batch, head) = (b.let_(plane / heads), b.let_(plane % heads));
        let there = b.let_(row.lt(self.rows));
        // Beyond the last row there may be no batch entry to ask for its length.
        let used = b.var_in(Scope::Lane, 0);
        b.if_(there, |b| {
            let [queries, _] = self.lengths.used(b, batch);
            b.set(used, queries);
        });
        let alive = b.let_(seq.lt(used));
        let index = b.let_(plane.mul_wide(self.lengths.seq_q) + seq.widen());
        let lse = b.var_in::<F32>(Scope::Lane, f32::NEG_INFINITY);
        let at = b.let_(self.lse + index * 4);
        b.predicated(alive, |b| b.load_global_into([lse], at));
        let counts = b.let_(lse.ne(f32::NEG_INFINITY));
        let sum = match self.tensors {
            Some(tensors) => self.sum(b, cfg, tensors, [batch, head, seq], lane, counts),
            None => self.given_sum(b, index, counts),
        };
        let offset = b.let_(lse * -LOG2_E);
        let offset = b.select(counts, offset, f32::NEG_INFINITY);
        let minus_sum = b.neg(sum);
        let to = self.terms.at(b, batch, head, seq);
        let writes = b.let_(there & lane.eq(0));
        b.predicated(writes, |b| b.store_global::<F32>(to, &[offset.into(), minus_sum.into()]));
        if cfg.packed.is_some() {
            let (to, writes) = (self.terms.second_at(b, row), b.let_(writes & row.ne(0)));
            b.predicated(writes, |b| b.store_global::<F32>(to, &[offset.into(), minus_sum.into()]));
        }
    }

    fn given_sum(&self, b: &mut Builder, index: Reg<U64>, counts: Pred) -> Reg<F32> {
        let sum = b.var_in::<F32>(Scope::Lane, 0.0);
        let Some(sums) = self.sums else { return sum };
        let at = b.let_(sums + index * 4);
        b.predicated(counts, |b| b.load_global_into([sum], at));
        sum
    }

    /// The sum of `dO ∘ O` over a row; 0 where the row does not count, whatever it holds.
    fn sum(
        &self,
        b: &mut Builder,
        cfg: &Config,
        tensors: [TensorArgument; 2],
        [batch, head, seq]: [Reg<U32>; 3],
        lane: Reg<U32>,
        counts: Pred,
    ) -> Reg<F32> {
        let Shape { width, lanes } = cfg.shape;
        let rows = tensors.map(|tensor| tensor.at(b, batch, head, seq));
        let sums: Vec<_> = (0..width.min(2)).map(|_| b.var_in::<F32>(Scope::Lane, 0.0)).collect();
        let column = b.var_in(Scope::Lane, lane * width);
        b.while_(
            |_| column.lt(self.dim) & counts,
            |b| {
                let skipped = b.let_(column.mul_wide(cfg.element.bytes() as u32));
                let [out, d_out] = rows.map(|row| {
                    let at = b.let_(row + skipped);
                    load(b, cfg.element, width, at)
                });
                for (n, (x, y)) in out.into_iter().zip(d_out).enumerate() {
                    let sum = sums[n % sums.len()];
                    b.fma_into(sum, x, y, sum);
                }
                b.add_to(column, width * lanes);
            },
        );
        let sum = sums.into_iter().reduce(|x, y| b.add(x, y)).expect("a lane reads features");
        let distances = [16, 8, 4, 2, 1].into_iter().filter(|&distance| distance < lanes);
        distances.fold(sum, |sum, distance| {
            let other = b.shuffle_xor(sum, distance);
            b.add(sum, other)
        })
    }
}
