//! Where things lie: fragments, swizzles, descriptors and boxes, as pure functions.

/// How 16-byte chunks of a 128-byte line are permuted in shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Swizzle {
    /// As written.
    None,
    /// Pattern over 32-byte rows, repeating every 256 bytes.
    B32,
    /// Pattern over 64-byte rows, repeating every 512 bytes.
    B64,
    /// Pattern over 128-byte rows, repeating every 1024 bytes.
    B128,
}
