//! Grouped products: factors and offsets by DLPack, computed on the CPU or on the caller's stream.

use std::slice::from_raw_parts;

use flashcore::{Backend, Grouping, Operand, cuda::GroupedTensors};
use flashcore_core::{
    GroupedCall, GroupedError, GroupedInputs, GroupedProblem, GroupedSpec, Index, ProblemError,
};
use pyo3::prelude::*;

use crate::{
    array::{Array, Numbers, Order, Place},
    call::stream_of,
    device,
    error::CallError,
    host,
    import::Request,
    kept::Kept,
    launched::Launched,
};

/// Computes `mat_a` times `mat_b`, group by group, into `out`.
///
/// Streams and `record` are those of `forward`; `bits_are_bf16` says whether 16-bit integers are bfloat16.
#[pyfunction]
#[pyo3(signature = (mat_a, mat_b, out, offs, stream=None, record=false, bits_are_bf16=false))]
#[expect(clippy::too_many_arguments, reason = "tensors and how to compute them")]
pub(crate) fn grouped_mm(
    py: Python<'_>,
    mat_a: &Bound<'_, PyAny>,
    mat_b: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    offs: Option<&Bound<'_, PyAny>>,
    stream: Option<usize>,
    record: bool,
    bits_are_bf16: bool,
) -> PyResult<Option<Launched>> {
    let request = Request { stream, order: Order::Bhsd, bits_are_bf16 };
    let mut kept = Kept::default();
    let call = Call {
        a: kept.keep(request.input(mat_a, Operand::MatA)?),
        b: kept.keep(request.input(mat_b, Operand::MatB)?),
        out: kept.keep(request.output(out, Operand::Out)?),
        offsets: offs
            .map(|offs| request.numbers(offs, Operand::Offsets))
            .transpose()?
            .map(|offs| kept.keep(offs)),
    };
    let place = call.place()?;
    let stream = stream_of(py, place, stream, kept.exchange)?;
    py.detach(|| call.compute(place, stream))?;
    match place {
        Place::Cuda(index) if record => {
            // SAFETY: the framework's stream, or ours: alive.
            Ok(Some(unsafe { Launched::record(index, stream, kept.into_owned())? }))
        }
        _ => Ok(None),
    }
}

/// The tensors of one call, as plain data.
struct Call {
    a: Array,
    b: Array,
    out: Array,
    offsets: Option<Numbers>,
}

impl Call {
    fn place(&self) -> Result<Place, CallError> {
        let first = self.a.place;
        let arrays = [&self.b, &self.out].map(|array| (array.operand, array.place));
        let numbers = self.offsets.iter().map(|offsets| (offsets.operand, offsets.place));
        match arrays.into_iter().chain(numbers).find(|(_, place)| *place != first) {
            Some((operand, place)) => {
                Err(CallError::OtherPlace { operand, place, because: Operand::MatA, first })
            }
            None => Ok(first),
        }
    }

    fn compute(&self, place: Place, stream: usize) -> Result<(), CallError> {
        let problem = self.problem()?;
        self.check()?;
        let tensors = GroupedTensors {
            a: self.a.address as u64,
            b: self.b.address as u64,
            out: self.out.address as u64,
            offsets: self.offsets.map_or(0, |offsets| offsets.address as u64),
        };
        match place {
            // SAFETY: views that their producers handed out and `check` compared; Python's caller holds them.
            Place::Host => unsafe { on_host(&problem, &tensors, self.offsets.map(|offsets| offsets.len)) },
            Place::Cuda(index) => {
                let alignment = device::alignment([tensors.a, tensors.b, tensors.out]);
                let ready = device::open(index)?.prepare_grouped_aligned(&problem, alignment)?;
                // SAFETY: as above; frameworks free memory in the order of the stream, and others hold `Launched`.
                unsafe { device::launch(&ready, &tensors, stream.into()) }
            }
        }
    }

    fn problem(&self) -> Result<GroupedProblem, CallError> {
        let groups = self.offsets.map(|offsets| offsets.len);
        let (a, b) = (self.a.matrices()?, self.b.matrices()?);
        let grouping = match (self.a.rank(), self.b.rank(), groups) {
            (3, 3, None) => Grouping::Batch,
            (3, 3, Some(_)) => return Err(wrong(GroupedError::Offsets { given: true })),
            (_, _, None) => return Err(wrong(GroupedError::Offsets { given: false })),
            (2, 3, Some(_)) => Grouping::Rows,
            (3, _, Some(_)) => Grouping::Columns,
            (_, _, Some(groups)) => Grouping::Depth { groups },
        };
        let out = Some(self.out.out_matrices()?);
        let problem = GroupedSpec { out, ..GroupedSpec::new(self.a.dtype, a, b, grouping) }.parse()?;
        match groups {
            Some(len) if len != problem.groups() => {
                Err(wrong(GroupedError::OffsetCount { len, groups: problem.groups() }))
            }
            _ => Ok(problem),
        }
    }

    /// Demands elements of one type, at addresses where they may lie, 32-bit offsets, and an output that is nobody else's.
    fn check(&self) -> Result<(), CallError> {
        for array in [&self.a, &self.b, &self.out] {
            array.check_alignment()?;
            if array.dtype != self.a.dtype {
                return Err(array.other_dtype(&self.a));
            }
        }
        if let Some(offsets) = self.offsets.filter(|offsets| offsets.index != Index::I32) {
            return Err(CallError::NotIntegers { operand: offsets.operand, dtype: "int64".to_owned() });
        }
        let out = self.out.range();
        let inside = |array: &&&Array| {
            let range = array.range();
            !range.is_empty() && range.start < out.end && out.start < range.end
        };
        match [&self.a, &self.b].iter().find(inside) {
            Some(array) => Err(CallError::Shared { operand: array.operand }),
            None => Ok(()),
        }
    }
}

fn wrong(error: GroupedError) -> CallError {
    ProblemError::Grouped(error).into()
}

/// Computes grouped products on host memory.
///
/// # Safety
/// There must be live tensors of the problem's layouts at these addresses, and as many offsets; nobody else uses the result.
unsafe fn on_host(
    problem: &GroupedProblem,
    at: &GroupedTensors,
    offsets: Option<usize>,
) -> Result<(), CallError> {
    let dtype = problem.dtype();
    // SAFETY: the caller's promise.
    unsafe {
        let a = host::elements(at.a as usize, dtype, problem.a().span())?;
        let b = host::elements(at.b as usize, dtype, problem.b().span())?;
        let offsets = offsets.map(|len| from_raw_parts(host::pointer::<i32>(at.offsets as usize, len), len));
        let out = host::write(at.out as usize, dtype, problem.out())?;
        host::cpu()?.grouped(&mut GroupedCall::bind(problem, GroupedInputs { a, b, offsets }, out)?)?;
    }
    Ok(())
}
