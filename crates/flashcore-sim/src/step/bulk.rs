//! Bulk copies and tensor copies: checked when issued, queued, waited for.

use super::{Flow, Outcome, Step, order::Name};
use crate::{
    check::{clock::Knowledge, race::Proxy},
    engine::{Piece, Reduce, RowCopy, Work},
    finding::FindingKind,
    memory::{Place, resolve},
    program::{Addr, Bulk, BulkPlace, Combine, Lanes, Space, Src},
    regfile::lanes_of,
    tensor_map::BoxRow,
};
use std::collections::BTreeMap;

use flashcore_ptx::{layout::Swizzle, types::ScalarType};

/// What tensor copies need of shared addresses.
const TENSOR_ALIGN: u64 = 128;
/// What plain bulk copies need of addresses and sizes.
const BULK_ALIGN: u64 = 16;

impl Step<'_, '_> {
    /// Each lane issues a copy of its own.
    pub(super) fn bulk(&mut self, op: &Bulk) -> Outcome {
        self.machine.warps[self.warp].copies_issued += 1;
        match op {
            Bulk::Load { dst, src, size, mbarrier, multicast, cluster } => {
                let space = if *cluster { Space::SharedCluster } else { Space::SharedCta };
                let (targets, barriers) = (self.address(dst), self.address(mbarrier));
                let masks = multicast.map(|m| self.read(m));
                for lane in lanes_of(self.mask) {
                    let copy = self.rows_of(lane, src, *size, targets[lane])?;
                    let mask = masks.map(|m| m[lane] as u32 & 0xffff);
                    self.bulk_load(lane, copy, (targets[lane], barriers[lane]), mask, space)?;
                }
            }
            Bulk::Store { dst, src, size, reduce } => {
                let sources = self.address(src);
                for lane in lanes_of(self.mask) {
                    let element = self.element_of(lane, dst)?;
                    let copy = self.rows_of(lane, dst, *size, sources[lane])?;
                    let reduce = reduce.map(|(op, ty)| (op, ty.unwrap_or(element)));
                    self.bulk_store(
                        lane,
                        copy,
                        sources[lane],
                        reduce,
                        matches!(dst, BulkPlace::Tensor { .. }),
                    )?;
                }
            }
            Bulk::Remote { dst, src, size, mbarrier, reduce } => {
                self.bulk_remote((dst, src), *size, mbarrier, *reduce)?;
            }
            Bulk::Send { dst, srcs, bytes, mbarrier, reduce } => {
                self.send(dst, (srcs, *bytes as usize), mbarrier, *reduce)?;
            }
        }
        Ok(Flow::Next)
    }

    /// The rows that a copy moves between global memory and the box at the shared address `at`.
    fn rows_of(&mut self, lane: usize, place: &BulkPlace, size: Option<Src>, at: u64) -> Outcome<RowCopy> {
        let Place::Shared { offset: base, .. } = resolve(Space::SharedCluster, at) else {
            return Err(super::Halt);
        };
        match place {
            BulkPlace::Global(addr) => {
                let address = self.address(addr)[lane];
                let bytes = size.map_or(0, |s| 0u64.wrapping_add(self.read(s)[lane])) as u32;
                self.require_aligned(lane, u64::from(bytes) | u64::from(base) | address, BULK_ALIGN)?;
                let row = BoxRow { offset: 0, skip: 0, address, inside: bytes };
                Ok(RowCopy { rows: vec![row], row_bytes: bytes, base, swizzle: Swizzle::None })
            }
            BulkPlace::Tensor { map, coords } => {
                let coords: Vec<Lanes> = coords.iter().map(|c| self.read(*c)).collect();
                let coords: Vec<i32> = coords.iter().map(|c| c[lane] as i32).collect();
                let map = self.tensor_map(lane, map, coords.len())?;
                let align = TENSOR_ALIGN.max(map.swizzle.repeat_bytes().into());
                let start = i64::from(coords[0]) * i64::from(map.element_bytes());
                let rows = map.rows(&coords);
                let copy = RowCopy { rows, row_bytes: map.row_bytes(), base, swizzle: map.swizzle };
                self.require_aligned(lane, base.into(), align)?;
                // Not in the ISA: an H200 stops with an illegal instruction.
                if start % BULK_ALIGN as i64 != 0 {
                    let text =
                        format!("the box starts {start} bytes into its rows, not a multiple of {BULK_ALIGN}");
                    return self.halt(FindingKind::Misaligned, lane, text);
                }
                Ok(copy)
            }
        }
    }

