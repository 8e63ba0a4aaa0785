//! The checkers: their state, and the rules they apply.
//!
//! | file | rule |
//! | --- | --- |
//! | `clock` | who knows what: vector clocks over warps and asynchronous agents |
//! | `awareness` | which lanes of a warp know it |
//! | `race` | conflicting accesses to shared memory, the async proxy, memory in flight |
//! | `global` | conflicting accesses to global memory |
//! | `init` | bytes that were never written |
//!
//! Rules about barriers are next to their state (`mbarrier.rs`, `named.rs`), rules about registers in `regfile.rs`.

pub(crate) mod awareness;
pub(crate) mod clock;
pub(crate) mod global;
pub(crate) mod init;
pub(crate) mod race;
