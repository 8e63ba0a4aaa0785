//! What a call knows of one tensor or of an array of numbers: address, place, type, extents; made by `import`.

use std::{fmt, ops::Range};

use flashcore::{DType, ExpertLayout, Index, Layout, Operand};
use flashcore_core::{Dims, Scales};

use crate::{
    dlpack::{DataType, Device, Tensor},
    error::CallError,
};

/// Most dimensions of a tensor that attention takes.
const MOST_DIMENSIONS: usize = 4;

/// Where the tensors of a call are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    Host,
    Cuda(u32),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("the CPU"),
            Self::Cuda(index) => write!(f, "GPU {index}"),
        }
    }
}

/// In which order a caller's tensors have their dimensions. Of four, the batch may be missing, or batch and heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    /// Batch, heads, sequence, dim.
    Bhsd,
    /// Batch, sequence, heads, dim.
    Bshd,
    /// Sequence, heads, dim: sequences packed one after another.
    Packed,
}

impl Order {
    /// What callers call it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Bhsd => "bhsd",
            Self::Bshd => "bshd",
            Self::Packed => "packed",
        }
    }

    /// How many dimensions tensors may have, in words.
    pub(crate) const fn ranks(self) -> &'static str {
        match self {
            Self::Bhsd | Self::Bshd => "4, 3 or 2",
            Self::Packed => "3",
        }
    }

    const fn takes(self, rank: usize) -> bool {
        match self {
            Self::Bhsd | Self::Bshd => 2 <= rank && rank <= 4,
            Self::Packed => rank == 3,
        }
    }

    /// Numbers of `rank` dimensions as batch, heads, sequence, dim, with `missing` for those that are not there.
    const fn sorted(self, rank: usize, [a, b, c, d]: [i64; 4], missing: i64) -> [i64; 4] {
        match (self, rank) {
            (_, 2) => [missing, missing, a, b],
            (Self::Bhsd, 3) => [missing, a, b, c],
            (Self::Bshd | Self::Packed, 3) => [missing, b, a, c],
            (Self::Bhsd, _) => [a, b, c, d],
            (Self::Bshd | Self::Packed, _) => [a, c, b, d],
        }
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bhsd => "batch, heads, sequence, dim",
            Self::Bshd => "batch, sequence, heads, dim",
            Self::Packed => "sequence, heads, dim",
        })
    }
}

/// Extents and strides (in elements) in the caller's order; unused dimensions are 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct View {
    rank: usize,
    extents: [i64; MOST_DIMENSIONS],
    strides: [i64; MOST_DIMENSIONS],
}

/// One tensor of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Array {
    pub(crate) operand: Operand,
    pub(crate) address: usize,
    pub(crate) place: Place,
    pub(crate) dtype: DType,
    pub(crate) view: View,
}

impl Array {
    /// Reads a DLPack view, whose dimensions are to be those of `order`. `bits_are_bf16` reads 16-bit integers as bf16,
    /// for producers that cannot say so.
    ///
    /// # Safety
    /// The tensor's shape and strides must be those of a live producer.
    pub(crate) unsafe fn read(
        tensor: &Tensor,
        operand: Operand,
        order: Order,
        bits_are_bf16: bool,
    ) -> Result<Self, CallError> {
        Ok(Self {
            operand,
            // Empty tensors may have any address, null included.
            address: (tensor.data as usize).wrapping_add(tensor.byte_offset as usize),
            place: place(tensor.device, operand)?,
            dtype: dtype(tensor.dtype, operand, bits_are_bf16)?,
            // SAFETY: the caller's promise.
            view: unsafe { View::read(tensor, operand, order)? },
        })
    }

    /// Where the elements lie, batch × heads × sequence × dim.
    pub(crate) fn layout(&self, order: Order) -> Result<Layout, CallError> {
        let View { rank, extents, strides } = self.view;
        if !order.takes(rank) {
            return Err(CallError::Rank { operand: self.operand, rank, order });
        }
        let sorted = |numbers: [i64; 4], missing: i64| {
            let [batch, heads, seq, dim] = order.sorted(rank, numbers, missing).map(usize::try_from);
            Some([batch.ok()?, heads.ok()?, seq.ok()?, dim.ok()?])
        };
        let (Some([batch, heads, seq, dim]), Some(strides)) = (sorted(extents, 1), sorted(strides, 0)) else {
            let strides = strides[..rank].to_vec();
            return Err(CallError::NegativeStride { operand: self.operand, strides });
        };
        Ok(Layout::strided(Dims::new(batch, heads, seq, dim), strides)?)
    }

