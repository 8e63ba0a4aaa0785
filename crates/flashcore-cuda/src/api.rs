//! The driver's functions, looked up by name in libcuda.
//!
//! Every other file calls the driver through [`Api`]; [`sys`](crate::sys) has the types and finds the library. Codes stay
//! numbers, because a newer driver may return an unknown one. Tests substitute a table of fakes.

use crate::error::Error;
use crate::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute,
    CUgraph, CUgraphExec, CUgraphNode, CUhostFn, CUjit_option, CUjitInputType, CUlaunchConfig, CUlinkState,
    CUmodule, CUstream, CUstreamCaptureMode, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill,
    CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle, CUuserObject,
};
use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::OnceLock,
};

/// What a driver function returned, with its name for error messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) struct Status {
    pub(crate) call: &'static str,
    pub(crate) code: u32,
}

macro_rules! driver_functions {
    (
        required { $($name:ident = $symbol:literal ($($arg:ident: $ty:ty),*);)* }
        optional { $($oname:ident = $osymbol:literal ($($oarg:ident: $oty:ty),*);)* }
    ) => {
        /// One pointer per driver function.
        pub(crate) struct Table {
            $(pub(crate) $name: unsafe extern "C" fn($($ty),*) -> u32,)*
            $(pub(crate) $oname: Option<unsafe extern "C" fn($($oty),*) -> u32>,)*
        }

        impl Table {
            /// Fills the table through `find`; a required symbol that is missing is an error.
            fn fill(find: &dyn Fn(&'static str) -> Option<*const c_void>) -> Result<Self, Error> {
                let need = |symbol| find(symbol).ok_or(Error::MissingSymbol { symbol });
                Ok(Self {
                    // SAFETY: the symbol has the C signature that its row states, and libcuda is never unloaded.
                    $($name: unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn($($ty),*) -> u32>(need($symbol)?) },)*
                    // SAFETY: as above.
                    $($oname: find($osymbol).map(|f| unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn($($oty),*) -> u32>(f) }),)*
                })
            }

            /// A table whose every function returns "not supported": the base of a fake driver.
            #[cfg(test)]
            pub(crate) fn refusing() -> Self {
                Self {
                    $($name: {
                        unsafe extern "C" fn refuse($(_: $ty),*) -> u32 {
                            801
                        }
                        refuse
                    },)*
                    $($oname: None,)*
                }
            }
        }

        #[allow(clippy::too_many_arguments)]
        impl Api {
            $(
                /// # Safety
                /// As the driver documents for this function.
                pub(crate) unsafe fn $name(&self $(, $arg: $ty)*) -> Status {
                    // SAFETY: passed on to the caller.
                    Status { call: $symbol, code: unsafe { (self.0.$name)($($arg),*) } }
                }
            )*
            $(
                /// `None` where the driver is too old to have it.
                /// # Safety
                /// As the driver documents for this function.
                pub(crate) unsafe fn $oname(&self $(, $oarg: $oty)*) -> Option<Status> {
                    // SAFETY: passed on to the caller.
                    self.0.$oname.map(|f| Status { call: $osymbol, code: unsafe { f($($oarg),*) } })
                }
            )*
        }
    };
}

