//! What XLA calls a handler with, read: arguments, results and attributes by name, the stream, scratch memory.
//!
//! The handlers of `xla` make one of each call; [`Frame::answer`] is the whole of a handler but what it computes.

use std::{
    ffi::{CString, c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::null_mut,
    slice::from_raw_parts,
    sync::atomic::{AtomicI32, Ordering},
};

use super::abi::{
    Api, Attributes, BUFFER, Buffer, Buffers, Bytes, CallFrame, EXECUTE, Failure, FailureCreate,
    FailureDestroy, Head, List, MAJOR, METADATA, MINOR, MemoryAllocate, MetadataExtension, OrdinalGet,
    Scalar, StreamGet, attribute, element,
};
use crate::error::{CallError, Class};

/// Scratch memory begins at multiples of this.
const SCRATCH_ALIGNMENT: usize = 256;

/// The minor version that handlers say they were made for.
static SPOKEN: AtomicI32 = AtomicI32::new(MINOR);

/// Makes handlers say that they were made for that minor version, or for ours where that is older.
pub(super) fn speak(minor: c_int) {
    SPOKEN.store(minor.min(MINOR), Ordering::Relaxed);
}

/// One call, alive while its handler runs.
#[derive(Clone, Copy)]
pub(super) struct Frame<'a> {
    raw: &'a CallFrame,
    api: &'a Api,
}

/// One argument or result.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a> {
    pub(super) element: c_int,
    pub(super) address: usize,
    pub(super) extents: &'a [i64],
}

impl<'a> Frame<'a> {
    /// Answers XLA's question what a handler is, or computes and says how it went.
    ///
    /// # Safety
    /// `raw` must be what XLA calls a handler with.
    pub(super) unsafe fn answer(
        raw: *mut CallFrame,
        compute: impl FnOnce(Frame<'_>) -> Result<(), CallError>,
    ) -> *mut Failure {
        // SAFETY: the caller's promise: a frame, whose extension, if any, is one by its kind.
        unsafe {
            let extension = (*raw).head.extension;
            if !extension.is_null() && (*extension).kind == METADATA {
                describe(extension.cast());
                return null_mut();
            }
            let Some(api) = (*raw).api.as_ref() else { return null_mut() };
            let frame = Frame { raw: &*raw, api };
            if frame.raw.stage != EXECUTE {
                return null_mut();
            }
            // A panic must not reach C.
            match catch_unwind(AssertUnwindSafe(|| compute(frame))) {
                Ok(Ok(())) => null_mut(),
                Ok(Err(error)) => frame.failure(code(&error), error.to_string()),
                Err(_) => frame.failure(INTERNAL, "flashcore panicked; please report this".to_owned()),
            }
        }
    }

    fn failure(self, code: c_int, message: String) -> *mut Failure {
        let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
        let Some(create) = self.api.failure_create else { return null_mut() };
        let mut asked = FailureCreate { head: head::<FailureCreate>(), message: message.as_ptr(), code };
        // SAFETY: the runtime's own function, which copies the message.
        unsafe { create(&mut asked) }
    }

    pub(super) fn arguments(self) -> Result<Vec<Operand<'a>>, CallError> {
        // SAFETY: a frame's arguments are as its header says.
        unsafe { operands(&self.raw.arguments) }
    }

