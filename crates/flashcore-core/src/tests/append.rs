//! New rows of a cache: what is refused, and where rows go.

use super::{Row, dense, repeated};
use crate::{
    AppendCall, AppendInputs, AppendOutputs, AppendProblem, AppendSpec, AppendValues, DType, Data, DataMut,
    Factors, PageTable, Pages, ProblemError, Rotary, Scales, Slots,
};

const ROTARY: Rotary = Rotary { dim: 16, interleaved: true, positions: 32, together: false };

/// Two sequences with 3 new rows of 2 heads each, behind what a cache of 8 rows holds.
fn append(change: impl Fn(&mut AppendSpec)) -> Result<AppendProblem, ProblemError> {
    let mut spec = AppendSpec::new(DType::F32, [dense([2, 2, 3, 64]); 2], [dense([2, 2, 8, 64]); 2]);
    change(&mut spec);
    spec.parse()
}

fn refused(change: impl Fn(&mut AppendSpec)) -> Result<(), ProblemError> {
    append(change).map(drop)
}

fn paged(spec: &mut AppendSpec) {
    (spec.cache_k, spec.cache_v) = (dense([6, 2, 4, 64]), dense([6, 2, 4, 64]));
    spec.pages = Some(Pages::new(3));
}

fn listed(spec: &mut AppendSpec) {
    (spec.k, spec.v, spec.slots) = (dense([1, 2, 3, 64]), dense([1, 2, 3, 64]), Slots::Listed);
}

fn turned(spec: &mut AppendSpec) {
    (spec.rotary, spec.q) = (Some(ROTARY), Some([dense([2, 4, 5, 64]); 2]));
}

/// Binds so many lengths, elements of a cache, of the cosines and of the queries.
fn bound(
    problem: &AppendProblem,
    lengths: usize,
    cache: usize,
    cos: Option<usize>,
    q: bool,
) -> Result<(), ProblemError> {
    let zeros = vec![0f32; 4096];
    let values = AppendValues { lengths: vec![1; lengths].into(), ..AppendValues::default() };
    let [mut cache_k, mut cache_v, mut to] = [cache, 4096, 4096].map(|len| vec![0f32; len]);
    let data = Data::F32(&zeros);
    let rotary = cos.map(|len| [Data::F32(&zeros[..len]); 2]);
    let inputs = AppendInputs { k: data, v: data, rotary, q: q.then_some(data) };
    let [cache_k, cache_v] = [&mut cache_k, &mut cache_v].map(|cache| DataMut::F32(cache));
    let outputs = AppendOutputs { cache_k, cache_v, q: q.then_some(DataMut::F32(&mut to)) };
    AppendCall::bind(problem, &values, inputs, outputs).map(drop)
}

fn listed_bound(slots: usize) -> Result<(), ProblemError> {
    let values = AppendValues { slots: vec![0; slots].into(), ..AppendValues::default() };
    values.check(&append(listed)?)
}

/// The same into an E4M3 cache with factors for every sequence and head.
fn narrow() -> AppendProblem {
    append(|s| (s.cache_dtype, s.scales) = (Some(DType::E4M3), Some(Scales::PerHead))).unwrap()
}

fn divided(factors: Option<Vec<f32>>) -> Result<(), ProblemError> {
    let of = |factors: Vec<f32>| Factors::of_cache(Scales::PerHead, [factors.clone().into(), factors.into()]);
    let values = AppendValues { lengths: [1, 1].into(), factors: factors.map(of), ..AppendValues::default() };
    values.check(&narrow())
}

