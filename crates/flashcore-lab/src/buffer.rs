//! Owned elements whose type is known only at run time: the memory of tensors in all tools.

use flashcore_core::{DType, Data, DataMut, Element};
use flashcore_testkit::Rng;
use half::{bf16, f16};
use rayon::prelude::*;

use crate::{
    error::LabError,
    memory::{MemoryError, available},
};

/// Elements of one type.
#[derive(Clone, PartialEq, Debug)]
pub enum Buffer {
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    F32(Vec<f32>),
}

impl Buffer {
    /// `len` zeros, or an error where there is no memory for them.
    pub fn zeros(dtype: DType, len: usize) -> Result<Self, LabError> {
        Ok(match dtype {
            DType::F16 => Self::F16(filled(f16::ZERO, len)?),
            DType::BF16 => Self::BF16(filled(bf16::ZERO, len)?),
            DType::F32 => Self::F32(filled(0.0, len)?),
            _ => return Err(LabError::DType { dtype }),
        })
    }

    /// `len` elements whose every byte is 0xff: NaN, so that an element that is never written cannot pass.
    pub fn poisoned(dtype: DType, len: usize) -> Result<Self, LabError> {
        let mut buffer = Self::zeros(dtype, len)?;
        buffer.data_mut().bytes_mut().fill(0xff);
        Ok(buffer)
    }

    /// `len` standard normal numbers, drawn on all cores; the same seed gives the same numbers everywhere.
    pub fn normal(dtype: DType, len: usize, seed: u64) -> Result<Self, LabError> {
        let mut buffer = Self::zeros(dtype, len)?;
        match &mut buffer {
            Self::F16(elements) => draw(elements, seed),
            Self::BF16(elements) => draw(elements, seed),
            Self::F32(elements) => draw(elements, seed),
        }
        Ok(buffer)
    }

    /// The elements.
    pub fn data(&self) -> Data<'_> {
        match self {
            Self::F16(s) => Data::F16(s),
            Self::BF16(s) => Data::BF16(s),
            Self::F32(s) => Data::F32(s),
        }
    }

    /// The elements, mutable.
    pub fn data_mut(&mut self) -> DataMut<'_> {
        match self {
            Self::F16(s) => DataMut::F16(s),
            Self::BF16(s) => DataMut::BF16(s),
            Self::F32(s) => DataMut::F32(s),
        }
    }
}

/// `len` copies of `value`, or an error where there is no memory for them.
pub fn filled<T: Clone>(value: T, len: usize) -> Result<Vec<T>, MemoryError> {
    let mut elements = Vec::new();
    let needed = (len as u64).saturating_mul(size_of::<T>() as u64);
    elements.try_reserve_exact(len).map_err(|_| MemoryError { needed, available: available() })?;
    elements.resize(len, value);
    Ok(elements)
}

/// Elements that one generator draws in a row.
const STRETCH: usize = 1 << 16;

fn draw<T: Element>(elements: &mut [T], seed: u64) {
    let stretches = elements.par_chunks_mut(STRETCH).enumerate();
    stretches.for_each(|(index, stretch)| {
        let mut rng = Rng::new(seed.wrapping_mul(0x1_0000_0001).wrapping_add(index as u64));
        stretch.fill_with(|| T::from_f32(rng.normal()));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_and_poison_of_every_type() {
        for dtype in DType::ALL {
            let zeros = Buffer::zeros(dtype, 3).unwrap();
            assert_eq!((zeros.data().dtype(), zeros.data().len()), (dtype, 3));
            assert!(zeros.data().bytes().iter().all(|&b| b == 0));
        }
        let Buffer::F32(values) = Buffer::poisoned(DType::F32, 1).unwrap() else { unreachable!() };
        assert!(values[0].is_nan());
        assert!(Buffer::zeros(DType::F32, usize::MAX).is_err());
    }

    #[test]
    fn seeds_decide() {
        let draw = |seed| Buffer::normal(DType::F16, 2 * STRETCH + 7, seed).unwrap();
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
        let Buffer::F16(values) = draw(3) else { unreachable!() };
        assert_ne!(values[..9], values[STRETCH..STRETCH + 9], "stretches differ");
    }
}
