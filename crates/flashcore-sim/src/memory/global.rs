//! Global memory: allocations far apart, so that an overrun of one never hits another.

use crate::check::{global::GlobalShadow, init::Written};
use std::ops::Range;

const BASE: u64 = 0x7000_0000_0000;
const STRIDE_BITS: u32 = 36;
/// Where the module's own variables lie.
pub(crate) const MODULE_GLOBALS: u64 = BASE + (255 << STRIDE_BITS);

/// One allocation.
#[derive(Debug)]
pub(crate) struct Allocation {
    /// What the host calls it, for reports.
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
    pub(crate) written: Written,
    pub(crate) shadow: GlobalShadow,
}

/// The allocations of a launch.
#[derive(Default, Debug)]
pub(crate) struct GlobalMemory {
    allocations: Vec<Option<Allocation>>,
}

impl GlobalMemory {
    /// Places an allocation; returns its address.
    pub(crate) fn insert(&mut self, index: u8, name: String, bytes: Vec<u8>, initialised: bool) -> u64 {
        let at = usize::from(index);
        if self.allocations.len() <= at {
            self.allocations.resize_with(at + 1, || None);
        }
        let written = Written::new(bytes.len(), initialised);
        self.allocations[at] = Some(Allocation { name, bytes, written, shadow: GlobalShadow::default() });
        BASE + (u64::from(index) << STRIDE_BITS)
    }

    /// The address of an allocation, if it is there.
    pub(crate) fn address(&self, index: u8) -> Option<u64> {
        self.allocations.get(usize::from(index))?.as_ref()?;
        Some(BASE + (u64::from(index) << STRIDE_BITS))
    }

    /// Bytes of all allocations.
    pub(crate) fn bytes(&self) -> usize {
        self.allocations.iter().flatten().map(|allocation| allocation.bytes.len()).sum()
    }

    /// The same memory for another part of the launch, which nobody has touched yet.
    pub(crate) fn copy(&self) -> Self {
        let copied = |allocation: &Allocation| Allocation {
            name: allocation.name.clone(),
            bytes: allocation.bytes.clone(),
            written: allocation.written.clone(),
            shadow: GlobalShadow::default(),
        };
        Self { allocations: self.allocations.iter().map(|slot| slot.as_ref().map(copied)).collect() }
    }

    /// Takes over what another part has written to its copy of `original`. False if one has written what the other
    /// has touched: then this is neither's memory any more.
    pub(crate) fn join(&mut self, other: Self, original: &Self) -> bool {
        let slots = self.allocations.iter_mut().zip(other.allocations).zip(&original.allocations);
        for ((own, other), original) in slots {
            let (Some(own), Some(other), Some(original)) = (own, other, original) else { continue };
            if !own.shadow.join(other.shadow) {
                return false;
            }
            own.written.join(&other.written);
            let changed =
                other.bytes.iter().zip(&original.bytes).enumerate().filter(|(_, (new, old))| new != old);
            changed.for_each(|(at, (new, _))| own.bytes[at] = *new);
        }
        true
    }

    /// Takes an allocation out again.
    pub(crate) fn remove(&mut self, index: u8) -> Option<Allocation> {
        self.allocations.get_mut(usize::from(index))?.take()
    }

    /// An address in words: the byte of what the host calls its allocation.
    pub(crate) fn describe(&self, address: u64) -> String {
        let relative = address.wrapping_sub(BASE);
        let slot = self.allocations.get((relative >> STRIDE_BITS) as usize).and_then(Option::as_ref);
        slot.map_or_else(
            || format!("global address {address:#x}"),
            |allocation| format!("byte {} of {}", relative & ((1 << STRIDE_BITS) - 1), allocation.name),
        )
    }

    /// The allocation that holds all of `address..address + len`, and where in it; else what is wrong.
    pub(crate) fn find(
        &mut self,
        address: u64,
        len: usize,
    ) -> Result<(&mut Allocation, Range<usize>), String> {
        let nowhere = || format!("global address {address:#x} is in no buffer");
        let relative = address.checked_sub(BASE).ok_or_else(nowhere)?;
        let index = (relative >> STRIDE_BITS) as usize;
        let start = (relative & ((1 << STRIDE_BITS) - 1)) as usize;
        let slot = self.allocations.get_mut(index).ok_or_else(nowhere)?;
        let allocation = slot.as_mut().ok_or_else(nowhere)?;
        if start.checked_add(len).is_none_or(|end| end > allocation.bytes.len()) {
            let (name, size) = (&allocation.name, allocation.bytes.len());
            return Err(format!("bytes {start}..{} of {name}, which has {size}", start as u64 + len as u64));
        }
        Ok((allocation, start..start + len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_exact_and_neighbours_far() {
        let mut memory = GlobalMemory::default();
        let a = memory.insert(0, "a".into(), vec![0; 10], true);
        let b = memory.insert(1, "b".into(), vec![0; 10], true);
        assert!(memory.find(a + 6, 4).is_ok());
        assert!(memory.find(a + 7, 4).unwrap_err().contains("bytes 7..11 of a, which has 10"));
        assert_eq!(memory.describe(b + 7), "byte 7 of b");
        assert_eq!(memory.describe(12), "global address 0xc");
        assert!(memory.find(b - 1, 1).is_err());
        assert!(memory.find(0, 4).is_err() && memory.find(u64::MAX, 4).is_err());
    }
}
