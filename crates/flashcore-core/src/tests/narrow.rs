//! Tensors of 8 bits: where they are refused, and their factors.

use super::{Row, dense, good};
use crate::{
    AppendSpec, BackwardSpec, DType, Data, DataMut, E4M3, Factors, Granularity, HostCall, Index, Instance,
    MergeSpec, Operand, Pages, Parts, ProblemError, QuantiseCall, QuantiseProblem, QuantiseSpec,
    QuantisedMut, SMALLEST_FACTOR, Scales, Sequences, Spec, Values,
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
        (narrow(|s| s.sinks = Some(DType::E5M2)), "Narrow", "a sink does not support e5m2 tensors"),
        (BackwardSpec::new(e4m3()).parse().map(drop), "Narrow", "computing gradients"),
        (AppendSpec::new(DType::E5M2, [cache; 2], [cache; 2]).parse().map(drop), "Narrow", "appending to a cache"),
        (MergeSpec::new(DType::E4M3, cache, Parts::Listed(2)).parse().map(drop), "Narrow", "convert them to f16"),
        (Spec { scales: Some(Scales::PerTensor), ..good() }.parse().map(drop), "ScaledDType", "f32 tensors have no factors"),
        (mixed_up(Some(Scales::PerTensor), None), "OtherFactors", "passes no factors"),
        (mixed_up(None, Some(per_head(4))), "OtherFactors", "bind what it was planned for"),
        (mixed_up(Some(Scales::PerTensor), Some(per_head(4))), "OtherFactors", "factors that the problem does not have"),
        (narrow(|s| s.scales = Some(Scales::PerBlock { q: 0, k: 8 })), "Scales", "at least one row"),
        (paged_blocks(), "Scales", "keys in pages cannot have factors per block"),
        (bound(Factors::per_block([4, 8], [0, 1, 2].map(|_| vec![1.0; 8].into()))), "FactorCount", "8 factors for q but 16"),
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
        (narrow(|s| s.turned = true), "Scales", "not 2x2x16x64"),
        (narrow(|s| (s.turned, s.v) = (true, dense([2, 2, 72, 256]))), "Scales", "turned values of 16 keys"),
        (narrow(|s| (s.turned, s.v) = (true, dense([2, 2, 70, 128]))), "Scales", "a multiple of 16 features"),
        (narrow(|s| (s.turned, s.v, s.dtype) = (true, dense([2, 2, 72, 128]), DType::F16)), "Scales", "need e4m3 queries"),
        (bound_cache(DType::BF16), "OtherDType", "k is bf16 but the problem expects e4m3"),
    ]
}

/// Blocks of a cache in pages.
fn paged_blocks() -> Result<(), ProblemError> {
    let sequences = Sequences::Used { q: false, kv: true };
    let pages = Some(Pages { columns: 1, row_stride: 1, longest_kv: None });
    narrow(|s| (s.scales, s.sequences, s.pages) = (Some(Scales::PerBlock { q: 8, k: 8 }), sequences, pages))
}

fn quantised(change: impl Fn(&mut QuantiseSpec)) -> Result<(), ProblemError> {
    let mut spec = QuantiseSpec::new(DType::F32, dense([2, 4, 8, 16]));
    change(&mut spec);
    spec.parse().map(drop)
}

/// Binds a tensor of 2 x 4 x 8 x 16 with so many factors, means and lengths to a problem that the change asks for.
fn quantised_into(
    change: impl Fn(&mut QuantiseSpec),
    [x, factors]: [usize; 2],
    means: Option<usize>,
    used: Option<&[u32]>,
) -> Result<(), ProblemError> {
    let mut spec = QuantiseSpec::new(DType::F32, dense([2, 4, 8, 16]));
    change(&mut spec);
    let problem = spec.parse()?;
    let (x, mut out) = (vec![0.0f32; x], vec![E4M3::default(); 1024]);
    let (mut factors, mut means) = (vec![0.0; factors], means.map(|count| vec![0.0; count]));
    let into =
        QuantisedMut { out: DataMut::E4M3(&mut out), factors: &mut factors, means: means.as_deref_mut() };
    QuantiseCall::bind(&problem, Data::F32(&x), used, into).map(drop)
}

