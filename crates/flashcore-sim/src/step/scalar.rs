//! Reading sources, writing results, and everything that is a pure function of its sources.

use super::{Flow, Outcome, Step, undefined::Sources};
use crate::{
    finding::FindingKind,
    geometry::unflatten,
    launch::Launch,
    machine::Culprit,
    memory::rank_address,
    program::{Carry, Combine, Dst, LaneFn, Lanes, RESERVED_BYTES, Reg, SHARED_BASE, Src},
    regfile::{Cause, Origin, RegisterFault},
};
use flashcore_ptx::types::SpecialReg;
use std::array::from_fn;

impl Step<'_, '_> {
    /// The lanes in which a guard holds.
    pub(super) fn guard(&mut self, slot: u32, negated: bool) -> u32 {
        self.check_read(Reg::Predicate(slot));
        let bits = self.machine.warps[self.warp].registers.predicate(slot);
        if negated { !bits } else { bits }
    }

    /// A source in every lane; only those in the mask are judged.
    pub(super) fn read(&mut self, src: Src) -> Lanes {
        match src {
            Src::Reg(reg) => {
                self.check_read(reg);
                self.machine.warps[self.warp].registers.lanes(reg)
            }
            Src::Not(slot) => {
                self.check_read(Reg::Predicate(slot));
                let bits = self.machine.warps[self.warp].registers.predicate(slot);
                from_fn(|i| u64::from(!bits >> i & 1))
            }
            Src::Imm(value) => [value; 32],
            Src::Special(special) => self.special(special),
            Src::Frame(offset) => {
                let calls = &self.machine.warps[self.warp].calls;
                from_fn(|lane| u64::from(calls.base(lane).wrapping_add(offset)))
            }
            Src::Shared(offset) => [rank_address(self.machine.ctas[self.cta].rank, offset).into(); 32],
        }
    }

    /// A predicate source as a mask of lanes.
    pub(super) fn read_mask(&mut self, src: Src) -> u32 {
        let values = self.read(src);
        (0..32).fold(0, |bits, i| bits | ((values[i] & 1) as u32) << i)
    }

    fn check_read(&mut self, reg: Reg) {
        let fault = self.machine.warps[self.warp].registers.check_read(reg, self.mask);
        if let Some(fault) = fault {
            self.register_fault(fault, "read", reg);
        }
    }

    pub(super) fn register_fault(&mut self, fault: RegisterFault, what: &str, reg: Reg) {
        let checks = self.machine.context.options.checks;
        let lane = self.first_lane();
        match fault {
            RegisterFault::Uninit => self.report_undefined(reg),
            RegisterFault::Undefined if checks.init => {
                let message = "the register holds a wgmma's result from unwritten shared memory".to_string();
                self.report(FindingKind::UninitShared, lane, message);
            }
            RegisterFault::InFlight if checks.in_flight => {
                let message = format!("a register of an unfinished wgmma is {what} before wgmma.wait_group");
                self.report(FindingKind::InFlightRegister, lane, message);
            }
            _ => {}
        }
    }

    /// Something that matters depends on a register that means nothing.
    fn report_undefined(&mut self, reg: Reg) {
        let checks = self.machine.context.options.checks;
        let registers = &self.machine.warps[self.warp].registers;
        let lane = registers.undefined_lanes(reg, self.mask).trailing_zeros().min(31);
        let origin = registers.origin(reg).unwrap_or(Origin { pc: self.pc, cause: Cause::Register });
        let (user, first) = (self.place_of(self.pc), self.place_of(origin.pc));
        let (kind, on, pc, message) = match origin.cause {
            Cause::Shared => {
                let text = format!("a read of bytes that were never written; the value is used{user}");
                (FindingKind::UninitShared, checks.init, origin.pc, text)
            }
            Cause::Race => {
                let race = self.machine.races.get(&origin.pc).cloned().unwrap_or_default();
                (FindingKind::GlobalRace, checks.race, origin.pc, format!("{race}; the value is used{user}"))
            }
            Cause::Register if origin.pc != self.pc => {
                let text =
                    format!("a source depends on a value that was never written, first read there{first}");
                (FindingKind::UninitRegister, checks.init, self.pc, text)
            }
            Cause::Register => {
                let text = "a source register was never written".to_string();
                (FindingKind::UninitRegister, checks.init, self.pc, text)
            }
        };
        if on {
            let by = Culprit { cta: self.cta, warp: self.machine.warps[self.warp].index, lane };
            self.machine.report(kind, by, Some(pc), message);
        }
    }

