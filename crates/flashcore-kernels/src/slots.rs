//! Which buffer each slot of a launch names; whoever executes a launch binds them.

use flashcore_ptx::launch::Slot;

/// Queries, in the problem's layout and element type.
pub const Q: Slot = Slot(0);
/// Keys.
pub const K: Slot = Slot(1);
/// Values.
pub const V: Slot = Slot(2);
/// The result.
pub const OUT: Slot = Slot(3);
/// f32 log-sum-exp per row, dense batch × heads × sequence; null (address 0) where nobody wants it.
pub const LSE: Slot = Slot(4);
/// Sinks, one per query head, in a type of their own.
pub const SINKS: Slot = Slot(5);
/// Used lengths (one per batch entry) or offsets (one more than sequences) of the queries.
pub const LENGTHS_Q: Slot = Slot(6);
/// Used lengths or offsets of keys and values.
pub const LENGTHS_KV: Slot = Slot(7);
/// A u32 that persistent kernels count tiles with: zero before and after every launch.
pub const TILE_COUNTER: Slot = Slot(8);
/// Number of slots.
pub const COUNT: usize = 9;

/// The slots of a merge.
pub mod merge {
    use flashcore_core::MAX_LISTED;
    use flashcore_ptx::launch::Slot;

    /// The result.
    pub const OUT: Slot = Slot(0);
    /// f32 log-sum-exp of the result, dense; null (address 0) where nobody wants it.
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
    /// What each of them counts for.
    pub const WEIGHTS: Slot = Slot(5);
    /// What experts are chosen by.
    pub const LOGITS: Slot = Slot(6);
    /// f32, one per expert of the layer, added for the choice.
    pub const ROUTING_BIAS: Slot = Slot(7);
    /// Biases of the first product.
    pub const GATE_UP_BIAS: Slot = Slot(8);
    /// Biases of the second product.
    pub const DOWN_BIAS: Slot = Slot(9);
    /// Number of slots that a caller binds.
    pub const COUNT: usize = 10;

    /// Which rows belong to which expert and token: made by one kernel for the others.
    pub const INDEX: Slot = Slot(10);
    /// Features between the products, in the tensors' type.
    pub const JOINED: Slot = Slot(11);
    /// Results of experts, in the tensors' type.
    pub const RESULTS: Slot = Slot(12);
    /// Experts of each token as 32-bit integers, where they are computed.
    pub const CHOSEN: Slot = Slot(13);
    /// f32 weights, likewise.
    pub const CHOSEN_WEIGHTS: Slot = Slot(14);
}
