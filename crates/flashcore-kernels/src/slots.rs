//! Which buffer each slot of a launch names; whoever executes a launch binds them.

pub use flashcore_ptx::launch::Slot;

/// Queries, in the problem's layout and element type.
pub const Q: Slot = Slot(0);
/// Keys.
pub const K: Slot = Slot(1);
/// Values.
pub const V: Slot = Slot(2);
/// The result.
pub const OUT: Slot = Slot(3);
/// f32 log-sum-exp per row, dense batch × heads × sequence; null (address 0) if unwanted.
pub const LSE: Slot = Slot(4);
/// Sinks, one per query head, in their own type.
pub const SINKS: Slot = Slot(5);
/// Used lengths (one per batch entry) or offsets (one more than sequences) of the queries.
pub const LENGTHS_Q: Slot = Slot(6);
/// Used lengths or offsets of keys and values.
pub const LENGTHS_KV: Slot = Slot(7);
/// A u32 that persistent kernels count tiles with, or one for each row tile that several CTAs share: zero before and
/// after every launch.
pub const TILE_COUNTER: Slot = Slot(8);
/// i32 page numbers of the keys and values, a row for each sequence, as far apart as the problem says.
pub const TABLE: Slot = Slot(9);
/// Parts of rows whose keys several CTAs share.
pub const PARTS: Slot = Slot(10);
/// f32 factors of the queries, where 8-bit tensors have them.
pub const FACTORS_Q: Slot = Slot(11);
/// f32 factors of the keys.
pub const FACTORS_K: Slot = Slot(12);
/// f32 factors of the values.
pub const FACTORS_V: Slot = Slot(13);
/// Workspace: values of 8 bits with the keys of a feature next to each other, see [`crate::turn_values`].
pub const TURNED: Slot = Slot(14);
/// What is added to scores: pairs in the problem's layout and type, or f32 slopes. The number is one that gradients do
/// not use otherwise.
pub const BIAS: Slot = Slot(16);
/// One u64 that decides which weights are dropped; the number, again, is none of the gradients' own.
pub const SEED: Slot = Slot(19);
/// Number of slots.
pub const COUNT: usize = 20;

/// The slots of gradients; some are forward's, so that lengths, sinks, biases and seeds are read alike.
pub mod backward {
    use flashcore_ptx::launch::Slot;

    pub use super::{BIAS, K, LENGTHS_KV, LENGTHS_Q, LSE, OUT, Q, SEED, SINKS, TILE_COUNTER, V};

    /// The gradient of the result.
    pub const D_OUT: Slot = Slot(9);
    /// The gradient of the queries.
    pub const DQ: Slot = Slot(10);
    /// The gradient of the keys.
    pub const DK: Slot = Slot(11);
    /// The gradient of the values.
    pub const DV: Slot = Slot(12);
    /// f32 sums of the result times its gradient per row, dense, where the caller gives them.
    pub const ROW_SUMS: Slot = Slot(13);
    /// f32 gradient of each head's sink; null (address 0) if unwanted.
    pub const D_SINKS: Slot = Slot(14);
    /// Workspace: what kernels need to know about each row, see [`crate::backward_rows`].
    pub const ROW_TERMS: Slot = Slot(15);
    /// Workspace: f32 sums of dQ, see [`crate::backward_sums`]; zero before and after every call.
    pub const DQ_SUMS: Slot = Slot(17);
    /// Workspace: how far each tile of keys has come; zero before and after every call.
    pub const TURNS: Slot = Slot(18);
    /// Number of slots.
    pub const COUNT: usize = 20;
}

/// The slots of a merge.
pub mod merge {
    use flashcore_core::MAX_LISTED;
    use flashcore_ptx::launch::Slot;

    /// The result.
    pub const OUT: Slot = Slot(0);
    /// f32 log-sum-exp of the result, dense; null (address 0) if unwanted.
    pub const LSE: Slot = Slot(1);
    /// Number of slots.
    pub const COUNT: usize = 2 + 2 * MAX_LISTED;

    /// Part `n`; the first is that of all parts where they are stacked.
    pub const fn part(n: u8) -> Slot {
        Slot(2 + 2 * n)
    }

    /// f32 log-sum-exp of part `n`, dense.
    pub const fn part_lse(n: u8) -> Slot {
        Slot(3 + 2 * n)
    }
}

/// The slots of new rows of a cache.
pub mod append {
    use flashcore_ptx::launch::Slot;

