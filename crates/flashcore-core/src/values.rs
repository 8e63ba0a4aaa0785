//! What a call binds besides its tensors: numbers that may change from call to call while the plan stays the same.

use std::{ops::Deref, sync::Arc};

use crate::{
    bias::{Bias, BiasError, HeadBias},
    dropout::{DropoutWords, HeadDropout},
    error::{Operand, ProblemError},
    lengths::{Lengths, Sequence, Sequences},
    pages::{Keys, PageTable},
    problem::Problem,
    scales::Factors,
};

/// Lengths, sinks, factors, biases, seed and page table of one call, on the host.
///
/// A [`Problem`] only says that there are such numbers, so problems with different numbers are equal and share a plan.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Values {
    /// Used or packed lengths.
    pub lengths: Lengths,
    /// One extra logit per query head that takes part in the softmax but has no value.
    pub sinks: Option<Arc<[f32]>>,
    /// What 8-bit tensors are multiplied by.
    pub factors: Option<Factors>,
    /// What is added to scores, as the problem's [`Bias`] has it: pairs in its layout, or slopes.
    pub bias: Option<Arc<[f32]>>,
    /// The seed that decides which weights are dropped, where a problem has [dropout](crate::Dropout).
    pub seed: Option<u64>,
    /// Which pages hold the keys of which sequence.
    pub table: Option<PageTable>,
}

impl Values {
    /// Nothing of it.
    pub const NONE: &'static Self =
        &Self { lengths: Lengths::Uniform, sinks: None, factors: None, bias: None, seed: None, table: None };

    /// Checks the numbers against the problem that asks for them.
    pub fn check(&self, problem: &Problem) -> Result<(), ProblemError> {
        self.lengths.check(problem.q().dims(), problem.key_dims())?;
        if !self.lengths.serve(problem.sequences_kind()) {
            let (given, asked) = (self.lengths.kind(), problem.sequences_kind());
            return Err(ProblemError::OtherLengths { given, asked });
        }
        if self.sinks.is_some() != problem.sinks().is_some() {
            return Err(ProblemError::OtherSinks { given: self.sinks.is_some() });
        }
        check_sinks(self.sinks.as_deref(), problem.heads_q())?;
        let given = self.factors.as_ref().map(Factors::kind);
        if given != problem.scales() {
            return Err(ProblemError::OtherFactors { given: given.is_some() });
        }
        self.factors.as_ref().map_or(Ok(()), |factors| factors.check(problem))?;
        self.check_bias(problem)?;
        if problem.dropout().is_some() && self.seed.is_none() {
            return Err(ProblemError::NoSeed);
        }
        self.check_table(problem)
    }

    fn check_bias(&self, problem: &Problem) -> Result<(), ProblemError> {
        let given = self.bias.as_ref().map_or(0, |bias| bias.len());
        let (sequences, heads) = (problem.sequences(), problem.heads_q());
        let asked = problem.bias().map_or(0, |bias| bias.numbers(sequences, heads));
        let slopes = matches!(problem.bias(), Some(Bias::Slopes { .. }));
        let whole = self.bias.is_some() == problem.bias().is_some();
        if !whole || given < asked || (slopes && given != asked) {
            return Err(ProblemError::Bias(BiasError::Count { given, asked }));
        }
        Ok(())
    }

    fn check_table(&self, problem: &Problem) -> Result<(), ProblemError> {
        let given = self.table.as_ref().map(PageTable::columns);
        let asked = problem.pages().map(|pages| pages.columns);
        if given != asked {
            return Err(ProblemError::OtherTable { given, asked });
        }
        let Some(table) = &self.table else { return Ok(()) };
        table.check(problem.sequences())?;
        let keys = |n| self.lengths.sequence(n, problem.q().dims(), problem.key_dims()).kv_len;
        (0..problem.sequences()).try_for_each(|n| table.check_row(n, keys(n), problem.k().dims()))
    }
}

fn check_sinks(sinks: Option<&[f32]>, heads: usize) -> Result<(), ProblemError> {
    let Some(sinks) = sinks else { return Ok(()) };
    if sinks.len() != heads {
        return Err(ProblemError::SinkCount { given: sinks.len(), heads });
    }
    // −∞ is a sink that takes nothing; NaN and +∞ would erase the row.
    match sinks.iter().position(|s| s.is_nan() || *s == f32::INFINITY) {
        Some(head) => Err(ProblemError::Sink { head, value: sinks[head] }),
        None => Ok(()),
    }
}

