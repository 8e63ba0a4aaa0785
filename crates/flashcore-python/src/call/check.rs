//! What is checked of a call's tensors once the problem is known.

use flashcore::Problem;
use flashcore_core::Bias;

use super::Call;
use crate::error::CallError;

impl Call<'_> {
    /// Demands that elements lie where elements may, that nothing is read from what is written, and the right counts.
    pub(super) fn check(&self, problem: &Problem) -> Result<(), CallError> {
        let layouts = [problem.q(), problem.k(), problem.v(), problem.out()];
        let spans: [usize; 4] = std::array::from_fn(|n| layouts[n].span() * self.arrays[n].dtype.bytes());
        let range = |n: usize| self.arrays[n].address..self.arrays[n].address.wrapping_add(spans[n]);
        let out = range(3);
        for (n, array) in self.arrays.iter().enumerate().filter(|&(n, _)| spans[n] > 0) {
            array.check_alignment()?;
            if n < 3 && range(n).start < out.end && out.start < range(n).end {
                return Err(CallError::Shared { operand: array.operand });
            }
        }
        self.check_counts(problem)
    }

    /// Demands as many values of rows, heads and pairs as the problem has.
    pub(crate) fn check_counts(&self, problem: &Problem) -> Result<(), CallError> {
        let rows = problem.q().dims();
        if let Some(lse) = &self.lse {
            lse.check_lse([rows.batch, rows.heads, rows.seq], self.arrays[0].rank())?;
        }
        self.sinks.map_or(Ok(()), |sinks| sinks.check_sinks(rows.heads))?;
        self.check_bias(problem)
    }

    /// Demands as many slopes as the problem has, or pairs where elements may lie.
    pub(crate) fn check_bias(&self, problem: &Problem) -> Result<(), CallError> {
        let Some(bias) = self.bias else { return Ok(()) };
        let (sequences, heads) = (problem.sequences(), problem.heads_q());
        let extents = match problem.bias() {
            Some(Bias::Slopes { per_sequence: true }) => &[sequences, heads][..],
            Some(Bias::Slopes { .. }) => &[heads],
            _ => return bias.check_alignment(),
        };
        bias.check_dense_f32(extents).map_err(|_| CallError::Slopes { sequences, heads })
    }
}
