//! One call: tensors in, a problem out of them, computed on the CPU or launched on the caller's stream.

mod check;
mod factors;
mod numbers;

use flashcore::{Dropout, Operand, Problem, Spec, Values, cuda::DeviceTensors};
use flashcore_core::{Bias, Dims};
use pyo3::prelude::*;

use crate::{
    array::{Array, Numbers, Order, Place, Table},
    device::{self, Queue},
    dropout::Seed,
    error::CallError,
    exchange::Exchange,
    host,
    import::Request,
    kept::Kept,
    launched::Launched,
    options::{self, Options},
    parts::{Part, split},
};

/// Widest alignment of addresses that any kernel makes use of, in bytes.
pub(crate) const WIDEST: usize = 16;

/// Attention over `q`, `k` and `v`, written to `out` and, where wanted, `lse`.
///
/// Tensors on a GPU are computed on `stream` (a DLPack stream number) or, where that is None, on the current stream of
/// q's framework. With `record`, returns the launch, which holds the inputs while it is under way. `bits_are_bf16` says
/// of q, k, v and out whether their 16-bit integers are bfloat16.
#[pyfunction]
#[pyo3(signature = (q, k, v, out, lse, options, values=None, stream=None, record=false, bits_are_bf16=[false; 4]))]
#[expect(clippy::too_many_arguments, reason = "five tensors and how to compute them")]
pub(crate) fn forward(
    py: Python<'_>,
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    lse: Option<&Bound<'_, PyAny>>,
    options: &Options,
    values: Option<&options::Values>,
    stream: Option<usize>,
    record: bool,
    bits_are_bf16: [bool; 4],
) -> PyResult<Option<Launched>> {
    let order = options.order;
    let [of_q, of_k, of_v, of_out] =
        bits_are_bf16.map(|bits_are_bf16| Request { stream, order, bits_are_bf16 });
    let mut kept = Kept::default();
    let inputs = [
        kept.keep(of_q.input(q, Operand::Q)?),
        kept.keep(of_k.input(k, Operand::K)?),
        kept.keep(of_v.input(v, Operand::V)?),
    ];
    let mut call = Call::new(inputs, kept.keep(of_out.output(out, Operand::Out)?));
    call.lse = lse.map(|lse| of_out.output(lse, Operand::Lse)).transpose()?.map(|lse| kept.keep(lse));
    call.take_values(py, values, Request { stream, order, bits_are_bf16: false }, &mut kept)?;
    let place = call.place()?;
    let stream = stream_of(py, place, stream, kept.exchange)?;
    py.detach(|| call.compute(options, place, stream.into()))?;
    match place {
        Place::Cuda(index) if record => {
            // SAFETY: the framework's stream, or ours: alive.
            Ok(Some(unsafe { Launched::record(index, stream, kept.into_owned())? }))
        }
        _ => Ok(None),
    }
}

/// The stream to launch on; meaningless for host tensors.
pub(crate) fn stream_of(
    py: Python<'_>,
    place: Place,
    given: Option<usize>,
    exchange: Option<Exchange>,
) -> Result<usize, CallError> {
    match (given, place, exchange) {
        (Some(stream), ..) => Ok(stream),
        (None, Place::Cuda(index), Some(exchange)) => Ok(exchange.current_stream(py, index)? as usize),
        (None, ..) => Ok(0),
    }
}

/// Lengths, sinks, page table, factors, bias and seed as Python objects.
#[derive(Default)]
pub(crate) struct Given<'a, 'py> {
    pub(crate) lengths: [Option<&'a Bound<'py, PyAny>>; 2],
    pub(crate) sinks: Option<&'a Bound<'py, PyAny>>,
    pub(crate) table: Option<&'a Bound<'py, PyAny>>,
    pub(crate) factors: Vec<&'a Bound<'py, PyAny>>,
    pub(crate) bias: Option<&'a Bound<'py, PyAny>>,
    pub(crate) seed: Option<&'a Bound<'py, PyAny>>,
}

