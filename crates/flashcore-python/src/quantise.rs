//! Tensors rounded to 8 bits: by DLPack, computed on the CPU or on the caller's stream.

use flashcore::{Granularity, Operand, cuda::QuantiseTensors};
use flashcore_core::{DType, QuantiseProblem, QuantiseSpec};
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
    options::order,
};

/// What shares a factor, item by item of a mapping.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct QuantiseOptions {
    layout: String,
    /// Whether the result is E5M2 instead of E4M3.
    wide_range: bool,
    /// `tensor`, `head`, `block` or `channel`.
    per: String,
    /// Rows of a block.
    rows: usize,
    /// Heads that share a factor.
    group: usize,
    /// Whether the result is turned.
    turned: bool,
}

/// Tensors, item by item of a mapping.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Objects<'py> {
    x: Bound<'py, PyAny>,
    /// 8-bit integers will do.
    out: Bound<'py, PyAny>,
    factors: Bound<'py, PyAny>,
    means: Option<Bound<'py, PyAny>>,
    lengths: Option<Bound<'py, PyAny>>,
}

/// Rounds `tensors["x"]` to `tensors["out"]` and writes its factors, and its means where there is room for them.
///
/// Streams and `record` are those of `forward`; `bits_are_bf16` says whether 16-bit integers of x are bfloat16.
#[pyfunction]
#[pyo3(signature = (tensors, options, stream=None, record=false, bits_are_bf16=false))]
pub(crate) fn quantise(
    py: Python<'_>,
    tensors: Objects<'_>,
    options: QuantiseOptions,
    stream: Option<usize>,
    record: bool,
    bits_are_bf16: bool,
) -> PyResult<Option<Launched>> {
    let order = order(&options.layout)?;
    let mut kept = Kept::default();
    let call = Call::read(Request { stream, order, bits_are_bf16 }, &mut kept, &tensors, &options)?;
    let place = call.place()?;
    let stream = stream_of(py, place, stream, kept.exchange)?;
    py.detach(|| call.compute(&options, place, stream).map_err(|error| error.in_order(order)))?;
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
    x: Array,
    out: Array,
    factors: Array,
    means: Option<Array>,
    lengths: Option<Numbers>,
    order: Order,
}

impl Call {
    fn read(
        request: Request,
        kept: &mut Kept,
        tensors: &Objects<'_>,
        options: &QuantiseOptions,
    ) -> Result<Self, CallError> {
        let to = if options.wide_range { DType::E5M2 } else { DType::E4M3 };
        let x = kept.keep(request.input(&tensors.x, Operand::X)?);
        let bytes = Request { bits_are_bf16: true, ..request };
        let mut out = kept.keep(bytes.output(&tensors.out, Operand::Out)?);
        out.dtype = if out.dtype.is_narrow() { to } else { out.dtype };
        let factors = kept.keep(request.output(&tensors.factors, Operand::Factors)?);
        let means = tensors.means.as_ref().map(|means| request.output(means, Operand::Means)).transpose()?;
        let lengths = tensors.lengths.as_ref().map(|lengths| request.numbers(lengths, Operand::LengthsQ));
        let lengths = lengths.transpose()?.map(|lengths| kept.keep(lengths));
        Ok(Self {
            x,
            out,
            factors,
            means: means.map(|means| kept.keep(means)),
            lengths,
            order: request.order,
        })
    }

    fn place(&self) -> Result<Place, CallError> {
        let first = self.x.place;
        let arrays = [&self.out, &self.factors].into_iter().chain(&self.means);
        let numbers = self.lengths.iter().map(|numbers| (numbers.operand, numbers.place));
        let mut all = arrays.map(|array| (array.operand, array.place)).chain(numbers);
        match all.find(|(_, place)| *place != first) {
            Some((operand, place)) => Err(CallError::Places { operand, place, first }),
            None => Ok(first),
        }
    }

    fn problem(&self, options: &QuantiseOptions) -> Result<QuantiseProblem, CallError> {
        let per = match options.per.as_str() {
            "tensor" => Granularity::PerTensor,
            "head" => Granularity::PerHead,
            "block" => Granularity::PerBlock(options.rows),
            "channel" => Granularity::PerChannel,
            other => return Err(CallError::Granularity { given: other.to_owned() }),
        };
        let spec = QuantiseSpec {
            to: self.out.dtype,
            out: Some(self.out.layout(if options.turned { Order::Bhsd } else { self.order })?),
            turned: options.turned,
            per,
            group: options.group,
            centred: self.means.is_some(),
            used: self.lengths.map(|lengths| lengths.index),
            ..QuantiseSpec::new(self.x.dtype, self.x.layout(self.order)?)
        };
        Ok(spec.parse()?)
    }

    fn compute(&self, options: &QuantiseOptions, place: Place, stream: usize) -> Result<(), CallError> {
        let problem = self.problem(options)?;
        self.check(&problem)?;
        let tensors = QuantiseTensors {
            x: self.x.address as u64,
            out: self.out.address as u64,
            factors: self.factors.address as u64,
            means: self.means.map_or(0, |means| means.address as u64),
            lengths: self.lengths.map_or(0, |lengths| lengths.address as u64),
        };
        match place {
            Place::Host => {
                let used = self.lengths.map(|lengths| clamped(&lengths, problem.dims().seq));
                // SAFETY: views that their producers handed out and `check` compared with the problem; Python's caller
                // holds them.
                unsafe { host::quantise(&problem, used.as_deref(), &tensors) }
            }
            Place::Cuda(index) => {
                let alignment = device::alignment([tensors.x, tensors.out]);
                let ready = device::open(index)?.prepare_quantise_aligned(&problem, alignment)?;
                // SAFETY: as above; frameworks free memory in the order of the stream, and others hold `Launched`.
                unsafe { device::launch(&ready, &tensors, stream.into()) }
            }
        }
    }

    /// Demands that elements lie where elements may, as many as the problem has, and that nothing is read from what is
    /// written.
    fn check(&self, problem: &QuantiseProblem) -> Result<(), CallError> {
        self.x.check_alignment()?;
        self.factors.check_count(problem.factors())?;
        self.means.map_or(Ok(()), |means| means.check_count(problem.means()))?;
        if let Some(lengths) = self.lengths.filter(|lengths| lengths.len != problem.dims().batch) {
            let (operand, given, needed) = (lengths.operand, lengths.len, problem.dims().batch);
            return Err(CallError::Count { operand, given, needed, what: "one for each batch entry" });
        }
        let (x, out) = (self.x.range(), self.out.range());
        if !x.is_empty() && x.start < out.end && out.start < x.end {
            return Err(CallError::Shared { operand: Operand::X });
        }
        Ok(())
    }
}

/// Lengths on the host, brought between 0 and the rows there are, as kernels do.
fn clamped(lengths: &Numbers, rows: usize) -> Vec<u32> {
    let within = |length: i64| length.clamp(0, rows as i64) as u32;
    host::wide(lengths).into_iter().map(within).collect()
}
