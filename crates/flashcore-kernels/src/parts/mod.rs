//! Building blocks of kernels; what only one kernel uses stays with it.

pub mod bias;
pub(crate) mod columns;
pub(crate) mod dropout;
pub(crate) mod elements;
pub(crate) mod entries;
pub(crate) mod factor;
pub(crate) mod factors;
pub mod lengths;
pub(crate) mod lines;
pub(crate) mod load;
pub(crate) mod maps;
pub mod mask;
pub(crate) mod multiply;
pub(crate) mod narrow;
pub(crate) mod operand;
pub(crate) mod pages;
pub(crate) mod portion;
pub(crate) mod range;
pub(crate) mod row_end;
pub(crate) mod scale;
pub mod schedule;
pub(crate) mod search;
pub(crate) mod sections;
pub mod share;
pub(crate) mod sinks;
pub mod softmax;
pub(crate) mod split;
pub(crate) mod staged;
pub(crate) mod tensor;
pub(crate) mod turner;
pub(crate) mod turns;
pub(crate) mod wide;
pub(crate) mod widen;

use flashcore_ptx::target::Target;

/// Whether kernels of a target may start before their predecessors have ended.
pub(crate) const fn overlaps(target: Target) -> bool {
    target.includes(Target::Sm90)
}
