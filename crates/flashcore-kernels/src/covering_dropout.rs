//! The members of the covering sets that leave out weights: each width of the general kernels' tables, beside masks, lengths,
//! caps and biases of every kind.

use std::sync::Arc;

use flashcore_core::{BackwardSpec, Bias, DType, Dims, Dropout, Layout, ProblemError, Spec, Values};

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
    Pairs,
}

use Beside::{Cap, Nothing, Pairs, Slopes};

/// One problem: the type of the tensors, features, mask, lengths, what else there is.
struct Dropped(DType, usize, usize, Kind, Beside, Gpu);

const FORWARD: [Dropped; 11] = [
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
    Dropped(DType::F16, 128, 3, Kind::Uniform, Pairs, Gpu::AMPERE),
];

const BACKWARD: [Dropped; 15] = [
    Dropped(DType::F16, 64, 0, Kind::Uniform, Nothing, Gpu::AMPERE),
    Dropped(DType::BF16, 64, 1, Kind::Ragged, Slopes, Gpu::HOPPER),
    Dropped(DType::F16, 64, 3, Kind::Used, Cap, Gpu::CONSUMER),
    Dropped(DType::BF16, 128, 1, Kind::Uniform, Nothing, Gpu::HOPPER),
    Dropped(DType::F16, 128, 0, Kind::UsedKeys, Cap, Gpu::AMPERE),
    Dropped(DType::BF16, 128, 2, Kind::Ragged, Nothing, Gpu::CONSUMER),
    Dropped(DType::F16, 256, 1, Kind::Used, Nothing, Gpu::BLACKWELL),
    Dropped(DType::BF16, 300, 0, Kind::Uniform, Nothing, Gpu::BLACKWELL),
    Dropped(DType::F16, 64, 3, Kind::Uniform, Pairs, Gpu::AMPERE),
    Dropped(DType::BF16, 128, 3, Kind::UsedKeys, Pairs, Gpu::HOPPER),
    Dropped(DType::F32, 64, 0, Kind::Uniform, Nothing, Gpu::HOPPER),
    Dropped(DType::F32, 64, 1, Kind::Ragged, Cap, Gpu::AMPERE),
    Dropped(DType::F32, 128, 3, Kind::Used, Pairs, Gpu::BLACKWELL),
    Dropped(DType::F32, 128, 1, Kind::UsedKeys, Nothing, Gpu::CONSUMER),
    Dropped(DType::F32, 256, 3, Kind::Uniform, Slopes, Gpu::AMPERE),
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
        let pairs = Layout::bhsd(Dims::new(kind.batch(), 1, QUERIES, KEYS))?;
        let (bias, numbers) = match beside {
            Slopes => (Some(Bias::Slopes { per_sequence: false }), vec![0.25, 0.03]),
            Pairs => {
                let numbers = (0..pairs.span()).map(|n| (n % 7) as f32 * 0.5 - 1.0).collect();
                (Some(Bias::Pairs { dtype: DType::BF16, layout: pairs }), numbers)
            }
            _ => (None, Vec::new()),
        };
        let values = Values {
            lengths: kind.lengths(QUERIES),
            bias: bias.map(|_| Arc::from(numbers)),
            // Both halves of a seed count.
            seed: Some(0x1234_5678_9ABC_DEF0),
            ..Values::default()
        };
        let spec = Spec {
            mask: mask_of(mask),
            softcap: (beside == Cap).then_some(20.0),
            bias,
            dropout: Some(Dropout::new(0.3)),
            ..Spec::new(dtype, q, k, k).with(&values)
        };
        Ok((spec, values))
    }
}
