//! The terms of rows, `−lse` in powers of two and minus the sum of `dO ∘ O`: in registers where rows stay, in shared memory
//! where they are streamed.

use flashcore_tile::{
    Acc, Builder, CopyWidth, F32, Global, MMA_K, MMA_M, ROWS_PER_THREAD, Reg, S32, Scope, Shared, U32, U64,
    Val,
};

use super::{Arguments, Config, Layout, TERM_BYTES};
use crate::{
    backward_rows::ROW_BYTES,
    parts::{row_end::thread_rows, schedule::Tile, softmax::Rows},
};

/// Bytes of one term.
const BYTES: u32 = size_of::<f32>() as u32;

/// Where a step finds the terms.
pub(super) enum Terms {
    /// Rows stay: both terms of a thread's two rows, for each block.
    Rows(Vec<[Rows<F32>; 2]>),
    /// Rows are streamed: they lie beside their tile.
    Columns(StreamedTerms),
}

impl Terms {
    /// The terms of the rows that a warp keeps; those beyond the used rows have no gradients.
    pub(super) fn of_rows(
        b: &mut Builder,
        cfg: &Config,
        args: &Arguments,
        tile: &Tile,
        warp_row: Reg<U32>,
        there: Reg<S32>,
    ) -> Self {
        let first = b.let_(tile.q_start + tile.first_row);
        let start = args.terms.at(b, tile.batch, tile.head, first);
        let lane = b.lane();
        let block = |block: u32| {
            let first = b.let_(warp_row + block * MMA_M);
            let terms = thread_rows(b, first, lane).map(|row| {
                let terms = [f32::NEG_INFINITY, 0.0].map(|none| b.var_in::<F32>(Scope::Lane, none));
                let at = b.let_(start + row.mul_wide(ROW_BYTES));
                b.predicated(row.signed().lt(there), |b| b.load_global_into(terms, at));
                terms
            });
            [0, 1].map(|n| terms.map(|row| row[n]))
        };
        Self::Rows((0..cfg.shape.blocks).map(block).collect())
    }

    /// The terms of the step that starts at row `first` of stage `stage`.
    pub(super) fn at(&self, b: &mut Builder, stage: Reg<U32>, first: Reg<U32>, blocks: u32) -> StepTerms<'_> {
        match self {
            Self::Rows(rows) => StepTerms::Rows(rows),
            Self::Columns(columns) => {
                StepTerms::Columns { start: columns.at(b, stage, first), columns, blocks }
            }
        }
    }
}

/// Values of a thread in 16 columns of an accumulator.
pub(super) const VALUES: usize = MMA_K as usize / 2;

/// The terms of one step.
pub(super) enum StepTerms<'a> {
    Rows(&'a [[Rows<F32>; 2]]),
    Columns { columns: &'a StreamedTerms, start: Shared, blocks: u32 },
}

impl StepTerms<'_> {
    /// What is added to a scaled score for it to become the logarithm of a probability: for each block, value by value of
    /// its accumulator's 16 columns from `column` on.
    pub(super) fn offsets(&self, b: &mut Builder, column: u32) -> Vec<[Reg<F32>; VALUES]> {
        self.values(b, 0, column)
    }

    /// The same of minus the sums.
    pub(super) fn minus_sums(&self, b: &mut Builder, column: u32) -> Vec<[Reg<F32>; VALUES]> {
        self.values(b, 1, column)
    }

    fn values(&self, b: &mut Builder, which: usize, column: u32) -> Vec<[Reg<F32>; VALUES]> {
        match self {
            Self::Rows(rows) => {
                let of_block = |terms: &[Rows<F32>; 2]| std::array::from_fn(|i| terms[which][Acc::row(i)]);
                rows.iter().map(of_block).collect()
            }
            Self::Columns { columns, start, blocks } => {
                let start = start.at((which as u32 * columns.tile + column) * BYTES);
                let pairs = [0, 8 * BYTES].map(|at| b.load_shared::<F32, 2>(start.at(at)));
                let values = std::array::from_fn(|i| pairs[i / (2 * ROWS_PER_THREAD)][i % 2]);
                vec![values; *blocks as usize]
            }
        }
    }
}

/// The ring's row terms: for each stage all `−lse`, then all sums.
#[derive(Clone, Copy)]
pub(super) struct StreamedTerms {
    /// Rows of a stage.
    tile: u32,
    /// This lane's first column of the first stage.
    lane: Shared,
    /// Where this thread's row of the first stage goes.
    to: Shared,
    /// Where its row of the next tile lies.
    from: Reg<U64>,
}

impl StreamedTerms {
    /// Terms whose first row to be loaded lies at `from`.
    pub(super) fn new(b: &mut Builder, cfg: &Config, layout: &Layout, from: Reg<U64>) -> Option<Self> {
        let at = layout.terms?;
        let (thread, lane) = (b.thread(), b.lane());
        let start = b.shared_at(at);
        Some(Self {
            tile: cfg.shape.tile,
            lane: start.plus(b, (lane & 3) * (2 * BYTES)),
            to: start.plus(b, thread * BYTES),
            from: b.var_in(Scope::Lane, from + thread.mul_wide(ROW_BYTES)),
        })
    }

    /// Starts the copies of a tile's terms into a stage; rows from `there` on become zeros.
    pub(super) fn issue(&self, b: &mut Builder, stage: Reg<U32>, there: Option<Reg<S32>>) {
        let thread = b.thread();
        let stage = b.let_(stage * (self.tile * TERM_BYTES));
        let to = self.to.plus(b, stage);
        let bytes = there.map(|there| b.select::<U32>(thread.signed().lt(there), BYTES, 0));
        b.if_(thread.lt(self.tile), |b| {
            for (n, offset) in [0, self.tile * BYTES].into_iter().enumerate() {
                let from = Global::from(self.from).at(n as i32 * BYTES as i32);
                b.copy_async(CopyWidth::B4, to.at(offset), from, bytes.map(Val::from));
            }
        });
        b.set(self.from, self.from - u64::from(self.tile * ROW_BYTES));
    }

    /// Goes on with the row at `from`.
    pub(super) fn restart(&self, b: &mut Builder, from: Reg<U64>) {
        let thread = b.thread();
        b.set(self.from, from + thread.mul_wide(ROW_BYTES));
    }

    /// This lane's first column from row `first` of stage `stage` on.
    fn at(&self, b: &mut Builder, stage: Reg<U32>, first: Reg<U32>) -> Shared {
        let skip = b.let_(stage * (self.tile * TERM_BYTES) + first * BYTES);
        self.lane.plus(b, skip)
    }
}
