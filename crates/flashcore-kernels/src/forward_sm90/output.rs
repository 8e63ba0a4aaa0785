//! The output of a tile while it is computed.
//!
//! Tensor cores add up products of 8-bit numbers in sums of 13 bits, which they cut off at every instruction. Such sums are
//! added to others in f32 before that takes much away; products of 16-bit numbers need nothing of the kind.

use flashcore_tile::{Acc, Builder, Carried, Warpgroup};

use super::{Config, consumer::Consumer};

/// Sums of probabilities times values.
pub(super) struct Output {
    /// What products are added to.
    pub(super) recent: Acc,
    /// What has been taken from there, where products keep few bits.
    pub(super) settled: Option<Acc>,
}

impl Output {
    /// Unwritten sums.
    pub(super) fn new(b: &mut Builder, cfg: Config) -> Self {
        let mut tile = || Acc::new(b, cfg.dim_v as usize);
        Self { recent: tile(), settled: cfg.tiles_of_sum().map(|_| tile()) }
    }

    /// Sets all sums to zero.
    pub(super) fn clear(&self, b: &mut Builder) {
        self.tiles().into_iter().for_each(|tile| tile.fill(b, 0.0));
    }

    /// The tiles that make up the output.
    pub(super) fn tiles(&self) -> Vec<&Acc> {
        std::iter::once(&self.recent).chain(&self.settled).collect()
    }

    /// All sums in one tile, when no product is in flight any more.
    pub(super) fn settle(&self, b: &mut Builder) -> &Acc {
        let Some(settled) = &self.settled else { return &self.recent };
        let sums = settled.regs().iter().zip(self.recent.regs());
        sums.for_each(|(&sum, &recent)| b.add_to(sum, recent));
        settled
    }
}

impl Carried for Output {
    fn identity(&self, b: &Builder) -> Vec<u64> {
        self.tiles().into_iter().flat_map(|tile| tile.identity(b)).collect()
    }

    fn twin(&self) -> Self {
        Self { recent: self.recent.twin(), settled: self.settled.as_ref().map(Carried::twin) }
    }
}

impl Consumer<'_> {
    /// Settles the output after so many key tiles that its sums would begin to lose.
    pub(super) fn flush(&self, b: &mut Builder, output: &Output) {
        let Some(tiles) = self.cfg.tiles_of_sum() else { return };
        let due = b.let_((self.kv_count % tiles).eq(0));
        let due = b.uniform::<Warpgroup>(due);
        b.if_uniform(due, |b| {
            output.settle(b);
            output.recent.fill(b, 0.0);
        });
    }
}
