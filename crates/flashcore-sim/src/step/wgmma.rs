//! `wgmma`: four warps multiply 64×k by k×n, asynchronously.

use super::{
    Flow, Outcome, Step,
    mma::{canonical, integer_sum},
    tensor::{Matrix, decoder, packed},
};
use crate::{
    check::{
        clock::Knowledge,
        race::{Accessor, Proxy},
    },
    engine::Work,
    finding::FindingKind,
    machine::Machine,
    numeric::{F16, Rounding},
    program::{Element, Reg, Src, Wgmma, WgmmaA},
    regfile::lanes_of,
    warp::Wait,
};
use flashcore_ptx::layout::{Major, MatrixDescriptor, Place, warpgroup_fragment};

/// Rows of a warpgroup's tile.
const ROWS: usize = 64;
/// Bytes that stay together in shared memory under every layout.
const CHUNK: u32 = 16;

/// Sixteen bytes of an operand: where they lie, and the element (mn, k) they start with.
struct Chunk {
    offset: u32,
    mn: u32,
    k: u32,
}

/// An operand in shared memory.
#[derive(Clone, Copy)]
struct Operand {
    descriptor: MatrixDescriptor,
    major: Major,
    element: Element,
    /// Extent along M or N, and along K.
    extent: (u32, u32),
}

impl Operand {
    fn new(bits: u64, transposed: bool, element: Element, extent: (usize, usize)) -> Self {
        Self {
            descriptor: MatrixDescriptor::decode(bits),
            major: if transposed { Major::Mn } else { Major::K },
            element,
            extent: (extent.0 as u32, extent.1 as u32),
        }
    }

    /// The operand as pieces that are contiguous in shared memory.
    fn chunks(self) -> impl Iterator<Item = Chunk> {
        let bytes = self.element.bits() / 8;
        let across = CHUNK / bytes;
        let (mn_step, k_step) = match self.major {
            Major::K => (1, across),
            Major::Mn => (across, 1),
        };
        let (mn_extent, k_extent) = self.extent;
        (0..mn_extent).step_by(mn_step as usize).flat_map(move |mn| {
            (0..k_extent).step_by(k_step as usize).map(move |k| {
                let offset = self.descriptor.element_address(self.major, bytes, mn, k);
                Chunk { offset, mn, k }
            })
        })
    }

    /// The operand as a dense matrix: mn × k, or k × mn where `k_first`.
    fn gather(self, machine: &Machine<'_>, cta: usize, k_first: bool) -> Matrix {
        let (mn, k) = (self.extent.0 as usize, self.extent.1 as usize);
        let mut matrix = if k_first { Matrix::zero(k, mn) } else { Matrix::zero(mn, k) };
        let shared = &machine.ctas[cta].shared;
        let (bytes, decode) = ((self.element.bits() / 8) as usize, decoder(self.element));
        for chunk in self.chunks() {
            let Ok(range) = shared.range(chunk.offset, CHUNK as usize) else { continue };
            for (i, element) in shared.bytes(range).chunks_exact(bytes).enumerate() {
                let (mn, k) = match self.major {
                    Major::K => (chunk.mn as usize, chunk.k as usize + i),
                    Major::Mn => (chunk.mn as usize + i, chunk.k as usize),
                };
                let mut word = [0; 4];
                word[..bytes].copy_from_slice(element);
                let value = decode(u32::from_le_bytes(word));
                if k_first { matrix.set(k, mn, value) } else { matrix.set(mn, k, value) }
            }
        }
        matrix
    }
}

impl Wgmma {
    fn operand_a(&self, bits: u64) -> Operand {
        Operand::new(bits, self.transpose_a, self.element, (ROWS, self.k))
    }

    /// Whether elements are floats of 8 bits.
    const fn is_narrow(&self) -> bool {
        matches!(self.element, Element::Small(_, 8))
    }

    /// Whether D holds integers.
    const fn is_integer(&self) -> bool {
        matches!(self.element, Element::U8 | Element::S8)
    }

    fn operand_b(&self, bits: u64) -> Operand {
        Operand::new(bits, self.transpose_b, self.right, (self.n, self.k))
    }
}

