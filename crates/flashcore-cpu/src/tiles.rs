//! How much a thread works on at once: what tuning changes. Part of `Cpu`; read by `plan`, `prefill` and `panels`.

use std::fmt;

/// Sizes of the blocks that prefill works in.
///
/// The keys of a block decide when softmax maxima are updated, and with that the last bits of a result; the tiles of a
/// chunk do not change bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tiles {
    keys: usize,
    chunk: usize,
}

impl Tiles {
    /// The shipped sizes: 128 keys and their scores stay in the nearest cache, sixteen tiles share a pass over them. Keys of
    /// 16 bits are widened for each pass: where four tiles shared one, the best times of an Emerald Rapids were 6 to 9 %
    /// longer (`bench/cpu/2026-11-16-xeon.txt`).
    pub const USUAL: Self = Self { keys: 128, chunk: 16 };
    /// Those for matrix units, whose keys and values are laid out anew for each chunk.
    pub(crate) const MATRIX: Self = Self { keys: 128, chunk: 32 };
    /// Numbers of keys that a block may have.
    pub const KEYS: [usize; 6] = [32, 64, 128, 256, 512, 1024];
    /// Numbers of tiles that may share a pass over keys and values.
    pub const CHUNKS: [usize; 5] = [1, 2, 4, 8, 16];

    /// `keys` of a block and tiles of a `chunk`; `None` where they are not among [`Self::KEYS`] and [`Self::CHUNKS`].
    pub fn new(keys: usize, chunk: usize) -> Option<Self> {
        (Self::KEYS.contains(&keys) && Self::CHUNKS.contains(&chunk)).then_some(Self { keys, chunk })
    }

    /// Keys of a block: softmax maxima are updated once per block, blocks start at multiples of it.
    pub const fn keys(self) -> usize {
        self.keys
    }

    /// Tiles that share one pass over keys and values, at most.
    pub const fn chunk(self) -> usize {
        self.chunk
    }
}

impl Default for Tiles {
    fn default() -> Self {
        Self::USUAL
    }
}

impl fmt::Display for Tiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "k{}x{}", self.keys, self.chunk)
    }
}
