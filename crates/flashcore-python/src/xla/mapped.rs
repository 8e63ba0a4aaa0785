//! The arrays of a compiled call, by name. `jax.vmap` puts dimensions in front of them: those of an array that is not
//! mapped are 1. A call with such dimensions is one problem with a larger batch where that is possible, else several.

use std::ffi::c_int;

use flashcore::{DType, Index, Operand};

use super::{abi::element, frame};
use crate::{
    array::{Array, Numbers, Order, Place, Table, View},
    dropout::Seed,
    error::CallError,
};

/// One array: a dense one, mapped dimensions before its own.
#[derive(Clone, Copy)]
pub(super) struct Mapped<'a> {
    pub(super) operand: Operand,
    pub(super) element: c_int,
    pub(super) address: usize,
    front: &'a [i64],
    own: &'a [i64],
}

/// All arrays of a call.
pub(super) struct Arrays<'a> {
    list: Vec<Mapped<'a>>,
    /// The mapped dimensions, which results have all of.
    front: &'a [i64],
    place: Place,
}

/// The arrays of one problem of a call.
#[derive(Clone, Copy)]
pub(super) struct One<'a> {
    arrays: &'a Arrays<'a>,
    /// Which of the mapped ones; `None` for all of them as one batch.
    index: Option<usize>,
    order: Order,
}

impl Mapped<'_> {
    /// All of its memory, in bytes.
    pub(super) fn bytes(&self) -> usize {
        count(self.front) * self.own_bytes()
    }

    fn own_bytes(&self) -> usize {
        let wide = [element::S64, element::U64].contains(&self.element);
        count(self.own) * if wide { 8 } else { self.dtype().map_or(4, DType::bytes) }
    }

    fn dtype(&self) -> Option<DType> {
        match self.element {
            element::F16 => Some(DType::F16),
            element::BF16 => Some(DType::BF16),
            element::F32 => Some(DType::F32),
            _ => None,
        }
    }

    /// Where number `index` of the mapped ones starts.
    fn at(&self, mut index: usize, front: &[i64]) -> usize {
        let (mut offset, mut step) = (0, 1);
        for (&own, &all) in self.front.iter().zip(front).rev() {
            let all = usize::try_from(all).unwrap_or(1).max(1);
            if own > 1 {
                offset += index % all * step;
                step *= all;
            }
            index /= all;
        }
        self.address.wrapping_add(offset * self.own_bytes())
    }

    fn is_shared(&self) -> bool {
        self.front.iter().all(|&extent| extent == 1)
    }

    fn type_name(&self) -> String {
        let known = element::NAMES.iter().find(|&&(_, number)| number == self.element);
        known.map_or_else(|| "of another type".to_owned(), |(name, _)| (*name).to_owned())
    }
}

impl<'a> Arrays<'a> {
    /// Arrays of which the first `arguments` have these names, and the others the names of results; `mapped` dimensions
    /// are in front.
    pub(super) fn new(
        names: impl Iterator<Item = &'a str>,
        operands: &[frame::Operand<'a>],
        mapped: usize,
        place: Place,
    ) -> Result<Self, CallError> {
        let wrong = CallError::Xla("a compiled call has arrays that this flashcore does not know");
        let list: Option<Vec<_>> = names
            .zip(operands)
            .map(|(name, &frame::Operand { element, address, extents })| {
                let (front, own) = extents.split_at_checked(mapped)?;
                Some(Mapped { operand: operand(name)?, element, address, front, own })
            })
            .collect();
        let Some(list) = list.filter(|list| list.len() == operands.len()) else { return Err(wrong) };
        // Results come last.
        let front = list.last().map_or(&[][..], |last| last.front);
        Ok(Self { list, front, place })
    }

    /// Calls `compute` for each problem.
    pub(super) fn each(
        &self,
        order: Order,
        apart: bool,
        mut compute: impl FnMut(One<'_>) -> Result<(), CallError>,
    ) -> Result<(), CallError> {
        if count(self.front) > 1 && !apart && self.is_one_batch(order) {
            return compute(One { arrays: self, index: None, order });
        }
        (0..count(self.front)).try_for_each(|n| compute(One { arrays: self, index: Some(n), order }))
    }

    /// The one problem of a call without mapped dimensions.
    pub(super) fn only(&self, order: Order) -> One<'_> {
        One { arrays: self, index: Some(0), order }
    }

    pub(super) fn find(&self, operand: Operand) -> Option<&Mapped<'a>> {
        self.list.iter().find(|mapped| mapped.operand == operand)
    }

    /// Whether mapped dimensions can be part of the batch: sinks and slopes are those of heads, for all entries. Dropout
    /// numbers the sequences of each call from 0.
    fn is_one_batch(&self, order: Order) -> bool {
        let rank = self.find(Operand::Q).map_or(0, |q| q.own.len());
        let fits = |mapped: &Mapped<'_>| match mapped.operand {
            Operand::Table | Operand::DSinks | Operand::Seed => false,
            Operand::Sinks => mapped.is_shared(),
            Operand::Bias => mapped.is_shared() && mapped.own.len() == 1,
            _ => mapped.front == self.front,
        };
        order != Order::Packed && (2..=4).contains(&rank) && self.list.iter().all(fits)
    }
}

