//! Triggers every way in which arguments can be wrong, and checks the message.

mod append;
mod narrow;
mod pages;

use std::sync::Arc;

use half::f16;

use crate::{
    BackwardCall, BackwardInputs, BackwardProblem, BackwardSpec, DType, Data, DataMut, Dims, Dropout,
    Element, GradientsMut, HostCall, Instance, Layout, Lengths, MAX_EXTENT, Mask, MergeCall, MergeProblem,
    MergeSpec, PartError, Parts, Problem, ProblemError, RowSums, RowTerms, Spec, Tensor, TensorView,
    TensorViewMut, Values,
};

type Attempt = Result<(), ProblemError>;

fn dense(dims: [usize; 4]) -> Layout {
    let [batch, heads, seq, dim] = dims;
    Layout::bhsd(Dims::new(batch, heads, seq, dim)).unwrap()
}

/// Batch 2, heads 4 over 2, 8 queries over 16 keys, dim 64.
fn good() -> Spec {
    let kv = dense([2, 2, 16, 64]);
    Spec::new(DType::F32, dense([2, 4, 8, 64]), kv, kv)
}

fn parse(change: impl Fn(&mut Spec)) -> Result<Problem, ProblemError> {
    let mut spec = good();
    change(&mut spec);
    spec.parse()
}

fn refused(change: impl Fn(&mut Spec)) -> Attempt {
    parse(change).map(drop)
}

fn packed(q: &'static [u32], kv: &'static [u32]) -> Attempt {
    let values = Values { lengths: Lengths::ragged(q, kv), ..Values::default() };
    let (q, kv) = (dense([1, 4, 8, 64]), dense([1, 2, 16, 64]));
    Instance::new(&Spec::new(DType::F32, q, kv, kv).with(&values).parse()?, &values).map(drop)
}

/// Binds numbers to the good problem, which has room for them.
fn valued(lengths: Lengths, sinks: Option<Arc<[f32]>>) -> Attempt {
    let values = Values { lengths, sinks, ..Values::default() };
    Instance::new(&good().with(&values).parse()?, &values).map(drop)
}

fn lengths(lengths: Lengths) -> Attempt {
    valued(lengths, None)
}

fn sinks(logits: &[f32]) -> Attempt {
    valued(Lengths::Uniform, Some(logits.into()))
}

/// Binds numbers to a problem that was made for others.
fn mixed_up(problem: Spec, lengths: Lengths, sinks: Option<Arc<[f32]>>) -> Attempt {
    Instance::new(&problem.parse()?, &Values { lengths, sinks, ..Values::default() }).map(drop)
}

fn accumulated_without_lse() -> Attempt {
    let problem = Spec { accumulate: true, ..good() }.parse()?;
    let (q, kv, mut out) = (vec![0f32; 4096], vec![0f32; 4096], vec![0f32; 4096]);
    HostCall::bind(&problem, Values::NONE, [&q, &kv, &kv], &mut out, None).map(drop)
}

fn bound(q_len: usize, out_len: usize, lse_len: usize) -> Attempt {
    let problem = good().parse().unwrap();
    let (q, kv) = (vec![0f32; q_len], vec![0f32; 4096]);
    let (mut out, mut lse) = (vec![0f32; out_len], vec![0f32; lse_len]);
    HostCall::bind(&problem, Values::NONE, [&q, &kv, &kv], &mut out, Some(&mut lse)).map(drop)
}

fn bound_as_f16() -> Attempt {
    let problem = good().parse().unwrap();
    let (wide, narrow) = (vec![0f32; 4096], vec![f16::ZERO; 4096]);
    let mut out = vec![0f32; 4096];
    let inputs = [Data::F32(&wide), Data::F16(&narrow), Data::F32(&wide)];
    HostCall::bind_erased(&problem, Values::NONE, inputs, DataMut::F32(&mut out), None).map(drop)
}

fn strided(dims: [usize; 4], strides: [usize; 4]) -> Attempt {
    let [batch, heads, seq, dim] = dims;
    Layout::strided(Dims::new(batch, heads, seq, dim), strides).map(drop)
}

