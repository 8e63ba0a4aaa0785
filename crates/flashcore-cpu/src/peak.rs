//! Peak operations per second of the vector units: the roof that kernels are measured against.
//!
//! [`Cpu::peak_flops`] runs multiply-adds that touch registers only, on all threads of the backend.

use std::{hint::black_box, time::Instant};

use flashcore_core::DType;

use crate::{
    Cpu, Tiles,
    simd::{
        chains::{CHAINS, Chains},
        runner::Runner,
    },
};

/// Links of each chain in one measurement: some milliseconds.
const LINKS: usize = 4_000_000;
/// Measurements, of which the fastest counts.
const REPETITIONS: usize = 5;

/// Operations of one link on one thread.
fn operations(runner: Runner, dtype: DType) -> f64 {
    let lanes = runner.level().shape(Tiles::USUAL).lanes;
    let pairs = if uses_pairs(runner, dtype) { 2 } else { 1 };
    (2 * CHAINS * lanes * pairs) as f64
}

fn uses_pairs(runner: Runner, dtype: DType) -> bool {
    runner.has_pairs() && dtype == DType::BF16
}

impl Cpu {
    /// Operations per second of multiply-adds on tensors of `dtype`, on all threads, memory left aside.
    pub fn peak_flops(&self, dtype: DType) -> f64 {
        let runner = self.runner();
        let run = |_: rayon::BroadcastContext<'_>| {
            black_box(if uses_pairs(runner, dtype) {
                runner.run_pair_chains(LINKS)
            } else {
                runner.run(Chains { links: LINKS })
            });
        };
        let once = |_| {
            let start = Instant::now();
            let threads = self.install(|| rayon::broadcast(run).len());
            let links = (threads * LINKS) as f64;
            links * operations(runner, dtype) / start.elapsed().as_secs_f64()
        };
        (0..REPETITIONS).map(once).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_plausible() {
        for dtype in DType::COMMON {
            let peak = Cpu::with_threads(1).unwrap().peak_flops(dtype);
            assert!((1e8..1e12).contains(&peak), "{dtype}: {peak} operations per second on one thread");
        }
    }
}
