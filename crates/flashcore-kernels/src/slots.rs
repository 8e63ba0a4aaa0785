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
/// A u32 that persistent kernels count tiles with, or one for each row tile that several CTAs share: zero before and
/// after every launch.
pub const TILE_COUNTER: Slot = Slot(8);
/// i32 page numbers of the keys and values, a row for each sequence, as far apart as the problem says.
pub const TABLE: Slot = Slot(9);
/// Parts of rows whose keys several CTAs share.
pub const PARTS: Slot = Slot(10);
/// Number of slots.
pub const COUNT: usize = 11;

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
