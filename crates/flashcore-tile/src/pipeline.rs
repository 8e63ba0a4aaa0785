//! A ring of shared-memory tiles between a producer and its consumers.
//!
//! Each stage has two mbarriers: `full`, on which the producer's copies complete, and `empty`, at which consumers
//! arrive when they have read the tile. Both sides count tiles; stage and phase follow from the count, so the two
//! sides cannot disagree.

use std::panic::Location;

use crate::{
    barrier::{MBARRIER_BYTES, Mbarrier},
    builder::Builder,
    error::FaultKind,
    memory::Shared,
    smem::SmemTile,
    value::{Pred, Reg, U32},
};

/// A ring of `stages` tiles with their barriers.
#[derive(Clone, Copy, Debug)]
pub struct Pipeline {
    tile: SmemTile,
    stages: u32,
    full: u32,
    empty: u32,
    consumers: u32,
    /// Arrivals that fill a stage, besides bytes.
    producers: u32,
}

/// One stage at a given count: its tile and barriers.
#[derive(Clone, Copy, Debug)]
pub struct Stage {
    /// Bytes from the first copy of the tile to this one.
    pub bytes: Reg<U32>,
    parity: Reg<U32>,
    full: Mbarrier,
    empty: Mbarrier,
    tile: SmemTile,
}

impl Pipeline {
    /// Reserves barriers for `stages` copies of `tile`, each released by `consumers` arrivals.
    #[track_caller]
    pub fn new(b: &mut Builder, tile: SmemTile, stages: u32, consumers: u32) -> Self {
        if stages == 0 || stages > tile.copies() {
            let copies = tile.copies();
            b.fault(FaultKind::Tile(format!(
                "a pipeline of {stages} stages over {copies} copies of its tile: it takes 1 to {copies}"
            )));
        }
        let full = b.mbarriers(stages);
        let empty = b.mbarriers(stages);
        Self { tile, stages, full, empty, consumers, producers: 1 }
    }

    /// The same, where a stage is full after so many arrivals.
    #[must_use]
    pub const fn filled_by(self, producers: u32) -> Self {
        Self { producers, ..self }
    }

    /// Initialises the barriers; one thread does it, before the CTA synchronises.
    #[track_caller]
    pub fn init(&self, b: &mut Builder) {
        for stage in 0..self.stages {
            b.mbarrier_at(self.full).nth(stage).init(b, self.producers);
            b.mbarrier_at(self.empty).nth(stage).init(b, self.consumers);
        }
    }

    /// The tile of a stage.
    pub const fn tile(&self) -> &SmemTile {
        &self.tile
    }

    /// The stage of tile number `count`.
    #[track_caller]
    pub fn stage(&self, b: &mut Builder, count: Reg<U32>) -> Stage {
        let (stage, turn) = self.split(b, count);
        let parity = b.let_(turn & 1);
        let bytes = b.let_(stage * self.tile.bytes());
        let base = b.let_((stage << MBARRIER_BYTES.trailing_zeros()) + b.shared_base());
        let barrier = |offset| Mbarrier { at: Shared { base, offset } };
        Stage { bytes, parity, full: barrier(self.full), empty: barrier(self.empty), tile: self.tile }
    }

    /// Number of the stage of tile number `count`.
    #[track_caller]
    pub fn slot(&self, b: &mut Builder, count: Reg<U32>) -> Reg<U32> {
        self.split(b, count).0
    }

    /// Which stage, and how often the ring has been round.
    #[track_caller]
    fn split(&self, b: &mut Builder, count: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        (b.let_(count % self.stages), b.let_(count / self.stages))
    }
}

impl Stage {
    /// Consumer: waits until the tile is there.
    #[track_caller]
    pub fn wait_full(&self, b: &mut Builder) {
        self.full.wait(b, self.parity);
    }

    /// Consumer: releases the tile; executed by the threads for which `who` holds.
    #[track_caller]
    pub fn release(&self, b: &mut Builder, who: Pred) {
        let author = Location::caller();
        b.predicated(who, |b| b.in_name_of(author, |b| self.empty.arrive(b)));
    }

    /// As [`release`](Self::release), also to CTA `peer` of the cluster, which copies into this CTA's tiles too.
    #[track_caller]
    pub fn release_to_pair(&self, b: &mut Builder, who: Pred, peer: Reg<U32>) {
        let author = Location::caller();
        b.predicated(who, |b| {
            b.in_name_of(author, |b| {
                self.empty.arrive(b);
                self.empty.arrive_at_peer(b, peer);
            });
        });
    }

    /// Producer: waits until consumers have given the previous tile of this stage back.
    #[track_caller]
    pub fn wait_empty(&self, b: &mut Builder) {
        // On a fresh barrier the phase before the first counts as complete, so the first turn passes at once.
        let parity = b.xor(self.parity, 1);
        self.empty.wait(b, parity);
    }

    /// Producer: announces the bytes of one tile.
    #[track_caller]
    pub fn expect_tile(&self, b: &mut Builder) {
        self.full.arrive_expecting(b, self.tile.bytes());
    }

    /// Producer: announces the bytes of one tile, and `more` that other copies bring with it.
    #[track_caller]
    pub fn expect_tile_and(&self, b: &mut Builder, more: u32) {
        self.full.arrive_expecting(b, self.tile.bytes() + more);
    }

    /// Producer: publishes the stage without a copy.
    #[track_caller]
    pub fn publish(&self, b: &mut Builder) {
        self.full.arrive(b);
    }

    /// The barrier on which copies into this stage complete.
    pub const fn full(&self) -> Mbarrier {
        self.full
    }

    /// Where the tile lies.
    #[track_caller]
    pub fn at(&self, b: &mut Builder) -> Shared {
        let base = b.shared_base();
        Shared { base: b.add(base, self.bytes), offset: self.tile.offset() }
    }
}
