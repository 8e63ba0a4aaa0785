//! Asynchronous work in flight: queued when issued, performed when the timing says so or somebody waits.
//!
//! Rules are checked when work is issued (`step/`); here bytes move, barriers are signalled, registers are filled.

use crate::{
    check::clock::Knowledge,
    machine::Machine,
    options::Timing,
    program::{Combine, Uop},
    step::{reduce_bytes, wgmma_product},
    tensor_map::BoxRow,
};
use flashcore_ptx::{layout::Swizzle, types::ScalarType};

/// The queue of unfinished work, and the schedule's memory.
#[derive(Default, Debug)]
pub(crate) struct Engine {
    /// Turns given so far.
    pub(crate) turns: u64,
    /// Who has the next one, if it can.
    pub(crate) next_warp: usize,
    jobs: Vec<Job>,
}

/// One piece of asynchronous work.
#[derive(Debug)]
pub(crate) struct Job {
    /// The resident cluster, CTA and warp that issued it.
    pub(crate) cluster: usize,
    pub(crate) cta: usize,
    pub(crate) warp: usize,
    /// The instruction.
    pub(crate) pc: u32,
    /// The lanes that issued it.
    pub(crate) mask: u32,
    /// The group it belongs to, counted from 0 for each lane.
    pub(crate) group: u32,
    /// What its completion makes known: the past of whoever issued it.
    pub(crate) knowledge: Knowledge,
    pub(crate) work: Work,
}

/// How what comes is combined with what is there; else it replaces it.
pub(crate) type Reduce = Option<(Combine, ScalarType)>;

/// What is to be done.
#[derive(Debug)]
pub(crate) enum Work {
    /// `cp.async`.
    Copy(Vec<LaneCopy>),
    /// `cp.async.mbarrier.arrive`.
    CopyArrive { offset: u32 },
    /// A bulk or tensor load, to each of the CTAs.
    Load { rows: RowCopy, ctas: Vec<usize>, mbarrier: u32 },
    /// A copy into shared memory of another CTA.
    Remote { from: u32, bytes: u32, to: usize, offset: u32, mbarrier: u32, reduce: Reduce },
    /// Registers of a warp, stored to shared memory of another CTA.
    Send { pieces: Vec<Piece>, to: usize, mbarrier: u32, reduce: Reduce },
    /// A bulk or tensor store; `captured` once the source was read.
    Store { rows: RowCopy, reduce: Reduce, captured: Option<Vec<u8>> },
    /// `wgmma.mma_async` by four warps.
    Wgmma { a: Option<u64>, b: u64, scale_d: bool },
}

/// What one lane stores to shared memory of another CTA.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) offset: u32,
    pub(crate) data: Vec<u8>,
}

/// `cp.async` of one lane: `fill` zeros follow the bytes read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneCopy {
    pub(crate) offset: u32,
    pub(crate) source: u64,
    pub(crate) read: u32,
    pub(crate) fill: u32,
}

/// Rows between global memory and a box in shared memory.
#[derive(Clone, Debug)]
pub(crate) struct RowCopy {
    pub(crate) rows: Vec<BoxRow>,
    pub(crate) row_bytes: u32,
    /// Start of the box in shared memory.
    pub(crate) base: u32,
    pub(crate) swizzle: Swizzle,
}

impl RowCopy {
    /// Bytes that stay together.
    pub(crate) fn plain(base: u32, bytes: u32) -> Self {
        let rows = vec![BoxRow { offset: 0, skip: 0, address: 0, inside: bytes }];
        Self { rows, row_bytes: bytes, base, swizzle: Swizzle::None }
    }

    /// Bytes of the box.
    pub(crate) fn bytes(&self) -> u32 {
        self.row_bytes * self.rows.len() as u32
    }

    /// The pieces of a row that stay together under the swizzle: (offset in shared memory, range in the row).
    pub(crate) fn pieces(&self, row: &BoxRow) -> impl Iterator<Item = (u32, std::ops::Range<usize>)> {
        let (start, swizzle) = (self.base + row.offset, self.swizzle);
        let len = self.row_bytes;
        let step = if swizzle == Swizzle::None { len.max(1) } else { 16 };
        (0..len).step_by(step as usize).map(move |at| {
            let end = (at + step).min(len);
            (swizzle.apply(start + at), at as usize..end as usize)
        })
    }

