//! From a winner to a row: how far from the problem it was measured on the tile may be used.
//!
//! A row is for a class of problems, so the winner runs at both ends of the class too. Where it is clearly slower than
//! what the plan chooses there, the class ends at the problem itself; where that is so at both ends there is no row.

use flashcore_kernels::{
    Tile,
    tuned::{Class, Evidence, Row, Span, Subject},
};
use serde::Serialize;

use super::{
    journal::Stage,
    search::{Search, Side, head_to_head},
};
use crate::{
    bootstrap::Interval,
    error::LabError,
    machine::{self, Machine},
    memory,
    task::{Task, TaskError},
};

/// How the winner does at an end of its class.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Probe {
    /// The problem there.
    pub task: String,
    /// The winner's time over that of what the plan chooses there; `None` where both are the same.
    pub ratio: Option<Interval>,
    /// Whether the class reaches that far.
    pub kept: bool,
}

impl Search<'_> {
    /// The row of a winner, if it wins in more than one place, and what its probes said.
    pub(super) fn row(&mut self, tile: &Tile, side: Side) -> Result<(Option<Row>, Vec<Probe>), LabError> {
        let Some(own) = self.stand.subject().map(|subject| subject.class()) else {
            return Ok((None, vec![]));
        };
        let ends = [(Stage::Least, Span::least as fn(Span) -> u64), (Stage::Most, Span::most)];
        let mut reach = [self.task.clone(), self.task.clone()];
        let mut probes = Vec::new();
        for ((stage, end), reach) in ends.into_iter().zip(&mut reach) {
            let task = resized(&self.task, &own, end)?;
            if task != self.task {
                let probe = self.probe(stage, &task, tile)?;
                if probe.kept {
                    *reach = task;
                }
                probes.push(probe);
            }
        }
        let lost = !probes.is_empty() && !probes.iter().any(|probe| probe.kept);
        let class = class_between(&own, &reach);
        let evidence = self.evidence(side);
        Ok((class.filter(|_| !lost).map(|class| Row { class, tile: *tile, evidence }), probes))
    }

    fn probe(&mut self, stage: Stage, task: &Task, tile: &Tile) -> Result<Probe, LabError> {
        let name = task.to_string();
        if memory::check(3 * task.bytes() as u64).is_err() {
            return Ok(Probe { task: name, ratio: None, kept: false });
        }
        let mut side = self.final_known(stage, tile);
        if side.is_none() {
            let mut other = self.stand.other(task)?;
            let plan = other.plan()?;
            if plan == *tile {
                return Ok(Probe { task: name, ratio: None, kept: true });
            }
            if other.refusal(tile).is_some() {
                return Ok(Probe { task: name, ratio: None, kept: false });
            }
            let times = head_to_head(&mut *other, [tile, &plan], self.settings.seconds, self.observer)?;
            drop(other);
            side = Some(self.keep_final(stage, tile, times)?);
        }
        let ratio = side.and_then(|side| side.ratio());
        Ok(Probe { task: name, ratio, kept: ratio.is_none_or(|ratio| ratio.low <= 1.0) })
    }

    fn evidence(&self, side: Side) -> Evidence {
        let machine = Machine::this(None);
        let micro = |seconds: f64| seconds * 1e6;
        let interval = side.interval();
        let ratio = side.ratio().map_or([1.0; 3], |ratio| [ratio.low, ratio.point, ratio.high]);
        let on_gpu = !matches!(self.candidates[0].tile, Tile::Cpu(_));
        Evidence {
            problem: self.task.to_string(),
            median_us: micro(interval.point),
            interval_us: [interval.low, interval.high].map(micro),
            plan_us: micro(side.plan_median()),
            ratio,
            tried: self.candidates.len() as u32,
            device: machine.gpu.clone().filter(|_| on_gpu).unwrap_or(machine.cpu),
            driver: machine.driver.filter(|_| on_gpu),
            flashcore: env!("CARGO_PKG_VERSION").to_owned(),
            commit: machine::commit(),
            created: machine::now(),
        }
    }
}

/// The same task with as many queries and keys as an end of its class has.
fn resized(task: &Task, class: &Class, end: fn(Span) -> u64) -> Result<Task, TaskError> {
    let mut spec = task.spec().clone();
    let square = spec.q[2] == spec.k[2];
    spec.q[2] = end(class.queries) as usize;
    if square {
        spec.k[2] = spec.q[2];
    } else if !(class.left && class.right) {
        spec.k[2] = end(class.keys) as usize;
    }
    Task::parse(spec)
}

/// The class of all problems from one task to the other, both of the kind of `own`.
fn class_between(own: &Class, [least, most]: &[Task; 2]) -> Option<Class> {
    let class = |task: &Task| Some(Subject::new(&own.device, own.units, task.problem())?.exactly());
    let (least, most) = (class(least)?, class(most)?);
    let between = |a: Span, b: Span, usual: Span| {
        let found = Span::new(a.least().min(b.least()), a.most().max(b.most()));
        // A window's width does not change with the sequence.
        if found.least() == found.most() { usual } else { found }
    };
    Some(Class {
        queries: between(least.queries, most.queries, own.queries),
        keys: between(least.keys, most.keys, own.keys),
        tiles: between(least.tiles, most.tiles, own.tiles),
        ..own.clone()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_core::{DType, Mask};

    #[test]
    fn classes_reach_from_probe_to_probe() {
        let task = |seq, mask| Task::square(DType::F16, [2, 4, seq, 64], mask).unwrap();
        let own = |task: &Task| Subject::new("sm_90", 132, task.problem()).unwrap().class();
        let middle = task(4096, Mask::CAUSAL);
        let class = own(&middle);
        let ends =
            [Span::least as fn(Span) -> u64, Span::most].map(|end| resized(&middle, &class, end).unwrap());
        assert_eq!(ends.each_ref().map(|task| task.spec().k[2]), [2897, 5792]);
        let whole = class_between(&class, &ends).unwrap();
        assert_eq!((whole.queries, whole.tiles), (Span::new(2897, 5792), Span::new(8 * 46, 8 * 91)));
        let upper = class_between(&class, &[middle.clone(), ends[1].clone()]).unwrap();
        assert_eq!((upper.queries, upper.keys), (Span::new(4096, 5792), Span::new(4096, 5792)));
        let window = task(4096, Mask::window(256, 0));
        let class = own(&window);
        assert!(class.keys.holds(257) && !class.keys.holds(4096), "{class:?}");
        let one = class_between(&class, &[window.clone(), window]).unwrap();
        assert_eq!(one.keys, class.keys);
    }
}
