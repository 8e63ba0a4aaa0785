//! Scratch memory that calls reuse: nothing is allocated once it is large enough.

use crate::plan::Plan;

/// Elements of a cache line.
const LINE: usize = 16;

#[repr(C, align(64))]
#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
struct Line([f32; LINE]);

/// Floats aligned to cache lines, growing on demand.
#[derive(Default)]
pub(crate) struct Buffer(Vec<Line>);

impl Buffer {
    /// `len` floats with whatever they held before.
    pub(crate) fn get(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(LINE);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; LINE]));
        }
        &mut bytemuck::cast_slice_mut(&mut self.0)[..len]
    }

    fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<Line>()
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes())
    }
}

/// Takes `len` floats, rounded up to whole cache lines, from the front of `rest`.
pub(crate) fn take<'a>(rest: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (taken, left) = std::mem::take(rest).split_at_mut(padded(len));
    *rest = left;
    &mut taken[..len]
}

/// What [`take`] uses up for `len` floats.
pub(crate) fn padded(len: usize) -> usize {
    len.next_multiple_of(LINE)
}

/// What one thread works with.
#[derive(Default, Debug)]
pub(crate) struct Worker {
    pub(crate) buffer: Buffer,
    /// Rows to compute again, alone.
    pub(crate) redo: Vec<usize>,
    /// Visible keys of each row.
    pub(crate) visible: Vec<[usize; 2]>,
}

impl Worker {
    /// Makes room for units of up to `rows` rows that need `floats` floats.
    pub(crate) fn reserve(&mut self, floats: usize, rows: usize) {
        self.buffer.get(floats);
        self.visible.clear();
        self.visible.reserve(rows);
    }
}

/// Working memory of a call, reusable by the next one.
///
/// [`crate::Cpu`] keeps some of its own; pass one to [`crate::Cpu::run_with`] to decide where it lives.
#[derive(Default, Debug)]
pub struct Scratch {
    pub(crate) workers: Vec<Worker>,
    pub(crate) plan: Plan,
    pub(crate) partials: Buffer,
}

impl Scratch {
    /// Empty; it grows with the first call.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let workers = self.workers.iter().map(|w| {
            w.buffer.bytes()
                + w.redo.capacity() * size_of::<usize>()
                + w.visible.capacity() * size_of::<[usize; 2]>()
        });
        workers.sum::<usize>() + self.partials.bytes() + self.plan.bytes()
    }
}
