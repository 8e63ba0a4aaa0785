//! Loads and stores: what an address refers to, whether it may be accessed, and the bytes there.

use super::{Flow, Outcome, Step};
use crate::{
    finding::FindingKind,
    memory::{Place, resolve},
    program::{Access, Addr, Dst, Lanes, Order, Reg, Space, Src},
    regfile::{Cause, Origin, each_lane, lanes_of},
};
use std::ops::Range;

/// Most bytes of one access.
pub(super) const WIDEST: usize = 32;
/// Bytes of a line of the second cache.
const LINE: usize = 128;
/// Banks of shared memory, each of which serves four bytes at a time.
const BANKS: usize = 32;

impl Step<'_, '_> {
    /// An address in every lane.
    pub(super) fn address(&mut self, addr: &Addr) -> Lanes {
        let base = self.read(addr.base);
        let narrow = addr.narrow;
        base.map(|b| {
            let sum = b.wrapping_add_signed(addr.offset);
            if narrow { sum & 0xffff_ffff } else { sum }
        })
    }

    pub(super) fn load(&mut self, access: &Access, dsts: &[Dst]) -> Outcome {
        let addresses = self.address(&access.addr);
        let width = access.bytes as usize;
        let len = width * dsts.len();
        let mut values = vec![[0u64; 32]; dsts.len()];
        let mut others = Vec::new();
        let mut unwritten = vec![(0u32, Origin { pc: self.pc, cause: Cause::Register }); dsts.len()];
        self.tolerant = true;
        for lane in lanes_of(self.mask) {
            let place = resolve(access.space, addresses[lane]);
            let mut bytes = [0; WIDEST];
            self.fetch_place(lane, place, access.space, &mut bytes[..len], access.order)?;
            let raced = std::mem::take(&mut self.raced);
            for (i, value) in values.iter_mut().enumerate() {
                value[lane] = extend(&bytes[i * width..(i + 1) * width], access.signed);
                if raced || self.is_unwritten(lane, place, i * width..(i + 1) * width) {
                    unwritten[i] = (unwritten[i].0 | 1 << lane, self.origin_at(lane, place, i * width));
                    others.resize(dsts.len(), [0; 32]);
                    let other = self.other_bytes(lane, place, i * width, &bytes[i * width..(i + 1) * width]);
                    others[i][lane] = extend(&other[..width], access.signed);
                }
            }
        }
        self.count_access(access.space, &addresses, len);
        for (i, (dst, (lanes, origin))) in dsts.iter().zip(unwritten).enumerate() {
            self.write(*dst, &values[i]);
            if let (Some(reg), 1..) = (*dst, lanes) {
                self.machine.warps[self.warp].registers.undefine(reg, lanes, origin, others.get(i));
            }
        }
        Ok(Flow::Next)
    }

    /// Stores to local memory keep what means nothing: compilers put aside and copy whole structs.
    fn store_local(&mut self, access: &Access, srcs: &[Src], addresses: &Lanes) -> Outcome {
        let width = access.bytes as usize;
        for lane in lanes_of(self.mask) {
            let place = resolve(access.space, addresses[lane]);
            self.check_alignment(lane, place, width * srcs.len())?;
        }
        for (i, src) in srcs.iter().enumerate() {
            let (values, undefined) = self.peek(*src);
            let other = if undefined == 0 { values } else { self.other(*src, &values, undefined) };
            for lane in lanes_of(self.mask) {
                let place = resolve(access.space, addresses[lane].wrapping_add((i * width) as u64));
                self.write_place(
                    lane,
                    place,
                    access.space,
                    &values[lane].to_le_bytes()[..width],
                    access.order,
                )?;
                if let (Place::Local(offset), 1) = (place, undefined >> lane & 1) {
                    let range = self.local_range(lane, offset, width)?;
                    let origin = self.origin_of(*src);
                    let warp = &mut self.machine.warps[self.warp];
                    warp.local_origins.extend(origin.map(|origin| (range.start, origin)));
                    warp.local_others.extend(range.clone().zip(other[lane].to_le_bytes()));
                    warp.local_written.clear(range);
                }
            }
        }
        Ok(Flow::Next)
    }

