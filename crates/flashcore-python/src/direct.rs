//! The short way of a framework with the exchange API: one call from Python that makes the output and launches.
//!
//! Python code builds a [`Direct`] for torch and calls it first. What is out of the ordinary (gradients, tensors of mixed
//! types, memory elsewhere) is not judged here: the answer is then None, and Python code takes the long way.

use std::cell::RefCell;

use flashcore::{DType, Operand};
use pyo3::{
    intern,
    prelude::*,
    types::{PyDict, PyTuple},
};

use crate::{
    array::{Array, Order, Place, View},
    call::{Call, Given, WIDEST, stream_of},
    exchange::Exchange,
    import::Request,
    kept::Kept,
    options::Options,
};

/// Recipes kept by each thread; the oldest gives way.
const KEPT: usize = 32;

/// How to make one more tensor: a function and its arguments, kept ready.
#[derive(FromPyObject)]
struct Recipe {
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

/// What decides how an output looks: type, place and extents of q, features of v.
#[derive(Clone, Copy, PartialEq)]
struct Look {
    place: Place,
    dtype: DType,
    order: Order,
    q: View,
    v: View,
}

impl Look {
    fn new([q, _, v]: &[Array; 3], order: Order) -> Self {
        Self { place: q.place, dtype: q.dtype, order, q: q.view, v: v.view }
    }
}

thread_local! {
    static RECIPES: RefCell<Vec<(Look, Recipe)>> = const { RefCell::new(Vec::new()) };
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
    #[pyo3(signature = (
        q, k, v, out, options, lengths_q=None, lengths_kv=None, sinks=None, longest=None, table=None, factors=None, /
    ))]
    #[expect(clippy::too_many_arguments, reason = "tensors and numbers of a call")]
    fn attention<'py>(
        &self,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        options: &Options,
        lengths_q: Option<&Bound<'py, PyAny>>,
        lengths_kv: Option<&Bound<'py, PyAny>>,
        sinks: Option<&Bound<'py, PyAny>>,
        longest: Option<(usize, usize)>,
        table: Option<&Bound<'py, PyAny>>,
        factors: Option<[Bound<'py, PyAny>; 2]>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let same = |other: &Bound<'py, PyAny>| other.get_type_ptr() == q.get_type_ptr();
        let tensors = [Some(q), Some(k), Some(v), sinks, out.as_ref()];
        if !same(k) || !same(v) || !out.as_ref().is_none_or(same) || self.records(q.py(), tensors)? {
            return Ok(None);
        }
        let Some(exchange) = Exchange::of(q) else { return Ok(None) };
        let (py, mut kept) = (q.py(), Kept::default());
        // By the exchange API: on the framework's own stream, in types that DLPack has.
        let request = Request { stream: None, order: options.order, bits_are_bf16: false };
        let mut read = |object, operand| request.input(object, operand).map(|imported| kept.keep(imported));
        let inputs = [read(q, Operand::Q)?, read(k, Operand::K)?, read(v, Operand::V)?];
        let made = match out {
            Some(out) => out,
            None => self.output(py, &inputs, options.order, [q, v])?,
        };
        let mut call = Call::new(inputs, read(&made, Operand::Out)?);
        // Numbers of another type or elsewhere are converted, or refused, on the long way.
        let factors = factors.iter().flatten().collect();
        let values = Given { lengths: [lengths_q, lengths_kv], sinks, table, factors, bias: None };
        if call.bind(values, request, &mut kept).is_err() {
            return Ok(None);
        }
        call.longest = longest;
        let Ok(place) = call.place() else { return Ok(None) };
        if !call.arrays[3].address.is_multiple_of(WIDEST) && place != Place::Host {
            return Ok(None);
        }
        let stream = stream_of(py, place, None, Some(exchange))?;
        py.detach(|| call.compute(options, place, stream))?;
        Ok(Some(made))
    }
}

impl Direct {
    /// Whether the framework would record this call for a backward pass.
    fn records(&self, py: Python<'_>, tensors: [Option<&Bound<'_, PyAny>>; 5]) -> PyResult<bool> {
        if !self.is_grad_enabled.bind(py).call0()?.is_truthy()? {
            return Ok(false);
        }
        for tensor in tensors.into_iter().flatten() {
            if tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// A new output, by a recipe that is found again for tensors of the same look.
    fn output<'py>(
        &self,
        py: Python<'py>,
        inputs: &[Array; 3],
        order: Order,
        [q, v]: [&Bound<'py, PyAny>; 2],
    ) -> PyResult<Bound<'py, PyAny>> {
        let look = Look::new(inputs, order);
        let known = RECIPES.with_borrow_mut(|recipes| {
            let at = recipes.iter().position(|(seen, _)| *seen == look)?;
            recipes[..=at].rotate_right(1);
            Some(recipes[0].1.make(py))
        });
        match known {
            Some(made) => made,
            None => self.learn(py, look, [q, v]),
        }
    }

    #[cold]
    fn learn<'py>(
        &self,
        py: Python<'py>,
        look: Look,
        [q, v]: [&Bound<'py, PyAny>; 2],
    ) -> PyResult<Bound<'py, PyAny>> {
        let recipe = self.recipe.bind(py).call1((q, v))?.extract::<Recipe>()?;
        let made = recipe.make(py)?;
        RECIPES.with_borrow_mut(|recipes| {
            recipes.insert(0, (look, recipe));
            recipes.truncate(KEPT);
        });
        Ok(made)
    }
}