#[rustfmt::skip] // a table: one attempt, one expectation per line
pub(super) fn wrong_appends() -> Vec<Row> {
    let plain = append(|_| {}).unwrap();
    let turned = append(turned).unwrap();
    let half = append(|s| s.dtype = DType::F16).unwrap();
    vec![
        (refused(|s| s.v = dense([2, 2, 4, 64])), "Mismatch", "v has sequence 4 but 3 is needed"),
        (refused(|s| s.cache_k = dense([2, 4, 8, 64])), "Mismatch", "k_cache has heads 4"),
        (refused(|s| s.cache_v = dense([2, 2, 9, 64])), "Mismatch", "v_cache has sequence 9"),
        (refused(|s| s.cache_v = dense([2, 2, 8, 32])), "Mismatch", "to match v"),
        (refused(|s| (s.cache_k, s.cache_v) = (dense([3, 2, 8, 64]), dense([3, 2, 8, 64]))), "Mismatch", "k_cache has batch 3"),
        (refused(|s| s.k = dense([2, 0, 3, 64])), "Empty", "k is 2x0x3x64"),
        (refused(|s| s.cache_k = repeated([2, 2, 8, 64])), "OverlappingOutput", "its own elements"),
        (refused(|s| { listed(s); s.pages = Some(Pages::new(3)) }), "SlotsAndTable", "pass one of them"),
        (refused(|s| s.slots = Slots::Listed), "RaggedBatch", "k has batch 2"),
        (refused(|s| { listed(s); s.rotary = Some(ROTARY) }), "SlotsWithoutPositions", "rotate the keys first"),
        (refused(|s| s.q = Some([dense([2, 4, 5, 64]); 2])), "QueriesUnturned", "pass cosines and sines"),
        (refused(|s| s.rotary = Some(Rotary { dim: 66, ..ROTARY })), "RotaryDim", "from 2 to 64"),
        (refused(|s| s.rotary = Some(Rotary { dim: 7, ..ROTARY })), "RotaryDim", "7 features"),
        (refused(|s| s.rotary = Some(Rotary { positions: 0, ..ROTARY })), "RotaryPositions", "0 positions"),
        (refused(|s| (s.rotary, s.q) = (Some(ROTARY), Some([dense([1, 4, 5, 64]); 2]))), "Mismatch", "q has batch 1"),
        (refused(|s| (s.rotary, s.q) = (Some(ROTARY), Some([dense([2, 4, 5, 64]), dense([2, 4, 6, 64])]))), "Mismatch", "out has sequence 6"),
        (bound(&plain, 3, 4096, None, false), "LengthCount", "3 used lengths"),
        (bound(&plain, 2, 2047, None, false), "BufferTooSmall", "k_cache holds 2047"),
        (bound(&plain, 2, 4096, Some(256), false), "OtherRotary", "rotates nothing"),
        (bound(&turned, 2, 4096, None, true), "OtherRotary", "passes no cosines"),
        (bound(&turned, 2, 4096, Some(255), true), "BufferTooSmall", "cosines and sines holds 255"),
        (bound(&turned, 2, 4096, Some(256), false), "OtherQueries", "passes none"),
        (bound(&half, 2, 4096, None, false), "OtherDType", "k is f32 but the problem expects f16"),
        (listed_bound(4), "SlotCount", "4 slots for 3 new rows"),
        (refused(|s| s.cache_dtype = Some(DType::F16)), "OtherDType", "k is f32 but the problem expects f16"),
        (refused(|s| s.scales = Some(Scales::PerTensor)), "ScaledDType", "f32 tensors have no factors"),
        (divided(None), "OtherFactors", "passes no factors"),
        (divided(Some(vec![1.0; 3])), "FactorCount", "3 factors for k but 4 are needed"),
        (bound(&narrow(), 2, 4096, None, false), "OtherFactors", "no factors"),
    ]
}

#[test]
fn rows_go_behind_what_is_there() {
    let problem = append(paged).unwrap();
    let table = Some(PageTable::new([5, 1, 9, 0, -1, 2], 3));
    let values = AppendValues { lengths: [3, -1].into(), table: table.clone(), ..AppendValues::default() };
    assert_eq!(values.check(&problem), Ok(()));
    let places = [0, 1, 5].map(|row| values.place(&problem, 0, row));
    assert_eq!(places, [Some((5, 3)), Some((1, 0)), None], "page 9 does not exist");
    assert_eq!(values.place(&problem, 1, 0), None, "a length below 0 is no sequence");
    let full = AppendValues { lengths: [3, 4].into(), ..values };
    assert_eq!([0, 4].map(|row| full.place(&problem, 1, row)), [None, Some((2, 0))]);
    assert_eq!(full.place(&problem, 1, 8), None, "beyond the table");
    let plain = append(|_| {}).unwrap();
    let values = AppendValues { lengths: [6, 0].into(), ..AppendValues::default() };
    assert_eq!([1, 2].map(|row| values.place(&plain, 0, row)), [Some((0, 7)), None]);
    assert_eq!(bound(&append(turned).unwrap(), 2, 4096, Some(256), true), Ok(()));
}

#[test]
fn rows_of_an_e4m3_cache_are_divided() {
    let numbers = |first: f32| (0..4).map(|n| first + n as f32).collect();
    let factors = Factors::of_cache(Scales::PerHead, [numbers(1.0), numbers(10.0)]);
    let values = AppendValues { lengths: [1, 1].into(), factors: Some(factors), ..AppendValues::default() };
    assert_eq!(values.check(&narrow()), Ok(()));
    assert_eq!(narrow().cache_dtype(), DType::E4M3);
    assert_eq!(values.divisors(&narrow(), 1, 0), [3.0, 12.0]);
}

#[test]
fn slots_name_pages_and_rows() {
    let problem = append(listed).unwrap();
    let values = AppendValues { slots: [9, -1, 16].into(), ..AppendValues::default() };
    assert_eq!([0, 1, 2].map(|row| values.place(&problem, 0, row)), [Some((1, 1)), None, None]);
}