driver_functions! {
    required {
        init = "cuInit"(flags: c_uint);
        driver_get_version = "cuDriverGetVersion"(version: *mut c_int);
        get_error_name = "cuGetErrorName"(code: u32, name: *mut *const c_char);
        get_error_string = "cuGetErrorString"(code: u32, text: *mut *const c_char);
        device_get_count = "cuDeviceGetCount"(count: *mut c_int);
        device_get = "cuDeviceGet"(device: *mut CUdevice, ordinal: c_int);
        device_get_name = "cuDeviceGetName"(name: *mut c_char, len: c_int, device: CUdevice);
        device_get_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
        device_total_mem = "cuDeviceTotalMem_v2"(bytes: *mut usize, device: CUdevice);
        device_get_pci_bus_id = "cuDeviceGetPCIBusId"(id: *mut c_char, len: c_int, device: CUdevice);
        primary_ctx_retain = "cuDevicePrimaryCtxRetain"(context: *mut CUcontext, device: CUdevice);
        ctx_get_current = "cuCtxGetCurrent"(context: *mut CUcontext);
        ctx_push_current = "cuCtxPushCurrent_v2"(context: CUcontext);
        ctx_pop_current = "cuCtxPopCurrent_v2"(context: *mut CUcontext);
        ctx_synchronize = "cuCtxSynchronize"();
        mem_get_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
        mem_alloc = "cuMemAlloc_v2"(pointer: *mut CUdeviceptr, bytes: usize);
        mem_free = "cuMemFree_v2"(pointer: CUdeviceptr);
        mem_host_alloc = "cuMemHostAlloc"(pointer: *mut *mut c_void, bytes: usize, flags: c_uint);
        mem_free_host = "cuMemFreeHost"(pointer: *mut c_void);
        memcpy_to_device = "cuMemcpyHtoDAsync_v2"(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
        memcpy_to_host = "cuMemcpyDtoHAsync_v2"(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
        memcpy_on_device = "cuMemcpyDtoDAsync_v2"(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
        memset_d8 = "cuMemsetD8Async"(to: CUdeviceptr, value: u8, bytes: usize, stream: CUstream);
        stream_create = "cuStreamCreateWithPriority"(stream: *mut CUstream, flags: c_uint, priority: c_int);
        stream_destroy = "cuStreamDestroy_v2"(stream: CUstream);
        stream_synchronize = "cuStreamSynchronize"(stream: CUstream);
        stream_query = "cuStreamQuery"(stream: CUstream);
        stream_wait_event = "cuStreamWaitEvent"(stream: CUstream, event: CUevent, flags: c_uint);
        stream_get_id = "cuStreamGetId"(stream: CUstream, id: *mut u64);
        stream_get_ctx = "cuStreamGetCtx"(stream: CUstream, context: *mut CUcontext);
        stream_begin_capture = "cuStreamBeginCapture_v2"(stream: CUstream, mode: CUstreamCaptureMode);
        stream_end_capture = "cuStreamEndCapture"(stream: CUstream, graph: *mut CUgraph);
        stream_get_capture_info = "cuStreamGetCaptureInfo_v2"(stream: CUstream, status: *mut u32, id: *mut u64,
            graph: *mut CUgraph, dependencies: *mut *const CUgraphNode, count: *mut usize);
        exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(mode: *mut u32);
        event_create = "cuEventCreate"(event: *mut CUevent, flags: c_uint);
        event_destroy = "cuEventDestroy_v2"(event: CUevent);
        event_record = "cuEventRecord"(event: CUevent, stream: CUstream);
        event_query = "cuEventQuery"(event: CUevent);
        event_synchronize = "cuEventSynchronize"(event: CUevent);
        event_elapsed_time = "cuEventElapsedTime"(milliseconds: *mut f32, start: CUevent, end: CUevent);
        graph_instantiate = "cuGraphInstantiateWithFlags"(exec: *mut CUgraphExec, graph: CUgraph, flags: u64);
        graph_launch = "cuGraphLaunch"(exec: CUgraphExec, stream: CUstream);
        graph_destroy = "cuGraphDestroy"(graph: CUgraph);
        graph_exec_destroy = "cuGraphExecDestroy"(exec: CUgraphExec);
        graph_retain_user_object = "cuGraphRetainUserObject"(graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint);
        user_object_create = "cuUserObjectCreate"(object: *mut CUuserObject, data: *mut c_void, destroy: CUhostFn,
            count: c_uint, flags: c_uint);
        user_object_release = "cuUserObjectRelease"(object: CUuserObject, count: c_uint);
        module_load_data = "cuModuleLoadData"(module: *mut CUmodule, image: *const c_void);
        module_unload = "cuModuleUnload"(module: CUmodule);
        module_get_function = "cuModuleGetFunction"(function: *mut CUfunction, module: CUmodule, name: *const c_char);
        func_get_attribute = "cuFuncGetAttribute"(value: *mut c_int, attribute: CUfunction_attribute, function: CUfunction);
        func_set_attribute = "cuFuncSetAttribute"(function: CUfunction, attribute: CUfunction_attribute, value: c_int);
        occupancy_blocks = "cuOccupancyMaxActiveBlocksPerMultiprocessor"(blocks: *mut c_int, function: CUfunction,
            threads: c_int, shared: usize);
        occupancy_clusters = "cuOccupancyMaxActiveClusters"(clusters: *mut c_int, function: CUfunction,
            config: *const CUlaunchConfig);
        launch_kernel = "cuLaunchKernelEx"(config: *const CUlaunchConfig, function: CUfunction,
            params: *mut *mut c_void, extra: *mut *mut c_void);
        tensor_map_encode = "cuTensorMapEncodeTiled"(map: *mut CUtensorMap, element: CUtensorMapDataType, rank: u32,
            address: *mut c_void, dims: *const u64, strides: *const u64, box_dims: *const u32, steps: *const u32,
            interleave: CUtensorMapInterleave, swizzle: CUtensorMapSwizzle, promotion: CUtensorMapL2promotion,
            fill: CUtensorMapFloatOOBfill);
        tensor_map_replace_address = "cuTensorMapReplaceAddress"(map: *mut CUtensorMap, address: *mut c_void);
        link_create = "cuLinkCreate_v2"(count: c_uint, options: *mut CUjit_option, values: *mut *mut c_void,
            state: *mut CUlinkState);
        link_add_data = "cuLinkAddData_v2"(state: CUlinkState, kind: CUjitInputType, data: *mut c_void, bytes: usize,
            name: *const c_char, count: c_uint, options: *mut CUjit_option, values: *mut *mut c_void);
        link_complete = "cuLinkComplete"(state: CUlinkState, cubin: *mut *mut c_void, bytes: *mut usize);
        link_destroy = "cuLinkDestroy"(state: CUlinkState);
    }
    optional {
        func_load = "cuFuncLoad"(function: CUfunction);
        func_get_param_count = "cuFuncGetParamCount"(function: CUfunction, count: *mut usize);
        func_get_param_info = "cuFuncGetParamInfo"(function: CUfunction, index: usize, offset: *mut usize, bytes: *mut usize);
    }
}

/// The driver, loaded.
pub(crate) struct Api(pub(crate) Table);

impl Api {
    /// Loads libcuda once per process; later calls repeat the first result.
    pub(crate) fn load() -> Result<&'static Self, Error> {
        static LOADED: OnceLock<Result<Api, Error>> = OnceLock::new();
        LOADED.get_or_init(Self::find_library).as_ref().map_err(Clone::clone)
    }

    fn find_library() -> Result<Self, Error> {
        // The table points into the library, which therefore stays for the life of the process.
        let library = Box::leak(Box::new(sys::open().ok_or(Error::NoDriver)?));
        Table::fill(&|symbol| {
            // SAFETY: the address is only read here; its type is given where the table is filled.
            unsafe { library.get::<*const c_void>(symbol.as_bytes()) }.ok().map(|found| *found)
        })
        .map(Self)
    }

    /// `CUDA_ERROR_…` for a code, or the number where the driver does not know it.
    pub(crate) fn name_of(&self, code: u32) -> String {
        let mut name = std::ptr::null();
        // SAFETY: `name` is a valid place for one pointer.
        let status = unsafe { self.get_error_name(code, &mut name) };
        static_text(status, name).unwrap_or_else(|| format!("CUDA error {code}"))
    }

    /// The driver's own description of a code.
    pub(crate) fn text_of(&self, code: u32) -> String {
        let mut text = std::ptr::null();
        // SAFETY: `text` is a valid place for one pointer.
        let status = unsafe { self.get_error_string(code, &mut text) };
        static_text(status, text).unwrap_or_default()
    }
}

fn static_text(status: Status, text: *const c_char) -> Option<String> {
    if status.code != 0 || text.is_null() {
        return None;
    }
    // SAFETY: the driver answers with a NUL-terminated string of static life.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}
