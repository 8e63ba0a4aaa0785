//! Exchange inside a warp: shuffles, votes, reductions, elections, and `bar.warp.sync`.

use super::{Flow, Outcome, Step};
use crate::{
    finding::FindingKind,
    program::{Combine, Dst, Lanes, Shuffle, Src, Vote},
    regfile::lanes_of,
    rng::mix,
    warp::Wait,
};
use std::array::from_fn;

impl Step<'_, '_> {
    /// Lets the lanes that a member mask names act together: `Err` carries where to go instead.
    ///
    /// Lanes of the group may name different masks; the first mask whose lanes are all here goes first.
    fn members(&mut self, mask: Src) -> Outcome<Result<u32, Flow>> {
        let masks = self.read(mask);
        let live = self.live();
        if let Some(lane) = lanes_of(self.mask).find(|&l| masks[l] >> l & 1 == 0) {
            let text = format!("lane {lane} executes with member mask {:#010x}", masks[lane] as u32);
            return self.halt(FindingKind::BadMask, lane, text).map(Ok);
        }
        for lane in lanes_of(self.mask) {
            let wanted = masks[lane] as u32 & live;
            let same = lanes_of(self.mask).filter(|&l| masks[l] == masks[lane]);
            let here = same.fold(0, |bits, l| bits | 1 << l);
            if here == wanted {
                return Ok(Ok(here));
            }
        }
        if self.mask != self.group {
            let text = format!("the guard holds in lanes {:#010x} only; the mask names more", self.mask);
            return self.halt(FindingKind::DivergentAligned, self.first_lane(), text).map(Ok);
        }
        Ok(Err(Flow::Wait(Wait::Lanes)))
    }

    /// Runs `act` for the members of a mask. That alone orders no memory: CUDA's guide says of shuffles, votes, matches
    /// and reductions that they imply no barrier.
    fn together(&mut self, mask: Src, act: impl FnOnce(&mut Self, u32)) -> Outcome {
        match self.members(mask)? {
            Err(flow) => Ok(flow),
            Ok(members) => {
                let all = self.mask;
                self.mask = members;
                act(self, members);
                Ok(if members == all { Flow::Next } else { Flow::NextFor(members) })
            }
        }
    }

    pub(super) fn warp_sync(&mut self, mask: Src) -> Outcome {
        self.together(mask, |step, members| {
            if members == step.live() {
                step.meet();
            } else {
                step.meet_some(members);
            }
        })
    }

    pub(super) fn shuffle(
        &mut self,
        mode: Shuffle,
        (dst, ok): (Dst, Dst),
        value: Src,
        (lane, clamp): (Src, Src),
        mask: Src,
    ) -> Outcome {
        self.together(mask, |step, members| {
            let (lanes, clamps) = (step.read(lane), step.read(clamp));
            let sources = step.sources(&[value]);
            let values = &sources.values[0];
            let source: [(usize, bool); 32] =
                from_fn(|l| shuffle_source(mode, l as u64, lanes[l], clamps[l]));
            if let Some(l) = lanes_of(members).find(|&l| source[l].1 && members >> source[l].0 & 1 == 0) {
                let text = format!("lane {l} reads from lane {}, which does not take part", source[l].0);
                step.report(FindingKind::InactiveLane, l, text);
            }
            let taken: Lanes = from_fn(|l| if source[l].1 { values[source[l].0] } else { values[l] });
            let from = |l: usize| sources.undefined() >> source[l].0 & 1;
            let undefined = (0..32).fold(0, |lanes, l| lanes | from(l) << l);
            step.write_from(dst, &taken, undefined, &sources);
            step.write(ok, &from_fn(|l| source[l].1.into()));
        })
    }

    pub(super) fn vote(&mut self, mode: Vote, dst: Dst, value: Src, mask: Src) -> Outcome {
        self.together(mask, |step, members| {
            let yes = step.read_mask(value) & members;
            let result = match mode {
                Vote::All => u32::from(yes == members),
                Vote::Any => u32::from(yes != 0),
                Vote::Uni => u32::from(yes == 0 || yes == members),
                Vote::Ballot => yes,
            };
            step.write(dst, &[result.into(); 32]);
        })
    }

    pub(super) fn match_lanes(&mut self, all: bool, (dst, ok): (Dst, Dst), value: Src, mask: Src) -> Outcome {
        self.together(mask, |step, members| {
            let values = step.read(value);
            let peers = |l: usize| {
                lanes_of(members).filter(|&o| values[o] == values[l]).fold(0u64, |bits, o| bits | 1 << o)
            };
            let groups: Lanes = from_fn(peers);
            let same = lanes_of(members).all(|l| groups[l] == u64::from(members));
            let result = if all { [if same { members.into() } else { 0 }; 32] } else { groups };
            step.write(dst, &result);
            step.write(ok, &[same.into(); 32]);
        })
    }

    pub(super) fn redux(&mut self, op: Combine, signed: bool, dst: Dst, value: Src, mask: Src) -> Outcome {
        self.together(mask, |step, members| {
            let values = step.read(value);
            let words = lanes_of(members).map(|l| values[l] as u32);
            let result = words.reduce(|a, b| match op {
                Combine::Add => a.wrapping_add(b),
                Combine::Min if signed => (a as i32).min(b as i32) as u32,
                Combine::Max if signed => (a as i32).max(b as i32) as u32,
                Combine::Min => a.min(b),
                Combine::Max => a.max(b),
                Combine::And => a & b,
                Combine::Or => a | b,
                _ => a ^ b,
            });
            step.write(dst, &[result.unwrap_or(0).into(); 32]);
        })
    }

    /// Which lane leads is the hardware's choice: the lowest, or any other one that depends on the mask alone.
    pub(super) fn elect(&mut self, dst: Dst, ok: Dst, mask: Src) -> Outcome {
        self.together(mask, |step, members| {
            let options = step.machine.context.options;
            let lanes: Vec<usize> = lanes_of(members).collect();
            let pick = match options.unusual_leader {
                true => mix(options.seed ^ u64::from(members)) as usize % lanes.len(),
                false => 0,
            };
            let leader = lanes[pick];
            step.write(dst, &[leader as u64; 32]);
            step.write(ok, &from_fn(|l| u64::from(l == leader)));
        })
    }

    pub(super) fn active_mask(&mut self, dst: Dst) -> Outcome {
        let mask = self.mask;
        self.write(dst, &[mask.into(); 32]);
        Ok(Flow::Next)
    }
}

/// PTX ISA, "shfl.sync": the source lane, and whether it lies in range.
fn shuffle_source(mode: Shuffle, lane: u64, b: u64, c: u64) -> (usize, bool) {
    let (segment, clamp, b) = (c >> 8 & 0x1f, c & 0x1f, b & 0x1f);
    let low = lane & segment;
    let high = low | clamp & !segment;
    let (source, ok) = match mode {
        Shuffle::Up => (lane.wrapping_sub(b), lane as i64 - b as i64 >= high as i64),
        Shuffle::Down => (lane + b, lane + b <= high),
        Shuffle::Bfly => (lane ^ b, (lane ^ b) <= high),
        Shuffle::Idx => {
            let source = low | b & !segment;
            (source, source <= high)
        }
    };
    (if ok { source as usize } else { lane as usize }, ok)
}
