//! Which tiles a CTA works on: both sides of the ring walk them alike.

use flashcore_tile::{Builder, Params, Reg, Scope, U32, U64};

use super::{
    super::{
        Layer, NONE,
        product::{DEPTH, Kind},
        sort::IndexArgument,
    },
    config::Config,
};

/// Tiles of rows that CTAs work on at the same time, so that they meet in the cache over the same weights.
const GROUP: u32 = 8;

/// Features of a result.
pub(super) const fn width(cfg: &Config, layer: &Layer) -> usize {
    match cfg.kind {
        Kind::Up(_) => layer.problem.intermediate(),
        Kind::Down => layer.problem.hidden(),
    }
}

/// Tiles across the features.
pub(super) fn blocks(cfg: &Config, layer: &Layer) -> u32 {
    (width(cfg, layer) as u32).div_ceil(cfg.features())
}

/// Elements of depth.
const fn depth(cfg: &Config, layer: &Layer) -> usize {
    match cfg.kind {
        Kind::Up(_) => layer.problem.hidden(),
        Kind::Down => layer.problem.intermediate(),
    }
}

/// Numbers that decide where a CTA works.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arguments {
    pub(super) index: IndexArgument,
    blocks: Reg<U32>,
    /// Features of the result.
    pub(super) features: Reg<U32>,
    /// Elements of depth.
    pub(super) depth: Reg<U32>,
    features_per_tile: u32,
    tile_m: u32,
    early: bool,
    /// CTAs of a cluster, and which of them this is.
    ctas: u32,
    rank: Option<Reg<U32>>,
}

/// A tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Number of the tile of rows.
    pub(super) tile: Reg<U32>,
    /// Its expert.
    pub(super) expert: Reg<U32>,
    /// First feature of the result.
    pub(super) feature: Reg<U32>,
    /// Expert of the other tile of a pair.
    pub(super) other: Option<Reg<U32>>,
}

impl Arguments {
    pub(super) fn declare(b: &mut Builder, params: &mut Params<Layer>, cfg: &Config) -> Self {
        let cfg = *cfg;
        Self {
            index: IndexArgument::declare(b, params),
            blocks: params.u32(b, "blocks", move |layer| blocks(&cfg, layer)),
            features: params.u32(b, "features", move |layer| width(&cfg, layer) as u32),
            depth: params.u32(b, "depth", move |layer| depth(&cfg, layer) as u32),
            features_per_tile: cfg.features(),
            tile_m: cfg.shape.rows,
            early: cfg.early(),
            ctas: cfg.shape.ctas(),
            rank: cfg.shape.pair.then(|| b.cluster_rank()),
        }
    }

    /// Stages of a tile.
    pub(super) fn steps(&self, b: &mut Builder) -> Reg<U32> {
        b.let_(self.depth.div_ceil(DEPTH))
    }

    /// Tiles of rows, or pairs of them, and tiles of all clusters.
    pub(super) fn count(&self, b: &mut Builder) -> [Reg<U32>; 2] {
        let tiles = self.read(b, self.index.count);
        let tiles = if self.ctas > 1 { b.let_(tiles / self.ctas) } else { tiles };
        [tiles, b.let_(tiles * self.blocks)]
    }

    /// A number of the index, which is there before the kernel has waited for its predecessor.
    fn read(&self, b: &mut Builder, at: Reg<U64>) -> Reg<U32> {
        match self.early {
            true => b.load_global_fresh(at),
            false => b.load_global::<U32, 1>(at)[0],
        }
    }

    /// Number of this CTA's cluster, and of all.
    pub(super) fn walkers(&self, b: &mut Builder) -> [Reg<U32>; 2] {
        let (cta, ctas) = (b.cta(), b.ctas());
        if self.ctas == 1 {
            return [cta, ctas];
        }
        [b.let_(cta / self.ctas), b.let_(ctas / self.ctas)]
    }

    /// The other CTA of a pair.
    pub(super) fn peer(&self, b: &mut Builder) -> Option<Reg<U32>> {
        self.rank.map(|rank| b.xor(rank, 1))
    }

    /// Entry of the first row of the second half of tile number `index`, if there is such a tile: nothing, where that half is
    /// padding.
    pub(super) fn second_half(
        &self,
        b: &mut Builder,
        index: Reg<U32>,
        [tiles, all]: [Reg<U32>; 2],
    ) -> Reg<U32> {
        let (tile, _) = self.tile(b, index, tiles);
        let row = b.let_(tile * self.tile_m + self.tile_m / 2);
        let at = b.let_(self.index.entries + row.mul_wide(4));
        let entry = b.var_in(Scope::Warpgroup, NONE);
        b.predicated(index.lt(all), |b| b.load_global_into([entry], at));
        entry
    }

    /// Tile number `index` of all, where there are `tiles` of rows.
    pub(super) fn place(&self, b: &mut Builder, index: Reg<U32>, tiles: Reg<U32>) -> Place {
        let (tile, feature) = self.tile(b, index, tiles);
        let expert = |b: &mut Builder, tile: Reg<U32>| {
            let at = b.let_(self.index.experts + tile.mul_wide(4));
            self.read(b, at)
        };
        let other = self.rank.map(|_| b.xor(tile, 1)).map(|other| expert(b, other));
        Place { tile, expert: expert(b, tile), feature, other }
    }

    /// Number of a tile's rows among all, and its first feature.
    fn tile(&self, b: &mut Builder, index: Reg<U32>, tiles: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        let group = b.let_(self.blocks * GROUP);
        let before = b.let_(index / group * GROUP);
        let within = b.let_(index % group);
        let rows = b.let_((tiles - before).min(GROUP));
        let tile = b.let_(before + within % rows);
        let tile = self.rank.map_or(tile, |rank| b.let_(tile * self.ctas + rank));
        (tile, b.let_(within / rows * self.features_per_tile))
    }
}