    /// Writes a result in the lanes of the mask.
    pub(super) fn write(&mut self, dst: Dst, values: &Lanes) {
        if let Some(reg) = dst {
            let fault = self.machine.warps[self.warp].registers.write(reg, self.mask, values);
            if let Some(fault) = fault {
                self.register_fault(fault, "overwritten", reg);
            }
        }
    }

    pub(super) fn alu(&mut self, f: &LaneFn, dst: Dst, srcs: &[Src]) -> Outcome {
        let sources = self.sources(srcs);
        self.write_made(dst, f, &sources);
        Ok(Flow::Next)
    }

    /// `mov`: the assembler may do it earlier, which matters between `wgmma.fence` and the wgmma.
    pub(super) fn move_value(&mut self, dst: Dst, src: Src) -> Outcome {
        let registers = &self.machine.warps[self.warp].registers;
        let source = if let Src::Reg(reg) = src { Some((reg, registers.touch(reg))) } else { None };
        let before = dst.map(|reg| (reg, registers.touch(reg)));
        let sources = self.sources(&[src]);
        self.write_made(dst, |values| values[0], &sources);
        let registers = &mut self.machine.warps[self.warp].registers;
        for (reg, touch) in source.into_iter().chain(before) {
            registers.mark_moved(reg, touch);
        }
        Ok(Flow::Next)
    }

    /// Sums with a carry of each lane.
    pub(super) fn carry(&mut self, op: Carry, dst: Dst, srcs: &[Src]) -> Outcome {
        let sources = self.sources(srcs);
        let values = &sources.values;
        let carries = self.machine.warps[self.warp].carries;
        let sum = |lane: usize| {
            let sources: [u64; 4] = from_fn(|i| values[i][lane]);
            op.sum(&sources[..srcs.len()], carries >> lane & 1 == 1)
        };
        let sums: [(u64, bool); 32] = from_fn(sum);
        self.write_from(dst, &sums.map(|(value, _)| value), sources.undefined(), &sources);
        if op.leaves {
            let bits = (0..32).fold(0, |bits, lane| bits | u32::from(sums[lane].1) << lane);
            self.machine.warps[self.warp].carries = carries & !self.mask | bits & self.mask;
        }
        Ok(Flow::Next)
    }

    /// Like [`alu`](Self::alu), but the result means nothing only if no source means anything.
    pub(super) fn pack(&mut self, f: &LaneFn, dst: Dst, srcs: &[Src]) -> Outcome {
        let (mask, registers) = (self.mask, &self.machine.warps[self.warp].registers);
        let is_defined = |src: &Src| match src {
            Src::Reg(reg) => registers.undefined_lanes(*reg, mask) == 0,
            _ => true,
        };
        let defined: [bool; 4] = from_fn(|i| srcs.get(i).is_some_and(is_defined));
        let count = defined.iter().filter(|defined| **defined).count();
        if count == srcs.len() || count == 0 {
            return self.alu(f, dst, srcs);
        }
        let values = from_fn(|i| if defined[i] { self.read(srcs[i]) } else { [0; 32] });
        self.write(dst, &f(&values));
        Ok(Flow::Next)
    }

    /// `setp`: `p` is the comparison, `q` its negation, both combined with a third predicate where there is one;
    /// packed halves give `p` and `q` one comparison each.
    pub(super) fn compare(
        &mut self,
        f: &LaneFn,
        p: Dst,
        q: Dst,
        srcs: &[Src],
        packed: bool,
        combine: Option<(Combine, Src)>,
    ) -> Outcome {
        let sources = self.sources(srcs);
        let bits = f(&sources.values);
        let mut undefined = sources.dependent(f, &bits).map_or(0, |(lanes, _)| lanes);
        let first: Lanes = from_fn(|i| bits[i] & 1);
        let second: Lanes = if packed { from_fn(|i| bits[i] >> 1 & 1) } else { from_fn(|i| !bits[i] & 1) };
        let third = combine.map(|(op, src)| {
            let (values, lanes) = self.peek(src);
            undefined |= lanes;
            (op, values)
        });
        let join = |value: Lanes| match &third {
            None => value,
            Some((Combine::And, c)) => from_fn(|i| value[i] & c[i]),
            Some((Combine::Or, c)) => from_fn(|i| value[i] | c[i]),
            Some((_, c)) => from_fn(|i| value[i] ^ c[i]),
        };
        self.write_from(p, &join(first), undefined, &sources);
        self.write_from(q, &join(second), undefined, &sources);
        Ok(Flow::Next)
    }

