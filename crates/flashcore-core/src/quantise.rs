//! Quantising: a tensor becomes one of 8-bit floats with factors, so that a float times its factor is near the value.
//!
//! A factor maps the largest magnitude of its share of the tensor to the largest float, `max |x| / 448` for E4M3, and is
//! never below [`SMALLEST_FACTOR`], so that shares of zeros have a usable one and products of two stay normal numbers.
//! Numbers are rounded to nearest, ties to even. Infinities become the largest float and NaN stays NaN; neither affects
//! the factor.
//!
//! Keys may be centred: their mean over the used rows is subtracted from each head first, which reduces rounding error if
//! keys have a common part. Attention is unchanged, but the LSE of a query changes by `scale · q · mean`.
//!
//! [`QuantiseSpec::parse`] makes a [`QuantiseProblem`], which a backend computes over the memory of a [`QuantiseCall`].

use crate::{
    call::{Data, DataMut},
    dtype::DType,
    error::{Axis, Operand, ProblemError},
    layout::{Dims, Layout},
    lengths::{Index, check_used},
    problem::{MAX_EXTENT, check_axes},
    turned::turned_dims,
};

/// The smallest factor: 2⁻⁴⁸.
pub const SMALLEST_FACTOR: f32 = f32::from_bits((127 - 48) << 23);

/// Factors that cannot be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScaleError {
    /// A result of many bits.
    #[error("quantising gives e4m3 or e5m2 tensors, not {to}")]
    Wide {
        /// The type asked for.
        to: DType,
    },
    /// Blocks without rows.
    #[error("a block must have at least one row")]
    EmptyBlocks,
    /// Blocks of keys in pages.
    #[error("keys in pages cannot have factors per block; give factors per tensor or per head")]
    PagedBlocks,
    /// Heads that cannot share factors.
    #[error("{heads} heads cannot be split into groups of {group}; give a number that divides them")]
    Group {
        /// Heads that are to share one.
        group: usize,
        /// Heads of the tensor.
        heads: usize,
    },
    /// Heads that share factors of blocks or features.
    #[error("only factors per head can be shared by groups of heads; omit the group")]
    SharedBlocks,
    /// Values whose extents are not those of transposed ones.
    #[error(
        "turned values of {keys} keys need a multiple of 16 features, {} more rows, and keys padded to a multiple of {}, \
             not {dims}",
        crate::turned::COUNT_ROWS,
        crate::turned::TURNED_KEYS
    )]
    Turned {
        /// The extents given: batch, heads, rows, keys.
        dims: Dims,
        /// Keys of a head.
        keys: usize,
    },
    /// Transposed values for a problem that reads none.
    #[error("turned values need e4m3 queries and keys, neither packed nor in pages")]
    NotTurned,
    /// A tensor that cannot be transposed when it is quantised.
    #[error(
        "only e4m3 tensors with a multiple of 16 features can be turned, with factors per tensor, head or channel and means kept"
    )]
    TurnedAs,
    /// Used lengths where the problem has none, or none where it has.
    #[error("the call passes {} lengths but the problem has {}; bind what it was planned for",
        if *given { "used" } else { "no" }, if *given { "none" } else { "some" })]
    OtherLengths {
        /// Whether the call brings them.
        given: bool,
    },
    /// Means where the problem has none, or none where it has.
    #[error("the call has {} for means but the problem {}; bind what it was planned for",
        if *given { "room" } else { "no room" }, if *given { "subtracts none" } else { "subtracts them" })]
    OtherMeans {
        /// Whether the call has room for them.
        given: bool,
    },
}

/// Which numbers share a factor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Granularity {
    /// All.
    PerTensor,
    /// Those of a batch entry and head, or of a group of neighbouring heads.
    PerHead,
    /// Those of so many rows of a batch entry and head.
    PerBlock(usize),
    /// Those of a feature of a batch entry and head.
    PerChannel,
}