    pub(super) fn store(&mut self, access: &Access, srcs: &[Src]) -> Outcome {
        let addresses = self.address(&access.addr);
        let is_local = |lane: usize| matches!(resolve(access.space, addresses[lane]), Place::Local(_));
        if lanes_of(self.mask).all(is_local) {
            return self.store_local(access, srcs, &addresses);
        }
        let width = access.bytes as usize;
        let values: Vec<Lanes> = srcs.iter().map(|src| self.read(*src)).collect();
        self.machine.warps[self.warp].clock.tick();
        for lane in lanes_of(self.mask) {
            let mut bytes = [0; WIDEST];
            for (i, value) in values.iter().enumerate() {
                bytes[i * width..(i + 1) * width].copy_from_slice(&value[lane].to_le_bytes()[..width]);
            }
            let place = resolve(access.space, addresses[lane]);
            self.write_place(lane, place, access.space, &bytes[..width * values.len()], access.order)?;
        }
        self.machine.warps[self.warp].clock.tick();
        self.count_access(access.space, &addresses, width * values.len());
        self.machine.effect();
        Ok(Flow::Next)
    }

    /// Reads bytes for one lane, with every check.
    pub(super) fn read_place(
        &mut self,
        lane: usize,
        place: Place,
        space: Space,
        out: &mut [u8],
        order: Order,
    ) -> Outcome<()> {
        self.fetch_place(lane, place, space, out, order)?;
        if matches!(place, Place::Shared { .. }) {
            let written = !self.is_unwritten(lane, place, 0..out.len());
            self.check_written(written, FindingKind::UninitShared, lane);
        }
        Ok(())
    }

    /// The same for bytes of shared memory that perhaps nobody wrote.
    fn fetch_place(
        &mut self,
        lane: usize,
        place: Place,
        space: Space,
        out: &mut [u8],
        order: Order,
    ) -> Outcome<()> {
        let len = out.len();
        self.check_alignment(lane, place, len)?;
        match place {
            Place::Global(address) => {
                let range = self.global_range(lane, address, len)?;
                let found = self.machine.global.find(address, len).map(|(a, _)| {
                    out.copy_from_slice(&a.bytes[range.clone()]);
                    a.written.covers(range)
                });
                self.check_written_global(found == Ok(true), lane, address);
                let name = self.name_for(order);
                self.order_global(lane, address, len, false, name);
            }
            Place::Shared { rank, offset } => {
                let (cta, range) = self.shared_range(lane, rank, offset, len, space)?;
                self.check_mbarrier_bytes(lane, cta, offset, len);
                out.copy_from_slice(self.machine.ctas[cta].shared.bytes(range.clone()));
                let name = self.name_for(order);
                self.order_shared(lane, cta, range, false, name);
            }
            Place::Local(offset) => {
                let range = self.local_range(lane, offset, len)?;
                out.copy_from_slice(&self.machine.warps[self.warp].local[range]);
            }
            Place::Param(offset) => {
                let context = self.machine.context;
                self.copy_constant(lane, &context.params, offset, out, "the parameters")?;
            }
            Place::Const(offset) => {
                let context = self.machine.context;
                self.copy_constant(lane, &context.program.layout.constants, offset, out, "constant memory")?;
            }
        }
        self.synchronise(lane, place, order, true, false);
        Ok(())
    }

