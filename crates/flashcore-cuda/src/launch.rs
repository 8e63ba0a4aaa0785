//! Launches: a [`Prepared`] is built once from a kernel and a `LaunchSpec`, then launched with fresh addresses.
//!
//! Preparing checks everything that does not change (limits, parameter sizes, tensor maps). Launching copies the
//! parameter block to the stack, writes the addresses, and calls the driver once; it allocates nothing.

use crate::sys::{
    CUlaunchAttribute, CUlaunchAttributeID as Id, CUlaunchAttributeValue, CUlaunchConfig, CUstream,
};
use crate::{
    driver::Device,
    error::Error,
    limits,
    module::Kernel,
    params::{Block, EncodedMap, Layout, MAX_PARAMS, MapPatch, Source},
    stream::{self, Stream},
    tensor_map::{self, TensorMap},
    workspace::MAX_WORKSPACES,
};
use flashcore_ptx::launch::{LaunchSpec, TensorMapSpec, Workspace};
use std::{
    ffi::c_void,
    fmt,
    io::{self, Write},
    time::Instant,
};

pub use crate::limits::LaunchError;

/// Where tensor maps point until a launch gives them an address: the driver wants one when it encodes.
const PLACEHOLDER: u64 = 1 << 20;
/// Clusters up to this size run on every device that has clusters.
const PORTABLE_CLUSTER: u32 = 8;

/// A launch ready to go: any thread may launch it, on any stream of its device, several at a time.
#[derive(Debug)]
pub struct Prepared {
    kernel: Kernel,
    layout: Layout,
    workspace: Vec<Workspace>,
    shape: Shape,
}

/// Grid, block, shared memory and attributes as the driver takes them.
struct Shape {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    attributes: [CUlaunchAttribute; 2],
    attribute_count: u32,
}

// SAFETY: plain data; the attributes in use hold no pointer.
unsafe impl Send for Shape {}
// SAFETY: as above.
unsafe impl Sync for Shape {}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "grid {:?} block {:?} shared {}", self.grid, self.block, self.shared)
    }
}

impl Prepared {
    /// Checks `spec` against the kernel and its device and lays out its parameters.
    pub fn new(kernel: &Kernel, spec: &LaunchSpec) -> Result<Self, Error> {
        let device = kernel.device();
        limits::check(spec, device.props(), kernel.attributes())?;
        let layout = Layout::new(spec, |map| encode(device, map))?;
        let _inside = device.enter()?;
        if let Some(sizes) = kernel.param_bytes(layout.params.len())? {
            layout.check_sizes(sizes)?;
        }
        kernel.allow_shared(spec.shared_bytes)?;
        if spec.cluster.iter().product::<u32>() > PORTABLE_CLUSTER {
            kernel.allow_large_clusters()?;
        }
        let shape = Shape::new(spec, device);
        Ok(Self { kernel: kernel.clone(), layout, workspace: spec.workspace.clone(), shape })
    }

    /// The kernel it launches.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// How many buffers [`Prepared::launch`] needs.
    pub fn buffer_count(&self) -> usize {
        self.layout.buffers
    }

    /// How many workspaces a launch takes from the device's pool.
    pub fn workspace_count(&self) -> usize {
        self.workspace.len()
    }

