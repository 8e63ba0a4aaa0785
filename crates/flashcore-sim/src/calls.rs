//! The call stacks of a warp: each lane has its own, since lanes may call different functions, or one at different depths.

use crate::regfile::SavedLane;

/// Call stacks, lane by lane.
#[derive(Debug)]
pub(crate) struct Calls {
    stacks: [Vec<Frame>; 32],
    /// Where each lane's frame begins in local memory.
    bases: [u32; 32],
    /// Bytes that each lane has taken by `alloca`.
    pub(crate) allocated: [u32; 32],
}

/// What a call must put back.
#[derive(Debug)]
pub(crate) struct Frame {
    /// The call instruction.
    from: u32,
    /// The caller's frame.
    base: u32,
    /// What the caller had taken by `alloca`.
    allocated: u32,
    /// Registers of the function that an unfinished call of it still needs.
    pub(crate) saved: Option<SavedLane>,
}

impl Default for Calls {
    fn default() -> Self {
        Self { stacks: std::array::from_fn(|_| Vec::new()), bases: [0; 32], allocated: [0; 32] }
    }
}

impl Calls {
    /// Where a lane's frame begins.
    pub(crate) const fn base(&self, lane: usize) -> u32 {
        self.bases[lane]
    }

    /// A lane calls from the instruction at `from`, whose frame has `bytes`.
    pub(crate) fn enter(&mut self, lane: usize, from: u32, bytes: u32, saved: Option<SavedLane>) {
        self.stacks[lane].push(Frame {
            from,
            base: self.bases[lane],
            allocated: self.allocated[lane],
            saved,
        });
        self.bases[lane] += bytes;
    }

    /// Where a lane was called from; `None` where it is in the kernel itself.
    pub(crate) fn called_from(&self, lane: usize) -> Option<u32> {
        self.stacks[lane].last().map(|frame| frame.from)
    }

    /// A lane returns.
    pub(crate) fn leave(&mut self, lane: usize) -> Option<Frame> {
        let frame = self.stacks[lane].pop()?;
        self.bases[lane] = frame.base;
        self.allocated[lane] = frame.allocated;
        Some(frame)
    }
}
