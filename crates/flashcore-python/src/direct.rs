//! The short way of a framework with the exchange API: one call from Python that makes the output and launches.
//!
//! Python code builds a [`Direct`] for torch and calls it first. What is out of the ordinary (tensors of mixed types, memory
//! elsewhere) is not judged here: the answer is then None, and Python code takes the long way. Calls that the framework records
//! for a backward pass are told, and come back as [`Direct::recorded`] and [`Direct::gradients`].

use flashcore::{DType, Operand};
use pyo3::{intern, prelude::*, types::PyBool};

use crate::{
    array::{Array, Place},
    backward::Backward,
    call::{Call, Given, WIDEST, stream_of},
    exchange::Exchange,
    import::Request,
    kept::Kept,
    options::Options,
    recipes::{Made, Recipes},
};

/// Attention for the tensors of a framework: whether it records gradients, whether it computes in fewer bits than tensors
/// have, and recipes for new tensors.
#[pyclass(frozen, module = "flashcore._native")]
pub(crate) struct Direct {
    is_grad_enabled: Py<PyAny>,
    is_autocast_enabled: Py<PyAny>,
    recipes: Recipes,
}

#[pymethods]
impl Direct {
    #[new]
    fn new(is_grad_enabled: Py<PyAny>, is_autocast_enabled: Py<PyAny>, recipe: Py<PyAny>) -> Self {
        Self { is_grad_enabled, is_autocast_enabled, recipes: Recipes(recipe) }
    }

    /// The result, new or `out`; None where the long way has to be taken, False where the call has to be recorded.
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
        let (py, same) = (q.py(), |other: &Bound<'py, PyAny>| other.get_type_ptr() == q.get_type_ptr());
        if !same(k) || !same(v) || !out.as_ref().is_none_or(same) {
            return Ok(None);
        }
        if self.records(py, [Some(q), Some(k), Some(v), sinks, out.as_ref()])? {
            let plain = out.is_none() && table.is_none() && factors.is_none();
            return Ok(plain.then(|| PyBool::new(py, false).to_owned().into_any()));
        }
        let factors = factors.iter().flatten().collect();
        let given = Given { lengths: [lengths_q, lengths_kv], sinks, table, factors, ..Given::default() };
        let results = self.launch([q, k, v], out, false, options, given, longest)?;
        Ok(results.map(|(out, _)| out))
    }

    /// The result and the log-sum-exp of a call that is recorded; None where the long way has to be taken.
    #[pyo3(signature = (q, k, v, options, lengths_q=None, lengths_kv=None, sinks=None, longest=None, /))]
    #[expect(clippy::too_many_arguments, reason = "tensors and numbers of a call")]
    fn recorded<'py>(
        &self,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        options: &Options,
        lengths_q: Option<&Bound<'py, PyAny>>,
        lengths_kv: Option<&Bound<'py, PyAny>>,
        sinks: Option<&Bound<'py, PyAny>>,
        longest: Option<(usize, usize)>,
    ) -> PyResult<Option<Results<'py>>> {
        let given = Given { lengths: [lengths_q, lengths_kv], sinks, ..Given::default() };
        self.launch([q, k, v], None, true, options, given, longest)
    }

    /// The gradients of q, k and v, every row of which is written; None where the long way has to be taken. `sums` are those of
    /// d_out times out over each row, where they are given.
    #[pyo3(signature = (q, k, v, out, sums, lse, d_out, options, lengths_q=None, lengths_kv=None, longest=None, /))]
    #[expect(clippy::too_many_arguments, reason = "tensors and numbers of a call")]
    fn gradients<'py>(
        &self,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        out: &Bound<'py, PyAny>,
        sums: Option<&Bound<'py, PyAny>>,
        lse: &Bound<'py, PyAny>,
        d_out: &Bound<'py, PyAny>,
        options: &Options,
        lengths_q: Option<&Bound<'py, PyAny>>,
        lengths_kv: Option<&Bound<'py, PyAny>>,
        longest: Option<(usize, usize)>,
    ) -> PyResult<Option<[Bound<'py, PyAny>; 3]>> {
        let Some(exchange) = Exchange::of(q) else { return Ok(None) };
        let mut kept = Kept::default();
        let request = Request { stream: None, order: options.order, bits_are_bf16: false };
        let mut read = |object, operand| request.input(object, operand).map(|imported| kept.keep(imported));
        let inputs = [read(q, Operand::Q)?, read(k, Operand::K)?, read(v, Operand::V)?];
        let d_rows = read(d_out, Operand::DOut)?;
        // A gradient may repeat one number, as that of a sum does.
        if !d_rows.view.has_dense_features() {
            return Ok(None);
        }
        let out = if sums.is_some() { d_rows } else { read(out, Operand::Out)? };
        let rows = sums.map(|sums| read(sums, Operand::RowSums)).transpose()?;
        let lse = read(lse, Operand::Lse)?;
        let like = |x, of_x| self.recipes.make(Made::Like, options.order, [(x, of_x); 2]);
        let [of_q, of_k, of_v] = &inputs;
        let (dq, dk, dv) = (like(q, of_q)?, like(k, of_k)?, like(v, of_v)?);
        let grads = [read(&dq, Operand::DQ)?, read(&dk, Operand::DK)?, read(&dv, Operand::DV)?];
        let mut call = Call::new(inputs, out);
        call.lse = Some(lse);
        let given = Given { lengths: [lengths_q, lengths_kv], ..Given::default() };
        call.bind(given, request, &mut kept)?;
        call.longest = longest;
        let backward = Backward { call, has_out: sums.is_none(), rows, d_out: d_rows, grads, d_sinks: None };
        backward.launch(q.py(), options, None, Some(exchange))?;
        Ok(Some([dq, dk, dv]))
    }
}