    /// Writes bytes for one lane, with every check.
    pub(super) fn write_place(
        &mut self,
        lane: usize,
        place: Place,
        space: Space,
        data: &[u8],
        order: Order,
    ) -> Outcome<()> {
        let len = data.len();
        self.check_alignment(lane, place, len)?;
        match place {
            Place::Global(address) => {
                let range = self.global_range(lane, address, len)?;
                let found = self.machine.global.find(address, len);
                self.rewrites = found.is_ok_and(|(a, _)| a.bytes[range] == *data);
                let name = self.name_for(order);
                self.order_global(lane, address, len, true, name);
                self.store_global(address, data);
            }
            Place::Shared { rank, offset } => {
                let (cta, range) = self.shared_range(lane, rank, offset, len, space)?;
                self.check_mbarrier_bytes(lane, cta, offset, len);
                self.rewrites = self.machine.ctas[cta].shared.bytes(range.clone()) == data;
                let name = self.name_for(order);
                self.order_shared(lane, cta, range.clone(), true, name);
                self.machine.ctas[cta].shared.store(range.start, data);
            }
            Place::Local(offset) => {
                let range = self.local_range(lane, offset, len)?;
                let warp = &mut self.machine.warps[self.warp];
                warp.local_written.mark(range.clone());
                warp.local[range].copy_from_slice(data);
            }
            Place::Param(_) | Place::Const(_) => {
                let text = "a store to parameters or constant memory".to_string();
                return self.halt(FindingKind::OutOfBounds, lane, text);
            }
        }
        self.synchronise(lane, place, order, false, true);
        Ok(())
    }

    /// A write of nothing: what the line holds means as little as before its first write.
    pub(super) fn discard(&mut self, addr: &Addr) -> Outcome {
        let addresses = self.address(addr);
        for lane in lanes_of(self.mask) {
            let address = addresses[lane];
            self.require_aligned(lane, address, LINE as u64)?;
            let range = self.global_range(lane, address, LINE)?;
            let name = self.own_name(false);
            self.order_global(lane, address, LINE, true, name);
            if let Ok((allocation, _)) = self.machine.global.find(address, LINE) {
                allocation.bytes[range.clone()].fill(0xff);
                allocation.written.clear(range);
            }
        }
        self.machine.effect();
        Ok(Flow::Next)
    }

    pub(super) fn store_global(&mut self, address: u64, data: &[u8]) {
        if let Ok((allocation, range)) = self.machine.global.find(address, data.len()) {
            allocation.written.mark(range.clone());
            allocation.bytes[range].copy_from_slice(data);
        }
    }

    pub(super) fn check_alignment(&mut self, lane: usize, place: Place, len: usize) -> Outcome<()> {
        let (Place::Global(address) | Place::Local(address) | Place::Param(address) | Place::Const(address)) =
            place
        else {
            let Place::Shared { offset, .. } = place else { return Ok(()) };
            return self.require_aligned(lane, offset.into(), len as u64);
        };
        self.require_aligned(lane, address, len as u64)
    }

    /// Ends the launch where `address` is not a multiple of `align`.
    pub(super) fn require_aligned(&mut self, lane: usize, address: u64, align: u64) -> Outcome<()> {
        if address.is_multiple_of(align) {
            return Ok(());
        }
        self.halt(FindingKind::Misaligned, lane, format!("address {address:#x} is not a multiple of {align}"))
    }

    /// Where global bytes lie in their allocation; ends the launch where there is none.
    pub(super) fn global_range(&mut self, lane: usize, address: u64, len: usize) -> Outcome<Range<usize>> {
        match self.machine.global.find(address, len) {
            Ok((_, range)) => Ok(range),
            Err(text) => self.halt(FindingKind::OutOfBounds, lane, text),
        }
    }

    /// Which resident CTA's shared memory is meant, and where in it; ends the launch where there is none.
    pub(super) fn shared_range(
        &mut self,
        lane: usize,
        rank: u32,
        offset: u32,
        len: usize,
        space: Space,
    ) -> Outcome<(usize, Range<usize>)> {
        let own = rank == self.machine.ctas[self.cta].rank;
        let reachable = own || space != Space::SharedCta;
        let Some(cta) = self.machine.peer(self.cta, rank).filter(|_| reachable) else {
            let text = format!("shared memory of CTA {rank} of the cluster is out of reach");
            return self.halt(FindingKind::OutOfBounds, lane, text);
        };
        match self.machine.ctas[cta].shared.range(offset, len) {
            Ok(range) => Ok((cta, range)),
            Err(text) => self.halt(FindingKind::OutOfBounds, lane, text),
        }
    }

