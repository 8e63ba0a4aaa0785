//! The config: everything that determines the text of a product kernel for Hopper.

use flashcore_ptx::{ident::Ident, sm::THREAD_REGISTERS};
use flashcore_tile::{Half, RegisterBudget, Roles};
use serde::{Deserialize, Serialize};

use super::super::product::{DEPTH, Glu, Kind};

/// Rows of a tile that is not transposed.
pub const TILE_M: u32 = 128;
/// Rows of one wgmma.
pub(crate) const ROWS: u32 = 64;
/// Consumer warpgroups.
pub(crate) const CONSUMERS: u32 = 2;
/// Warps of a warpgroup.
pub(crate) const WARPS: u32 = 4;
/// Rows that a warp writes at a time.
pub(crate) const WARP_ROWS: u32 = 16;
/// Places in which a warp gathers rows for a store, taken in turn.
pub(crate) const PLACES: u32 = 2;
/// Bytes of an element.
pub(super) const BYTES: u32 = 2;

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// Element type of all tensors.
    pub half: Half,
    /// Which product.
    pub kind: Kind,
    /// Whether a bias is added.
    pub biases: bool,
    /// Whether the depth is whole stages.
    pub whole: bool,
    /// How the work is split.
    pub shape: Shape,
}

/// How the work is split.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Rows of weights of a tile: for the first product, half of them gates.
    pub tile_n: u32,
    /// Whether consumers take whole tiles in turn, so that one multiplies while the other writes; else they share each.
    pub turns: bool,
    /// Stages of the ring.
    pub stages: u32,
    /// Whether two CTAs with neighbouring tiles of rows share weights of the same expert: each copies half to both.
    pub pair: bool,
    /// Rows of a tile: 128, or fewer where weights stream past a few rows. Then weights are what the rows of a product are
    /// made of and rows its columns, one warpgroup multiplies, and two CTAs with tiles of 128 share an SM.
    #[serde(default = "whole")]
    pub rows: u32,
}

const fn whole() -> u32 {
    TILE_M
}

impl Shape {
    /// Whether weights are the rows of products.
    pub const fn turned(&self) -> bool {
        self.rows < TILE_M
    }

    /// CTAs that share an SM.
    pub const fn ctas_per_sm(&self) -> u32 {
        if self.turned() && self.tile_n <= 128 { 2 } else { 1 }
    }

    /// CTAs for which there are registers on an SM.
    pub(super) const fn ctas_by_registers(&self) -> u32 {
        if self.turned() { 2 } else { 1 }
    }

    /// Consumer warpgroups.
    pub(crate) const fn consumers(&self) -> u32 {
        if self.turned() { 1 } else { CONSUMERS }
    }

    pub(crate) const fn roles(&self) -> Roles {
        if self.turned() {
            let budget = Some(RegisterBudget { producer: 88, consumer: 168 });
            return Roles { consumers: 1, budget, mover: None };
        }
        // Sums of whole tiles leave the producer no more than it must have.
        let (producer, consumer) = if self.turns { (40, 232) } else { (56, 224) };
        let budget = Some(RegisterBudget { producer, consumer });
        Roles { consumers: CONSUMERS, budget, mover: None }
    }

    /// Most registers of a thread when the kernel starts.
    pub const fn registers(&self) -> u32 {
        let entry = self.roles().registers_at_entry(self.ctas_by_registers());
        if entry < THREAD_REGISTERS { entry } else { THREAD_REGISTERS }
    }

    /// CTAs of a cluster.
    pub const fn ctas(&self) -> u32 {
        if self.pair { 2 } else { 1 }
    }

    /// Sums of 64 rows that a consumer keeps.
    pub(super) const fn blocks(&self) -> u32 {
        if self.turned() {
            return self.tile_n / ROWS;
        }
        if self.turns { TILE_M / ROWS } else { TILE_M / ROWS / CONSUMERS }
    }

    /// Registers of sums of a consumer's thread.
    pub const fn sum_registers(&self) -> u32 {
        let columns = if self.turned() { self.rows } else { self.tile_n };
        self.blocks() * columns / 2
    }

    /// Bytes of a stage.
    pub(crate) const fn stage_bytes(&self) -> u32 {
        (self.rows + self.tile_n) * DEPTH * BYTES
    }

    /// Shared memory of a CTA, barriers apart.
    pub const fn shared_bytes(&self) -> u32 {
        let staging = if self.turned() { 0 } else { CONSUMERS * WARPS * PLACES * WARP_ROWS * DEPTH * BYTES };
        self.stages * self.stage_bytes() + staging
    }
}

impl Config {
    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let Self { half, kind, biases, whole, shape: Shape { tile_n, turns, stages, pair, rows } } = self;
        let kind = match kind {
            Kind::Up(Glu::Swi) => "up_swiglu",
            Kind::Up(Glu::Ge) => "up_geglu",
            Kind::Up(Glu::Clamped) => "up_clamped",
            Kind::Down => "down",
        };
        let options = [(*biases, "_bias"), (*whole, "_whole"), (*turns, "_turns"), (*pair, "_pair")];
        let options: String = options.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        let name =
            format!("fc_moe_{kind}_sm_90a_{}{options}_m{rows}n{tile_n}s{stages}", half.element().name());
        Ident::new(name).expect("made of legal parts")
    }

    pub(super) const fn roles(&self) -> Roles {
        self.shape.roles()
    }

    /// Most registers of a thread when the kernel starts.
    pub const fn registers(&self) -> u32 {
        self.shape.registers()
    }

    /// Whether weights are in flight before the rows, which another product leaves, are there.
    pub(super) const fn early(&self) -> bool {
        self.shape.turned() && matches!(self.kind, Kind::Down)
    }

    /// Features of the result that a tile has.
    pub const fn features(&self) -> u32 {
        match self.kind {
            Kind::Up(_) => self.shape.tile_n / 2,
            Kind::Down => self.shape.tile_n,
        }
    }

    /// Columns that a warp gathers for one store.
    pub(super) const fn staged(&self) -> u32 {
        if self.features().is_multiple_of(64) { 64 } else { 32 }
    }
}
