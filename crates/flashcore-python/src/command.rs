//! The command line and the simulator, as Python calls them.

use std::{ffi::OsString, sync::Mutex};

use pyo3::{exceptions::PyValueError, prelude::*, types::PyBytes};

/// Runs the `flashcore` command; returns its exit code. `program` starts it again with other arguments.
#[pyfunction]
pub(crate) fn cli(py: Python<'_>, arguments: Vec<OsString>, program: Vec<OsString>) -> u8 {
    py.detach(|| flashcore_cli::run(arguments, program))
}

/// Runs launches in the simulator: a JSON object says which, arrays are bytes; returns JSON and the arrays.
#[pyfunction]
pub(crate) fn simulate<'py>(
    py: Python<'py>,
    request: &str,
    arrays: Vec<Vec<u8>>,
) -> PyResult<(String, Vec<Bound<'py, PyBytes>>)> {
    // Python hears of Ctrl-C when it is asked; what it raises then ends the launch on every thread.
    let raised = Mutex::new(None);
    let going = || {
        let Ok(mut raised) = raised.lock() else { return false };
        *raised = raised.take().or_else(|| Python::attach(|py| py.check_signals().err()));
        raised.is_none()
    };
    let done = py.detach(|| flashcore_cli::simulate(request, arrays, &going));
    if let Ok(Some(error)) = raised.into_inner() {
        return Err(error);
    }
    let (answer, arrays) = done.map_err(PyValueError::new_err)?;
    Ok((answer, arrays.iter().map(|bytes| PyBytes::new(py, bytes)).collect()))
}

/// The kernels of a PTX text with their parameters, as JSON.
#[pyfunction]
pub(crate) fn kernels(ptx: &str) -> PyResult<String> {
    flashcore_cli::kernels(ptx).map_err(PyValueError::new_err)
}