impl Step<'_, '_> {
    /// Warps wait for each other; the last one issues for all four.
    pub(super) fn wgmma(&mut self, op: &Wgmma) -> Outcome {
        if let Some(flow) = self.whole_warp("wgmma")? {
            return Ok(flow);
        }
        let leader = self.leader();
        if leader + 4 > (self.cta + 1) * self.machine.context.geometry.warps as usize {
            let text = "wgmma needs a warpgroup of four warps".into();
            return self.halt(FindingKind::DivergentAligned, 0, text);
        }
        self.claim_registers(op);
        let (warp, pc) = (self.warp, self.pc);
        let others = || (leader..leader + 4).filter(|&w| w != warp);
        let here = |w: usize| {
            let splits = &self.machine.warps[w].splits;
            splits.iter().any(|s| s.pc == pc && s.wait == Wait::Warpgroup)
        };
        if !others().all(here) {
            return Ok(Flow::Wait(Wait::Warpgroup));
        }
        self.issue_wgmma(op, leader)?;
        for other in others() {
            self.machine.warps[other].pass(|wait| wait == Wait::Warpgroup);
        }
        Ok(Flow::Next)
    }

    /// The first warp of the warpgroup.
    fn leader(&self) -> usize {
        self.warp - self.machine.warps[self.warp].index as usize % 4
    }

    /// This warp's registers belong to the wgmma from now on.
    fn claim_registers(&mut self, op: &Wgmma) {
        let checks = self.machine.context.options.checks;
        let reads_d = self.read_mask(op.scale_d) != 0;
        let registers = &mut self.machine.warps[self.warp].registers;
        let d: Vec<u32> = op.d.iter().filter_map(|r| narrow(*r)).collect();
        let a: Vec<u32> = match &op.a {
            WgmmaA::Registers(regs) => regs.iter().filter_map(|r| narrow(*r)).collect(),
            WgmmaA::Descriptor(_) => Vec::new(),
        };
        let touches = || d.iter().chain(&a).filter_map(|&slot| registers.touched_since_fence(slot));
        let unfenced = touches().any(|moved| !moved) || !registers.was_fenced();
        let moved = !unfenced && touches().any(|moved| moved);
        let needed = a.iter().chain(if reads_d { d.as_slice() } else { &[] });
        let uninit = needed.into_iter().any(|&slot| !registers.is_written(slot));
        d.iter().for_each(|&slot| registers.promise(slot));
        d.iter().chain(&a).for_each(|&slot| registers.take(slot));
        self.machine.warps[self.warp].wgmma.open.extend(d.iter().chain(&a));
        if unfenced && checks.in_flight {
            let text = "registers of this wgmma were touched since the last wgmma.fence".into();
            self.report(FindingKind::MissingWgmmaFence, 0, text);
        }
        if moved && checks.in_flight {
            let text = "registers of this wgmma were set by moves since the last wgmma.fence".into();
            self.report(FindingKind::UnfencedInit, 0, text);
        }
        if uninit && checks.init {
            let text = "a register of this wgmma was never written".into();
            self.report(FindingKind::UninitRegister, 0, text);
        }
    }

    fn issue_wgmma(&mut self, op: &Wgmma, leader: usize) -> Outcome<()> {
        let a = match op.a {
            WgmmaA::Descriptor(src) => Some(self.agreed(src, leader)?),
            WgmmaA::Registers(_) => None,
        };
        let b = self.agreed(op.b, leader)?;
        let scale_d = self.agreed(op.scale_d, leader)? & 1 == 1;
        self.machine.counters.tensor_macs += (ROWS * op.n * op.k) as u64;
        let mut defined = self.enter_operand(leader, op.operand_b(b))?;
        if let Some(bits) = a {
            defined &= self.enter_operand(leader, op.operand_a(bits))?;
        }
        self.define_results(op, leader, defined, scale_d);
        let group = self.machine.warps[leader].wgmma.committed;
        let warp = std::mem::replace(&mut self.warp, leader);
        self.issue(group, u32::MAX, Knowledge::default(), Work::Wgmma { a, b, scale_d });
        self.warp = warp;
        Ok(())
    }

    /// What is made of unwritten memory is undefined, and so is what is made of that: reported where it is used.
    fn define_results(&mut self, op: &Wgmma, leader: usize, defined: bool, reads_d: bool) {
        for warp in leader..leader + 4 {
            let registers = &mut self.machine.warps[warp].registers;
            for slot in op.d.iter().filter_map(|r| narrow(*r)) {
                let keeps = reads_d && registers.is_undefined(slot);
                registers.define(slot, defined && !keeps);
            }
        }
    }

