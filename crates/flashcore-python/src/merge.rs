//! Merging partial results: parts and their LSE by DLPack, put together on the CPU or on the caller's stream.

use flashcore::{Operand, cuda::MergeTensors};
use flashcore_core::{MAX_LISTED, MergeProblem, MergeSpec, Parts};
use pyo3::prelude::*;

use crate::{
    array::{Array, Order, Place},
    call::stream_of,
    device,
    error::CallError,
    host,
    import::Request,
    kept::Kept,
    launched::Launched,
    options::order,
};

/// Merges `parts` by their `lses` into `out` and, where wanted, `lse`.
///
/// Streams and `record` are those of `forward`; `bits_are_bf16` says of the parts and of out whether their 16-bit
/// integers are bfloat16.
#[pyfunction]
#[pyo3(signature = (parts, lses, out, lse, layout, stream=None, record=false, bits_are_bf16=[false; 2]))]
#[expect(clippy::too_many_arguments, reason = "tensors and how to compute them")]
pub(crate) fn merge(
    py: Python<'_>,
    parts: Vec<Bound<'_, PyAny>>,
    lses: Vec<Bound<'_, PyAny>>,
    out: &Bound<'_, PyAny>,
    lse: Option<&Bound<'_, PyAny>>,
    layout: &str,
    stream: Option<usize>,
    record: bool,
    bits_are_bf16: [bool; 2],
) -> PyResult<Option<Launched>> {
    let order = order(layout)?;
    let [of_parts, of_out] = bits_are_bf16.map(|bits_are_bf16| Request { stream, order, bits_are_bf16 });
    let mut kept = Kept::default();
    let mut read = |objects: &[Bound<'_, PyAny>], operand| -> Result<Vec<Array>, CallError> {
        objects.iter().map(|object| Ok(kept.keep(of_parts.input(object, operand)?))).collect()
    };
    let (parts, lses) = (read(&parts, Operand::Part)?, read(&lses, Operand::PartLse)?);
    let out = kept.keep(of_out.output(out, Operand::Out)?);
    let lse = lse.map(|lse| of_out.output(lse, Operand::Lse)).transpose()?.map(|lse| kept.keep(lse));
    let call = Merge { parts, lses, out, lse, order };
    let place = call.place()?;
    let stream = stream_of(py, place, stream, kept.exchange)?;
    py.detach(|| call.compute(place, stream).map_err(|error| error.in_order(order)))?;
    match place {
        Place::Cuda(index) if record => {
            // SAFETY: the framework's stream, or ours: alive.
            Ok(Some(unsafe { Launched::record(index, stream, kept.into_owned())? }))
        }
        _ => Ok(None),
    }
}

/// The tensors of one merge, as plain data.
struct Merge {
    parts: Vec<Array>,
    lses: Vec<Array>,
    out: Array,
    lse: Option<Array>,
    order: Order,
}

impl Merge {
    fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.parts.iter().chain(&self.lses).chain([&self.out]).chain(&self.lse)
    }

    fn place(&self) -> Result<Place, CallError> {
        let first = self.out.place;
        match self.arrays().find(|array| array.place != first) {
            Some(other) => Err(CallError::Places { operand: other.operand, place: other.place, first }),
            None => Ok(first),
        }
    }

    fn compute(&self, place: Place, stream: usize) -> Result<(), CallError> {
        let problem = self.problem()?;
        self.check(&problem)?;
        let tensors = problem.parts().tensors();
        let addresses = |arrays: &[Array]| -> Vec<u64> {
            arrays.iter().take(tensors).map(|array| array.address as u64).collect()
        };
        let (parts, lses) = (addresses(&self.parts), addresses(&self.lses));
        let lse = self.lse.map(|lse| lse.address);
        match place {
            // SAFETY: views that their producers handed out and `check` compared with the problem; Python's caller
            // holds them.
            Place::Host => unsafe { host::merge(&problem, &parts, &lses, self.out.address, lse) },
            Place::Cuda(index) => {
                let (out, lse) = (self.out.address as u64, lse.map_or(0, |lse| lse as u64));
                let alignment = device::alignment(parts.iter().copied().chain([out]));
                let ready = device::open(index)?.prepare_merge_aligned(&problem, alignment)?;
                let tensors = MergeTensors { parts: &parts, lses: &lses, out, lse };
                // SAFETY: as above; frameworks free memory in the order of the stream, and others hold `Launched`.
                unsafe { device::launch(&ready, &tensors, stream.into()) }
            }
        }
    }

    fn problem(&self) -> Result<MergeProblem, CallError> {
        let Some(first) = self.parts.first() else { return Err(CallError::NoParts) };
        if self.lses.len() != self.parts.len() {
            return Err(CallError::PartLses { parts: self.parts.len(), lses: self.lses.len() });
        }
        let layout = first.layout(self.order)?;
        for part in &self.parts {
            if part.dtype != first.dtype {
                return Err(CallError::dtypes(Operand::Part, part.dtype, first.dtype));
            }
            if part.layout(self.order)? != layout || part.rank() != self.out.rank() {
                return Err(CallError::OtherPart);
            }
        }
        let out = Some(self.out.layout(self.order)?);
        let spec = MergeSpec {
            out_dtype: self.out.dtype,
            out,
            ..MergeSpec::new(first.dtype, layout, self.listed())
        };
        Ok(spec.parse()?)
    }

    /// Many parts must lie one after another, and so must their LSE.
    fn listed(&self) -> Parts {
        let (count, rows) = (self.parts.len(), self.lses[0].count());
        let stride = |arrays: &[Array]| {
            let steps = arrays.windows(2).map(|pair| pair[1].address.wrapping_sub(pair[0].address));
            let first = steps.clone().next().unwrap_or(0);
            let bytes = arrays[0].dtype.bytes();
            (first.is_multiple_of(bytes) && steps.clone().all(|step| step == first)).then_some(first / bytes)
        };
        match (count > MAX_LISTED, stride(&self.parts), stride(&self.lses)) {
            (true, Some(stride), Some(lses)) if lses == rows => Parts::Stacked { count, stride },
            _ => Parts::Listed(count),
        }
    }

    /// Demands that elements lie where elements may, that LSE are as many as rows, and that nothing is read from what is
    /// written.
    fn check(&self, problem: &MergeProblem) -> Result<(), CallError> {
        let dims = problem.dims();
        let (rows, rank) = ([dims.batch, dims.heads, dims.seq], self.out.rank());
        self.lses.iter().chain(&self.lse).try_for_each(|lse| lse.check_lse(rows, rank))?;
        let range = |array: &Array, span: usize| {
            array.address..array.address.wrapping_add(span * array.dtype.bytes())
        };
        let out = range(&self.out, problem.out().span());
        self.out.check_alignment()?;
        for part in &self.parts {
            part.check_alignment()?;
            let part = range(part, problem.part().span());
            if !part.is_empty() && part.start < out.end && out.start < part.end {
                return Err(CallError::Shared { operand: Operand::Part });
            }
        }
        Ok(())
    }
}
