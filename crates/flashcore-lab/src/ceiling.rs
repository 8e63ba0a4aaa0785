//! The peak of a device, measured in the same run: copying memory and multiplying matrices.
//!
//! The fraction of this roofline that a kernel reaches shows how much headroom is left, on any device and at any clock.

use std::time::Instant;

use flashcore_core::DType;
use flashcore_cpu::Cpu;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::{buffer::filled, error::LabError, task::Task};

/// Rates of one device for one element type.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Ceiling {
    /// `cpu` or `gpu`.
    pub place: String,
    pub dtype: String,
    /// Bytes read plus bytes written per second in a large copy.
    pub copy: f64,
    /// Operations per second in matrix products.
    pub matrix: f64,
    pub how: String,
}

impl Ceiling {
    /// The shortest time that a task could take on this device.
    pub fn least_seconds(&self, task: &Task) -> f64 {
        (task.flops() / self.matrix).max(task.bytes() / self.copy)
    }

    /// Measures the CPU.
    pub fn of_cpu(cpu: &Cpu, dtype: DType) -> Result<Self, LabError> {
        Ok(Self {
            place: "cpu".to_owned(),
            dtype: dtype.name().to_owned(),
            copy: copy_rate(cpu)?,
            matrix: cpu.peak_flops(dtype),
            how: format!("{} multiply-adds in registers", cpu.simd()),
        })
    }
}

/// Bytes of each side of the copy: beyond any cache.
const BYTES: usize = 128 << 20;
/// Copies, of which the fastest counts.
const COPIES: usize = 5;

fn copy_rate(cpu: &Cpu) -> Result<f64, LabError> {
    let from = filled(1u8, BYTES)?;
    let mut to = filled(0u8, BYTES)?;
    let mut fastest = f64::INFINITY;
    for _ in 0..COPIES {
        let start = Instant::now();
        cpu.install(|| {
            let parts = to.par_chunks_mut(1 << 20).zip(from.par_chunks(1 << 20));
            parts.for_each(|(to, from)| to.copy_from_slice(from));
        });
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    Ok(2.0 * BYTES as f64 / fastest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_core::Mask;

    #[test]
    fn a_cpu_has_a_ceiling() {
        let ceiling = Ceiling::of_cpu(&Cpu::new(), DType::F32).unwrap();
        assert!(ceiling.copy > 1e8 && ceiling.matrix > 1e8, "{ceiling:?}");
        let task = Task::square(DType::F32, [1, 1, 1024, 64], Mask::NONE).unwrap();
        let narrow = Ceiling { copy: 1.0, ..ceiling.clone() };
        assert_eq!(narrow.least_seconds(&task), task.bytes());
        assert_eq!(Ceiling { matrix: 1.0, ..ceiling }.least_seconds(&task), task.flops());
    }
}
