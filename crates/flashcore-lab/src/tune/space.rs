//! The candidates: every tile that a kernel family could be cut into, as choices on a few axes.
//!
//! A [`Genome`] picks one option on each axis. [`super::strategy`] walks over genomes; [`Space::tile`] makes a tile of
//! one, and [`super::stand`] says whether that tile can exist.

use flashcore_cpu::Tiles;
use flashcore_kernels::{RegisterBudget, Tile, forward_sm90::Order};
use flashcore_testkit::Rng;

/// One option per axis.
pub type Genome = Vec<usize>;

/// Everything that a tile of one kernel family can be.
#[derive(Clone, Debug)]
pub struct Space {
    axes: Vec<Axis>,
    /// What has its value on every axis where the options lack it.
    base: Tile,
}

/// A property of a tile and what it may be.
#[derive(Clone, Copy, Debug)]
struct Axis {
    name: &'static str,
    /// How many options there are, that of the base included.
    options: usize,
    /// Which option a tile has, if any.
    find: fn(&Tile) -> Option<usize>,
    /// Gives a tile an option; one that is not there leaves the tile as it is.
    set: fn(&mut Tile, usize),
}

/// Axes of tiles of one family: each names a field and its options, neighbours beside each other.
macro_rules! axes {
    ($family:ident { $($($field:ident).+: $options:expr),+ $(,)? }) => {
        vec![$({
            const OPTIONS: &[axes!(@type $($field).+)] = &$options;
            Axis {
                name: stringify!($($field).+),
                options: OPTIONS.len(),
                find: |tile| {
                    let Tile::$family(tile) = tile else { return None };
                    OPTIONS.iter().position(|option| *option == tile.$($field).+)
                },
                set: |tile, option| {
                    if let (Tile::$family(tile), Some(option)) = (tile, OPTIONS.get(option)) {
                        tile.$($field).+ = *option;
                    }
                },
            }
        },)+]
    };
    (@type order) => { Order };
    (@type budget) => { Option<RegisterBudget> };
    (@type q_in_registers) => { bool };
    (@type $($number:ident).+) => { u32 };
}

/// The axes of a tile's family.
fn axes_of(tile: &Tile) -> Vec<Axis> {
    const fn registers(producer: u32, consumer: u32) -> Option<RegisterBudget> {
        Some(RegisterBudget { producer, consumer })
    }
    const fn parts(parts: u32) -> Order {
        Order::Single { parts }
    }
    match tile {
        Tile::Sm80(_) => axes!(Sm80 {
            warps: [4, 8],
            blocks: [1, 2],
            tile_n: [32, 64, 96, 128],
            step_n: [16, 32, 64, 128],
            stages: [2, 3, 4],
            ctas_per_sm: [1, 2, 3],
            q_in_registers: [false, true],
        }),
        Tile::Sm90(_) => axes!(Sm90 {
            consumers: [1, 2, 3],
            tile_n: [32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256],
            stages: [2, 3, 4, 5, 6],
            q_stages: [1, 2],
            staging.cols: [64, 128, 192, 256],
            staging.places: [1, 2],
            budget: [None, registers(24, 240), registers(40, 232), registers(32, 160)],
            order: [Order::Static, parts(1), parts(2), parts(4), parts(8), Order::Atomic],
            ctas_per_sm: [1, 2],
            turn: [1, 2],
        }),
        Tile::Cpu(_) => axes!(Cpu { keys: numbers(Tiles::KEYS), chunk: numbers(Tiles::CHUNKS) }),
        _ => Vec::new(),
    }
}

const fn numbers<const N: usize>(sizes: [usize; N]) -> [u32; N] {
    let (mut numbers, mut at) = ([0; N], 0);
    while at < N {
        numbers[at] = sizes[at] as u32;
        at += 1;
    }
    numbers
}

impl Space {
    /// The space that `tile` lies in; whatever its values are, they are among the options.
    pub fn around(tile: &Tile) -> Self {
        let with_base = |axis: Axis| {
            let own = usize::from((axis.find)(tile).is_none());
            Axis { options: axis.options + own, ..axis }
        };
        Self { axes: axes_of(tile).into_iter().map(with_base).collect(), base: *tile }
    }

    /// The genome of a tile of this space.
    pub fn genome(&self, tile: &Tile) -> Option<Genome> {
        let option = |axis: &Axis| (axis.find)(tile).unwrap_or(axis.options - 1);
        let genome = self.axes.iter().map(option).collect();
        (self.tile(&genome) == *tile).then_some(genome)
    }

