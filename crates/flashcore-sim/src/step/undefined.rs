//! Values that were never written: they may be moved and computed with, as compilers do; dependent values are reported
//! where it matters: when one is stored, used in an address, or decides a branch.

use super::{Step, memory::WIDEST};
use crate::{
    memory::Place,
    program::{Dst, Lanes, Reg, Src},
    regfile::{Cause, Origin, RegisterFault},
};
use std::{array::from_fn, ops::Range};

/// Up to four sources, the lanes in which each means nothing, and who found that first.
pub(super) struct Sources {
    pub(super) values: [Lanes; 4],
    undefined: [u32; 4],
    /// The sources if what nobody wrote were something else; only where some source means nothing.
    others: Option<Box<[Lanes; 4]>>,
    origin: Option<Origin>,
}

/// What a result would be if what nobody wrote were something else, and in which lanes it is then another one.
pub(super) type Dependent = Option<(u32, Box<Lanes>)>;

impl Sources {
    /// The lanes in which any source means nothing.
    pub(super) fn undefined(&self) -> u32 {
        self.undefined.iter().fold(0, |all, lanes| all | lanes)
    }

    /// The lanes in which what `f` makes of the sources depends on one that means nothing: another value in its place
    /// gives another result.
    pub(super) fn dependent(&self, f: impl Fn(&[Lanes; 4]) -> Lanes, result: &Lanes) -> Dependent {
        let other = f(self.others.as_deref()?);
        let differ =
            (0..32).filter(|&lane| other[lane] != result[lane]).fold(0, |lanes, lane| lanes | 1 << lane);
        Some((differ & self.undefined(), Box::new(other)))
    }
}

impl Step<'_, '_> {
    /// Sources that need not mean anything.
    pub(super) fn sources(&mut self, srcs: &[Src]) -> Sources {
        let mut sources = Sources { values: [[0; 32]; 4], undefined: [0; 4], others: None, origin: None };
        for (at, src) in srcs.iter().enumerate().take(4) {
            sources.undefined[at] = self.peek_into(*src, &mut sources.values[at]);
            if sources.undefined[at] != 0 {
                sources.origin = sources.origin.or(self.origin_of(*src));
            }
        }
        if sources.undefined() != 0 {
            sources.others = Some(Box::new(from_fn(|at| {
                let (values, lanes) = (sources.values[at], sources.undefined[at]);
                srcs.get(at).map_or(values, |src| self.other(*src, &values, lanes))
            })));
        }
        sources
    }

    /// The values of a source if what nobody wrote, in some lanes, were something else.
    pub(super) fn other(&self, src: Src, values: &Lanes, undefined: u32) -> Lanes {
        let registers = &self.machine.warps[self.warp].registers;
        let other = match src {
            Src::Reg(reg) => registers.other(reg),
            Src::Not(slot) => registers.other(Reg::Predicate(slot)).map(|bit| bit ^ 1),
            _ => return *values,
        };
        from_fn(|lane| if undefined >> lane & 1 == 1 { other[lane] } else { values[lane] })
    }

    /// A source that need not mean anything, and the lanes in which it does not.
    pub(super) fn peek(&mut self, src: Src) -> (Lanes, u32) {
        let mut values = [0; 32];
        let undefined = self.peek_into(src, &mut values);
        (values, undefined)
    }

    /// The same, where the values are wanted: most instructions come by here, and lanes are many bytes.
    fn peek_into(&mut self, src: Src, values: &mut Lanes) -> u32 {
        let reg = match src {
            Src::Reg(reg) => reg,
            Src::Not(slot) => Reg::Predicate(slot),
            _ => {
                *values = self.read(src);
                return 0;
            }
        };
        let registers = &mut self.machine.warps[self.warp].registers;
        let fault = registers.check_read(reg, self.mask);
        registers.lanes_into(reg, values);
        if matches!(src, Src::Not(_)) {
            values.iter_mut().for_each(|bit| *bit ^= 1);
        }
        match fault {
            None => 0,
            Some(RegisterFault::Uninit) => registers.undefined_lanes(reg, self.mask),
            Some(fault) => {
                self.register_fault(fault, "read", reg);
                0
            }
        }
    }

