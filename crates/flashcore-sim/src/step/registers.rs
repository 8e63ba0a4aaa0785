//! `setmaxnreg`: registers move between the warpgroups of a CTA.

use super::{Flow, Outcome, Step};
use crate::{cta::Resize, finding::FindingKind, machine::Culprit, warp::Wait};
use flashcore_ptx::sm::THREAD_REGISTERS;

/// Warps of a warpgroup.
const GROUP: u32 = 4;

impl Step<'_, '_> {
    /// Warps of a warpgroup change their registers one by one; growing waits for the pool.
    pub(super) fn set_max_registers(&mut self, count: u32, grow: bool) -> Outcome {
        if let Some(flow) = self.aligned("setmaxnreg")? {
            return Ok(flow);
        }
        let budget = self.machine.warps[self.warp].budget;
        if (grow && count < budget) || (!grow && count > budget) {
            let text = self.wrong_direction(count, budget, grow);
            return self.halt(FindingKind::RegisterPool, self.first_lane(), text);
        }
        let pool = &mut self.machine.ctas[self.cta].pool;
        if grow {
            if *pool < count - budget {
                return Ok(Flow::Wait(Wait::Registers));
            }
            *pool -= count - budget;
        } else {
            *pool += budget - count;
        }
        self.machine.warps[self.warp].budget = count;
        self.agree_on_registers(count)?;
        self.machine.effect();
        for warp in self.machine.warps_of(self.cta) {
            warp.wake(|wait| wait == Wait::Registers);
        }
        Ok(Flow::Next)
    }

    /// The warp's group in the CTA, and its bit among the warps of that.
    fn place_in_group(&self) -> (u32, u32) {
        let index = self.machine.warps[self.warp].index;
        (index / GROUP, 1 << (index % GROUP))
    }

    /// What is wrong with a count that is not on the side of the current one that the instruction says.
    fn wrong_direction(&self, count: u32, budget: u32, grow: bool) -> String {
        let geometry = &self.machine.context.geometry;
        let (group, own) = self.place_in_group();
        let resizes = self.machine.ctas[self.cta].resizes.get(&group);
        let since = match () {
            () if resizes.is_some_and(|all| all.iter().any(|resize| resize.warps & own != 0)) => {
                "since its last `setmaxnreg`".to_string()
            }
            () if geometry.fixed_registers => "since its launch, by `.maxnreg`".to_string(),
            () => format!(
                "since its launch: as many as fit for {} threads and the CTAs that `.minnctapersm` asks for, at \
                 most {THREAD_REGISTERS}",
                geometry.threads
            ),
        };
        let (name, than) = if grow { ("inc", "fewer") } else { ("dec", "more") };
        format!(
            "`setmaxnreg.{name}` names {count} registers a thread, {than} than the {budget} that the warp has {since}"
        )
    }

    /// All warps of a warpgroup must name the same counts in the same order.
    fn agree_on_registers(&mut self, count: u32) -> Outcome<()> {
        let ((group, own), pc) = (self.place_in_group(), self.pc);
        let resizes = self.machine.ctas[self.cta].resizes.entry(group).or_default();
        match resizes.iter_mut().find(|resize| resize.warps & own == 0) {
            Some(resize) if resize.count == count => resize.warps |= own,
            Some(&mut Resize { pc, count: other, .. }) => {
                let at = self.place_of(pc);
                let text = format!(
                    "{count} registers, but {other} in another warp of the warpgroup{at}; all four must execute the \
                     same `setmaxnreg`"
                );
                return self.halt(FindingKind::RegisterPool, self.first_lane(), text);
            }
            None => resizes.push(Resize { pc, count, warps: own }),
        }
        Ok(())
    }

    /// Every warp of a warpgroup must have executed what any of them has.
    pub(super) fn check_resizes(&mut self) {
        let warps = self.machine.context.geometry.warps;
        let missing = |(group, resizes): (&u32, &Vec<Resize>)| {
            let all = (1 << GROUP.min(warps - group * GROUP)) - 1;
            let partial = resizes.iter().find(|resize| resize.warps != all)?;
            Some((partial.pc, group * GROUP + (all & !partial.warps).trailing_zeros()))
        };
        let Some((pc, warp)) = self.machine.ctas[self.cta].resizes.iter().find_map(missing) else { return };
        let text = format!(
            "warp {warp} has ended without this `setmaxnreg`, which others of its warpgroup have executed"
        );
        let by = Culprit { cta: self.cta, warp, lane: 0 };
        self.machine.report(FindingKind::DivergentAligned, by, Some(pc), text);
    }
}
