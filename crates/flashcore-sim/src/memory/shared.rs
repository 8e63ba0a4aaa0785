//! Shared memory of one CTA with its shadows.

use crate::{
    check::{clock::Agents, init::Written, race::SharedShadow},
    program::SHARED_BASE,
};
use std::ops::Range;

/// The shared memory of one CTA, from [`SHARED_BASE`] on.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    bytes: Vec<u8>,
    pub(crate) written: Written,
    pub(crate) shadow: SharedShadow,
}

impl SharedMemory {
    /// Zeros, of which the first `reserved` count as written.
    pub(crate) fn new(bytes: u32, reserved: u32, agents: Agents, track: bool) -> Self {
        let bytes = bytes as usize;
        let mut written = Written::new(bytes, false);
        written.mark(0..reserved as usize);
        Self {
            bytes: vec![0; bytes],
            written,
            shadow: SharedShadow::new(if track { bytes } else { 0 }, agents),
        }
    }

    /// Where `offset..offset + len` lies among the bytes; else what is wrong.
    pub(crate) fn range(&self, offset: u32, len: usize) -> Result<Range<usize>, String> {
        let size = self.bytes.len();
        let start = (offset as usize).wrapping_sub(SHARED_BASE as usize);
        match start.checked_add(len) {
            Some(end) if offset >= SHARED_BASE && end <= size => Ok(start..end),
            _ => Err(format!(
                "shared bytes {offset:#x}..{:#x}; the CTA has {SHARED_BASE:#x}..{:#x}",
                offset as usize + len,
                SHARED_BASE as usize + size
            )),
        }
    }

    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.bytes[range]
    }

    /// Writes, and remembers that the bytes were written.
    pub(crate) fn store(&mut self, start: usize, data: &[u8]) {
        self.bytes[start..start + data.len()].copy_from_slice(data);
        self.written.mark(start..start + data.len());
    }
}