    /// The element type of a tensor's reduction; plain copies name theirs.
    fn element_of(&mut self, lane: usize, place: &BulkPlace) -> Outcome<ScalarType> {
        let BulkPlace::Tensor { map, coords } = place else { return Ok(ScalarType::B32) };
        let rank = coords.len();
        Ok(self.tensor_map(lane, map, rank)?.element_type())
    }

    fn bulk_load(
        &mut self,
        lane: usize,
        copy: RowCopy,
        (target, barrier): (u64, u64),
        multicast: Option<u32>,
        space: Space,
    ) -> Outcome<()> {
        self.read_rows(lane, &copy)?;
        let (home, at) = self.barrier_place(lane, barrier, space)?;
        let Place::Shared { rank, .. } = resolve(space, target) else { return Err(super::Halt) };
        let ranks: Vec<u32> = match multicast {
            Some(mask) => (0..16).filter(|r| mask >> r & 1 == 1).collect(),
            None => vec![rank],
        };
        let mut ctas = Vec::new();
        for rank in ranks {
            let Some(cta) = self.machine.peer(self.cta, rank) else {
                let text = format!("the multicast mask names CTA {rank}, which the cluster lacks");
                return self.halt(FindingKind::OutOfBounds, lane, text);
            };
            let signal = if multicast.is_some() { cta } else { home };
            self.claim_box(lane, cta, signal, at, &copy)?;
            ctas.push(cta);
        }
        if multicast.is_none() && ctas != [home] {
            let text = "destination and mbarrier lie in different CTAs".into();
            return self.halt(FindingKind::MbarrierMisuse, lane, text);
        }
        let past = self.release();
        self.issue(0, 1 << lane, past, Work::Load { rows: copy, ctas, mbarrier: at });
        Ok(())
    }

    /// Enters the writes of a load under the name of the mbarrier that counts them.
    fn claim_box(&mut self, lane: usize, cta: usize, signal: usize, at: u32, copy: &RowCopy) -> Outcome<()> {
        let barrier = self.existing(lane, signal, at)?;
        let (agent, clock) = (barrier.agent, barrier.claim());
        let name = Name { agent, clock, proxy: Proxy::Async, strong: false, within_cta: false };
        self.enter_box(lane, cta, copy, true, name)
    }

    fn enter_box(&mut self, lane: usize, cta: usize, copy: &RowCopy, write: bool, name: Name) -> Outcome<()> {
        // the swizzle permutes bytes inside the box only, so the box as a whole is what is touched
        let rank = self.machine.ctas[cta].rank;
        let bytes = copy.bytes() as usize;
        let (_, range) = self.shared_range(lane, rank, copy.base, bytes, Space::SharedCluster)?;
        self.check_mbarrier_bytes(lane, cta, copy.base, bytes);
        if !write {
            let shared = &self.machine.ctas[cta].shared;
            let is_written =
                |(offset, len)| shared.range(offset, len).is_ok_and(|r| shared.written.covers(r));
            let written = shared.written.covers(range.clone()) || copy.inside().all(is_written);
            self.check_written(written, FindingKind::UninitShared, lane);
        }
        self.order_shared(lane, cta, range, write, name);
        Ok(())
    }

    /// Judges the reads of a load from global memory.
    fn read_rows(&mut self, lane: usize, copy: &RowCopy) -> Outcome<()> {
        let name = Name { proxy: Proxy::Async, ..self.own_name(false) };
        for row in copy.rows.iter().filter(|r| r.inside > 0) {
            let len = row.inside as usize;
            let range = self.global_range(lane, row.address, len)?;
            let found = self.machine.global.find(row.address, len).map(|(a, _)| a.written.covers(range));
            self.check_written_global(found == Ok(true), lane, row.address);
            self.order_global(lane, row.address, len, false, name);
        }
        Ok(())
    }

