//! Gradients: the tensors of a call with those of its result by DLPack, gradients into tensors of the caller's.

use flashcore::{
    BackwardProblem, BackwardSpec, Dims, Layout, Operand, RowSums, Spec, Values, cuda::BackwardTensors,
};
use pyo3::prelude::*;

use crate::{
    array::{Array, Order, Place},
    call::{Call, stream_of},
    device::{self, Queue},
    error::CallError,
    exchange::Exchange,
    host,
    import::Request,
    kept::Kept,
    launched::Launched,
    options::{self, Options},
    parts::Part,
};

/// The gradients of `forward` over `q`, `k` and `v`, written to `dq`, `dk`, `dv` and, where wanted, `d_sinks`.
///
/// `rows` are the sums of d_out times out over each row; where they are None, `out` is given. `bits_are_bf16` says of all
/// tensors whether their 16-bit integers are bfloat16. Keys that `values` leave out have no gradient: their rows of dk and
/// dv are written as zeros, but for `ranges`, beyond which nothing is written. On a GPU `d_sinks` has a row for each batch
/// entry, zeros at first, of which only the sum means something. Streams and `record` are those of `forward`.
#[pyfunction]
#[pyo3(signature = (
    q, k, v, out, rows, lse, d_out, dq, dk, dv, d_sinks, options, values=None, bits_are_bf16=false, stream=None,
    record=false
))]
#[expect(clippy::too_many_arguments, reason = "eleven tensors and how to compute them")]
pub(crate) fn backward(
    py: Python<'_>,
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    out: Option<&Bound<'_, PyAny>>,
    rows: Option<&Bound<'_, PyAny>>,
    lse: &Bound<'_, PyAny>,
    d_out: &Bound<'_, PyAny>,
    dq: &Bound<'_, PyAny>,
    dk: &Bound<'_, PyAny>,
    dv: &Bound<'_, PyAny>,
    d_sinks: Option<&Bound<'_, PyAny>>,
    options: &Options,
    values: Option<&options::Values>,
    bits_are_bf16: bool,
    stream: Option<usize>,
    record: bool,
) -> PyResult<Option<Launched>> {
    let request = Request { stream, order: options.order, bits_are_bf16 };
    let mut kept = Kept::default();
    let mut read = |object, operand| request.input(object, operand).map(|imported| kept.keep(imported));
    let qkv = [read(q, Operand::Q)?, read(k, Operand::K)?, read(v, Operand::V)?];
    let out = out.map(|out| read(out, Operand::Out)).transpose()?;
    let rows = rows.map(|rows| read(rows, Operand::RowSums)).transpose()?;
    let (lse, d_out) = (read(lse, Operand::Lse)?, read(d_out, Operand::DOut)?);
    let mut write = |object, operand| request.output(object, operand).map(|imported| kept.keep(imported));
    let grads = [write(dq, Operand::DQ)?, write(dk, Operand::DK)?, write(dv, Operand::DV)?];
    let d_sinks = d_sinks.map(|sinks| write(sinks, Operand::DSinks)).transpose()?;
    // Without an output, its gradient says how it lies.
    let mut call = Call::new(qkv, out.unwrap_or(d_out));
    call.lse = Some(lse);
    call.take_values(py, values, request, &mut kept)?;
    let backward = Backward { call, has_out: out.is_some(), rows, d_out, grads, d_sinks };
    let (place, stream) = backward.launch(py, options, stream, kept.exchange)?;
    match place {
        Place::Cuda(index) if record => {
            // SAFETY: the framework's stream, or ours: alive.
            Ok(Some(unsafe { Launched::record(index, stream, kept.into_owned())? }))
        }
        _ => Ok(None),
    }
}

/// The tensors of one call, as plain data.
pub(crate) struct Backward<'a> {
    pub(crate) call: Call<'a>,
    pub(crate) has_out: bool,
    pub(crate) rows: Option<Array>,
    pub(crate) d_out: Array,
    pub(crate) grads: [Array; 3],
    pub(crate) d_sinks: Option<Array>,
}

