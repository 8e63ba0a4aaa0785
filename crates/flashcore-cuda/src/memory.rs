//! Device and pinned host memory, and copies on a stream.
//!
//! Callers own [`DeviceBuffer`]s and pass their addresses to launches. Safe copies wait for the stream; the `_async`
//! forms leave lifetimes to the caller. Freeing waits for the device, as the driver does for plain allocations.

use crate::sys::CUdeviceptr;
use crate::{
    driver::Device,
    error::{Error, OUT_OF_MEMORY},
    stream::{RelaxedCapture, Stream},
};
use std::{
    ffi::c_void,
    ops::{Deref, DerefMut},
};

/// Memory on a device, freed on drop.
#[derive(Debug)]
pub struct DeviceBuffer {
    device: Device,
    address: CUdeviceptr,
    bytes: u64,
}

impl DeviceBuffer {
    /// Allocates `bytes` with undefined contents; an empty buffer has the address 0.
    pub fn new(device: Device, bytes: u64) -> Result<Self, Error> {
        let address = if bytes == 0 { 0 } else { allocate(device, bytes)? };
        Ok(Self { device, address, bytes })
    }

    /// Allocates and fills from host memory.
    pub fn from_host(stream: &Stream, data: &[u8]) -> Result<Self, Error> {
        let mut buffer = Self::new(stream.device(), data.len() as u64)?;
        buffer.copy_from_host(stream, 0, data)?;
        Ok(buffer)
    }

    /// Its address on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size in bytes.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The device it lies on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Copies `data` to `offset`, in stream order, and waits.
    pub fn copy_from_host(&mut self, stream: &Stream, offset: u64, data: &[u8]) -> Result<(), Error> {
        // SAFETY: the wait below keeps `data` borrowed until the copy is done.
        unsafe { self.copy_from_host_async(stream, offset, data)? };
        stream.synchronize()
    }

    /// Copies from `offset` into `data`, in stream order, and waits.
    pub fn copy_to_host(&self, stream: &Stream, offset: u64, data: &mut [u8]) -> Result<(), Error> {
        // SAFETY: the wait below keeps `data` borrowed until the copy is done.
        unsafe { self.copy_to_host_async(stream, offset, data)? };
        stream.synchronize()
    }

    /// The whole contents, in stream order.
    pub fn to_host(&self, stream: &Stream) -> Result<Vec<u8>, Error> {
        let mut data = vec![0; self.bytes as usize];
        self.copy_to_host(stream, 0, &mut data)?;
        Ok(data)
    }

    /// Starts a copy of `data` to `offset`.
    ///
    /// # Safety
    /// `data` must stay alive and unchanged, and the buffer alive, until the stream has passed this point.
    pub unsafe fn copy_from_host_async(
        &mut self,
        stream: &Stream,
        offset: u64,
        data: &[u8],
    ) -> Result<(), Error> {
        let Some(to) = self.part(offset, data.len() as u64)? else { return Ok(()) };
        let _inside = self.device.enter()?;
        // SAFETY: the range lies in the buffer; the caller keeps both ends alive.
        self.device.check(unsafe {
            self.device.api().memcpy_to_device(to, data.as_ptr().cast(), data.len(), stream.handle())
        })
    }

    /// Starts a copy from `offset` into `data`.
    ///
    /// # Safety
    /// `data` must stay alive and untouched, and the buffer alive, until the stream has passed this point.
    pub unsafe fn copy_to_host_async(
        &self,
        stream: &Stream,
        offset: u64,
        data: &mut [u8],
    ) -> Result<(), Error> {
        let Some(from) = self.part(offset, data.len() as u64)? else { return Ok(()) };
        let _inside = self.device.enter()?;
        // SAFETY: the range lies in the buffer; the caller keeps both ends alive.
        self.device.check(unsafe {
            self.device.api().memcpy_to_host(data.as_mut_ptr().cast(), from, data.len(), stream.handle())
        })
    }

