//! The short way of a framework with the exchange API: one call from Python that makes the output and launches.
//!
//! Python code builds a [`Direct`] for torch and calls it first. What is out of the ordinary (gradients, tensors of mixed
//! types, memory elsewhere) is not judged here: the answer is then None, and Python code takes the long way.

use std::sync::Arc;

use flashcore::Operand;
use pyo3::{
    intern,
    prelude::*,
    types::{PyDict, PyTuple},
};

use crate::{
    array::Place,
    exchange::Exchange,
    forward::Call,
    import::{Imported, Request, common_place},
    job::{self, Job, Key, WIDEST},
    options::Options,
};

/// How to make one more tensor: a function and its arguments, kept ready.
#[derive(FromPyObject)]
pub(crate) struct Recipe {
    #[pyo3(item(0))]
    function: Py<PyAny>,
    #[pyo3(item(1))]
    arguments: Py<PyTuple>,
    #[pyo3(item(2))]
    keywords: Option<Py<PyDict>>,
}

impl Recipe {
    fn make<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let keywords = self.keywords.as_ref().map(|keywords| keywords.bind(py));
        self.function.bind(py).call(self.arguments.bind(py), keywords)
    }
}

/// Attention for the tensors of a framework: whether it records gradients, and a recipe for the output of q and v.
#[pyclass(frozen, module = "flashcore._native")]
pub(crate) struct Direct {
    is_grad_enabled: Py<PyAny>,
    recipe: Py<PyAny>,
}

#[pymethods]
impl Direct {
    #[new]
    fn new(is_grad_enabled: Py<PyAny>, recipe: Py<PyAny>) -> Self {
        Self { is_grad_enabled, recipe }
    }

    /// The result, new or `out`; None where the long way has to be taken.
    #[pyo3(signature = (q, k, v, out, options, /))]
    fn attention<'py>(
        &self,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        options: &Options,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let same = |other: &Bound<'py, PyAny>| other.get_type_ptr() == q.get_type_ptr();
        if !same(k) || !same(v) || !out.as_ref().is_none_or(same) || self.records(&[q, k, v])? {
            return Ok(None);
        }
        let Some(exchange) = Exchange::of(q) else { return Ok(None) };
        let read = |object, operand| request(options).view(exchange, object, operand);
        let inputs = [read(q, Operand::Q)?, read(k, Operand::K)?, read(v, Operand::V)?];
        let Some(out) = out else { return self.with_new_output(exchange, q, v, inputs, options) };
        let call = Call { inputs, out: read(&out, Operand::Out)?, lse: None };
        call.compute(q.py(), options, None, false)?;
        Ok(Some(out))
    }
}

/// Views by the exchange API: on the framework's own stream, in types that DLPack has.
fn request(options: &Options) -> Request {
    Request { stream: None, order: options.asked.order, bits_are_bf16: false }
}

impl Direct {
    /// Whether the framework would record this call for a backward pass.
    fn records(&self, tensors: &[&Bound<'_, PyAny>; 3]) -> PyResult<bool> {
        let py = tensors[0].py();
        if !self.is_grad_enabled.bind(py).call0()?.is_truthy()? {
            return Ok(false);
        }
        for tensor in tensors {
            if tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn with_new_output<'py>(
        &self,
        exchange: Exchange,
        q: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        inputs: [Imported; 3],
        options: &Options,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = q.py();
        let arrays = inputs.each_ref().map(|imported| &imported.array);
        let place = common_place(&arrays)?;
        let key = Key::new(arrays, None, place, &options.asked)?;
        let known = job::find(&key);
        let fresh = match &known {
            Some(_) => None,
            None => Some(self.recipe.bind(py).call1((q, v))?.extract::<Recipe>()?),
        };
        let Some(recipe) = known.as_ref().and_then(|job| job.recipe.as_ref()).or(fresh.as_ref()) else {
            return Ok(None);
        };
        let made = recipe.make(py)?;
        let call = Call { inputs, out: request(options).view(exchange, &made, Operand::Out)?, lse: None };
        if !call.output_is_good(place) {
            return Ok(None);
        }
        let job: Arc<Job> = match known {
            Some(job) => job,
            None => {
                let arrays = call.arrays();
                py.detach(|| job::prepare(key, arrays, fresh))?
            }
        };
        call.run(py, &job, place, None)?;
        Ok(Some(made))
    }
}

impl Call {
    /// Whether the output lies where the inputs do, at an address that suits every kernel.
    fn output_is_good(&self, place: Place) -> bool {
        self.out.array.place == place && self.out.array.address.is_multiple_of(WIDEST)
    }
}
