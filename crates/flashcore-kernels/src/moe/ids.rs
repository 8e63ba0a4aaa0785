//! Expert ids, as registers: whatever a caller bound, only experts whose weights are present come out.

use flashcore_core::Index;
use flashcore_tile::{Builder, Params, Pred, Reg, Scope, U32, U64};

use super::{IdSource, Layer, NONE};
use crate::slots::moe as slots;

/// The experts of each token.
#[derive(Clone, Copy, Debug)]
pub(super) struct IdArgument {
    base: Reg<U64>,
    source: IdSource,
    /// The first expert here, and how many there are.
    first: Reg<U32>,
    pub(super) experts: Reg<U32>,
    fresh: bool,
}

impl IdArgument {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Layer>, source: IdSource) -> Self {
        let slot = if source == IdSource::Chosen { slots::CHOSEN } else { slots::IDS };
        Self {
            base: params.buffer(b, "ids", slot),
            source,
            first: params.u32(b, "first_expert", |layer| layer.problem.shard().first as u32),
            experts: params.u32(b, "experts", |layer| layer.problem.experts() as u32),
            fresh: false,
        }
    }

    /// The same, read before the kernel waits for its predecessor.
    pub(super) const fn read_early(self) -> Self {
        Self { fresh: true, ..self }
    }

    /// The expert of an entry, counted among those here; [`NONE`] where it is elsewhere or `there` does not hold.
    #[track_caller]
    pub(super) fn local(&self, b: &mut Builder, entry: Reg<U32>, there: Option<Pred>) -> Reg<U32> {
        let wide = self.source == IdSource::Given(Index::I64);
        let at = b.let_(self.base + entry.mul_wide(if wide { 8 } else { 4 }));
        let scope = if there.is_some() { Scope::Lane } else { entry.scope() };
        let low = b.var_in(scope, NONE);
        let high = b.var_in::<U32>(scope, 0);
        let read = |b: &mut Builder| match (wide, self.fresh) {
            (true, false) => b.load_global_into([low, high], at),
            (true, true) => b.load_global_fresh_into([low, high], at),
            (false, false) => b.load_global_into([low], at),
            (false, true) => b.load_global_fresh_into([low], at),
        };
        match there {
            Some(there) => b.predicated(there, read),
            None => read(b),
        }
        // A negative number is a large one here, and so is one below the first.
        let local = b.let_(low - self.first);
        let here = b.let_(local.lt(self.experts) & high.eq(0));
        b.select(here, local, NONE)
    }
}
