//! The functions of the fake driver: only the behaviour this crate depends on.

use super::{Held, Launch, world};
use crate::api::Table;
use crate::sys::{
    CUcontext, CUdevice, CUdevice_attribute as DeviceAttribute, CUevent, CUfunction,
    CUfunction_attribute as FunctionAttribute, CUgraph, CUgraphNode, CUhostFn, CUjit_option, CUjitInputType,
    CUlaunchConfig, CUlinkState, CUmodule, CUstream, CUtensorMap, CUtensorMapDataType,
    CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle, CUuserObject,
};
use std::{
    cell::Cell,
    ffi::{c_char, c_int, c_uint, c_void},
};

/// `CUDA_ERROR_INVALID_CONTEXT`.
const INVALID_CONTEXT: u32 = 201;
/// The context that the fake calls primary.
pub(super) const PRIMARY: usize = 0x1000;

thread_local! {
    static CONTEXTS: Cell<[usize; 4]> = const { Cell::new([0; 4]) };
}

pub(super) fn current() -> usize {
    CONTEXTS.get()[0]
}

/// Makes `context` current as another program would.
pub(super) fn set_current(context: usize) {
    CONTEXTS.set([context, 0, 0, 0]);
}

pub(super) fn table() -> Table {
    Table {
        init,
        driver_get_version,
        device_get_count,
        device_get,
        device_get_name,
        device_get_attribute,
        device_total_mem,
        device_get_pci_bus_id: device_get_name,
        primary_ctx_retain,
        ctx_get_current,
        ctx_push_current,
        ctx_pop_current,
        ctx_synchronize,
        mem_get_info,
        mem_alloc,
        mem_free,
        memset_d8,
        stream_create,
        stream_destroy,
        stream_synchronize,
        stream_get_id,
        stream_get_ctx,
        stream_get_capture_info,
        exchange_capture_mode,
        event_create,
        event_destroy,
        event_record,
        event_query,
        graph_retain_user_object,
        user_object_create,
        link_create,
        link_add_data,
        link_complete,
        link_destroy,
        module_load_data,
        module_get_function,
        func_get_attribute,
        func_set_attribute,
        launch_kernel,
        tensor_map_encode,
        tensor_map_replace_address,
        func_get_param_count: world(|world| world.counts_params).then_some(func_get_param_count as _),
        func_get_param_info: Some(func_get_param_info),
        ..Table::refusing()
    }
}

fn answer(call: &'static str) -> u32 {
    world(|world| world.answer(call))
}

/// Writes a driver's result.
fn put<T>(place: *mut T, value: T) {
    // SAFETY: callers of the fake pass valid places, as the real driver demands.
    unsafe { place.write(value) };
}

unsafe extern "C" fn init(_: c_uint) -> u32 {
    answer("cuInit")
}

unsafe extern "C" fn driver_get_version(version: *mut c_int) -> u32 {
    put(version, 13_000);
    0
}

unsafe extern "C" fn device_get_count(count: *mut c_int) -> u32 {
    put(count, 1);
    0
}

unsafe extern "C" fn device_get(device: *mut CUdevice, ordinal: c_int) -> u32 {
    put(device, ordinal);
    0
}

unsafe extern "C" fn device_get_name(name: *mut c_char, _: c_int, _: CUdevice) -> u32 {
    for (at, byte) in b"Fake GPU\0".iter().enumerate() {
        put(name.wrapping_add(at), *byte as c_char);
    }
    0
}

unsafe extern "C" fn device_get_attribute(value: *mut c_int, attribute: DeviceAttribute, _: CUdevice) -> u32 {
    use DeviceAttribute as A;
    put(
        value,
        match attribute {
            A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
            A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => 0,
            A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK => 1024,
            A::CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH => 1,
            _ => 200_000,
        },
    );
    0
}

unsafe extern "C" fn device_total_mem(bytes: *mut usize, _: CUdevice) -> u32 {
    put(bytes, 1 << 30);
    0
}

unsafe extern "C" fn primary_ctx_retain(context: *mut CUcontext, _: CUdevice) -> u32 {
    put(context, PRIMARY as CUcontext);
    answer("cuDevicePrimaryCtxRetain")
}

unsafe extern "C" fn ctx_get_current(context: *mut CUcontext) -> u32 {
    put(context, current() as CUcontext);
    0
}

unsafe extern "C" fn ctx_push_current(context: CUcontext) -> u32 {
    let [a, b, c, _] = CONTEXTS.get();
    CONTEXTS.set([context as usize, a, b, c]);
    answer("cuCtxPushCurrent")
}

