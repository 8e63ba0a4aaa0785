//! Python objects become arrays: by the C exchange API where the framework has it, else by a DLPack capsule. A capsule of bytes
//! may come in a pair with the name of the type of 8 bits that they are.

use flashcore::Operand;
use pyo3::{
    exceptions::{PyAttributeError, PyBufferError, PyTypeError},
    ffi, intern,
    prelude::*,
    types::{PyCapsule, PyDict},
};

use crate::{
    array::{Array, Numbers, Order, Table},
    dlpack::{DataType, Tensor},
    dropout::Seed,
    error::CallError,
    exchange::Exchange,
    owned::Owned,
};

/// A tensor or an array of numbers, with what keeps its memory alive beside the Python object.
pub(crate) struct Imported<T = Array> {
    pub(crate) array: T,
    pub(crate) exchange: Option<Exchange>,
    pub(crate) owned: Option<Owned>,
}

/// How to ask a framework for its tensors.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    /// The stream that will use the tensors, as `__dlpack__` takes it; the producer makes it wait for their values.
    pub(crate) stream: Option<usize>,
    /// Which dimensions the tensors are to have.
    pub(crate) order: Order,
    /// Whether 16-bit integers are bf16.
    pub(crate) bits_are_bf16: bool,
}

impl Request {
    /// Reads an input.
    pub(crate) fn input(self, object: &Bound<'_, PyAny>, operand: Operand) -> Result<Imported, CallError> {
        // SAFETY: `fetch` hands out views of what lives.
        self.fetch(object, operand)?
            .read(|tensor| unsafe { Array::read(tensor, operand, self.order, self.bits_are_bf16) })
    }

    /// Reads lengths or offsets.
    pub(crate) fn numbers(
        self,
        object: &Bound<'_, PyAny>,
        operand: Operand,
    ) -> Result<Imported<Numbers>, CallError> {
        // SAFETY: `fetch` hands out views of what lives.
        self.fetch(object, operand)?.read(|tensor| unsafe { Numbers::read(tensor, operand) })
    }

    /// Reads page numbers.
    pub(crate) fn table(self, object: &Bound<'_, PyAny>) -> Result<Imported<Table>, CallError> {
        // SAFETY: `fetch` hands out views of what lives.
        self.fetch(object, Operand::Table)?.read(|tensor| unsafe { Table::read(tensor) })
    }

    /// Reads the seed of dropout.
    pub(crate) fn seed(self, object: &Bound<'_, PyAny>) -> Result<Imported<Seed>, CallError> {
        // SAFETY: `fetch` hands out views of what lives.
        self.fetch(object, Operand::Seed)?.read(|tensor| unsafe { Seed::read(tensor) })
    }

    /// Reads what will be written.
    pub(crate) fn output(self, object: &Bound<'_, PyAny>, operand: Operand) -> Result<Imported, CallError> {
        let imported = self.input(object, operand)?;
        match &imported.owned {
            Some(owned) if owned.is_read_only() => Err(CallError::ReadOnly { operand }),
            _ => Ok(imported),
        }
    }

    /// The view of an object: by its framework's exchange API, or by a capsule.
    fn fetch(self, object: &Bound<'_, PyAny>, operand: Operand) -> Result<Fetched, CallError> {
        if let Some(exchange) = Exchange::of(object) {
            let tensor = exchange.view(object)?;
            refuse_negated(object, &tensor, operand)?;
            return Ok(Fetched { tensor, exchange: Some(exchange), owned: None });
        }
        let Ok((bytes, name)) = object.extract::<(Bound<'_, PyCapsule>, String)>() else {
            let owned = self.take(object, operand)?;
            return Ok(Fetched { tensor: owned.tensor(), exchange: None, owned: Some(owned) });
        };
        // Of a framework that knows types of 8 bits and does not export them.
        let owned = Owned::take(&bytes)?;
        let tensor = owned.tensor();
        match DataType::narrow(&name).filter(|_| tensor.dtype.is_byte()) {
            Some(dtype) => {
                Ok(Fetched { tensor: Tensor { dtype, ..tensor }, exchange: None, owned: Some(owned) })
            }
            None => Err(CallError::Elements { operand, dtype: name }),
        }
    }

    fn take(self, object: &Bound<'_, PyAny>, operand: Operand) -> Result<Owned, CallError> {
        // SAFETY: any object may be asked.
        if unsafe { ffi::PyCapsule_CheckExact(object.as_ptr()) } != 0 {
            return Ok(Owned::take(object)?);
        }
        let py = object.py();
        let export = object.getattr(intern!(py, "__dlpack__")).map_err(|error| {
            let missing = error.is_instance_of::<PyAttributeError>(py);
            let kind =
                || object.get_type().name().map_or_else(|_| "an object".into(), |name| name.to_string());
            if missing { CallError::NotATensor { operand, kind: kind() } } else { error.into() }
        })?;
        let options = PyDict::new(py);
        if let Some(stream) = self.stream {
            options.set_item(intern!(py, "stream"), stream)?;
        }
        let versioned = options.copy()?;
        versioned.set_item(intern!(py, "max_version"), (1, 1))?;
        let capsule = export.call((), Some(&versioned)).or_else(|error| {
            // Producers from before DLPack 1.0 do not know the argument.
            let old = error.is_instance_of::<PyTypeError>(py);
            if old { export.call((), Some(&options)) } else { Err(error) }
        });
        Ok(Owned::take(&capsule.map_err(|error| refusal(error, object, operand))?)?)
    }
}

/// Refuses tensors that torch has yet to negate, of which a view says nothing. They are parts of complex numbers, so that no
/// two of their elements are neighbours: others are not asked, which would take time in every call.
fn refuse_negated(object: &Bound<'_, PyAny>, tensor: &Tensor, operand: Operand) -> Result<(), CallError> {
    // SAFETY: `fetch` hands out views of what lives.
    if unsafe { tensor.has_neighbours() } {
        return Ok(());
    }
    let negated = object.call_method0(intern!(object.py(), "is_neg")).and_then(|negated| negated.is_truthy());
    if negated.unwrap_or(false) { Err(CallError::Negated { operand }) } else { Ok(()) }
}

/// A view, valid while the object or `owned` lives.
struct Fetched {
    tensor: Tensor,
    exchange: Option<Exchange>,
    owned: Option<Owned>,
}

impl Fetched {
    fn read<T>(self, read: impl FnOnce(&Tensor) -> Result<T, CallError>) -> Result<Imported<T>, CallError> {
        Ok(Imported { array: read(&self.tensor)?, exchange: self.exchange, owned: self.owned })
    }
}

/// Why a producer did not hand over a tensor: mostly for its element type, which DLPack or the producer does not have.
fn refusal(error: PyErr, object: &Bound<'_, PyAny>, operand: Operand) -> CallError {
    let py = object.py();
    if !error.is_instance_of::<PyBufferError>(py) {
        return error.into();
    }
    match object.getattr(intern!(py, "dtype")).map(|dtype| dtype.to_string()) {
        Ok(dtype) if !is_taken(&dtype) => CallError::Elements { operand, dtype },
        _ => CallError::NotShared { operand, reason: error.value(py).to_string() },
    }
}

/// Whether attention takes elements of a type that a framework calls so, with or without the name of a module.
fn is_taken(dtype: &str) -> bool {
    let name = dtype.rsplit('.').next().unwrap_or(dtype);
    ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"].contains(&name)
}