    /// Demands f32 values, one after another, for each row of tensors with `rank` dimensions: `rows` without those that are
    /// missing there.
    pub(crate) fn check_lse(&self, rows: [usize; 3], rank: usize) -> Result<(), CallError> {
        self.check_dense_f32(&rows[MOST_DIMENSIONS - rank..])
    }

    /// Demands f32 values, one after another.
    pub(crate) fn check_dense_f32(&self, extents: &[usize]) -> Result<(), CallError> {
        let good = self.dtype == DType::F32 && self.view.is_dense(extents);
        if !good {
            return Err(CallError::Lse { extents: extents.to_vec() });
        }
        self.check_alignment()
    }

    /// Where one matrix per expert lies; `transposed` where the tensor is experts × columns × rows.
    pub(crate) fn experts(&self, transposed: bool) -> Result<ExpertLayout, CallError> {
        let View { rank, extents, strides } = self.view;
        let operand = self.operand;
        if rank != 3 && !(rank == 2 && matches!(operand, Operand::SharedGateUp | Operand::SharedDown)) {
            return Err(CallError::ExpertRank { operand, rank });
        }
        // A shared expert may come as its matrix alone.
        let numbers = |numbers: [i64; MOST_DIMENSIONS], missing: i64| {
            let [a, b, c, _] = numbers;
            let [experts, first, second] = if rank == 2 { [missing, a, b] } else { [a, b, c] };
            let ordered = if transposed { [experts, second, first] } else { [experts, first, second] };
            let [experts, rows, cols] = ordered.map(usize::try_from);
            Some([experts.ok()?, rows.ok()?, cols.ok()?])
        };
        match (numbers(extents, 1), numbers(strides, 0)) {
            (Some(extents), Some(strides)) => Ok(ExpertLayout::strided(extents, strides)?),
            _ => Err(CallError::NegativeStride { operand, strides: strides[..rank].to_vec() }),
        }
    }

    /// That it is of another type than the tensor which decides.
    pub(crate) const fn other_dtype(&self, first: &Self) -> CallError {
        let (because, expected) = (first.operand, first.dtype);
        CallError::OtherDType { operand: self.operand, got: self.dtype, because, expected }
    }

    /// Whether its matrices lie as those of another, without the other's gaps.
    pub(crate) fn lies_as(&self, other: &Self, transposed: bool) -> Result<bool, CallError> {
        let (own, wanted) = (self.experts(transposed)?, other.experts(transposed)?.without_gaps());
        let extents = |layout: &ExpertLayout| [layout.experts(), layout.rows(), layout.cols()];
        let strides = own.strides().into_iter().zip(wanted.strides());
        let mut steps = extents(&own).into_iter().zip(strides);
        // A stride over one element means nothing.
        Ok(extents(&own) == extents(&wanted)
            && steps.all(|(extent, (own, wanted))| extent <= 1 || own == wanted))
    }

    /// Where one matrix or several lie, as inputs.
    pub(crate) fn matrices(&self) -> Result<ExpertLayout, CallError> {
        let [extents, strides] = self.as_matrices()?;
        Ok(ExpertLayout::strided(extents, strides)?)
    }

    /// Where one matrix or several lie, as an output: matrices are batch entries.
    pub(crate) fn out_matrices(&self) -> Result<Layout, CallError> {
        let [[n, rows, cols], [matrix, row, col]] = self.as_matrices()?;
        Ok(Layout::strided(Dims::new(n, 1, rows, cols), [matrix, 0, row, col])?)
    }