/// The name of a variant; a new one does not compile before it has a row in [`every_error_is_provoked`].
fn name(error: &ProblemError) -> &'static str {
    match error {
        ProblemError::Mismatch { .. } => "Mismatch",
        ProblemError::Heads { .. } => "Heads",
        ProblemError::Empty { .. } => "Empty",
        ProblemError::Extent { .. } => "Extent",
        ProblemError::TooLarge { .. } => "TooLarge",
        ProblemError::InnermostStride { .. } => "InnermostStride",
        ProblemError::OverlappingOutput { .. } => "OverlappingOutput",
        ProblemError::BufferTooSmall { .. } => "BufferTooSmall",
        ProblemError::LseLength { .. } => "LseLength",
        ProblemError::OutOfMemory { .. } => "OutOfMemory",
        ProblemError::DType { .. } => "DType",
        ProblemError::OtherDType { .. } => "OtherDType",
        ProblemError::Part(PartError::Count { .. }) => "PartCount",
        ProblemError::Part(PartError::Buffers { .. }) => "PartBuffers",
        ProblemError::Part(PartError::Layout { .. }) => "PartLayout",
        ProblemError::Part(PartError::Batch { .. }) => "PartBatch",
        ProblemError::Moe(_) => "Moe",
        ProblemError::Grouped(_) => "Grouped",
        ProblemError::Bias(_) => "Bias",
        ProblemError::Scales(_) => "Scales",
        ProblemError::Scale(_) => "Scale",
        ProblemError::Softcap(_) => "Softcap",
        ProblemError::OutDType { .. } => "OutDType",
        ProblemError::NarrowOut { .. } => "NarrowOut",
        ProblemError::Narrow { .. } => "Narrow",
        ProblemError::ScaledDType { .. } => "ScaledDType",
        ProblemError::KeyDType { .. } => "KeyDType",
        ProblemError::OtherFactors { .. } => "OtherFactors",
        ProblemError::FactorCount { .. } => "FactorCount",
        ProblemError::Factor { .. } => "Factor",
        ProblemError::AccumulateDType { .. } => "AccumulateDType",
        ProblemError::AccumulateLse => "AccumulateLse",
        ProblemError::GradDType { .. } => "GradDType",
        ProblemError::RowSumsLength { .. } => "RowSumsLength",
        ProblemError::OtherRowTerms { .. } => "OtherRowTerms",
        ProblemError::SinkGradients { .. } => "SinkGradients",
        ProblemError::OtherLengths { .. } => "OtherLengths",
        ProblemError::OtherSinks { .. } => "OtherSinks",
        ProblemError::Dropout(_) => "Dropout",
        ProblemError::DropoutWith(_) => "DropoutWith",
        ProblemError::NoSeed => "NoSeed",
        ProblemError::SinkCount { .. } => "SinkCount",
        ProblemError::Sink { .. } => "Sink",
        ProblemError::LengthCount { .. } => "LengthCount",
        ProblemError::LengthTooLong { .. } => "LengthTooLong",
        ProblemError::RaggedBatch { .. } => "RaggedBatch",
        ProblemError::RaggedOffsets { .. } => "RaggedOffsets",
        ProblemError::RaggedCount { .. } => "RaggedCount",
        ProblemError::EmptyPages { .. } => "EmptyPages",
        ProblemError::PagesWithoutLengths => "PagesWithoutLengths",
        ProblemError::QueriesWithoutPages => "QueriesWithoutPages",
        ProblemError::TableTooLarge { .. } => "TableTooLarge",
        ProblemError::TableLength { .. } => "TableLength",
        ProblemError::OtherTable { .. } => "OtherTable",
        ProblemError::PageNumber { .. } => "PageNumber",
        ProblemError::PagedGradients => "PagedGradients",
        ProblemError::SlotsAndTable => "SlotsAndTable",
        ProblemError::SlotsWithoutPositions => "SlotsWithoutPositions",
        ProblemError::SlotCount { .. } => "SlotCount",
        ProblemError::QueriesUnturned => "QueriesUnturned",
        ProblemError::RotaryDim { .. } => "RotaryDim",
        ProblemError::RotaryPositions { .. } => "RotaryPositions",
        ProblemError::OtherRotary { .. } => "OtherRotary",
        ProblemError::OtherQueries { .. } => "OtherQueries",
    }
}

const HUGE: usize = usize::MAX / 2;

/// What is tried, the error it must be, what its message must say.
type Row = (Attempt, &'static str, &'static str);

