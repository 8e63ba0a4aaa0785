//! What can be wrong with the arguments of an operation.

use crate::{
    bias::BiasError, dtype::DType, grouped::GroupedError, layout::Dims, lengths::Sequences, merge::PartError,
    moe::MoeError, quantise::ScaleError,
};

pub use crate::operand::{Axis, Operand};

/// What a problem or a call says of a page table, for messages.
fn pages_for_each(columns: &Option<usize>) -> String {
    columns.map_or_else(|| "no page table".to_owned(), |columns| format!("{columns} pages for each sequence"))
}

/// Arguments that do not describe an attention problem.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProblemError {
    /// K, V or the output has another extent than Q or K demand.
    #[error(
        "{operand} has {axis} {got} but {expected} is needed to match {because} ({because} {other}, {operand} {dims}); \
         pass tensors as batch x heads x sequence x dim"
    )]
    Mismatch {
        /// The tensor that does not fit.
        operand: Operand,
        /// The extent that does not fit.
        axis: Axis,
        /// Its value.
        got: usize,
        /// What it should be.
        expected: usize,
        /// Which tensor decides.
        because: Operand,
        /// Extents of the tensor that decides.
        other: Dims,
        /// Extents of the tensor that does not fit.
        dims: Dims,
    },
    /// Query heads are not a multiple of key heads.
    #[error(
        "{heads_q} query heads cannot share {heads_kv} key heads evenly; heads of q must be a multiple of heads of k"
    )]
    Heads {
        /// Heads of Q.
        heads_q: usize,
        /// Heads of K and V.
        heads_kv: usize,
    },
    /// A tensor without heads or features.
    #[error("{operand} is {dims}: heads and dim must be at least 1 (batch and sequence may be 0)")]
    Empty {
        /// The tensor.
        operand: Operand,
        /// Its extents.
        dims: Dims,
    },
    /// An extent beyond what kernels index with.
    #[error("{operand} is {dims}: no extent may exceed {max}")]
    Extent {
        /// The tensor.
        operand: Operand,
        /// Its extents.
        dims: Dims,
        /// The largest extent allowed.
        max: usize,
    },
    /// Extents times strides overflow.
    #[error(
        "a {dims} tensor with strides {strides:?} exceeds the address space; check its extents and strides"
    )]
    TooLarge {
        /// The extents.
        dims: Dims,
        /// The strides in elements.
        strides: [usize; 4],
    },
    /// The features of a head are not contiguous.
    #[error("the innermost stride is {stride} but must be 1; make the tensor contiguous along dim")]
    InnermostStride {
        /// The stride given.
        stride: usize,
    },
    /// Positions of an output share memory.
    #[error(
        "elements of the output overlap in memory with strides {strides:?}; give every position its own elements"
    )]
    OverlappingOutput {
        /// The strides in elements.
        strides: [usize; 4],
    },
    /// A buffer does not hold what its layout reaches.
    #[error(
        "the buffer of {operand} holds {len} elements but its layout reaches {needed}; pass a larger buffer"
    )]
    BufferTooSmall {
        /// The tensor.
        operand: Operand,
        /// Elements needed.
        needed: usize,
        /// Elements there.
        len: usize,
    },
    /// The LSE buffer has the wrong size.
    #[error("lse holds {len} values but the problem has {needed} rows (batch x heads x sequence)")]
    LseLength {
        /// Rows of the problem.
        needed: usize,
        /// Values there.
        len: usize,
    },
    /// Not enough memory to allocate a tensor.
    #[error(
        "cannot allocate {bytes} bytes for a {dims} tensor; use smaller tensors or fewer batch entries at a time"
    )]
    OutOfMemory {
        /// Requested bytes.
        bytes: usize,
        /// Extents of the tensor.
        dims: Dims,
    },
    /// Tensors of different element types.
    #[error("{operand} is {got} but q is {expected}; convert them to one element type")]
    DType {
        /// The tensor that differs.
        operand: Operand,
        /// Its type.
        got: DType,
        /// The type of Q.
        expected: DType,
    },
    /// A tensor of another type than the problem says.
    #[error("{operand} is {got} but the problem expects {expected}; bind a tensor of that type")]
    OtherDType {
        /// The tensor that differs.
        operand: Operand,
        /// Its type.
        got: DType,
        /// What the problem says.
        expected: DType,
    },
    /// The scale is not a positive number.
    #[error("scale {0} must be finite and positive; omit it for 1/sqrt(dim)")]
    Scale(f32),
    /// The softcap is not a positive number.
    #[error("softcap {0} must be finite and positive; omit it for no softcap")]
    Softcap(f32),
    /// An output type that kernels do not write.
    #[error("the output is {out} but q is {dtype}; give it q's type or f32")]
    OutDType {
        /// The output's type.
        out: DType,
        /// The type of Q, K and V.
        dtype: DType,
    },
    /// A result in 8 bits.
    #[error("an {out} output would lose precision; ask for f16, bf16 or f32")]
    NarrowOut {
        /// The output's type.
        out: DType,
    },
    /// 8-bit tensors where an operation does not take them.
    #[error("{operation} does not support {dtype} tensors; convert them to f16, bf16 or f32")]
    Narrow {
        /// The operation.
        operation: &'static str,
        /// The tensors' type.
        dtype: DType,
    },
    /// Keys of a type that queries do not take.
    #[error("k and v are {kv} but q is {dtype}; convert them, or use 16-bit queries over an e4m3 cache")]
    KeyDType {
        /// The type of K and V.
        kv: DType,
        /// The type of Q.
        dtype: DType,
    },
    /// Factors of tensors that have bits enough.
    #[error("{dtype} tensors have no factors, which are for e4m3 and e5m2 tensors; omit them")]
    ScaledDType {
        /// The tensors' type.
        dtype: DType,
    },
    /// Factors where the problem has none, none where it has, or of another kind.
    #[error("the call passes {}; bind what it was planned for",
        if *given { "factors that the problem does not have" } else { "no factors but the problem has some" })]
    OtherFactors {
        /// Whether the call has factors.
        given: bool,
    },
    /// The wrong number of factors.
    #[error(
        "{given} factors for {operand} but {needed} are needed; give one, or one per batch entry and key head, or with blocks one per block"
    )]
    FactorCount {
        /// The tensor.
        operand: Operand,
        /// Factors given.
        given: usize,
        /// Factors needed.
        needed: usize,
    },
    /// A factor that is none.
    #[error("factor {value} of {operand} must be finite and positive")]
    Factor {
        /// The tensor.
        operand: Operand,
        /// The factor.
        value: f32,
    },
    /// A sum that would be rounded at every step.
    #[error("results are accumulated in f32, not {out}; give an f32 out")]
    AccumulateDType {
        /// The output's type.
        out: DType,
    },
    /// Accumulating without the weights of what is there.
    #[error(
        "accumulating needs the LSE of what the output already holds; pass lse (minus infinity where it holds nothing)"
    )]
    AccumulateLse,
    /// A type of gradients that kernels do not write.
    #[error("the gradients are {grad} but q is {dtype}; give them q's type or f32")]
    GradDType {
        /// The gradients' type.
        grad: DType,
        /// The type of Q, K and V.
        dtype: DType,
    },
    /// The buffer of row sums has the wrong size.
    #[error("row sums hold {len} values but the problem has {needed} rows (batch x heads x sequence)")]
    RowSumsLength {
        /// Rows of the problem.
        needed: usize,
        /// Values there.
        len: usize,
    },
    /// The output where the problem asks for row sums, or the other way round.
    #[error("the problem expects {} but the call passes {}; bind what it was planned for",
        if *given { "the output" } else { "row sums" }, if *given { "row sums" } else { "the output" })]
    OtherRowTerms {
        /// Whether the call has row sums.
        given: bool,
    },
    /// Gradients of sinks that do not fit the sinks.
    #[error(
        "d_sinks holds {given} values but the problem has {expected} sinks; give one per query head, or no d_sinks"
    )]
    SinkGradients {
        /// Values there.
        given: usize,
        /// Sinks of the problem.
        expected: usize,
    },
    /// Lengths of another kind than the problem asks for.
    #[error(
        "the problem expects {asked:?} but the call passes {given:?}; bind the lengths it was planned for"
    )]
    OtherLengths {
        /// What the call has.
        given: Sequences,
        /// What the problem asks for.
        asked: Sequences,
    },
    /// Sinks where the problem has none, or none where it has.
    #[error("the problem has {} but the call passes {}; bind what it was planned for",
        if *given { "no sinks" } else { "sinks" }, if *given { "some" } else { "none" })]
    OtherSinks {
        /// Whether the call has sinks.
        given: bool,
    },
    /// A probability that is not from 0 up to 1.
    #[error("dropout {0} must be at least 0 and below 1: the probability that a weight is dropped")]
    Dropout(f32),
    /// Dropout with something that is for inference.
    #[error("dropout cannot be combined with {0}; omit one of them")]
    DropoutWith(&'static str),
    /// Dropout without a seed.
    #[error("the problem has dropout but the call passes no seed; give one")]
    NoSeed,
    /// Sinks that do not fit the heads.
    #[error("{given} sinks for {heads} query heads; give one logit per query head")]
    SinkCount {
        /// Sinks given.
        given: usize,
        /// Heads of Q.
        heads: usize,
    },
    /// A sink that is not a valid logit.
    #[error("sink {value} of head {head} must not be NaN or infinity")]
    Sink {
        /// The head.
        head: usize,
        /// Its sink.
        value: f32,
    },
    /// The wrong number of used lengths.
    #[error("{given} used lengths for {operand} but a batch of {batch}; give one per batch entry")]
    LengthCount {
        /// The tensor.
        operand: Operand,
        /// Lengths given.
        given: usize,
        /// Batch of the tensor.
        batch: usize,
    },
    /// A used length beyond the sequence.
    #[error("batch entry {entry} uses {len} rows of {operand}, which has {seq}")]
    LengthTooLong {
        /// The tensor.
        operand: Operand,
        /// The batch entry.
        entry: usize,
        /// Its used length.
        len: u32,
        /// Rows of the tensor.
        seq: usize,
    },
    /// Packed tensors with a batch dimension.
    #[error("packed sequences need tensors of batch 1, but {operand} has batch {batch}")]
    RaggedBatch {
        /// The tensor.
        operand: Operand,
        /// Its batch.
        batch: usize,
    },
    /// Offsets that do not divide the rows into sequences.
    #[error(
        "offset {at} of {operand} is wrong: offsets must start at 0, not decrease, and end at its {seq} rows"
    )]
    RaggedOffsets {
        /// The tensor.
        operand: Operand,
        /// Number of the first offset that is wrong, from 0.
        at: usize,
        /// Rows of the tensor.
        seq: usize,
    },
    /// Pages that hold no rows.
    #[error(
        "k is {dims}: a page must hold at least one row; pass k and v as pages x heads x rows of a page x dim"
    )]
    EmptyPages {
        /// Extents of the keys.
        dims: Dims,
    },
    /// Pages without the number of keys in them.
    #[error("keys in pages need key lengths; pass one per sequence")]
    PagesWithoutLengths,
    /// Packed queries with key lengths, but keys that are not in pages.
    #[error(
        "packed queries with key lengths need a page table; pass one, or pack the keys and pass their offsets"
    )]
    QueriesWithoutPages,
    /// A table that memory cannot hold.
    #[error(
        "a page table of {rows} rows of {columns} numbers, {row_stride} apart, exceeds the address space; \
         check its extents and strides"
    )]
    TableTooLarge {
        /// Sequences.
        rows: usize,
        /// Pages of a sequence.
        columns: usize,
        /// Numbers from one row to the next.
        row_stride: usize,
    },
    /// A table of the wrong size.
    #[error(
        "the page table holds {given} numbers but there are {sequences} sequences of {columns} pages; \
         give one row of page numbers per sequence"
    )]
    TableLength {
        /// Numbers there.
        given: usize,
        /// Sequences of the problem.
        sequences: usize,
        /// Pages of a sequence.
        columns: usize,
    },
    /// A table where the problem has none, none where it has, or one of another width.
    #[error(
        "the problem has {} but the call passes {}; bind the page table it was planned for",
        pages_for_each(asked),
        pages_for_each(given)
    )]
    OtherTable {
        /// Pages of a sequence in the table that the call brings.
        given: Option<usize>,
        /// What the problem asks for.
        asked: Option<usize>,
    },
    /// A page that does not exist.
    #[error(
        "sequence {sequence} has keys in page {page} (column {column} of the table), but there are {pages} pages"
    )]
    PageNumber {
        /// The sequence.
        sequence: usize,
        /// The column of the table.
        column: usize,
        /// The number there.
        page: i32,
        /// Pages of K and V.
        pages: usize,
    },
    /// Gradients of keys that lie in pages.
    #[error("keys in pages have no gradients; gather the keys and values of each sequence first")]
    PagedGradients,
    /// Slots for a cache that a table describes.
    #[error("slots and a page table both say where rows go; pass one of them")]
    SlotsAndTable,
    /// Rotary embedding of rows without known positions.
    #[error(
        "slots do not give the positions that rotary embedding needs; rotate the keys first, or pass lengths instead of slots"
    )]
    SlotsWithoutPositions,
    /// The wrong number of slots.
    #[error("{given} slots for {rows} new rows; give one per row, -1 for none")]
    SlotCount {
        /// Slots given.
        given: usize,
        /// New rows.
        rows: usize,
    },
    /// Queries without anything to do with them.
    #[error("queries are only rotated here; pass cosines and sines, or omit the queries")]
    QueriesUnturned,
    /// A number of features that cannot be rotated.
    #[error("{dim} features cannot be rotated in pairs; give an even number from 2 to {most}, the dim of k")]
    RotaryDim {
        /// Features to turn.
        dim: usize,
        /// Features of a key.
        most: usize,
    },
    /// Tables of cosines and sines without positions, or with too many.
    #[error("cosines and sines of {positions} positions; give 1 to {most}")]
    RotaryPositions {
        /// Positions given.
        positions: usize,
        /// Most positions.
        most: usize,
    },
    /// Cosines and sines where the problem turns nothing, or none where it does.
    #[error("the problem rotates {} but the call passes {}; bind what it was planned for",
        if *given { "nothing" } else { "keys" }, if *given { "cosines and sines" } else { "no cosines and sines" })]
    OtherRotary {
        /// Whether the call brings them.
        given: bool,
    },
    /// Queries where the problem has none, or none where it has.
    #[error("the problem has {} but the call passes {}; bind what it was planned for",
        if *given { "no queries" } else { "queries" }, if *given { "some" } else { "none" })]
    OtherQueries {
        /// Whether the call brings some.
        given: bool,
    },
    /// Different numbers of query and key sequences.
    #[error("{q} query offsets but {kv} key offsets; every sequence needs both")]
    RaggedCount {
        /// Offsets of Q.
        q: usize,
        /// Offsets of K and V.
        kv: usize,
    },
    /// Arguments that do not describe a mixture of experts.
    #[error(transparent)]
    Moe(MoeError),
    /// Arguments that do not describe grouped products.
    #[error(transparent)]
    Grouped(GroupedError),
    /// Parts that cannot be merged.
    #[error(transparent)]
    Part(PartError),
    /// A bias that does not fit.
    #[error(transparent)]
    Bias(BiasError),
    /// Factors that cannot be.
    #[error(transparent)]
    Scales(ScaleError),
}
