//! Lengths, pages, sinks, factors, bias and seed of a call: what a plan has to know of them, or their values.

use flashcore::{Lengths, Sequences, Spec, Values};
use flashcore_core::Pages;

use super::Call;
use crate::{
    array::{Numbers, Order},
    error::CallError,
    host,
};

impl Call<'_> {
    /// What a plan has to know of numbers that stay on the device.
    pub(super) fn with_kinds(&self, spec: Spec, order: Order) -> Result<Spec, CallError> {
        let [q, kv] = self.lengths;
        let batch = spec.q.dims().batch;
        for numbers in self.lengths.iter().flatten().filter(|_| order != Order::Packed) {
            numbers.check_count(batch, "one for each batch entry")?;
        }
        // Bounds are rounded, so that batches with slightly other ones share a plan.
        let (longest_q, longest_kv) = self.longest.unwrap_or((usize::MAX >> 1, usize::MAX >> 1));
        let [longest_q, longest_kv] = [longest_q, longest_kv].map(usize::next_power_of_two);
        let sequences = match (order, q, kv) {
            (Order::Packed, Some(q), Some(kv)) => {
                if q.len == 0 {
                    q.check_count(1, "one more than there are sequences")?;
                }
                let count = q.len - 1;
                if self.table.is_some() {
                    kv.check_count(count, "one for each sequence")?;
                    Sequences::PackedQueries { count, longest_q }
                } else {
                    kv.check_count(q.len, "as many as offsets of q")?;
                    Sequences::Ragged { count, longest_q, longest_kv }
                }
            }
            (Order::Packed, ..) => return Err(CallError::Offsets),
            (_, None, None) => Sequences::Uniform,
            (_, q, kv) => Sequences::Used { q: q.is_some(), kv: kv.is_some() },
        };
        let index = match (q, kv) {
            (Some(q), Some(kv)) if q.index != kv.index => {
                let (other, first) = (kv.index.bytes(), q.index.bytes());
                return Err(CallError::Widths { operand: kv.operand, other, first });
            }
            (Some(one), _) | (None, Some(one)) => one.index,
            (None, None) => spec.index,
        };
        let sequence_count = match sequences {
            Sequences::PackedQueries { count, .. } => count,
            _ => batch,
        };
        let pages = self.pages(sequence_count)?.map(|pages| Pages { longest_kv: Some(longest_kv), ..pages });
        Ok(Spec { sequences, index, pages, ..spec })
    }

    /// What a plan has to know of the page table, which has a row for each sequence.
    fn pages(&self, sequences: usize) -> Result<Option<Pages>, CallError> {
        let Some(table) = self.table else { return Ok(None) };
        if table.rows != sequences {
            return Err(CallError::TableRows { given: table.rows, needed: sequences });
        }
        Ok(Some(Pages { row_stride: table.row_stride, ..Pages::new(table.columns) }))
    }

    /// The numbers of a call whose tensors are on the host.
    pub(super) fn host_values(&self, order: Order, heads: usize) -> Result<Values, CallError> {
        let read = |numbers: Option<Numbers>| numbers.map(|numbers| host::lengths(&numbers)).transpose();
        let keys = match self.table {
            Some(_) => self.lengths[1].map(|numbers| host::page_lengths(&numbers)).transpose()?,
            None => read(self.lengths[1])?,
        };
        let lengths = match (order, read(self.lengths[0])?, keys) {
            (Order::Packed, Some(q), Some(kv)) if self.table.is_some() => Lengths::packed_queries(q, kv),
            (Order::Packed, Some(q), Some(kv)) => Lengths::ragged(q, kv),
            (Order::Packed, ..) => return Err(CallError::Offsets),
            (_, None, None) => Lengths::Uniform,
            (_, q, kv) => Lengths::Used { q, kv },
        };
        let sinks = self.sinks.map(|sinks| host::sinks(&sinks, heads)).transpose()?;
        let factors = self.host_factors(order)?;
        let bias = self.bias.map(|bias| host::bias(&bias)).transpose()?;
        let seed = self.seed.map(|seed| host::seed(&seed));
        Ok(Values { lengths, sinks, factors, bias, seed, table: self.table.as_ref().map(host::table) })
    }
}
