//! Rows of an f32 output, from registers to global memory, merged with the output's present contents on request.
//!
//! A thread has two neighbouring columns of each eight in both of its rows, as accumulators have them; the lanes of a quad
//! write 32 bytes together, one memory sector. Both kernel families end f32 rows here.

use std::f32::consts::{LN_2, LOG2_E};

use flashcore_tile::{Builder, F32, Global, Pred, ROWS_PER_THREAD, Reg, Scope, U32, U64, Val};

use super::{
    columns::Columns,
    softmax::{Finished, Rows},
};

/// Columns from one of a thread's vectors to its next: those of the quad's vectors together.
pub(crate) const VECTOR: u32 = 8;
/// Bytes of an element.
const BYTES: u32 = size_of::<f32>() as u32;
/// Bytes of a line of L2.
const LINE: u32 = 128;
/// Vectors that are written together.
const BATCH: usize = 4;
/// Vectors whose old values are read before any of them is written: loads wait for no store between them, and the more there
/// are in flight, the less often a warp waits.
const READ_BATCH: usize = 8;

/// Two columns of both rows of a thread.
pub(crate) type Vector = [Reg<F32>; 2 * ROWS_PER_THREAD];

/// What rows become when they are written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    /// What sums are multiplied by; with 0 they may hold anything.
    pub(crate) factor: Rows<F32>,
    /// What the output's old values are multiplied by, where it is accumulated; with 0 they may hold anything.
    kept: Option<Rows<F32>>,
    /// Natural logarithm of the sum of exponentials.
    pub(crate) lse: Rows<F32>,
}

impl From<Finished> for Ended {
    fn from(Finished { factor, lse }: Finished) -> Self {
        Self { factor, kept: None, lse }
    }
}

impl Ended {
    /// Rows whose factors are given, added to what the output holds where it is accumulated.
    #[track_caller]
    pub(crate) fn added(b: &mut Builder, factor: Rows<F32>, accumulate: bool) -> Self {
        Self { factor, kept: accumulate.then(|| [b.var(1.0); ROWS_PER_THREAD]), lse: factor }
    }

    /// Rows that are merged with others whose LSE is `old`: each weighs what its sum of exponentials says.
    #[track_caller]
    pub(crate) fn merged(b: &mut Builder, finished: Finished, old: Rows<F32>) -> Self {
        let rows: [_; ROWS_PER_THREAD] = std::array::from_fn(|row| {
            let [old, new] = [old[row], finished.lse[row]];
            let top = b.let_(old.max(new));
            // Differences to −∞ stay −∞ where nobody has seen anything.
            let top = b.let_(top.eq(f32::NEG_INFINITY).select(0.0, top));
            let [old, new] = [old, new].map(|lse| b.exp2((lse - top) * LOG2_E));
            let total = b.let_(old + new);
            let inverse = b.rcp(total);
            let inverse = b.let_(total.eq(0.0).select(0.0, inverse));
            let log = b.log2(total);
            let factor = b.let_(finished.factor[row] * (new * inverse));
            [factor, b.let_(old * inverse), b.fma(log, LN_2, top)]
        });
        let all = |n: usize| rows.map(|row| row[n]);
        Self { factor: all(0), kept: Some(all(1)), lse: all(2) }
    }

    /// The same with nothing in the rows for which `beyond` holds.
    #[track_caller]
    pub(crate) fn without(self, b: &mut Builder, beyond: [Pred; ROWS_PER_THREAD]) -> Self {
        let factor = std::array::from_fn(|row| b.select(beyond[row], 0.0, self.factor[row]));
        Self { factor, ..self }
    }
}

/// Reads the LSE of rows that are there; −∞ for the others.
#[track_caller]
pub(crate) fn old_lse(b: &mut Builder, at: Rows<U64>, there: [Pred; ROWS_PER_THREAD]) -> Rows<F32> {
    std::array::from_fn(|row| {
        let lse = b.var_in::<F32>(Scope::Lane, f32::NEG_INFINITY);
        b.predicated(there[row], |b| b.load_global_into([lse], at[row]));
        lse
    })
}

/// Bytes of the first column of this thread in a row, from vector `first` on.
#[track_caller]
pub(crate) fn first_column(b: &mut Builder, lane: Reg<U32>, first: Option<Reg<U32>>) -> Reg<U64> {
    let within = (lane & 3) * (2 * BYTES);
    match first {
        Some(first) => b.let_((first * (VECTOR * BYTES) + within).widen()),
        None => b.let_(within.widen()),
    }
}

/// Which of a vector's two columns exist.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Exist {
    /// Both.
    All,
    /// Both or none.
    Pair(Pred),
    /// Each by itself: rows end between them.
    Each([Pred; 2]),
}

impl From<Option<Pred>> for Exist {
    fn from(pair: Option<Pred>) -> Self {
        pair.map_or(Self::All, Self::Pair)
    }
}

impl Exist {
    /// The same under further conditions.
    fn map(self, mut more: impl FnMut(Pred) -> Pred) -> Self {
        match self {
            Self::All => Self::All,
            Self::Pair(exists) => Self::Pair(more(exists)),
            Self::Each(exist) => Self::Each(exist.map(more)),
        }
    }

    /// What of a row exists, if the row does.
    #[track_caller]
    fn of_row(self, b: &mut Builder, there: Pred) -> Self {
        match self {
            Self::All => Self::Pair(there),
            exist => exist.map(|exists| b.let_(there & exists)),
        }
    }
}

