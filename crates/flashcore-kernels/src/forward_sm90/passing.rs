//! Skipping key tiles that only the rows of other consumers see: their stages are released unread.

use flashcore_tile::{Builder, Pred, Reg, Stage, U32, Warpgroup};

use super::{Arguments, Config, ROWS_PER_GROUP, consumer::Consumer, schedule::Tile};
use crate::parts::mask::KeyTiles;

/// The key tiles that a consumer works through, and whether its CTA has one more at either end.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnTiles {
    pub(super) tiles: KeyTiles,
    /// After its own last.
    pub(super) behind: Option<Pred>,
    /// Before the first.
    pub(super) before: Option<Pred>,
}

impl Tile {
    /// Key tiles that consumer `group` works through: all but those at either end that hide everything from it.
    pub(super) fn own_key_tiles(
        &self,
        b: &mut Builder,
        cfg: Config,
        args: &Arguments,
        group: Reg<U32>,
    ) -> OwnTiles {
        let all = self.key_tiles(b, cfg, args);
        if !cfg.policy.passes_over {
            return OwnTiles { tiles: all, behind: None, before: None };
        }
        let first = self.first_row(b, cfg);
        let first = b.let_(group * ROWS_PER_GROUP + first);
        let own = self.key_tiles_of(b, cfg, args, first, ROWS_PER_GROUP);
        // One at least is left, and one at most is passed over at either end, whatever the rows see.
        let first = all.first();
        let (second, last) = (b.let_(first + 1), b.let_(all.end - 1));
        let end = b.let_(own.end.max(last).max(second).min(all.end));
        let begin = own.begin.map(|begin| {
            let most = b.let_(end - 1);
            b.let_(begin.min(most).min(second).max(first))
        });
        let behind = cfg.mask.right.then(|| b.let_(end.lt(all.end)));
        let before = begin.map(|begin| b.let_(begin.gt(first)));
        OwnTiles { tiles: KeyTiles { end, begin, ..own }, behind, before }
    }
}

impl Consumer<'_> {
    /// Whether a tile has a last key tile that this consumer passes over.
    pub(super) fn tile_behind(&self, b: &mut Builder, tile: &Tile) -> Option<Pred> {
        let passes =
            self.cfg.policy.passes_over.then(|| tile.own_key_tiles(b, self.cfg, self.args, self.group));
        passes.and_then(|own| own.behind)
    }

    /// Gives the keys of a tile that hides everything from this consumer back as they came, where there is one.
    pub(super) fn pass_over_keys(&self, b: &mut Builder, one: Option<Pred>) {
        self.pass_over(b, one, |b| {
            let stage = self.layout.k.stage(b, self.kv_count);
            b.add_to(self.kv_count, 1);
            stage
        });
    }

    /// The same for its values, once its keys have been counted, and for the turn to multiply them.
    pub(super) fn pass_over_values(&self, b: &mut Builder, one: Option<Pred>) {
        self.pass_over(b, one, |b| {
            if self.layout.turns.is_some() {
                self.take_turn(b);
                b.sync_warp();
                self.pass_turn(b);
            }
            self.values_before(b)
        });
    }

    /// No product brings the lanes together: neither the turn nor the stage may come round again while some of them still wait.
    fn pass_over(&self, b: &mut Builder, one: Option<Pred>, stage: impl FnOnce(&mut Builder) -> Stage) {
        let Some(one) = one else { return };
        let one = b.uniform::<Warpgroup>(one);
        b.if_uniform(one, |b| {
            let stage = stage(b);
            stage.wait_full(b);
            b.sync_warp();
            stage.release(b, self.leader);
        });
    }
}