/// A problem with the numbers of one call: where its sequences lie, what its heads' sinks are.
#[derive(Clone, Copy, Debug)]
pub struct Instance<'a> {
    problem: &'a Problem,
    values: &'a Values,
}

impl Deref for Instance<'_> {
    type Target = Problem;

    fn deref(&self) -> &Problem {
        self.problem
    }
}

impl<'a> Instance<'a> {
    /// Binds numbers to a problem, or says which of them are wrong.
    pub fn new(problem: &'a Problem, values: &'a Values) -> Result<Self, ProblemError> {
        values.check(problem)?;
        Ok(Self { problem, values })
    }

    /// The problem.
    pub const fn problem(&self) -> &'a Problem {
        self.problem
    }

    /// The numbers.
    pub const fn values(&self) -> &'a Values {
        self.values
    }

    /// One extra logit per query head, if any.
    pub fn sink_logits(&self) -> Option<&'a [f32]> {
        self.values.sinks.as_deref()
    }

    /// What row `index` of Q or K, or feature `index` of V, is multiplied by in a batch entry and one of the tensor's heads.
    pub fn factor(&self, operand: Operand, place: [usize; 2], index: usize) -> f32 {
        let factors = self.values.factors.as_ref();
        factors.map_or(1.0, |factors| factors.fine(self.problem, operand, place, index))
    }

    /// What Q, K and V of a batch entry and key head are multiplied by, where blocks have no factors of their own.
    pub fn factors(&self, batch: usize, head: usize) -> [f32; 3] {
        let factors = self.values.factors.as_ref();
        factors.map_or([1.0; 3], |factors| factors.at(self.heads_kv(), batch, head))
    }

    /// What is added to the scores of a query head of sequence `n`, if anything.
    pub fn bias_of(&self, n: usize, head: usize) -> Option<HeadBias<'a>> {
        let numbers = self.values.bias.as_deref()?;
        let sequence = self.sequence(n);
        Some(match self.bias()? {
            Bias::Pairs { layout, .. } => HeadBias::Pairs {
                numbers: &numbers[layout.row(sequence.batch, head, 0).min(numbers.len())..],
                stride: layout.strides()[2],
            },
            Bias::Slopes { per_sequence } => HeadBias::Slope {
                slope: numbers[if per_sequence { n * self.heads_q() + head } else { head }],
                diagonal: sequence.kv_len as i64 - sequence.q_len as i64,
            },
        })
    }

    /// Which weights of a query head of sequence `n` are dropped, if any.
    pub fn dropout_of(&self, n: usize, head: usize) -> Option<HeadDropout> {
        let (dropout, seed) = (self.dropout()?, self.values.seed?);
        let plane = n.wrapping_mul(self.heads_q()).wrapping_add(head) as u32;
        Some(HeadDropout::new(DropoutWords::of_plane(seed, plane), dropout))
    }

    /// Where sequence `n` lies.
    pub fn sequence(&self, n: usize) -> Sequence {
        self.values.lengths.sequence(n, self.q().dims(), self.key_dims())
    }

    /// Where the keys of sequence `n` lie in K and V.
    pub fn keys(&self, n: usize) -> Keys<'a> {
        match (&self.values.table, self.page_size()) {
            (Some(table), Some(size)) => Keys::Paged { pages: table.row(n), size },
            _ => Keys::together(self.sequence(n)),
        }
    }

    /// Visible (query, key) pairs over the whole problem, counting every query head; at most `u64::MAX`.
    pub fn visible_pairs(&self) -> u64 {
        let per_head = |n: usize| {
            let s = self.sequence(n);
            self.mask().pairs(s.q_len, s.kv_len)
        };
        let all = match self.sequences_kind() {
            Sequences::Uniform if self.batch() > 0 => per_head(0).saturating_mul(self.batch() as u64),
            _ => (0..self.sequences()).map(per_head).fold(0, u64::saturating_add),
        };
        all.saturating_mul(self.heads_q() as u64)
    }

    /// Floating-point operations of the two matrix products over visible pairs.
    pub fn flops(&self) -> f64 {
        self.visible_pairs() as f64 * self.flops_per_pair()
    }
}