    /// A value that all lanes of all four warps must share.
    fn agreed(&mut self, src: Src, leader: usize) -> Outcome<u64> {
        let value = self.read(src)[0];
        let warp = self.warp;
        let mut same = true;
        for other in leader..leader + 4 {
            self.warp = other;
            let values = self.read(src);
            same &= values.iter().all(|v| *v == value);
        }
        self.warp = warp;
        if same {
            return Ok(value);
        }
        let text = "the lanes of the warpgroup disagree about a descriptor or scale-d".into();
        self.halt(FindingKind::DescriptorMismatch, 0, text)
    }

    /// Judges and enters the reads of an operand, for all four warps; whether all of it was ever written.
    fn enter_operand(&mut self, leader: usize, operand: Operand) -> Outcome<bool> {
        let checks = self.machine.context.options.checks;
        let cta = self.cta;
        let cluster = self.machine.ctas[cta].cluster;
        let known = self.common_knowledge(leader);
        let warp = &self.machine.warps[leader];
        let who = Accessor {
            knowledge: &known,
            agent: self.machine.clusters[cluster].agents.wgmma(warp.agent),
            clock: warp.wgmma.committed + 1,
            home: u32::MAX,
            lane: 0,
            synced: 0,
            copies: 0,
            peer: None,
            proxy: Proxy::Async,
            strong: false,
            pc: self.pc,
        };
        let (mut conflict, mut fault, mut written) = (None, None, true);
        let shared = &mut self.machine.ctas[cta].shared;
        for chunk in operand.chunks() {
            match shared.range(chunk.offset, CHUNK as usize) {
                Ok(range) => {
                    written &= shared.written.covers(range.clone());
                    if checks.tracks_order() {
                        conflict = conflict.or(shared.shadow.read(range, &who).err());
                    }
                }
                Err(text) => fault = fault.or(Some(text)),
            }
        }
        if let Some(text) = fault {
            return self.halt(FindingKind::OutOfBounds, 0, format!("a wgmma operand: {text}"));
        }
        if let Some(conflict) = conflict {
            self.report_conflict(conflict, 0, false, Proxy::Async);
        }
        Ok(written)
    }

    /// What all four warps of a warpgroup know, their own past included.
    fn common_knowledge(&self, leader: usize) -> Knowledge {
        let view = |w: usize| {
            let warp = &self.machine.warps[w];
            let mut knowledge = warp.clock.union(u32::MAX);
            knowledge.seen.raise(warp.agent, warp.clock.now);
            knowledge
        };
        let mut common = view(leader);
        for warp in leader + 1..leader + 4 {
            let other = view(warp);
            common.seen = common.seen.meet(&other.seen);
            common.fenced = common.fenced.meet(&other.fenced);
        }
        common
    }

    pub(super) fn wgmma_fence(&mut self) -> Outcome {
        if let Some(flow) = self.whole_warp("wgmma.fence")? {
            return Ok(flow);
        }
        self.machine.warps[self.warp].registers.fence();
        Ok(Flow::Next)
    }

    pub(super) fn wgmma_commit(&mut self) -> Outcome {
        if let Some(flow) = self.whole_warp("wgmma.commit_group")? {
            return Ok(flow);
        }
        let queue = &mut self.machine.warps[self.warp].wgmma;
        queue.committed += 1;
        let registers = std::mem::take(&mut queue.open);
        queue.pending.push_back(registers);
        Ok(Flow::Next)
    }

    /// Waits until at most `keep` groups are pending: their registers are free again.
    pub(super) fn wgmma_wait(&mut self, keep: u32) -> Outcome {
        if let Some(flow) = self.whole_warp("wgmma.wait_group")? {
            return Ok(flow);
        }
        let leader = self.leader();
        let done = self.machine.warps[self.warp].wgmma.committed.saturating_sub(keep);
        self.machine.complete_all(|job| {
            job.warp == leader && job.group < done && matches!(job.work, Work::Wgmma { .. })
        });
        let warp = &mut self.machine.warps[self.warp];
        while warp.wgmma.pending.len() > keep as usize {
            let registers = warp.wgmma.pending.pop_front().unwrap_or_default();
            registers.into_iter().for_each(|slot| warp.registers.give_back(slot));
        }
        let agents = self.machine.clusters[self.machine.ctas[self.cta].cluster].agents;
        let agent = agents.wgmma(self.machine.warps[leader].agent);
        self.learn_clock(agent, done);
        self.meet();
        Ok(Flow::Next)
    }
}

const fn narrow(reg: Reg) -> Option<u32> {
    match reg {
        Reg::Narrow(slot) => Some(slot),
        _ => None,
    }
}

