//! Tensors of 8 bits: where they are refused, and their factors.

use super::{Row, dense, good};
use crate::{
    AppendSpec, BackwardSpec, DType, Data, DataMut, E4M3, Factors, HostCall, Instance, MergeSpec, Parts,
    ProblemError, Scales, Spec, Values,
};
use half::bf16;

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

/// Two sequences of queries in bf16 over keys and values in E4M3.
fn over_cache() -> Spec {
    Spec { dtype: DType::BF16, ..good() }.over(DType::E4M3)
}

fn over(change: impl Fn(&mut Spec)) -> Result<(), ProblemError> {
    let mut spec = over_cache();
    change(&mut spec);
    spec.parse().map(drop)
}

fn cached(factors: Factors) -> Result<(), ProblemError> {
    let values = Values { factors: Some(factors), ..Values::default() };
    Instance::new(&over_cache().with(&values).parse()?, &values).map(drop)
}

/// Binds keys of a type to a problem over an E4M3 cache.
fn bound_cache(keys: DType) -> Result<(), ProblemError> {
    let problem = over_cache().parse()?;
    let (wide, narrow) = (vec![bf16::ZERO; 1 << 16], vec![E4M3::default(); 1 << 16]);
    let kv = if keys == DType::BF16 { Data::BF16(&wide) } else { Data::E4M3(&narrow) };
    let mut out = vec![bf16::ZERO; 1 << 16];
    let inputs = [Data::BF16(&wide), kv, kv];
    HostCall::bind_erased(&problem, Values::NONE, inputs, DataMut::BF16(&mut out), None).map(drop)
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
        (over(|s| s.kv_dtype = Some(DType::E5M2)), "KeyDType", "k and v are e5m2 but q is bf16"),
        (over(|s| s.dtype = DType::F32), "KeyDType", "16-bit queries over an e4m3 cache"),
        (over(|s| (s.kv_dtype, s.scales) = (None, Some(Scales::PerHead))), "ScaledDType", "bf16 tensors have no factors"),
        (over(|s| s.out_dtype = Some(DType::F16)), "OutDType", "give it q's type or f32"),
        (BackwardSpec::new(over_cache()).parse().map(drop), "Narrow", "computing gradients"),
        (cached(Factors::per_tensor([1.0; 3])), "FactorCount", "1 factors for q but 0 are needed"),
        (cached(Factors::of_cache(Scales::Strided([0, 3]), [vec![1.0; 4].into(), vec![1.0; 3].into()])), "FactorCount", "3 factors for v but 4 are needed"),
        (bound_cache(DType::BF16), "OtherDType", "k is bf16 but the problem says e4m3"),
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

#[test]
fn a_cache_has_a_type_and_factors_of_its_own() {
    let kind = Scales::Strided([0, 2]);
    let factors = Factors::of_cache(kind, [vec![1.0, 9.0, 3.0].into(), vec![5.0, 9.0, 7.0].into()]);
    let values = Values { factors: Some(factors), ..Values::default() };
    let problem = over_cache().with(&values).parse().unwrap();
    assert_eq!(
        [problem.dtype(), problem.kv_dtype(), problem.out_dtype()],
        [DType::BF16, DType::E4M3, DType::BF16]
    );
    let instance = Instance::new(&problem, &values).unwrap();
    assert_eq!([0, 1].map(|batch| instance.factors(batch, 1)), [[1.0, 3.0, 7.0]; 2]);
    assert_eq!(
        over_cache().over(DType::BF16).parse().unwrap().spec().kv_dtype,
        None,
        "no cache of its own type"
    );
    assert_eq!(bound_cache(DType::E4M3), Ok(()));
}
