//! Calls, returns, and branches through a table. Diverging lanes run one group after the other.

use super::{Flow, Outcome, Step};
use crate::{
    finding::FindingKind,
    program::{Builtin, Call, Callee, Dst, Piece, Routine, Src, Uop, function_at},
    regfile::lanes_of,
};

impl Step<'_, '_> {
    /// `brx.idx`.
    pub(super) fn branch_to(&mut self, index: Src, targets: &[u32]) -> Outcome {
        let chosen = self.read(index);
        let (first, lanes) = self.alike(|lane| chosen[lane]);
        match targets.get(first as u32 as usize) {
            Some(&target) => Ok(Flow::JumpFor(target, lanes)),
            None => {
                let text = format!("a branch to target {} of {}", first as u32, targets.len());
                self.halt(FindingKind::BadCall, self.first_lane(), text)
            }
        }
    }

    /// What the first acting lane has, and the acting lanes that have the same.
    fn alike<T: PartialEq>(&self, value: impl Fn(usize) -> T) -> (T, u32) {
        let first = value(self.first_lane());
        let lanes = lanes_of(self.mask).filter(|&lane| value(lane) == first);
        let lanes = lanes.fold(0, |mask, lane| mask | 1 << lane);
        (first, lanes)
    }

    pub(super) fn call(&mut self, call: &Call) -> Outcome {
        match call.callee {
            Callee::Routine(number) => self.enter(call, number, self.mask),
            Callee::Builtin(Builtin::Assert) => self.assertion(call),
            Callee::Builtin(Builtin::Print) => self.print(call),
            Callee::Pointer(src) => self.call_through(call, src),
        }
    }

    fn call_through(&mut self, call: &Call, pointer: Src) -> Outcome {
        let addresses = self.read(pointer);
        let (address, lanes) = self.alike(|lane| addresses[lane]);
        let routines = &self.machine.context.program.routines;
        match function_at(address).and_then(|index| routines.iter().position(|r| r.function == index)) {
            Some(number) => self.enter(call, number, lanes),
            None => {
                let text = format!("a call to address {address:#x}, where no function begins");
                self.halt(FindingKind::BadCall, self.first_lane(), text)
            }
        }
    }

    /// The lanes begin a function: arguments are copied, its registers hold nothing yet.
    fn enter(&mut self, call: &Call, number: usize, lanes: u32) -> Outcome {
        let program = self.machine.context.program;
        let routine = &program.routines[number];
        self.check_signature(call, routine)?;
        for lane in lanes_of(lanes) {
            let warp = &mut self.machine.warps[self.warp];
            let from = warp.calls.base(lane);
            let saved = routine.recursive.then(|| warp.registers.save(&routine.registers, lane));
            warp.calls.enter(lane, self.pc, call.frame, saved);
            let to = warp.calls.base(lane);
            for (arg, param) in call.args.iter().zip(&routine.params) {
                self.copy_in_stack(lane, from + arg.offset, to + param.offset, param.bytes)?;
            }
        }
        self.machine.warps[self.warp].registers.forget(&routine.registers, lanes);
        Ok(Flow::JumpFor(routine.entry, lanes))
    }

    fn check_signature(&mut self, call: &Call, routine: &Routine) -> Outcome<()> {
        let bytes = |pieces: &[Piece]| pieces.iter().map(|p| p.bytes).collect::<Vec<_>>();
        let result = |piece: Option<Piece>| piece.map_or(0, |p| p.bytes);
        let (passed, taken) = (bytes(&call.args), bytes(&routine.params));
        let returns = call.result.is_none() || result(call.result) == result(routine.result);
        if passed == taken && returns {
            return Ok(());
        }
        let text = format!(
            "arguments of {passed:?} bytes and a result of {} for `{}`, which takes {taken:?} and returns {}",
            result(call.result),
            routine.name,
            result(routine.result)
        );
        self.halt(FindingKind::BadCall, self.first_lane(), text)
    }

    /// The lanes that came from the same call go back behind it.
    pub(super) fn return_from(&mut self, number: usize) -> Outcome {
        let program = self.machine.context.program;
        let routine = &program.routines[number];
        let calls = &self.machine.warps[self.warp].calls;
        let (from, lanes) = self.alike(|lane| calls.called_from(lane));
        let Some(from) = from else { return self.exit() };
        let result = match &program.code[from as usize].uop {
            Uop::Call(call) => call.result.zip(routine.result),
            _ => None,
        };
        for lane in lanes_of(lanes) {
            let warp = &mut self.machine.warps[self.warp];
            let own = warp.calls.base(lane);
            let Some(frame) = warp.calls.leave(lane) else { continue };
            if let Some(saved) = &frame.saved {
                warp.registers.restore(routine.registers.0, lane, saved);
            }
            let base = warp.calls.base(lane);
            if let Some((to, source)) = result {
                self.copy_in_stack(lane, own + source.offset, base + to.offset, to.bytes)?;
            }
        }
        Ok(Flow::JumpFor(from + 1, lanes))
    }

    /// `alloca`: the next bytes behind what the lane has taken.
    pub(super) fn alloca(&mut self, dst: Dst, bytes: Src, align: u32) -> Outcome {
        let asked = self.read(bytes);
        let layout = &self.machine.context.program.layout;
        let (base, most) = (layout.alloca_base, layout.local_bytes - layout.alloca_base);
        let mut addresses = [0; 32];
        for lane in lanes_of(self.mask) {
            let taken = &mut self.machine.warps[self.warp].calls.allocated[lane];
            let start = taken.next_multiple_of(align);
            let end = u64::from(start).saturating_add(asked[lane]);
            if end > most.into() {
                let text = format!("alloca of {} bytes; a thread has {most} for all", asked[lane]);
                return self.halt(FindingKind::OutOfBounds, lane, text);
            }
            *taken = end as u32;
            addresses[lane] = u64::from(base + start);
        }
        self.write(dst, &addresses);
        Ok(Flow::Next)
    }

    pub(super) fn stack_save(&mut self, dst: Dst) -> Outcome {
        let taken = self.machine.warps[self.warp].calls.allocated.map(u64::from);
        self.write(dst, &taken);
        Ok(Flow::Next)
    }

    pub(super) fn stack_restore(&mut self, src: Src) -> Outcome {
        let taken = self.read(src);
        let calls = &mut self.machine.warps[self.warp].calls;
        lanes_of(self.mask).for_each(|lane| calls.allocated[lane] = taken[lane] as u32);
        Ok(Flow::Next)
    }

    /// Copies bytes of a lane's local memory, and what is known of them.
    fn copy_in_stack(&mut self, lane: usize, from: u32, to: u32, bytes: u32) -> Outcome<()> {
        let source = self.local_range(lane, from.into(), bytes as usize)?;
        let target = self.local_range(lane, to.into(), bytes as usize)?;
        let warp = &mut self.machine.warps[self.warp];
        warp.local.copy_within(source.clone(), target.start);
        for (from, to) in source.zip(target) {
            if warp.local_written.misses(from..from + 1) {
                warp.local_written.clear(to..to + 1);
                let origin = warp.local_origins.get(&from).copied();
                warp.local_origins.extend(origin.map(|origin| (to, origin)));
                let other = warp.local_others.get(&from).copied().unwrap_or(!warp.local[to]);
                warp.local_others.insert(to, other);
            } else {
                warp.local_written.mark(to..to + 1);
            }
        }
        Ok(())
    }
}
