//! What a tile reports to later ones: whether the references of its rows moved often.
//!
//! Exponentials are best computed immediately while references stay; if they keep moving, maxima come first. Previous
//! tiles predict which. Every consumer warp writes a word before it releases Q; the producer reads them all when it
//! refills that stage, and posts the verdict with the next tile: so all consumers agree, and nobody waits. Results do
//! not depend on it.

use flashcore_tile::{Builder, Pred, Reg, Shared, U32, Val};

use super::{Config, Layout, WARPS_PER_GROUP, consumer::Consumer};

/// Bytes of the words of one consumer.
const GROUP_BYTES: u32 = WARPS_PER_GROUP * 4;

/// Where the words lie: one for each warp, for each Q stage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reports {
    base: u32,
    consumers: u32,
    stages: u32,
}

impl Reports {
    /// Reserves the words, where tiles adapt.
    pub(super) fn reserve(b: &mut Builder, cfg: Config) -> Option<Self> {
        let (consumers, stages) = (cfg.shape.consumers, cfg.shape.q_stages);
        cfg.policy.adapts.then(|| Self {
            base: b.shared(stages * consumers * GROUP_BYTES, 16),
            consumers,
            stages,
        })
    }

    /// Nothing is known at first; one thread writes that, before the CTA synchronises.
    pub(super) fn init(self, b: &mut Builder) {
        let base = b.shared_at(self.base);
        for group in 0..self.stages * self.consumers {
            b.store_shared::<U32>(base.at(group * GROUP_BYTES), &[Val::Const(0); 4]);
        }
    }

    /// The words of the tile that has Q tile number `count`.
    fn of(self, b: &mut Builder, layout: &Layout, count: Reg<U32>) -> Shared {
        let slot = layout.q.slot(b, count);
        let bytes = b.let_(slot * (self.consumers * GROUP_BYTES));
        b.shared_at(self.base).plus(b, bytes)
    }

    /// What the tile said that had the place of Q tile number `count` before: 1 if references moved often, else 0.
    pub(super) fn read(self, b: &mut Builder, layout: &Layout, count: Reg<U32>) -> Reg<U32> {
        let from = self.of(b, layout, count);
        let words: Vec<_> = (0..self.consumers)
            .flat_map(|group| b.load_shared::<U32, 4>(from.at(group * GROUP_BYTES)))
            .collect();
        words.into_iter().reduce(|x, y| b.or(x, y)).expect("there are consumers")
    }

    /// The word of the consumer's warp on its present tile; `who` writes it, before it releases Q.
    pub(super) fn write(self, b: &mut Builder, consumer: &Consumer<'_>, who: Pred) {
        let restless = consumer.softmax.is_restless(b);
        let word = b.select::<U32>(restless, 1, 0);
        let tile = self.of(b, consumer.layout, consumer.q_count);
        let warp = b.let_((consumer.group * WARPS_PER_GROUP + consumer.warp) * 4);
        let to = tile.plus(b, warp);
        b.predicated(who, |b| b.store_shared(to, &[word.into()]));
    }
}
