//! Scratch memory of launches: one launch in flight never shares it with another.
//!
//! Launches get what their `LaunchSpec` lists from the device's [`Pool`]. **Invariant:** a block belongs to one
//! stream, or to one stream of one captured graph, at any time. Launches of one stream follow one another, so they may
//! reuse its blocks; a graph keeps its blocks until it is destroyed, because it can be replayed concurrently with
//! anything. Under programmatic dependent launch a kernel may overlap its predecessor, so a kernel launched with
//! `dependent` must touch its workspace only after `griddepcontrol.wait`, which waits until the predecessor has ended.
//!
//! Blocks that must be zero are zeroed once, when they are allocated; kernels leave them zero. If the driver refuses a
//! launch after others of its plan, the blocks it was to clean up count as ordinary scratch memory from then on.

use crate::sys::{CUgraph, CUstream};
use crate::{
    driver::Device,
    error::Error,
    memory,
    stream::{self, Event, RelaxedCapture, Stream},
};
use flashcore_ptx::launch::Workspace;
use std::{
    ffi::c_void,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

/// Most workspaces of one launch.
pub(crate) const MAX_WORKSPACES: usize = 8;
/// Blocks are multiples of this, so that slightly different problems share them.
const GRANULE: u64 = 64 << 10;

/// All scratch memory of a device.
#[derive(Default)]
pub(crate) struct Pool {
    state: Mutex<State>,
    /// Blocks of destroyed graphs. Behind a lock of its own: the driver fills it from a thread of its choice.
    returned: Mutex<Vec<Block>>,
    /// Where new blocks are zeroed: a launch's own stream may be under capture and must not record that.
    zeroing: OnceLock<Stream>,
}

#[derive(Default)]
struct State {
    owners: Vec<Owner>,
    idle: Vec<Idle>,
}

/// Who may use a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Stream(u64),
    Capture { capture: u64, stream: u64 },
}

struct Owner {
    key: Key,
    blocks: Vec<Block>,
}

/// A piece of device memory; `ordinal` is its place in a launch's list.
#[derive(Clone, Copy, Debug)]
struct Block {
    address: u64,
    bytes: u64,
    ordinal: u8,
    zeroed: bool,
}

impl Block {
    fn serves(&self, ordinal: u8, want: &Workspace) -> bool {
        self.ordinal == ordinal && self.zeroed == want.zeroed && self.bytes >= want.bytes
    }
}

/// A block that may be reused once its last user is done.
struct Idle {
    block: Block,
    after: Option<Event>,
}

/// Proof that the blocks handed out stay assigned: held until the launch has been submitted.
pub(crate) struct Lease<'p> {
    state: MutexGuard<'p, State>,
    key: Key,
}

impl Lease<'_> {
    /// What was to be left zero may not be: a launch was refused after others had begun on it, or were recorded and begin on it
    /// in every replay.
    #[cold]
    pub(crate) fn interrupt(mut self) {
        let key = self.key;
        self.state.blocks(key).iter_mut().for_each(|block| block.zeroed = false);
    }
}

/// The stream of a launch, as the pool sees it.
#[derive(Clone, Copy)]
struct Place {
    device: Device,
    stream: CUstream,
    key: Key,
    graph: CUgraph,
}

impl Place {
    fn of(device: Device, stream: CUstream) -> Result<Self, Error> {
        let (key, graph) = match stream::capture_of(device, stream)? {
            None => (Key::Stream(stream::unique_id(device, stream)?), std::ptr::null_mut()),
            // The driver refuses to name a stream that records, but its handle is not reused while it does.
            Some(c) => (Key::Capture { capture: c.id, stream: stream as u64 }, c.graph),
        };
        Ok(Self { device, stream, key, graph })
    }
}