/// The tensors and numbers of one call, as plain data.
pub(crate) struct Call<'a> {
    /// Q, K, V and the output.
    pub(crate) arrays: [Array; 4],
    pub(crate) lse: Option<Array>,
    /// Used lengths or offsets of queries and of keys.
    pub(crate) lengths: [Option<Numbers>; 2],
    pub(crate) sinks: Option<Array>,
    /// What Q, K and V are multiplied by, or K and V alone; nothing where nothing is.
    factors: Vec<Array>,
    /// Rows of a block of q and of k, where factors are those of blocks.
    blocks: Option<[usize; 2]>,
    /// Whether v is turned.
    turned: bool,
    /// Which pages hold the keys.
    pub(crate) table: Option<Table>,
    /// What is added to scores.
    pub(crate) bias: Option<Array>,
    /// What decides which weights dropout drops.
    pub(crate) seed: Option<Seed>,
    pub(crate) longest: Option<(usize, usize)>,
    /// First and one-past-last key of each batch entry.
    pub(crate) ranges: Option<&'a (Vec<u32>, Vec<u32>)>,
}

impl<'a> Call<'a> {
    pub(crate) fn new([q, k, v]: [Array; 3], out: Array) -> Self {
        let arrays = [q, k, v, out];
        let (lengths, sinks, table, bias) = ([None; 2], None, None, None);
        let (factors, longest) = (Vec::new(), None);
        Self {
            arrays,
            lse: None,
            lengths,
            sinks,
            factors,
            blocks: None,
            turned: false,
            table,
            bias,
            seed: None,
            longest,
            ranges: None,
        }
    }

    /// Takes in what Python code has put together.
    pub(crate) fn take_values(
        &mut self,
        py: Python<'_>,
        values: Option<&'a options::Values>,
        request: Request,
        kept: &mut Kept,
    ) -> Result<(), CallError> {
        let Some(values) = values else { return Ok(()) };
        let bound = |object: &'_ Option<Py<PyAny>>| object.as_ref().map(|object| object.bind(py).clone());
        let given =
            [&values.lengths_q, &values.lengths_kv, &values.sinks, &values.table, &values.bias, &values.seed];
        let [lengths_q, lengths_kv, sinks, table, bias, seed] = given.map(bound);
        let lengths = [lengths_q.as_ref(), lengths_kv.as_ref()];
        let factors = values.factors.iter().map(|one| one.bind(py)).collect();
        let [sinks, table, bias, seed] = [&sinks, &table, &bias, &seed].map(Option::as_ref);
        (self.blocks, self.turned) = (values.blocks, values.turned);
        self.bind(Given { lengths, sinks, table, factors, bias, seed }, request, kept)?;
        (self.longest, self.ranges) = (values.longest, values.ranges.as_ref());
        Ok(())
    }

    /// Takes in lengths, sinks, page table, bias and seed.
    pub(crate) fn bind(
        &mut self,
        given: Given<'_, '_>,
        request: Request,
        kept: &mut Kept,
    ) -> Result<(), CallError> {
        let sides = given.lengths.into_iter().zip([Operand::LengthsQ, Operand::LengthsKv]);
        for (to, (given, operand)) in self.lengths.iter_mut().zip(sides) {
            if let Some(given) = given {
                *to = Some(kept.keep(request.numbers(given, operand)?));
            }
        }
        if let Some(table) = given.table {
            self.table = Some(kept.keep(request.table(table)?));
        }
        let operands = [Operand::V, Operand::K, Operand::Q].into_iter();
        for (factors, operand) in given.factors.iter().rev().zip(operands) {
            self.factors.insert(0, kept.keep(request.input(factors, operand)?));
        }
        if let Some(sinks) = given.sinks {
            self.sinks = Some(kept.keep(request.input(sinks, Operand::Sinks)?));
        }
        if let Some(bias) = given.bias {
            self.bias = Some(kept.keep(request.input(bias, Operand::Bias)?));
        }
        if let Some(seed) = given.seed {
            self.seed = Some(kept.keep(request.seed(seed)?));
        }
        Ok(())
    }

    /// Where everything is; all in one place.
    pub(crate) fn place(&self) -> Result<Place, CallError> {
        let first = self.arrays[0].place;
        let floats = self.arrays.iter().chain(&self.lse).chain(&self.sinks).chain(&self.bias);
        let floats = floats.chain(&self.factors).map(|a| (a.operand, a.place));
        let numbers = self.lengths.iter().flatten().map(|n| (n.operand, n.place));
        let table = self.table.iter().map(|table| (Operand::Table, table.place));
        let seed = self.seed.iter().map(|seed| (Operand::Seed, seed.place));
        match floats.chain(numbers).chain(table).chain(seed).find(|&(_, place)| place != first) {
            Some((operand, place)) => Err(CallError::Places { operand, place, first }),
            None => Ok(first),
        }
    }

