//! The registers of one warp, with what the checkers know about each: written or not, in flight, last touched.

use crate::program::{Lanes, Reg, RegisterCounts};
use std::{array::from_fn, collections::BTreeMap};

/// Why a register must not be touched now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RegisterFault {
    /// No value was ever written, in some lane.
    Uninit,
    /// An unfinished wgmma owns it.
    InFlight,
    /// A wgmma made it from shared memory that nobody had written.
    Undefined,
}

/// When a register was last touched, and by what.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Touch {
    /// Number of the `wgmma.fence` after which that was, from 1.
    fence: u32,
    /// Whether nothing but moves has touched it since.
    moves: bool,
}

#[derive(Clone, Copy, Default, Debug)]
struct State {
    /// Lanes that were written.
    written: u32,
    /// Unfinished wgmmas that use it.
    in_flight: u32,
    /// When it was last touched, and how.
    touch: Touch,
    /// Its value comes from unwritten memory.
    undefined: bool,
}

/// The registers of one function, of one lane: those of an unfinished call while another runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct SavedLane {
    narrow: Vec<(u32, bool)>,
    wide: Vec<(u64, bool)>,
    predicates: Vec<(bool, bool)>,
}

/// Register slots from the first counts up to the second.
pub(crate) type RegisterRange = (RegisterCounts, RegisterCounts);

/// The registers of a warp.
#[derive(Debug)]
pub(crate) struct RegFile {
    narrow: Vec<[u32; 32]>,
    wide: Vec<Lanes>,
    predicates: Vec<u32>,
    narrow_state: Vec<State>,
    wide_written: Vec<u32>,
    predicate_written: Vec<u32>,
    /// `wgmma.fence`s executed so far, plus one.
    fences: u32,
    /// Registers whose value depends on what nobody wrote, and where that came from.
    origins: BTreeMap<Reg, Origin>,
    /// What registers would hold in undefined lanes if what nobody wrote were something else: bits that differ mean nothing.
    others: BTreeMap<Reg, Lanes>,
}

/// The instruction that first read what means nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Origin {
    pub(crate) pc: u32,
    pub(crate) cause: Cause,
}

/// Why a value means nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cause {
    /// A register, or local memory, that was never written.
    Register,
    /// Shared memory that was never written.
    Shared,
    /// Global memory written by others, unordered.
    Race,
}

impl RegFile {
    pub(crate) fn new(counts: RegisterCounts) -> Self {
        let (narrow, wide, predicates) =
            (counts.narrow as usize, counts.wide as usize, counts.predicates as usize);
        Self {
            narrow: vec![[0; 32]; narrow],
            wide: vec![[0; 32]; wide],
            predicates: vec![0; predicates],
            narrow_state: vec![State::default(); narrow],
            wide_written: vec![0; wide],
            predicate_written: vec![0; predicates],
            fences: 1,
            origins: BTreeMap::new(),
            others: BTreeMap::new(),
        }
    }

    /// The values of a register.
    pub(crate) fn lanes(&self, reg: Reg) -> Lanes {
        let mut values = [0; 32];
        self.lanes_into(reg, &mut values);
        values
    }

    /// The same, where they are wanted.
    pub(crate) fn lanes_into(&self, reg: Reg, values: &mut Lanes) {
        match reg {
            Reg::Narrow(slot) => {
                let words = &self.narrow[slot as usize];
                values.iter_mut().zip(words).for_each(|(value, word)| *value = (*word).into());
            }
            Reg::Wide(slot) => *values = self.wide[slot as usize],
            Reg::Predicate(slot) => {
                let bits = self.predicates[slot as usize];
                (0..).zip(values).for_each(|(lane, value)| *value = u64::from(bits >> lane & 1));
            }
        }
    }

    /// The 32-bit values of a narrow register.
    pub(crate) fn words(&self, slot: u32) -> &[u32; 32] {
        &self.narrow[slot as usize]
    }

    /// The lanes of the mask in which the register holds nothing that means anything.
    pub(crate) fn undefined_lanes(&self, reg: Reg, mask: u32) -> u32 {
        let written = match reg {
            Reg::Narrow(slot) => self.narrow_state[slot as usize].written,
            Reg::Wide(slot) => self.wide_written[slot as usize],
            Reg::Predicate(slot) => self.predicate_written[slot as usize],
        };
        mask & !written
    }