    /// Starts a copy of all of `from` to the front of this buffer.
    pub fn copy_from_device(&mut self, stream: &Stream, from: &Self) -> Result<(), Error> {
        let Some(to) = self.part(0, from.bytes)? else { return Ok(()) };
        let _inside = self.device.enter()?;
        // SAFETY: the range lies in both buffers; freeing either waits for the device.
        self.device.check(unsafe {
            self.device.api().memcpy_on_device(to, from.address, from.bytes as usize, stream.handle())
        })
    }

    /// Sets every byte to `value`, in stream order.
    pub fn fill(&mut self, stream: &Stream, value: u8) -> Result<(), Error> {
        if self.is_empty() {
            return Ok(());
        }
        let _inside = self.device.enter()?;
        fill(self.device, self.address, value, self.bytes, stream)
    }

    /// The address of a range; `None` for an empty one.
    fn part(&self, offset: u64, bytes: u64) -> Result<Option<CUdeviceptr>, Error> {
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        match fits {
            false => Err(Error::OutOfRange { offset, bytes, len: self.bytes }),
            true if bytes == 0 => Ok(None),
            true => Ok(Some(self.address + offset)),
        }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.address != 0 {
            free(self.device, self.address);
        }
    }
}

/// Fills device memory that the caller owns; the context is current.
pub(crate) fn fill(
    device: Device,
    to: CUdeviceptr,
    value: u8,
    bytes: u64,
    stream: &Stream,
) -> Result<(), Error> {
    // SAFETY: the caller owns `bytes` bytes at `to`; freeing them waits for the device.
    device.check(unsafe { device.api().memset_d8(to, value, bytes as usize, stream.handle()) })
}

/// Allocates, also while a stream of this thread is being captured.
pub(crate) fn allocate(device: Device, bytes: u64) -> Result<CUdeviceptr, Error> {
    let _inside = device.enter()?;
    let _relaxed = RelaxedCapture::begin(device)?;
    let mut address = 0;
    // SAFETY: `address` is a valid place; the context is current.
    let status = unsafe { device.api().mem_alloc(&mut address, bytes as usize) };
    if status.code == OUT_OF_MEMORY {
        let (free, total) = device.memory_info()?;
        return Err(Error::OutOfMemory { requested: bytes, free, total });
    }
    device.check(status)?;
    Ok(address)
}

/// Frees; on a poisoned device the memory went with the context.
pub(crate) fn free(device: Device, address: CUdeviceptr) {
    let Ok(_inside) = device.enter() else { return };
    let Ok(_relaxed) = RelaxedCapture::begin(device) else { return };
    // SAFETY: `address` came from `allocate` and its owner is being dropped.
    device.check_in_drop(unsafe { device.api().mem_free(address) });
}

/// Page-locked host memory, from which copies run asynchronously.
#[derive(Debug)]
pub struct PinnedBuffer {
    device: Device,
    at: *mut c_void,
    bytes: usize,
}

// SAFETY: it is plain host memory, owned alone.
unsafe impl Send for PinnedBuffer {}
// SAFETY: shared access is read-only.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates `bytes` zeros.
    pub fn new(device: Device, bytes: usize) -> Result<Self, Error> {
        const PORTABLE: u32 = 1;
        let _inside = device.enter()?;
        let _relaxed = RelaxedCapture::begin(device)?;
        let mut at = std::ptr::null_mut();
        // SAFETY: `at` is a valid place; the driver refuses a size of 0, so one byte is asked for then.
        device.check(unsafe { device.api().mem_host_alloc(&mut at, bytes.max(1), PORTABLE) })?;
        // SAFETY: the driver gave at least `bytes` bytes.
        unsafe { at.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { device, at, bytes })
    }
}

impl Deref for PinnedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `bytes` initialised bytes, owned by self.
        unsafe { std::slice::from_raw_parts(self.at.cast(), self.bytes) }
    }
}

impl DerefMut for PinnedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.at.cast(), self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let Ok(_inside) = self.device.enter() else { return };
        let Ok(_relaxed) = RelaxedCapture::begin(self.device) else { return };
        // SAFETY: `at` came from `mem_host_alloc`.
        self.device.check_in_drop(unsafe { self.device.api().mem_free_host(self.at) });
    }
}
