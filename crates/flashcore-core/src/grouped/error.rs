//! What can be wrong with the arguments of grouped products, besides what can be wrong with any tensor.

use crate::error::Operand;

/// Arguments that do not describe grouped products.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GroupedError {
    /// No groups, or more than offsets may divide something among.
    #[error("{given} groups; give 1 to {max}")]
    Groups {
        /// Requested groups.
        given: usize,
        /// Most groups.
        max: usize,
    },
    /// Several matrices where offsets divide one.
    #[error("offsets divide {operand} into groups, but it has {given} matrices; pass one")]
    Several {
        /// The tensor.
        operand: Operand,
        /// Its matrices.
        given: usize,
    },
    /// Factors that do not fit each other.
    #[error("mat_b has {got} {what} but mat_a has {expected}; they must be equal")]
    Mismatch {
        /// What does not fit.
        what: &'static str,
        /// How many mat_b has.
        got: usize,
        /// How many mat_a has.
        expected: usize,
    },
    /// A result of other extents than the factors demand.
    #[error("out is {}x{}x{} but the product is {}x{}x{}", .got[0], .got[1], .got[2], .expected[0], .expected[1], .expected[2])]
    Out {
        /// Its matrices, rows and columns.
        got: [usize; 3],
        /// Those of the product.
        expected: [usize; 3],
    },
    /// Offsets where nothing is divided, or none where something is.
    #[error("{}", if *given { "3-D operands have a matrix for each group; omit the offsets" }
        else { "a 2-D operand is divided into groups by offsets; give the end of each group" })]
    Offsets {
        /// Whether there are offsets.
        given: bool,
    },
    /// Another number of offsets than of groups.
    #[error("{len} offsets for {groups} groups; give the end of each group")]
    OffsetCount {
        /// Offsets there.
        len: usize,
        /// Groups of the problem.
        groups: usize,
    },
}