/// Extents that do not fit each other.
#[rustfmt::skip] // a table: one attempt, one expectation per line
fn wrong_extents() -> Vec<Row> {
    vec![
        (refused(|s| s.k = dense([3, 2, 16, 64])), "Mismatch", "k has batch 3 but 2 is needed"),
        (refused(|s| s.k = dense([2, 2, 16, 32])), "Mismatch", "k has dim 32 but 64 is needed"),
        (refused(|s| s.v = dense([1, 2, 16, 64])), "Mismatch", "v has batch 1"),
        (refused(|s| s.v = dense([2, 4, 16, 64])), "Mismatch", "to match k (k 2x2x16x64, v 2x4x16x64)"),
        (refused(|s| s.v = dense([2, 2, 15, 64])), "Mismatch", "v has sequence 15 but 16 is needed"),
        (refused(|s| s.out = Some(dense([2, 4, 9, 64]))), "Mismatch", "out has sequence 9 but 8"),
        (refused(|s| s.out = Some(dense([2, 2, 8, 64]))), "Mismatch", "out has heads 2 but 4"),
        (refused(|s| s.out = Some(dense([2, 4, 8, 65]))), "Mismatch", "to match v"),
        (refused(|s| s.q = dense([2, 3, 8, 64])), "Heads", "3 query heads cannot share 2"),
        (refused(|s| s.q = dense([2, 1, 8, 64])), "Heads", "multiple of heads of k"),
        (refused(|s| s.q = dense([2, 0, 8, 64])), "Empty", "q is 2x0x8x64"),
        (refused(|s| s.k = dense([2, 0, 16, 64])), "Empty", "k is 2x0x16x64"),
        (refused(|s| s.v = dense([2, 2, 16, 0])), "Empty", "heads and dim must be at least 1"),
        (refused(|s| s.q = repeated([2, 4, MAX_EXTENT + 1, 64])), "Extent", "no extent may exceed 2147483647"),
        (refused(|s| s.k = repeated([2, 2, MAX_EXTENT + 1, 64])), "Extent", "k is"),
    ]
}

/// Layouts and buffers that cannot be.
#[rustfmt::skip] // a table: one attempt, one expectation per line
fn wrong_memory() -> Vec<Row> {
    vec![
        (rows_overflow(), "TooLarge", "2147483647x2147483647x2147483647x1"),
        (strided([2, 2, 2, 8], [HUGE, HUGE, HUGE, 1]), "TooLarge", "check its extents and strides"),
        (strided([1, 1, 1, 8], [usize::MAX, 0, 0, 1]), "TooLarge", "exceeds the address space"),
        (strided([2, 1, 0, 8], [1 << 62, 0, 0, 1]), "TooLarge", "2x1x0x8"),
        (Layout::bhsd(Dims::new(HUGE, HUGE, HUGE, HUGE)).map(drop), "TooLarge", "exceeds the address space"),
        (Layout::bshd(Dims::new(1, 1 << 40, 1 << 40, 1)).map(drop), "TooLarge", "exceeds the address space"),
        (strided([1, 1, 4, 8], [0, 0, 8, 2]), "InnermostStride", "is 2 but must be 1"),
        (strided([1, 1, 4, 8], [0, 0, 1, 0]), "InnermostStride", "make the tensor contiguous"),
        (refused(|s| s.out = Some(repeated([2, 4, 8, 64]))), "OverlappingOutput", "give every position its own"),
        (overlapping_view(), "OverlappingOutput", "[0, 0, 4, 1]"),
        (bound(4095, 4096, 64), "BufferTooSmall", "q holds 4095 elements but its layout reaches 4096"),
        (bound(4096, 4000, 64), "BufferTooSmall", "out holds 4000"),
        (TensorView::bhsd(&[0f32; 7], [1, 1, 2, 4]).map(drop), "BufferTooSmall", "pass a larger buffer"),
        (Tensor::bhsd(vec![0f32; 7], [1, 1, 2, 4]).map(drop), "BufferTooSmall", "7 elements"),
        (bound(4096, 4096, 63), "LseLength", "lse holds 63 values but the problem has 64 rows"),
        (bound(4096, 4096, 65), "LseLength", "65"),
        (Tensor::<f32>::zeros(dense([1, 1, 1 << 29, 1 << 29])).map(drop), "OutOfMemory", "1152921504606846976 bytes"),
        (bound_as_f16(), "DType", "k is f16 but q is f32"),
    ]
}

