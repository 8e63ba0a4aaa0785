//! Biases: what is added to scores, read from memory or computed from a slope and a distance.
//!
//! Scores are in the units of the matrix product until the softmax scales them, so a bias is converted to these units
//! first. Rows and keys beyond a sequence's are clamped to its range before indexing: their scores are not used.

use flashcore_core::{Bias, DType, Layout, Problem};
use flashcore_tile::{Acc, Builder, F32, Params, Reg, S32, U32, U64, Val};

use super::{
    elements,
    schedule::{Side, Tile},
    softmax::Rows,
    tensor::TensorArgument,
};
use crate::slots;

/// What kind of bias a kernel adds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BiasKind {
    /// A number of this type for each query and key.
    Pairs(DType),
    /// Minus a slope times the distance between query and key.
    Slopes,
}

impl BiasKind {
    /// The kind of a problem's bias.
    pub fn of(problem: &Problem) -> Option<Self> {
        problem.bias().map(|bias| match bias {
            Bias::Pairs { dtype, .. } => Self::Pairs(dtype),
            Bias::Slopes { .. } => Self::Slopes,
        })
    }

    /// The name in a kernel's name.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Pairs(DType::F16) => "_biasf16",
            Self::Pairs(DType::BF16) => "_biasbf16",
            Self::Pairs(_) => "_bias",
            Self::Slopes => "_alibi",
        }
    }
}

/// Where the bias of a call lies, and what turns it into scores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BiasArgument {
    from: Source,
    unit: Reg<F32>,
}

#[derive(Clone, Copy, Debug)]
enum Source {
    Pairs(TensorArgument, DType),
    /// The first slope, and how many lie between those of two sequences.
    Slopes(Reg<U64>, Reg<U32>),
}

impl BiasArgument {
    #[track_caller]
    pub(crate) fn declare<A: AsRef<Problem> + 'static>(
        b: &mut Builder,
        params: &mut Params<A>,
        kind: Option<BiasKind>,
    ) -> Option<Self> {
        let from = match kind? {
            BiasKind::Pairs(dtype) => {
                Source::Pairs(TensorArgument::declare(b, params, "bias", slots::BIAS, pairs::<A>), dtype)
            }
            BiasKind::Slopes => Source::Slopes(
                params.buffer(b, "bias", slots::BIAS),
                params.u32(b, "bias_sequence", |p| slopes_of_sequence(p.as_ref())),
            ),
        };
        let unit = |p: &Problem| 1.0 / p.softcap().unwrap_or(p.scale());
        Some(Self { from, unit: params.f32(b, "bias_unit", move |p| unit(p.as_ref())) })
    }

    /// The bias of the tile's query head, or of the first of those that share its keys.
    #[track_caller]
    pub(crate) fn of_tile(&self, b: &mut Builder, tile: &Tile) -> HeadBias {
        let zero = b.var(0);
        let (at, step) = match self.from {
            Source::Pairs(tensor, _) => (tensor.at(b, tile.batch, tile.head, zero), tensor.head),
            Source::Slopes(base, stride) => {
                let first = b.let_(tile.sequence * stride + tile.head);
                (b.let_(base + first.mul_wide(SLOPE_BYTES)), b.var(u64::from(SLOPE_BYTES)))
            }
        };
        HeadBias {
            argument: *self,
            at: b.var(at),
            step,
            last: [tile.q_len, tile.kv_len].map(|len| b.let_((len.signed() - 1).max(0))),
            diagonal: b.let_((tile.kv_len - tile.q_len).signed()),
        }
    }
}

const SLOPE_BYTES: u32 = size_of::<f32>() as u32;

fn pairs<A: AsRef<Problem>>(of: &A) -> (&Layout, DType) {
    let problem = of.as_ref();
    problem.bias_pairs().unwrap_or((problem.q(), problem.dtype()))
}

fn slopes_of_sequence(problem: &Problem) -> u32 {
    match problem.bias() {
        Some(Bias::Slopes { per_sequence: true }) => problem.heads_q() as u32,
        _ => 0,
    }
}

/// The bias of one query head, over one sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadBias {
    argument: BiasArgument,
    /// Where the head's numbers, or its slope, lie.
    at: Reg<U64>,
    /// Bytes to those of the next head.
    step: Reg<U64>,
    /// The last query and the last key.
    last: [Reg<S32>; 2],
    /// The key that query 0 stands at.
    diagonal: Reg<S32>,
}