    /// Extents and strides of one matrix or several.
    fn as_matrices(&self) -> Result<[[usize; 3]; 2], CallError> {
        let View { rank, extents, strides } = self.view;
        let operand = self.operand;
        if rank != 2 && rank != 3 {
            return Err(CallError::FactorRank { operand, rank });
        }
        let three = |numbers: [i64; MOST_DIMENSIONS], missing: i64| {
            let [a, b, c, _] = numbers;
            let [n, rows, cols] = if rank == 2 { [missing, a, b] } else { [a, b, c] }.map(usize::try_from);
            Some([n.ok()?, rows.ok()?, cols.ok()?])
        };
        match (three(extents, 1), three(strides, 0)) {
            (Some(extents), Some(strides)) => Ok([extents, strides]),
            _ => Err(CallError::NegativeStride { operand, strides: strides[..rank].to_vec() }),
        }
    }

    /// Whether elements lie one after another.
    pub(crate) fn is_dense(&self) -> bool {
        let extents = self.view.extents.map(|extent| usize::try_from(extent).unwrap_or(0));
        self.view.is_dense(&extents[..self.view.rank])
    }

    /// The memory that it reaches.
    pub(crate) fn range(&self) -> Range<usize> {
        let View { rank, extents, strides } = self.view;
        let steps = extents[..rank].iter().zip(&strides[..rank]);
        let last: i64 = steps.map(|(extent, stride)| (extent - 1).max(0).saturating_mul(*stride)).sum();
        let elements = if extents[..rank].contains(&0) { 0 } else { usize::try_from(last).unwrap_or(0) + 1 };
        self.address..self.address.saturating_add(elements.saturating_mul(self.dtype.bytes()))
    }

    /// The first row of a dense array of two dimensions.
    pub(crate) fn first_row(self) -> Self {
        let row = View::dense(&self.view.extents[self.view.rank.saturating_sub(1)..self.view.rank]);
        Self { view: row.unwrap_or(self.view), ..self }
    }

    /// Number of dimensions.
    pub(crate) const fn rank(&self) -> usize {
        self.view.rank
    }

    /// Number of elements.
    pub(crate) fn count(&self) -> usize {
        let extents = &self.view.extents[..self.view.rank];
        extents.iter().product::<i64>().try_into().unwrap_or(0)
    }

    /// Demands an address at which such elements may lie.
    pub(crate) fn check_alignment(&self) -> Result<(), CallError> {
        let (operand, address, bytes) = (self.operand, self.address, self.dtype.bytes());
        if address.is_multiple_of(bytes) {
            Ok(())
        } else {
            Err(CallError::Unaligned { operand, address, bytes })
        }
    }

    /// Demands one value after another, as many as there are query heads.
    pub(crate) fn check_sinks(&self, heads: usize) -> Result<(), CallError> {
        if self.view.is_dense(&[heads]) {
            return self.check_alignment();
        }
        Err(CallError::Sinks { given: self.count(), heads })
    }

    /// How the factors of a cache lie: one, one for each key head, or for each sequence and key head, with any strides.
    pub(crate) fn cache_scales(&self, batch: usize, heads: usize) -> Result<Scales, CallError> {
        let View { rank, extents, strides } = self.view;
        // One more axis in front of heads alone, or of a single number.
        let axes = |numbers: [i64; MOST_DIMENSIONS], missing: i64| match rank {
            0 => [missing; 2],
            1 => [missing, numbers[0]],
            _ => [numbers[0], numbers[1]],
        };
        let needed = [batch, heads];
        let mut apart = [0; 2];
        for (n, (extent, stride)) in axes(extents, 1).into_iter().zip(axes(strides, 0)).enumerate() {
            let whole = usize::try_from(extent).is_ok_and(|extent| extent == needed[n]);
            if (extent != 1 && !whole) || rank > 2 || stride < 0 || self.dtype != DType::F32 {
                return Err(CallError::Factors { operand: self.operand, given: self.count(), batch, heads });
            }
            apart[n] = if extent == 1 { 0 } else { stride as usize };
        }
        self.check_alignment()?;
        Ok(if apart == [0; 2] { Scales::PerTensor } else { Scales::Strided(apart) })
    }

    /// Demands so many f32 values, one after another.
    pub(crate) fn check_count(&self, needed: usize) -> Result<(), CallError> {
        if self.dtype == DType::F32 && self.view.is_dense(&[needed]) {
            return self.check_alignment();
        }
        Err(CallError::Count {
            operand: self.operand,
            given: self.count(),
            needed,
            what: "float32 factors, dense",
        })
    }