/// Options and lengths.
#[rustfmt::skip] // a table: one attempt, one expectation per line
fn wrong_options() -> Vec<Row> {
    vec![
        (refused(|s| s.scale = Some(0.0)), "Scale", "scale 0 must be finite and positive"),
        (refused(|s| s.scale = Some(-1.0)), "Scale", "omit it for 1/sqrt(dim)"),
        (refused(|s| s.scale = Some(f32::NAN)), "Scale", "NaN"),
        (refused(|s| s.scale = Some(f32::INFINITY)), "Scale", "inf"),
        (refused(|s| s.softcap = Some(0.0)), "Softcap", "omit it for no softcap"),
        (refused(|s| s.softcap = Some(f32::NAN)), "Softcap", "NaN"),
        (refused(|s| s.dropout = Some(Dropout::new(1.0))), "Dropout", "dropout 1 must be at least 0 and below 1"),
        (refused(|s| s.dropout = Some(Dropout::new(f32::NAN))), "Dropout", "NaN"),
        (refused(|s| (s.dropout, s.accumulate) = (Some(Dropout::new(0.5)), true)), "DropoutWith", "accumulated results"),
        (refused(|s| (s.dropout, s.dtype) = (Some(Dropout::new(0.5)), DType::E4M3)), "DropoutWith", "8-bit tensors"),
        (mixed_up(Spec { dropout: Some(Dropout::new(0.5)), ..good() }, Lengths::Uniform, None), "NoSeed", "give one"),
        (mixed_up(Spec { dropout: Some(Dropout::new(0.0)), ..good() }, Lengths::keys([1, 2]), None), "OtherLengths", "planned for"),
        (sinks(&[0.0; 3]), "SinkCount", "3 sinks for 4 query heads"),
        (sinks(&[0.0, 0.0, f32::NAN, 0.0]), "Sink", "sink NaN of head 2"),
        (sinks(&[f32::INFINITY; 4]), "Sink", "NaN or infinity"),
        (lengths(Lengths::keys([1])), "LengthCount", "1 used lengths for k but a batch of 2"),
        (lengths(Lengths::used([1; 3], [1; 2])), "LengthCount", "for q"),
        (lengths(Lengths::keys([16, 17])), "LengthTooLong", "batch entry 1 uses 17 rows of k, which has 16"),
        (lengths(Lengths::used([u32::MAX, 1], [1, 1])), "LengthTooLong", "rows of q"),
        (lengths(Lengths::ragged([0, 8], [0, 16])), "RaggedBatch", "q has batch 2"),
        (packed(&[0, 9], &[0, 16]), "RaggedOffsets", "offset 1 of q"),
        (packed(&[1, 8], &[0, 16]), "RaggedOffsets", "offset 0 of q is wrong: offsets must start at 0"),
        (packed(&[0, 5, 4, 8], &[0, 1, 2, 16]), "RaggedOffsets", "offset 2 of q"),
        (packed(&[], &[]), "RaggedOffsets", "of q"),
        (packed(&[0, 8], &[0]), "RaggedOffsets", "of k"),
        (packed(&[0, 4, 8], &[0, 16]), "RaggedCount", "3 query offsets but 2 key offsets"),
        (mixed_up(good(), Lengths::keys([1, 2]), None), "OtherLengths", "bind the lengths it was planned for"),
        (mixed_up(good(), Lengths::Uniform, Some([0.0; 4].into())), "OtherSinks", "has no sinks but the call passes some"),
        (mixed_up(Spec { sinks: Some(DType::F32), ..good() }, Lengths::Uniform, None), "OtherSinks", "passes none"),
        (refused(|s| s.out_dtype = Some(DType::F16)), "OutDType", "the output is f16 but q is f32"),
        (refused(|s| (s.dtype, s.accumulate) = (DType::BF16, true)), "AccumulateDType", "accumulated in f32, not bf16"),
        (accumulated_without_lse(), "AccumulateLse", "pass lse"),
    ]
}

/// Two parts of 2x2x4x8 in one tensor, parsed with a change.
fn merged(change: impl Fn(&mut MergeSpec)) -> Result<MergeProblem, ProblemError> {
    let parts = Parts::Stacked { count: 2, stride: 128 };
    let mut spec = MergeSpec::new(DType::F32, dense([2, 2, 4, 8]), parts);
    change(&mut spec);
    spec.parse()
}

fn unmerged(change: impl Fn(&mut MergeSpec)) -> Attempt {
    merged(change).map(drop)
}

