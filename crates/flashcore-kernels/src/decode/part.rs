//! Parts of rows, each over different keys, and how they are merged.
//!
//! A row of a part is a head (reference in powers of two, sum of probabilities, the same with the largest ones rounded)
//! and its values, all f32. A thread merges four columns of a row at a time, always in the order of the keys.

use flashcore_tile::{Builder, F32, Global, Reg, Scope, Shared, U32, U64, Val};

use crate::parts::softmax::UNSEEN_TOP;

/// Columns that a thread merges at once.
pub(super) const COLUMNS: u32 = 4;
/// Bytes of a head, and of so many columns.
const VECTOR_BYTES: u32 = 16;
/// Parts in global memory that are read before any is merged: memory is slow to answer.
const BATCH: u32 = 8;

/// Where rows of parts lie in memory.
pub(super) trait Memory: Copy {
    /// `bytes` further on.
    fn skip(self, bytes: u32) -> Self;
    /// Reads four floats.
    fn read(self, b: &mut Builder) -> [Reg<F32>; 4];
    /// Writes four floats.
    fn write(self, b: &mut Builder, values: &[Val<F32>; 4]);
}

impl Memory for Shared {
    fn skip(self, bytes: u32) -> Self {
        self.at(bytes)
    }

    fn read(self, b: &mut Builder) -> [Reg<F32>; 4] {
        b.load_shared(self)
    }

    fn write(self, b: &mut Builder, values: &[Val<F32>; 4]) {
        b.store_shared(self, values);
    }
}

impl Memory for Global {
    fn skip(self, bytes: u32) -> Self {
        self.at(bytes as i32)
    }

    fn read(self, b: &mut Builder) -> [Reg<F32>; 4] {
        b.load_global(self)
    }

    fn write(self, b: &mut Builder, values: &[Val<F32>; 4]) {
        b.store_global(self, values);
    }
}

/// Where the values of a part's row begin.
pub(super) fn values_at<M: Memory>(row: M) -> M {
    row.skip(VECTOR_BYTES)
}

/// Four columns of a part's row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    top: Reg<F32>,
    sums: [Reg<F32>; 2],
    pub(super) values: [Reg<F32>; 4],
}

impl Share {
    fn of([top, sum, rounded, _]: [Reg<F32>; 4], values: [Reg<F32>; 4]) -> Self {
        Self { top, sums: [sum, rounded], values }
    }

    /// Reads what lies at `row`, its values at `values`.
    pub(super) fn read<M: Memory>(b: &mut Builder, row: M, values: M) -> Self {
        let head = row.read(b);
        Self::of(head, values.read(b))
    }

    /// A row that has seen no key.
    pub(super) fn unseen(b: &mut Builder) -> Self {
        let [sum, rounded, filler] = [(); 3].map(|()| b.var_in(Scope::Lane, 0.0));
        let top = b.var_in(Scope::Lane, UNSEEN_TOP);
        Self::of([top, sum, rounded, filler], [(); 4].map(|()| b.var_in(Scope::Lane, 0.0)))
    }

    fn registers(&self) -> impl Iterator<Item = Reg<F32>> + use<> {
        [self.top].into_iter().chain(self.sums).chain(self.values)
    }

    /// Becomes another, where it is one that has seen no key.
    pub(super) fn set(&self, b: &mut Builder, other: &Self) {
        self.registers().zip(other.registers()).for_each(|(var, value)| b.set(var, value));
    }

    /// Reads a part's row if `number` is less than `count`: else it is one that has seen no key.
    fn read_if(
        b: &mut Builder,
        (number, count): (Reg<U32>, Reg<U32>),
        row: Reg<U64>,
        column: Reg<U64>,
    ) -> Self {
        let (share, filler) = (Self::unseen(b), b.var_in(Scope::Lane, 0.0));
        let values = values_at(Global::from(b.let_(row + column)));
        b.predicated(number.lt(count), |b| {
            b.load_global_into([share.top, share.sums[0], share.sums[1], filler], row);
            b.load_global_into(share.values, values);
        });
        share
    }

