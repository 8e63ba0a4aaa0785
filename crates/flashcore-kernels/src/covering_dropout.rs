//! The members of the covering sets that leave out weights: each width of the general kernels' tables, beside masks, lengths,
//! caps and biases of every kind.

use std::sync::Arc;

use flashcore_core::{BackwardSpec, Bias, DType, Dims, Dropout, ProblemError, Spec, Values};

use crate::{
    covering::{KEYS, Kind, Member, mask_of, padded},
    covering_backward::BackwardMember,
    plan::{Choice, Family, Gpu},
};

/// What a call has beside dropout.
#[derive(Clone, Copy, PartialEq)]
enum Beside {
    Nothing,
    Cap,
    Slopes,
}

use Beside::{Cap, Nothing, Slopes};

/// One problem: the type of the tensors, features, mask, lengths, what else there is.
struct Dropped(DType, usize, usize, Kind, Beside, Gpu);

const FORWARD: [Dropped; 10] = [
    Dropped(DType::F16, 64, 0, Kind::Uniform, Nothing, Gpu::AMPERE),
    Dropped(DType::BF16, 64, 1, Kind::Ragged, Slopes, Gpu::HOPPER),
    Dropped(DType::F16, 64, 2, Kind::Used, Nothing, Gpu::TURING),
    Dropped(DType::BF16, 128, 1, Kind::Used, Cap, Gpu::AMPERE),
    Dropped(DType::F16, 128, 3, Kind::UsedKeys, Nothing, Gpu::CONSUMER),
    Dropped(DType::BF16, 128, 0, Kind::Uniform, Nothing, Gpu::BLACKWELL),
    Dropped(DType::F16, 256, 1, Kind::Ragged, Nothing, Gpu::HOPPER),
    Dropped(DType::BF16, 512, 1, Kind::Uniform, Nothing, Gpu::BLACKWELL),
    Dropped(DType::F32, 64, 1, Kind::Ragged, Nothing, Gpu::AMPERE),
    Dropped(DType::F32, 128, 0, Kind::Used, Cap, Gpu::HOPPER),
];

const BACKWARD: [Dropped; 8] = [
    Dropped(DType::F16, 64, 0, Kind::Uniform, Nothing, Gpu::AMPERE),
    Dropped(DType::BF16, 64, 1, Kind::Ragged, Slopes, Gpu::HOPPER),
    Dropped(DType::F16, 64, 3, Kind::Used, Cap, Gpu::CONSUMER),
    Dropped(DType::BF16, 128, 1, Kind::Uniform, Nothing, Gpu::HOPPER),
    Dropped(DType::F16, 128, 0, Kind::UsedKeys, Cap, Gpu::AMPERE),
    Dropped(DType::BF16, 128, 2, Kind::Ragged, Nothing, Gpu::CONSUMER),
    Dropped(DType::F16, 256, 1, Kind::Used, Nothing, Gpu::BLACKWELL),
    Dropped(DType::BF16, 300, 0, Kind::Uniform, Nothing, Gpu::BLACKWELL),
];

const QUERIES: usize = 70;

/// Members of the forward set.
pub(crate) fn forward() -> impl Iterator<Item = Result<Member, ProblemError>> {
    FORWARD.into_iter().map(|dropped| {
        let (spec, values) = dropped.spec()?;
        Ok(Member { problem: spec.parse()?, values, gpu: dropped.5, like: None })
    })
}

/// Members of the set of gradients.
pub(crate) fn backward() -> impl Iterator<Item = Result<BackwardMember, ProblemError>> {
    BACKWARD.into_iter().map(|dropped| {
        let (spec, values) = dropped.spec()?;
        let problem = BackwardSpec::new(spec).parse()?;
        Ok(BackwardMember { problem, values, gpu: dropped.5, choice: Choice::Kernel(Family::Sm80) })
    })
}

impl Dropped {
    fn spec(&self) -> Result<(Spec, Values), ProblemError> {
        let Self(dtype, dim, mask, kind, beside, _) = *self;
        let layout = |heads, seq| padded(Dims::new(kind.batch(), heads, seq, dim), 0);
        let (q, k) = (layout(2, QUERIES)?, layout(1, KEYS)?);
        let slopes = beside == Slopes;
        let values = Values {
            lengths: kind.lengths(QUERIES),
            bias: slopes.then(|| Arc::from([0.25, 0.03])),
            // Both halves of a seed count.
            seed: Some(0x1234_5678_9ABC_DEF0),
            ..Values::default()
        };
        let spec = Spec {
            mask: mask_of(mask),
            softcap: (beside == Cap).then_some(20.0),
            bias: slopes.then_some(Bias::Slopes { per_sequence: false }),
            dropout: Some(Dropout::new(0.3)),
            ..Spec::new(dtype, q, k, k).with(&values)
        };
        Ok((spec, values))
    }
}
