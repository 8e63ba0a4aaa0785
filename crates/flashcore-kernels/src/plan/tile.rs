//! What tuning changes about a kernel, as a value and as JSON; tables hold it, `fit` checks it.

use flashcore_tile::RegisterBudget;
use serde::{Deserialize, Serialize};

use super::KernelConfig;
use crate::{
    forward_sm80,
    forward_sm90::{self, Order, Staging},
};

/// How the work of one kernel family is cut.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(from = "Written", into = "Written")]
#[non_exhaustive]
pub enum Tile {
    /// The general GPU kernel.
    Sm80(forward_sm80::Shape),
    /// The Hopper kernel.
    Sm90(forward_sm90::Shape),
    /// The CPU's prefill.
    Cpu(CpuTile),
}

/// Blocks of the CPU's prefill; which numbers there are is the CPU backend's business.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct CpuTile {
    /// Keys of a block.
    pub keys: u32,
    /// Tiles that share a pass over keys and values.
    pub chunk: u32,
}

impl KernelConfig {
    /// What tuning changes about it.
    pub const fn tile(&self) -> Tile {
        match self {
            Self::Sm80(cfg) => Tile::Sm80(cfg.shape),
            Self::Sm90(cfg) => Tile::Sm90(cfg.shape),
        }
    }
}

/// The JSON form: one field, named after the kernel.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Written {
    ForwardSm80(forward_sm80::Shape),
    ForwardSm90(Hopper),
    Cpu(CpuTile),
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Hopper {
    consumers: u32,
    tile_n: u32,
    stages: u32,
    q_stages: u32,
    staging_cols: u32,
    staging_places: u32,
    /// Registers of a producer and of a consumer.
    registers: Option<[u32; 2]>,
    order: WrittenOrder,
    ctas_per_sm: u32,
    #[serde(default = "one_key_tile")]
    turn: u32,
}

const fn one_key_tile() -> u32 {
    1
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum WrittenOrder {
    Static,
    Atomic,
    Single(u32),
}

impl From<Written> for Tile {
    fn from(written: Written) -> Self {
        match written {
            Written::Cpu(tile) => Self::Cpu(tile),
            Written::ForwardSm80(shape) => Self::Sm80(shape),
            Written::ForwardSm90(hopper) => Self::Sm90(hopper.shape()),
        }
    }
}

impl Hopper {
    fn shape(self) -> forward_sm90::Shape {
        let Self { consumers, tile_n, stages, q_stages, ctas_per_sm, turn, .. } = self;
        forward_sm90::Shape {
            consumers,
            tile_n,
            stages,
            q_stages,
            staging: Staging { cols: self.staging_cols, places: self.staging_places },
            budget: self.registers.map(|[producer, consumer]| RegisterBudget { producer, consumer }),
            order: match self.order {
                WrittenOrder::Static => Order::Static,
                WrittenOrder::Atomic => Order::Atomic,
                WrittenOrder::Single(parts) => Order::Single { parts },
            },
            ctas_per_sm,
            turn,
        }
    }
}

impl From<Tile> for Written {
    fn from(tile: Tile) -> Self {
        match tile {
            Tile::Cpu(tile) => Self::Cpu(tile),
            Tile::Sm80(shape) => Self::ForwardSm80(shape),
            Tile::Sm90(forward_sm90::Shape {
                consumers,
                tile_n,
                stages,
                q_stages,
                staging,
                budget,
                order,
                ctas_per_sm,
                turn,
            }) => Self::ForwardSm90(Hopper {
                consumers,
                tile_n,
                stages,
                q_stages,
                staging_cols: staging.cols,
                staging_places: staging.places,
                registers: budget.map(|budget| [budget.producer, budget.consumer]),
                order: match order {
                    Order::Static => WrittenOrder::Static,
                    Order::Atomic => WrittenOrder::Atomic,
                    Order::Single { parts } => WrittenOrder::Single(parts),
                },
                ctas_per_sm,
                turn,
            }),
        }
    }
}
