//! How many CTAs of a kernel fit on one multiprocessor, from its resources alone: what the driver would say, where there
//! is none. `profile` and `inspect` tell it.

use flashcore_ptx::sm::{REGISTER_UNIT, REGISTERS, RESERVED_SHARED, Sm};
use serde::Serialize;

/// The resource that runs out first.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Registers of all warps.
    Registers,
    /// Shared memory of all CTAs.
    SharedMemory,
    /// Warps.
    Threads,
    /// CTAs, however small.
    Ctas,
}

impl Limit {
    /// The resource in words.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Registers => "registers",
            Self::SharedMemory => "shared memory",
            Self::Threads => "threads",
            Self::Ctas => "CTAs",
        }
    }
}

/// CTAs on one multiprocessor.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug)]
pub struct Occupancy {
    pub ctas_per_sm: u32,
    pub warps_per_sm: u32,
    pub limited_by: Limit,
}

/// What a CTA uses.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    pub threads: u32,
    pub registers: u32,
    /// Its shared memory in bytes.
    pub shared: u32,
}

impl Occupancy {
    /// Of CTAs with this usage on a GPU of this compute capability.
    pub fn of(usage: Usage, capability: (u32, u32)) -> Self {
        let sm = Sm::of(capability);
        let warps = usage.threads.div_ceil(32).max(1);
        let per_warp = (usage.registers * 32).next_multiple_of(REGISTER_UNIT).max(REGISTER_UNIT);
        let limits = [
            (Limit::Registers, REGISTERS / per_warp / warps),
            (Limit::SharedMemory, sm.shared / (usage.shared + RESERVED_SHARED)),
            (Limit::Threads, sm.warps / warps),
            (Limit::Ctas, sm.ctas),
        ];
        let (limited_by, ctas_per_sm) = limits.into_iter().min_by_key(|(_, n)| *n).unwrap_or(limits[0]);
        Self { ctas_per_sm, warps_per_sm: ctas_per_sm * warps, limited_by }
    }

    /// Share of the warps that a GPU of this compute capability could have.
    pub fn share(&self, capability: (u32, u32)) -> f64 {
        f64::from(self.warps_per_sm) / f64::from(Sm::of(capability).warps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(threads: u32, registers: u32, shared: u32, capability: (u32, u32), expected: (u32, Limit)) {
        let found = Occupancy::of(Usage { threads, registers, shared }, capability);
        assert_eq!((found.ctas_per_sm, found.limited_by), expected, "{found:?}");
        assert_eq!(found.warps_per_sm, expected.0 * threads.div_ceil(32));
    }

    #[test]
    fn what_runs_out_first_decides() {
        check(384, 168, 227 * 1024, (9, 0), (1, Limit::Registers));
        check(128, 32, 100 * 1024, (8, 0), (1, Limit::SharedMemory));
        check(128, 128, 0, (8, 0), (4, Limit::Registers));
        check(1024, 16, 0, (8, 6), (1, Limit::Threads));
        check(32, 16, 0, (8, 6), (16, Limit::Ctas));
        check(32, 16, 0, (8, 9), (24, Limit::Ctas));
        check(128, 255, 48 * 1024, (12, 0), (2, Limit::Registers));
        check(1024, 255, 0, (9, 0), (0, Limit::Registers));
    }
}