    /// What the register holds in some lanes depends on what nobody wrote: with something else there it would hold `other`,
    /// if that is known.
    pub(crate) fn undefine(&mut self, reg: Reg, lanes: u32, origin: Origin, other: Option<&Lanes>) {
        *match reg {
            Reg::Narrow(slot) => &mut self.narrow_state[slot as usize].written,
            Reg::Wide(slot) => &mut self.wide_written[slot as usize],
            Reg::Predicate(slot) => &mut self.predicate_written[slot as usize],
        } &= !lanes;
        self.origins.insert(reg, origin);
        let flipped = self.flipped(reg);
        let own = self.others.entry(reg).or_insert(flipped);
        lanes_of(lanes).for_each(|lane| own[lane] = other.unwrap_or(&flipped)[lane]);
    }

    /// What the register would hold if the unwritten input were different.
    pub(crate) fn other(&self, reg: Reg) -> Lanes {
        self.others.get(&reg).copied().unwrap_or_else(|| self.flipped(reg))
    }

    /// Every bit of a register flipped.
    fn flipped(&self, reg: Reg) -> Lanes {
        let all = match reg {
            Reg::Wide(_) => u64::MAX,
            Reg::Narrow(_) => 0xffff_ffff,
            Reg::Predicate(_) => 1,
        };
        self.lanes(reg).map(|value| value ^ all)
    }

    /// Where the register's value came from, if it depends on what nobody wrote.
    pub(crate) fn origin(&self, reg: Reg) -> Option<Origin> {
        self.origins.get(&reg).copied()
    }

    /// A predicate as a mask of lanes.
    pub(crate) fn predicate(&self, slot: u32) -> u32 {
        self.predicates[slot as usize]
    }

    /// Why lanes in `mask` must not read the register, if so. Remembers that it was touched.
    pub(crate) fn check_read(&mut self, reg: Reg, mask: u32) -> Option<RegisterFault> {
        let written = match reg {
            Reg::Narrow(slot) => {
                let state = &mut self.narrow_state[slot as usize];
                state.touch = Touch { fence: self.fences, moves: false };
                match state {
                    State { in_flight: 1.., .. } => return Some(RegisterFault::InFlight),
                    State { undefined: true, .. } => return Some(RegisterFault::Undefined),
                    _ => state.written,
                }
            }
            Reg::Wide(slot) => self.wide_written[slot as usize],
            Reg::Predicate(slot) => self.predicate_written[slot as usize],
        };
        (written & mask != mask).then_some(RegisterFault::Uninit)
    }

    /// Writes the lanes in `mask`; whether an unfinished wgmma owned the register.
    pub(crate) fn write(&mut self, reg: Reg, mask: u32, values: &Lanes) -> Option<RegisterFault> {
        match reg {
            Reg::Narrow(slot) => self.write_narrow(slot as usize, mask, values),
            Reg::Wide(slot) => {
                self.wide_written[slot as usize] |= mask;
                each_lane(mask, |lane| self.wide[slot as usize][lane] = values[lane]);
                None
            }
            Reg::Predicate(slot) => {
                let bits = (0..32).fold(0, |bits, lane| bits | ((values[lane] & 1) as u32) << lane);
                self.write_predicate(slot, mask, bits);
                None
            }
        }
    }

    fn write_narrow(&mut self, slot: usize, mask: u32, values: &Lanes) -> Option<RegisterFault> {
        let row = &mut self.narrow[slot];
        if mask == u32::MAX {
            *row = from_fn(|i| values[i] as u32);
        } else {
            each_lane(mask, |lane| row[lane] = values[lane] as u32);
        }
        let state = &mut self.narrow_state[slot];
        state.written |= mask;
        state.undefined = false;
        state.touch = Touch { fence: self.fences, moves: false };
        (state.in_flight > 0).then_some(RegisterFault::InFlight)
    }

    /// Writes a predicate from a mask of lanes.
    pub(crate) fn write_predicate(&mut self, slot: u32, mask: u32, bits: u32) {
        let slot = slot as usize;
        self.predicates[slot] = self.predicates[slot] & !mask | bits & mask;
        self.predicate_written[slot] |= mask;
    }

    /// The registers of a range in one lane, with whether they were written.
    pub(crate) fn save(&self, (from, to): &RegisterRange, lane: usize) -> SavedLane {
        let bit = |mask: u32| mask >> lane & 1 == 1;
        let narrow = from.narrow as usize..to.narrow as usize;
        let wide = from.wide as usize..to.wide as usize;
        let predicates = from.predicates as usize..to.predicates as usize;
        SavedLane {
            narrow: narrow.map(|i| (self.narrow[i][lane], bit(self.narrow_state[i].written))).collect(),
            wide: wide.map(|i| (self.wide[i][lane], bit(self.wide_written[i]))).collect(),
            predicates: predicates
                .map(|i| (bit(self.predicates[i]), bit(self.predicate_written[i])))
                .collect(),
        }
    }

