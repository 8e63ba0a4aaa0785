//! DLPack's C exchange API: a tensor's view and its framework's current stream without a call into Python.
//!
//! `import` asks for it by type; the answer is kept, so that a call costs one look at a short list.

use std::{cell::RefCell, ffi::c_void, ptr::NonNull};

use pyo3::{ffi, intern, prelude::*, types::PyType};

use crate::dlpack::{Device, EXCHANGE, ExchangeApi, ExchangeHeader, MAJOR, Tensor};

/// The exchange functions of one framework.
#[derive(Clone, Copy)]
pub(crate) struct Exchange(NonNull<ExchangeApi>);

thread_local! {
    /// Types seen so far. They are kept alive, so that an address never means another type.
    static KNOWN: RefCell<Vec<(Py<PyType>, Option<Exchange>)>> = const { RefCell::new(Vec::new()) };
}

impl Exchange {
    /// The functions for objects of `object`'s type, where its framework offers them.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> Option<Self> {
        let kind = object.get_type_ptr();
        let known = KNOWN.with_borrow(|known| {
            let found = known.iter().find(|(seen, _)| seen.as_ptr() == kind.cast());
            found.map(|(_, exchange)| *exchange)
        });
        known.unwrap_or_else(|| Self::learn(&object.get_type()))
    }

    #[cold]
    fn learn(kind: &Bound<'_, PyType>) -> Option<Self> {
        let py = kind.py();
        let current = intern!(py, "__dlpack_c_exchange_api__");
        // What torch 2.10 calls it.
        let older = intern!(py, "__c_dlpack_exchange_api__");
        let capsule = kind.getattr(current).or_else(|_| kind.getattr(older)).ok();
        let exchange = capsule.and_then(|capsule| Self::unwrap(&capsule));
        KNOWN.with_borrow_mut(|known| known.push((kind.clone().unbind(), exchange)));
        exchange
    }

    /// The newest API in the capsule's chain that we understand and that has what we need.
    fn unwrap(capsule: &Bound<'_, PyAny>) -> Option<Self> {
        // SAFETY: any object may be asked.
        if unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), EXCHANGE.as_ptr()) } == 0 {
            return None;
        }
        // SAFETY: a valid capsule of that name.
        let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), EXCHANGE.as_ptr()) };
        let mut header = pointer.cast_const().cast::<ExchangeHeader>();
        while let Some(api) = NonNull::new(header.cast_mut()) {
            // SAFETY: the specification: the API lives as long as the process and starts with a header.
            let ExchangeHeader { version, previous } = unsafe { api.as_ref() };
            if version.major == MAJOR {
                let exchange = Self(api.cast());
                let functions = exchange.functions();
                let whole = functions.view_of_object.is_some() && functions.current_stream.is_some();
                return whole.then_some(exchange);
            }
            header = *previous;
        }
        None
    }

    fn functions(&self) -> &ExchangeApi {
        // SAFETY: the specification: the API lives as long as the process; `unwrap` checked its version.
        unsafe { self.0.as_ref() }
    }

    /// The view of an object, valid while the object is.
    pub(crate) fn view(self, object: &Bound<'_, PyAny>) -> PyResult<Tensor> {
        let mut tensor = Tensor::unset();
        let Some(view) = self.functions().view_of_object else { return Ok(tensor) };
        // SAFETY: the object is of the type that the API is for; the answer goes to a valid place.
        match unsafe { view(object.as_ptr().cast(), &mut tensor) } {
            0 => Ok(tensor),
            _ => Err(PyErr::fetch(object.py())),
        }
    }

    /// The stream on which the framework would launch on a GPU.
    pub(crate) fn current_stream(self, py: Python<'_>, index: u32) -> PyResult<*mut c_void> {
        let mut stream = std::ptr::null_mut();
        let Some(current) = self.functions().current_stream else { return Ok(stream) };
        // SAFETY: the answer goes to a valid place.
        match unsafe { current(Device::CUDA, index as i32, &mut stream) } {
            0 => Ok(stream),
            _ => Err(PyErr::fetch(py)),
        }
    }
}