    /// Computes or launches.
    pub(crate) fn compute(&self, options: &Options, place: Place, queue: Queue<'_>) -> Result<(), CallError> {
        self.run(options, place, queue).map_err(|error| error.in_order(options.order))
    }

    fn run(&self, options: &Options, place: Place, queue: Queue<'_>) -> Result<(), CallError> {
        let spec = self.spec(options)?;
        match (self.ranges, place) {
            (Some((starts, ends)), _) => {
                let values = match place {
                    Place::Host => self.host_values(options.order, spec.q.dims().heads)?,
                    Place::Cuda(_) => Values::default(),
                };
                let whole = spec.parse()?;
                self.check(&whole)?;
                let parts = split(whole.spec(), starts, ends)?;
                parts.into_iter().try_for_each(|part| self.step(part, &values, place, queue))
            }
            (None, Place::Host) => {
                let values = self.host_values(options.order, spec.q.dims().heads)?;
                let part = Part::whole(spec.with(&values));
                self.checked_step(part, &values, place, queue)
            }
            (None, Place::Cuda(_)) => {
                let part = Part::whole(self.with_kinds(spec, options.order)?);
                self.checked_step(part, &Values::default(), place, queue)
            }
        }
    }

    /// The problems of a call on the host, and its numbers.
    pub(crate) fn host_parts(&self, options: &Options) -> Result<(Vec<Part>, Values), CallError> {
        let spec = self.spec(options)?;
        let values = self.host_values(options.order, spec.q.dims().heads)?;
        let parts = match self.ranges {
            Some((starts, ends)) => split(spec.parse()?.spec(), starts, ends)?,
            None => vec![Part::whole(spec.with(&values))],
        };
        Ok((parts, values))
    }

    /// The problems of a call on a GPU, whose numbers stay there.
    pub(crate) fn device_parts(&self, options: &Options) -> Result<Vec<Part>, CallError> {
        let spec = self.spec(options)?;
        match self.ranges {
            Some((starts, ends)) => split(spec.parse()?.spec(), starts, ends),
            None => Ok(vec![Part::whole(self.with_kinds(spec, options.order)?)]),
        }
    }

    /// Where lengths of queries and of keys, sinks, bias and seed lie on a GPU; 0 where there are none.
    pub(crate) fn value_addresses(&self) -> [u64; 5] {
        let [q, kv] = self.lengths.map(|numbers| numbers.map_or(0, |numbers| numbers.address as u64));
        let [sinks, bias] =
            [self.sinks, self.bias].map(|array| array.map_or(0, |array| array.address as u64));
        [q, kv, sinks, bias, self.seed.map_or(0, |seed| seed.address as u64)]
    }

    fn spec(&self, options: &Options) -> Result<Spec, CallError> {
        let [dtype, of_k, of_v] = [0, 1, 2].map(|n: usize| self.arrays[n].dtype);
        let cached = of_k.is_narrow() && of_k == of_v && of_k != dtype;
        if let Some(other) = self.arrays[..3].iter().find(|array| array.dtype != dtype && !cached) {
            return Err(CallError::dtypes(other.operand, other.dtype, dtype));
        }
        if self.ranges.is_some() && (self.lengths.iter().any(Option::is_some) || self.bias.is_some()) {
            return Err(CallError::RangesAndLengths);
        }
        if self.ranges.is_some() && (self.turned || !self.factors.is_empty()) {
            return Err(CallError::RangesAndFactors);
        }
        if self.ranges.is_some() && options.dropout.is_some() {
            return Err(CallError::RangesAndDropout);
        }
        let keys = self.key_order(options.order)?;
        let [q, k, v, out] = &self.arrays;
        let (q, out) = (q.layout(options.order)?, out.layout(options.order)?);
        let (k, v) = (k.layout(keys)?, v.layout(if self.turned { Order::Bhsd } else { keys })?);
        self.check_ranks(options.order)?;
        let features = if self.turned { out.dims().dim } else { v.dims().dim };
        let values = Dims { dim: features, ..k.dims() };
        let scales = self.scales(cached, [q.dims(), k.dims(), values])?;
        Ok(Spec {
            kv_dtype: cached.then_some(of_k),
            turned: self.turned,
            scales,
            out: Some(out),
            out_dtype: Some(self.arrays[3].dtype),
            mask: options.mask,
            scale: options.scale,
            softcap: options.softcap,
            accumulate: options.accumulate,
            batch_invariant: options.batch_invariant,
            sinks: self.sinks.map(|sinks| sinks.dtype),
            bias: self.bias.map(|bias| bias_kind(&bias)).transpose()?,
            dropout: options.dropout.map(Dropout::new),
            ..Spec::new(dtype, q, k, v)
        })
    }

