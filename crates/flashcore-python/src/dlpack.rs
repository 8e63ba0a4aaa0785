//! The C structures of DLPack, as its specification lays them out; `import` reads them, `owned` frees them.

use std::{
    ffi::{CStr, c_int, c_void},
    fmt,
};

/// Name of a capsule that holds a [`Managed`] tensor.
pub(crate) const PLAIN: &CStr = c"dltensor";
/// Name of a capsule that holds a [`ManagedVersioned`] tensor.
pub(crate) const VERSIONED: &CStr = c"dltensor_versioned";
/// Name of a [`PLAIN`] capsule whose tensor was taken out.
pub(crate) const PLAIN_USED: &CStr = c"used_dltensor";
/// Name of a [`VERSIONED`] capsule whose tensor was taken out.
pub(crate) const VERSIONED_USED: &CStr = c"used_dltensor_versioned";
/// Name of a capsule that holds an [`ExchangeApi`].
pub(crate) const EXCHANGE: &CStr = c"dlpack_exchange_api";

/// The major version whose structures stand here.
pub(crate) const MAJOR: u32 = 1;
/// Flag of a tensor that consumers must not write.
pub(crate) const READ_ONLY: u64 = 1;

/// Where memory is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Device {
    pub(crate) kind: c_int,
    pub(crate) id: i32,
}

impl Device {
    pub(crate) const CPU: c_int = 1;
    pub(crate) const CUDA: c_int = 2;
    /// Pinned host memory.
    pub(crate) const CUDA_HOST: c_int = 3;
    pub(crate) const CUDA_MANAGED: c_int = 13;
}

/// What an element is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

impl DataType {
    pub(crate) const INT: u8 = 0;
    pub(crate) const UINT: u8 = 1;
    pub(crate) const FLOAT: u8 = 2;
    pub(crate) const BFLOAT: u8 = 4;
    /// 8 bits, 4 of exponent, without infinity: what E4M3 is.
    pub(crate) const FLOAT8_E4M3FN: u8 = 10;
    /// 8 bits, 5 of exponent.
    pub(crate) const FLOAT8_E5M2: u8 = 12;
    const COMPLEX: u8 = 5;
    const BOOL: u8 = 6;
    /// Types of at most 8 bits, whose codes follow that of [`Self::BOOL`] in this order.
    const NARROW: [&str; 11] = [
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float6_e2m3fn",
        "float6_e3m2fn",
        "float4_e2m1fn",
    ];

    /// The type of 8 bits that frameworks call so.
    pub(crate) fn narrow(name: &str) -> Option<Self> {
        let at = Self::NARROW.iter().position(|&known| known == name && known.starts_with("float8"))?;
        Some(Self { code: Self::BOOL + 1 + u8::try_from(at).ok()?, bits: 8, lanes: 1 })
    }

    /// Whether it is a whole number of 8 bits.
    pub(crate) const fn is_byte(self) -> bool {
        matches!((self.code, self.bits, self.lanes), (Self::INT | Self::UINT, 8, 1))
    }
}

/// As frameworks call it: `float64`, `int32`.
impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, bits, lanes } = *self;
        let narrow = || Self::NARROW.get(usize::from(code).checked_sub(usize::from(Self::BOOL) + 1)?);
        match code {
            Self::INT => write!(f, "int{bits}")?,
            Self::UINT => write!(f, "uint{bits}")?,
            Self::FLOAT => write!(f, "float{bits}")?,
            Self::BFLOAT => write!(f, "bfloat{bits}")?,
            Self::COMPLEX => write!(f, "complex{bits}")?,
            Self::BOOL => f.write_str("bool")?,
            _ => match narrow() {
                Some(name) => f.write_str(name)?,
                None => write!(f, "of DLPack type {code} with {bits} bits")?,
            },
        }
        if lanes == 1 { Ok(()) } else { write!(f, " in vectors of {lanes}") }
    }
}

/// A view of memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: Device,
    pub(crate) ndim: i32,
    pub(crate) dtype: DataType,
    pub(crate) shape: *const i64,
    /// In elements; null means dense, last dimension innermost.
    pub(crate) strides: *const i64,
    pub(crate) byte_offset: u64,
}

impl Tensor {
    /// Whether elements that follow one another in the last dimension are neighbours in memory.
    ///
    /// # Safety
    /// Shape and strides are those of `ndim` dimensions.
    pub(crate) unsafe fn has_neighbours(&self) -> bool {
        let Some(last) = usize::try_from(self.ndim).ok().and_then(|rank| rank.checked_sub(1)) else {
            return false;
        };
        // SAFETY: the caller's promise.
        unsafe { *self.shape.add(last) > 1 && (self.strides.is_null() || *self.strides.add(last) == 1) }
    }

    /// For a producer to fill in.
    pub(crate) const fn unset() -> Self {
        Self {
            data: std::ptr::null_mut(),
            device: Device { kind: 0, id: 0 },
            ndim: 0,
            dtype: DataType { code: 0, bits: 0, lanes: 0 },
            shape: std::ptr::null(),
            strides: std::ptr::null(),
            byte_offset: 0,
        }
    }
}

/// A tensor that its consumer gives back, before DLPack 1.0.
#[repr(C)]
pub(crate) struct Managed {
    pub(crate) tensor: Tensor,
    pub(crate) context: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Version {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

/// A tensor that its consumer gives back, since DLPack 1.0.
#[repr(C)]
pub(crate) struct ManagedVersioned {
    pub(crate) version: Version,
    pub(crate) context: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    pub(crate) flags: u64,
    pub(crate) tensor: Tensor,
}

/// Start of every version of [`ExchangeApi`].
#[repr(C)]
pub(crate) struct ExchangeHeader {
    pub(crate) version: Version,
    pub(crate) previous: *const ExchangeHeader,
}

/// Functions of a framework that exchange tensors without a capsule or a call into Python.
#[repr(C)]
pub(crate) struct ExchangeApi {
    pub(crate) header: ExchangeHeader,
    pub(crate) allocate: *const c_void,
    pub(crate) managed_from_object: *const c_void,
    pub(crate) managed_to_object: *const c_void,
    /// Fills in a view that is valid while the object is and nobody changes its shape; −1 with a Python error set.
    pub(crate) view_of_object: Option<unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int>,
    /// The stream on which the framework would launch now; −1 with a Python error set.
    pub(crate) current_stream: Option<unsafe extern "C" fn(c_int, i32, *mut *mut c_void) -> c_int>,
}
