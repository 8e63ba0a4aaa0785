//! Streams and events.
//!
//! A [`Stream`] is created here or borrowed from another library by its raw handle. Every copy and launch names one.

use crate::sys::{CUevent, CUgraph, CUstream};
use crate::{
    driver::Device,
    error::{Error, NOT_READY},
    memory,
};
use std::ffi::c_void;

/// An order of work on a device.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    raw: CUstream,
    owned: bool,
}

// SAFETY: the driver allows every thread to use a stream.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream that does not wait for the legacy default stream.
    pub fn new(device: Device) -> Result<Self, Error> {
        Self::with_priority(device, 0)
    }

    /// Like [`Stream::new`] with a priority: lower numbers first, 0 is the default.
    pub fn with_priority(device: Device, priority: i32) -> Result<Self, Error> {
        const NON_BLOCKING: u32 = 1;
        let _inside = device.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a valid place; the context is current.
        device.check(unsafe { device.api().stream_create(&mut raw, NON_BLOCKING, priority) })?;
        Ok(Self { device, raw, owned: true })
    }

    /// The legacy default stream.
    pub fn legacy(device: Device) -> Self {
        Self { device, raw: std::ptr::null_mut(), owned: false }
    }

    /// A stream of another program (`CUstream` or `cudaStream_t`); it is not destroyed on drop.
    ///
    /// # Safety
    /// `raw` must be a live stream for as long as the result is used.
    pub unsafe fn from_raw(device: Device, raw: *mut c_void) -> Result<Self, Error> {
        let _inside = device.enter()?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the caller vouches for the stream; `context` is a valid place.
        device.check(unsafe { device.api().stream_get_ctx(raw.cast(), &mut context) })?;
        if context != device.context() {
            return Err(Error::ForeignStream { device: device.index() });
        }
        Ok(Self { device, raw: raw.cast(), owned: false })
    }

    /// The device it belongs to.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The driver's handle (`CUstream`).
    pub fn raw(&self) -> *mut c_void {
        self.raw.cast()
    }

    pub(crate) fn handle(&self) -> CUstream {
        self.raw
    }

    /// Waits until all work submitted so far is done.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _inside = self.device.enter()?;
        // SAFETY: the stream is alive.
        self.device.check(unsafe { self.device.api().stream_synchronize(self.raw) })
    }

    /// Whether all work submitted so far is done.
    pub fn is_done(&self) -> Result<bool, Error> {
        let _inside = self.device.enter()?;
        // SAFETY: the stream is alive.
        let status = unsafe { self.device.api().stream_query(self.raw) };
        if status.code == NOT_READY { Ok(false) } else { self.device.check(status).map(|()| true) }
    }

    /// Whether a graph is being recorded from its work.
    pub fn is_capturing(&self) -> Result<bool, Error> {
        let _inside = self.device.enter()?;
        Ok(capture_of(self.device, self.raw)?.is_some())
    }

    /// Makes later work of this stream wait for `event`.
    pub fn wait(&self, event: &Event) -> Result<(), Error> {
        let _inside = self.device.enter()?;
        // SAFETY: both are alive; the driver keeps what the wait needs.
        self.device.check(unsafe { self.device.api().stream_wait_event(self.raw, event.raw, 0) })
    }

    /// Sets bytes of anybody's device memory to `value`, in the order of the stream.
    ///
    /// # Safety
    /// There must be as many bytes at that address, which nobody else uses until this is done.
    pub unsafe fn fill(&self, address: u64, value: u8, bytes: u64) -> Result<(), Error> {
        if bytes == 0 {
            return Ok(());
        }
        let _inside = self.device.enter()?;
        memory::fill(self.device, address, value, bytes, self)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        let Ok(_inside) = self.device.enter() else { return };
        self.device.pool().stream_ends(self.device, self.raw);
        // SAFETY: made by `with_priority`; the driver finishes what was submitted.
        self.device.check_in_drop(unsafe { self.device.api().stream_destroy(self.raw) });
    }
}