    /// The tile that a genome stands for.
    pub fn tile(&self, genome: &Genome) -> Tile {
        let mut tile = self.base;
        self.axes.iter().zip(genome).for_each(|(axis, option)| (axis.set)(&mut tile, *option));
        tile
    }

    /// Number of genomes.
    pub fn size(&self) -> usize {
        self.axes.iter().map(|axis| axis.options).product()
    }

    /// Every genome, those with the fewest differences from `start` first.
    pub fn all_from(&self, start: &Genome) -> Vec<Genome> {
        let mut all: Vec<Genome> = (0..self.size()).map(|index| self.numbered(index)).collect();
        all.sort_by_key(|genome| distance(genome, start));
        all
    }

    fn numbered(&self, mut index: usize) -> Genome {
        let digit = |axis: &Axis| {
            let digit = index % axis.options;
            index /= axis.options;
            digit
        };
        self.axes.iter().map(digit).collect()
    }

    /// Any genome.
    pub fn random(&self, rng: &mut Rng) -> Genome {
        self.axes.iter().map(|axis| below(rng, axis.options)).collect()
    }

    /// A copy with another option on one axis, or now and then on two.
    pub fn mutant(&self, genome: &Genome, rng: &mut Rng) -> Genome {
        let mut mutant = genome.clone();
        let changes = 1 + usize::from(below(rng, 3) == 0);
        for _ in 0..changes {
            let axis = below(rng, self.axes.len());
            let last = self.axes[axis].options - 1;
            // Neighbours resemble each other, so every other step is a short one.
            mutant[axis] = match below(rng, 4) {
                0 => mutant[axis].saturating_sub(1),
                1 => (mutant[axis] + 1).min(last),
                _ => below(rng, last + 1),
            };
        }
        mutant
    }

    /// The same with fewer and fewer stages; none where there are no stages.
    pub fn with_fewer_stages(&self, genome: &Genome) -> Vec<Genome> {
        let Some(axis) = self.axes.iter().position(|axis| axis.name == "stages") else { return Vec::new() };
        let with = |stages: usize| {
            let mut genome = genome.clone();
            genome[axis] = stages;
            genome
        };
        (0..genome[axis]).rev().map(with).collect()
    }

    /// Each axis from one parent or the other.
    pub fn child(&self, parents: [&Genome; 2], rng: &mut Rng) -> Genome {
        (0..self.axes.len()).map(|axis| parents[below(rng, 2)][axis]).collect()
    }
}

fn distance(a: &Genome, b: &Genome) -> usize {
    a.iter().zip(b).filter(|(a, b)| a != b).count()
}

/// A number below `n`.
pub(super) fn below(rng: &mut Rng, n: usize) -> usize {
    ((u128::from(rng.next_u64()) * n as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_core::{DType, Mask};
    use flashcore_kernels::{CpuTile, Gpu, plan, plan_tile};

    use crate::task::Task;

    #[test]
    fn genomes_and_tiles_are_the_same_thing() {
        for (gpu, dim, mask) in [(Gpu::HOPPER, 128, Mask::CAUSAL), (Gpu::AMPERE, 96, Mask::NONE)] {
            let task = Task::square(DType::BF16, [1, 16, 4096, dim], mask).unwrap();
            let tile = plan(task.problem(), &gpu, 256).unwrap().kernel().tile();
            let space = Space::around(&tile);
            let genome = space.genome(&tile).unwrap();
            assert_eq!(space.tile(&genome), tile);
            let all = space.all_from(&genome);
            assert_eq!((all.len(), &all[0]), (space.size(), &genome));
            let fits = |genome: &&Genome| plan_tile(task.problem(), &gpu, 256, space.tile(genome)).is_ok();
            let valid = all.iter().filter(fits).count();
            assert!((20..20_000).contains(&valid), "{valid} of {} for dim {dim}", all.len());
        }
    }

    #[test]
    fn numbers_outside_the_axes_join_them() {
        let tile = Tile::Cpu(CpuTile { keys: 48, chunk: 3 });
        let space = Space::around(&tile);
        assert_eq!(space.genome(&tile).map(|genome| space.tile(&genome)), Some(tile));
        let other = Tile::Cpu(CpuTile { keys: 1000, chunk: 1 });
        assert_eq!(space.genome(&other), None);
    }
}