    /// Scratch memory that a launch takes from the device's pool, in bytes.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace.iter().map(|workspace| workspace.bytes).sum()
    }

    /// How many clusters of this launch fit on the device at once.
    pub fn active_clusters(&self) -> Result<u32, Error> {
        let _inside = self.kernel.device().enter()?;
        let mut attributes = self.shape.attributes;
        self.kernel.active_clusters(&self.shape.config(std::ptr::null_mut(), &mut attributes))
    }

    /// Launches with `buffers[s]` as the address of slot `s`; entries at workspace slots are ignored.
    ///
    /// # Safety
    /// Each address must be that of a buffer as large as the kernel expects (slots the kernel does not read or write
    /// may be 0), alive until the launch is done; where the stream is being captured, until the last replay is done.
    /// What the kernel writes must not be in use by other work meanwhile.
    pub unsafe fn launch(&self, stream: &Stream, buffers: &[u64]) -> Result<(), Error> {
        self.check_stream(stream)?;
        // SAFETY: the stream is alive and of this device; the rest is the caller's promise.
        unsafe { self.launch_raw(stream.raw(), buffers) }
    }

    /// Demands a stream of the kernel's device.
    pub fn check_stream(&self, stream: &Stream) -> Result<(), Error> {
        let device = self.kernel.device();
        if stream.device() == device { Ok(()) } else { Err(Error::ForeignStream { device: device.index() }) }
    }

    /// As [`Prepared::launch`] on another program's stream (`CUstream` or `cudaStream_t`; null is the legacy stream).
    ///
    /// # Safety
    /// As [`Prepared::launch`]; `stream` must be alive and belong to the primary context of the kernel's device.
    pub unsafe fn launch_raw(&self, stream: *mut c_void, buffers: &[u64]) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { launch_all(std::slice::from_ref(self), stream, buffers) }
    }

    /// Launches with scratch memory that is held for it. The context is current.
    ///
    /// # Safety
    /// Like [`Prepared::launch_raw`].
    unsafe fn launch_with(&self, stream: CUstream, buffers: &[u64], scratch: &[u64]) -> Result<(), Error> {
        let device = self.kernel.device();
        if buffers.len() < self.layout.buffers {
            return Err(
                LaunchError::MissingBuffers { given: buffers.len(), needed: self.layout.buffers }.into()
            );
        }
        let mut block = Block::copy_of(&self.layout.bytes);
        self.write_addresses(device, &mut block, buffers, scratch)?;
        if device.watch().is_on() {
            return self.submit_watched(device, stream, &mut block);
        }
        self.submit(device, stream, &mut block)
    }

    fn write_addresses(
        &self,
        device: Device,
        block: &mut Block,
        buffers: &[u64],
        scratch: &[u64],
    ) -> Result<(), Error> {
        let address = |source| match source {
            Source::Buffer(at) => buffers[at as usize],
            Source::Workspace(at) => scratch[at as usize],
        };
        for patch in &self.layout.addresses {
            block.set(patch.offset, address(patch.source));
        }
        for patch in &self.layout.maps {
            move_map(device, block, patch, address(patch.map.source))?;
        }
        Ok(())
    }

    fn submit(&self, device: Device, stream: CUstream, block: &mut Block) -> Result<(), Error> {
        let start = block.start();
        let mut pointers = [std::ptr::null_mut::<c_void>(); MAX_PARAMS];
        for (pointer, &(offset, _)) in pointers.iter_mut().zip(&self.layout.params) {
            // SAFETY: offsets lie inside the block.
            *pointer = unsafe { start.add(offset as usize) }.cast();
        }
        let mut attributes = self.shape.attributes;
        let config = self.shape.config(stream, &mut attributes);
        // SAFETY: one pointer per parameter, each to as many bytes as the parameter has; all live through the call.
        let status = unsafe {
            device.api().launch_kernel(
                &config,
                self.kernel.function(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        device.check_kernel(status, self.kernel.name(), false)?;
        device.note_launch(self.kernel.id());
        Ok(())
    }

    /// [`submit`](Self::submit) for somebody who wants to know what happens.
    #[cold]
    fn submit_watched(&self, device: Device, stream: CUstream, block: &mut Block) -> Result<(), Error> {
        let (watch, start) = (device.watch(), Instant::now());
        let done = match watch.waits {
            true => self.submit_and_wait(device, stream, block),
            false => self.submit(device, stream, block),
        };
        if watch.traces {
            let (time, failed) = (start.elapsed(), if done.is_err() { ", failed" } else { "" });
            // A reader that went away is no reason to fail.
            let _ = writeln!(
                io::stderr(),
                "flashcore: {self}, {:.1} us on the host{failed}",
                time.as_secs_f64() * 1e6
            );
        }
        done
    }

    /// `FLASHCORE_SYNC=1`: waits before, so that older work is not blamed on this kernel, and after, to blame it rightly.
    fn submit_and_wait(&self, device: Device, stream: CUstream, block: &mut Block) -> Result<(), Error> {
        if stream::capture_of(device, stream)?.is_some() {
            return self.submit(device, stream, block);
        }
        // SAFETY: the stream is alive.
        device.check(unsafe { device.api().stream_synchronize(stream) })?;
        self.submit(device, stream, block)?;
        // SAFETY: the stream is alive.
        device.check_kernel(unsafe { device.api().stream_synchronize(stream) }, self.kernel.name(), true)
    }
}

impl fmt::Display for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { grid, block, shared, .. } = &self.shape;
        let extents = |[x, y, z]: [u32; 3]| format!("{x}x{y}x{z}");
        let (name, grid, block) = (self.kernel.name(), extents(*grid), extents(*block));
        write!(f, "{name}: grid {grid}, block {block}, {shared} bytes of shared memory")
    }
}