unsafe extern "C" fn ctx_pop_current(context: *mut CUcontext) -> u32 {
    let [top, a, b, c] = CONTEXTS.get();
    CONTEXTS.set([a, b, c, 0]);
    put(context, top as CUcontext);
    answer("cuCtxPopCurrent")
}

unsafe extern "C" fn ctx_synchronize() -> u32 {
    answer("cuCtxSynchronize")
}

unsafe extern "C" fn mem_get_info(free: *mut usize, total: *mut usize) -> u32 {
    put(free, 1 << 20);
    put(total, 1 << 30);
    0
}

unsafe extern "C" fn mem_alloc(pointer: *mut u64, bytes: usize) -> u32 {
    world(|world| {
        let address = world.fresh();
        world.memory.insert(address, bytes as u64);
        put(pointer, address);
        world.answer("cuMemAlloc")
    })
}

unsafe extern "C" fn mem_free(pointer: u64) -> u32 {
    world(|world| {
        assert!(world.memory.remove(&pointer).is_some(), "freed twice: {pointer:#x}");
        world.answer("cuMemFree")
    })
}

unsafe extern "C" fn memset_d8(to: u64, value: u8, bytes: usize, _: CUstream) -> u32 {
    assert_eq!(value, 0);
    world(|world| world.zeroed.push((to, bytes as u64)));
    answer("cuMemsetD8Async")
}

unsafe extern "C" fn stream_create(stream: *mut CUstream, _: c_uint, _: c_int) -> u32 {
    put(stream, world(|world| world.fresh()) as CUstream);
    0
}

unsafe extern "C" fn stream_destroy(_: CUstream) -> u32 {
    answer("cuStreamDestroy")
}

unsafe extern "C" fn stream_synchronize(_: CUstream) -> u32 {
    answer("cuStreamSynchronize")
}

unsafe extern "C" fn stream_get_id(stream: CUstream, id: *mut u64) -> u32 {
    let own = stream as u64;
    put(id, world(|world| world.stream_ids.get(&(stream as usize)).copied().unwrap_or(own)));
    0
}

unsafe extern "C" fn stream_get_ctx(_: CUstream, context: *mut CUcontext) -> u32 {
    put(context, PRIMARY as CUcontext);
    answer("cuStreamGetCtx")
}

unsafe extern "C" fn stream_get_capture_info(
    stream: CUstream,
    status: *mut u32,
    id: *mut u64,
    graph: *mut CUgraph,
    _: *mut *const CUgraphNode,
    _: *mut usize,
) -> u32 {
    let capture = world(|world| world.captures.get(&(stream as usize)).copied());
    put(status, u32::from(capture.is_some()));
    put(id, capture.unwrap_or(0));
    put(graph, capture.unwrap_or(0) as CUgraph);
    0
}

unsafe extern "C" fn exchange_capture_mode(_: *mut u32) -> u32 {
    0
}

unsafe extern "C" fn event_create(event: *mut CUevent, _: c_uint) -> u32 {
    put(event, world(|world| world.fresh()) as CUevent);
    0
}

unsafe extern "C" fn event_destroy(_: CUevent) -> u32 {
    0
}

unsafe extern "C" fn event_record(_: CUevent, _: CUstream) -> u32 {
    answer("cuEventRecord")
}

unsafe extern "C" fn event_query(_: CUevent) -> u32 {
    if world(|world| world.events_pending) { 600 } else { 0 }
}

unsafe extern "C" fn user_object_create(
    object: *mut CUuserObject,
    data: *mut c_void,
    destroy: CUhostFn,
    _: c_uint,
    _: c_uint,
) -> u32 {
    let held = Box::new(Held { data: data as usize, destroy: destroy.expect("a destructor") });
    put(object, Box::into_raw(held).cast());
    0
}

unsafe extern "C" fn graph_retain_user_object(
    graph: CUgraph,
    object: CUuserObject,
    _: c_uint,
    _: c_uint,
) -> u32 {
    // SAFETY: made by `user_object_create`, retained once.
    let held = *unsafe { Box::from_raw(object.cast::<Held>()) };
    world(|world| world.held.push((graph as usize, held)));
    0
}

/// What the fake's JIT returns for any text.
pub(super) const JIT_IMAGE: &[u8] = b"\x7fELF by the driver";

unsafe extern "C" fn link_create(
    _: c_uint,
    _: *mut CUjit_option,
    _: *mut *mut c_void,
    state: *mut CUlinkState,
) -> u32 {
    put(state, 0x99 as CUlinkState);
    answer("cuLinkCreate_v2")
}

