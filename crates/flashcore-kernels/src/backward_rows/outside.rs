//! Rows of packed tensors before the first and behind the last sequence: their gradients are 0, and nobody else writes them.
//!
//! That there are such rows only the device knows. Whoever writes the terms of a row looks whether it is one of them.

use flashcore_core::{BackwardProblem, DType, Layout};
use flashcore_tile::{Builder, Params, Reg, Scope, U32};

use super::{Config, TermsArgument};
use crate::{
    backward_sm90::Ending,
    parts::{
        elements::store,
        lengths::{LengthArguments, LengthsKind},
        tensor::TensorArgument,
    },
    slots::{Slot, backward as slots},
};

/// What is needed to clear these rows, as registers.
#[derive(Debug)]
pub(super) struct Outside {
    /// What gradients are made of.
    element: DType,
    lengths: LengthArguments,
    sequences: Reg<U32>,
    /// dQ, dK and dV.
    gradients: [Gradient; 3],
}

/// A gradient.
#[derive(Debug)]
struct Gradient {
    tensor: TensorArgument,
    heads: Reg<U32>,
    dim: Reg<U32>,
}

impl Outside {
    /// Declares what a kernel of gradients that are not added to needs, where sequences are packed.
    pub(super) fn declare(
        b: &mut Builder,
        params: &mut Params<BackwardProblem>,
        cfg: &Config,
        seq_q: Reg<U32>,
    ) -> Option<Self> {
        let element = match cfg.packed? {
            Ending::Rounded => cfg.element,
            Ending::Wide => DType::F32,
            // Rows that are not used are left alone.
            Ending::Added => return None,
        };
        let seq_kv = params.u32(b, "seq_kv", |p| p.forward().seq_kv() as u32);
        type Of = fn(&BackwardProblem) -> &Layout;
        let all: [(&str, Slot, Of); 3] =
            [("dq", slots::DQ, |p| p.dq()), ("dk", slots::DK, |p| p.dk()), ("dv", slots::DV, |p| p.dv())];
        Some(Self {
            element,
            lengths: LengthArguments::declare(b, params, LengthsKind::Ragged, [seq_q, seq_kv]),
            sequences: params.u32(b, "sequences", |p| p.forward().sequences() as u32),
            gradients: all.map(|(name, slot, of)| Gradient {
                tensor: TensorArgument::declare_by(b, params, name, slot, move |p| (of(p), p.grad_dtype())),
                heads: params.u32(b, &format!("{name}_heads"), move |p| of(p).dims().heads as u32),
                dim: params.u32(b, &format!("{name}_dim"), move |p| of(p).dims().dim as u32),
            }),
        })
    }

    /// Clears what the `lanes` lanes that have row `row` of the terms have to clear, of which this is one.
    pub(super) fn clear(
        &self,
        b: &mut Builder,
        terms: &TermsArgument,
        row: Reg<U32>,
        (lane, lanes): (Reg<U32>, u32),
    ) {
        let (head, first) = (b.let_(row / terms.stride()), b.let_(row % terms.stride()));
        let [of_queries, of_keys] = self.lengths.ends(b, self.sequences);
        let (queries, keys) = (self.lengths.seq_q, self.lengths.seq_kv);
        let sides = [(of_queries, queries), (of_keys, keys), (of_keys, keys)];
        for (gradient, ([start, end], rows)) in self.gradients.iter().zip(sides) {
            // There may be more keys than queries.
            let row = b.var_in(Scope::Lane, first);
            let there = b.let_(head.lt(gradient.heads));
            b.while_(
                |_| row.lt(rows) & there,
                |b| {
                    let outside = b.let_(row.lt(start) | row.ge(end));
                    b.if_(outside, |b| self.clear_row(b, gradient, [head, row], (lane, lanes)));
                    b.add_to(row, terms.stride());
                },
            );
        }
    }

    fn clear_row(
        &self,
        b: &mut Builder,
        gradient: &Gradient,
        [head, row]: [Reg<U32>; 2],
        (lane, lanes): (Reg<U32>, u32),
    ) {
        let (only, zero) = (b.var(0), b.var(0.0));
        let start = gradient.tensor.at(b, only, head, row);
        let column = b.var_in(Scope::Lane, lane);
        b.while_(
            |_| column.lt(gradient.dim),
            |b| {
                let at = b.let_(start + column.mul_wide(self.element.bytes() as u32));
                store(b, self.element, at, &[zero]);
                b.add_to(column, lanes);
            },
        );
    }
}
