//! The names of an operation's tensors in messages, and their dimensions.

use std::fmt;

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
    /// The numbers of the pages that hold a sequence's keys.
    Table,
    /// The cache of keys.
    CacheK,
    /// The cache of values.
    CacheV,
    /// The slots that new rows go to.
    Slots,
    /// Cosines and sines of positions.
    Rotary,
    /// The extra logit of each head.
    Sinks,
    /// What 8-bit tensors are multiplied by.
    Factors,
    /// What has been subtracted from tensors before they were rounded to 8 bits.
    Means,
    /// What is added to scores.
    Bias,
    /// What decides which weights are dropped.
    Seed,
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
    /// The left factor of grouped products.
    MatA,
    /// The right factor of grouped products.
    MatB,
    /// The end of each group.
    Offsets,
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
            Self::Table => "page table",
            Self::CacheK => "k_cache",
            Self::CacheV => "v_cache",
            Self::Slots => "slots",
            Self::Rotary => "cosines and sines",
            Self::Sinks => "sinks",
            Self::Factors => "factors",
            Self::Means => "means",
            Self::Bias => "the bias",
            Self::Seed => "the seed",
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
            Self::MatA => "mat_a",
            Self::MatB => "mat_b",
            Self::Offsets => "offsets",
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