unsafe extern "C" fn link_add_data(
    _: CUlinkState,
    _: CUjitInputType,
    _: *mut c_void,
    _: usize,
    _: *const c_char,
    _: c_uint,
    _: *mut CUjit_option,
    _: *mut *mut c_void,
) -> u32 {
    answer("cuLinkAddData_v2")
}

unsafe extern "C" fn link_complete(_: CUlinkState, image: *mut *mut c_void, bytes: *mut usize) -> u32 {
    put(image, JIT_IMAGE.as_ptr().cast_mut().cast());
    put(bytes, JIT_IMAGE.len());
    answer("cuLinkComplete")
}

unsafe extern "C" fn link_destroy(_: CUlinkState) -> u32 {
    0
}

unsafe extern "C" fn module_load_data(module: *mut CUmodule, _: *const c_void) -> u32 {
    put(module, 0x77 as CUmodule);
    answer("cuModuleLoadData")
}

unsafe extern "C" fn module_get_function(function: *mut CUfunction, _: CUmodule, _: *const c_char) -> u32 {
    put(function, 0x88 as CUfunction);
    answer("cuModuleGetFunction")
}

unsafe extern "C" fn func_get_attribute(
    value: *mut c_int,
    attribute: FunctionAttribute,
    _: CUfunction,
) -> u32 {
    use FunctionAttribute as A;
    put(
        value,
        match attribute {
            A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK => 1024,
            A::CU_FUNC_ATTRIBUTE_NUM_REGS => 64,
            A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => 48 << 10,
            _ => 0,
        },
    );
    0
}

unsafe extern "C" fn func_set_attribute(_: CUfunction, _: FunctionAttribute, _: c_int) -> u32 {
    answer("cuFuncSetAttribute")
}

unsafe extern "C" fn func_get_param_count(_: CUfunction, count: *mut usize) -> u32 {
    put(count, world(|world| world.param_bytes.len()));
    answer("cuFuncGetParamCount")
}

unsafe extern "C" fn func_get_param_info(
    _: CUfunction,
    index: usize,
    _: *mut usize,
    bytes: *mut usize,
) -> u32 {
    match world(|world| world.param_bytes.get(index).copied()) {
        Some(size) => {
            put(bytes, size);
            0
        }
        None => answer("cuFuncGetParamInfo past the end").max(1),
    }
}

unsafe extern "C" fn launch_kernel(
    config: *const CUlaunchConfig,
    _: CUfunction,
    params: *mut *mut c_void,
    _: *mut *mut c_void,
) -> u32 {
    world(|world| {
        if world.record {
            // SAFETY: the crate passes a config with its attributes, and one pointer to each parameter's bytes.
            let (config, read) = unsafe {
                let read = |at: usize, bytes: usize| {
                    std::slice::from_raw_parts((*params.add(at)).cast::<u8>(), bytes).to_vec()
                };
                (&*config, read)
            };
            // SAFETY: as above.
            let attributes = unsafe { std::slice::from_raw_parts(config.attrs, config.numAttrs as usize) };
            let launch = Launch {
                stream: config.hStream as usize,
                params: world.param_bytes.iter().enumerate().map(|(at, &bytes)| read(at, bytes)).collect(),
                attributes: attributes.iter().map(|attribute| attribute.id as u32).collect(),
            };
            world.launches.push(launch);
        }
        let due = std::mem::take(&mut world.failures_of_kernel);
        world.failures.extend(due);
        world.answer("cuLaunchKernelEx")
    })
}

/// The fake's encoding: address (or half of it, so that it is no word of the map), rank, swizzle.
unsafe extern "C" fn tensor_map_encode(
    map: *mut CUtensorMap,
    _: CUtensorMapDataType,
    rank: u32,
    address: *mut c_void,
    _: *const u64,
    _: *const u64,
    _: *const u32,
    _: *const u32,
    _: CUtensorMapInterleave,
    swizzle: CUtensorMapSwizzle,
    _: CUtensorMapL2promotion,
    _: CUtensorMapFloatOOBfill,
) -> u32 {
    let mut opaque = [0; 16];
    opaque[..3].copy_from_slice(&[encoded(address), rank.into(), swizzle as u64]);
    put(map, CUtensorMap { opaque });
    answer("cuTensorMapEncodeTiled")
}

unsafe extern "C" fn tensor_map_replace_address(map: *mut CUtensorMap, address: *mut c_void) -> u32 {
    assert!(map.is_aligned());
    if current() == 0 {
        return INVALID_CONTEXT;
    }
    // SAFETY: the crate passes an encoded map.
    unsafe { (*map).opaque[0] = encoded(address) };
    answer("cuTensorMapReplaceAddress")
}

fn encoded(address: *mut c_void) -> u64 {
    address as u64 >> u32::from(world(|world| world.halves_addresses))
}
