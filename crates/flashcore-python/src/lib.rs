//! The extension module behind `import flashcore`: tensors by DLPack, attention by FlashCore.
//!
//! Python code (python/flashcore) knows frameworks, masks and other libraries' signatures; this crate knows memory.
//! [`call`] is the one call: [`import`] reads tensors ([`exchange`] without a call into Python, [`owned`] by a
//! capsule, whose structures [`dlpack`] declares) into [`array`]s, which with the [`options`] are a problem; [`host`]
//! and [`device`] compute it ([`parts`] where batch entries differ). [`direct`] is the short way there for torch, whose
//! [`recipes`] make new tensors; [`backward`] computes gradients; [`dropout`] reads seeds; [`xla`] is for both inside of what JAX compiles.
//! [`error`] says which exception stands for what.

mod append;
mod array;
mod backward;
mod call;
#[cfg(feature = "command")]
mod command;
mod config;
mod device;
mod direct;
mod dlpack;
mod dropout;
mod error;
mod exchange;
mod factors;
mod grouped;
mod host;
mod import;
mod kept;
mod launched;
mod merge;
mod moe;
mod options;
mod owned;
mod parts;
mod quantise;
mod recipes;
mod xla;

use pyo3::prelude::*;

/// Attention on memory that frameworks share by DLPack.
#[pymodule]
mod _native {
    use pyo3::{prelude::*, types::IntoPyDict};

    #[cfg(feature = "command")]
    #[pymodule_export]
    use crate::command::{cli, kernels, simulate};
    #[pymodule_export]
    use crate::{
        append::append,
        backward::backward,
        call::forward,
        config::config,
        direct::Direct,
        dropout::dropout_mask,
        grouped::grouped_mm,
        launched::Launched,
        merge::merge,
        moe::{moe, moe_gradients},
        options::{Options, Values},
        quantise::quantise,
        xla::{xla_check, xla_handlers},
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