    pub(super) fn origin_of(&self, src: Src) -> Option<Origin> {
        let reg = match src {
            Src::Reg(reg) => reg,
            Src::Not(slot) => Reg::Predicate(slot),
            _ => return None,
        };
        self.machine.warps[self.warp].registers.origin(reg)
    }

    /// Writes a result that means nothing in the `undefined` lanes, because of the sources.
    pub(super) fn write_from(&mut self, dst: Dst, values: &Lanes, undefined: u32, sources: &Sources) {
        self.write(dst, values);
        self.undefine(dst, undefined, None, sources);
    }

    /// Writes what `f` makes of the sources, which means nothing where it depends on one that does not.
    pub(super) fn write_made(&mut self, dst: Dst, f: impl Fn(&[Lanes; 4]) -> Lanes, sources: &Sources) {
        let values = f(&sources.values);
        self.write(dst, &values);
        if let Some((lanes, other)) = sources.dependent(f, &values) {
            self.undefine(dst, lanes, Some(&other), sources);
        }
    }

    fn undefine(&mut self, dst: Dst, lanes: u32, other: Option<&Lanes>, sources: &Sources) {
        if let (Some(reg), 1..) = (dst, lanes & self.mask) {
            let origin = sources.origin.unwrap_or(Origin { pc: self.pc, cause: Cause::Register });
            self.machine.warps[self.warp].registers.undefine(reg, lanes & self.mask, origin, other);
        }
    }

    /// Whether a part of what a lane reads means nothing: nobody wrote any of it in local memory, where compilers copy
    /// whole structs, or not all of it in shared memory. Reading alone is no fault: libraries read one element too many
    /// and drop it.
    pub(super) fn is_unwritten(&self, lane: usize, place: Place, part: Range<usize>) -> bool {
        match place {
            Place::Local(offset) => {
                let warp = &self.machine.warps[self.warp];
                let start = lane * (warp.local.len() / 32) + offset as usize;
                warp.local_written.misses(start + part.start..start + part.end)
            }
            Place::Shared { rank, offset } => self.machine.peer(self.cta, rank).is_some_and(|cta| {
                let shared = &self.machine.ctas[cta].shared;
                let range = shared.range(offset + part.start as u32, part.len());
                range.is_ok_and(|range| !shared.written.covers(range))
            }),
            _ => false,
        }
    }

    /// What a load would give if what nobody wrote were something else.
    pub(super) fn other_bytes(&self, lane: usize, place: Place, part: usize, bytes: &[u8]) -> [u8; WIDEST] {
        let mut other = [0; WIDEST];
        other.iter_mut().zip(bytes).for_each(|(other, byte)| *other = !byte);
        if let Place::Local(offset) = place {
            let warp = &self.machine.warps[self.warp];
            let start = lane * (warp.local.len() / 32) + offset as usize + part;
            for (at, stored) in warp.local_others.range(start..start + bytes.len()) {
                other[at - start] = *stored;
            }
        }
        other
    }

    /// Where what a load gives came from, if it means nothing.
    pub(super) fn origin_at(&self, lane: usize, place: Place, part: usize) -> Origin {
        let warp = &self.machine.warps[self.warp];
        let cause = match place {
            Place::Local(offset) => {
                let start = lane * (warp.local.len() / 32) + offset as usize + part;
                let stored = warp.local_origins.get(&start);
                return stored.copied().unwrap_or(Origin { pc: self.pc, cause: Cause::Register });
            }
            Place::Shared { .. } => Cause::Shared,
            _ => Cause::Race,
        };
        Origin { pc: self.pc, cause }
    }
}
