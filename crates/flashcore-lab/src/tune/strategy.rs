//! Which candidates come next: all of them in order, or offspring of the best so far.
//!
//! Both are functions of what was measured, the seed and nothing else, so that a search that is taken up again goes
//! the same way. [`super::search`] asks wave by wave.

use std::collections::HashSet;

use flashcore_testkit::Rng;

use super::space::{Genome, Space, below};

/// Parents of the next generation.
const PARENTS: usize = 6;
/// Generations without progress after which evolution ends.
const PATIENCE: usize = 8;
/// Attempts at a new genome for each that is asked for; far more are impossible than possible.
const ATTEMPTS: usize = 2000;

/// How candidates are found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Strategy {
    /// Every candidate, those nearest to the plan's choice first.
    Exhaustive,
    /// Mutation and crossover of the fittest.
    Evolve,
}

impl Strategy {
    /// Every strategy.
    pub const ALL: [Self; 2] = [Self::Exhaustive, Self::Evolve];

    /// The name used on the command line and in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exhaustive => "exhaustive",
            Self::Evolve => "evolve",
        }
    }
}

/// A candidate and how good it is: smaller is fitter.
#[derive(Clone, PartialEq, Debug)]
pub struct Scored {
    /// The candidate.
    pub genome: Genome,
    /// Its fitness.
    pub score: f64,
}

/// Hands out candidates.
pub struct Walk<'a> {
    space: &'a Space,
    start: Genome,
    seen: HashSet<Genome>,
    way: Way,
}

enum Way {
    /// What is left, the next one last.
    Exhaustive(Vec<Genome>),
    Evolve {
        rng: Rng,
        best: f64,
        idle: usize,
    },
}

impl<'a> Walk<'a> {
    /// A walk from `start`, which is taken to have been handed out.
    pub fn new(space: &'a Space, start: Genome, strategy: Strategy, seed: u64) -> Self {
        let way = match strategy {
            Strategy::Exhaustive => Way::Exhaustive(space.all_from(&start).into_iter().rev().collect()),
            Strategy::Evolve => Way::Evolve { rng: Rng::new(seed), best: f64::INFINITY, idle: 0 },
        };
        Self { space, seen: HashSet::from([start.clone()]), start, way }
    }

    /// Up to `count` candidates that `allowed` lets pass and that were not handed out before; none when it is over.
    pub fn next(
        &mut self,
        count: usize,
        scored: &[Scored],
        allowed: &mut dyn FnMut(&Genome) -> bool,
    ) -> Vec<Genome> {
        let mut wave = Vec::new();
        if let Way::Evolve { best, idle, .. } = &mut self.way {
            let now = scored.iter().map(|entry| entry.score).fold(f64::INFINITY, f64::min);
            *idle = if now < *best { 0 } else { *idle + 1 };
            *best = now.min(*best);
            if *idle > PATIENCE {
                return wave;
            }
        }
        let (mut attempts, parents) = (count * ATTEMPTS, fittest(scored));
        while wave.len() < count && attempts > 0 {
            let Some(genome) = self.propose(&parents) else { break };
            attempts -= 1;
            wave.extend(self.admitted(genome, allowed));
        }
        wave
    }

    /// The candidate if it is new and allowed. In evolution fewer stages may do instead: a larger tile often leaves no
    /// room for as many, and two axes seldom change as it takes.
    fn admitted(&mut self, genome: Genome, allowed: &mut dyn FnMut(&Genome) -> bool) -> Option<Genome> {
        if !self.seen.insert(genome.clone()) {
            return None;
        }
        let lighter = match self.way {
            Way::Exhaustive(_) => Vec::new(),
            Way::Evolve { .. } => self.space.with_fewer_stages(&genome),
        };
        if allowed(&genome) {
            return Some(genome);
        }
        lighter.into_iter().find(|genome| self.seen.insert(genome.clone()) && allowed(genome))
    }

    fn propose(&mut self, parents: &[&Genome]) -> Option<Genome> {
        match &mut self.way {
            Way::Exhaustive(left) => left.pop(),
            Way::Evolve { rng, .. } => Some(offspring(self.space, &self.start, parents, rng)),
        }
    }
}

/// The parents of a generation.
fn fittest(scored: &[Scored]) -> Vec<&Genome> {
    let mut fittest: Vec<&Scored> = scored.iter().collect();
    fittest.sort_by(|a, b| a.score.total_cmp(&b.score));
    fittest.into_iter().take(PARENTS).map(|entry| &entry.genome).collect()
}