    /// Offset and length in shared memory of what belongs to the tensor; a store leaves the rest of the box alone.
    pub(crate) fn inside(&self) -> impl Iterator<Item = (u32, usize)> {
        self.rows.iter().flat_map(|row| {
            let (low, high) = (row.skip as usize, (row.skip + row.inside) as usize);
            let part = move |(offset, piece): (u32, std::ops::Range<usize>)| {
                let start = piece.start.max(low);
                (offset + (start - piece.start) as u32, piece.end.min(high).saturating_sub(start))
            };
            self.pieces(row).map(part).filter(|(_, len)| *len > 0)
        })
    }
}

impl Engine {
    /// Whether work of a cluster is unfinished.
    pub(crate) fn has_work_of(&self, cluster: usize) -> bool {
        self.jobs.iter().any(|j| j.cluster == cluster)
    }

    /// Drops work that will never be finished.
    pub(crate) fn discard(&mut self, unwanted: impl Fn(&Job) -> bool) {
        self.jobs.retain(|j| !unwanted(j));
    }
}

impl Machine<'_> {
    /// Queues work, or does it at once where the timing is early.
    pub(crate) fn issue(&mut self, job: Job) {
        self.counters.async_bytes += job.work.bytes();
        self.engine.jobs.push(job);
        if self.context.options.timing == Timing::Early {
            let last = self.engine.jobs.len() - 1;
            self.finish(last);
        }
    }

    /// Completes one piece of work, if there is any.
    pub(crate) fn complete_something(&mut self) -> bool {
        if self.engine.jobs.is_empty() {
            return false;
        }
        let any = match self.context.options.timing {
            Timing::OutOfOrder => self.rng.below(self.engine.jobs.len()),
            _ => 0,
        };
        self.finish(any);
        true
    }

    /// Completes all work that matches, in order of issue.
    pub(crate) fn complete_all(&mut self, wanted: impl Fn(&Job) -> bool) {
        while let Some(at) = self.engine.jobs.iter().position(&wanted) {
            self.finish(at);
        }
    }

    /// Completes a job; of a queue that completes in order, its oldest one.
    fn finish(&mut self, at: usize) {
        let chosen = &self.engine.jobs[at];
        let same_queue = |j: &Job| j.warp == chosen.warp && j.work.queue() == chosen.work.queue();
        let first = match chosen.work.queue() {
            Queue::Unordered => at,
            _ => self.engine.jobs.iter().position(same_queue).unwrap_or(at),
        };
        let job = self.engine.jobs.remove(first);
        self.effect();
        self.perform(job);
    }

    fn perform(&mut self, job: Job) {
        match &job.work {
            Work::Copy(lanes) => lanes.iter().for_each(|lane| self.copy_lane(job.cta, lane)),
            Work::CopyArrive { offset } => self.deferred_arrival(&job, *offset),
            Work::Load { rows, ctas, mbarrier } => {
                let data = self.gather_global(rows);
                for &cta in ctas {
                    self.scatter_shared(cta, rows, &data);
                    self.transaction(&job, cta, *mbarrier, rows.bytes());
                }
            }
            Work::Remote { from, bytes, to, offset, mbarrier, reduce } => {
                let data = self.shared_bytes(job.cta, *from, *bytes as usize);
                self.merge_shared(*to, *offset, &data, *reduce);
                self.transaction(&job, *to, *mbarrier, *bytes);
            }
            Work::Send { pieces, to, mbarrier, reduce } => {
                pieces.iter().for_each(|piece| self.merge_shared(*to, piece.offset, &piece.data, *reduce));
                self.transaction(&job, *to, *mbarrier, job.work.bytes() as u32);
            }
            Work::Store { rows, reduce, captured } => {
                let data = match captured {
                    Some(data) => data.clone(),
                    None => self.gather_shared(job.cta, rows),
                };
                self.scatter_global(rows, &data, *reduce);
            }
            Work::Wgmma { a, b, scale_d } => {
                let program = self.context.program;
                if let Uop::Wgmma(op) = &program.code[job.pc as usize].uop {
                    wgmma_product(self, job.cta, job.warp, op, *a, *b, *scale_d);
                }
            }
        }
    }

    /// Reads the sources of a warp's bulk stores up to a group, so that the memory may be reused.
    pub(crate) fn capture_stores(&mut self, wanted: impl Fn(&Job) -> bool) {
        for at in 0..self.engine.jobs.len() {
            let job = &self.engine.jobs[at];
            if let (true, Work::Store { rows, captured: None, .. }) = (wanted(job), &job.work) {
                let data = self.gather_shared(job.cta, rows);
                if let Work::Store { captured, .. } = &mut self.engine.jobs[at].work {
                    *captured = Some(data);
                }
            }
        }
    }

    fn copy_lane(&mut self, cta: usize, lane: &LaneCopy) {
        let mut data = [0; 16];
        let read = lane.read as usize;
        if let Ok((allocation, range)) = self.global.find(lane.source, read) {
            data[..read].copy_from_slice(&allocation.bytes[range]);
        }
        self.store_shared(cta, lane.offset, &data[..read + lane.fill as usize]);
    }

    fn gather_global(&mut self, copy: &RowCopy) -> Vec<u8> {
        let mut data = vec![0; copy.bytes() as usize];
        for row in copy.rows.iter().filter(|r| r.inside > 0) {
            if let Ok((allocation, range)) = self.global.find(row.address, row.inside as usize) {
                let start = (row.offset + row.skip) as usize;
                data[start..start + row.inside as usize].copy_from_slice(&allocation.bytes[range]);
            }
        }
        data
    }

    fn scatter_shared(&mut self, cta: usize, copy: &RowCopy, data: &[u8]) {
        for row in &copy.rows {
            let bytes = &data[row.offset as usize..][..copy.row_bytes as usize];
            for (offset, range) in copy.pieces(row) {
                self.store_shared(cta, offset, &bytes[range]);
            }
        }
    }

    fn gather_shared(&self, cta: usize, copy: &RowCopy) -> Vec<u8> {
        let mut data = Vec::with_capacity(copy.bytes() as usize);
        for row in &copy.rows {
            for (offset, range) in copy.pieces(row) {
                data.extend(self.shared_bytes(cta, offset, range.len()));
            }
        }
        data
    }

    fn scatter_global(&mut self, copy: &RowCopy, data: &[u8], reduce: Reduce) {
        for row in copy.rows.iter().filter(|r| r.inside > 0) {
            let bytes = &data[(row.offset + row.skip) as usize..][..row.inside as usize];
            if let Ok((allocation, range)) = self.global.find(row.address, bytes.len()) {
                allocation.written.mark(range.clone());
                match reduce {
                    None => allocation.bytes[range].copy_from_slice(bytes),
                    Some((op, ty)) => reduce_bytes(&mut allocation.bytes[range], bytes, op, ty),
                }
            }
        }
    }

    fn merge_shared(&mut self, cta: usize, offset: u32, data: &[u8], reduce: Reduce) {
        let Some((op, ty)) = reduce else { return self.store_shared(cta, offset, data) };
        let mut merged = self.shared_bytes(cta, offset, data.len());
        reduce_bytes(&mut merged, data, op, ty);
        self.store_shared(cta, offset, &merged);
    }

    fn store_shared(&mut self, cta: usize, offset: u32, data: &[u8]) {
        let shared = &mut self.ctas[cta].shared;
        if let Ok(range) = shared.range(offset, data.len()) {
            shared.store(range.start, data);
        }
    }

    fn shared_bytes(&self, cta: usize, offset: u32, len: usize) -> Vec<u8> {
        let shared = &self.ctas[cta].shared;
        shared.range(offset, len).map_or_else(|_| vec![0; len], |range| shared.bytes(range).to_vec())
    }
}

/// Work of one queue completes in order of issue.
#[derive(PartialEq, Eq)]
enum Queue {
    Copies,
    Wgmma,
    Unordered,
}

impl Work {
    fn queue(&self) -> Queue {
        match self {
            Self::Copy(_) | Self::CopyArrive { .. } => Queue::Copies,
            Self::Wgmma { .. } => Queue::Wgmma,
            _ => Queue::Unordered,
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Copy(lanes) => lanes.iter().map(|l| u64::from(l.read)).sum(),
            Self::Load { rows, .. } | Self::Store { rows, .. } => rows.bytes().into(),
            Self::Remote { bytes, .. } => (*bytes).into(),
            Self::Send { pieces, .. } => pieces.iter().map(|piece| piece.data.len() as u64).sum(),
            Self::CopyArrive { .. } | Self::Wgmma { .. } => 0,
        }
    }
}
