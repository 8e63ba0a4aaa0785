//! What a call asks for beside its tensors: options, made in Python once, and values, which change from call to call.

use flashcore::{Align, Mask};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyDict};

use crate::array::Order;

/// Options of attention, checked as far as they can be without tensors: `flashcore._options.Options` in Rust.
///
/// `left` and `right` bound the keys that a query sees around its diagonal, which lies `shift` keys to the right of its
/// corner.
#[pyclass(frozen, module = "flashcore._native")]
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) order: Order,
    pub(crate) mask: Mask,
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
    /// With which probability weights are dropped.
    pub(crate) dropout: Option<f32>,
    /// Whether the result is merged into what output and LSE hold already.
    pub(crate) accumulate: bool,
    /// Whether the bits of a row must not depend on the rest of the batch.
    pub(crate) batch_invariant: bool,
}

#[pymethods]
impl Options {
    #[new]
    #[pyo3(signature = (layout, *, left=None, right=None, top_left=false, scale=None, softcap=None,
                        accumulate=false, shift=0, batch_invariant=false, dropout=None))]
    #[expect(clippy::too_many_arguments, reason = "one for each field of the Python class")]
    fn new(
        layout: &str,
        left: Option<u32>,
        right: Option<u32>,
        top_left: bool,
        scale: Option<f32>,
        softcap: Option<f32>,
        accumulate: bool,
        shift: i32,
        batch_invariant: bool,
        dropout: Option<f32>,
    ) -> PyResult<Self> {
        let mask = Mask::window(left, right).shifted(shift);
        let mask = if top_left { mask.top_left() } else { mask };
        Ok(Self { order: order(layout)?, mask, scale, softcap, dropout, accumulate, batch_invariant })
    }

    /// The options as attributes of a compiled call: whole numbers, floats and text; what is None is missing.
    fn attributes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (mask, all) = (self.mask, PyDict::new(py));
        all.set_item("layout", self.order.name())?;
        let numbers = [
            ("left", mask.left().map(i64::from)),
            ("right", mask.right().map(i64::from)),
            ("shift", Some(mask.shift().into())),
            ("top_left", Some((mask.align() == Align::TopLeft).into())),
            ("batch_invariant", Some(self.batch_invariant.into())),
        ];
        for (name, number) in numbers {
            number.map(|number| all.set_item(name, number)).transpose()?;
        }
        for (name, number) in [("scale", self.scale), ("softcap", self.softcap), ("dropout", self.dropout)] {
            number.map(|number| all.set_item(name, number)).transpose()?;
        }
        Ok(all)
    }

    fn __repr__(&self) -> String {
        format!("{self:?}")
    }
}

pub(crate) fn order(layout: &str) -> PyResult<Order> {
    match layout {
        "bhsd" => Ok(Order::Bhsd),
        "bshd" => Ok(Order::Bshd),
        "packed" => Ok(Order::Packed),
        other => Err(PyValueError::new_err(format!("unknown layout `{other}`; use \"bhsd\" or \"bshd\""))),
    }
}

/// Lengths, sinks, page table, factors, bias and seed of one call.
///
/// `lengths_q` and `lengths_kv` are arrays of int32 or int64 where the tensors are: used lengths of each batch entry, or
/// offsets where sequences are packed; `sinks` is an array of floats. Nothing of it is read before the kernel runs, where
/// the tensors are on a GPU. `longest` bounds the queries and the keys of packed sequences. `ranges`, on the host, are
/// the first and the one-past-last key of each batch entry. `table` has a row of page numbers (int32) for each sequence.
/// `factors` are what q, k and v of 8 bits are multiplied by: float32, one number each or one for each batch entry and key
/// head; with `blocks`, rows of a block of q and of k, one for each batch entry, head and block, and of v one for each batch
/// entry, head and feature. `turned` says that v is turned, as quantising leaves it. Factors of k and v alone, where q has more bits, may have any strides.
/// `bias` is added to scores: batch × heads × queries × keys, where the first three may be 1; or slopes (float32) of heads, or
/// of sequences × heads. `seed` decides which weights dropout drops: 64 bits where the tensors are.
#[pyclass(frozen, get_all, module = "flashcore._native")]
#[derive(Default)]
pub(crate) struct Values {
    pub(crate) lengths_q: Option<Py<PyAny>>,
    pub(crate) lengths_kv: Option<Py<PyAny>>,
    pub(crate) sinks: Option<Py<PyAny>>,
    pub(crate) longest: Option<(usize, usize)>,
    pub(crate) ranges: Option<(Vec<u32>, Vec<u32>)>,
    pub(crate) table: Option<Py<PyAny>>,
    pub(crate) factors: Vec<Py<PyAny>>,
    pub(crate) bias: Option<Py<PyAny>>,
    pub(crate) blocks: Option<[usize; 2]>,
    pub(crate) turned: bool,
    pub(crate) seed: Option<Py<PyAny>>,
}

#[pymethods]
impl Values {
    #[new]
    #[pyo3(signature = (
        lengths_q=None, lengths_kv=None, sinks=None, longest=None, ranges=None, table=None, bias=None,
        factors=Vec::new(), blocks=None, turned=false, seed=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "one for each argument of the Python call")]
    fn new(
        lengths_q: Option<Py<PyAny>>,
        lengths_kv: Option<Py<PyAny>>,
        sinks: Option<Py<PyAny>>,
        longest: Option<(usize, usize)>,
        ranges: Option<(Vec<u32>, Vec<u32>)>,
        table: Option<Py<PyAny>>,
        bias: Option<Py<PyAny>>,
        factors: Vec<Py<PyAny>>,
        blocks: Option<[usize; 2]>,
        turned: bool,
        seed: Option<Py<PyAny>>,
    ) -> Self {
        Self { lengths_q, lengths_kv, sinks, longest, ranges, table, factors, bias, blocks, turned, seed }
    }
}
