//! A CTA's slice of a tensor, and loading its rows into registers.

use flashcore_tile::{Builder, F32, Pred, Reg, Scope, Shared, U32, U64};

use super::{Arguments, Config};
use crate::parts::{elements::Raw, tensor::TensorArgument};

/// Neighbouring rows of a head.
pub(super) struct Slice {
    /// Its number.
    pub(super) index: Reg<U32>,
    /// Batch entry times heads plus head.
    pub(super) plane: Reg<U32>,
    /// First row of this thread's group.
    pub(super) first: Reg<U32>,
    /// Rows that the batch entry uses.
    pub(super) used: Reg<U32>,
    /// Where the slice ends, used or not.
    pub(super) end: Reg<U32>,
    batch: Reg<U32>,
    head: Reg<U32>,
    /// This thread's first column among those in hand.
    pub(super) column: Reg<U32>,
    pub(super) group: Reg<U32>,
}

impl Slice {
    pub(super) fn of_cta(b: &mut Builder, cfg: &Config, args: &Arguments) -> Self {
        let thread = b.thread();
        let [batch, head, part] = Self::place(b, cfg, args);
        let plane = b.let_(batch * args.heads + head);
        let start = b.let_(part * args.rows);
        let left = b.let_(args.seq - start);
        let group = b.let_(thread / cfg.shape.lanes);
        Self {
            index: b.let_(plane * args.parts + part),
            plane,
            first: b.let_(start + group),
            used: args.used(b, batch),
            end: b.let_(start + left.min(args.rows)),
            batch,
            head,
            column: b.let_((thread % cfg.shape.lanes) * cfg.shape.width),
            group,
        }
    }

    /// The batch entry, the head and the part of it that this CTA has.
    fn place(b: &mut Builder, cfg: &Config, args: &Arguments) -> [Reg<U32>; 3] {
        let (cta, ctas) = (b.cta(), b.ctas());
        let turn = if cfg.follows() { b.let_(ctas - cta - 1) } else { cta };
        let [inner, outer] = if cfg.by_token { [args.heads, args.parts] } else { [args.parts, args.heads] };
        let (rest, first) = (b.let_(turn / inner), b.let_(turn % inner));
        let (batch, second) = (b.let_(rest / outer), b.let_(rest % outer));
        if cfg.by_token { [batch, first, second] } else { [batch, second, first] }
    }

    /// Builds `body` for every step of columns, with the first of this thread's; threads stay together.
    pub(super) fn each_step(
        &self,
        b: &mut Builder,
        cfg: &Config,
        args: &Arguments,
        body: impl FnOnce(&mut Builder, Reg<U32>, Reg<U32>),
    ) {
        let base = b.var(0);
        b.while_(
            |_| base.lt(args.dim),
            |b| {
                let column = b.let_(base + self.column);
                body(b, base, column);
                b.add_to(base, cfg.shape.columns());
            },
        );
    }

    /// This thread's columns in the first row of its group.
    pub(super) fn start(
        &self,
        b: &mut Builder,
        cfg: &Config,
        tensor: &TensorArgument,
        column: Reg<U32>,
        bytes: usize,
    ) -> Lines {
        let row = tensor.at(b, self.batch, self.head, self.first);
        let at = b.let_(row + column.mul_wide(bytes as u32));
        let groups = b.var(cfg.shape.groups());
        Lines { at: b.var_in(Scope::Lane, at), step: b.let_(groups.widen() * tensor.row) }
    }
}

/// A thread's columns in its rows of a tensor.
#[derive(Clone, Copy)]
pub(super) struct Lines {
    /// Its address in the next row.
    at: Reg<U64>,
    /// Bytes from there to the row after.
    step: Reg<U64>,
}

impl Lines {
    /// The addresses in the next `count` rows, which are passed.
    pub(super) fn next(self, b: &mut Builder, count: u32) -> Vec<Reg<U64>> {
        let pass = |b: &mut Builder| {
            let at = b.var_in(Scope::Lane, self.at);
            b.add_to(self.at, self.step);
            at
        };
        (0..count).map(|_| pass(b)).collect()
    }
}

/// A thread's columns of one row.
pub(super) struct Line {
    raw: Raw,
    /// Whether the row was read.
    pub(super) there: Pred,
}

impl Line {
    /// Asks for the next `count` rows from `row` on, those up to `end`.
    pub(super) fn ask(
        b: &mut Builder,
        cfg: &Config,
        from: Lines,
        (row, end): (Reg<U32>, Reg<U32>),
        count: u32,
    ) -> Vec<Self> {
        let addresses = from.next(b, count);
        let ask = |(n, at): (u32, Reg<U64>)| {
            let there = b.let_((row + n * cfg.shape.groups()).lt(end));
            Self { raw: Raw::load_if(b, cfg.from, cfg.shape.width, at, there), there }
        };
        (0..).zip(addresses).map(ask).collect()
    }

    /// Leaves the row in shared memory.
    pub(super) fn put_down(&self, b: &mut Builder, at: Shared) {
        self.raw.put_down(b, at);
    }

    /// The row as it lies in shared memory.
    pub(super) fn taken_up(&self, b: &mut Builder, at: Shared) -> Self {
        Self { raw: self.raw.taken_up(b, at), there: self.there }
    }

    /// The numbers, less their means.
    pub(super) fn values(&self, b: &mut Builder, means: Option<&[Reg<F32>]>) -> Vec<Reg<F32>> {
        let values = self.raw.values(b);
        match means {
            None => values,
            Some(means) => values.into_iter().zip(means).map(|(value, &mean)| b.let_(value - mean)).collect(),
        }
    }
}