    /// Whether these are the factors of a tensor: one, or one for each batch entry and key head.
    pub(crate) fn scales(&self, batch: usize, heads: usize) -> Result<Scales, CallError> {
        let kinds = [Scales::PerTensor, Scales::PerHead];
        let kind = kinds.into_iter().find(|kind| self.view.is_dense(&[kind.count(batch, heads)]));
        let Some(kind) = kind.filter(|_| self.dtype == DType::F32) else {
            return Err(CallError::Factors { operand: self.operand, given: self.count(), batch, heads });
        };
        self.check_alignment()?;
        Ok(kind)
    }
}

/// Lengths or offsets of a call, one after another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    pub(crate) operand: Operand,
    pub(crate) address: usize,
    pub(crate) place: Place,
    pub(crate) index: Index,
    pub(crate) len: usize,
}

impl Numbers {
    /// Demands so many of them.
    pub(crate) fn check_count(&self, needed: usize, what: &'static str) -> Result<(), CallError> {
        let (operand, given) = (self.operand, self.len);
        if given == needed { Ok(()) } else { Err(CallError::Count { operand, given, needed, what }) }
    }

    /// Reads a DLPack view of integers.
    ///
    /// # Safety
    /// The tensor's shape and strides must be those of a live producer.
    pub(crate) unsafe fn read(tensor: &Tensor, operand: Operand) -> Result<Self, CallError> {
        let index = match (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) {
            (DataType::INT, 32, 1) => Index::I32,
            (DataType::INT, 64, 1) => Index::I64,
            _ => return Err(CallError::NotIntegers { operand, dtype: tensor.dtype.to_string() }),
        };
        // SAFETY: the caller's promise.
        let view = unsafe { View::read(tensor, operand, Order::Bhsd)? };
        let len = view.extents[0].try_into().unwrap_or(0);
        if !view.is_dense(&[len]) {
            return Err(CallError::NotAList { operand });
        }
        let address = (tensor.data as usize).wrapping_add(tensor.byte_offset as usize);
        let bytes = index.bytes() as usize;
        if !address.is_multiple_of(bytes) {
            return Err(CallError::Unaligned { operand, address, bytes });
        }
        Ok(Self { operand, address, place: place(tensor.device, operand)?, index, len })
    }
}

/// The page numbers of a call: a row for each sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table {
    pub(crate) address: usize,
    pub(crate) place: Place,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Numbers from one row to the next.
    pub(crate) row_stride: usize,
}

impl Table {
    /// Reads a DLPack view of 32-bit integers.
    ///
    /// # Safety
    /// The tensor's shape and strides must be those of a live producer.
    pub(crate) unsafe fn read(tensor: &Tensor) -> Result<Self, CallError> {
        let operand = Operand::Table;
        if (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) != (DataType::INT, 32, 1) {
            return Err(CallError::TableElements { dtype: tensor.dtype.to_string() });
        }
        // SAFETY: the caller's promise.
        let View { rank, extents, strides } = unsafe { View::read(tensor, operand, Order::Bhsd)? };
        let [rows, columns, row_stride] = [extents[0], extents[1], strides[0]].map(usize::try_from);
        let neighbours = strides[1] == 1 || extents[1] <= 1;
        let (2, true, Ok(rows), Ok(columns), Ok(row_stride)) = (rank, neighbours, rows, columns, row_stride)
        else {
            return Err(CallError::TableShape);
        };
        let address = (tensor.data as usize).wrapping_add(tensor.byte_offset as usize);
        let bytes = size_of::<i32>();
        if !address.is_multiple_of(bytes) {
            return Err(CallError::Unaligned { operand, address, bytes });
        }
        Ok(Self { address, place: place(tensor.device, operand)?, rows, columns, row_stride })
    }
}

impl View {
    /// Elements one after another; `None` for more dimensions than attention takes.
    pub(crate) fn dense(extents: &[i64]) -> Option<Self> {
        let (rank, mut all) = (extents.len(), [0; MOST_DIMENSIONS]);
        all.get_mut(..rank)?.copy_from_slice(extents);
        Some(Self { rank, extents: all, strides: dense_strides(all, rank) })
    }

