//! The driver, its GPUs, and the primary context of each.
//!
//! Everything that touches a GPU starts from a [`Device`]. Its primary context is retained once and kept for the life
//! of the process (the one PyTorch, cudarc and the CUDA runtime use too); no context is ever created. Calls run inside
//! [`Device::enter`], which leaves the caller's current context as it was. Result codes come back through
//! [`Device::check`], the one place that decides between a plain error and a lost device.

use crate::sys::{CUcontext, CUdevice};
use crate::{
    api::{Api, Status},
    error::{self, DriverError, Error, FirstCause, Severity},
    props::{self, DeviceProps},
    workspace::Pool,
};
use std::{
    marker::PhantomData,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

/// The oldest driver that has clusters, tensor maps and stream ids: CUDA 12.0.
const OLDEST_DRIVER: u32 = 12_000;
/// How many launches back a sticky error's suspects reach.
const SUSPECTS: usize = 8;

/// NVIDIA's driver, initialised.
#[derive(Clone, Copy)]
pub struct Driver {
    pub(crate) api: &'static Api,
    version: u32,
}

impl Driver {
    /// Loads and initialises the driver; without one, [`Error::NoDriver`].
    pub fn get() -> Result<Self, Error> {
        static DRIVER: OnceLock<Result<Driver, Error>> = OnceLock::new();
        DRIVER.get_or_init(|| Self::start(Api::load()?)).clone()
    }

    pub(crate) fn start(api: &'static Api) -> Result<Self, Error> {
        let mut version = 0;
        // SAFETY: flags must be 0.
        plain(api, unsafe { api.init(0) })?;
        // SAFETY: `version` is a valid place for the answer.
        plain(api, unsafe { api.driver_get_version(&mut version) })?;
        let version = version.unsigned_abs();
        if version < OLDEST_DRIVER {
            return Err(Error::DriverTooOld { found: version });
        }
        Ok(Self { api, version })
    }

    /// The newest CUDA it supports, as `1000 * major + 10 * minor`.
    pub fn cuda_version(&self) -> u32 {
        self.version
    }

    /// How many GPUs it shows to this process.
    pub fn device_count(&self) -> Result<u32, Error> {
        let mut count = 0;
        // SAFETY: `count` is a valid place for the answer.
        plain(self.api, unsafe { self.api.device_get_count(&mut count) })?;
        Ok(count.unsigned_abs())
    }

    /// GPU number `index`, its primary context retained.
    pub fn device(&self, index: u32) -> Result<Device, Error> {
        static KNOWN: Mutex<Vec<Device>> = Mutex::new(Vec::new());
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = known.iter().find(|device| device.index() == index) {
            return Ok(*device);
        }
        let device = self.retain(index)?;
        known.push(device);
        Ok(device)
    }

    /// Retains the primary context and reads the properties; the result lives as long as the process.
    pub(crate) fn retain(&self, index: u32) -> Result<Device, Error> {
        let count = self.device_count()?;
        if index >= count {
            return Err(Error::NoSuchDevice { index, count });
        }
        let (mut handle, mut context): (CUdevice, CUcontext) = (0, std::ptr::null_mut());
        // SAFETY: `handle` is a valid place, `index` is below the count.
        plain(self.api, unsafe { self.api.device_get(&mut handle, index as i32) })?;
        let props = props::read(self.api, handle, index)?;
        // SAFETY: `context` is a valid place, `handle` a device of this driver.
        plain(self.api, unsafe { self.api.primary_ctx_retain(&mut context, handle) })?;
        Ok(Device(Box::leak(Box::new(Shared::new(*self, context, props)))))
    }
}

/// Turns a code of a call that needs no context into an error.
pub(crate) fn plain(api: &Api, status: Status) -> Result<(), Error> {
    if status.code == 0 { Ok(()) } else { Err(describe(api, status, None).into()) }
}

fn describe(api: &Api, status: Status, kernel: Option<&str>) -> DriverError {
    DriverError {
        call: status.call,
        code: status.code,
        name: api.name_of(status.code),
        text: api.text_of(status.code),
        kernel: kernel.map(str::to_owned),
    }
}

/// A GPU with its primary context; a handle to copy freely.
#[derive(Clone, Copy)]
pub struct Device(&'static Shared);

struct Shared {
    driver: Driver,
    context: CUcontext,
    props: DeviceProps,
    first_cause: OnceLock<FirstCause>,
    launches: Launches,
    drop_errors: Mutex<Vec<DriverError>>,
    pool: Pool,
    watch: Watch,
}

/// What is done about each launch beside launching it, read from the environment once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watch {
    /// `FLASHCORE_SYNC=1`: wait for it.
    pub(crate) waits: bool,
    /// `FLASHCORE_TRACE=1`: log it on standard error.
    pub(crate) traces: bool,
}

impl Watch {
    fn from_env() -> Self {
        let is_set = |name| std::env::var_os(name).is_some_and(|value| value == "1");
        Self { waits: is_set("FLASHCORE_SYNC"), traces: is_set("FLASHCORE_TRACE") }
    }

    /// Whether there is anything to do.
    pub(crate) const fn is_on(self) -> bool {
        self.waits || self.traces
    }
}

// SAFETY: the only field that is not Send and Sync by itself is the context handle, which the driver allows every
// thread to use.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn new(driver: Driver, context: CUcontext, props: DeviceProps) -> Self {
        Self {
            driver,
            context,
            props,
            first_cause: OnceLock::new(),
            launches: Launches::default(),
            drop_errors: Mutex::default(),
            pool: Pool::default(),
            watch: Watch::from_env(),
        }
    }
}

