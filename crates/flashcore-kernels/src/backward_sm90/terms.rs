//! The terms of rows, `−lse` in powers of two and minus the row sum, in the layout of an accumulator's threads.
//!
//! If rows of the problem are rows of the accumulator, a thread has two of them for a whole tile. If they are its
//! columns, a thread reads the terms of its columns for every streamed tile.

use flashcore_tile::{Builder, F32, ROWS_PER_THREAD, Reg, Scope, Shared};

use super::{Side, TERM_BYTES, consumer::Consumer, schedule::Tile};

/// Values of an accumulator that belong to one matrix of 8 columns: two columns of both of a thread's rows.
pub(super) const QUAD: usize = 2 * ROWS_PER_THREAD;
/// Columns of such a matrix.
const QUAD_COLS: u32 = 8;

/// Which term of a row.
#[derive(Clone, Copy)]
pub(super) enum Term {
    MinusLse,
    MinusSum,
}

/// The terms of an accumulator's values.
#[derive(Clone, Copy, Debug)]
pub(super) enum Terms {
    /// Both terms of this thread's two rows.
    Rows([[Reg<F32>; 2]; ROWS_PER_THREAD]),
    /// Where those of its columns lie. They are read when they are needed: kept, they would take too many registers.
    Columns(Shared),
}

impl Terms {
    /// One of the terms for each value of quad number `quad`.
    pub(super) fn of_quad(&self, b: &mut Builder, term: Term, quad: usize) -> [Reg<F32>; QUAD] {
        match self {
            Self::Rows([upper, lower]) => {
                let [upper, lower] = [upper, lower].map(|row| row[term as usize]);
                [upper, upper, lower, lower]
            }
            Self::Columns(first) => {
                // Those of two neighbours in one load: half of it is for another time, but it is one and not two.
                let both = b.load_shared::<F32, 4>(first.at(quad as u32 * QUAD_COLS * TERM_BYTES));
                let [left, right] = [both[term as usize], both[2 + term as usize]];
                [left, right, left, right]
            }
        }
    }
}

impl Consumer<'_> {
    /// The terms that serve a whole tile, if there are such: those of held rows. Rows that are not used have no
    /// probabilities.
    pub(super) fn held_terms(&self, b: &mut Builder, tile: &Tile) -> Option<Terms> {
        if self.cfg.side == Side::Keys {
            return None;
        }
        let rows = self.thread_rows(b, tile);
        Some(Terms::Rows(rows.map(|row| {
            let place = tile.held_place(b, self.cfg, row);
            let at = self.args.terms.at(b, tile.batch, tile.head, place);
            let terms = [f32::NEG_INFINITY, 0.0].map(|none| b.var_in::<F32>(Scope::Lane, none));
            b.predicated(row.lt(tile.q_len), |b| b.load_global_into(terms, at));
            terms
        })))
    }

    /// The terms of the current streamed tile's rows, which have arrived.
    pub(super) fn streamed_terms(&self, b: &mut Builder) -> Option<Terms> {
        let terms = self.layout.terms?;
        let number = self.streamed_number(b, self.count);
        let slot = self.layout.streamed[0].slot(b, number);
        let first = b.let_((self.lane & 3) * (2 * TERM_BYTES));
        Some(Terms::Columns(terms.at(b, slot).plus(b, first)))
    }
}
