//! Elements of tensor maps, with their numbers in `tensormap.replace`.

use flashcore_ptx::{launch::TensorElement, types::ScalarType};

/// An element: its number in the PTX ISA ("tensormap.replace", `.elemtype`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Element(u8);

/// Elements by number: bytes, and what reductions take them for.
const ELEMENTS: [(u32, ScalarType); 13] = [
    (1, ScalarType::U8),
    (2, ScalarType::U16),
    (4, ScalarType::U32),
    (4, ScalarType::S32),
    (8, ScalarType::U64),
    (8, ScalarType::S64),
    (2, ScalarType::F16),
    (4, ScalarType::F32),
    (4, ScalarType::F32),
    (8, ScalarType::F64),
    (2, ScalarType::Bf16),
    (4, ScalarType::F32),
    (4, ScalarType::F32),
];

impl Element {
    /// The element with that number, if there is one.
    pub(crate) fn numbered(number: u64) -> Option<Self> {
        u8::try_from(number).ok().filter(|&n| usize::from(n) < ELEMENTS.len()).map(Self)
    }

    /// The element of an argument.
    pub(crate) const fn of(element: TensorElement) -> Option<Self> {
        Some(Self(match element {
            TensorElement::U8 => 0,
            TensorElement::U16 => 1,
            TensorElement::U32 => 2,
            TensorElement::S32 => 3,
            TensorElement::U64 => 4,
            TensorElement::S64 => 5,
            TensorElement::F16 => 6,
            TensorElement::F32 => 7,
            TensorElement::F64 => 9,
            TensorElement::BF16 => 10,
            _ => return None,
        }))
    }

    pub(crate) const fn bytes(self) -> u32 {
        ELEMENTS[self.0 as usize].0
    }

    pub(crate) const fn scalar(self) -> ScalarType {
        ELEMENTS[self.0 as usize].1
    }

    pub(crate) const fn number(self) -> u8 {
        self.0
    }
}