    /// Puts back what [`save`](Self::save) took from one lane.
    pub(crate) fn restore(&mut self, from: RegisterCounts, lane: usize, saved: &SavedLane) {
        let set = |mask: &mut u32, on: bool| *mask = *mask & !(1 << lane) | u32::from(on) << lane;
        for (i, &(value, written)) in saved.narrow.iter().enumerate() {
            let slot = from.narrow as usize + i;
            self.narrow[slot][lane] = value;
            set(&mut self.narrow_state[slot].written, written);
        }
        for (i, &(value, written)) in saved.wide.iter().enumerate() {
            let slot = from.wide as usize + i;
            self.wide[slot][lane] = value;
            set(&mut self.wide_written[slot], written);
        }
        for (i, &(value, written)) in saved.predicates.iter().enumerate() {
            let slot = from.predicates as usize + i;
            set(&mut self.predicates[slot], value);
            set(&mut self.predicate_written[slot], written);
        }
    }

    /// A function begins in the lanes of `mask`: nothing was written to its registers yet.
    pub(crate) fn forget(&mut self, (from, to): &RegisterRange, mask: u32) {
        for state in &mut self.narrow_state[from.narrow as usize..to.narrow as usize] {
            state.written &= !mask;
        }
        let wide = &mut self.wide_written[from.wide as usize..to.wide as usize];
        let predicates = &mut self.predicate_written[from.predicates as usize..to.predicates as usize];
        wide.iter_mut().chain(predicates).for_each(|written| *written &= !mask);
    }

    /// `wgmma.fence`: registers touched before are in order with wgmmas to come.
    pub(crate) fn fence(&mut self) {
        self.fences += 1;
    }

    /// Whether `wgmma.fence` was ever executed.
    pub(crate) const fn was_fenced(&self) -> bool {
        self.fences > 1
    }

    /// Whether the register was touched since the last `wgmma.fence`; `Some(true)` if moves alone did.
    pub(crate) fn touched_since_fence(&self, slot: u32) -> Option<bool> {
        let touch = self.narrow_state[slot as usize].touch;
        (touch.fence == self.fences).then_some(touch.moves)
    }

    /// When a register was last touched.
    pub(crate) fn touch(&self, reg: Reg) -> Touch {
        if let Reg::Narrow(slot) = reg { self.narrow_state[slot as usize].touch } else { Touch::default() }
    }

    /// What touched the register just now was a move; `before` is how it stood.
    pub(crate) fn mark_moved(&mut self, reg: Reg, before: Touch) {
        if let Reg::Narrow(slot) = reg {
            let moves = before.fence != self.fences || before.moves;
            self.narrow_state[slot as usize].touch = Touch { fence: self.fences, moves };
        }
    }

    /// Whether every lane was written.
    pub(crate) fn is_written(&self, slot: u32) -> bool {
        self.narrow_state[slot as usize].written == u32::MAX
    }

    /// A wgmma will write the register.
    pub(crate) fn promise(&mut self, slot: u32) {
        self.narrow_state[slot as usize].written = u32::MAX;
    }

    /// Whether the register's value comes from unwritten memory.
    pub(crate) fn is_undefined(&self, slot: u32) -> bool {
        self.narrow_state[slot as usize].undefined
    }

    /// A wgmma fills the register from memory that was written, or not.
    pub(crate) fn define(&mut self, slot: u32, defined: bool) {
        self.narrow_state[slot as usize].undefined = !defined;
    }

    /// A wgmma takes the register.
    pub(crate) fn take(&mut self, slot: u32) {
        self.narrow_state[slot as usize].in_flight += 1;
    }

    /// A wgmma that had taken the register was waited for.
    pub(crate) fn give_back(&mut self, slot: u32) {
        self.narrow_state[slot as usize].in_flight -= 1;
    }

    /// A wgmma's result: the register does not count as touched.
    pub(crate) fn set_result(&mut self, slot: u32, values: [u32; 32]) {
        self.narrow[slot as usize] = values;
    }
}

/// Calls `f` for each lane in the mask.
pub(crate) fn each_lane(mask: u32, mut f: impl FnMut(usize)) {
    let mut rest = mask;
    while rest != 0 {
        f(rest.trailing_zeros() as usize);
        rest &= rest - 1;
    }
}

/// The lanes in a mask.
pub(crate) fn lanes_of(mask: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |lane| mask >> lane & 1 == 1)
}