impl HeadBias {
    /// The same for scores that are multiplied by one more factor when they are scaled.
    #[track_caller]
    pub(crate) fn before(self, b: &mut Builder, factor: Reg<F32>) -> Self {
        let unit = b.divide(self.argument.unit, factor);
        Self { argument: BiasArgument { unit, ..self.argument }, ..self }
    }

    /// Goes on to the next head.
    #[track_caller]
    pub(crate) fn next_head(&self, b: &mut Builder) {
        b.set(self.at, self.at + self.step);
    }

    /// Adds the bias to scores of a thread's two rows, whose columns start with `first`; `side` says what rows are.
    #[track_caller]
    pub(crate) fn add(&self, b: &mut Builder, side: Side, scores: &Acc, rows: Rows<S32>, first: Reg<S32>) {
        match (self.argument.from, side) {
            (Source::Pairs(tensor, dtype), Side::Queries) => {
                self.add_queries(b, tensor.row, dtype, scores, rows, first);
            }
            (Source::Pairs(tensor, dtype), Side::Keys) => {
                self.add_keys(b, tensor.row, dtype, scores, rows, first);
            }
            (Source::Slopes(..), _) => self.add_slopes(b, side, scores, rows, first),
        }
    }

    fn add_queries(
        &self,
        b: &mut Builder,
        stride: Reg<U64>,
        dtype: DType,
        scores: &Acc,
        rows: Rows<S32>,
        first: Reg<S32>,
    ) {
        let [last_query, last_key] = self.last;
        let rows = rows.map(|row| self.query(b, stride, row.min(last_query).unsigned()));
        for (i, &score) in scores.regs().iter().enumerate() {
            let key = b.let_((first + Acc::col(i) as i32).min(last_key).unsigned());
            let at = b.let_(rows[Acc::row(i)] + key.mul_wide(dtype.bytes() as u32));
            self.add_number(b, dtype, at, score);
        }
    }

    fn add_keys(
        &self,
        b: &mut Builder,
        stride: Reg<U64>,
        dtype: DType,
        scores: &Acc,
        rows: Rows<S32>,
        first: Reg<S32>,
    ) {
        let [last_query, last_key] = self.last;
        let keys = rows.map(|row| {
            let key = b.let_(row.min(last_key).unsigned());
            b.let_(key.mul_wide(dtype.bytes() as u32))
        });
        for (i, &score) in scores.regs().iter().enumerate() {
            let query = self.query(b, stride, (first + Acc::col(i) as i32).min(last_query).unsigned());
            let at = b.let_(query + keys[Acc::row(i)]);
            self.add_number(b, dtype, at, score);
        }
    }

    /// Where the numbers of a query start.
    fn query(
        &self,
        b: &mut Builder,
        stride: Reg<U64>,
        query: impl Into<flashcore_tile::Expr<U32>>,
    ) -> Reg<U64> {
        let query = b.widen(query);
        b.let_(query * stride + self.at)
    }

    fn add_number(&self, b: &mut Builder, dtype: DType, at: Reg<U64>, score: Reg<F32>) {
        let number = elements::load(b, dtype, 1, at)[0];
        b.fma_into(score, number, self.argument.unit, score);
    }

    fn add_slopes(&self, b: &mut Builder, side: Side, scores: &Acc, rows: Rows<S32>, first: Reg<S32>) {
        let [slope] = b.load_global::<F32, 1>(self.at);
        let slope = b.let_(slope * self.argument.unit);
        let slope = b.neg(slope);
        // How far a row's own position lies behind the first column: with keys as rows, the diagonal counts the other way.
        let ahead = rows.map(|row| match side {
            Side::Queries => b.let_(row + self.diagonal - first),
            Side::Keys => b.let_(row - self.diagonal - first),
        });
        for (i, &score) in scores.regs().iter().enumerate() {
            let distance = b.let_(ahead[Acc::row(i)] - Acc::col(i) as i32);
            let distance = b.let_(distance.max(Val::<S32>::Const(0) - distance).unsigned());
            let distance = b.to_f32(distance);
            b.fma_into(score, distance, slope, score);
        }
    }
}
