//! Machine code on a device: modules, and the kernels in them.
//!
//! A [`Module`] is loaded from a [`Cubin`]; its [`Kernel`]s are what `launch.rs` launches. Modules stay loaded for the
//! life of the process, because graphs that this crate does not own may hold their kernels.

use crate::sys::{CUfunction, CUfunction_attribute as Attribute, CUlaunchConfig, CUmodule};
use crate::{compile::Cubin, driver::Device, error::Error, launch::LaunchError, report::BuildReport};
use std::{
    ffi::CString,
    sync::{Arc, Mutex, PoisonError},
};

/// A loaded module.
#[derive(Clone, Debug)]
pub struct Module {
    device: Device,
    raw: CUmodule,
    report: Arc<BuildReport>,
}

// SAFETY: the driver allows every thread to use a module.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads machine code onto `device`.
    pub fn load(device: Device, cubin: &Cubin) -> Result<Self, Error> {
        let _inside = device.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a `Cubin` holds a whole image, made by a compiler or vouched for by its maker.
        device.check(unsafe { device.api().module_load_data(&mut raw, cubin.bytes().as_ptr().cast()) })?;
        Ok(Self { device, raw, report: Arc::new(cubin.report().clone()) })
    }

    /// How it was built.
    pub fn report(&self) -> &BuildReport {
        &self.report
    }

    /// The kernel called `name`.
    pub fn kernel(&self, name: &str) -> Result<Kernel, Error> {
        let missing = || LaunchError::NoSuchKernel { name: name.to_owned() };
        let text = CString::new(name).map_err(|_| missing())?;
        let _inside = self.device.enter()?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, `text` ends in NUL, `function` is a valid place.
        let status = unsafe { self.device.api().module_get_function(&mut function, self.raw, text.as_ptr()) };
        const NOT_FOUND: u32 = 500;
        if status.code == NOT_FOUND {
            return Err(missing().into());
        }
        self.device.check(status)?;
        Kernel::new(self, function, name)
    }

    /// Unloads the module.
    ///
    /// # Safety
    /// No kernel of it may be running, be launched later, or be part of a graph that can still be replayed.
    pub unsafe fn unload(self) -> Result<(), Error> {
        let _inside = self.device.enter()?;
        // SAFETY: the caller's promise.
        self.device.check(unsafe { self.device.api().module_unload(self.raw) })
    }
}

/// A kernel's use of resources, as the driver reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelAttributes {
    /// Registers of a thread at entry.
    pub registers: u32,
    /// Statically declared shared memory in bytes.
    pub static_shared: u32,
    /// Local memory of a thread in bytes: spills and stack.
    pub local: u32,
    /// Most threads of a CTA with these registers.
    pub max_threads: u32,
}

/// A kernel of a loaded module; cheap to clone.
#[derive(Clone, Debug)]
pub struct Kernel(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    module: Module,
    function: CUfunction,
    name: String,
    id: u32,
    attributes: KernelAttributes,
    /// The driver's limit on dynamic shared memory, raised on demand and never lowered: other launches rely on it.
    shared_limit: Mutex<u32>,
}

// SAFETY: the driver allows every thread to use a function handle.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Kernel {
    fn new(module: &Module, function: CUfunction, name: &str) -> Result<Self, Error> {
        let device = module.device;
        // Loading eagerly keeps the first launch, possibly under capture, from having to.
        // SAFETY: the function is of a loaded module.
        if let Some(status) = unsafe { device.api().func_load(function) } {
            device.check_kernel(status, name, false)?;
        }
        let get = |attribute| attribute_of(device, function, attribute);
        let attributes = KernelAttributes {
            registers: get(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            static_shared: get(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            local: get(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            max_threads: get(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        };
        let shared_limit = Mutex::new(get(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)?);
        let (id, module, name) = (device.register_kernel(name), module.clone(), name.to_owned());
        Ok(Self(Arc::new(Inner { module, function, name, id, attributes, shared_limit })))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The device it is loaded on.
    pub fn device(&self) -> Device {
        self.0.module.device
    }

    /// What it uses, as the driver reports it.
    pub fn attributes(&self) -> KernelAttributes {
        self.0.attributes
    }

    /// How its module was built.
    pub fn report(&self) -> &BuildReport {
        self.0.module.report()
    }

    /// CTAs of `threads` threads and `shared` bytes of dynamic shared memory that fit on an SM.
    pub fn blocks_per_sm(&self, threads: u32, shared: u32) -> Result<u32, Error> {
        let device = self.device();
        let _inside = device.enter()?;
        self.allow_shared(shared)?;
        let mut blocks = 0;
        // SAFETY: the function is loaded, `blocks` is a valid place.
        let status = unsafe {
            device.api().occupancy_blocks(&mut blocks, self.0.function, threads as i32, shared as usize)
        };
        device.check_kernel(status, self.name(), false)?;
        Ok(blocks.unsigned_abs())
    }

    /// Clusters of the given launch that fit on the device at once.
    pub(crate) fn active_clusters(&self, config: &CUlaunchConfig) -> Result<u32, Error> {
        let mut clusters = 0;
        // SAFETY: the function is loaded, `config` points to attributes that live through the call.
        let status =
            unsafe { self.device().api().occupancy_clusters(&mut clusters, self.0.function, config) };
        self.device().check_kernel(status, self.name(), false)?;
        Ok(clusters.unsigned_abs())
    }

    /// Lets launches use `bytes` of dynamic shared memory. The context is current.
    pub(crate) fn allow_shared(&self, bytes: u32) -> Result<(), Error> {
        let mut limit = self.0.shared_limit.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes <= *limit {
            return Ok(());
        }
        self.set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)?;
        *limit = bytes;
        Ok(())
    }

    /// Lets launches use clusters of more than eight CTAs. The context is current.
    pub(crate) fn allow_large_clusters(&self) -> Result<(), Error> {
        self.set(Attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    }

    fn set(&self, attribute: Attribute, value: u32) -> Result<(), Error> {
        // SAFETY: the function is loaded.
        let status =
            unsafe { self.device().api().func_set_attribute(self.0.function, attribute, value as i32) };
        self.device().check_kernel(status, self.name(), false)
    }

    pub(crate) fn function(&self) -> CUfunction {
        self.0.function
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id
    }

    /// Sizes of its parameters, where the driver tells (CUDA 12.4 on); of the first `wanted` alone where it does not tell
    /// how many there are (before CUDA 13.2). The context is current.
    pub(crate) fn param_bytes(&self, wanted: usize) -> Result<Option<Vec<usize>>, Error> {
        let (device, mut count) = (self.device(), wanted);
        // SAFETY: the function is loaded, `count` is a valid place.
        if let Some(status) = unsafe { device.api().func_get_param_count(self.0.function, &mut count) } {
            device.check_kernel(status, self.name(), false)?;
        }
        let mut sizes = Vec::with_capacity(count);
        for index in 0..count {
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: the function is loaded; an index past the end, where the launch is wrong, is refused.
            let asked =
                unsafe { device.api().func_get_param_info(self.0.function, index, &mut offset, &mut bytes) };
            match asked {
                None => return Ok(None),
                Some(status) if status.code != 0 => break,
                Some(_) => sizes.push(bytes),
            }
        }
        Ok(Some(sizes))
    }
}

fn attribute_of(device: Device, function: CUfunction, attribute: Attribute) -> Result<u32, Error> {
    let mut value = 0;
    // SAFETY: the function is loaded, `value` is a valid place.
    device.check(unsafe { device.api().func_get_attribute(&mut value, attribute, function) })?;
    Ok(value.unsigned_abs())
}