/// The last kernels launched: ids in a ring, written without a lock, and the names behind the ids.
#[derive(Default)]
struct Launches {
    ring: [AtomicU32; SUSPECTS],
    next: AtomicU32,
    names: Mutex<Vec<Arc<str>>>,
}

impl Launches {
    fn newest_first(&self) -> Vec<String> {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let next = self.next.load(Relaxed);
        let ids = (1..=SUSPECTS as u32)
            .map(|back| self.ring[next.wrapping_sub(back) as usize % SUSPECTS].load(Relaxed));
        let mut out: Vec<String> = Vec::new();
        for name in ids.filter_map(|id| names.get((id as usize).checked_sub(1)?)) {
            if !out.iter().any(|seen| **seen == **name) {
                out.push(name.to_string());
            }
        }
        out
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({}, {})", self.index(), self.props().name)
    }
}

impl Device {
    /// GPU number `index` of the system's driver.
    pub fn new(index: u32) -> Result<Self, Error> {
        Driver::get()?.device(index)
    }

    /// Its number.
    pub fn index(&self) -> u32 {
        self.0.props.index
    }

    /// What it is and has.
    pub fn props(&self) -> &'static DeviceProps {
        &self.0.props
    }

    /// The driver it belongs to.
    pub fn driver(&self) -> Driver {
        self.0.driver
    }

    /// The raw primary context (`CUcontext`), for programs that share it.
    pub fn raw_context(&self) -> *mut std::ffi::c_void {
        self.0.context.cast()
    }

    /// Free and total device memory in bytes.
    pub fn memory_info(&self) -> Result<(u64, u64), Error> {
        let _inside = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid places; the context is current.
        self.check(unsafe { self.api().mem_get_info(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }

    /// Waits for everything submitted to the device.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _inside = self.enter()?;
        // SAFETY: the context is current.
        self.check(unsafe { self.api().ctx_synchronize() })
    }

    /// Whether a sticky error has made the device unusable, and which.
    pub fn first_cause(&self) -> Option<&'static FirstCause> {
        self.0.first_cause.get()
    }

    /// Recoverable errors met while dropping handles since the last call; drops report here and nowhere else.
    pub fn take_drop_errors(&self) -> Vec<DriverError> {
        std::mem::take(&mut *self.0.drop_errors.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs `body` with the primary context current and puts the caller's context back.
    pub fn with_context<T>(&self, body: impl FnOnce() -> T) -> Result<T, Error> {
        let _inside = self.enter()?;
        Ok(body())
    }

    /// Makes the primary context current until the guard drops. Fails at once on a poisoned device.
    pub fn enter(&self) -> Result<ContextGuard, Error> {
        self.healthy()?;
        let mut current = std::ptr::null_mut();
        // SAFETY: `current` is a valid place.
        self.check(unsafe { self.api().ctx_get_current(&mut current) })?;
        let pushed = current != self.0.context;
        if pushed {
            // SAFETY: the primary context is retained for the life of the process.
            self.check(unsafe { self.api().ctx_push_current(self.0.context) })?;
        }
        Ok(ContextGuard { device: *self, pushed, on_this_thread: PhantomData })
    }

    pub(crate) fn api(&self) -> &'static Api {
        self.0.driver.api
    }

    pub(crate) fn pool(&self) -> &'static Pool {
        &self.0.pool
    }

    pub(crate) fn context(&self) -> CUcontext {
        self.0.context
    }

    /// What is done about each launch beside launching it.
    pub(crate) fn watch(&self) -> Watch {
        self.0.watch
    }

    /// Gives a kernel the number under which its launches are remembered.
    pub(crate) fn register_kernel(&self, name: &str) -> u32 {
        let mut names = self.0.launches.names.lock().unwrap_or_else(PoisonError::into_inner);
        let at = names.iter().position(|known| **known == *name).unwrap_or_else(|| {
            names.push(name.into());
            names.len() - 1
        });
        at as u32 + 1
    }

    /// Remembers a launch as a suspect.
    pub(crate) fn note_launch(&self, kernel: u32) {
        let at = self.0.launches.next.fetch_add(1, Relaxed) as usize;
        self.0.launches.ring[at % SUSPECTS].store(kernel, Relaxed);
    }

    pub(crate) fn healthy(&self) -> Result<(), Error> {
        self.0.first_cause.get().map_or(Ok(()), |cause| Err(self.poisoned(cause)))
    }

    /// Turns the driver's code into a result; a sticky code poisons the device.
    pub(crate) fn check(&self, status: Status) -> Result<(), Error> {
        if status.code == 0 { Ok(()) } else { Err(self.blame(status, None, false)) }
    }

    /// As [`Device::check`] for a call that concerns one kernel; `waited` where nothing else can be at fault.
    pub(crate) fn check_kernel(&self, status: Status, kernel: &str, waited: bool) -> Result<(), Error> {
        if status.code == 0 { Ok(()) } else { Err(self.blame(status, Some(kernel), waited)) }
    }

    /// Like [`Device::check`] for a drop: there is no caller to return the error to, so it is kept.
    pub(crate) fn check_in_drop(&self, status: Status) {
        if let Err(Error::Driver(error)) = self.check(status) {
            self.0.drop_errors.lock().unwrap_or_else(PoisonError::into_inner).push(error);
        }
    }

    #[cold]
    fn blame(&self, status: Status, kernel: Option<&str>, exact: bool) -> Error {
        let recoverable = error::severity(status.code) == Severity::Recoverable;
        // A launch that meets a sticky error reports the fault of earlier work: its own kernel is not to blame.
        let error = describe(self.api(), status, kernel.filter(|_| recoverable || exact));
        if recoverable {
            return error.into();
        }
        let seen = FirstCause { error, exact, suspects: self.0.launches.newest_first() };
        self.poisoned(self.0.first_cause.get_or_init(|| seen))
    }

    fn poisoned(&self, cause: &FirstCause) -> Error {
        Error::ContextPoisoned { device: self.index(), first_cause: Box::new(cause.clone()) }
    }
}

/// Keeps the primary context current on this thread; dropping it restores what was current before.
#[must_use = "the context is current only while the guard lives"]
pub struct ContextGuard {
    device: Device,
    pushed: bool,
    /// Contexts are current per thread, so the guard must not move to another.
    on_this_thread: PhantomData<*const ()>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: this thread pushed the context, guards nest, so it is on top.
            self.device.check_in_drop(unsafe { self.device.api().ctx_pop_current(&mut popped) });
        }
    }
}
