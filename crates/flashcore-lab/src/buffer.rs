//! Owned elements whose type is known only at run time: tensor memory in all tools.

use flashcore_core::{DType, Data, DataMut, Dims};
use flashcore_testkit::{Kind, kinds::Part};
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

    /// A dense tensor of `kind`; the same seed gives the same numbers everywhere.
    pub fn drawn(dtype: DType, dims: Dims, kind: Kind, part: Part, seed: u64) -> Result<Self, LabError> {
        // An overflow is asked for as what it is: more than there is.
        let mut buffer = Self::zeros(dtype, dims.count().unwrap_or(usize::MAX))?;
        match &mut buffer {
            Self::F16(elements) => kind.fill(part, dims, elements, seed),
            Self::BF16(elements) => kind.fill(part, dims, elements, seed),
            Self::F32(elements) => kind.fill(part, dims, elements, seed),
        }
        Ok(buffer)
    }

    /// `len` normal numbers of about `size`, the same block of numbers again and again: weights of gigabytes.
    pub fn repeated(dtype: DType, len: usize, block: usize, size: f32, seed: u64) -> Result<Self, LabError> {
        let block = block.min(len);
        let dims = Dims::new(1, 1, 1, block);
        let mut first = Self::drawn(dtype, dims, Kind::Normal, Part::Q, seed)?;
        match &mut first {
            Self::F16(elements) => elements.iter_mut().for_each(|x| *x = f16::from_f32(x.to_f32() * size)),
            Self::BF16(elements) => elements.iter_mut().for_each(|x| *x = bf16::from_f32(x.to_f32() * size)),
            Self::F32(elements) => elements.iter_mut().for_each(|x| *x *= size),
        }
        if block == len {
            return Ok(first);
        }
        let (mut all, first) = (Self::zeros(dtype, len)?, first.data().bytes());
        let mut data = all.data_mut();
        let chunks = data.bytes_mut().par_chunks_mut(first.len());
        chunks.for_each(|chunk| chunk.copy_from_slice(&first[..chunk.len()]));
        Ok(all)
    }

    /// Numbers rounded to a type.
    pub fn rounded(dtype: DType, numbers: &[f64]) -> Result<Self, LabError> {
        let mut buffer = Self::zeros(dtype, numbers.len())?;
        match &mut buffer {
            Self::F16(to) => to.iter_mut().zip(numbers).for_each(|(to, x)| *to = f16::from_f64(*x)),
            Self::BF16(to) => to.iter_mut().zip(numbers).for_each(|(to, x)| *to = bf16::from_f64(*x)),
            Self::F32(to) => to.iter_mut().zip(numbers).for_each(|(to, x)| *to = *x as f32),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_and_poison_of_every_type() {
        for dtype in DType::COMMON {
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
        let dims = Dims::new(1, 2, 3, 32_768);
        let draw = |seed| Buffer::drawn(DType::F16, dims, Kind::Normal, Part::Q, seed).unwrap();
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
        let Buffer::F16(values) = draw(3) else { unreachable!() };
        assert_ne!(
            values[..9],
            values[1 << 16..][..9],
            "what one generator draws differs from what the next does"
        );
    }
}