    pub(super) fn copy(&mut self, dsts: &[Dst], srcs: &[Src]) -> Outcome {
        let all: Vec<Sources> = srcs.iter().map(|src| self.sources(&[*src])).collect();
        for (dst, source) in dsts.iter().zip(&all) {
            self.write_made(*dst, |values| values[0], source);
        }
        Ok(Flow::Next)
    }

    pub(super) fn unpack(&mut self, dsts: &[Dst], src: Src, bits: u32) -> Outcome {
        let sources = self.sources(&[src]);
        let mask = u64::MAX >> (64 - bits);
        for (i, dst) in dsts.iter().enumerate() {
            let part = |values: &[Lanes; 4]| values[0].map(|value| value >> (bits as usize * i) & mask);
            self.write_made(*dst, part, &sources);
        }
        Ok(Flow::Next)
    }

    fn special(&self, special: SpecialReg) -> Lanes {
        use SpecialReg as S;
        let geometry = &self.machine.context.geometry;
        let warp = &self.machine.warps[self.warp];
        let cta = &self.machine.ctas[self.cta];
        let tid = |dim: usize| from_fn(|l| unflatten(warp.index * 32 + l as u32, geometry.block)[dim].into());
        let all = |value: u32| [u64::from(value); 32];
        let lane_mask = |f: fn(u32) -> u32| from_fn(|l| f(l as u32).into());
        let cluster: [u32; 3] = from_fn(|d| cta.id[d] / geometry.cluster[d]);
        let clusters: [u32; 3] = from_fn(|d| geometry.grid[d] / geometry.cluster[d]);
        let inside = unflatten(cta.rank, geometry.cluster);
        match special {
            S::TidX => tid(0),
            S::TidY => tid(1),
            S::TidZ => tid(2),
            S::NtidX => all(geometry.block[0]),
            S::NtidY => all(geometry.block[1]),
            S::NtidZ => all(geometry.block[2]),
            S::CtaidX => all(cta.id[0]),
            S::CtaidY => all(cta.id[1]),
            S::CtaidZ => all(cta.id[2]),
            S::NctaidX => all(geometry.grid[0]),
            S::NctaidY => all(geometry.grid[1]),
            S::NctaidZ => all(geometry.grid[2]),
            S::ClusteridX => all(cluster[0]),
            S::ClusteridY => all(cluster[1]),
            S::ClusteridZ => all(cluster[2]),
            S::NclusteridX => all(clusters[0]),
            S::NclusteridY => all(clusters[1]),
            S::NclusteridZ => all(clusters[2]),
            S::ClusterCtaidX => all(inside[0]),
            S::ClusterCtaidY => all(inside[1]),
            S::ClusterCtaidZ => all(inside[2]),
            S::ClusterNctaidX => all(geometry.cluster[0]),
            S::ClusterNctaidY => all(geometry.cluster[1]),
            S::ClusterNctaidZ => all(geometry.cluster[2]),
            S::ClusterCtarank => all(cta.rank),
            S::ClusterNctarank => all(geometry.cluster_ctas),
            S::IsExplicitCluster => all(u32::from(geometry.cluster_ctas > 1)),
            S::Laneid => from_fn(|l| l as u64),
            S::Warpid => all(warp.index),
            S::Nwarpid => all(geometry.warps),
            S::Smid => all(cta.cluster as u32),
            S::Nsmid => all(self.machine.clusters.len() as u32),
            S::LanemaskEq => lane_mask(|l| 1 << l),
            S::LanemaskLe => lane_mask(|l| u32::MAX >> (31 - l)),
            S::LanemaskLt => lane_mask(|l| (1 << l) - 1),
            S::LanemaskGe => lane_mask(|l| u32::MAX << l),
            S::LanemaskGt => lane_mask(|l| !(u32::MAX >> (31 - l))),
            S::Clock | S::GlobaltimerLo => all(self.machine.steps as u32),
            S::Clock64 | S::Globaltimer => [self.machine.steps; 32],
            S::DynamicSmemSize => all(geometry.dynamic_shared),
            S::ReservedSmemBegin | S::ReservedSmem0 | S::ReservedSmem1 => all(SHARED_BASE),
            S::ReservedSmemEnd | S::ReservedSmemCap => all(SHARED_BASE + RESERVED_BYTES),
            S::Envreg1 => all((self.grid_barrier() >> 32) as u32),
            S::Envreg2 => all(self.grid_barrier() as u32),
            S::TotalSmemSize | S::AggrSmemSize => all(geometry.shared_bytes),
            _ => [0; 32],
        }
    }

    /// Where the barrier of a cooperative grid lies.
    fn grid_barrier(&self) -> u64 {
        self.machine.global.address(Launch::GRID.0).unwrap_or(0)
    }
}