/// Which columns of vector `n` of this thread exist, where rows have `dim` features of which warps share `columns`, and
/// this one's come after `before` vectors.
#[track_caller]
pub(crate) fn exist(b: &mut Builder, dim: u32, columns: Columns, before: Option<Reg<U32>>, n: u32) -> Exist {
    let mut starts = (0..columns.groups).map(|share| share * columns.each + n * VECTOR);
    if starts.clone().all(|start| start + VECTOR <= dim) {
        return Exist::All;
    }
    let lane = b.lane();
    let column = b.let_(((lane & 3) << 1) + n * VECTOR);
    let column = before.map_or(column, |before| b.let_(before * VECTOR + column));
    let low = b.let_(column.lt(dim));
    let parts_a_pair = dim % 2 == 1 && starts.any(|start| (start..start + VECTOR).contains(&dim));
    if parts_a_pair { Exist::Each([low, b.let_(column.lt(dim - 1))]) } else { Exist::Pair(low) }
}

/// This thread's two rows in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WideRows {
    /// Addresses of this thread's first columns.
    pub(crate) to: Rows<U64>,
    /// Whether rows are written.
    pub(crate) there: [Pred; ROWS_PER_THREAD],
    /// Whether rows start at multiples of 8 bytes, so that two columns are moved at once.
    pub(crate) pairs: bool,
}

impl WideRows {
    /// Writes vectors of sums, which end as numbers of the output; `exists` says which vectors there are, if not all.
    #[track_caller]
    pub(crate) fn write<E: Into<Exist>>(
        &self,
        b: &mut Builder,
        ended: &Ended,
        vectors: &[Vector],
        exists: impl Fn(&mut Builder, u32) -> E,
    ) {
        let empty = ended.factor.map(|factor| b.let_(factor.eq(0.0)));
        let kept = ended.kept.map(|kept| kept.map(|kept| (kept, b.let_(kept.ne(0.0)))));
        let each = if kept.is_some() { READ_BATCH } else { BATCH };
        for (batch, vectors) in vectors.chunks(each).enumerate() {
            let first = (batch * each) as u32;
            let who: Vec<_> = (first..)
                .zip(vectors)
                .map(|(n, _)| {
                    let exist = exists(b, n).into();
                    self.there.map(|there| exist.of_row(b, there))
                })
                .collect();
            for ((n, vector), who) in (first..).zip(vectors).zip(&who) {
                for row in 0..ROWS_PER_THREAD {
                    let pair = [vector[2 * row], vector[2 * row + 1]];
                    for value in pair {
                        b.mul_into(value, value, ended.factor[row]);
                        b.select_into(value, empty[row], 0.0, value);
                    }
                    let Some((kept, alive)) = kept.map(|kept| kept[row]) else { continue };
                    let reads = who[row].map(|who| b.let_(who & alive));
                    self.add_old(b, (reads, kept), row, n, pair);
                }
            }
            for ((n, vector), who) in (first..).zip(vectors).zip(&who) {
                for row in 0..ROWS_PER_THREAD {
                    let pair = [vector[2 * row], vector[2 * row + 1]];
                    self.store(b, who[row], row, n, pair);
                }
            }
        }
    }

    /// Brings what rows of `dim` columns hold to L2, long before it is read; the lanes of a quad share a row's lines.
    #[track_caller]
    pub(crate) fn prefetch(&self, b: &mut Builder, lane: Reg<U32>, dim: u32) {
        let lines = (dim * BYTES).div_ceil(LINE);
        let own = b.let_(lane & 3);
        for row in 0..ROWS_PER_THREAD {
            let at = b.let_(self.to[row] + (own * LINE).widen());
            for first in (0..lines).step_by(4) {
                let who = b.let_(self.there[row] & own.lt(lines - first));
                b.predicated(who, |b| b.prefetch_global(Global::from(at).at((first * LINE) as i32)));
            }
        }
    }

    /// Adds what is kept of the old values of a pair, where it is read.
    fn add_old(
        &self,
        b: &mut Builder,
        (reads, kept): (Exist, Reg<F32>),
        row: usize,
        n: u32,
        pair: [Reg<F32>; 2],
    ) {
        let (at, old) = (self.place(row, n), [(); 2].map(|()| b.var_in::<F32>(Scope::Lane, 0.0)));
        self.each_access(b, reads, |b, columns| match columns {
            None => b.load_global_into(old, at),
            Some(n) => b.load_global_into([old[n]], at.at((n as u32 * BYTES) as i32)),
        });
        pair.into_iter().zip(old).for_each(|(value, old)| b.fma_into(value, old, kept, value));
    }

    fn store(&self, b: &mut Builder, writes: Exist, row: usize, n: u32, pair: [Reg<F32>; 2]) {
        let to = self.place(row, n);
        self.each_access(b, writes, |b, column| match column {
            None => b.store_global(to, &pair.map(Val::from)),
            Some(n) => b.store_global(to.at((n as u32 * BYTES) as i32), &[pair[n].into()]),
        });
    }

    /// Moves the columns of a vector that exist: both at once, or one by one.
    fn each_access(&self, b: &mut Builder, exist: Exist, moves: impl Fn(&mut Builder, Option<usize>)) {
        let columns: &[Option<usize>] = if self.pairs { &[None] } else { &[Some(0), Some(1)] };
        match exist {
            Exist::All => columns.iter().for_each(|&column| moves(b, column)),
            Exist::Pair(who) => b.predicated(who, |b| columns.iter().for_each(|&column| moves(b, column))),
            Exist::Each(who) => (0..).zip(who).for_each(|(n, who)| b.predicated(who, |b| moves(b, Some(n)))),
        }
    }

    fn place(&self, row: usize, n: u32) -> Global {
        Global::from(self.to[row]).at((n * VECTOR * BYTES) as i32)
    }
}
