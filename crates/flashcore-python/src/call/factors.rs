//! What tensors of 8 bits are multiplied by: how many factors a call brings, and where they lie. Called by `call`.

use flashcore_core::{Factors, Scales};

use super::Call;
use crate::{array::Order, error::CallError, host};

impl Call<'_> {
    /// How many factors each tensor has; all have as many. Those of a cache are its sequences'.
    pub(super) fn scales(
        &self,
        cached: bool,
        batch: usize,
        heads: usize,
    ) -> Result<Option<Scales>, CallError> {
        let needed = if cached { 2 } else { 3 };
        if !self.factors.is_empty() && self.factors.len() != needed {
            return Err(CallError::FactorTensors { given: self.factors.len(), cached });
        }
        let packed = self.lengths[0].filter(|_| batch == 1 && self.arrays[0].rank() == 3);
        let batch = match (cached, self.table, packed) {
            (true, Some(table), _) => table.rows,
            (true, None, Some(offsets)) => offsets.len.saturating_sub(1),
            _ => batch,
        };
        let mut kind = None;
        for factors in &self.factors {
            let own =
                if cached { factors.cache_scales(batch, heads)? } else { factors.scales(batch, heads)? };
            if *kind.get_or_insert(own) != own {
                let (operand, given) = (factors.operand, factors.count());
                return Err(CallError::Factors { operand, given, batch, heads });
            }
        }
        Ok(kind)
    }

    /// The factors of a call whose tensors are on the host.
    pub(super) fn host_factors(&self, order: Order, heads: usize) -> Result<Option<Factors>, CallError> {
        let keys = self.key_order(order)?;
        let heads_kv = self.arrays[1].layout(keys).map_or(heads, |k| k.dims().heads);
        let batch = self.arrays[0].layout(order)?.dims().batch;
        let cached = self.factors.len() == 2;
        let kind = self.scales(cached, batch, heads_kv)?;
        Ok(match (&self.factors[..], kind) {
            ([k, v], Some(kind)) => Some(Factors::of_cache(kind, [k, v].map(host::factors))),
            ([q, k, v], Some(Scales::PerTensor)) => {
                Some(Factors::per_tensor([q, k, v].map(|one| host::factors(one)[0])))
            }
            ([q, k, v], Some(_)) => Some(Factors::per_head([q, k, v].map(host::factors))),
            _ => None,
        })
    }

    /// Where the factors of Q, K and V lie on a GPU; 0 where there are none.
    pub(super) fn factor_addresses(&self) -> [u64; 3] {
        let mut addresses = [0; 3];
        let places = addresses.iter_mut().rev().zip(self.factors.iter().rev());
        places.for_each(|(to, factors)| *to = factors.address as u64);
        addresses
    }
}