    fn bulk_store(
        &mut self,
        lane: usize,
        copy: RowCopy,
        source: u64,
        reduce: Option<(Combine, ScalarType)>,
        tensor: bool,
    ) -> Outcome<()> {
        let Place::Shared { rank, .. } = resolve(Space::SharedCta, source) else { return Err(super::Halt) };
        if rank != self.machine.ctas[self.cta].rank {
            let text = "the source of a bulk store lies in another CTA".into();
            return self.halt(FindingKind::OutOfBounds, lane, text);
        }
        if tensor && copy.rows.iter().any(|r| r.skip > 0) {
            let text = "a tensor store at a negative coordinate".into();
            return self.halt(FindingKind::OutOfBounds, lane, text);
        }
        let warp = &self.machine.warps[self.warp];
        let agents = self.machine.clusters[self.machine.ctas[self.cta].cluster].agents;
        let (group, home) = (warp.bulk.committed[lane], warp.agent);
        let name = |agent| Name {
            agent,
            clock: group + 1,
            proxy: Proxy::Async,
            strong: reduce.is_some(),
            within_cta: false,
        };
        self.enter_box(lane, self.cta, &copy, false, name(agents.bulk_read(home)))?;
        for row in copy.rows.iter().filter(|r| r.inside > 0) {
            self.global_range(lane, row.address, row.inside as usize)?;
            self.order_global(lane, row.address, row.inside as usize, true, name(agents.bulk_write(home)));
        }
        self.machine.warps[self.warp].bulk.issue(lane);
        self.issue(
            group,
            1 << lane,
            Knowledge::default(),
            Work::Store { rows: copy, reduce, captured: None },
        );
        Ok(())
    }

    fn bulk_remote(
        &mut self,
        (dst, src): (&Addr, &Addr),
        size: Src,
        mbarrier: &Addr,
        reduce: Reduce,
    ) -> Outcome<()> {
        let (targets, sources, barriers) = (self.address(dst), self.address(src), self.address(mbarrier));
        let sizes = self.read(size);
        for lane in lanes_of(self.mask) {
            let bytes = sizes[lane] as u32;
            self.require_aligned(lane, sizes[lane] | targets[lane] | sources[lane], BULK_ALIGN)?;
            let (Place::Shared { rank, offset }, Place::Shared { offset: from, .. }) =
                (resolve(Space::SharedCluster, targets[lane]), resolve(Space::SharedCta, sources[lane]))
            else {
                return Err(super::Halt);
            };
            let (to, at) = self.barrier_place(lane, barriers[lane], Space::SharedCluster)?;
            let plain = |base| RowCopy::plain(base, bytes);
            let barrier = self.existing(lane, to, at)?;
            let name = Name {
                agent: barrier.agent,
                clock: barrier.claim(),
                proxy: Proxy::Async,
                strong: reduce.is_some(),
                within_cta: false,
            };
            let (target, _) = self.shared_range(lane, rank, offset, bytes as usize, Space::SharedCluster)?;
            let reader = self.machine.clusters[self.machine.ctas[self.cta].cluster].agents;
            let agent = reader.bulk_read(self.machine.warps[self.warp].agent);
            let reader = Name { agent, strong: false, ..name };
            self.enter_box(lane, self.cta, &plain(from), false, reader)?;
            self.check_reduced(lane, target, offset, bytes, reduce);
            self.enter_box(lane, target, &plain(offset), true, name)?;
            let past = self.release();
            let work = Work::Remote { from, bytes, to: target, offset, mbarrier: at, reduce };
            self.issue(0, 1 << lane, past, work);
        }
        Ok(())
    }

