//! Memory of a launch: what addresses refer to, and the bytes there.

mod address;
mod global;
mod shared;

pub(crate) use address::{
    CONST_WINDOW, LOCAL_WINDOW, PARAM_WINDOW, Place, SHARED_WINDOW, WINDOW_BYTES, rank_address, resolve,
    shared_offset, shared_rank,
};
pub(crate) use global::{GlobalMemory, MODULE_GLOBALS};
pub(crate) use shared::SharedMemory;
