//! A problem bound to host memory, element types erased: the input of backends.

use half::{bf16, f16};

use crate::{
    dtype::{DType, Element},
    error::{Operand, ProblemError},
    float8::{E4M3, E5M2},
    problem::Problem,
    values::{Instance, Values},
};

/// Elements of a known type.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Data<'a> {
    /// Half precision.
    F16(&'a [f16]),
    /// bfloat16.
    BF16(&'a [bf16]),
    /// Single precision.
    F32(&'a [f32]),
    /// 8 bits, 4 of exponent.
    E4M3(&'a [E4M3]),
    /// 8 bits, 5 of exponent.
    E5M2(&'a [E5M2]),
}

/// Mutable elements of a known type.
#[derive(Debug)]
#[non_exhaustive]
pub enum DataMut<'a> {
    /// Half precision.
    F16(&'a mut [f16]),
    /// bfloat16.
    BF16(&'a mut [bf16]),
    /// Single precision.
    F32(&'a mut [f32]),
    /// 8 bits, 4 of exponent.
    E4M3(&'a mut [E4M3]),
    /// 8 bits, 5 of exponent.
    E5M2(&'a mut [E5M2]),
}

impl<'a> Data<'a> {
    /// The element type.
    pub const fn dtype(&self) -> DType {
        match self {
            Self::F16(_) => DType::F16,
            Self::BF16(_) => DType::BF16,
            Self::F32(_) => DType::F32,
            Self::E4M3(_) => DType::E4M3,
            Self::E5M2(_) => DType::E5M2,
        }
    }

    /// Number of elements.
    pub const fn len(&self) -> usize {
        match self {
            Self::F16(s) => s.len(),
            Self::BF16(s) => s.len(),
            Self::F32(s) => s.len(),
            Self::E4M3(s) => s.len(),
            Self::E5M2(s) => s.len(),
        }
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements, if they are of this type.
    pub fn slice<T: Element>(&self) -> Option<&'a [T]> {
        (self.dtype() == T::DTYPE).then(|| bytemuck::cast_slice(self.bytes()))
    }

    /// The elements as bytes.
    pub fn bytes(&self) -> &'a [u8] {
        match self {
            Self::F16(s) => bytemuck::cast_slice(s),
            Self::BF16(s) => bytemuck::cast_slice(s),
            Self::F32(s) => bytemuck::cast_slice(s),
            Self::E4M3(s) => bytemuck::cast_slice(s),
            Self::E5M2(s) => bytemuck::cast_slice(s),
        }
    }
}

impl<'a> DataMut<'a> {
    /// The elements, if they are of this type.
    pub fn into_slice<T: Element>(self) -> Option<&'a mut [T]> {
        (self.as_data().dtype() == T::DTYPE).then(|| match self {
            Self::F16(s) => bytemuck::cast_slice_mut(s),
            Self::BF16(s) => bytemuck::cast_slice_mut(s),
            Self::F32(s) => bytemuck::cast_slice_mut(s),
            Self::E4M3(s) => bytemuck::cast_slice_mut(s),
            Self::E5M2(s) => bytemuck::cast_slice_mut(s),
        })
    }

    /// The same elements, read-only.
    pub const fn as_data(&self) -> Data<'_> {
        match self {
            Self::F16(s) => Data::F16(s),
            Self::BF16(s) => Data::BF16(s),
            Self::F32(s) => Data::F32(s),
            Self::E4M3(s) => Data::E4M3(s),
            Self::E5M2(s) => Data::E5M2(s),
        }
    }

    /// The same elements, borrowed for less long.
    pub fn reborrow(&mut self) -> DataMut<'_> {
        match self {
            Self::F16(s) => DataMut::F16(s),
            Self::BF16(s) => DataMut::BF16(s),
            Self::F32(s) => DataMut::F32(s),
            Self::E4M3(s) => DataMut::E4M3(s),
            Self::E5M2(s) => DataMut::E5M2(s),
        }
    }

    /// The elements as bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::F16(s) => bytemuck::cast_slice_mut(s),
            Self::BF16(s) => bytemuck::cast_slice_mut(s),
            Self::F32(s) => bytemuck::cast_slice_mut(s),
            Self::E4M3(s) => bytemuck::cast_slice_mut(s),
            Self::E5M2(s) => bytemuck::cast_slice_mut(s),
        }
    }
}

/// A problem with the host memory it works on.
///
/// **Invariant:** every slice has the problem's element type and holds everything its layout reaches, so that a
/// backend indexes without checking again.
#[derive(Debug)]
pub struct HostCall<'a> {
    instance: Instance<'a>,
    q: Data<'a>,
    k: Data<'a>,
    v: Data<'a>,
    out: DataMut<'a>,
    lse: Option<&'a mut [f32]>,
}

impl<'a> HostCall<'a> {
    /// Binds `problem` to memory.
    pub fn bind<T: Element, O: Element>(
        problem: &'a Problem,
        values: &'a Values,
        [q, k, v]: [&'a [T]; 3],
        out: &'a mut [O],
        lse: Option<&'a mut [f32]>,
    ) -> Result<Self, ProblemError> {
        Self::bind_erased(problem, values, [q, k, v].map(T::erase), O::erase_mut(out), lse)
    }

    /// Binds `problem` to memory whose element type is known only at run time.
    pub fn bind_erased(
        problem: &'a Problem,
        values: &'a Values,
        [q, k, v]: [Data<'a>; 3],
        out: DataMut<'a>,
        lse: Option<&'a mut [f32]>,
    ) -> Result<Self, ProblemError> {
        let instance = Instance::new(problem, values)?;
        let operands = [
            (Operand::Q, problem.q(), q),
            (Operand::K, problem.k(), k),
            (Operand::V, problem.v(), v),
            (Operand::Out, problem.out(), out.as_data()),
        ];
        for (operand, layout, data) in operands {
            let (got, expected) = (data.dtype(), dtype_of(problem, operand));
            if got != expected && operand != Operand::Out && expected != problem.dtype() {
                return Err(ProblemError::OtherDType { operand, got, expected });
            }
            if got != expected {
                return Err(ProblemError::DType { operand, got, expected });
            }
            layout.check_len(operand, data.len())?;
        }
        if let Some(len) = lse.as_ref().map(|l| l.len()).filter(|&len| len != problem.rows()) {
            return Err(ProblemError::LseLength { needed: problem.rows(), len });
        }
        if problem.accumulate() && lse.is_none() {
            return Err(ProblemError::AccumulateLse);
        }
        Ok(Self { instance, q, k, v, out, lse })
    }

    /// The problem.
    pub const fn problem(&self) -> &'a Problem {
        self.instance.problem()
    }

    /// The problem with the call's lengths and sinks.
    pub const fn instance(&self) -> Instance<'a> {
        self.instance
    }

    /// Q, K and V.
    pub const fn inputs(&self) -> [Data<'a>; 3] {
        [self.q, self.k, self.v]
    }

    /// The output and, if asked for, the LSE of each row.
    pub fn outputs(&mut self) -> (DataMut<'_>, Option<&mut [f32]>) {
        (self.out.reborrow(), self.lse.as_deref_mut())
    }
}

fn dtype_of(problem: &Problem, operand: Operand) -> DType {
    match operand {
        Operand::Out => problem.out_dtype(),
        Operand::K | Operand::V => problem.kv_dtype(),
        _ => problem.dtype(),
    }
}
