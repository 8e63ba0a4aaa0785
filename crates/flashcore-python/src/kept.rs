//! What a call keeps alive while it is under way.

use crate::{exchange::Exchange, import::Imported, owned::Owned};

/// Tensors of most calls.
const TENSORS: usize = 5;

/// What keeps the tensors of a call alive beside their Python objects, and the framework of the first.
#[derive(Default)]
pub(crate) struct Kept {
    pub(crate) exchange: Option<Exchange>,
    owned: Vec<Owned>,
}

impl Kept {
    pub(crate) fn into_owned(self) -> Vec<Owned> {
        self.owned
    }

    pub(crate) fn keep<T>(&mut self, imported: Imported<T>) -> T {
        self.exchange = self.exchange.or(imported.exchange);
        if let Some(owned) = imported.owned {
            self.owned.reserve(TENSORS);
            self.owned.push(owned);
        }
        imported.array
    }
}
