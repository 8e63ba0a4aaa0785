//! Every tile of a kernel family as options on a few axes, and which of them to try next.
//!
//! [`super::search`] asks for wave after wave. Which candidates come next depends only on the seed and on what was
//! measured, so a resumed search takes the same path.

use std::{collections::HashSet, iter::successors, vec::IntoIter};

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

/// A field of a tile's JSON form with its options, neighbours beside each other.
type Axis = (&'static str, Vec<Value>);

/// What is searched in the family of `tile`.
fn options(tile: &Tile) -> Vec<(&'static str, Value)> {
    let parts = |parts: u32| json!({ "single": { "parts": parts } });
    match tile {
        Tile::Sm80(_) => vec![
            ("/forward_sm80/warps", json!([4, 8])),
            ("/forward_sm80/blocks", json!([1, 2])),
            ("/forward_sm80/tile_n", json!([32, 64, 96, 128])),
            ("/forward_sm80/step_n", json!([16, 32, 64, 128])),
            ("/forward_sm80/stages", json!([2, 3, 4])),
            ("/forward_sm80/ctas_per_sm", json!([1, 2, 3])),
            ("/forward_sm80/q_in_registers", json!([false, true])),
        ],
        Tile::Sm90(_) => vec![
            ("/forward_sm90/consumers", json!([1, 2, 3])),
            ("/forward_sm90/tile_n", json!([32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256])),
            ("/forward_sm90/stages", json!([2, 3, 4, 5, 6])),
            ("/forward_sm90/q_stages", json!([1, 2])),
            ("/forward_sm90/staging/cols", json!([64, 128, 192, 256])),
            ("/forward_sm90/staging/places", json!([1, 2])),
            ("/forward_sm90/registers", json!([null, [24, 240], [40, 232], [32, 160]])),
            ("/forward_sm90/order", json!(["static", parts(1), parts(2), parts(4), parts(8), "atomic"])),
            ("/forward_sm90/ctas_per_sm", json!([1, 2])),
            ("/forward_sm90/turn", json!([1, 2])),
        ],
        Tile::Decode(_) => vec![
            ("/decode/warps", json!([2, 4, 8])),
            ("/decode/tile_n", json!([16, 32, 64])),
            ("/decode/stages", json!([1, 2, 3, 4, 6])),
            ("/decode/ctas_per_sm", json!([1, 2, 3, 4])),
            ("/decode/q_in_registers", json!([false, true])),
            ("/decode/copies", json!(["lanes", "tensor"])),
            ("/decode/splits", json!([null, 1, 2, 4, 8, 16, 32, 64, 128])),
        ],
        _ => Vec::new(),
    }
}

/// The axes of the space that `tile` lies in: its own values are always among the options.
fn axes(tile: &Tile) -> Vec<Axis> {
    let tile_json = json!(tile);
    let axis = |(field, options): (&'static str, Value)| {
        let (own, mut options) = (tile_json.pointer(field)?, options.as_array()?.clone());
        if !options.contains(own) {
            options.push(own.clone());
        }
        Some((field, options))
    };
    options(tile).into_iter().filter_map(axis).collect()
}

fn with(tile: &Tile, field: &str, value: &Value) -> Option<Tile> {
    let mut tile = json!(tile);
    *tile.pointer_mut(field)? = value.clone();
    serde_json::from_value(tile).ok()
}

/// A tile that takes each field from one of two parents, or all from one, and is changed in one or two. One in eight is
/// any tile, so that no corner stays dark.
fn offspring(axes: &[Axis], parents: &[Scored], rng: &mut Rng) -> Option<Tile> {
    let [mut child, other] = [0; 2].map(|_| json!(parents[below(rng, parents.len())].0));
    let (crossed, any, twice) = (below(rng, 2) == 0, below(rng, 8) == 0, below(rng, 3) == 0);
    let [first, second] = [0; 2].map(|_| below(rng, axes.len()));
    for (n, (field, options)) in axes.iter().enumerate() {
        let value = child.pointer_mut(field)?;
        if crossed && below(rng, 2) == 0 {
            *value = other.pointer(field)?.clone();
        }
        let at = options.iter().position(|option| option == value).unwrap_or_default();
        // Neighbours resemble each other, so every other change is a small one.
        let changed = match below(rng, 4) {
            0 if !any => at.saturating_sub(1),
            1 if !any => (at + 1).min(options.len() - 1),
            _ => below(rng, options.len()),
        };
        if any || n == first || n == second && twice {
            *value = options[changed].clone();
        }
    }
    serde_json::from_value(child).ok()
}

/// The same with a stage less, if it has more than two.
fn lighter(tile: &Tile) -> Option<Tile> {
    let mut tile = *tile;
    let stages = match &mut tile {
        Tile::Sm80(shape) => &mut shape.stages,
        Tile::Sm90(shape) => &mut shape.stages,
        Tile::Decode(shape) => &mut shape.stages,
        _ => return None,
    };
    *stages = stages.checked_sub(1).filter(|stages| *stages >= 2)?;
    Some(tile)
}

/// A number below `n`.
fn below(rng: &mut Rng, n: usize) -> usize {
    ((u128::from(rng.next_u64()) * n as u128) >> 64) as usize
}

/// Hands out candidates, each once.
#[derive(Debug)]
pub struct Walk {
    axes: Vec<Axis>,
    seen: HashSet<Tile>,
    way: Way,
}

#[derive(Debug)]
enum Way {
    /// Those that are still to come, with how many fields differ.
    Exhaustive(IntoIter<(usize, Tile)>),
    Evolve {
        rng: Rng,
        best: f64,
        idle: usize,
    },
}

impl Walk {
    /// Every tile, those most like `tile` first.
    pub fn exhaustive(tile: &Tile) -> Self {
        let (axes, own) = (axes(tile), json!(tile));
        let mut all = vec![(0, *tile)];
        for (field, options) in &axes {
            let vary = |(differing, tile): &(usize, Tile)| {
                let varied = |option: &Value| {
                    let differs = own.pointer(field) != Some(option);
                    Some((differing + usize::from(differs), with(tile, field, option)?))
                };
                options.iter().filter_map(varied).collect::<Vec<_>>()
            };
            all = all.iter().flat_map(vary).collect();
        }
        all.sort_by_key(|(differing, _)| *differing);
        Self { axes, seen: HashSet::from([*tile]), way: Way::Exhaustive(all.into_iter()) }
    }

    /// Mutants and crossings of the fittest, of `tile` at first.
    pub fn evolve(tile: &Tile, seed: u64) -> Self {
        let way = Way::Evolve { rng: Rng::new(seed), best: f64::INFINITY, idle: 0 };
        Self { axes: axes(tile), seen: HashSet::from([*tile]), way }
    }

    /// Up to `count` new tiles that `fits` lets pass, given what was `measured`, at least one; none when it is over.
    pub fn next(&mut self, count: usize, measured: &[Scored], fits: impl Fn(&Tile) -> bool) -> Vec<Tile> {
        let (axes, seen) = (&self.axes, &mut self.seen);
        let mut is_new = |tile: &Tile| seen.insert(*tile) && fits(tile);
        match &mut self.way {
            Way::Exhaustive(rest) => rest.map(|(_, tile)| tile).filter(is_new).take(count).collect(),
            Way::Evolve { rng, best, idle } => {
                let fittest = fittest(measured);
                *idle = if fittest[0].1 < *best { 0 } else { *idle + 1 };
                *best = fittest[0].1.min(*best);
                let parents = &fittest[..fittest.len().min(PARENTS)];
                let attempts = if *idle > PATIENCE { 0 } else { count * ATTEMPTS };
                let tiles = (0..attempts).filter_map(|_| offspring(axes, parents, rng));
                // A larger tile often leaves no room for as many stages.
                let fitting = |tile| successors(Some(tile), lighter).find(&mut is_new);
                tiles.filter_map(fitting).take(count).collect()
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
        plan(task().forward().unwrap(), gpu, 256).unwrap().kernel().tile()
    }

    #[test]
    fn every_axis_is_a_field_and_every_option_makes_a_tile() {
        for tile in [planned(&Gpu::HOPPER), planned(&Gpu::AMPERE)] {
            assert_eq!(axes(&tile).len(), options(&tile).len());
            for (field, options) in axes(&tile) {
                assert!(options.iter().all(|option| with(&tile, field, option).is_some()), "{field}");
            }
        }
    }

    #[test]
    fn the_exhaustive_walk_visits_everything_that_fits_once() {
        let (task, tile) = (task(), planned(&Gpu::AMPERE));
        let fits = |tile: &Tile| plan_tile(task.forward().unwrap(), &Gpu::AMPERE, 256, *tile).is_ok();
        let mut walk = Walk::exhaustive(&tile);
        let waves = std::iter::from_fn(|| Some(walk.next(7, &[], fits)).filter(|wave| !wave.is_empty()));
        let visited: Vec<Tile> = waves.flatten().collect();
        let distinct: HashSet<Tile> = visited.iter().copied().collect();
        let Way::Exhaustive(all) = Walk::exhaustive(&tile).way else { panic!("another way") };
        let fitting = all.filter(|(_, tile)| fits(tile)).count();
        assert!(fitting > 20 && visited.len() == fitting - 1 && distinct.len() == visited.len(), "{fitting}");
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
            let found = evolved(seed);
            let best = fittest(&found)[0].1;
            assert!(best < 1.06 && found.len() < 5000, "seed {seed}: {best} after {}", found.len());
        }
        assert_eq!(evolved(1), evolved(1));
        assert_ne!(evolved(1), evolved(2));
    }
}