/// Binds so many elements of parts, their LSE, the output and its LSE to two stacked parts.
fn merge_bound([parts, lses, out, lse]: [usize; 4]) -> Attempt {
    let problem = merged(|_| {})?;
    let (parts, lses) = (vec![0f32; parts], vec![0f32; lses]);
    let (mut out, mut lse) = (vec![0f32; out], vec![0f32; lse]);
    let parts = [Data::F32(&parts)];
    MergeCall::bind(&problem, &parts, &[&lses], DataMut::F32(&mut out), Some(&mut lse)).map(drop)
}

/// Binds tensors and LSE of two listed parts, of which some may be missing.
fn merge_listed(part: Data<'_>, parts: usize, lses: usize) -> Attempt {
    let problem = merged(|s| s.parts = Parts::Listed(2))?;
    let (lse, mut out) = ([0f32; 16], vec![0f32; 128]);
    MergeCall::bind(&problem, &vec![part; parts], &vec![&lse[..]; lses], DataMut::F32(&mut out), None)
        .map(drop)
}

/// Merging.
#[rustfmt::skip] // a table: one attempt, one expectation per line
fn wrong_merges() -> Vec<Row> {
    let (wide, narrow) = (vec![0f32; 128], vec![f16::ZERO; 128]);
    vec![
        (unmerged(|s| s.parts = Parts::Listed(0)), "PartCount", "0 parts cannot be merged: give 1 to 16"),
        (unmerged(|s| s.parts = Parts::Listed(17)), "PartCount", "stack them in one tensor"),
        (unmerged(|s| s.parts = Parts::Stacked { count: 0, stride: 1 }), "PartCount", "0 parts"),
        (unmerged(|s| s.parts = Parts::Stacked { count: 3, stride: HUGE }), "TooLarge", "2x2x4x8"),
        (unmerged(|s| (s.part, s.out) = (dense([2, 0, 4, 8]), None)), "Empty", "a part is 2x0x4x8"),
        (unmerged(|s| s.part = repeated([2, 2, MAX_EXTENT + 1, 8])), "Extent", "a part is"),
        (unmerged(|s| s.out = Some(dense([2, 2, 4, 9]))), "Mismatch", "out has dim 9 but 8 is needed"),
        (unmerged(|s| s.out = Some(repeated([2, 2, 4, 8]))), "OverlappingOutput", "its own elements"),
        (merge_bound([255, 32, 128, 16]), "BufferTooSmall", "a part holds 255 elements but its layout reaches 256"),
        (merge_bound([256, 31, 128, 16]), "LseLength", "lse holds 31 values"),
        (merge_bound([256, 32, 127, 16]), "BufferTooSmall", "out holds 127"),
        (merge_bound([256, 32, 128, 15]), "LseLength", "16 rows"),
        (merge_listed(Data::F16(&narrow), 2, 2), "OtherDType", "a part is f16 but the problem expects f32"),
        (merge_listed(Data::F32(&wide), 1, 2), "PartBuffers", "1 buffers for a part"),
        (merge_listed(Data::F32(&wide), 2, 3), "PartBuffers", "3 buffers for the lse of a part"),
        (Err(ProblemError::Part(PartError::Layout { part: 3 })), "PartLayout", "part 3 differs from part 0"),
        (Err(ProblemError::Part(PartError::Batch { batch: 5, count: 2 })), "PartBatch", "batch 5 cannot be split into 2"),
    ]
}

#[test]
fn parts_that_fit_are_bound() {
    assert_eq!(merge_bound([256, 32, 128, 16]), Ok(()));
    assert_eq!(merge_listed(Data::F32(&[0.0; 128]), 2, 2), Ok(()));
    let empty = merged(|s| s.part = dense([0, 2, 4, 8])).unwrap();
    assert_eq!((empty.rows(), empty.out().span()), (0, 0));
}

/// The gradients of the good problem, parsed with a change.
fn backward(change: impl Fn(&mut BackwardSpec)) -> Result<BackwardProblem, ProblemError> {
    let mut spec = BackwardSpec::new(good());
    change(&mut spec);
    spec.parse()
}

fn ungraded(change: impl Fn(&mut BackwardSpec)) -> Attempt {
    backward(change).map(drop)
}