    /// In which order K and V have their dimensions; pages have four of them.
    fn key_order(&self, order: Order) -> Result<Order, CallError> {
        let Some(_) = self.table else { return Ok(order) };
        let (keys, dimensions) = match order {
            Order::Bhsd => (Order::Bhsd, "pages, heads, rows of a page, dim"),
            Order::Bshd | Order::Packed => (Order::Bshd, "pages, rows of a page, heads, dim"),
        };
        let [q, k, v, _] = &self.arrays;
        let padded = (order != Order::Packed).then_some((q, "one batch entry for each row of the table"));
        let mut needed = [(k, dimensions), (v, dimensions)].into_iter().chain(padded);
        match needed.find(|(array, _)| array.rank() != 4) {
            Some((array, dimensions)) => {
                Err(CallError::PageRank { operand: array.operand, rank: array.rank(), dimensions })
            }
            None => Ok(keys),
        }
    }

    /// Demands that tensors without a batch, or without heads, are among their like.
    fn check_ranks(&self, order: Order) -> Result<(), CallError> {
        let [q, k, v, out] = &self.arrays;
        let others = if self.table.is_some() { &[out][..] } else { &[k, v, out] };
        match others.iter().find(|other| other.rank() != q.rank()) {
            Some(other) => {
                let (operand, other) = (other.operand, other.rank());
                Err(CallError::Ranks { operand, other, first: q.rank(), order })
            }
            None => Ok(()),
        }
    }

    fn checked_step(
        &self,
        part: Part,
        values: &Values,
        place: Place,
        queue: Queue<'_>,
    ) -> Result<(), CallError> {
        let problem = part.spec.clone().parse()?;
        self.check(&problem)?;
        self.step_with(&problem, &part, values, place, queue)
    }

    fn step(&self, part: Part, values: &Values, place: Place, queue: Queue<'_>) -> Result<(), CallError> {
        let problem = part.spec.clone().parse()?;
        self.step_with(&problem, &part, values, place, queue)
    }

    /// One problem on a part of the tensors.
    fn step_with(
        &self,
        problem: &Problem,
        part: &Part,
        values: &Values,
        place: Place,
        queue: Queue<'_>,
    ) -> Result<(), CallError> {
        let at = |n: usize| self.arrays[n].address.wrapping_add(part.offsets[n]);
        let tensors = [at(0), at(1), at(2), at(3)];
        let lse = self.lse.map(|lse| lse.address.wrapping_add(part.offsets[4]));
        match place {
            // SAFETY: views that their producers handed out, checked against the problem's layouts; the caller of
            // Python's function holds them, and `check` found the output apart from the inputs.
            Place::Host => unsafe { host::run(problem, values, tensors, lse) },
            Place::Cuda(index) => {
                let [q, k, v, out] = tensors.map(|at| at as u64);
                let [lengths_q, lengths_kv, sinks, bias, seed] = self.value_addresses();
                let tensors = DeviceTensors {
                    q,
                    k,
                    v,
                    out,
                    lse: lse.map_or(0, |lse| lse as u64),
                    lengths_q,
                    lengths_kv,
                    table: self.table.map_or(0, |table| table.address as u64),
                    sinks,
                    factors: self.factor_addresses(),
                    bias,
                    seed,
                };
                let alignment = device::alignment([q, k, v, out]);
                let ready = device::open(index)?.prepare_aligned(problem, alignment)?;
                // SAFETY: as above; frameworks free memory in the order of the stream, and others hold `Launched`.
                unsafe { device::launch(&ready, &tensors, queue) }
            }
        }
    }
}

/// What a plan has to know of a bias: four dimensions are pairs, fewer are slopes.
fn bias_kind(bias: &Array) -> Result<Bias, CallError> {
    Ok(match bias.rank() {
        4 => Bias::Pairs { dtype: bias.dtype, layout: bias.layout(Order::Bhsd)? },
        rank => Bias::Slopes { per_sequence: rank == 2 },
    })
}