    pub(super) fn results(self) -> Result<Vec<Operand<'a>>, CallError> {
        // SAFETY: as above.
        unsafe { operands(&self.raw.results) }
    }

    /// An attribute that is text.
    pub(super) fn text(self, name: &str) -> Option<&'a str> {
        let value = self.attribute(name, attribute::TEXT)?;
        // SAFETY: attributes of that kind are spans of bytes.
        let bytes = unsafe { bytes(&*value.cast::<Bytes>()) };
        std::str::from_utf8(bytes).ok()
    }

    /// An attribute that is a whole number.
    pub(super) fn whole(self, name: &str) -> Option<i64> {
        self.scalar(name, element::S64)
    }

    /// An attribute that is a number.
    pub(super) fn float(self, name: &str) -> Option<f32> {
        self.scalar(name, element::F32)
    }

    fn scalar<T: Copy>(self, name: &str, wanted: c_int) -> Option<T> {
        let value = self.attribute(name, attribute::SCALAR)?;
        // SAFETY: attributes of that kind are scalars, whose type was asked for.
        unsafe {
            let scalar = &*value.cast::<Scalar>();
            (scalar.element == wanted).then(|| scalar.value.cast::<T>().read_unaligned())
        }
    }

    /// An attribute that is a list of whole numbers.
    pub(super) fn list(self, name: &str) -> Option<Vec<i64>> {
        let value = self.attribute(name, attribute::LIST)?;
        // SAFETY: attributes of that kind are lists, whose type is asked for.
        unsafe {
            let list = &*value.cast::<List>();
            let at = |n: usize| list.start.cast::<i64>().add(n).read_unaligned();
            (list.element == element::S64).then(|| (0..list.len).map(at).collect())
        }
    }

    fn attribute(self, name: &str, kind: c_int) -> Option<*const c_void> {
        let Attributes { count, kinds, names, values, .. } = &self.raw.attributes;
        (0..usize::try_from(*count).unwrap_or(0)).find_map(|n| {
            // SAFETY: as many kinds, names and values as the frame says.
            unsafe {
                let found = bytes(&**names.add(n)) == name.as_bytes() && *kinds.add(n) == kind;
                found.then(|| *values.add(n))
            }
        })
    }

    /// The stream to launch on, and the number of its GPU.
    pub(super) fn stream(self) -> Result<(usize, u32), CallError> {
        let mut stream =
            StreamGet { head: head::<StreamGet>(), context: self.raw.context, stream: null_mut() };
        self.ask(self.api.stream_get, &mut stream)?;
        // The last function of all: runtimes of older versions end before it.
        let function = if self.api.head.bytes >= size_of::<Api>() { self.api.ordinal_get } else { None };
        let mut device = OrdinalGet { head: head::<OrdinalGet>(), context: self.raw.context, ordinal: 0 };
        self.ask(function, &mut device)?;
        Ok((stream.stream as usize, u32::try_from(device.ordinal).unwrap_or(0)))
    }

    /// Scratch memory on the GPU, which the runtime takes back in the order of the stream.
    pub(super) fn scratch(self, bytes: u64) -> Option<u64> {
        let mut asked = MemoryAllocate {
            head: head::<MemoryAllocate>(),
            context: self.raw.context,
            bytes: usize::try_from(bytes).ok()?,
            alignment: SCRATCH_ALIGNMENT,
            data: null_mut(),
        };
        self.ask(self.api.memory_allocate, &mut asked).ok()?;
        (!asked.data.is_null()).then_some(asked.data as u64)
    }

    fn ask<T>(
        self,
        function: Option<unsafe extern "C" fn(*mut T) -> *mut Failure>,
        asked: &mut T,
    ) -> Result<(), CallError> {
        let Some(function) = function else {
            return Err(CallError::Xla("this version of XLA does not report its GPU and stream"));
        };
        // SAFETY: a function of the runtime's for a structure of that type.
        let failure = unsafe { function(asked) };
        if failure.is_null() {
            return Ok(());
        }
        if let Some(destroy) = self.api.failure_destroy {
            // SAFETY: ours to destroy.
            unsafe { destroy(&mut FailureDestroy { head: head::<FailureDestroy>(), failure }) };
        }
        Err(CallError::Xla("XLA gave no stream or no memory"))
    }
}

/// # Safety
/// There must be as many buffers as it says.
unsafe fn operands<'a>(buffers: &Buffers) -> Result<Vec<Operand<'a>>, CallError> {
    let count = usize::try_from(buffers.count).unwrap_or(0);
    let read = |n: usize| {
        // SAFETY: the caller's promise; extents are as many as dimensions.
        unsafe {
            if *buffers.kinds.add(n) != BUFFER {
                return Err(CallError::Xla("XLA passed something that is not an array"));
            }
            let &Buffer { element, data, rank, extents, .. } = &**buffers.buffers.add(n);
            let rank = usize::try_from(rank).unwrap_or(0);
            let extents = if rank == 0 { &[] } else { from_raw_parts(extents, rank) };
            Ok(Operand { element, address: data as usize, extents })
        }
    };
    (0..count).map(read).collect()
}

/// # Safety
/// The span must be alive.
unsafe fn bytes<'a>(span: &Bytes) -> &'a [u8] {
    // SAFETY: the caller's promise.
    if span.len == 0 { &[] } else { unsafe { from_raw_parts(span.start, span.len) } }
}

/// # Safety
/// The extension must be one that asks for metadata.
unsafe fn describe(extension: *mut MetadataExtension) {
    // SAFETY: the caller's promise.
    unsafe {
        let metadata = &mut *(*extension).metadata;
        (metadata.version.major, metadata.version.minor) = (MAJOR, SPOKEN.load(Ordering::Relaxed));
        metadata.traits = 0;
    }
}

fn head<T>() -> Head {
    Head { bytes: size_of::<T>(), extension: null_mut() }
}

const INTERNAL: c_int = 13;

/// XLA's number for an error.
fn code(error: &CallError) -> c_int {
    match error.class() {
        Class::Type | Class::Value => 3,
        Class::Memory => 8,
        Class::Buffer => 9,
        Class::NotImplemented => 12,
        Class::Runtime => INTERNAL,
    }
}