    /// Parts of one row as a whole, summed in their order.
    pub(super) fn join(b: &mut Builder, parts: &[Self]) -> Self {
        let top = parts.iter().map(|part| part.top).reduce(|x, y| b.max(x, y)).expect("there is a part");
        let weights: Vec<_> = parts.iter().map(|part| b.exp2(part.top - top)).collect();
        let sum = |b: &mut Builder, of: &dyn Fn(&Self) -> Reg<F32>| {
            let first = b.mul(of(&parts[0]), weights[0]);
            let others = parts.iter().zip(&weights).skip(1);
            others.fold(first, |sum, (part, &weight)| b.fma(of(part), weight, sum))
        };
        let sums = std::array::from_fn(|n| sum(b, &|part| part.sums[n]));
        Self { top, sums, values: std::array::from_fn(|n| sum(b, &|part| part.values[n])) }
    }

    /// Parts `0..count` of a row as a whole, from global memory: the first, and those from the second on, `stride` bytes from
    /// one to the next. Where they are pieces, they are folded one by one, as in all other places where pieces are.
    pub(super) fn join_all(
        b: &mut Builder,
        [first, second]: [Reg<U64>; 2],
        stride: Reg<U64>,
        column: Reg<U64>,
        (count, by_one): (Reg<U32>, bool),
    ) -> Self {
        let one = b.var(1);
        let whole = Self::read_if(b, (one, count), first, column);
        let (at, done) = (b.var_in(Scope::Lane, second), b.var_in(Scope::Lane, 1));
        b.while_(
            |_| done.lt(count),
            |b| {
                let mut parts = vec![whole];
                for n in 0..BATCH {
                    let (number, row) = (b.let_(done + n), b.var(at));
                    parts.push(Self::read_if(b, (number, count), row, column));
                    b.set(at, at + stride);
                }
                let joined = match by_one {
                    true => parts[1..].iter().fold(whole, |whole, part| Self::join(b, &[whole, *part])),
                    false => Self::join(b, &parts),
                };
                whole.set(b, &joined);
                b.add_to(done, BATCH);
            },
        );
        whole
    }

    /// Parts `0..count` of a row, folded one by one, each read from where `message` says its head and its values are.
    pub(super) fn fold_messages(
        b: &mut Builder,
        count: Reg<U32>,
        message: impl Fn(&mut Builder, Reg<U32>) -> (Shared, Shared),
    ) -> Self {
        let (whole, done) = (Self::unseen(b), b.var_in(Scope::Lane, 0));
        let last = b.let_(count - 1);
        b.while_(
            |_| done.lt(count),
            |b| {
                let parts: Vec<_> = (0..BATCH)
                    .map(|n| {
                        let number = b.let_(done + n);
                        let there = b.let_(number.min(last));
                        let (row, values) = message(b, there);
                        let part = Self::read(b, row, values);
                        part.or_unseen(b, number.le(last))
                    })
                    .collect();
                let joined = parts.iter().fold(whole, |whole, part| Self::join(b, &[whole, *part]));
                whole.set(b, &joined);
                b.add_to(done, BATCH);
            },
        );
        whole
    }

    /// The share if it is there, or that of a row that has seen no key.
    fn or_unseen(self, b: &mut Builder, there: flashcore_tile::Cond) -> Self {
        let there = b.let_(there);
        let mut of = |value: Reg<F32>, unseen: f32| b.select(there, value, unseen);
        let top = of(self.top, UNSEEN_TOP);
        Self { top, sums: self.sums.map(|sum| of(sum, 0.0)), values: self.values.map(|value| of(value, 0.0)) }
    }

    /// Writes that no key has been seen.
    pub(super) fn write_unseen<M: Memory>(b: &mut Builder, row: M, values: M) {
        let unseen = Self::unseen(b);
        values.write(b, &unseen.values.map(Val::from));
        row.write(b, &unseen.head().map(Val::from));
    }

    /// Writes the share's values, and its head if it is the row's first.
    pub(super) fn write<M: Memory>(
        &self,
        b: &mut Builder,
        row: M,
        values: M,
        is_first: impl Fn() -> flashcore_tile::Cond,
    ) {
        values.write(b, &self.values.map(Val::from));
        let head = self.head().map(Val::from);
        b.predicated(is_first(), |b| row.write(b, &head));
    }

    /// Its head, padded.
    pub(super) const fn head(&self) -> [Reg<F32>; 4] {
        [self.top, self.sums[0], self.sums[1], self.sums[1]]
    }

    /// What values must be multiplied by, and the row's LSE.
    pub(super) fn close(&self, b: &mut Builder, sink: Option<Reg<F32>>) -> (Reg<F32>, Reg<F32>) {
        crate::parts::softmax::close(b, self.top, self.sums, sink)
    }
}
