//! What can be wrong with the arguments of an operation.

use std::fmt;

use crate::{dtype::DType, layout::Dims, lengths::Sequences, moe::MoeError};

/// A tensor of the operation, for messages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Operand {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// The result.
    Out,
    /// The log-sum-exp of each row.
    Lse,
    /// Used lengths or offsets of the queries.
    LengthsQ,
    /// Used lengths or offsets of keys and values.
    LengthsKv,
    /// The extra logit of each head.
    Sinks,
    /// A partial result.
    Part,
    /// The log-sum-exp of a partial result.
    PartLse,
    /// The gradient of the result.
    DOut,
    /// The gradient of the queries.
    DQ,
    /// The gradient of the keys.
    DK,
    /// The gradient of the values.
    DV,
    /// The sums of each row of the result times its gradient.
    RowSums,
    /// The gradient of the sinks.
    DSinks,
    /// Tokens of a mixture of experts.
    X,
    /// Matrices of the first product of experts.
    GateUp,
    /// Matrices of the second product of experts.
    Down,
    /// Matrices of experts whose part is not known yet.
    Experts,
    /// What is added to the products of experts.
    Biases,
    /// The expert through which every token goes.
    Shared,
    /// The matrix of its first product.
    SharedGateUp,
    /// The matrix of its second product.
    SharedDown,
    /// Numbers of each token's experts.
    Ids,
    /// What each of them counts for.
    RoutingWeights,
    /// What experts are chosen by.
    Logits,
    /// What is added for the choice of experts.
    RoutingBias,
    /// A tensor whose part is not known yet.
    Tensor,
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Q => "q",
            Self::K => "k",
            Self::V => "v",
            Self::Out => "out",
            Self::Lse => "lse",
            Self::LengthsQ => "query lengths",
            Self::LengthsKv => "key lengths",
            Self::Sinks => "sinks",
            Self::Part => "a part",
            Self::PartLse => "the lse of a part",
            Self::DOut => "d_out",
            Self::DQ => "dq",
            Self::DK => "dk",
            Self::DV => "dv",
            Self::RowSums => "row sums",
            Self::DSinks => "d_sinks",
            Self::X => "x",
            Self::GateUp => "gate_up",
            Self::Down => "down",
            Self::Experts => "the experts' matrices",
            Self::Biases => "biases",
            Self::Shared => "the shared expert",
            Self::SharedGateUp => "the shared expert's gate_up",
            Self::SharedDown => "the shared expert's down",
            Self::Ids => "expert ids",
            Self::RoutingWeights => "routing weights",
            Self::Logits => "router logits",
            Self::RoutingBias => "the router's bias",
            Self::Tensor => "the tensor",
        })
    }
}

/// A dimension of a tensor, for messages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Axis {
    /// Batch entries.
    Batch,
    /// Heads.
    Heads,
    /// Positions.
    Sequence,
    /// Features.
    Dim,
}

impl Axis {
    /// All axes, outermost first.
    pub const ALL: [Self; 4] = [Self::Batch, Self::Heads, Self::Sequence, Self::Dim];
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Batch => "batch",
            Self::Heads => "heads",
            Self::Sequence => "sequence",
            Self::Dim => "dim",
        })
    }
}

/// Arguments that do not describe an attention problem.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProblemError {
    /// K, V or the output has another extent than Q or K demand.
    #[error(
        "{operand} has {axis} {got} but {expected} is needed, because {because} has it ({because} {other}, {operand} {dims}); \
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
        "a {dims} tensor with strides {strides:?} is larger than memory can be; check its extents and strides"
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
        "the output's strides {strides:?} make positions share memory; give every position its own elements"
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
    /// There is no memory for a tensor that was to be allocated.
    #[error(
        "no memory for {bytes} bytes of a {dims} tensor; use smaller tensors or fewer batch entries at a time"
    )]
    OutOfMemory {
        /// Bytes asked for.
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
    #[error("{operand} is {got} but the problem says {expected}; bind a tensor of that type")]
    OtherDType {
        /// The tensor that differs.
        operand: Operand,
        /// Its type.
        got: DType,
        /// What the problem says.
        expected: DType,
    },
    /// No parts to merge, or too many.
    #[error(
        "{given} parts cannot be merged: give 1 to {max}, and stack them in one tensor if there are more than 16"
    )]
    PartCount {
        /// Parts given.
        given: usize,
        /// Most parts.
        max: usize,
    },
    /// Another number of parts, or of their LSE, than the problem says.
    #[error(
        "{given} buffers for {operand} but the problem asks for {expected}; give each part its rows and its lse"
    )]
    PartBuffers {
        /// What was given.
        operand: Operand,
        /// How many.
        given: usize,
        /// How many are needed.
        expected: usize,
    },
    /// Parts that do not lie alike.
    #[error("part {part} has another shape or other strides than part 0; give all parts one layout")]
    PartLayout {
        /// Number of the part, from 0.
        part: usize,
    },
    /// A stack of parts that cannot be divided.
    #[error(
        "a stack of batch {batch} does not hold {count} parts of equal batch; stack the parts along the batch"
    )]
    PartBatch {
        /// Batch of the stack.
        batch: usize,
        /// Parts in it.
        count: usize,
    },
    /// The scale is not a positive number.
    #[error("scale {0} must be finite and positive; leave it out for 1/sqrt(dim)")]
    Scale(f32),
    /// The softcap is not a positive number.
    #[error("softcap {0} must be finite and positive; leave it out for none")]
    Softcap(f32),
    /// An output type that kernels do not write.
    #[error("the output is {out} but q is {dtype}; give it q's type or f32")]
    OutDType {
        /// The output's type.
        out: DType,
        /// The type of Q, K and V.
        dtype: DType,
    },
    /// A sum that would be rounded at every step.
    #[error("results are accumulated in f32, not {out}; ask for an f32 output")]
    AccumulateDType {
        /// The output's type.
        out: DType,
    },
    /// Accumulating without the weights of what is there.
    #[error(
        "accumulating needs the LSE of what the output holds already; pass lse (minus infinity for nothing)"
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
    #[error("the problem asks for {} but the call brings {}; bind what it was planned for",
        if *given { "the output" } else { "row sums" }, if *given { "row sums" } else { "the output" })]
    OtherRowTerms {
        /// Whether the call brings row sums.
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
        "the problem asks for {asked:?} but the call brings {given:?}; bind the lengths it was planned for"
    )]
    OtherLengths {
        /// What the call brings.
        given: Sequences,
        /// What the problem asks for.
        asked: Sequences,
    },
    /// Sinks where the problem has none, or none where it has.
    #[error("the problem has {} but the call brings {}; bind what it was planned for",
        if *given { "no sinks" } else { "sinks" }, if *given { "some" } else { "none" })]
    OtherSinks {
        /// Whether the call brings sinks.
        given: bool,
    },
    /// Sinks that do not fit the heads.
    #[error("{given} sinks for {heads} query heads; give one logit per query head")]
    SinkCount {
        /// Sinks given.
        given: usize,
        /// Heads of Q.
        heads: usize,
    },
    /// A sink that is no logit.
    #[error("sink {value} of head {head} must be a number below infinity")]
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
    /// Offsets that do not cut the rows into sequences.
    #[error(
        "offset {at} of {operand} is wrong: offsets start at 0, do not decrease, and end at its {seq} rows"
    )]
    RaggedOffsets {
        /// The tensor.
        operand: Operand,
        /// Number of the first offset that is wrong, from 0.
        at: usize,
        /// Rows of the tensor.
        seq: usize,
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
}
