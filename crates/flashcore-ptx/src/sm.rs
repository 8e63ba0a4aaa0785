//! Resources of a multiprocessor (CUDA programming guide, "Compute capabilities").
//!
//! Kernels divide them up, plans and the simulator check launches against them, `profile` and `inspect` use them.

/// Registers of 32 bits, on every architecture from sm_75 on.
pub const REGISTERS: u32 = 65_536;
/// Registers are given to warps in units of this.
pub const REGISTER_UNIT: u32 = 256;
/// Most registers of a thread.
pub const THREAD_REGISTERS: u32 = 255;
/// What differs between architectures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sm {
    /// Most warps.
    pub warps: u32,
    /// Most CTAs.
    pub ctas: u32,
    /// Shared memory of all its CTAs, in bytes.
    pub shared: u32,
    /// Shared memory that the driver takes beside that of each CTA, in bytes.
    pub reserved: u32,
}

impl Sm {
    /// The multiprocessors of a compute capability, major and minor.
    pub const fn of(capability: (u32, u32)) -> Self {
        const fn kib(n: u32) -> u32 {
            n * 1024
        }
        const fn sm(warps: u32, ctas: u32, shared: u32) -> Sm {
            Sm { warps, ctas, shared, reserved: kib(1) }
        }
        match capability {
            (..=7, _) => Self { reserved: 0, ..sm(32, 16, kib(64)) },
            (8, 6) => sm(48, 16, kib(100)),
            (8, 9) | (12, _) => sm(48, 24, kib(100)),
            (8, _) => sm(64, 32, kib(164)),
            _ => sm(64, 32, kib(228)),
        }
    }

    /// Most shared memory of one CTA, in bytes.
    pub const fn most_shared(&self) -> u32 {
        self.shared - self.reserved
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::Target;

    /// What drivers report as the most that a CTA may ask for.
    #[test]
    fn one_cta_may_take_all_but_what_is_reserved() {
        for (target, kib) in [
            (Target::Sm75, 64),
            (Target::Sm80, 163),
            (Target::Sm86, 99),
            (Target::Sm89, 99),
            (Target::Sm90a, 227),
            (Target::Sm100, 227),
            (Target::Sm120, 99),
        ] {
            assert_eq!(Sm::of(target.capability()).most_shared(), kib << 10, "{target}");
        }
    }
}
