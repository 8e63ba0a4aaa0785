//! New keys and values into a cache, padded or in pages: tensors by DLPack, written on the CPU or on the caller's stream.

use flashcore::{Index, Operand, cuda::AppendTensors};
use flashcore_core::{AppendProblem, AppendSpec, AppendValues, Dims, Factors, Pages, Rotary, Scales, Slots};
use pyo3::prelude::*;

use crate::{
    array::{Array, Numbers, Order, Place, Table},
    call::stream_of,
    device,
    error::CallError,
    host,
    import::Request,
    kept::Kept,
    launched::Launched,
};

/// In which order tensors have their dimensions; new rows that go to slots have no batch.
const ORDER: Order = Order::Bshd;

/// How keys and queries are turned.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct AppendOptions {
    interleaved: bool,
    /// Whether all queries of a sequence stand where its first new key does.
    together: bool,
}

/// Tensors, item by item of a mapping.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Objects<'py> {
    k: Bound<'py, PyAny>,
    v: Bound<'py, PyAny>,
    k_cache: Bound<'py, PyAny>,
    v_cache: Bound<'py, PyAny>,
    lengths: Option<Bound<'py, PyAny>>,
    slots: Option<Bound<'py, PyAny>>,
    table: Option<Bound<'py, PyAny>>,
    rotary: Option<[Bound<'py, PyAny>; 2]>,
    /// What keys and values of an 8-bit cache are divided by.
    factors: Option<[Bound<'py, PyAny>; 2]>,
    /// Queries, and where they go when they are turned.
    q: Option<[Bound<'py, PyAny>; 2]>,
}

/// Writes `tensors["k"]` and `tensors["v"]` into the caches.
///
/// Streams and `record` are those of `forward`; `bits_are_bf16` says whether 16-bit integers are bfloat16.
#[pyfunction]
#[pyo3(signature = (tensors, options, stream=None, record=false, bits_are_bf16=false))]
pub(crate) fn append(
    py: Python<'_>,
    tensors: Objects<'_>,
    options: AppendOptions,
    stream: Option<usize>,
    record: bool,
    bits_are_bf16: bool,
) -> PyResult<Option<Launched>> {
    let request = Request { stream, order: ORDER, bits_are_bf16 };
    let mut kept = Kept::default();
    let call = Call::read(request, &mut kept, &tensors)?;
    let place = call.place()?;
    let stream = stream_of(py, place, stream, kept.exchange)?;
    py.detach(|| call.compute(&options, place, stream).map_err(|error| error.in_order(ORDER)))?;
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
    /// New keys and values, and their caches.
    rows: [Array; 2],
    caches: [Array; 2],
    lengths: Option<Numbers>,
    slots: Option<Numbers>,
    table: Option<Table>,
    rotary: Option<[Array; 2]>,
    q: Option<[Array; 2]>,
    factors: Option<[Array; 2]>,
}

impl Call {
    fn read(request: Request, kept: &mut Kept, tensors: &Objects<'_>) -> Result<Self, CallError> {
        let numbers = |object: &Option<Bound<'_, PyAny>>, operand| {
            object.as_ref().map(|object| request.numbers(object, operand)).transpose()
        };
        let rows = [request.input(&tensors.k, Operand::K)?, request.input(&tensors.v, Operand::V)?]
            .map(|row| kept.keep(row));
        let caches = [
            request.output(&tensors.k_cache, Operand::CacheK)?,
            request.output(&tensors.v_cache, Operand::CacheV)?,
        ];
        let caches = caches.map(|cache| kept.keep(cache));
        let lengths = numbers(&tensors.lengths, Operand::LengthsKv)?.map(|lengths| kept.keep(lengths));
        let slots = numbers(&tensors.slots, Operand::Slots)?.map(|slots| kept.keep(slots));
        let table = tensors.table.as_ref().map(|table| request.table(table)).transpose()?;
        let table = table.map(|table| kept.keep(table));
        let rotary = match &tensors.rotary {
            Some([cos, sin]) => {
                let both = [request.input(cos, Operand::Rotary)?, request.input(sin, Operand::Rotary)?];
                Some(both.map(|one| kept.keep(one)))
            }
            None => None,
        };
        let q = match &tensors.q {
            Some([q, out]) => {
                let (q, out) = (request.input(q, Operand::Q)?, request.output(out, Operand::Out)?);
                Some([kept.keep(q), kept.keep(out)])
            }
            None => None,
        };
        let factors = match &tensors.factors {
            Some([k, v]) => {
                let both = [request.input(k, Operand::K)?, request.input(v, Operand::V)?];
                Some(both.map(|one| kept.keep(one)))
            }
            None => None,
        };
        Ok(Self { rows, caches, lengths, slots, table, rotary, q, factors })
    }

    fn arrays(&self) -> impl Iterator<Item = &Array> {
        let pairs = self.rotary.iter().chain(&self.q).flatten();
        self.rows.iter().chain(&self.caches).chain(pairs)
    }

    fn place(&self) -> Result<Place, CallError> {
        let first = self.rows[0].place;
        let numbers = self.lengths.iter().chain(&self.slots).map(|numbers| (numbers.operand, numbers.place));
        let table = self.table.iter().map(|table| (Operand::Table, table.place));
        let floats = self.arrays().chain(self.factors.iter().flatten());
        let mut all = floats.map(|array| (array.operand, array.place)).chain(numbers).chain(table);
        match all.find(|(_, place)| *place != first) {
            Some((operand, place)) => Err(CallError::Places { operand, place, first }),
            None => Ok(first),
        }
    }

    fn spec(&self, options: &AppendOptions) -> Result<AppendSpec, CallError> {
        let (dtype, cached) = (self.rows[0].dtype, self.caches[0].dtype);
        let narrow = cached.is_narrow() && !dtype.is_narrow();
        for array in self.arrays() {
            array.check_alignment()?;
            let is_cache = matches!(array.operand, Operand::CacheK | Operand::CacheV);
            let expected = if narrow && is_cache { cached } else { dtype };
            if array.dtype != expected {
                return Err(CallError::dtypes(array.operand, array.dtype, expected));
            }
        }
        let [k, v] = [self.rows[0].layout(ORDER)?, self.rows[1].layout(ORDER)?];
        let caches = [self.caches[0].layout(ORDER)?, self.caches[1].layout(ORDER)?];
        let rotary = self.rotary.map(|[cos, sin]| rotary(&cos, &sin, options)).transpose()?;
        let q = match &self.q {
            Some([q, out]) => Some([q.layout(ORDER)?, out.layout(ORDER)?]),
            None => None,
        };
        let slots = if self.slots.is_some() { Slots::Listed } else { Slots::Behind };
        let pages =
            self.table.map(|table| Pages { row_stride: table.row_stride, ..Pages::new(table.columns) });
        let index = self.lengths.map_or_else(Default::default, |lengths| lengths.index);
        let spec = AppendSpec::new(dtype, [k, v], caches);
        let (cache_dtype, scales) = (narrow.then_some(cached), self.scales(k.dims())?);
        Ok(AppendSpec { cache_dtype, scales, slots, pages, rotary, q, index, ..spec })
    }

    /// How the factors of keys and of values lie, which is alike.
    fn scales(&self, rows: Dims) -> Result<Option<Scales>, CallError> {
        let Some([k, v]) = &self.factors else { return Ok(None) };
        let [of_k, of_v] = [k, v].map(|factors| factors.cache_scales(rows.batch, rows.heads));
        let (of_k, of_v) = (of_k?, of_v?);
        if of_k != of_v {
            let (operand, given) = (v.operand, v.count());
            return Err(CallError::Factors { operand, given, batch: rows.batch, heads: rows.heads });
        }
        Ok(Some(of_k))
    }

    fn compute(&self, options: &AppendOptions, place: Place, stream: usize) -> Result<(), CallError> {
        let problem = self.spec(options)?.parse()?;
        self.check_counts(&problem)?;
        let pair = |pair: Option<[Array; 2]>| pair.map_or([0; 2], |pair| pair.map(|one| one.address as u64));
        let ([cos, sin], [q, out]) = (pair(self.rotary), pair(self.q));
        let at = |numbers: Option<Numbers>| numbers.map_or(0, |numbers| numbers.address as u64);
        let tensors = AppendTensors {
            k: self.rows[0].address as u64,
            v: self.rows[1].address as u64,
            cache_k: self.caches[0].address as u64,
            cache_v: self.caches[1].address as u64,
            lengths: at(self.lengths),
            slots: at(self.slots),
            table: self.table.map_or(0, |table| table.address as u64),
            cos,
            sin,
            q,
            out,
            factors: pair(self.factors),
        };
        match place {
            Place::Host => {
                self.check_apart()?;
                // SAFETY: views that their producers handed out, checked against the problem's layouts and found apart;
                // the caller of Python's function holds them.
                unsafe { host::append(&problem, &self.values(problem.spec().scales), &tensors) }
            }
            Place::Cuda(index) => {
                let ready = device::open(index)?.prepare_append(&problem)?;
                // SAFETY: as above; frameworks free memory in the order of the stream, and others hold `Launched`.
                unsafe { device::launch(&ready, &tensors, stream.into()) }
            }
        }
    }

    /// Demands as many numbers as there are sequences, or new rows.
    fn check_counts(&self, problem: &AppendProblem) -> Result<(), CallError> {
        let rows = problem.spec().k.dims();
        let (lengths, slots) = match problem.spec().slots {
            Slots::Behind => (Some(rows.batch), None),
            Slots::Listed => (None, Some(rows.seq)),
        };
        let wanted = [
            (Operand::LengthsKv, self.lengths, lengths, "one for each sequence"),
            (Operand::Slots, self.slots, slots, "one for each new row"),
        ];
        for (operand, numbers, needed, what) in wanted {
            let (given, needed) = (numbers.map_or(0, |numbers| numbers.len), needed.unwrap_or(0));
            if given != needed {
                return Err(CallError::Count { operand, given, needed, what });
            }
        }
        if self.slots.is_some_and(|slots| slots.index != Index::I64) {
            return Err(CallError::NarrowSlots);
        }
        match self.table {
            Some(table) if table.rows != rows.batch => {
                Err(CallError::TableRows { given: table.rows, needed: rows.batch })
            }
            _ => Ok(()),
        }
    }

    /// Demands that what is written shares no memory with anything else.
    fn check_apart(&self) -> Result<(), CallError> {
        let written = self.caches.iter().chain(self.q.iter().map(|[_, out]| out));
        for (n, out) in written.enumerate() {
            let (range, mut others) = (out.range(), self.arrays().enumerate());
            // The caches are third and fourth of all; turned queries are last.
            let own = if n < 2 { n + 2 } else { self.arrays().count() - 1 };
            let shared = |array: &Array| {
                let other = array.range();
                !other.is_empty() && other.start < range.end && range.start < other.end
            };
            if let Some((_, array)) = others.find(|(at, array)| *at != own && shared(array)) {
                return Err(CallError::SharedCache { operand: array.operand, cache: out.operand });
            }
        }
        Ok(())
    }

    /// The numbers of a call whose tensors are on the host.
    fn values(&self, scales: Option<Scales>) -> AppendValues {
        let narrow = |value: i64| i32::try_from(value).unwrap_or(if value < 0 { -1 } else { i32::MAX });
        let lengths = self.lengths.map(|numbers| host::wide(&numbers)).unwrap_or_default();
        AppendValues {
            lengths: lengths.into_iter().map(narrow).collect(),
            slots: self.slots.map(|numbers| host::wide(&numbers)).unwrap_or_default().into(),
            table: self.table.as_ref().map(host::table),
            factors: scales.zip(self.factors).map(|(scales, [k, v])| {
                Factors::of_cache(scales, [host::cache_factors(&k), host::cache_factors(&v)])
            }),
        }
    }
}

fn rotary(cos: &Array, sin: &Array, options: &AppendOptions) -> Result<Rotary, CallError> {
    if cos.rank() != 2 || sin.rank() != 2 {
        return Err(CallError::RotaryShape);
    }
    let (dims, others) = (cos.layout(ORDER)?.dims(), sin.layout(ORDER)?.dims());
    if dims != others || !cos.is_dense() || !sin.is_dense() {
        return Err(CallError::RotaryShape);
    }
    let AppendOptions { interleaved, together } = *options;
    Ok(Rotary { dim: 2 * dims.dim, interleaved, positions: dims.seq, together })
}