    /// Where bytes of a lane lie in its warp's local memory; ends the launch where there are none.
    pub(super) fn local_range(&mut self, lane: usize, offset: u64, len: usize) -> Outcome<Range<usize>> {
        let size = self.machine.context.program.layout.local_bytes as usize;
        let start = offset as usize;
        if start.checked_add(len).is_none_or(|end| end > size) {
            let text = format!("local bytes {start}..{}; a thread has {size}", start.wrapping_add(len));
            return self.halt(FindingKind::OutOfBounds, lane, text);
        }
        Ok(lane * size + start..lane * size + start + len)
    }

    fn copy_constant(
        &mut self,
        lane: usize,
        from: &[u8],
        at: u64,
        out: &mut [u8],
        name: &str,
    ) -> Outcome<()> {
        let start = at as usize;
        match from.get(start..start.saturating_add(out.len())) {
            Some(bytes) => {
                out.copy_from_slice(bytes);
                Ok(())
            }
            None => {
                let text = format!("bytes {start}.. of {name}, which have {}", from.len());
                self.halt(FindingKind::OutOfBounds, lane, text)
            }
        }
    }

    /// Reports an uninitialised read.
    pub(super) fn check_written(&mut self, written: bool, kind: FindingKind, lane: usize) {
        if !written && self.machine.context.options.checks.init {
            self.report(kind, lane, "a read of bytes that were never written".into());
        }
    }

    /// The same for global memory.
    pub(super) fn check_written_global(&mut self, written: bool, lane: usize, address: u64) {
        if !written && self.machine.context.options.checks.init {
            let place = self.machine.global.describe(address);
            let text = format!("a read of bytes that were never written: {place}");
            self.report(FindingKind::UninitGlobal, lane, text);
        }
    }

    /// Reports an ordinary access to a live mbarrier.
    pub(super) fn check_mbarrier_bytes(&mut self, lane: usize, cta: usize, offset: u32, len: usize) {
        let touched = self.machine.ctas[cta].mbarrier_at(offset, len as u32);
        if let (Some(at), true) = (touched, self.machine.context.options.checks.barrier) {
            let text = format!("an ordinary access to the live mbarrier at {at:#x}");
            self.report(FindingKind::MbarrierAccess, lane, text);
        }
    }

    /// Counts wavefronts of shared memory, sectors of global memory.
    pub(super) fn count_access(&mut self, space: Space, addresses: &Lanes, len: usize) {
        let Some(first) = lanes_of(self.mask).next() else { return };
        match resolve(space, addresses[first]) {
            Place::Global(_) => {
                let mut sectors: Vec<u64> = Vec::new();
                each_lane(self.mask, |l| {
                    sectors.extend([addresses[l] / 32, (addresses[l] + len as u64 - 1) / 32])
                });
                sectors.sort_unstable();
                sectors.dedup();
                self.machine.counters.global_sectors += sectors.len() as u64;
            }
            Place::Shared { .. } => {
                let (mut lanes, mut count) = ([0; 32], 0);
                each_lane(self.mask, |lane| {
                    lanes[count] = addresses[lane];
                    count += 1;
                });
                self.count_wavefronts(&lanes[..count], len);
            }
            _ => {}
        }
    }

    /// Shared memory serves 128 bytes a wavefront: as many lanes at a time as fill that; within them every
    /// distinct word of a bank costs one wavefront.
    pub(super) fn count_wavefronts(&mut self, addresses: &[u64], len: usize) {
        let (len, counters) = (len.max(4), &mut self.machine.counters);
        for group in addresses.chunks((BANKS * 4 / len).min(32)) {
            let passes = wavefronts(group, len as u64 / 4);
            counters.shared_wavefronts += passes;
            counters.bank_conflicts += passes.saturating_sub(1);
        }
    }