#[rustfmt::skip] // a table: one attempt, one expectation per line
pub(super) fn wrong_quantisation() -> Vec<Row> {
    let centre = |s: &mut QuantiseSpec| s.centred = true;
    let used = |s: &mut QuantiseSpec| s.used = Some(Index::I32);
    vec![
        (quantised(|s| s.dtype = DType::E4M3), "Narrow", "quantising does not support e4m3"),
        (quantised(|s| s.to = DType::F16), "Scales", "not f16"),
        (quantised(|s| s.per = Granularity::PerBlock(0)), "Scales", "at least one row"),
        (quantised(|s| (s.per, s.group) = (Granularity::PerHead, 3)), "Scales", "4 heads cannot be split into groups of 3"),
        (quantised(|s| s.group = 2), "Scales", "only factors per head"),
        (quantised(|s| (s.turned, s.centred) = (true, true)), "Scales", "can be turned"),
        (quantised(|s| (s.turned, s.to) = (true, DType::E5M2)), "Scales", "multiple of 16 features"),
        (quantised(|s| (s.turned, s.out) = (true, Some(dense([2, 4, 8, 16])))), "Mismatch", "24"),
        (quantised(|s| s.x = dense([2, 0, 8, 16])), "Empty", "x is 2x0x8x16"),
        (quantised(|s| s.out = Some(dense([2, 4, 8, 8]))), "Mismatch", "out has dim 8"),
        (quantised_into(|_| {}, [1024, 2], None, None), "FactorCount", "2 factors for x but 1"),
        (quantised_into(|_| {}, [1023, 1], None, None), "BufferTooSmall", "x holds 1023"),
        (quantised_into(|_| {}, [1024, 1], Some(128), None), "Scales", "subtracts none"),
        (quantised_into(centre, [1024, 1], None, None), "Scales", "no room"),
        (quantised_into(centre, [1024, 1], Some(127), None), "BufferTooSmall", "means holds 127"),
        (quantised_into(|_| {}, [1024, 1], None, Some(&[8, 8])), "Scales", "passes used lengths"),
        (quantised_into(used, [1024, 1], None, None), "Scales", "passes no lengths"),
        (quantised_into(used, [1024, 1], None, Some(&[8])), "LengthCount", "x"),
        (quantised_into(used, [1024, 1], None, Some(&[8, 9])), "LengthTooLong", "9"),
    ]
}

#[test]
fn factors_of_shares_are_counted_and_found() {
    let problem = |per, group| {
        QuantiseSpec { per, group, ..QuantiseSpec::new(DType::F32, dense([2, 4, 9, 16])) }.parse().unwrap()
    };
    let at = |problem: QuantiseProblem| (problem.factors(), problem.factor_index([1, 2, 8], 5));
    assert_eq!(at(problem(Granularity::PerTensor, 1)), (1, 0));
    assert_eq!(at(problem(Granularity::PerHead, 2)), (4, 3));
    assert_eq!(at(problem(Granularity::PerBlock(4), 1)), (24, 6 * 3 + 2));
    assert_eq!(at(problem(Granularity::PerChannel, 1)), (128, 6 * 16 + 5));
    let tensor = problem(Granularity::PerTensor, 1);
    assert_eq!((tensor.factor_of(448.0), tensor.factor_of(0.0)), (1.0, SMALLEST_FACTOR));
    // What quantising calls a factor's number is where attention looks for it.
    let numbers = |count: usize| (0..count).map(|n| 1.0 + n as f32).collect::<std::sync::Arc<[f32]>>();
    let factors = Factors::per_block([4, 8], [numbers(16), numbers(8), numbers(256)]);
    let values = Values { factors: Some(factors), ..Values::default() };
    let forward = Spec { dtype: DType::E4M3, ..good() }.with(&values).parse().unwrap();
    let instance = Instance::new(&forward, &values).unwrap();
    assert_eq!(instance.factor(Operand::Q, [1, 3,], 5), 1.0 + (7 * 2 + 1) as f32);
    assert_eq!(instance.factor(Operand::K, [1, 1], 9), 1.0 + (3 * 2 + 1) as f32);
    assert_eq!(instance.factor(Operand::V, [1, 0], 7), 1.0 + (2 * 64 + 7) as f32);
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

/// Keys of sixteen in the order of registers, and back.
#[test]
fn turned_values_come_back() {
    let order: Vec<usize> = (0..16).map(crate::turned_place).collect();
    assert_eq!(order, [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]);
    let (from, numbers) = (dense([2, 1, 20, 16]), (0..640).map(|n| E4M3::from_bits((n % 120) as u8)));
    let (to, numbers) = (dense([2, 1, 24, 128]), numbers.collect::<Vec<_>>());
    let mut turned = vec![E4M3::from_bits(0x7f); to.span()];
    crate::turn_values((&from, &numbers), (&to, &mut turned), |batch| [20, 3][batch]);
    let (back, values) = crate::unturned_values((&to, &turned), 20).unwrap();
    assert_eq!(back, from);
    assert_eq!(values[..320 + 48], numbers[..320 + 48]);
    assert!(values[320 + 48..].iter().all(|value| value.to_bits() == 0), "what is not used is zero");
    assert_eq!(turned[16 * 128..][..256].iter().map(|x| x.to_f32()).sum::<f32>(), 128.0 * 3.25);
}
