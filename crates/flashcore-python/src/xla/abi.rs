//! The C structures of XLA's foreign function interface, version 0.3, as far as a handler meets them; `frame` reads them.
//!
//! Each starts with its size, so that fields which an older runtime does not have are known to be missing.

use std::ffi::{c_char, c_int, c_void};

/// The version whose structures stand here. Minor versions only add to what there is.
pub(super) const MAJOR: c_int = 0;
pub(super) const MINOR: c_int = 3;
/// The kind of the extension by which a runtime asks what a handler is.
pub(super) const METADATA: c_int = 1;
/// The stage in which a handler computes.
pub(super) const EXECUTE: c_int = 3;

/// How every structure starts.
#[repr(C)]
pub(super) struct Head {
    pub(super) bytes: usize,
    pub(super) extension: *mut Extension,
}

#[repr(C)]
pub(super) struct Extension {
    pub(super) bytes: usize,
    pub(super) kind: c_int,
    pub(super) next: *mut Extension,
}

#[repr(C)]
pub(super) struct Version {
    pub(super) head: Head,
    pub(super) major: c_int,
    pub(super) minor: c_int,
}

#[repr(C)]
pub(super) struct Metadata {
    pub(super) bytes: usize,
    pub(super) version: Version,
    pub(super) traits: u32,
}

#[repr(C)]
pub(super) struct MetadataExtension {
    pub(super) base: Extension,
    pub(super) metadata: *mut Metadata,
}

/// Types of elements, by XLA's numbers.
pub(crate) mod element {
    use std::ffi::c_int;

    pub(crate) const S32: c_int = 4;
    pub(crate) const S64: c_int = 5;
    pub(crate) const U32: c_int = 8;
    pub(crate) const U64: c_int = 9;
    pub(crate) const F16: c_int = 10;
    pub(crate) const F32: c_int = 11;
    pub(crate) const BF16: c_int = 16;

    /// What NumPy calls them, and others that callers may have.
    pub(crate) const NAMES: [(&str, c_int); 15] = [
        ("bool", 1),
        ("int8", 2),
        ("int16", 3),
        ("int32", S32),
        ("int64", S64),
        ("uint8", 6),
        ("uint16", 7),
        ("uint32", U32),
        ("uint64", U64),
        ("float16", F16),
        ("float32", F32),
        ("float64", 12),
        ("bfloat16", BF16),
        ("float8_e5m2", 19),
        ("float8_e4m3fn", 20),
    ];
}

/// A dense array, last dimension innermost.
#[repr(C)]
pub(super) struct Buffer {
    pub(super) head: Head,
    pub(super) element: c_int,
    pub(super) data: *mut c_void,
    pub(super) rank: i64,
    pub(super) extents: *const i64,
}

/// The kind of an argument or a result that is a [`Buffer`].
pub(super) const BUFFER: c_int = 1;

/// Arguments or results.
#[repr(C)]
pub(super) struct Buffers {
    pub(super) head: Head,
    pub(super) count: i64,
    pub(super) kinds: *const c_int,
    pub(super) buffers: *const *const Buffer,
}

#[repr(C)]
pub(super) struct Bytes {
    pub(super) start: *const u8,
    pub(super) len: usize,
}

/// An attribute that is one number.
#[repr(C)]
pub(super) struct Scalar {
    pub(super) element: c_int,
    pub(super) value: *const c_void,
}

/// An attribute that is a list of numbers.
#[repr(C)]
pub(super) struct List {
    pub(super) element: c_int,
    pub(super) len: usize,
    pub(super) start: *const c_void,
}

/// The kinds of attributes.
pub(super) mod attribute {
    use std::ffi::c_int;

    pub(crate) const LIST: c_int = 1;
    pub(crate) const SCALAR: c_int = 3;
    /// Of type [`Bytes`](super::Bytes).
    pub(crate) const TEXT: c_int = 4;
}

/// Attributes, by name.
#[repr(C)]
pub(super) struct Attributes {
    pub(super) head: Head,
    pub(super) count: i64,
    pub(super) kinds: *const c_int,
    pub(super) names: *const *const Bytes,
    pub(super) values: *const *const c_void,
}

/// What a handler is called with.
#[repr(C)]
pub(crate) struct CallFrame {
    pub(super) head: Head,
    pub(super) api: *const Api,
    pub(super) context: *mut c_void,
    pub(super) stage: c_int,
    pub(super) arguments: Buffers,
    pub(super) results: Buffers,
    pub(super) attributes: Attributes,
}

/// An error of the runtime's.
#[repr(C)]
pub(crate) struct Failure {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(super) struct FailureCreate {
    pub(super) head: Head,
    pub(super) message: *const c_char,
    pub(super) code: c_int,
}

#[repr(C)]
pub(super) struct FailureDestroy {
    pub(super) head: Head,
    pub(super) failure: *mut Failure,
}

#[repr(C)]
pub(super) struct StreamGet {
    pub(super) head: Head,
    pub(super) context: *mut c_void,
    pub(super) stream: *mut c_void,
}

#[repr(C)]
pub(super) struct MemoryAllocate {
    pub(super) head: Head,
    pub(super) context: *mut c_void,
    pub(super) bytes: usize,
    pub(super) alignment: usize,
    pub(super) data: *mut c_void,
}

#[repr(C)]
pub(super) struct OrdinalGet {
    pub(super) head: Head,
    pub(super) context: *mut c_void,
    pub(super) ordinal: i32,
}

/// A function that fills in its argument, or says why not.
pub(super) type Ask<T> = Option<unsafe extern "C" fn(*mut T) -> *mut Failure>;

/// The functions of the runtime; those that nobody here calls are but addresses.
#[repr(C)]
pub(super) struct Api {
    pub(super) head: Head,
    pub(super) version: Version,
    pub(super) internal: *const c_void,
    pub(super) failure_create: Ask<FailureCreate>,
    pub(super) failure_message: *const c_void,
    pub(super) failure_destroy: Option<unsafe extern "C" fn(*mut FailureDestroy)>,
    pub(super) handler_register: *const c_void,
    pub(super) stream_get: Ask<StreamGet>,
    pub(super) types_and_states: [*const c_void; 4],
    pub(super) memory_allocate: Ask<MemoryAllocate>,
    pub(super) memory_free: *const c_void,
    pub(super) threads_and_futures: [*const c_void; 5],
    pub(super) run_id_get: *const c_void,
    pub(super) ordinal_get: Ask<OrdinalGet>,
}

/// What XLA's header says of its structures on 64-bit machines.
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<Head>() == 16 && size_of::<Extension>() == 24 && size_of::<Version>() == 24);
    assert!(size_of::<MetadataExtension>() == 32 && std::mem::offset_of!(Metadata, traits) == 32);
    assert!(size_of::<Buffer>() == 48 && size_of::<Buffers>() == 40 && size_of::<Attributes>() == 48);
    assert!(size_of::<Scalar>() == 16 && size_of::<List>() == 24 && size_of::<Bytes>() == 16);
    assert!(std::mem::offset_of!(CallFrame, arguments) == 40 && size_of::<CallFrame>() == 168);
    assert!(std::mem::offset_of!(Api, failure_create) == 48 && std::mem::offset_of!(Api, stream_get) == 80);
    assert!(std::mem::offset_of!(Api, memory_allocate) == 120 && size_of::<Api>() == 192);
};