    /// `ldmatrix`: eight rows of sixteen bytes for each destination.
    pub(super) fn load_matrix(
        &mut self,
        space: Space,
        addr: &Addr,
        dsts: &[Reg],
        transpose: bool,
    ) -> Outcome {
        if let Some(flow) = self.whole_warp("ldmatrix")? {
            return Ok(flow);
        }
        let addresses = self.address(addr);
        for (matrix, dst) in dsts.iter().enumerate() {
            let mut rows = [[0u8; 16]; 8];
            for (row, bytes) in rows.iter_mut().enumerate() {
                let lane = matrix * 8 + row;
                let place = resolve(space, addresses[lane]);
                self.read_place(lane, place, space, bytes, Order::default())?;
            }
            self.count_wavefronts(&addresses[matrix * 8..matrix * 8 + 8], 16);
            let element = |lane: usize, half: u32| {
                let at = flashcore_ptx::layout::ldmatrix_element(lane as u32, half, transpose);
                let bytes = &rows[at.row as usize][2 * at.col as usize..];
                u64::from(u16::from_le_bytes([bytes[0], bytes[1]]))
            };
            let values: Lanes = std::array::from_fn(|lane| element(lane, 0) | element(lane, 1) << 16);
            self.write(Some(*dst), &values);
        }
        Ok(Flow::Next)
    }

    /// `stmatrix`: the inverse of `ldmatrix`.
    pub(super) fn store_matrix(
        &mut self,
        space: Space,
        addr: &Addr,
        srcs: &[Src],
        transpose: bool,
    ) -> Outcome {
        if let Some(flow) = self.whole_warp("stmatrix")? {
            return Ok(flow);
        }
        let addresses = self.address(addr);
        self.machine.warps[self.warp].clock.tick();
        for (matrix, src) in srcs.iter().enumerate() {
            let values = self.read(*src);
            let mut rows = [[0u8; 16]; 8];
            for (lane, value) in values.iter().enumerate() {
                for half in 0..2 {
                    let at = flashcore_ptx::layout::ldmatrix_element(lane as u32, half, transpose);
                    let bytes = ((value >> (16 * half)) as u16).to_le_bytes();
                    rows[at.row as usize][2 * at.col as usize..][..2].copy_from_slice(&bytes);
                }
            }
            for (row, bytes) in rows.iter().enumerate() {
                let lane = matrix * 8 + row;
                let place = resolve(space, addresses[lane]);
                self.write_place(lane, place, space, bytes, Order::default())?;
            }
            self.count_wavefronts(&addresses[matrix * 8..matrix * 8 + 8], 16);
        }
        self.machine.warps[self.warp].clock.tick();
        self.machine.effect();
        Ok(Flow::Next)
    }
}

/// The wavefronts of some lanes that access so many words each.
fn wavefronts(lanes: &[u64], words: u64) -> u64 {
    let touched = lanes.iter().flat_map(|address| (0..words).map(move |word| address / 4 + word));
    let bit = |word: u64| 1u32 << (word % BANKS as u64);
    let banks =
        touched.clone().try_fold(0, |banks, word| (banks & bit(word) == 0).then_some(banks | bit(word)));
    if let Some(banks) = banks {
        return u64::from(banks != 0);
    }
    let mut sorted = Vec::from_iter(touched);
    sorted.sort_unstable();
    sorted.dedup();
    let mut passes = [0; BANKS];
    sorted.iter().for_each(|word| passes[(word % BANKS as u64) as usize] += 1);
    passes.into_iter().max().unwrap_or(0)
}

/// A narrow element in a wider register.
fn extend(bytes: &[u8], signed: bool) -> u64 {
    let mut word = [if signed && bytes.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 }; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}
