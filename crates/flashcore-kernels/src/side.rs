//! The small arrays that kernels read besides the tensors, as the bytes an executor uploads.

use flashcore_core::{Lengths, Problem};

/// Sinks and lengths of a problem; see [`crate::slots`] for what each slot expects.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SideArrays {
    /// For [`crate::slots::SINKS`].
    pub sinks: Option<Vec<u8>>,
    /// For [`crate::slots::LENGTHS_Q`] and [`crate::slots::LENGTHS_KV`].
    pub lengths: Option<[Vec<u8>; 2]>,
}

impl SideArrays {
    /// The arrays of a problem.
    pub fn of(problem: &Problem) -> Self {
        let sinks = problem.sinks().map(|sinks| sinks.iter().flat_map(|s| s.to_le_bytes()).collect());
        Self { sinks, lengths: lengths(problem) }
    }
}

fn lengths(problem: &Problem) -> Option<[Vec<u8>; 2]> {
    let bytes = |values: &[u32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    // Kernels read both arrays: where one side is used whole, every entry says so.
    let used = |given: Option<&[u32]>, all: usize| match given {
        Some(given) => bytes(given),
        None => bytes(&vec![all as u32; problem.batch()]),
    };
    match problem.lengths() {
        Lengths::Used { q, kv } => {
            Some([used(q.as_deref(), problem.seq_q()), used(kv.as_deref(), problem.seq_kv())])
        }
        Lengths::Ragged { q, kv } => Some([bytes(q), bytes(kv)]),
        _ => None,
    }
}
