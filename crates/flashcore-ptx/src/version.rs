//! Versions of the PTX language (`.version`), and the lowest one for a target.

use crate::target::Target;
use std::fmt;

/// A `.version`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Version {
    /// Before the dot.
    pub major: u8,
    /// After the dot.
    pub minor: u8,
}

const fn v(major: u8, minor: u8) -> Version {
    Version { major, minor }
}

/// CUDA 11.0: sm_80; older targets are not served by older versions here.
pub const V7_0: Version = v(7, 0);
/// CUDA 11.1: sm_86, `mbarrier.test_wait.parity`.
pub const V7_1: Version = v(7, 1);
/// `alloca`.
pub const V7_3: Version = v(7, 3);
/// CUDA 11.4: cache hints.
pub const V7_4: Version = v(7, 4);
/// CUDA 11.5: `fence.proxy`, `cp.async` with a predicate.
pub const V7_5: Version = v(7, 5);
/// CUDA 11.6: `bmsk`, `szext`.
pub const V7_6: Version = v(7, 6);
/// CUDA 11.7: parameters have addresses.
pub const V7_7: Version = v(7, 7);
/// CUDA 11.8: sm_89, sm_90, clusters.
pub const V7_8: Version = v(7, 8);
/// CUDA 12.0: sm_90a, wgmma, bulk copies.
pub const V8_0: Version = v(8, 0);
/// CUDA 12.1: FP8 conversions on sm_89.
pub const V8_1: Version = v(8, 1);
/// CUDA 12.2.
pub const V8_2: Version = v(8, 2);
/// CUDA 12.3: `b128`, `mov.b128`.
pub const V8_3: Version = v(8, 3);
/// CUDA 12.4: FP8 `mma`.
pub const V8_4: Version = v(8, 4);
/// CUDA 12.5: sparse products with ordered metadata.
pub const V8_5: Version = v(8, 5);
/// CUDA 12.7: sm_100.
pub const V8_6: Version = v(8, 6);
/// CUDA 12.8: sm_120.
pub const V8_7: Version = v(8, 7);
/// CUDA 13.1: volatile local memory.
pub const V9_1: Version = v(9, 1);

impl Version {
    /// The lowest version that knows `target`.
    pub const fn of_target(target: Target) -> Self {
        match target {
            Target::Sm75 | Target::Sm80 => V7_0,
            Target::Sm86 => V7_1,
            Target::Sm89 | Target::Sm90 => V7_8,
            Target::Sm90a => V8_0,
            Target::Sm100 => V8_6,
            Target::Sm120 => V8_7,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