/// Binds so many elements of dO, of the LSE, of the row sums (or an output where `None`) and of dQ.
fn grad_bound(
    problem: &BackwardProblem,
    d_out: usize,
    lse: usize,
    sums: Option<usize>,
    dq: usize,
) -> Attempt {
    let zeros = vec![0f32; 4096];
    let [mut dq, mut dk, mut dv] = [dq, 4096, 4096].map(|len| vec![0f32; len]);
    let terms = sums.map_or(RowTerms::Out(Data::F32(&zeros)), |len| RowTerms::Sums(&zeros[..len]));
    let (qkv, d_out) = ([Data::F32(&zeros); 3], Data::F32(&zeros[..d_out]));
    let inputs = BackwardInputs { qkv, lse: &zeros[..lse], terms, d_out };
    let qkv = [&mut dq, &mut dk, &mut dv].map(|grad| DataMut::F32(grad));
    BackwardCall::bind(problem, Values::NONE, inputs, GradientsMut { qkv, sinks: None }).map(drop)
}

/// Binds so many gradients of sinks, with or without sinks.
fn sinks_graded(given: usize, sinks: Option<Arc<[f32]>>) -> Attempt {
    let values = Values { sinks, ..Values::default() };
    let problem = BackwardSpec::new(good().with(&values)).parse()?;
    let (zeros, mut d_sinks) = (vec![0f32; 4096], vec![0f32; given]);
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| zeros.clone());
    let (data, lse) = (Data::F32(&zeros), &zeros[..64]);
    let inputs = BackwardInputs { qkv: [data; 3], lse, terms: RowTerms::Out(data), d_out: data };
    let qkv = [&mut dq, &mut dk, &mut dv].map(|grad| DataMut::F32(grad));
    BackwardCall::bind(&problem, &values, inputs, GradientsMut { qkv, sinks: Some(&mut d_sinks) }).map(drop)
}

/// Gradients.
#[rustfmt::skip] // a table: one attempt, one expectation per line
fn wrong_gradients() -> Vec<Row> {
    let computed = backward(|_| {}).unwrap();
    let given = backward(|s| s.row_sums = RowSums::Given).unwrap();
    let narrow = backward(|s| s.forward.dtype = DType::BF16).unwrap();
    vec![
        (ungraded(|s| s.forward.scale = Some(0.0)), "Scale", "scale 0"),
        (ungraded(|s| s.d_out = Some(dense([2, 4, 8, 65]))), "Mismatch", "d_out has dim 65 but 64 is needed"),
        (ungraded(|s| s.dq = Some(dense([2, 4, 9, 64]))), "Mismatch", "dq has sequence 9 but 8"),
        (ungraded(|s| s.dk = Some(dense([2, 4, 16, 64]))), "Mismatch", "to match k"),
        (ungraded(|s| s.dv = Some(repeated([2, 2, 16, 64]))), "OverlappingOutput", "its own elements"),
        (ungraded(|s| s.grad_dtype = Some(DType::F16)), "GradDType", "the gradients are f16 but q is f32"),
        (ungraded(|s| (s.forward.dtype, s.accumulate) = (DType::F16, true)), "AccumulateDType", "not f16"),
        (grad_bound(&computed, 4095, 64, None, 4096), "BufferTooSmall", "d_out holds 4095"),
        (grad_bound(&computed, 4096, 63, None, 4096), "LseLength", "63 values"),
        (grad_bound(&computed, 4096, 64, None, 4095), "BufferTooSmall", "dq holds 4095"),
        (grad_bound(&computed, 4096, 64, Some(64), 4096), "OtherRowTerms", "expects the output but the call passes row sums"),
        (grad_bound(&given, 4096, 64, None, 4096), "OtherRowTerms", "expects row sums"),
        (grad_bound(&given, 4096, 64, Some(65), 4096), "RowSumsLength", "row sums hold 65 values"),
        (grad_bound(&narrow, 4096, 64, None, 4096), "OtherDType", "q is f32 but the problem expects bf16"),
        (sinks_graded(4, None), "SinkGradients", "d_sinks holds 4 values but the problem has 0 sinks"),
        (sinks_graded(3, Some([0.0; 4].into())), "SinkGradients", "one per query head"),
    ]
}

#[test]
fn gradients_that_fit_are_bound() {
    let given = backward(|s| s.row_sums = RowSums::Given).unwrap();
    assert_eq!(grad_bound(&given, 4096, 64, Some(64), 4096), Ok(()));
    assert_eq!(sinks_graded(4, Some([0.0; 4].into())), Ok(()));
    // Whether forward accumulated is no part of its gradients; five products instead of two.
    let accumulated = backward(|s| (s.forward.accumulate, s.grad_dtype) = (true, Some(DType::F32))).unwrap();
    assert_eq!(accumulated, backward(|_| {}).unwrap());
    assert_eq!(accumulated.flops(), 2.5 * good().parse().unwrap().flops());
}

