//! The candidates: every tile that a kernel family could be cut into, as choices on a few axes.
//!
//! A [`Genome`] picks one option on each axis. [`super::strategy`] walks over genomes; [`Space::tile`] makes a tile of
//! one, and [`super::stand`] says whether that tile can exist.

use flashcore_cpu::Tiles;
use flashcore_kernels::{
    CpuTile, Tile, forward_sm80,
    forward_sm90::{self, Order, Staging},
};
use flashcore_testkit::Rng;

/// One option per axis.
pub type Genome = Vec<usize>;

/// Everything that a tile of one kernel family can be.
#[derive(Clone, Debug)]
pub struct Space {
    axes: Vec<Vec<u32>>,
    family: Family,
}

#[derive(Clone, Copy, Debug)]
enum Family {
    Cpu,
    General,
    Hopper,
}

/// Orders and clusters of the Hopper kernel as one axis: the parts of a cluster, or one of these two.
const STATIC: u32 = 0;
const ATOMIC: u32 = 100;

impl Space {
    /// The space that `tile` lies in; whatever its numbers are, they are among the options.
    pub fn around(tile: &Tile) -> Self {
        let (family, options): (_, Vec<Vec<u32>>) = match tile {
            Tile::Sm80(_) => (Family::General, GENERAL.map(<[u32]>::to_vec).to_vec()),
            Tile::Sm90(_) => (Family::Hopper, HOPPER.map(<[u32]>::to_vec).to_vec()),
            _ => (Family::Cpu, [&Tiles::KEYS[..], &Tiles::CHUNKS].map(numbers).to_vec()),
        };
        let axes = options.into_iter().zip(values(tile)).map(|(mut options, value)| {
            if !options.contains(&value) {
                options.push(value);
                options.sort_unstable();
            }
            options
        });
        Self { axes: axes.collect(), family }
    }

    /// The genome of a tile of this space.
    pub fn genome(&self, tile: &Tile) -> Option<Genome> {
        let values = values(tile);
        let at = |(options, value): (&Vec<u32>, u32)| options.iter().position(|option| *option == value);
        self.axes.iter().zip(values).map(at).collect()
    }

    /// The tile that a genome stands for.
    pub fn tile(&self, genome: &Genome) -> Tile {
        let value = |axis: usize| self.axes[axis][genome[axis]];
        match self.family {
            Family::Cpu => Tile::Cpu(CpuTile { keys: value(0), chunk: value(1) }),
            Family::General => Tile::Sm80(forward_sm80::Shape {
                warps: value(0),
                blocks: value(1),
                tile_n: value(2),
                step_n: value(3),
                stages: value(4),
                ctas_per_sm: value(5),
                q_in_registers: value(6) == 1,
            }),
            Family::Hopper => Tile::Sm90(forward_sm90::Shape {
                consumers: value(0),
                tile_n: value(1),
                stages: value(2),
                q_stages: value(3),
                staging: Staging { cols: value(4), places: value(5) },
                budget: budget(value(6)),
                order: order(value(7)),
                ctas_per_sm: value(8),
                turn: value(9),
            }),
        }
    }

    /// Number of genomes.
    pub fn size(&self) -> usize {
        self.axes.iter().map(Vec::len).product()
    }

    /// Every genome, those with the fewest differences from `start` first.
    pub fn all_from(&self, start: &Genome) -> Vec<Genome> {
        let mut all: Vec<Genome> = (0..self.size()).map(|index| self.numbered(index)).collect();
        all.sort_by_key(|genome| distance(genome, start));
        all
    }

    fn numbered(&self, mut index: usize) -> Genome {
        let digit = |options: &Vec<u32>| {
            let digit = index % options.len();
            index /= options.len();
            digit
        };
        self.axes.iter().map(digit).collect()
    }

    /// Any genome.
    pub fn random(&self, rng: &mut Rng) -> Genome {
        self.axes.iter().map(|options| below(rng, options.len())).collect()
    }

    /// A copy with another option on one axis, or now and then on two.
    pub fn mutant(&self, genome: &Genome, rng: &mut Rng) -> Genome {
        let mut mutant = genome.clone();
        let changes = 1 + usize::from(below(rng, 3) == 0);
        for _ in 0..changes {
            let axis = below(rng, self.axes.len());
            let last = self.axes[axis].len() - 1;
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
        let axis = match self.family {
            Family::Cpu => return Vec::new(),
            Family::General => 4,
            Family::Hopper => 2,
        };
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

/// Options of the general kernel: warps, blocks, keys of a tile and of a step, stages, CTAs per SM, Q in registers.
const GENERAL: [&[u32]; 7] =
    [&[4, 8], &[1, 2], &[32, 64, 96, 128], &[16, 32, 64, 128], &[2, 3, 4], &[1, 2, 3], &[0, 1]];

/// Options of the Hopper kernel: consumers, keys, stages of K and V, stages of Q, columns and places of the staging
/// area, registers, order, CTAs per SM, key tiles of a turn.
const HOPPER: [&[u32]; 10] = [
    &[1, 2, 3],
    &[32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256],
    &[2, 3, 4, 5, 6],
    &[1, 2],
    &[64, 128, 192, 256],
    &[1, 2],
    &[0, 24_240, 40_232, 32_160],
    &[STATIC, 1, 2, 4, 8, ATOMIC],
    &[1, 2],
    &[1, 2],
];

/// A tile as the values of its axes.
fn values(tile: &Tile) -> Vec<u32> {
    match tile {
        Tile::Sm80(s) => {
            let q = u32::from(s.q_in_registers);
            vec![s.warps, s.blocks, s.tile_n, s.step_n, s.stages, s.ctas_per_sm, q]
        }
        Tile::Sm90(s) => {
            let registers = s.budget.map_or(0, |budget| budget.producer * 1000 + budget.consumer);
            let order = match s.order {
                Order::Static => STATIC,
                Order::Atomic => ATOMIC,
                Order::Single { parts } => parts,
            };
            let (cols, places) = (s.staging.cols, s.staging.places);
            let (ctas, turn) = (s.ctas_per_sm, s.turn);
            vec![s.consumers, s.tile_n, s.stages, s.q_stages, cols, places, registers, order, ctas, turn]
        }
        Tile::Cpu(tile) => vec![tile.keys, tile.chunk],
        _ => Vec::new(),
    }
}

/// Registers of a producer in thousands, of a consumer in ones.
fn budget(registers: u32) -> Option<flashcore_kernels::RegisterBudget> {
    let budget = flashcore_kernels::RegisterBudget { producer: registers / 1000, consumer: registers % 1000 };
    (registers > 0).then_some(budget)
}

const fn order(value: u32) -> Order {
    match value {
        STATIC => Order::Static,
        ATOMIC => Order::Atomic,
        parts => Order::Single { parts },
    }
}

fn numbers(options: &[usize]) -> Vec<u32> {
    options.iter().map(|option| *option as u32).collect()
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
    use flashcore_kernels::{Gpu, plan, plan_tile};

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
