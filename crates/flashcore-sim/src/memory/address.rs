//! Addresses: the windows of the generic address space, and the CTA's rank in shared addresses.

use crate::program::Space;

/// Size of each window of the generic address space.
pub(crate) const WINDOW_BYTES: u64 = 1 << 32;
/// Shared memory of the cluster.
pub(crate) const SHARED_WINDOW: u64 = 0x1000_0000_0000;
/// Local memory of the thread.
pub(crate) const LOCAL_WINDOW: u64 = 0x1100_0000_0000;
/// Kernel parameters.
pub(crate) const PARAM_WINDOW: u64 = 0x1200_0000_0000;
/// Constant memory.
pub(crate) const CONST_WINDOW: u64 = 0x1300_0000_0000;

/// A CTA's rank sits above the offset in a shared address, as on sm_90.
const RANK_SHIFT: u32 = 24;

/// Where an address leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    Global(u64),
    Shared { rank: u32, offset: u32 },
    Local(u64),
    Param(u64),
    Const(u64),
}

/// The shared address of `offset` in the CTA of that rank.
pub(crate) const fn rank_address(rank: u32, offset: u32) -> u32 {
    rank << RANK_SHIFT | offset
}

/// The offset of a shared address.
pub(crate) const fn shared_offset(address: u32) -> u32 {
    address & ((1 << RANK_SHIFT) - 1)
}

/// The rank of a shared address.
pub(crate) const fn shared_rank(address: u32) -> u32 {
    address >> RANK_SHIFT
}

/// Where `address` leads, taken as an address of `space`.
pub(crate) fn resolve(space: Space, address: u64) -> Place {
    match space {
        Space::Global => Place::Global(address),
        Space::SharedCta | Space::SharedCluster => shared(address),
        Space::Local => Place::Local(address),
        Space::Param => Place::Param(address),
        Space::Const => Place::Const(address),
        Space::Generic => match address & !(WINDOW_BYTES - 1) {
            SHARED_WINDOW => shared(address - SHARED_WINDOW),
            LOCAL_WINDOW => Place::Local(address - LOCAL_WINDOW),
            PARAM_WINDOW => Place::Param(address - PARAM_WINDOW),
            CONST_WINDOW => Place::Const(address - CONST_WINDOW),
            _ => Place::Global(address),
        },
    }
}

fn shared(address: u64) -> Place {
    // a generic or 64-bit address of shared memory may still carry its window
    let address = address as u32;
    Place::Shared { rank: shared_rank(address), offset: shared_offset(address) }
}