/// Carries out a wgmma of the warpgroup led by resident warp `leader`.
pub(crate) fn wgmma_product(
    machine: &mut Machine<'_>,
    cta: usize,
    leader: usize,
    op: &Wgmma,
    a: Option<u64>,
    b: u64,
    scale_d: bool,
) {
    let mut left = match (&op.a, a) {
        (WgmmaA::Registers(regs), _) => registers_a(machine, leader, op, regs),
        (_, bits) => op.operand_a(bits.unwrap_or(0)).gather(machine, cta, false),
    };
    let mut right = op.operand_b(b).gather(machine, cta, true);
    negate(&mut left, op.negate_a);
    negate(&mut right, op.negate_b);
    let mut d = Matrix::zero(ROWS, op.n);
    if scale_d && !op.is_integer() {
        each_register(op, |thread, register, shift, at| {
            let word = word_of(machine, leader, thread, op.d[register]);
            let value = match op.accumulate_f16 {
                true => F16.decode(word >> shift & 0xffff) as f32,
                false => f32::from_bits(word),
            };
            d.set(at.row as usize, at.col as usize, value);
        });
    }
    match op.is_narrow() {
        true => d.add_narrow_product(&left, &right),
        false => d.add_product(&left, &right),
    }
    store_result(machine, leader, op, &d, scale_d);
}

fn negate(matrix: &mut Matrix, yes: bool) {
    if yes {
        matrix.values.iter_mut().for_each(|v| *v = -*v);
    }
}

fn word_of(machine: &Machine<'_>, leader: usize, thread: usize, reg: Reg) -> u32 {
    match reg {
        Reg::Narrow(slot) => machine.warps[leader + thread / 32].registers.words(slot)[thread % 32],
        _ => 0,
    }
}

fn registers_a(machine: &Machine<'_>, leader: usize, op: &Wgmma, regs: &[Reg]) -> Matrix {
    let per_register = 32 / op.element.bits();
    let mut matrix = Matrix::zero(ROWS, op.k);
    let value = packed(op.element);
    each_element(per_register * regs.len() as u32, per_register, |thread, i, at| {
        let word = word_of(machine, leader, thread, regs[(i / per_register) as usize]);
        matrix.set(at.row as usize, at.col as usize, value(word, i % per_register));
    });
    matrix
}

/// Calls `f(thread, i, place)` for the `count` elements of every thread of a warpgroup.
///
/// A place is the sum of what the thread and what the element contribute, so few of them have to be worked out.
fn each_element(count: u32, per_register: u32, mut f: impl FnMut(usize, u32, Place)) {
    let threads: [Place; 128] = std::array::from_fn(|t| warpgroup_fragment(t as u32, 0, per_register));
    for i in 0..count {
        let element = warpgroup_fragment(0, i, per_register);
        for (thread, start) in threads.iter().enumerate() {
            f(thread, i, Place { row: start.row + element.row, col: start.col + element.col });
        }
    }
}

/// Calls `f(thread, register, shift, place)` for every element of D.
fn each_register(op: &Wgmma, mut f: impl FnMut(usize, usize, u32, Place)) {
    each_element(op.n as u32 / 2, 2, |thread, i, at| {
        let (register, shift) = if op.accumulate_f16 { (i / 2, 16 * (i % 2)) } else { (i, 0) };
        f(thread, register as usize, shift, at);
    });
}

fn store_result(machine: &mut Machine<'_>, leader: usize, op: &Wgmma, d: &Matrix, scale_d: bool) {
    let mut words = vec![[0u32; 128]; op.d.len()];
    each_register(op, |thread, register, shift, at| {
        let value = d.at(at.row as usize, at.col as usize);
        words[register][thread] |= match op.accumulate_f16 {
            true => F16.encode(value.into(), Rounding::NearestEven) << shift,
            false if op.is_integer() => {
                // A single product of bytes is exact in f32; the running sum need not be.
                let old = if scale_d { word_of(machine, leader, thread, op.d[register]) } else { 0 };
                integer_sum(old, value as i32, op.saturate)
            }
            false => canonical(value),
        };
    });
    for (reg, words) in op.d.iter().zip(&words) {
        let Reg::Narrow(slot) = *reg else { continue };
        for warp in 0..4 {
            let lanes = lanes_of(u32::MAX).map(|lane| words[warp * 32 + lane]);
            let mut row = [0; 32];
            row.iter_mut().zip(lanes).for_each(|(to, from)| *to = from);
            machine.warps[leader + warp].registers.set_result(slot, row);
        }
    }
}