/// Launches several kernels one after another, as [`Prepared::launch_raw`] would, with one scratch memory for all: what
/// one leaves there the next may read. They name the same workspaces, or none.
///
/// # Safety
/// Like [`Prepared::launch_raw`], for each of them.
pub unsafe fn launch_all(launches: &[Prepared], stream: *mut c_void, buffers: &[u64]) -> Result<(), Error> {
    let Some((device, wants)) = asked(launches) else { return Ok(()) };
    let (_inside, stream, mut scratch) = (device.enter()?, stream.cast(), [0; MAX_WORKSPACES]);
    // Held until the driver has all launches, so that no other thread can hand the blocks on in between.
    let lease = match wants {
        [] => None,
        wants => Some(device.pool().lease(device, stream, wants, &mut scratch)?),
    };
    // SAFETY: the caller's promise.
    let submitted = unsafe { submit_all(launches, stream, buffers, &scratch) };
    submitted.map_err(|Refused { after, error }| {
        // Where none was taken before it, scratch memory is as it was.
        if let Some(lease) = lease.filter(|_| after > 0) {
            lease.interrupt();
        }
        error
    })
}

/// Like [`launch_all`] with scratch memory of the caller's: `allocate` is asked for each workspace in bytes, and
/// answers with an address that is a multiple of 256, or with none.
///
/// # Safety
/// Like [`launch_all`]; what `allocate` gave must stay until the launches are done.
pub unsafe fn launch_all_with(
    launches: &[Prepared],
    stream: *mut c_void,
    buffers: &[u64],
    allocate: &dyn Fn(u64) -> Option<u64>,
) -> Result<(), Error> {
    let Some((device, wants)) = asked(launches) else { return Ok(()) };
    let _inside = device.enter()?;
    let mut scratch = [0; MAX_WORKSPACES];
    for (want, address) in wants.iter().zip(&mut scratch) {
        let Some(given) = allocate(want.bytes) else {
            let (free, total) = device.memory_info()?;
            return Err(Error::OutOfMemory { requested: want.bytes, free, total });
        };
        *address = given;
        if want.zeroed {
            // SAFETY: as many bytes that the caller has just given.
            let status = unsafe { device.api().memset_d8(given, 0, want.bytes as usize, stream.cast()) };
            device.check(status)?;
        }
    }
    // SAFETY: the caller's promise.
    unsafe { submit_all(launches, stream.cast(), buffers, &scratch) }.map_err(|refused| refused.error)
}