/// A result, and the log-sum-exp where it is wanted.
type Results<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

impl Direct {
    /// Computes or launches.
    fn launch<'py>(
        &self,
        [q, k, v]: [&Bound<'py, PyAny>; 3],
        out: Option<Bound<'py, PyAny>>,
        with_lse: bool,
        options: &Options,
        given: Given<'_, 'py>,
        longest: Option<(usize, usize)>,
    ) -> PyResult<Option<Results<'py>>> {
        let Some(exchange) = Exchange::of(q) else { return Ok(None) };
        let (py, mut kept) = (q.py(), Kept::default());
        // By the exchange API: on the framework's own stream, in types that DLPack has.
        let request = Request { stream: None, order: options.order, bits_are_bf16: false };
        let mut read = |object, operand| request.input(object, operand).map(|imported| kept.keep(imported));
        let inputs = [read(q, Operand::Q)?, read(k, Operand::K)?, read(v, Operand::V)?];
        if self.is_narrowed(py, &inputs)? {
            return Ok(None);
        }
        let [of_q, _, of_v] = &inputs;
        let make = |made| self.recipes.make(made, options.order, [(q, of_q), (v, of_v)]);
        let made = out.map_or_else(|| make(Made::Result), Ok)?;
        let lse = with_lse.then(|| make(Made::Lse)).transpose()?;
        let mut call = Call::new(inputs, read(&made, Operand::Out)?);
        call.lse = lse.as_ref().map(|lse| read(lse, Operand::Lse)).transpose()?;
        // Numbers of another type or elsewhere are converted, or refused, on the long way.
        if call.bind(given, request, &mut kept).is_err() {
            return Ok(None);
        }
        if call.sinks.is_some_and(|sinks| !sinks.view.has_dense_features()) {
            return Ok(None);
        }
        call.longest = longest;
        let Ok(place) = call.place() else { return Ok(None) };
        if !call.arrays[3].address.is_multiple_of(WIDEST) && place != Place::Host {
            return Ok(None);
        }
        let stream = stream_of(py, place, None, Some(exchange))?;
        py.detach(|| call.compute(options, place, stream.into()))?;
        Ok(Some((made, lse)))
    }

    /// Whether the framework computes these in fewer bits at present.
    fn is_narrowed(&self, py: Python<'_>, inputs: &[Array; 3]) -> PyResult<bool> {
        let wide = inputs.iter().any(|input| input.dtype == DType::F32);
        Ok(wide && self.is_autocast_enabled.bind(py).call0()?.is_truthy()?)
    }

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
}
