//! Problems whose kernels most programs need: head dims, masks and element types, long and short.

use flashcore::{DType, Dims, Layout, Mask, Problem, ProblemError};
use flashcore_core::Spec;

/// Features of queries and keys, and of values.
const HEADS: [(usize, usize); 5] = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)];
/// Batch, heads and rows: enough to fill a GPU, and too few for that.
const SIZES: [(usize, usize, usize); 2] = [(4, 16, 4096), (1, 8, 512)];
/// Keys that a window shows before each query.
const WINDOW: u32 = 1024;

/// All of them.
pub fn problems() -> Result<Vec<Problem>, ProblemError> {
    let mut problems = Vec::new();
    for (qk, v) in HEADS {
        for (batch, heads, seq) in SIZES {
            for dtype in [DType::F16, DType::BF16] {
                for mask in [Mask::NONE, Mask::CAUSAL, Mask::window(WINDOW, 0)] {
                    let layout = |dim| Layout::bhsd(Dims::new(batch, heads, seq, dim));
                    problems.push(
                        Spec { mask, ..Spec::new(dtype, layout(qk)?, layout(qk)?, layout(v)?) }.parse()?,
                    );
                }
            }
        }
    }
    Ok(problems)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_kernels::{Gpu, plan};
    use std::collections::HashSet;

    /// Every problem has a kernel on every kind of GPU, and few of them share one.
    #[test]
    fn all_of_them_have_kernels() {
        for gpu in [Gpu::AMPERE, Gpu::CONSUMER, Gpu::HOPPER, Gpu::BLACKWELL] {
            let plans = problems().unwrap().into_iter().map(|p| *plan(&p, &gpu, 256).unwrap().kernel());
            let distinct: HashSet<_> = plans.collect();
            assert!(distinct.len() >= 30, "{} kernels for {gpu:?}", distinct.len());
        }
    }
}