/// A number that no other stream of the process ever has, unlike the handle, which is reused. The context is current.
pub(crate) fn unique_id(device: Device, stream: CUstream) -> Result<u64, Error> {
    let mut id = 0;
    // SAFETY: the stream is alive, `id` a valid place.
    device.check(unsafe { device.api().stream_get_id(stream, &mut id) })?;
    Ok(id)
}

/// The capture that a stream takes part in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CaptureInfo {
    pub(crate) id: u64,
    pub(crate) graph: CUgraph,
}

/// Which capture, if any, `stream` is recording into. The context is current.
pub(crate) fn capture_of(device: Device, stream: CUstream) -> Result<Option<CaptureInfo>, Error> {
    const ACTIVE: u32 = 1;
    let (mut status, mut id, mut graph) = (0, 0, std::ptr::null_mut());
    let (nodes, count) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the stream is alive; answers go to valid places, and those not wanted may be null.
    device.check(unsafe {
        device.api().stream_get_capture_info(stream, &mut status, &mut id, &mut graph, nodes, count)
    })?;
    Ok((status == ACTIVE).then_some(CaptureInfo { id, graph }))
}

/// While it lives, this thread may allocate and wait although a stream somewhere is being captured.
pub(crate) struct RelaxedCapture {
    device: Device,
    before: u32,
}

impl RelaxedCapture {
    pub(crate) fn begin(device: Device) -> Result<Self, Error> {
        const RELAXED: u32 = 2;
        let mut mode = RELAXED;
        // SAFETY: `mode` holds a valid mode and takes the previous one.
        device.check(unsafe { device.api().exchange_capture_mode(&mut mode) })?;
        Ok(Self { device, before: mode })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // SAFETY: `before` is the mode that the driver handed out.
        self.device.check_in_drop(unsafe { self.device.api().exchange_capture_mode(&mut self.before) });
    }
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event {
    device: Device,
    raw: CUevent,
}

// SAFETY: the driver allows every thread to use an event.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that only orders: cheaper than a timed one.
    pub fn new(device: Device) -> Result<Self, Error> {
        const DISABLE_TIMING: u32 = 2;
        Self::with_flags(device, DISABLE_TIMING)
    }

    /// An event that also tells the time.
    pub fn timed(device: Device) -> Result<Self, Error> {
        Self::with_flags(device, 0)
    }

    fn with_flags(device: Device, flags: u32) -> Result<Self, Error> {
        let _inside = device.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a valid place; the context is current.
        device.check(unsafe { device.api().event_create(&mut raw, flags) })?;
        Ok(Self { device, raw })
    }

    /// Marks the present end of `stream`.
    pub fn record(&self, stream: &Stream) -> Result<(), Error> {
        self.record_raw(stream.handle())
    }

    pub(crate) fn record_raw(&self, stream: CUstream) -> Result<(), Error> {
        let _inside = self.device.enter()?;
        // SAFETY: both are alive.
        self.device.check(unsafe { self.device.api().event_record(self.raw, stream) })
    }

    /// Whether the stream has passed it.
    pub fn is_done(&self) -> Result<bool, Error> {
        let _inside = self.device.enter()?;
        // SAFETY: the event is alive.
        let status = unsafe { self.device.api().event_query(self.raw) };
        if status.code == NOT_READY { Ok(false) } else { self.device.check(status).map(|()| true) }
    }

    /// Waits until the stream has passed it.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _inside = self.device.enter()?;
        // SAFETY: the event is alive.
        self.device.check(unsafe { self.device.api().event_synchronize(self.raw) })
    }

    /// Milliseconds from `earlier` to this event; both timed and passed.
    pub fn milliseconds_since(&self, earlier: &Self) -> Result<f32, Error> {
        let _inside = self.device.enter()?;
        let mut elapsed = 0.0;
        // SAFETY: both events are alive, `elapsed` is a valid place.
        let status = unsafe { self.device.api().event_elapsed_time(&mut elapsed, earlier.raw, self.raw) };
        self.device.check(status)?;
        Ok(elapsed)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Ok(_inside) = self.device.enter() else { return };
        // SAFETY: made by `with_flags`; the driver keeps it until pending uses are done.
        self.device.check_in_drop(unsafe { self.device.api().event_destroy(self.raw) });
    }
}