    /// Registers in flight to other CTAs; unlike copies they are stores like any other, only later. What goes to one
    /// mbarrier arrives together.
    fn send(
        &mut self,
        dst: &Addr,
        (srcs, width): (&[Src], usize),
        mbarrier: &Addr,
        reduce: Reduce,
    ) -> Outcome<()> {
        let (targets, barriers) = (self.address(dst), self.address(mbarrier));
        let values: Vec<Lanes> = srcs.iter().map(|src| self.read(*src)).collect();
        let mut sent: BTreeMap<(usize, u32), Vec<Piece>> = BTreeMap::new();
        for lane in lanes_of(self.mask) {
            let data: Vec<u8> =
                values.iter().flat_map(|value| value[lane].to_le_bytes().into_iter().take(width)).collect();
            let len = data.len() as u32;
            let (to, at, offset) = self.claim_send(lane, targets[lane], barriers[lane], len, reduce)?;
            sent.entry((to, at)).or_default().push(Piece { offset, data });
        }
        for ((to, mbarrier), pieces) in sent {
            let past = self.release();
            self.issue(0, self.mask, past, Work::Send { pieces, to, mbarrier, reduce });
        }
        Ok(())
    }

    /// Judges the store that one lane sends: the CTA and the mbarrier it goes to, and where in shared memory.
    fn claim_send(
        &mut self,
        lane: usize,
        target: u64,
        barrier: u64,
        bytes: u32,
        reduce: Reduce,
    ) -> Outcome<(usize, u32, u32)> {
        self.require_aligned(lane, target, bytes.into())?;
        let Place::Shared { rank, offset } = resolve(Space::SharedCluster, target) else {
            return Err(super::Halt);
        };
        let (home, at) = self.barrier_place(lane, barrier, Space::SharedCluster)?;
        let (to, _) = self.shared_range(lane, rank, offset, bytes as usize, Space::SharedCluster)?;
        if to != home {
            let text = "destination and mbarrier lie in different CTAs".into();
            return self.halt(FindingKind::MbarrierMisuse, lane, text);
        }
        let barrier = self.existing(lane, home, at)?;
        let (agent, clock) = (barrier.agent, barrier.claim());
        let strong = reduce.is_some();
        let name = Name { agent, clock, proxy: Proxy::Generic, strong, within_cta: false };
        self.check_reduced(lane, to, offset, bytes, reduce);
        self.enter_box(lane, to, &RowCopy::plain(offset, bytes), true, name)?;
        Ok((to, at, offset))
    }

    /// What a reduction is combined with must have been written.
    fn check_reduced(&mut self, lane: usize, cta: usize, offset: u32, bytes: u32, reduce: Reduce) {
        let shared = &self.machine.ctas[cta].shared;
        let written = shared.range(offset, bytes as usize).is_ok_and(|range| shared.written.covers(range));
        self.check_written(written || reduce.is_none(), FindingKind::UninitShared, lane);
    }

    pub(super) fn bulk_commit(&mut self) -> Outcome {
        let groups = &mut self.machine.warps[self.warp].bulk;
        lanes_of(self.mask).for_each(|lane| groups.commit(lane));
        Ok(Flow::Next)
    }

    /// Waits until at most `keep` groups of each lane are pending, or have been read.
    pub(super) fn bulk_wait(&mut self, keep: u32, read_only: bool) -> Outcome {
        let committed = self.machine.warps[self.warp].bulk.committed;
        let (warp, mask) = (self.warp, self.mask);
        let due = move |job: &crate::engine::Job| {
            let mine = job.warp == warp && job.mask & mask != 0 && matches!(job.work, Work::Store { .. });
            mine && lanes_of(job.mask & mask).any(|l| job.group < committed[l].saturating_sub(keep))
        };
        if read_only {
            self.machine.capture_stores(due);
        } else {
            self.machine.complete_all(due);
        }
        let agents = self.machine.clusters[self.machine.ctas[self.cta].cluster].agents;
        let groups = &mut self.machine.warps[warp].bulk;
        let done = lanes_of(mask).map(|lane| groups.wait(lane, keep)).max().unwrap_or(0);
        let home = self.machine.warps[warp].agent;
        self.learn_clock(agents.bulk_read(home), done);
        if !read_only {
            self.learn_clock(agents.bulk_write(home), done);
        }
        Ok(Flow::Next)
    }
}
