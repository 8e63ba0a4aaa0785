//! A driver made of Rust functions: tests how this crate handles the driver's results, without a GPU.
//!
//! There is one fake per process, so [`Fake::new`] admits one test at a time and starts afresh. Memory is
//! numbers, streams are numbers, and every launch is recorded as the bytes that the driver would have read.

#[cfg(unix)]
mod compile_tests;
mod functions;
mod launch_tests;
mod order_tests;

use crate::{
    api::Api,
    compile::Cubin,
    driver::{Device, Driver},
    error::Error,
    launch::Prepared,
    module::{Kernel, Module},
};
use flashcore_ptx::{
    ident::Ident,
    launch::{LaunchSpec, Param},
};
use std::{
    collections::BTreeMap,
    ffi::c_void,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// What the fake driver remembers.
#[derive(Default)]
pub(super) struct World {
    /// Sizes of living allocations by address.
    pub(super) memory: BTreeMap<u64, u64>,
    pub(super) zeroed: Vec<(u64, u64)>,
    pub(super) launches: Vec<Launch>,
    pub(super) record: bool,
    /// The capture of each capturing stream.
    pub(super) captures: BTreeMap<usize, u64>,
    /// Ids that replace a stream's own: a handle that the driver has reused.
    pub(super) stream_ids: BTreeMap<usize, u64>,
    /// What captured graphs hold, by graph.
    pub(super) held: Vec<(usize, Held)>,
    /// Codes that the named call returns, each once.
    pub(super) failures: Vec<(&'static str, u32)>,
    /// Failures that become due with the next launch: the kernel goes wrong.
    pub(super) failures_of_kernel: Vec<(&'static str, u32)>,
    pub(super) calls: Vec<&'static str>,
    pub(super) events_pending: bool,
    pub(super) param_bytes: Vec<usize>,
    /// Whether the driver tells how many parameters a kernel has (CUDA 13.2 on).
    pub(super) counts_params: bool,
    /// Whether tensor maps hold addresses in another form than as they are.
    pub(super) halves_addresses: bool,
    next: u64,
}

#[derive(Clone, Copy)]
pub(super) struct Held {
    pub(super) data: usize,
    pub(super) destroy: unsafe extern "C" fn(*mut c_void),
}

/// A launch as the driver would see it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Launch {
    pub(super) stream: usize,
    pub(super) params: Vec<Vec<u8>>,
    pub(super) attributes: Vec<u32>,
}

impl World {
    pub(super) fn fresh(&mut self) -> u64 {
        self.next += 1 << 20;
        self.next
    }

    /// Records the call and returns the failure that was set for it, if any.
    pub(super) fn answer(&mut self, call: &'static str) -> u32 {
        if self.record {
            self.calls.push(call);
        }
        let ordered = self.failures.iter().position(|(name, _)| *name == call);
        ordered.map_or(0, |at| self.failures.swap_remove(at).1)
    }
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);
static TURN: Mutex<()> = Mutex::new(());

pub(super) fn world<T>(look: impl FnOnce(&mut World) -> T) -> T {
    look(WORLD.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// A test's turn with the fake driver.
pub(super) struct Fake {
    pub(super) device: Device,
    _turn: MutexGuard<'static, ()>,
}

impl Fake {
    pub(super) fn new() -> Self {
        Self::of(World::default())
    }

    /// A driver that differs from the usual one.
    pub(super) fn of(special: World) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        world(|world| *world = World { record: true, ..special });
        functions::set_current(0);
        let api: &'static Api = Box::leak(Box::new(Api(functions::table())));
        let device = Driver::start(api).and_then(|driver| driver.retain(0)).expect("the fake has a device 0");
        Self { device, _turn: turn }
    }

    /// Sets the next result of `call`.
    pub(super) fn fail(&self, call: &'static str, code: u32) {
        world(|world| world.failures.push((call, code)));
    }

    /// The launch that tests start from: no parameters.
    pub(super) fn spec() -> LaunchSpec {
        LaunchSpec {
            entry: Ident::new("kernel").expect("a plain name"),
            grid: [4, 1, 1],
            block: [128, 1, 1],
            cluster: [1, 1, 1],
            shared_bytes: 0,
            dependent: false,
            params: vec![],
            workspace: vec![],
        }
    }

    pub(super) fn kernel(&self) -> Kernel {
        // SAFETY: the fake never looks at the image.
        let cubin = unsafe { Cubin::from_bytes(vec![0; 8]) };
        Module::load(self.device, &cubin).and_then(|module| module.kernel("kernel")).expect("the fake has it")
    }

    /// A launch of a kernel with these parameters.
    pub(super) fn prepare(&self, change: impl FnOnce(&mut LaunchSpec)) -> Result<Prepared, Error> {
        let mut spec = Self::spec();
        change(&mut spec);
        let sizes = spec.params.iter().map(|param| match param {
            Param::U32(_) | Param::F32(_) => 4,
            Param::TensorMap(_) => 128,
            _ => 8,
        });
        world(|world| world.param_bytes = sizes.collect());
        Prepared::new(&self.kernel(), &spec)
    }

    pub(super) fn launches(&self) -> Vec<Launch> {
        world(|world| world.launches.clone())
    }

    pub(super) fn calls_of(&self, call: &str) -> usize {
        world(|world| world.calls.iter().filter(|name| **name == call).count())
    }

    /// Lets `stream` capture until [`Fake::end_capture`].
    pub(super) fn begin_capture(&self, stream: *mut c_void, capture: u64) {
        world(|world| world.captures.insert(stream as usize, capture));
    }

    pub(super) fn end_capture(&self, stream: *mut c_void) {
        world(|world| world.captures.remove(&(stream as usize)));
    }

    /// Destroys the graph of a capture: the driver calls back for all it held.
    pub(super) fn destroy_graph(&self, capture: u64) {
        let held = world(|world| std::mem::take(&mut world.held));
        let (gone, kept): (Vec<_>, Vec<_>) =
            held.into_iter().partition(|(graph, _)| *graph as u64 == capture);
        world(|world| world.held = kept);
        for (_, Held { data, destroy }) in gone {
            // SAFETY: what `user_object_create` was given, called once.
            unsafe { destroy(data as *mut c_void) };
        }
    }
}