    /// Whether it has these extents, and its elements lie one after another.
    pub(crate) fn is_dense(&self, extents: &[usize]) -> bool {
        let wanted = |at: usize| extents[at] as i64;
        let same = self.rank == extents.len() && (0..self.rank).all(|at| self.extents[at] == wanted(at));
        let dense = dense_strides(self.extents, self.rank);
        let steps = |at: usize| self.extents[at] <= 1 || self.strides[at] == dense[at];
        same && (extents.contains(&0) || (0..self.rank).all(steps))
    }

    /// Whether the features of a row lie side by side.
    pub(crate) fn has_dense_features(&self) -> bool {
        let last = self.rank.saturating_sub(1);
        self.strides[last] == 1 || self.extents[last] <= 1
    }

    /// Reads extents and strides.
    ///
    /// # Safety
    /// They must be those of a live producer.
    pub(crate) unsafe fn read(tensor: &Tensor, operand: Operand, order: Order) -> Result<Self, CallError> {
        let rank = usize::try_from(tensor.ndim).unwrap_or(usize::MAX);
        if rank > MOST_DIMENSIONS {
            return Err(CallError::Rank { operand, rank, order });
        }
        let mut view = Self { rank, extents: [0; MOST_DIMENSIONS], strides: [0; MOST_DIMENSIONS] };
        // SAFETY: the caller's promise: as many extents as dimensions.
        view.extents[..rank].copy_from_slice(unsafe { numbers(tensor.shape, rank) });
        // Producers disagree about the strides of tensors without elements, which mean nothing.
        if tensor.strides.is_null() || view.extents[..rank].contains(&0) {
            view.strides = dense_strides(view.extents, rank);
        } else {
            // SAFETY: as above.
            view.strides[..rank].copy_from_slice(unsafe { numbers(tensor.strides, rank) });
        }
        Ok(view)
    }
}

/// # Safety
/// `start` must be the first of `len` numbers, or `len` must be 0.
unsafe fn numbers<'a>(start: *const i64, len: usize) -> &'a [i64] {
    // SAFETY: the caller's promise.
    if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(start, len) } }
}

fn dense_strides(extents: [i64; MOST_DIMENSIONS], rank: usize) -> [i64; MOST_DIMENSIONS] {
    let mut strides = [0; MOST_DIMENSIONS];
    let mut step = 1i64;
    for at in (0..rank).rev() {
        strides[at] = step;
        step = step.saturating_mul(extents[at]);
    }
    strides
}

/// Where a tensor of that device is.
pub(crate) fn place(device: Device, operand: Operand) -> Result<Place, CallError> {
    let index = u32::try_from(device.id).unwrap_or(0);
    match device.kind {
        Device::CPU | Device::CUDA_HOST => Ok(Place::Host),
        Device::CUDA | Device::CUDA_MANAGED => Ok(Place::Cuda(index)),
        kind => Err(CallError::DeviceKind { operand, kind }),
    }
}

fn dtype(dtype: DataType, operand: Operand, bits_are_bf16: bool) -> Result<DType, CallError> {
    match (dtype.code, dtype.bits, dtype.lanes) {
        (DataType::FLOAT, 32, 1) => Ok(DType::F32),
        (DataType::FLOAT, 16, 1) => Ok(DType::F16),
        (DataType::BFLOAT, 16, 1) => Ok(DType::BF16),
        (DataType::FLOAT8_E4M3FN, 8, 1) => Ok(DType::E4M3),
        (DataType::FLOAT8_E5M2, 8, 1) => Ok(DType::E5M2),
        (DataType::UINT | DataType::INT, 16, 1) if bits_are_bf16 => Ok(DType::BF16),
        // Which type of 8 bits it is, whoever asks for it knows.
        (DataType::UINT | DataType::INT, 8, 1) if bits_are_bf16 && operand == Operand::Out => Ok(DType::E4M3),
        _ => Err(CallError::Elements { operand, dtype: dtype.to_string() }),
    }
}
