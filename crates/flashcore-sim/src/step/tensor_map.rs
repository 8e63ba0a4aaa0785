//! Tensor maps in memory: looked up for tensor copies, edited and copied by kernels that make their own.

use super::{Flow, Outcome, Step};
use crate::{
    finding::FindingKind,
    memory::{Place, resolve},
    program::{Addr, Order, Space, Src},
    regfile::lanes_of,
    tensor_map::{Field, MAP_BYTES, MapBytes, TensorMap},
};

/// Bytes that move together.
const WORD: usize = 8;

impl Step<'_, '_> {
    /// The tensor map at an address.
    pub(super) fn tensor_map(&mut self, lane: usize, addr: &Addr, rank: usize) -> Outcome<TensorMap> {
        let address = self.address(addr)[lane];
        let bytes = self.map_bytes(lane, address)?;
        let text = match bytes.and_then(|bytes| bytes.read()) {
            Some(Ok(map)) if map.rank() == rank => return Ok(map),
            Some(Ok(map)) => format!("{rank} coordinates for a tensor of rank {}", map.rank()),
            Some(Err(wrong)) => wrong,
            None => format!("no tensor map at {address:#x}"),
        };
        self.halt(FindingKind::BadDescriptor, lane, text)
    }

    fn map_bytes(&mut self, lane: usize, address: u64) -> Outcome<Option<MapBytes>> {
        let context = self.machine.context;
        let held = |memory: &[u8], at: u64| {
            let at = usize::try_from(at).ok()?;
            memory.get(at..at.checked_add(MAP_BYTES)?)?.try_into().ok().map(MapBytes)
        };
        Ok(match resolve(Space::Generic, address) {
            Place::Param(offset) => held(&context.params, offset),
            Place::Const(offset) => held(&context.program.layout.constants, offset),
            // a parameter's own address, before `cvta`
            Place::Global(offset) if offset < context.params.len() as u64 => held(&context.params, offset),
            place @ Place::Global(_) => {
                self.check_fenced(lane, address);
                Some(self.read_map(lane, place, Space::Global)?)
            }
            _ => None,
        })
    }

    /// A map that the launch has changed is read through a proxy of its own, which must be told.
    fn check_fenced(&mut self, lane: usize, address: u64) {
        let changes = self.machine.changed_maps.get(&address).copied().unwrap_or(0);
        let fenced = self.machine.ctas[self.cta].fenced_maps.get(&address).copied().unwrap_or(0);
        if fenced < changes && self.machine.context.options.checks.proxy {
            let text = "the tensor map was changed, and no `fence.proxy.tensormap::generic.acquire` of it has \
                        followed in this CTA";
            self.report(FindingKind::MissingProxyFence, lane, text.into());
        }
    }

    fn read_map(&mut self, lane: usize, place: Place, space: Space) -> Outcome<MapBytes> {
        let mut bytes = [0; MAP_BYTES];
        for (at, word) in bytes.chunks_exact_mut(WORD).enumerate() {
            self.read_place(lane, moved(place, at * WORD), space, word, Order::default())?;
        }
        Ok(MapBytes(bytes))
    }

    fn write_map(&mut self, lane: usize, place: Place, space: Space, bytes: &MapBytes) -> Outcome<()> {
        for (at, word) in bytes.0.chunks_exact(WORD).enumerate() {
            self.write_place(lane, moved(place, at * WORD), space, word, Order::default())?;
        }
        if let Place::Global(address) = place {
            *self.machine.changed_maps.entry(address).or_default() += 1;
        }
        Ok(())
    }

    pub(super) fn replace_field(&mut self, addr: &Addr, space: Space, field: Field, value: Src) -> Outcome {
        let (addresses, values) = (self.address(addr), self.read(value));
        self.machine.warps[self.warp].clock.tick();
        for lane in lanes_of(self.mask) {
            let place = resolve(space, addresses[lane]);
            let mut bytes = self.read_map(lane, place, space)?;
            if !bytes.replace(field, values[lane]) {
                let text = "these 128 bytes are neither a tensor map nor zeros".to_string();
                return self.halt(FindingKind::BadDescriptor, lane, text);
            }
            self.write_map(lane, place, space, &bytes)?;
        }
        self.machine.effect();
        Ok(Flow::Next)
    }

    /// The warp copies one map from shared to global memory.
    pub(super) fn copy_map(&mut self, dst: &Addr, src: &Addr) -> Outcome {
        if let Some(flow) = self.aligned("tensormap.cp_fenceproxy")? {
            return Ok(flow);
        }
        let (targets, sources) = (self.address(dst), self.address(src));
        let lane = self.first_lane();
        let same = |lanes: &[u64; 32]| lanes_of(self.mask).all(|other| lanes[other] == lanes[lane]);
        if !same(&targets) || !same(&sources) {
            let text = "lanes name different tensor maps".to_string();
            return self.halt(FindingKind::DescriptorMismatch, lane, text);
        }
        let (from, to) = (resolve(Space::SharedCta, sources[lane]), resolve(Space::Global, targets[lane]));
        let bytes = self.read_map(lane, from, Space::SharedCta)?;
        self.write_map(lane, to, Space::Global, &bytes)?;
        self.machine.effect();
        Ok(Flow::Next)
    }

    pub(super) fn acquire_map(&mut self, addr: &Addr) -> Outcome {
        let addresses = self.address(addr);
        for lane in lanes_of(self.mask) {
            let changes = self.machine.changed_maps.get(&addresses[lane]).copied().unwrap_or(0);
            self.machine.ctas[self.cta].fenced_maps.insert(addresses[lane], changes);
        }
        Ok(Flow::Next)
    }
}

/// The place some bytes on.
const fn moved(place: Place, bytes: usize) -> Place {
    match place {
        Place::Global(address) => Place::Global(address + bytes as u64),
        Place::Shared { rank, offset } => Place::Shared { rank, offset: offset + bytes as u32 },
        other => other,
    }
}
