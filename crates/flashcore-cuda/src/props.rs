//! Properties of a GPU, as plain data that planning code takes without depending on a driver.

use crate::sys::{CUdevice, CUdevice_attribute as Attribute};
use crate::{api::Api, driver::plain, error::Error};
use std::ffi::{CStr, c_char};

/// Properties of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProps {
    /// The number under which the driver lists it.
    pub index: u32,
    /// Its marketing name.
    pub name: String,
    /// PCI address, `domain:bus:device.function`.
    pub pci_bus_id: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Threads of a warp.
    pub warp_size: u32,
    /// Most threads of a CTA.
    pub threads_per_block: u32,
    /// Most threads resident on an SM.
    pub threads_per_sm: u32,
    /// 32-bit registers of an SM.
    pub registers_per_sm: u32,
    /// Most dynamic shared memory of a CTA in bytes, after opting in.
    pub shared_optin: u32,
    /// Shared memory of an SM in bytes.
    pub shared_per_sm: u32,
    /// Shared memory of each CTA that the driver reserves, in bytes.
    pub shared_reserved: u32,
    /// L2 cache in bytes.
    pub l2_bytes: u64,
    /// Device memory in bytes.
    pub memory_bytes: u64,
    /// Whether CTAs can form clusters.
    pub clusters: bool,
}

impl DeviceProps {
    /// The compute capability as `major * 10 + minor`.
    pub fn sm(&self) -> u32 {
        self.capability.0 * 10 + self.capability.1
    }

    /// Whether the device has TMA and takes tensor maps.
    pub fn tensor_maps(&self) -> bool {
        self.capability.0 >= 9
    }
}

pub(crate) fn read(api: &Api, device: CUdevice, index: u32) -> Result<DeviceProps, Error> {
    let get = |attribute| attribute_of(api, device, attribute);
    Ok(DeviceProps {
        index,
        // SAFETY: text() passes a buffer and its length, `device` is of this driver.
        name: text(api, |at, len| unsafe { api.device_get_name(at, len, device) })?,
        // SAFETY: as above.
        pci_bus_id: text(api, |at, len| unsafe { api.device_get_pci_bus_id(at, len, device) })?,
        capability: (
            get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        sms: get(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        warp_size: get(Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE)?,
        threads_per_block: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        threads_per_sm: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
        registers_per_sm: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)?,
        shared_optin: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        shared_per_sm: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
        shared_reserved: get(Attribute::CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK)?,
        l2_bytes: u64::from(get(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?),
        memory_bytes: total_memory(api, device)?,
        clusters: get(Attribute::CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH)? != 0,
    })
}

fn attribute_of(api: &Api, device: CUdevice, attribute: Attribute) -> Result<u32, Error> {
    let mut value = 0;
    // SAFETY: `value` is a valid place, `device` is of this driver.
    plain(api, unsafe { api.device_get_attribute(&mut value, attribute, device) })?;
    Ok(value.unsigned_abs())
}

fn total_memory(api: &Api, device: CUdevice) -> Result<u64, Error> {
    let mut bytes = 0;
    // SAFETY: `bytes` is a valid place, `device` is of this driver.
    plain(api, unsafe { api.device_total_mem(&mut bytes, device) })?;
    Ok(bytes as u64)
}

fn text(api: &Api, ask: impl FnOnce(*mut c_char, i32) -> crate::api::Status) -> Result<String, Error> {
    let mut buffer = [0u8; 256];
    plain(api, ask(buffer.as_mut_ptr().cast(), buffer.len() as i32 - 1))?;
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}
