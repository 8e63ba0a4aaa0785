//! The members of the covering sets that add something to scores: each type of numbers and each tile of the general
//! kernels' tables, beside masks and lengths of every kind.

use std::sync::Arc;

use flashcore_core::{BackwardSpec, Bias, DType, Dims, Layout, ProblemError, Spec, Values};

use crate::{
    covering::{KEYS, Kind, Member, mask_of, padded},
    covering_backward::BackwardMember,
    plan::{Choice, Family, Gpu},
};

/// One problem: the type of pairs (slopes where `None`), that of the tensors, features, mask, lengths.
struct Biased(Option<DType>, DType, usize, usize, Kind, Gpu);

const FORWARD: [Biased; 11] = [
    Biased(Some(DType::F16), DType::F16, 64, 0, Kind::Uniform, Gpu::AMPERE),
    Biased(Some(DType::BF16), DType::BF16, 128, 1, Kind::Used, Gpu::HOPPER),
    Biased(Some(DType::F32), DType::BF16, 256, 3, Kind::UsedKeys, Gpu::CONSUMER),
    Biased(Some(DType::F32), DType::F32, 64, 1, Kind::Uniform, Gpu::AMPERE),
    Biased(Some(DType::F16), DType::F16, 512, 0, Kind::Uniform, Gpu::BLACKWELL),
    Biased(Some(DType::F16), DType::F16, 64, 2, Kind::Used, Gpu::TURING),
    Biased(None, DType::F16, 64, 0, Kind::Uniform, Gpu::HOPPER),
    Biased(None, DType::BF16, 128, 1, Kind::Ragged, Gpu::AMPERE),
    Biased(None, DType::BF16, 256, 3, Kind::Used, Gpu::BLACKWELL),
    Biased(None, DType::F32, 128, 1, Kind::Uniform, Gpu::HOPPER),
    Biased(None, DType::F16, 128, 0, Kind::Paged(16), Gpu::CONSUMER),
];

const BACKWARD: [Biased; 10] = [
    Biased(Some(DType::F16), DType::F16, 64, 0, Kind::Uniform, Gpu::AMPERE),
    Biased(Some(DType::BF16), DType::BF16, 128, 1, Kind::Used, Gpu::HOPPER),
    Biased(Some(DType::F32), DType::BF16, 256, 3, Kind::UsedKeys, Gpu::BLACKWELL),
    Biased(None, DType::F16, 64, 0, Kind::Uniform, Gpu::HOPPER),
    Biased(None, DType::BF16, 128, 1, Kind::Ragged, Gpu::AMPERE),
    Biased(None, DType::F16, 256, 2, Kind::Used, Gpu::CONSUMER),
    Biased(Some(DType::F32), DType::F32, 64, 0, Kind::Uniform, Gpu::HOPPER),
    Biased(Some(DType::BF16), DType::F32, 128, 1, Kind::Used, Gpu::AMPERE),
    Biased(None, DType::F32, 64, 3, Kind::Ragged, Gpu::CONSUMER),
    Biased(None, DType::F32, 256, 1, Kind::UsedKeys, Gpu::BLACKWELL),
];

/// Gradients of capped scores: slopes of the cap are kept apart from what the bias has moved.
const CAPPED: [Biased; 8] = [
    Biased(Some(DType::BF16), DType::F16, 64, 0, Kind::Uniform, Gpu::HOPPER),
    Biased(None, DType::BF16, 64, 3, Kind::Ragged, Gpu::AMPERE),
    Biased(None, DType::F16, 128, 1, Kind::Uniform, Gpu::CONSUMER),
    Biased(Some(DType::F32), DType::BF16, 128, 3, Kind::Used, Gpu::HOPPER),
    Biased(None, DType::BF16, 256, 1, Kind::Uniform, Gpu::BLACKWELL),
    Biased(Some(DType::F32), DType::F32, 64, 3, Kind::Uniform, Gpu::BLACKWELL),
    Biased(None, DType::F32, 128, 0, Kind::Used, Gpu::HOPPER),
    Biased(Some(DType::F16), DType::F32, 256, 3, Kind::Uniform, Gpu::AMPERE),
];

const QUERIES: usize = 70;

/// Members of the forward set.
pub(crate) fn forward() -> impl Iterator<Item = Result<Member, ProblemError>> {
    FORWARD.into_iter().map(|biased| {
        let (spec, values) = biased.spec()?;
        Ok(Member { problem: spec.parse()?, values, gpu: biased.5, like: None })
    })
}

/// Members of the set of gradients.
pub(crate) fn backward() -> impl Iterator<Item = Result<BackwardMember, ProblemError>> {
    let plain = BACKWARD.into_iter().map(|biased| (biased, None));
    let capped = CAPPED.into_iter().map(|biased| (biased, Some(20.0)));
    plain.chain(capped).map(|(biased, softcap)| {
        let (spec, values) = biased.spec()?;
        let problem = BackwardSpec::new(Spec { softcap, ..spec }).parse()?;
        Ok(BackwardMember { problem, values, gpu: biased.5, choice: Choice::Kernel(Family::Sm80) })
    })
}

impl Biased {
    fn spec(&self) -> Result<(Spec, Values), ProblemError> {
        let Self(pairs, dtype, dim, mask, kind, _) = *self;
        let (batch, (pool, rows)) = (kind.batch(), kind.pages().unwrap_or((kind.batch(), KEYS)));
        let (q, k) = (Dims::new(batch, 2, QUERIES, dim), Dims::new(pool, 1, rows, dim));
        let (bias, numbers) = match pairs {
            // Batch entries have numbers of their own, heads share them.
            Some(dtype) => {
                let layout = Layout::bhsd(Dims::new(batch, 1, QUERIES, KEYS))?;
                (Bias::Pairs { dtype, layout }, (0..layout.span()).map(number).collect())
            }
            None => (Bias::Slopes { per_sequence: false }, Arc::from([0.25, 0.03])),
        };
        let values = Values {
            lengths: kind.lengths(QUERIES),
            bias: Some(numbers),
            table: kind.table(),
            ..Values::default()
        };
        let (q, k) = (padded(q, 0)?, padded(k, 0)?);
        Ok((
            Spec { mask: mask_of(mask), bias: Some(bias), ..Spec::new(dtype, q, k, k).with(&values) },
            values,
        ))
    }
}

/// Numbers that every type holds exactly, −∞ among them.
fn number(n: usize) -> f32 {
    match n % 11 {
        10 => f32::NEG_INFINITY,
        step => 0.5 * step as f32 - 2.0,
    }
}