/// The device of launches and the workspaces that they share; `None` where there is nothing to launch.
fn asked(launches: &[Prepared]) -> Option<(Device, &[Workspace])> {
    let device = launches.first()?.kernel.device();
    let wants = launches.iter().map(|launch| launch.workspace.as_slice()).find(|wants| !wants.is_empty());
    let wants = wants.unwrap_or(&[]);
    debug_assert!(launches.iter().all(|launch| launch.workspace.is_empty() || launch.workspace == wants));
    Some((device, wants))
}

/// A launch that was refused after so many others of its plan had been taken.
struct Refused {
    after: usize,
    error: Error,
}

/// # Safety
/// Like [`launch_all`]. The context is current.
unsafe fn submit_all(
    launches: &[Prepared],
    stream: CUstream,
    buffers: &[u64],
    scratch: &[u64],
) -> Result<(), Refused> {
    for (after, launch) in launches.iter().enumerate() {
        // SAFETY: the caller's promise.
        let taken = unsafe { launch.launch_with(stream, buffers, scratch) };
        taken.map_err(|error| Refused { after, error })?;
    }
    Ok(())
}

impl Shape {
    fn new(spec: &LaunchSpec, device: Device) -> Self {
        let none = CUlaunchAttribute {
            id: Id::CU_LAUNCH_ATTRIBUTE_IGNORE,
            pad: [0; 4],
            value: CUlaunchAttributeValue { pad: [0; 64] },
        };
        let mut shape = Self {
            grid: spec.grid,
            block: spec.block,
            shared: spec.shared_bytes,
            attributes: [none; 2],
            attribute_count: 0,
        };
        if spec.cluster != [1, 1, 1] {
            let [x, y, z] = spec.cluster;
            let mut value = CUlaunchAttributeValue { pad: [0; 64] };
            value.clusterDim.x = x;
            value.clusterDim.y = y;
            value.clusterDim.z = z;
            shape.add(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value);
        }
        // Without hardware support (before compute capability 9.0) the kernel simply follows its predecessor.
        if spec.dependent && device.props().capability.0 >= 9 {
            let mut value = CUlaunchAttributeValue { pad: [0; 64] };
            value.programmaticStreamSerializationAllowed = 1;
            shape.add(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value);
        }
        shape
    }

    fn add(&mut self, id: Id, value: CUlaunchAttributeValue) {
        self.attributes[self.attribute_count as usize] = CUlaunchAttribute { id, pad: [0; 4], value };
        self.attribute_count += 1;
    }

    fn config(&self, stream: CUstream, attributes: &mut [CUlaunchAttribute; 2]) -> CUlaunchConfig {
        CUlaunchConfig {
            gridDimX: self.grid[0],
            gridDimY: self.grid[1],
            gridDimZ: self.grid[2],
            blockDimX: self.block[0],
            blockDimY: self.block[1],
            blockDimZ: self.block[2],
            sharedMemBytes: self.shared,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: self.attribute_count,
        }
    }
}

/// Points a tensor map of the block at `address`.
fn move_map(device: Device, block: &mut Block, patch: &MapPatch, address: u64) -> Result<(), Error> {
    tensor_map::check_address(address)?;
    match patch.address {
        Some(offset) if address < tensor_map::PROBED_END => block.set(offset, address),
        _ => {
            // SAFETY: `Layout` put an encoded map there, at a multiple of 128 bytes.
            let map = unsafe { block.start().add(patch.map.offset as usize) };
            // SAFETY: as above.
            unsafe { tensor_map::replace_address(device, map.cast(), address)? };
        }
    }
    Ok(())
}

fn encode(device: Device, spec: &TensorMapSpec) -> Result<EncodedMap, Error> {
    let map = TensorMap::new(device, spec, PLACEHOLDER)?;
    let mut bytes = [0; TensorMap::BYTES];
    for (to, word) in bytes.chunks_exact_mut(8).zip(map.0.opaque) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    Ok(EncodedMap { bytes, address_word: map.address_word(device)? })
}
