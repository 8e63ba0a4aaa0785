//! The extension module behind `import flashcore`: tensors by DLPack, attention by FlashCore.
//!
//! Python code (python/flashcore) knows frameworks, masks and other libraries' signatures; this crate knows memory.
//! [`call`] is the one call: [`import`] reads tensors ([`exchange`] without a call into Python, [`owned`] by a
//! capsule, whose structures [`dlpack`] declares) into [`array`]s, which with the [`options`] are a problem; [`host`]
//! and [`device`] compute it ([`parts`] where batch entries differ). [`direct`] is the short way there for torch;
//! [`backward`] computes gradients.
//! [`error`] says which exception stands for what.

mod array;
mod backward;
mod call;
mod config;
mod device;
mod direct;
mod dlpack;
mod error;
mod exchange;
mod host;
mod import;
mod launched;
mod merge;
mod moe;
mod options;
mod owned;
mod parts;

use pyo3::prelude::*;

/// Attention on memory that frameworks share by DLPack.
#[pymodule]
mod _native {
    use std::{ffi::OsString, sync::Mutex};

    use pyo3::{
        exceptions::PyValueError,
        prelude::*,
        types::{IntoPyDict, PyBytes},
    };

    #[pymodule_export]
    use crate::{
        backward::backward,
        call::forward,
        config::config,
        direct::Direct,
        launched::Launched,
        merge::merge,
        moe::moe,
        options::{Options, Values},
    };

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        let py = module.py();
        let after_fork = pyo3::wrap_pyfunction!(super::after_fork, module)?;
        let hooks = [("after_in_child", after_fork)].into_py_dict(py)?;
        py.import("os")?.call_method("register_at_fork", (), Some(&hooks))?;
        Ok(())
    }

    /// Runs the `flashcore` command; returns its exit code. `program` starts it again with other arguments.
    #[pyfunction]
    fn cli(py: Python<'_>, arguments: Vec<OsString>, program: Vec<OsString>) -> u8 {
        py.detach(|| flashcore_cli::run(arguments, program))
    }

    /// Runs launches in the simulator: a JSON object says which, arrays are bytes; returns JSON and the arrays.
    #[pyfunction]
    fn simulate<'py>(
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
    fn kernels(ptx: &str) -> PyResult<String> {
        flashcore_cli::kernels(ptx).map_err(PyValueError::new_err)
    }

    /// Whether tensors of this one's type come in by DLPack's C exchange API.
    #[pyfunction]
    fn exchanges(tensor: &Bound<'_, PyAny>) -> bool {
        crate::exchange::Exchange::of(tensor).is_some()
    }

    /// A stream of ours on a GPU, as a DLPack stream number, for frameworks that have none to offer.
    #[pyfunction]
    fn own_stream(index: u32) -> PyResult<usize> {
        Ok(crate::device::open(index)?.stream().raw() as usize)
    }
}

/// Runs in every forked child: threads and the driver stayed with the parent.
#[pyfunction]
fn after_fork() {
    host::after_fork();
    device::after_fork();
}
