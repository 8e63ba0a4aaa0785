//! What a call asks for beside its tensors: made in Python once, compared by every call.

use std::sync::Arc;

use flashcore::Mask;
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::array::Order;

/// Options of attention, checked as far as they can be without tensors.
///
/// `left` and `right` bound the keys that a query sees around its diagonal. `starts` and `ends` are the first and the
/// one-past-last key of each batch entry; the diagonal is that of the keys between them.
#[pyclass(frozen, module = "flashcore._native")]
pub(crate) struct Options {
    pub(crate) asked: Arc<Asked>,
}

/// The contents of [`Options`].
#[derive(PartialEq, Debug)]
pub(crate) struct Asked {
    pub(crate) order: Order,
    pub(crate) mask: Mask,
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) sinks: Option<Arc<[f32]>>,
    pub(crate) starts: Option<Vec<u32>>,
    pub(crate) ends: Option<Arc<[u32]>>,
}

#[pymethods]
impl Options {
    #[new]
    #[pyo3(signature = (layout, *, left=None, right=None, top_left=false, scale=None, softcap=None, sinks=None,
                        starts=None, ends=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python constructor")]
    fn new(
        layout: &str,
        left: Option<u32>,
        right: Option<u32>,
        top_left: bool,
        scale: Option<f32>,
        softcap: Option<f32>,
        sinks: Option<Vec<f32>>,
        starts: Option<Vec<u32>>,
        ends: Option<Vec<u32>>,
    ) -> PyResult<Self> {
        let mask = Mask::window(left, right);
        let mask = if top_left { mask.top_left() } else { mask };
        let (order, sinks, ends) = (order(layout)?, sinks.map(Into::into), ends.map(Into::into));
        let asked = Asked { order, mask, scale, softcap, sinks, starts, ends };
        Ok(Self { asked: Arc::new(asked) })
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.asked)
    }
}

fn order(layout: &str) -> PyResult<Order> {
    match layout {
        "bhsd" => Ok(Order::Bhsd),
        "bshd" => Ok(Order::Bshd),
        other => Err(PyValueError::new_err(format!("unknown layout `{other}`; use \"bhsd\" or \"bshd\""))),
    }
}