    /// New keys.
    pub const K: Slot = Slot(0);
    /// New values.
    pub const V: Slot = Slot(1);
    /// The cache of keys.
    pub const CACHE_K: Slot = Slot(2);
    /// The cache of values.
    pub const CACHE_V: Slot = Slot(3);
    /// Keys that each sequence has.
    pub const LENGTHS: Slot = Slot(4);
    /// i64 slots of the new rows.
    pub const SLOTS: Slot = Slot(5);
    /// i32 page numbers, a row for each sequence.
    pub const TABLE: Slot = Slot(6);
    /// Cosines, dense positions × pairs.
    pub const COS: Slot = Slot(7);
    /// Sines.
    pub const SIN: Slot = Slot(8);
    /// Queries.
    pub const Q: Slot = Slot(9);
    /// Rotated queries.
    pub const OUT: Slot = Slot(10);
    /// f32 factors that keys are divided by, where the cache has 8 bits.
    pub const FACTORS_K: Slot = Slot(11);
    /// Likewise, values.
    pub const FACTORS_V: Slot = Slot(12);
    /// Number of slots.
    pub const COUNT: usize = 13;
}

/// The slots of grouped products.
pub mod grouped {
    use flashcore_ptx::launch::Slot;

    /// The left factor.
    pub const A: Slot = Slot(0);
    /// The right factor.
    pub const B: Slot = Slot(1);
    /// The result.
    pub const OUT: Slot = Slot(2);
    /// The i32 end of each group.
    pub const OFFSETS: Slot = Slot(3);
    /// Number of slots that a caller binds.
    pub const COUNT: usize = 4;

    /// What each group or tile has: made by one kernel for the other.
    pub const INDEX: Slot = Slot(4);
}

/// The slots of a tensor that is rounded to 8 bits.
pub mod quantise {
    use flashcore_ptx::launch::Slot;

    /// The numbers.
    pub const X: Slot = Slot(0);
    /// The tensor of 8-bit floats.
    pub const OUT: Slot = Slot(1);
    /// f32 factors, dense.
    pub const FACTORS: Slot = Slot(2);
    /// f32 means, dense batch × heads × dim, where they are subtracted.
    pub const MEANS: Slot = Slot(3);
    /// Rows that batch entries use, where not all do.
    pub const LENGTHS: Slot = Slot(4);
    /// Number of slots that a caller binds.
    pub const COUNT: usize = 5;

    /// Workspace: sums of slices.
    pub const SUMS: Slot = Slot(5);
    /// Workspace: largest magnitudes of slices.
    pub const LARGEST: Slot = Slot(6);
    /// Workspace: how many slices of each share are done, all zeros between launches.
    pub const DONE: Slot = Slot(7);
}

/// The slots of a mixture of experts.
pub mod moe {
    use flashcore_ptx::launch::Slot;

    /// Tokens, in the problem's layout and element type.
    pub const X: Slot = Slot(0);
    /// Matrices of the first product.
    pub const GATE_UP: Slot = Slot(1);
    /// Matrices of the second product.
    pub const DOWN: Slot = Slot(2);
    /// The result.
    pub const OUT: Slot = Slot(3);
    /// Experts of each token.
    pub const IDS: Slot = Slot(4);
    /// The weight of each.
    pub const WEIGHTS: Slot = Slot(5);
    /// What experts are chosen by.
    pub const LOGITS: Slot = Slot(6);
    /// f32, one per expert of the layer, added for the choice.
    pub const ROUTING_BIAS: Slot = Slot(7);
    /// Biases of the first product.
    pub const GATE_UP_BIAS: Slot = Slot(8);
    /// Biases of the second product.
    pub const DOWN_BIAS: Slot = Slot(9);
    /// Matrices of the shared expert's products.
    pub const SHARED_GATE_UP: Slot = Slot(10);
    /// Likewise, of the second.
    pub const SHARED_DOWN: Slot = Slot(11);
    /// Number of slots that a caller binds.
    pub const COUNT: usize = 12;

    /// Which rows belong to which expert and token: made by one kernel for the others.
    pub const INDEX: Slot = Slot(12);
    /// Features between the products, in the tensors' type.
    pub const JOINED: Slot = Slot(13);
    /// Results of experts, in the tensors' type.
    pub const RESULTS: Slot = Slot(14);
    /// Experts of each token as 32-bit integers, where they are computed.
    pub const CHOSEN: Slot = Slot(15);
    /// f32 weights, likewise.
    pub const CHOSEN_WEIGHTS: Slot = Slot(16);
    /// Features between the products of the shared expert.
    pub const SHARED_JOINED: Slot = Slot(17);
    /// Its results.
    pub const SHARED_RESULTS: Slot = Slot(18);
}
