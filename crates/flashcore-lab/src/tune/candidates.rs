//! Every tile of a kernel family as options on a few axes, and which of them come next.
//!
//! [`super::search`] asks for wave after wave. Which candidates come next depends on the seed and on what was measured,
//! nothing else, so that a search that is resumed goes the same way.

use std::{collections::HashSet, vec::IntoIter};

use flashcore_kernels::Tile;
use flashcore_testkit::Rng;
use serde_json::{Value, json};

/// Parents of the next generation.
const PARENTS: usize = 6;
/// Generations without progress after which evolution ends.
const PATIENCE: usize = 8;
/// Attempts at each candidate of a generation; far more tiles are impossible than possible.
const ATTEMPTS: usize = 2000;

/// A candidate with its fitness: smaller is fitter, 1 is the rules' choice.
pub type Scored = (Tile, f64);

/// One option per axis.
type Genome = Vec<usize>;

/// The fields of a tile's JSON form that are searched, with their options, neighbours beside each other.
fn axes(tile: &Tile) -> (&'static str, Value) {
    let parts = |parts: u32| json!({ "single": { "parts": parts } });
    match tile {
        Tile::Sm80(_) => (
            "/forward_sm80",
            json!({
                "/warps": [4, 8],
                "/blocks": [1, 2],
                "/tile_n": [32, 64, 96, 128],
                "/step_n": [16, 32, 64, 128],
                "/stages": [2, 3, 4],
                "/ctas_per_sm": [1, 2, 3],
                "/q_in_registers": [false, true],
            }),
        ),
        Tile::Sm90(_) => (
            "/forward_sm90",
            json!({
                "/consumers": [1, 2, 3],
                "/tile_n": [32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256],
                "/stages": [2, 3, 4, 5, 6],
                "/q_stages": [1, 2],
                "/staging/cols": [64, 128, 192, 256],
                "/staging/places": [1, 2],
                "/registers": [null, [24, 240], [40, 232], [32, 160]],
                "/order": ["static", parts(1), parts(2), parts(4), parts(8), "atomic"],
                "/ctas_per_sm": [1, 2],
                "/turn": [1, 2],
            }),
        ),
        _ => ("", Value::Null),
    }
}

/// Everything that a tile of one kernel family can be.
#[derive(Debug)]
struct Space {
    base: Value,
    /// Where each field is in the JSON form, and its options.
    axes: Vec<(String, Vec<Value>)>,
}

impl Space {
    /// The space that `tile` lies in; whatever its values are, they are among the options.
    fn around(tile: &Tile) -> Self {
        let base = serde_json::to_value(tile).unwrap_or_default();
        let (family, axes) = axes(tile);
        let with_own = |(field, options): (&String, &Value)| {
            let field = format!("{family}{field}");
            let (own, mut options) = (base.pointer(&field)?, options.as_array()?.clone());
            if !options.contains(own) {
                options.push(own.clone());
            }
            Some((field, options))
        };
        let axes = axes.as_object().into_iter().flatten().filter_map(with_own).collect();
        Self { base, axes }
    }

    fn genome(&self, tile: &Tile) -> Genome {
        let tile = serde_json::to_value(tile).unwrap_or_default();
        let option = |(field, options): &(String, Vec<Value>)| {
            options.iter().position(|option| Some(option) == tile.pointer(field)).unwrap_or_default()
        };
        self.axes.iter().map(option).collect()
    }

    fn tile(&self, genome: &Genome) -> Option<Tile> {
        let mut tile = self.base.clone();
        for ((field, options), &option) in self.axes.iter().zip(genome) {
            *tile.pointer_mut(field)? = options[option].clone();
        }
        serde_json::from_value(tile).ok()
    }

    fn size(&self) -> usize {
        self.axes.iter().map(|(_, options)| options.len()).product()
    }

    /// Genome number `index` of all.
    fn numbered(&self, mut index: usize) -> Genome {
        let digit = |(_, options): &(String, Vec<Value>)| {
            let digit = index % options.len();
            index /= options.len();
            digit
        };
        self.axes.iter().map(digit).collect()
    }

    /// One in eight is any genome, so that no corner stays dark; half of the others have two parents, all are mutants.
    fn offspring(&self, parents: &[Genome], rng: &mut Rng) -> Genome {
        if below(rng, 8) == 0 {
            return self.numbered(below(rng, self.size()));
        }
        let [one, other] = [0; 2].map(|_| &parents[below(rng, parents.len())]);
        let mut child = one.clone();
        if below(rng, 2) == 0 {
            child = (0..child.len()).map(|axis| [one, other][below(rng, 2)][axis]).collect();
        }
        for _ in 0..1 + usize::from(below(rng, 3) == 0) {
            let axis = below(rng, child.len());
            let last = self.axes[axis].1.len() - 1;
            // Neighbours resemble each other, so every other step is a short one.
            child[axis] = match below(rng, 4) {
                0 => child[axis].saturating_sub(1),
                1 => (child[axis] + 1).min(last),
                _ => below(rng, last + 1),
            };
        }
        child
    }
}

/// A number below `n`.
fn below(rng: &mut Rng, n: usize) -> usize {
    ((u128::from(rng.next_u64()) * n as u128) >> 64) as usize
}

/// Hands out candidates, each once.
#[derive(Debug)]
pub struct Walk {
    space: Space,
    seen: HashSet<Tile>,
    way: Way,
}

#[derive(Debug)]
enum Way {
    /// Numbers of the genomes that are still to come.
    Exhaustive(IntoIter<usize>),
    Evolve {
        rng: Rng,
        best: f64,
        idle: usize,
    },
}

