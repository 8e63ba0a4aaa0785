//! What tensors of 8 bits are multiplied by: how many factors a call brings, and where they lie. Called by `call`.

use flashcore_core::{Dims, Factors, ProblemError, Scales};

use super::Call;
use crate::{
    array::{Array, Order},
    error::CallError,
    factors, host,
};

impl Call<'_> {
    /// How many factors each tensor has; all have as many.
    pub(super) fn scales(&self, cached: bool, dims: [Dims; 3]) -> Result<Option<Scales>, CallError> {
        match (&self.factors[..], cached) {
            ([], _) => Ok(None),
            _ if self.arrays[..3].iter().all(|array| !array.dtype.is_narrow()) => {
                Err(ProblemError::ScaledDType { dtype: self.arrays[1].dtype }.into())
            }
            ([k, v], true) => self.cache_scales([k, v], dims[0].batch, dims[1].heads).map(Some),
            (&[q, k, v], false) => factors::scales(&[q, k, v], self.blocks, dims).map(Some),
            (all, _) => Err(CallError::FactorTensors { given: all.len(), cached }),
        }
    }

    /// How those of a cache lie, which are its sequences': alike for keys and values.
    fn cache_scales(&self, kv: [&Array; 2], batch: usize, heads: usize) -> Result<Scales, CallError> {
        let packed = self.lengths[0].filter(|_| batch == 1 && self.arrays[0].rank() == 3);
        let batch = match (self.table, packed) {
            (Some(table), _) => table.rows,
            (None, Some(offsets)) => offsets.len.saturating_sub(1),
            _ => batch,
        };
        let [k, v] = kv.map(|factors| factors.cache_scales(batch, heads));
        let (k, v) = (k?, v?);
        if k != v {
            let (operand, given) = (kv[1].operand, kv[1].count());
            return Err(CallError::Factors { operand, given, batch, heads });
        }
        Ok(k)
    }

    /// The factors of a call whose tensors are on the host.
    pub(super) fn host_factors(&self, order: Order) -> Result<Option<Factors>, CallError> {
        match self.factors[..] {
            [k, v] => {
                let heads = self.arrays[1].layout(self.key_order(order)?)?.dims().heads;
                let batch = self.arrays[0].layout(order)?.dims().batch;
                let kind = self.cache_scales([&k, &v], batch, heads)?;
                Ok(Some(Factors::of_cache(kind, [&k, &v].map(host::cache_factors))))
            }
            [q, k, v] => Ok(Some(host::factors(&[q, k, v], self.blocks))),
            _ => Ok(None),
        }
    }

    /// Where the factors of Q, K and V lie on a GPU; 0 where there are none.
    pub(super) fn factor_addresses(&self) -> [u64; 3] {
        let mut addresses = [0; 3];
        let places = addresses.iter_mut().rev().zip(self.factors.iter().rev());
        places.for_each(|(to, factors)| *to = factors.address as u64);
        addresses
    }
}
