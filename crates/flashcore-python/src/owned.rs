//! A tensor taken out of a capsule: given back to its producer exactly once.

use std::{ffi::CStr, ptr::NonNull};

use pyo3::{exceptions::PyBufferError, ffi, prelude::*};

use crate::dlpack::{
    MAJOR, Managed, ManagedVersioned, PLAIN, PLAIN_USED, READ_ONLY, Tensor, VERSIONED, VERSIONED_USED,
};

/// A tensor that belongs to us until it is dropped.
pub(crate) enum Owned {
    Plain(NonNull<Managed>),
    Versioned(NonNull<ManagedVersioned>),
}

// SAFETY: the specification lets consumers call the deleter from any thread.
unsafe impl Send for Owned {}
// SAFETY: shared access only reads the plain fields.
unsafe impl Sync for Owned {}

impl Owned {
    /// Takes the tensor out of a capsule, which is empty afterwards.
    pub(crate) fn take(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Some(tensor) = unwrap(capsule, VERSIONED, VERSIONED_USED)? {
            // The structure belongs to us even if we cannot read on, so that it is given back on the way out.
            let owned = Self::Versioned(tensor.cast());
            owned.check_version()?;
            return Ok(owned);
        }
        if let Some(tensor) = unwrap(capsule, PLAIN, PLAIN_USED)? {
            return Ok(Self::Plain(tensor.cast()));
        }
        Err(PyBufferError::new_err(
            "the DLPack capsule was already used; pass a fresh one, or the tensor itself",
        ))
    }

    /// The view it holds.
    pub(crate) fn tensor(&self) -> Tensor {
        match self {
            // SAFETY: ours, alive until dropped.
            Self::Plain(managed) => unsafe { managed.as_ref().tensor },
            // SAFETY: as above.
            Self::Versioned(managed) => unsafe { managed.as_ref().tensor },
        }
    }

    /// Whether the producer forbids writing.
    pub(crate) fn is_read_only(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            // SAFETY: ours, alive until dropped.
            Self::Versioned(managed) => unsafe { managed.as_ref().flags & READ_ONLY != 0 },
        }
    }

    fn check_version(&self) -> PyResult<()> {
        let Self::Versioned(managed) = self else { return Ok(()) };
        // SAFETY: ours; every major version starts with these fields.
        let version = unsafe { managed.as_ref().version };
        if version.major == MAJOR {
            return Ok(());
        }
        let (major, minor) = (version.major, version.minor);
        Err(PyBufferError::new_err(format!("DLPack {major}.{minor} is not supported; export version 1 or 0")))
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        match self {
            Self::Plain(managed) => {
                // SAFETY: alive, and nobody uses it after this.
                if let Some(delete) = unsafe { managed.as_ref().deleter } {
                    // SAFETY: called once, by the only owner.
                    unsafe { delete(managed.as_ptr()) };
                }
            }
            Self::Versioned(managed) => {
                // SAFETY: alive, and nobody uses it after this.
                if let Some(delete) = unsafe { managed.as_ref().deleter } {
                    // SAFETY: called once, by the only owner.
                    unsafe { delete(managed.as_ptr()) };
                }
            }
        }
    }
}

/// The pointer of a capsule of that name, which is renamed: its producer then leaves the tensor to us.
fn unwrap(capsule: &Bound<'_, PyAny>, name: &CStr, used: &'static CStr) -> PyResult<Option<NonNull<u8>>> {
    let object = capsule.as_ptr();
    // SAFETY: the interpreter is attached, `object` is alive; any object may be asked.
    if unsafe { ffi::PyCapsule_IsValid(object, name.as_ptr()) } == 0 {
        return Ok(None);
    }
    // SAFETY: a valid capsule of that name.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(object, name.as_ptr()) };
    // SAFETY: a capsule; the new name lives as long as the program.
    if unsafe { ffi::PyCapsule_SetName(object, used.as_ptr()) } != 0 {
        return Err(PyErr::fetch(capsule.py()));
    }
    Ok(NonNull::new(pointer.cast()))
}