impl Backward<'_> {
    /// Computes where the tensors are, on the stream that is given or the current one of their framework.
    pub(crate) fn launch(
        &self,
        py: Python<'_>,
        options: &Options,
        stream: Option<usize>,
        exchange: Option<Exchange>,
    ) -> PyResult<(Place, usize)> {
        let place = self.place()?;
        let stream = stream_of(py, place, stream, exchange)?;
        py.detach(|| {
            self.compute(options, place, stream.into()).map_err(|error| error.in_order(options.order))
        })?;
        Ok((place, stream))
    }

    pub(crate) fn compute(&self, options: &Options, place: Place, queue: Queue<'_>) -> Result<(), CallError> {
        match place {
            Place::Host => self.on_host(options),
            Place::Cuda(index) => self.on_gpu(options, index, queue),
        }
    }

    fn on_gpu(&self, options: &Options, index: u32, queue: Queue<'_>) -> Result<(), CallError> {
        let parts = self.call.device_parts(options)?;
        let Dims { batch, heads, .. } = self.call.arrays[0].layout(options.order)?.dims();
        self.check(&[batch, heads], options.order)?;
        for (n, part) in parts.iter().enumerate() {
            let problem = self.spec(part, options)?.parse()?;
            self.call.check_bias(problem.forward())?;
            let addresses = self.addresses(part, options.order)?;
            let d_sinks = self.d_sinks.map(|sinks| sinks.address + n * heads * size_of::<f32>());
            let tensors = self.device_tensors(&addresses, d_sinks);
            let BackwardTensors { q, k, v, out, d_out, dq, dk, dv, .. } = tensors;
            let alignment = device::alignment([q, k, v, out, d_out, dq, dk, dv]);
            let ready = device::open(index)?.prepare_backward_aligned(&problem, alignment)?;
            // SAFETY: views that their producers handed out and `check` compared with the problem; frameworks free memory
            // in the order of the stream, and others hold `Launched`.
            unsafe { device::launch(&ready, &tensors, queue)? };
        }
        Ok(())
    }

    fn device_tensors(&self, addresses: &host::GradAddresses, d_sinks: Option<usize>) -> BackwardTensors {
        let ([q, k, v], [dq, dk, dv]) =
            (addresses.qkv.map(|at| at as u64), addresses.grads.map(|at| at as u64));
        let [lengths_q, lengths_kv, sinks, bias] = self.call.value_addresses();
        let optional = |at: Option<usize>| at.map_or(0, |at| at as u64);
        BackwardTensors {
            q,
            k,
            v,
            out: optional(addresses.out),
            lse: addresses.lse as u64,
            d_out: addresses.d_out as u64,
            row_sums: optional(addresses.rows),
            dq,
            dk,
            dv,
            lengths_q,
            lengths_kv,
            sinks,
            bias,
            seed: 0,
            d_sinks: optional(d_sinks),
        }
    }

    fn on_host(&self, options: &Options) -> Result<(), CallError> {
        let (parts, values) = self.call.host_parts(options)?;
        let heads = self.call.arrays[0].layout(options.order)?.dims().heads;
        self.check(&[heads], options.order)?;
        // Parts are batch entries, which all have the same sinks.
        let (mut total, mut of_part) = (vec![0.0; heads], vec![0.0; heads]);
        for part in parts {
            let problem = self.spec(&part, options)?.parse()?;
            self.call.check_bias(problem.forward())?;
            let sinks = self.d_sinks.map(|_| &mut of_part[..]);
            self.step(&problem, &part, &values, options.order, sinks)?;
            total.iter_mut().zip(&of_part).for_each(|(sum, x)| *sum += x);
        }
        if let Some(sinks) = self.d_sinks {
            // SAFETY: a view that its producer handed out, and as many values as `check` saw.
            unsafe { host::store(sinks.address, &total) };
        }
        Ok(())
    }

    /// Where everything is; all in one place.
    fn place(&self) -> Result<Place, CallError> {
        let first = self.call.place()?;
        let more = [self.d_out].into_iter().chain(self.grads).chain(self.rows).chain(self.d_sinks);
        match more.into_iter().find(|array| array.place != first) {
            Some(other) => Err(CallError::Places { operand: other.operand, place: other.place, first }),
            None => Ok(first),
        }
    }

    pub(crate) fn spec(&self, part: &Part, options: &Options) -> Result<BackwardSpec, CallError> {
        let order = options.order;
        let [dq, dk, dv] = self.grads.each_ref().map(|grad| grad.layout(order));
        let (batch, keys) = (part.spec.q.dims().batch, part.spec.k.dims().seq);
        let cut = |layout: Layout, seq: Option<usize>| {
            let dims = layout.dims();
            let dims = Dims { batch, seq: seq.unwrap_or(dims.seq), ..dims };
            Layout::strided(dims, layout.strides()).map_err(CallError::from)
        };
        Ok(BackwardSpec {
            d_out: Some(cut(self.d_out.layout(order)?, None)?),
            dq: Some(cut(dq?, None)?),
            dk: Some(cut(dk?, Some(keys))?),
            dv: Some(cut(dv?, Some(keys))?),
            grad_dtype: Some(self.grads[0].dtype),
            accumulate: options.accumulate,
            row_sums: if self.has_out { RowSums::Computed } else { RowSums::Given },
            ..BackwardSpec::new(Spec { out_dtype: Some(self.d_out.dtype), ..part.spec.clone() })
        })
    }

    /// One problem on a part of the tensors.
    fn step(
        &self,
        problem: &BackwardProblem,
        part: &Part,
        values: &Values,
        order: Order,
        sinks: Option<&mut [f32]>,
    ) -> Result<(), CallError> {
        let addresses = self.addresses(part, order)?;
        // SAFETY: views that their producers handed out and `check` compared with the problem; Python's caller holds
        // them.
        unsafe { host::backward(problem, values, &addresses, sinks) }
    }

    /// Where the tensors of a part start.
    fn addresses(&self, part: &Part, order: Order) -> Result<host::GradAddresses, CallError> {
        let [of_q, of_k, of_v, of_out, of_lse] = part.offsets;
        let offset = |array: &Array, key: usize| -> Result<usize, CallError> {
            let start = array.layout(order)?.row(part.first_entry, 0, key) * array.dtype.bytes();
            Ok(array.address.wrapping_add(start))
        };
        let at = |n: usize, offset: usize| self.call.arrays[n].address.wrapping_add(offset);
        let along = |array: &Array| array.address.wrapping_add(of_lse);
        let [dq, dk, dv] = &self.grads;
        Ok(host::GradAddresses {
            qkv: [at(0, of_q), at(1, of_k), at(2, of_v)],
            out: self.has_out.then(|| at(3, of_out)),
            rows: self.rows.as_ref().map(along),
            lse: self.call.lse.as_ref().map_or(0, along),
            d_out: offset(&self.d_out, 0)?,
            grads: [offset(dq, 0)?, offset(dk, part.first_key)?, offset(dv, part.first_key)?],
        })
    }

    /// Demands that elements lie where elements may, that nothing is read from what is written, and that values of rows
    /// and of sinks are as many as there are.
    fn check(&self, of_sinks: &[usize], order: Order) -> Result<(), CallError> {
        let range = |array: &Array| -> Result<std::ops::Range<usize>, CallError> {
            array.check_alignment()?;
            let bytes = array.layout(order)?.span() * array.dtype.bytes();
            Ok(array.address..array.address.wrapping_add(bytes))
        };
        let mut inputs = Vec::new();
        for array in self.call.arrays.iter().chain([&self.d_out]) {
            inputs.push((array.operand, range(array)?));
        }
        for (n, grad) in self.grads.iter().enumerate() {
            let (own, dtype) = (range(grad)?, self.grads[0].dtype);
            if grad.dtype != dtype {
                return Err(CallError::dtypes(grad.operand, grad.dtype, dtype));
            }
            let others = self.grads[..n].iter().map(|other| Ok((other.operand, range(other)?)));
            let others = others.collect::<Result<Vec<_>, CallError>>()?;
            let shared = inputs
                .iter()
                .chain(&others)
                .find(|(_, other)| !own.is_empty() && other.start < own.end && own.start < other.end);
            if let Some(&(operand, _)) = shared {
                return Err(CallError::SharedGradient { operand, grad: grad.operand });
            }
        }
        let dims = self.call.arrays[0].layout(order)?.dims();
        let (extents, rank) = ([dims.batch, dims.heads, dims.seq], self.call.arrays[0].rank());
        self.rows.iter().chain(&self.call.lse).try_for_each(|rows| rows.check_lse(extents, rank))?;
        match self.d_sinks {
            Some(sinks) => sinks.check_dense_f32(of_sinks),
            None => Ok(()),
        }
    }
}
