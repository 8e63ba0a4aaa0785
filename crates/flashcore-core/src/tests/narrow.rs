//! Tensors of 8 bits: where they are refused, and their factors.

use super::{Row, dense, good};
use crate::{
    AppendSpec, BackwardSpec, DType, Factors, Instance, MergeSpec, Parts, ProblemError, Scales, Spec, Values,
};

fn narrow(change: impl Fn(&mut Spec)) -> Result<(), ProblemError> {
    let mut spec = Spec { dtype: DType::E4M3, ..good() };
    change(&mut spec);
    spec.parse().map(drop)
}

/// Binds factors to a problem with room for such ones.
fn bound(factors: Factors) -> Result<(), ProblemError> {
    let values = Values { factors: Some(factors), ..Values::default() };
    Instance::new(&Spec { dtype: DType::E4M3, ..good() }.with(&values).parse()?, &values).map(drop)
}

/// Binds factors, or none, to a problem that was made for one for each tensor, or for none.
fn mixed_up(scales: Option<Scales>, factors: Option<Factors>) -> Result<(), ProblemError> {
    let values = Values { factors, ..Values::default() };
    Instance::new(&Spec { dtype: DType::E4M3, scales, ..good() }.parse()?, &values).map(drop)
}

fn per_head(count: usize) -> Factors {
    Factors::per_head([0, 1, 2].map(|_| vec![1.0; count].into()))
}

#[rustfmt::skip] // a table: one attempt, one expectation per line
pub(super) fn wrong_factors() -> Vec<Row> {
    let e4m3 = || Spec { dtype: DType::E4M3, ..good() };
    let cache = dense([2, 2, 16, 64]);
    vec![
        (narrow(|s| s.out_dtype = Some(DType::E4M3)), "NarrowOut", "ask for f16, bf16 or f32"),
        (narrow(|s| (s.accumulate, s.out_dtype) = (true, None)), "AccumulateDType", "not bf16"),
        (narrow(|s| s.sinks = Some(DType::E5M2)), "Narrow", "a sink does not take e5m2 tensors"),
        (BackwardSpec::new(e4m3()).parse().map(drop), "Narrow", "computing gradients"),
        (AppendSpec::new(DType::E5M2, [cache; 2], [cache; 2]).parse().map(drop), "Narrow", "appending to a cache"),
        (MergeSpec::new(DType::E4M3, cache, Parts::Listed(2)).parse().map(drop), "Narrow", "convert them to f16"),
        (Spec { scales: Some(Scales::PerTensor), ..good() }.parse().map(drop), "ScaledDType", "f32 tensors have no factors"),
        (mixed_up(Some(Scales::PerTensor), None), "OtherFactors", "brings no factors"),
        (mixed_up(None, Some(per_head(4))), "OtherFactors", "bind what it was planned for"),
        (mixed_up(Some(Scales::PerTensor), Some(per_head(4))), "OtherFactors", "not such factors"),
        (bound(per_head(3)), "FactorCount", "3 factors for q but 4 are needed"),
        (bound(Factors::per_tensor([1.0, 0.0, 1.0])), "Factor", "factor 0 of k"),
        (bound(Factors::per_tensor([1.0, 1.0, f32::NAN])), "Factor", "factor NaN of v"),
    ]
}

#[test]
fn results_are_wider_and_factors_are_found() {
    let problem = Spec { dtype: DType::E4M3, ..good() }.parse().unwrap();
    assert_eq!(problem.out_dtype(), DType::BF16);
    for out in DType::COMMON {
        let spec = Spec { dtype: DType::E5M2, out_dtype: Some(out), ..good() };
        assert_eq!(spec.parse().unwrap().out_dtype(), out);
    }
    let numbers = |first: f32| (0..4).map(|n| first + n as f32).collect();
    let values = Values {
        factors: Some(Factors::per_head([numbers(1.0), numbers(10.0), numbers(20.0)])),
        ..Values::default()
    };
    let problem = Spec { dtype: DType::E4M3, ..good() }.with(&values).parse().unwrap();
    let instance = Instance::new(&problem, &values).unwrap();
    assert_eq!(instance.factors(1, 0), [3.0, 12.0, 22.0]);
    let plain = Spec { scales: None, ..problem.spec().clone() }.parse().unwrap();
    assert_eq!(Instance::new(&plain, Values::NONE).unwrap().factors(1, 1), [1.0; 3]);
}