impl Pool {
    /// Writes the address of each wanted workspace to `addresses`. The context is current.
    pub(crate) fn lease(
        &'static self,
        device: Device,
        stream: CUstream,
        wants: &[Workspace],
        addresses: &mut [u64],
    ) -> Result<Lease<'static>, Error> {
        let place = Place::of(device, stream)?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for (ordinal, (want, address)) in wants.iter().zip(addresses).enumerate() {
            let found = state.blocks(place.key).iter().find(|block| block.serves(ordinal as u8, want));
            *address = match found {
                Some(block) => block.address,
                None => self.assign(&mut state, place, ordinal as u8, want)?,
            };
        }
        Ok(Lease { state, key: place.key })
    }

    /// Gives the owner a block that is large enough; one that is too small by now goes idle behind its last use.
    #[cold]
    fn assign(
        &'static self,
        state: &mut State,
        place: Place,
        ordinal: u8,
        want: &Workspace,
    ) -> Result<u64, Error> {
        self.collect(state);
        state.retire(place, ordinal, want.zeroed)?;
        let idle = {
            // Whether other streams are done may be asked although this one is being captured.
            let _relaxed = RelaxedCapture::begin(place.device)?;
            state.take_idle(want)?
        };
        let block = match idle {
            Some(block) => Block { ordinal, ..block },
            None => self.new_block(place.device, ordinal, want)?,
        };
        if matches!(place.key, Key::Capture { .. }) {
            self.bind_to_graph(place, block)?;
        }
        state.blocks(place.key).push(block);
        Ok(block.address)
    }

    fn new_block(&self, device: Device, ordinal: u8, want: &Workspace) -> Result<Block, Error> {
        let bytes = round_up(want.bytes);
        let block = Block { address: memory::allocate(device, bytes)?, bytes, ordinal, zeroed: want.zeroed };
        if want.zeroed {
            self.zero(device, block).inspect_err(|_| memory::free(device, block.address))?;
        }
        Ok(block)
    }

    fn zero(&self, device: Device, block: Block) -> Result<(), Error> {
        let _relaxed = RelaxedCapture::begin(device)?;
        if self.zeroing.get().is_none() {
            // Only ever called under the state's lock, so nobody else has set it meanwhile.
            let _ = self.zeroing.set(Stream::new(device)?);
        }
        let Some(stream) = self.zeroing.get() else { return Ok(()) };
        memory::fill(device, block.address, 0, block.bytes, stream)?;
        stream.synchronize()
    }

    /// Ties a block's life to the graph being captured: the driver calls [`give_back`] when nothing can replay it.
    fn bind_to_graph(&'static self, place: Place, block: Block) -> Result<(), Error> {
        const NO_DESTRUCTOR_SYNC: u32 = 1;
        const MOVE: u32 = 1;
        let (device, api) = (place.device, place.device.api());
        let data = Box::into_raw(Box::new(GraphBlock { pool: self, block }));
        let mut object = std::ptr::null_mut();
        // SAFETY: `give_back` takes the box back once; `object` is a valid place.
        let made = unsafe {
            api.user_object_create(&mut object, data.cast(), Some(give_back), 1, NO_DESTRUCTOR_SYNC)
        };
        if let Err(error) = device.check(made) {
            // SAFETY: the driver did not take it.
            unsafe { give_back(data.cast()) };
            return Err(error);
        }
        // SAFETY: the graph is being captured, so it is alive; our one reference moves into it.
        let kept = unsafe { api.graph_retain_user_object(place.graph, object, 1, MOVE) };
        device.check(kept).inspect_err(|_| {
            // SAFETY: the reference is still ours; releasing it returns the block.
            device.check_in_drop(unsafe { api.user_object_release(object, 1) });
        })
    }

    /// Takes in the blocks of destroyed graphs.
    fn collect(&self, state: &mut State) {
        let returned = std::mem::take(&mut *self.returned.lock().unwrap_or_else(PoisonError::into_inner));
        for mut block in returned {
            for owner in &mut state.owners {
                let Some(at) = owner.blocks.iter().position(|known| known.address == block.address) else {
                    continue;
                };
                // What the graph left, which its owner knows and the driver does not.
                block.zeroed = owner.blocks.swap_remove(at).zeroed;
            }
            state.idle.push(Idle { block, after: None });
        }
        state.owners.retain(|owner| !owner.blocks.is_empty());
    }

    /// Frees a stream's blocks for others once its work is done. The context is current.
    pub(crate) fn stream_ends(&self, device: Device, stream: CUstream) {
        let Ok(id) = stream::unique_id(device, stream) else { return };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = state.owners.iter().position(|owner| owner.key == Key::Stream(id)) else { return };
        // Without an event nobody could tell when the blocks are free: they are then kept unused until `trim`.
        for block in state.owners.swap_remove(at).blocks {
            match end_of(device, stream) {
                Ok(event) => state.idle.push(Idle { block, after: Some(event) }),
                Err(_) => state.owners.push(Owner { key: Key::Stream(id), blocks: vec![block] }),
            }
        }
    }

    fn bytes(&self) -> u64 {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let assigned = state.owners.iter().flat_map(|owner| &owner.blocks).map(|block| block.bytes);
        assigned.chain(state.idle.iter().map(|idle| idle.block.bytes)).sum()
    }

    fn trim(&self, device: Device) -> Result<u64, Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        device.synchronize()?;
        self.collect(&mut state);
        let (streams, captures) = std::mem::take(&mut state.owners)
            .into_iter()
            .partition(|o: &Owner| matches!(o.key, Key::Stream(_)));
        state.owners = captures;
        let streams: Vec<Owner> = streams;
        let idle = std::mem::take(&mut state.idle).into_iter().map(|idle| idle.block);
        let blocks = streams.into_iter().flat_map(|owner| owner.blocks).chain(idle);
        Ok(blocks
            .map(|block| {
                memory::free(device, block.address);
                block.bytes
            })
            .sum())
    }
}