impl Walk {
    /// Every tile, those most like `tile` first.
    pub fn exhaustive(tile: &Tile) -> Self {
        let space = Space::around(tile);
        let start = space.genome(tile);
        let differences = |n: &usize| space.numbered(*n).iter().zip(&start).filter(|(a, b)| a != b).count();
        let mut numbers: Vec<usize> = (0..space.size()).collect();
        numbers.sort_by_cached_key(differences);
        Self { space, seen: HashSet::from([*tile]), way: Way::Exhaustive(numbers.into_iter()) }
    }

    /// Mutants and crossings of the fittest, of `tile` at first.
    pub fn evolve(tile: &Tile, seed: u64) -> Self {
        let way = Way::Evolve { rng: Rng::new(seed), best: f64::INFINITY, idle: 0 };
        Self { space: Space::around(tile), seen: HashSet::from([*tile]), way }
    }

    /// Up to `count` new tiles that `fits` lets pass, given what was `measured`, at least one; none when it is over.
    pub fn next(&mut self, count: usize, measured: &[Scored], fits: impl Fn(&Tile) -> bool) -> Vec<Tile> {
        match &mut self.way {
            Way::Exhaustive(numbers) => {
                let tiles = numbers.filter_map(|n| self.space.tile(&self.space.numbered(n)));
                tiles.filter(|tile| fits(tile) && self.seen.insert(*tile)).take(count).collect()
            }
            Way::Evolve { rng, best, idle } => {
                let fittest = fittest(measured);
                *idle = if fittest[0].1 < *best { 0 } else { *idle + 1 };
                *best = fittest[0].1.min(*best);
                if *idle > PATIENCE {
                    return Vec::new();
                }
                let parents: Vec<_> =
                    fittest.iter().take(PARENTS).map(|(tile, _)| self.space.genome(tile)).collect();
                let tiles = (0..count * ATTEMPTS)
                    .filter_map(|_| self.space.tile(&self.space.offspring(&parents, rng)));
                tiles.filter(|tile| self.seen.insert(*tile) && fits(tile)).take(count).collect()
            }
        }
    }
}

/// The measured tiles, the fittest first.
pub fn fittest(measured: &[Scored]) -> Vec<Scored> {
    let mut fittest = measured.to_vec();
    fittest.sort_by(|a, b| a.1.total_cmp(&b.1));
    fittest
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_core::{DType, Mask};
    use flashcore_kernels::{Gpu, plan, plan_tile};

    use crate::task::Task;

    fn task() -> Task {
        Task::square(DType::BF16, [1, 16, 4096, 128], Mask::NONE).unwrap()
    }

    fn planned(gpu: &Gpu) -> Tile {
        plan(task().problem(), gpu, 256).unwrap().kernel().tile()
    }

    #[test]
    fn every_axis_is_a_field_and_every_option_makes_a_tile() {
        for tile in [planned(&Gpu::HOPPER), planned(&Gpu::AMPERE)] {
            let (space, start) = (Space::around(&tile), Space::around(&tile).genome(&tile));
            assert_eq!(Some(space.axes.len()), axes(&tile).1.as_object().map(serde_json::Map::len));
            assert_eq!(space.tile(&start), Some(tile));
            for axis in 0..start.len() {
                let with = |option| [&start[..axis], &[option], &start[axis + 1..]].concat();
                let (field, options) = &space.axes[axis];
                assert!((0..options.len()).all(|option| space.tile(&with(option)).is_some()), "{field}");
            }
        }
    }

    #[test]
    fn the_exhaustive_walk_visits_everything_that_fits_once() {
        let (task, tile) = (task(), planned(&Gpu::AMPERE));
        let fits = |tile: &Tile| plan_tile(task.problem(), &Gpu::AMPERE, 256, *tile).is_ok();
        let mut walk = Walk::exhaustive(&tile);
        let waves = std::iter::from_fn(|| Some(walk.next(7, &[], fits)).filter(|wave| !wave.is_empty()));
        let visited: Vec<Tile> = waves.flatten().collect();
        let space = Space::around(&tile);
        let all = (0..space.size()).filter_map(|n| space.tile(&space.numbered(n))).filter(fits);
        let others: HashSet<Tile> = all.filter(|other| *other != tile).collect();
        assert!(others.len() > 20 && visited.len() == others.len(), "{}", visited.len());
        assert_eq!(visited.into_iter().collect::<HashSet<_>>(), others);
    }

    /// A landscape with one valley, far from the rules' choice, and ridges between axes.
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
    fn evolution_finds_the_optimum_of_a_synthetic_landscape_and_ends() {
        let tile = planned(&Gpu::HOPPER);
        let evolved = |seed| {
            let (mut walk, mut found) = (Walk::evolve(&tile, seed), vec![(tile, height(&tile))]);
            loop {
                let wave = walk.next(16, &found, |_| true);
                if wave.is_empty() {
                    return found;
                }
                found.extend(wave.into_iter().map(|tile| (tile, height(&tile))));
            }
        };
        for seed in 0..5 {
            let (found, size) = (evolved(seed), Space::around(&tile).size());
            let (best, share) = (fittest(&found)[0].1, found.len() as f64 / size as f64);
            assert!(best < 1.06 && share < 0.05, "seed {seed}: {best} after {share:.3} of the space");
        }
        assert_eq!(evolved(1), evolved(1));
        assert_ne!(evolved(1), evolved(2));
    }
}
