//! The driver's types and constants, as `cuda.h` has them, as far as this crate uses them; and the library itself.
//!
//! [`api`](crate::api) declares the functions that take them. They are declared here and not taken from cudarc because
//! crate features are unified over a whole build: a program that also uses candle would get candle's choice of linking
//! to CUDA and of CUDA's version, or none at all. The tests below compare against cudarc.
#![allow(non_camel_case_types, non_snake_case, clippy::upper_case_acronyms)]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

/// Names of the library, the driver's own first: `libcuda.so` may be the toolkit's stub.
const LIBRARIES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };

/// How often the library was looked for, for the test that this is once.
#[cfg(test)]
pub(crate) static LOOKED: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

/// Opens the driver's library, if the machine has one.
pub(crate) fn open() -> Option<libloading::Library> {
    #[cfg(test)]
    LOOKED.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    // SAFETY: opening libcuda runs its initialisers, which NVIDIA ships to be run in any process.
    LIBRARIES.iter().find_map(|name| unsafe { libloading::Library::new(*name) }.ok())
}

/// Opaque pointers of the driver, each with its own type.
macro_rules! handles {
    ($($name:ident = $inside:ident;)*) => {
        $(
            #[repr(C)]
            pub(crate) struct $inside([u8; 0]);
            pub(crate) type $name = *mut $inside;
        )*
    };
}

handles! {
    CUcontext = CUctx_st;
    CUevent = CUevent_st;
    CUfunction = CUfunc_st;
    CUgraph = CUgraph_st;
    CUgraphExec = CUgraphExec_st;
    CUgraphNode = CUgraphNode_st;
    CUlinkState = CUlinkState_st;
    CUmodule = CUmod_st;
    CUstream = CUstream_st;
    CUuserObject = CUuserObject_st;
}

pub(crate) type CUdevice = c_int;
pub(crate) type CUdeviceptr = c_ulonglong;
pub(crate) type CUhostFn = Option<unsafe extern "C" fn(*mut c_void)>;

/// Enumerations that are passed to the driver and never read from it.
macro_rules! enumerations {
    ($($name:ident { $($variant:ident = $value:literal,)* })*) => {
        $(
            #[repr(u32)]
            #[derive(Clone, Copy, PartialEq, Eq, Debug)]
            pub(crate) enum $name {
                $($variant = $value,)*
            }
        )*

        #[cfg(test)]
        mod yardstick {
            use cudarc::driver::sys as theirs;

            #[test]
            fn values_are_those_of_cuda_h() {
                $($(assert_eq!(super::$name::$variant as u32, theirs::$name::$variant as u32, stringify!($variant));)*)*
            }
        }
    };
}

enumerations! {
    CUdevice_attribute {
        CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1,
        CU_DEVICE_ATTRIBUTE_WARP_SIZE = 10,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38,
        CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR = 39,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
        CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR = 82,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
        CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK = 111,
        CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH = 120,
    }
    CUfunction_attribute {
        CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0,
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1,
        CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3,
        CU_FUNC_ATTRIBUTE_NUM_REGS = 4,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14,
    }
    CUjit_option {
        CU_JIT_MAX_REGISTERS = 0,
        CU_JIT_INFO_LOG_BUFFER = 3,
        CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES = 4,
        CU_JIT_ERROR_LOG_BUFFER = 5,
        CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6,
        CU_JIT_OPTIMIZATION_LEVEL = 7,
        CU_JIT_LOG_VERBOSE = 12,
        CU_JIT_GENERATE_LINE_INFO = 13,
    }
    CUjitInputType {
        CU_JIT_INPUT_PTX = 1,
    }
    CUlaunchAttributeID {
        CU_LAUNCH_ATTRIBUTE_IGNORE = 0,
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
    }
    CUstreamCaptureMode {
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
    }
    CUtensorMapDataType {
        CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
        CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
        CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7,
        CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
    }
    CUtensorMapInterleave {
        CU_TENSOR_MAP_INTERLEAVE_NONE = 0,
    }
    CUtensorMapSwizzle {
        CU_TENSOR_MAP_SWIZZLE_NONE = 0,
        CU_TENSOR_MAP_SWIZZLE_32B = 1,
        CU_TENSOR_MAP_SWIZZLE_64B = 2,
        CU_TENSOR_MAP_SWIZZLE_128B = 3,
    }
    CUtensorMapL2promotion {
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3,
    }
    CUtensorMapFloatOOBfill {
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0,
    }
}

/// A tensor map: 128 bytes that only the driver and the copy engine understand.
#[repr(C, align(128))]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CUtensorMap {
    pub(crate) opaque: [u64; 16],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CUlaunchConfig {
    pub(crate) gridDimX: c_uint,
    pub(crate) gridDimY: c_uint,
    pub(crate) gridDimZ: c_uint,
    pub(crate) blockDimX: c_uint,
    pub(crate) blockDimY: c_uint,
    pub(crate) blockDimZ: c_uint,
    pub(crate) sharedMemBytes: c_uint,
    pub(crate) hStream: CUstream,
    pub(crate) attrs: *mut CUlaunchAttribute,
    pub(crate) numAttrs: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CUlaunchAttribute {
    pub(crate) id: CUlaunchAttributeID,
    pub(crate) pad: [c_char; 4],
    pub(crate) value: CUlaunchAttributeValue,
}

/// The value of a launch attribute. The driver's has pointers among its members, hence the alignment.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(crate) union CUlaunchAttributeValue {
    pub(crate) pad: [c_char; 64],
    pub(crate) clusterDim: ClusterDim,
    pub(crate) programmaticStreamSerializationAllowed: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ClusterDim {
    pub(crate) x: c_uint,
    pub(crate) y: c_uint,
    pub(crate) z: c_uint,
}

#[cfg(test)]
mod tests {
    use crate::{Device, Driver};
    use cudarc::driver::sys as theirs;
    use std::{
        mem::{align_of, offset_of},
        sync::atomic::Ordering::Relaxed,
    };

    /// A machine without a driver is asked once, not by every call that would rather have run on a GPU.
    #[test]
    fn the_library_is_looked_for_once() {
        let first = Driver::get().err();
        for _ in 0..100 {
            assert_eq!(Driver::get().err(), first);
            assert!(Device::new(u32::MAX).is_err());
        }
        assert_eq!(super::LOOKED.load(Relaxed), 1);
    }

    macro_rules! same_layout {
        ($($name:ident { $($field:ident),* })*) => {
            $(
                assert_eq!(size_of::<super::$name>(), size_of::<theirs::$name>(), stringify!($name));
                assert_eq!(align_of::<super::$name>(), align_of::<theirs::$name>(), stringify!($name));
                $(assert_eq!(
                    offset_of!(super::$name, $field),
                    offset_of!(theirs::$name, $field),
                    concat!(stringify!($name), ".", stringify!($field))
                );)*
            )*
        };
    }

    #[test]
    fn structures_lie_as_in_cuda_h() {
        same_layout! {
            CUcontext {} CUdevice {} CUdeviceptr {} CUhostFn {} CUstream {}
            CUdevice_attribute {} CUjit_option {} CUlaunchAttributeID {}
            CUtensorMap { opaque }
            CUlaunchAttribute { id, pad, value }
            CUlaunchAttributeValue { pad, clusterDim, programmaticStreamSerializationAllowed }
            CUlaunchConfig {
                gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream, attrs, numAttrs
            }
        }
    }
}
