//! The covering set of caches of 8 bits: members of other sets with 16-bit queries, over keys and values of E4M3.

use flashcore_core::{DType, Factors, ProblemError, Scales, Spec, Values};

use crate::{
    covering::{Member, covering_set},
    covering_decode::covering_decode,
    launch::KernelConfig,
};

/// Of members for many queries, every so many-th: widening knows nothing of most of their options.
const SOME: usize = 4;

/// The set: every second member for few queries, so that each option is met, and some for many.
pub fn covering_caches() -> Result<Vec<Member>, ProblemError> {
    let few = covering_decode()?.into_iter().filter(|member| dims(member).iter().all(|dim| dim % 16 == 0));
    let many = covering_set()?.into_iter().filter(is_general);
    few.step_by(2).chain(many.step_by(SOME)).enumerate().map(|(n, member)| over_cache(n, member)).collect()
}

fn dims(member: &Member) -> [usize; 2] {
    [member.problem.dim_qk(), member.problem.dim_v()]
}

/// Whether the general kernel computes it, on a GPU that widens, and elements come in pairs. Dropout is not for caches.
fn is_general(member: &Member) -> bool {
    let problem = &member.problem;
    let even = |n: &usize| n.is_multiple_of(2);
    let strides = [problem.k(), problem.v()].map(|layout| layout.strides());
    let pairs = strides.iter().all(|strides| strides[..3].iter().all(even)) && dims(member).iter().all(even);
    let kernel = member.plan().map(|plan| *plan.kernel());
    matches!(problem.dtype(), DType::F16 | DType::BF16)
        && member.like.is_none()
        && member.gpu.capability >= (8, 0)
        && pairs
        && !problem.accumulate()
        && problem.dropout().is_none()
        && matches!(kernel, Ok(KernelConfig::Sm80(_)))
}

/// The member over a cache, with factors of one kind or another.
fn over_cache(n: usize, member: Member) -> Result<Member, ProblemError> {
    let kind = [Some(Scales::PerHead), Some(Scales::Strided([0, 1])), None, Some(Scales::PerTensor)][n % 4];
    let count = |kind: Scales| kind.count(member.problem.sequences(), member.problem.heads_kv());
    let numbers = |kind, first: f32| (0..count(kind)).map(|n| first + n as f32 / 1000.0).collect();
    let factors = kind.map(|kind| Factors::of_cache(kind, [numbers(kind, 0.011), numbers(kind, 0.009)]));
    let spec = Spec { scales: kind, ..member.problem.spec().clone() }.over(DType::E4M3);
    Ok(Member { problem: spec.parse()?, values: Values { factors, ..member.values }, ..member })
}