/// What a caller asks for, unchecked; [`QuantiseSpec::parse`] turns it into a [`QuantiseProblem`].
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct QuantiseSpec {
    /// Element type of the numbers: f32, f16 or bf16.
    pub dtype: DType,
    /// Where they lie.
    pub x: Layout,
    /// Element type of the result: E4M3 or E5M2.
    pub to: DType,
    /// Layout of the result; dense batch × heads × sequence × dim where `None`.
    pub out: Option<Layout>,
    /// Which numbers share a factor.
    pub per: Granularity,
    /// Neighbouring heads that share factors per head: those of a key head, for queries.
    pub group: usize,
    /// Whether each head's mean over its used rows is subtracted before.
    pub centred: bool,
    /// Whether the result is turned, as [`Spec::turned`](crate::Spec) reads values: its extents are those of
    /// [`turned_dims`].
    pub turned: bool,
    /// What the numbers of rows that batch entries use are made of in device memory, where a call gives them; other rows
    /// are not read and become zeros.
    pub used: Option<Index>,
}

impl QuantiseSpec {
    /// E4M3 with one factor for the whole tensor.
    pub const fn new(dtype: DType, x: Layout) -> Self {
        let per = Granularity::PerTensor;
        Self {
            dtype,
            x,
            to: DType::E4M3,
            out: None,
            per,
            group: 1,
            centred: false,
            turned: false,
            used: None,
        }
    }

    /// Checks everything and fills in defaults.
    pub fn parse(self) -> Result<QuantiseProblem, ProblemError> {
        self.dtype.check_common("quantising")?;
        let dims = self.x.dims();
        if dims.heads == 0 || dims.dim == 0 {
            return Err(ProblemError::Empty { operand: Operand::X, dims });
        }
        if dims.array().into_iter().any(|extent| extent > MAX_EXTENT) {
            return Err(ProblemError::Extent { operand: Operand::X, dims, max: MAX_EXTENT });
        }
        self.check_scales(dims).map_err(ProblemError::Scales)?;
        // Factors and means are dense over no more than this, rows of any length included.
        Layout::bhsd(dims)?;
        let out_dims = if self.turned { turned_dims(dims) } else { dims };
        let out = self.out.map_or_else(|| Layout::bhsd(out_dims), Ok)?;
        check_axes((Operand::Out, out.dims()), (Operand::X, out_dims), &Axis::ALL)?;
        out.check_output()?;
        Ok(QuantiseProblem { spec: Self { out: Some(out), ..self }, out })
    }

    fn check_scales(&self, dims: Dims) -> Result<(), ScaleError> {
        let (group, heads) = (self.group, dims.heads);
        if !self.to.is_narrow() {
            return Err(ScaleError::Wide { to: self.to });
        }
        if self.per == Granularity::PerBlock(0) {
            return Err(ScaleError::EmptyBlocks);
        }
        if group == 0 || !heads.is_multiple_of(group) {
            return Err(ScaleError::Group { group, heads });
        }
        if group > 1 && self.per != Granularity::PerHead {
            return Err(ScaleError::SharedBlocks);
        }
        let blocks = matches!(self.per, Granularity::PerBlock(_));
        let odd = blocks || self.centred || self.to != DType::E4M3 || !dims.dim.is_multiple_of(16);
        if self.turned && odd { Err(ScaleError::TurnedAs) } else { Ok(()) }
    }
}

/// A checked tensor to be quantised.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct QuantiseProblem {
    spec: QuantiseSpec,
    out: Layout,
}

impl QuantiseProblem {
    /// The specification, with defaults filled in.
    pub const fn spec(&self) -> &QuantiseSpec {
        &self.spec
    }

    /// Where the numbers lie.
    pub const fn x(&self) -> &Layout {
        &self.spec.x
    }

    /// Layout of the result.
    pub const fn out(&self) -> &Layout {
        &self.out
    }

    /// Extents of the tensor, and of the result where it is not turned.
    pub const fn dims(&self) -> Dims {
        self.spec.x.dims()
    }

    /// Factors of all shares, dense: one; batch × groups of heads; batch × heads × blocks; batch × heads × dim.
    pub const fn factors(&self) -> usize {
        let Dims { batch, heads, seq, dim } = self.dims();
        match self.spec.per {
            Granularity::PerTensor => 1,
            Granularity::PerHead => batch * (heads / self.spec.group),
            Granularity::PerBlock(rows) => batch * heads * seq.div_ceil(rows),
            Granularity::PerChannel => batch * heads * dim,
        }
    }

