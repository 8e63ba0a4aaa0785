//! How many CTAs of a kernel fit on one multiprocessor, from its resources alone: what the driver would report, without
//! a driver. `profile` and `inspect` print it.

use flashcore_ptx::sm::{REGISTER_UNIT, REGISTERS, Sm};
use serde::Serialize;

/// CTAs on one multiprocessor.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug)]
pub struct Occupancy {
    pub ctas_per_sm: u32,
    pub warps_per_sm: u32,
    /// The resource that runs out first.
    pub limited_by: &'static str,
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
            ("registers", REGISTERS / per_warp / warps),
            ("shared memory", sm.shared.checked_div(usage.shared + sm.reserved).unwrap_or(sm.ctas)),
            ("threads", sm.warps / warps),
            ("CTAs", sm.ctas),
        ];
        let (limited_by, ctas_per_sm) = limits.into_iter().min_by_key(|(_, n)| *n).unwrap_or(limits[0]);
        Self { ctas_per_sm, warps_per_sm: ctas_per_sm * warps, limited_by }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(threads: u32, registers: u32, shared: u32, capability: (u32, u32), expected: (u32, &str)) {
        let found = Occupancy::of(Usage { threads, registers, shared }, capability);
        assert_eq!((found.ctas_per_sm, found.limited_by), expected, "{found:?}");
        assert_eq!(found.warps_per_sm, expected.0 * threads.div_ceil(32));
    }

    #[test]
    fn what_runs_out_first_decides() {
        check(384, 168, 227 * 1024, (9, 0), (1, "registers"));
        check(128, 32, 100 * 1024, (8, 0), (1, "shared memory"));
        check(128, 128, 0, (8, 0), (4, "registers"));
        check(1024, 16, 0, (8, 6), (1, "threads"));
        check(32, 16, 0, (8, 6), (16, "CTAs"));
        check(32, 16, 0, (8, 9), (24, "CTAs"));
        check(128, 255, 48 * 1024, (12, 0), (2, "registers"));
        check(1024, 255, 0, (9, 0), (0, "registers"));
    }
}