/// One in eight is any genome, so that no corner stays dark; half of the others have two parents.
fn offspring(space: &Space, start: &Genome, parents: &[&Genome], rng: &mut Rng) -> Genome {
    if below(rng, 8) == 0 {
        return space.random(rng);
    }
    let parent = |rng: &mut Rng| match parents.len() {
        0 => start,
        n => parents[below(rng, n)],
    };
    let first = parent(rng);
    let child = if below(rng, 2) == 0 { first.clone() } else { space.child([first, parent(rng)], rng) };
    space.mutant(&child, rng)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_core::{DType, Mask};
    use flashcore_kernels::{Gpu, Tile, plan};

    use crate::task::Task;

    fn hopper() -> (Space, Genome) {
        let task = Task::square(DType::BF16, [1, 16, 4096, 128], Mask::NONE).unwrap();
        let tile = plan(task.problem(), &Gpu::HOPPER, 256).unwrap().kernel().tile();
        let space = Space::around(&tile);
        let start = space.genome(&tile).unwrap();
        (space, start)
    }

    /// A landscape with one valley, far from the plan's choice, and ridges between axes.
    fn height(tile: &Tile) -> f64 {
        let Tile::Sm90(s) = tile else { return f64::INFINITY };
        let keys = (f64::from(s.tile_n) - 176.0).abs() / 16.0;
        let stages = (f64::from(s.stages) - 4.0).abs();
        let consumers = f64::from(s.consumers.abs_diff(3));
        let cluster = f64::from(s.order.parts().abs_diff(4));
        let ridge = if s.staging.places == s.q_stages { 0.0 } else { 0.5 };
        1.0 + 0.1 * keys + 0.2 * stages + 0.3 * consumers * (1.0 + 0.1 * keys) + 0.05 * cluster + ridge
    }

    #[test]
    fn evolution_finds_the_optimum_of_a_synthetic_landscape() {
        let (space, start) = hopper();
        for seed in 0..5 {
            let mut scored = vec![Scored { score: height(&space.tile(&start)), genome: start.clone() }];
            let mut walk = Walk::new(&space, start.clone(), Strategy::Evolve, seed);
            for _ in 0..60 {
                let wave = walk.next(16, &scored, &mut |_| true);
                scored.extend(wave.into_iter().map(|genome| {
                    let score = height(&space.tile(&genome));
                    Scored { genome, score }
                }));
            }
            let best = scored.iter().map(|entry| entry.score).fold(f64::INFINITY, f64::min);
            let share = scored.len() as f64 / space.size() as f64;
            assert!(best < 1.06 && share < 0.05, "seed {seed}: {best} after {share:.3} of the space");
        }
    }

    #[test]
    fn evolution_is_repeatable_and_ends() {
        let (space, start) = hopper();
        let waves = |seed| {
            let mut walk = Walk::new(&space, start.clone(), Strategy::Evolve, seed);
            let scored = [Scored { genome: start.clone(), score: 1.0 }];
            (0..2 * PATIENCE).map(|_| walk.next(4, &scored, &mut |_| true)).collect::<Vec<_>>()
        };
        assert_eq!(waves(1), waves(1));
        assert_ne!(waves(1), waves(2));
        let counts: Vec<usize> = waves(1).iter().map(Vec::len).collect();
        assert_eq!(counts.iter().sum::<usize>(), 4 * (PATIENCE + 1), "it ends without progress: {counts:?}");
    }

    #[test]
    fn the_exhaustive_walk_visits_everything_once() {
        let tile = Tile::Cpu(flashcore_kernels::CpuTile { keys: 128, chunk: 4 });
        let space = Space::around(&tile);
        let start = space.genome(&tile).unwrap();
        let mut walk = Walk::new(&space, start.clone(), Strategy::Exhaustive, 0);
        let mut all = vec![start];
        loop {
            let wave = walk.next(7, &[], &mut |genome| space.tile(genome) != other());
            if wave.is_empty() {
                break;
            }
            all.extend(wave);
        }
        let distinct: HashSet<_> = all.iter().cloned().collect();
        assert_eq!((all.len(), distinct.len()), (space.size() - 1, space.size() - 1));
    }

    fn other() -> Tile {
        Tile::Cpu(flashcore_kernels::CpuTile { keys: 32, chunk: 1 })
    }
}