impl State {
    fn blocks(&mut self, key: Key) -> &mut Vec<Block> {
        let known = self.owners.iter().position(|owner| owner.key == key);
        let at = known.unwrap_or_else(|| {
            self.owners.push(Owner { key, blocks: Vec::new() });
            self.owners.len() - 1
        });
        &mut self.owners[at].blocks
    }

    /// Takes a block that has become too small from its owner; a graph keeps its own for the nodes that use it.
    fn retire(&mut self, place: Place, ordinal: u8, zeroed: bool) -> Result<(), Error> {
        if matches!(place.key, Key::Capture { .. }) {
            return Ok(());
        }
        let same = |old: &Block| old.ordinal == ordinal && old.zeroed == zeroed;
        let Some(at) = self.blocks(place.key).iter().position(same) else { return Ok(()) };
        let after = Some(end_of(place.device, place.stream)?);
        let block = self.blocks(place.key).swap_remove(at);
        self.idle.push(Idle { block, after });
        Ok(())
    }

    /// An idle block that fits without wasting more than half of it.
    fn take_idle(&mut self, want: &Workspace) -> Result<Option<Block>, Error> {
        for at in 0..self.idle.len() {
            let Idle { block, after } = &self.idle[at];
            let fits =
                block.zeroed == want.zeroed && (want.bytes..=round_up(want.bytes) * 2).contains(&block.bytes);
            if fits && after.as_ref().map_or(Ok(true), Event::is_done)? {
                return Ok(Some(self.idle.swap_remove(at).block));
            }
        }
        Ok(None)
    }
}

fn round_up(bytes: u64) -> u64 {
    bytes.max(1).next_multiple_of(GRANULE)
}

fn end_of(device: Device, stream: CUstream) -> Result<Event, Error> {
    let event = Event::new(device)?;
    event.record_raw(stream)?;
    Ok(event)
}

struct GraphBlock {
    pool: &'static Pool,
    block: Block,
}

/// Called by the driver when the last graph that holds the block is gone. It must not call the driver back.
unsafe extern "C" fn give_back(data: *mut c_void) {
    // SAFETY: `data` is the box made in `bind_to_graph`, given back once.
    let GraphBlock { pool, block } = *unsafe { Box::from_raw(data.cast::<GraphBlock>()) };
    pool.returned.lock().unwrap_or_else(PoisonError::into_inner).push(block);
}

impl Device {
    /// Bytes of scratch memory that launches on this device hold.
    pub fn workspace_bytes(&self) -> u64 {
        self.pool().bytes()
    }

    /// Waits for the device and frees all scratch memory but that of living graphs; returns the bytes freed.
    pub fn trim_workspaces(&self) -> Result<u64, Error> {
        self.pool().trim(*self)
    }
}
