//! What a launch did, in numbers.

use flashcore_ptx::table::Class;
use std::collections::BTreeMap;

/// Dynamic counts of a launch.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Counters {
    /// Warp instructions by kind of work.
    pub instructions: BTreeMap<Class, u64>,
    /// Passes that shared memory needed.
    pub shared_wavefronts: u64,
    /// Passes beyond those that a conflict-free access would have needed.
    pub bank_conflicts: u64,
    /// 32-byte sectors of global memory touched by loads, stores and atomics.
    pub global_sectors: u64,
    /// Bytes moved by asynchronous copies.
    pub async_bytes: u64,
    /// Multiply-adds on tensor cores.
    pub tensor_macs: u64,
    /// Divergent branches.
    pub divergent_branches: u64,
}

impl Counters {
    /// Adds what another part of the launch did; instructions are counted elsewhere.
    pub(crate) fn join(&mut self, other: &Self) {
        self.shared_wavefronts += other.shared_wavefronts;
        self.bank_conflicts += other.bank_conflicts;
        self.global_sectors += other.global_sectors;
        self.async_bytes += other.async_bytes;
        self.tensor_macs += other.tensor_macs;
        self.divergent_branches += other.divergent_branches;
    }

    /// All warp instructions.
    pub fn total_instructions(&self) -> u64 {
        self.instructions.values().sum()
    }
}

/// Counts instructions by program counter; folded into classes at the end, since a map per step would cost more
/// than the step.
#[derive(Default, Debug)]
pub(crate) struct PerInstruction(Vec<u64>);

impl PerInstruction {
    pub(crate) fn new(instructions: usize) -> Self {
        Self(vec![0; instructions])
    }

    pub(crate) fn hit(&mut self, pc: u32) {
        self.0[pc as usize] += 1;
    }

    /// Adds what another part of the launch did.
    pub(crate) fn join(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(count, more)| *count += more);
    }

    /// The instruction that was executed most.
    pub(crate) fn busiest(&self) -> u32 {
        let most = self.0.iter().enumerate().max_by_key(|(_, count)| **count);
        most.map_or(0, |(pc, _)| pc as u32)
    }

    /// How often the instruction at `pc` was executed.
    pub(crate) fn at(&self, pc: usize) -> u64 {
        self.0[pc]
    }

    pub(crate) fn fold(&self, class_of: impl Fn(usize) -> Class) -> BTreeMap<Class, u64> {
        let mut classes = BTreeMap::new();
        for (pc, &count) in self.0.iter().enumerate().filter(|(_, n)| **n > 0) {
            *classes.entry(class_of(pc)).or_default() += count;
        }
        classes
    }
}