#[test]
fn every_error_is_provoked() {
    let tables = [
        wrong_extents(),
        wrong_memory(),
        wrong_options(),
        wrong_merges(),
        wrong_gradients(),
        pages::wrong_pages(),
        narrow::wrong_factors(),
        narrow::wrong_quantisation(),
        append::wrong_appends(),
    ];
    for (attempt, expected, says) in tables.into_iter().flatten() {
        let error = attempt.expect_err(expected);
        assert_eq!(name(&error), expected, "{error}");
        assert!(error.to_string().contains(says), "`{error}` does not say `{says}`");
    }
}

/// Extents of any size over one row.
fn repeated(dims: [usize; 4]) -> Layout {
    let [batch, heads, seq, dim] = dims;
    Layout::strided(Dims::new(batch, heads, seq, dim), [0, 0, 0, 1]).unwrap()
}

fn rows_overflow() -> Attempt {
    let all = repeated([MAX_EXTENT, MAX_EXTENT, MAX_EXTENT, 1]);
    Spec::new(DType::F32, all, all, all).parse().map(drop)
}

fn overlapping_view() -> Attempt {
    TensorViewMut::strided(&mut [0f32; 64], [1, 1, 3, 8], [0, 0, 4, 1]).map(drop)
}

#[test]
fn what_was_left_out_is_filled_in() {
    let problem = good().parse().unwrap();
    assert_eq!(problem.scale(), 0.125);
    assert_eq!(problem.out().strides(), [2048, 512, 64, 1]);
    assert_eq!(problem.spec().clone().parse().unwrap(), problem);
    assert_eq!((problem.group(), problem.rows(), problem.lse_index(1, 3, 7)), (2, 64, 63));
}

#[test]
fn a_minus_infinite_sink_and_empty_tensors_are_legal() {
    let nothing = [f32::NEG_INFINITY; 4];
    assert_eq!(sinks(&nothing), Ok(()));
    assert!(parse(|s| s.q = dense([2, 4, 0, 64])).is_ok());
    assert!(parse(|s| (s.k, s.v) = (dense([2, 2, 0, 64]), dense([2, 2, 0, 64]))).is_ok());
    let empty = dense([0, 2, 16, 64]);
    assert!(Spec::new(DType::F16, empty, empty, empty).parse().is_ok());
    assert!(Spec::new(DType::F16, empty, empty, empty).parse().unwrap().flops() == 0.0);
}

#[test]
fn work_counts_what_the_mask_shows() {
    let pairs =
        |change: fn(&mut Spec)| Instance::new(&parse(change).unwrap(), Values::NONE).unwrap().visible_pairs();
    assert_eq!(pairs(|_| {}), 2 * 4 * 8 * 16);
    // Bottom right: the first of 8 queries sees 9 of 16 keys, the last all.
    assert_eq!(pairs(|s| s.mask = Mask::CAUSAL), 2 * 4 * (9..=16).sum::<u64>());
    assert_eq!(pairs(|s| s.mask = Mask::CAUSAL.top_left()), 2 * 4 * (1..=8).sum::<u64>());
    let used = Values { lengths: Lengths::used([2, 0], [5, 16]), ..Values::default() };
    let problem = good().with(&used).parse().unwrap();
    assert_eq!(Instance::new(&problem, &used).unwrap().visible_pairs(), 4 * 2 * 5);
    assert_eq!(problem.flops(), parse(|_| {}).unwrap().flops(), "lengths are no part of a problem");
    assert_eq!(parse(|_| {}).unwrap().flops(), (2 * 4 * 8 * 16 * 2 * 128) as f64);
}

#[test]
fn elements_round_to_nearest_even_and_name_themselves() {
    for dtype in DType::ALL {
        assert_eq!(dtype.name().parse::<DType>(), Ok(dtype));
    }
    assert!("f64".parse::<DType>().unwrap_err().contains("use f16, bf16, f32"));
    assert_eq!(DType::F16.round(1.0 + 1.0 / 2048.0), 1.0);
    assert_eq!(DType::BF16.round(1.0 + 3.0 / 256.0), 1.0 + 1.0 / 64.0);
    assert_eq!(<f16 as Element>::from_f32(65520.0).to_f32(), f32::INFINITY);
}