impl One<'_> {
    /// An array of floats that must be there.
    pub(super) fn need(&self, operand: Operand) -> Result<Array, CallError> {
        self.array(operand)?.ok_or(CallError::Xla("a compiled call lacks an array"))
    }

    /// An array of floats.
    pub(super) fn array(&self, operand: Operand) -> Result<Option<Array>, CallError> {
        let Some(mapped) = self.arrays.find(operand) else { return Ok(None) };
        let Some(dtype) = mapped.dtype() else {
            return Err(CallError::Elements { operand, dtype: mapped.type_name() });
        };
        let (extents, rank) = self.extents(mapped);
        let Some(view) = View::dense(&extents) else {
            return Err(CallError::Rank { operand, rank, order: self.order });
        };
        Ok(Some(Array { operand, address: self.address(mapped), place: self.arrays.place, dtype, view }))
    }

    /// Lengths or offsets.
    pub(super) fn numbers(&self, operand: Operand) -> Result<Option<Numbers>, CallError> {
        let Some(mapped) = self.arrays.find(operand) else { return Ok(None) };
        let index = match mapped.element {
            element::S32 => Index::I32,
            element::S64 => Index::I64,
            _ => return Err(CallError::NotIntegers { operand, dtype: mapped.type_name() }),
        };
        if mapped.own.len() != 1 {
            return Err(CallError::NotAList { operand });
        }
        let len = count(mapped.own) * if self.index.is_none() { count(mapped.front) } else { 1 };
        Ok(Some(Numbers { operand, address: self.address(mapped), place: self.arrays.place, index, len }))
    }

    /// Page numbers.
    pub(super) fn table(&self) -> Result<Option<Table>, CallError> {
        let Some(mapped) = self.arrays.find(Operand::Table) else { return Ok(None) };
        if mapped.element != element::S32 {
            return Err(CallError::TableElements { dtype: mapped.type_name() });
        }
        let &[rows, columns] = mapped.own else { return Err(CallError::TableShape) };
        let [rows, columns] = [rows, columns].map(|extent| usize::try_from(extent).unwrap_or(0));
        let (address, place) = (self.address(mapped), self.arrays.place);
        Ok(Some(Table { address, place, rows, columns, row_stride: columns }))
    }

    /// The seed of dropout.
    pub(super) fn seed(&self) -> Result<Option<Seed>, CallError> {
        let Some(mapped) = self.arrays.find(Operand::Seed) else { return Ok(None) };
        match (mapped.element, mapped.own) {
            (element::U32, [2]) | (element::U64 | element::S64, [1]) => {
                Seed::at(self.address(mapped), self.arrays.place).map(Some)
            }
            (element::U32 | element::U64 | element::S64, _) => Err(CallError::SeedShape),
            _ => Err(CallError::SeedElements { dtype: mapped.type_name() }),
        }
    }

    fn address(&self, mapped: &Mapped<'_>) -> usize {
        self.index.map_or(mapped.address, |n| mapped.at(n, self.arrays.front))
    }

    /// The extents of an array, and how many there were; with mapped dimensions in the batch where all are one.
    fn extents(&self, mapped: &Mapped<'_>) -> (Vec<i64>, usize) {
        let (own, rank) = (mapped.own, mapped.own.len());
        let whole = match mapped.operand {
            Operand::Sinks | Operand::Bias => return (own.to_vec(), rank),
            Operand::Lse | Operand::RowSums => 3,
            _ => 4,
        };
        if self.index.is_some() {
            return (own.to_vec(), rank);
        }
        let batch = count(mapped.front) as i64;
        let extents = match (whole - rank, self.order) {
            (0, _) => [&[batch * own[0]], &own[1..]].concat(),
            (1, _) => [&[batch], own].concat(),
            // One head, which stands after the sequence in the other order.
            (_, Order::Bshd) if whole == 4 => vec![batch, own[0], 1, own[1]],
            _ => [&[batch, 1], own].concat(),
        };
        (extents, rank)
    }
}

fn count(extents: &[i64]) -> usize {
    extents.iter().map(|&extent| usize::try_from(extent).unwrap_or(0)).product()
}

/// The names by which Python calls the arrays of a call.
fn operand(name: &str) -> Option<Operand> {
    Some(match name {
        "q" => Operand::Q,
        "k" => Operand::K,
        "v" => Operand::V,
        "out" => Operand::Out,
        "lse" => Operand::Lse,
        "sums" => Operand::RowSums,
        "d_out" => Operand::DOut,
        "lengths_q" => Operand::LengthsQ,
        "lengths_kv" => Operand::LengthsKv,
        "sinks" => Operand::Sinks,
        "table" => Operand::Table,
        "bias" => Operand::Bias,
        "seed" => Operand::Seed,
        "dq" => Operand::DQ,
        "dk" => Operand::DK,
        "dv" => Operand::DV,
        "d_sinks" => Operand::DSinks,
        _ => return None,
    })
}