    /// The number of the factor of an element.
    pub const fn factor_index(&self, [batch, head, seq]: [usize; 3], feature: usize) -> usize {
        let (dims, plane) = (self.dims(), batch * self.dims().heads + head);
        match self.spec.per {
            Granularity::PerTensor => 0,
            Granularity::PerHead => plane / self.spec.group,
            Granularity::PerBlock(rows) => plane * dims.seq.div_ceil(rows) + seq / rows,
            Granularity::PerChannel => plane * dims.dim + feature,
        }
    }

    /// Means that are subtracted, dense batch × heads × dim; 0 where the tensor is not centred.
    pub const fn means(&self) -> usize {
        let Dims { batch, heads, dim, .. } = self.dims();
        if self.spec.centred { batch * heads * dim } else { 0 }
    }

    /// The factor of numbers of which this is the largest finite magnitude.
    pub const fn factor_of(&self, largest: f32) -> f32 {
        (largest * self.inverse_largest()).max(SMALLEST_FACTOR)
    }

    /// One over the largest number of the result's type.
    pub const fn inverse_largest(&self) -> f32 {
        1.0 / self.spec.to.largest()
    }
}

/// What quantising writes.
#[derive(Debug)]
pub struct QuantisedMut<'a> {
    /// The tensor of 8-bit floats.
    pub out: DataMut<'a>,
    /// What they are multiplied by, [`QuantiseProblem::factors`] numbers.
    pub factors: &'a mut [f32],
    /// What has been subtracted, [`QuantiseProblem::means`] numbers, where the tensor is centred.
    pub means: Option<&'a mut [f32]>,
}

/// A tensor to be quantised with the host memory that it and the result lie in.
///
/// **Invariant:** every slice has the problem's element type and holds everything its layout reaches, and used lengths
/// do not exceed the sequence.
#[derive(Debug)]
pub struct QuantiseCall<'a> {
    problem: &'a QuantiseProblem,
    x: Data<'a>,
    used: Option<&'a [u32]>,
    into: QuantisedMut<'a>,
}

impl<'a> QuantiseCall<'a> {
    /// Binds `problem` to memory, and to the number of rows that each batch entry uses where it has such.
    pub fn bind(
        problem: &'a QuantiseProblem,
        x: Data<'a>,
        used: Option<&'a [u32]>,
        into: QuantisedMut<'a>,
    ) -> Result<Self, ProblemError> {
        let spec = &problem.spec;
        let operands = [
            (Operand::X, problem.x(), x, spec.dtype),
            (Operand::Out, problem.out(), into.out.as_data(), spec.to),
        ];
        for (operand, layout, data, expected) in operands {
            if data.dtype() != expected {
                return Err(ProblemError::OtherDType { operand, got: data.dtype(), expected });
            }
            layout.check_len(operand, data.len())?;
        }
        let (given, needed) = (into.factors.len(), problem.factors());
        if given != needed {
            return Err(ProblemError::FactorCount { operand: Operand::X, given, needed });
        }
        if into.means.is_some() != spec.centred {
            return Err(ProblemError::Scales(ScaleError::OtherMeans { given: into.means.is_some() }));
        }
        if let Some(len) = into.means.as_ref().map(|means| means.len()).filter(|&len| len != problem.means())
        {
            let (operand, needed) = (Operand::Means, problem.means());
            return Err(ProblemError::BufferTooSmall { operand, needed, len });
        }
        if used.is_some() != spec.used.is_some() {
            return Err(ProblemError::Scales(ScaleError::OtherLengths { given: used.is_some() }));
        }
        check_used(Operand::X, used, problem.dims())?;
        Ok(Self { problem, x, used, into })
    }

    /// The problem.
    pub const fn problem(&self) -> &'a QuantiseProblem {
        self.problem
    }

    /// The numbers.
    pub const fn x(&self) -> Data<'a> {
        self.x
    }

    /// Rows that each batch entry uses, where not all do.
    pub const fn used(&self) -> Option<&'a [u32]> {
        self.used
    }

    /// Rows that a batch entry uses.
    pub fn rows_of(&self, batch: usize) -> usize {
        self.used.map_or(self.problem.dims().seq, |used| used[batch] as usize)
    }

    /// What is written.
    pub fn outputs(&mut self) -> QuantisedMut<'_> {
        let QuantisedMut { out, factors, means } = &mut self.into;
        QuantisedMut { out: out.reborrow(), factors, means: means.as_deref_mut() }
    }
}
