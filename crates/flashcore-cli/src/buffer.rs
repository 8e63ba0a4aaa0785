//! Owned elements whose type is known only at run time: what files are read into and results land in.

use flashcore_core::{DType, Data, DataMut};
use half::{bf16, f16};

use crate::{
    error::CliError,
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
    pub fn zeros(dtype: DType, len: usize) -> Result<Self, CliError> {
        Ok(match dtype {
            DType::F16 => Self::F16(filled(f16::ZERO, len)?),
            DType::BF16 => Self::BF16(filled(bf16::ZERO, len)?),
            DType::F32 => Self::F32(filled(0.0, len)?),
            _ => return Err(CliError::DType { dtype }),
        })
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
    elements.try_reserve_exact(len).map_err(|_| MemoryError::problem(needed, available()))?;
    elements.resize(len, value);
    Ok(elements)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_of_every_type() {
        for dtype in DType::ALL {
            let buffer = Buffer::zeros(dtype, 3).unwrap();
            assert_eq!((buffer.data().dtype(), buffer.data().len()), (dtype, 3));
            assert!(buffer.data().bytes().iter().all(|&b| b == 0));
        }
    }

    #[test]
    fn no_memory_is_an_error() {
        assert!(Buffer::zeros(DType::F32, usize::MAX).is_err());
    }
}
