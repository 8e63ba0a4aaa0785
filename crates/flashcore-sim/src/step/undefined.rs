//! Values that nobody wrote: they may be moved and computed with, as compilers do; what depends on them is told where it
//! matters, when it is stored, leads to an address, or decides where to go.

use super::Step;
use crate::{
    program::{Dst, LaneFn, Lanes, Reg, Src},
    regfile::{Cause, Origin, RegisterFault},
};
use std::array::from_fn;

/// Up to four sources, the lanes in which each means nothing, and who found that first.
pub(super) struct Sources {
    pub(super) values: [Lanes; 4],
    undefined: [u32; 4],
    origin: Option<Origin>,
}

impl Sources {
    /// The lanes in which any source means nothing.
    pub(super) fn undefined(&self) -> u32 {
        self.undefined.iter().fold(0, |all, lanes| all | lanes)
    }

    /// The lanes in which what `f` makes of the sources depends on one that means nothing: another value in its place
    /// gives another result.
    pub(super) fn dependent(&self, f: &LaneFn, srcs: &[Src], result: &Lanes) -> u32 {
        let undefined = self.undefined();
        if undefined == 0 {
            return 0;
        }
        let mut others = self.values;
        for ((values, lanes), src) in others.iter_mut().zip(self.undefined).zip(srcs) {
            let flip = match src {
                Src::Reg(Reg::Wide(_)) => u64::MAX,
                Src::Reg(Reg::Narrow(_)) => 0xffff_ffff,
                _ => 1,
            };
            *values = from_fn(|lane| if lanes >> lane & 1 == 1 { values[lane] ^ flip } else { values[lane] });
        }
        let other = f(&others);
        (0..32).filter(|&lane| other[lane] != result[lane]).fold(0, |lanes, lane| lanes | 1 << lane)
            & undefined
    }
}

impl Step<'_, '_> {
    /// Sources that need not mean anything.
    pub(super) fn sources(&mut self, srcs: &[Src]) -> Sources {
        let mut sources = Sources { values: [[0; 32]; 4], undefined: [0; 4], origin: None };
        for (at, src) in srcs.iter().enumerate().take(4) {
            (sources.values[at], sources.undefined[at]) = self.peek(*src);
            if sources.undefined[at] != 0 {
                sources.origin = sources.origin.or(self.origin_of(*src));
            }
        }
        sources
    }

    /// A source that need not mean anything, and the lanes in which it does not.
    pub(super) fn peek(&mut self, src: Src) -> (Lanes, u32) {
        let reg = match src {
            Src::Reg(reg) => reg,
            Src::Not(slot) => Reg::Predicate(slot),
            _ => return (self.read(src), 0),
        };
        let registers = &mut self.machine.warps[self.warp].registers;
        let fault = registers.check_read(reg, self.mask);
        let unset = fault == Some(RegisterFault::Uninit);
        let undefined = if unset { registers.undefined_lanes(reg, self.mask) } else { 0 };
        let values = registers.lanes(reg);
        if let (Some(fault), false) = (fault, unset) {
            self.register_fault(fault, "read", reg);
        }
        match src {
            Src::Not(_) => (values.map(|bit| bit ^ 1), undefined),
            _ => (values, undefined),
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
        if let (Some(reg), 1..) = (dst, undefined) {
            let origin = sources.origin.unwrap_or(Origin { pc: self.pc, cause: Cause::Register });
            self.machine.warps[self.warp].registers.undefine(reg, undefined & self.mask, origin);
        }
    }
}
