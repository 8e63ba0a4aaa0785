//! The tiles of the general kernels of gradients, `backward_sm80`: a table for each side, the reason beside each row.
//!
//! A row is taken where its CTAs fit in the shared memory of the GPU at hand: 227 KiB (sm_90, sm_100), 163 (sm_80) or 99
//! (sm_86, sm_89, sm_120).

use flashcore_ptx::sm::Sm;
use flashcore_tile::{Element, MMA_M};

use super::{Gpu, MOST_FEATURES, PlanError, backward_single};
use crate::{
    backward_sm80::{Config, Shape},
    parts::schedule::Side,
};

/// The kernel with the first tile of its side's table that fits, and why that one.
pub(super) fn with_shape(cfg: Config, gpu: &Gpu) -> Result<(Config, &'static str), PlanError> {
    let dim = cfg.dim_qk.max(cfg.dim_v) as usize;
    let table = match (cfg.side, cfg.input) {
        (Side::Queries, Element::F32) => backward_single::OF_QUERIES,
        (Side::Keys, Element::F32) => backward_single::OF_KEYS,
        (Side::Queries, _) => OF_QUERIES,
        (Side::Keys, _) => OF_KEYS,
    };
    let configs = table.iter().filter(|row| dim <= row.dim);
    let configs = configs.map(|row| (Config { shape: narrowed(row.shape, &cfg), ..cfg }, row.why));
    let (qk, v) = (cfg.dim_qk as usize, cfg.dim_v as usize);
    let none = PlanError::SharedMemory { qk, v, shared_bytes: gpu.shared_bytes };
    configs.into_iter().find(|(cfg, _)| fits(cfg, gpu) && leaves_room(cfg)).ok_or(none)
}

/// Whether a thread has registers for what goes on beside its sums: two of a bias, slopes of a cap and words of dropout take
/// those of a second block.
fn leaves_room(cfg: &Config) -> bool {
    cfg.shape.blocks == 1
        || [cfg.dropout, cfg.softcap, cfg.bias.is_some()].into_iter().map(u8::from).sum::<u8>() < 2
}

/// The shape with shorter steps where other things than scores take registers: half the rows beside bounds, sums that are
/// added to, words of dropout or a bias on top of capped scores, half again beside a softcap or, with dropout, a bias.
fn narrowed(shape: Shape, cfg: &Config) -> Shape {
    let (bounded, biased) = (cfg.mask.left || cfg.mask.right, cfg.bias.is_some());
    let crowded = bounded || cfg.accumulate || cfg.dropout || (cfg.softcap && biased);
    let more = cfg.softcap || (cfg.dropout && biased);
    let halvings = u32::from(crowded) + u32::from(more);
    Shape { step: (shape.step >> halvings).max(MMA_M), ..shape }
}

/// Whether as many CTAs as the shape counts on fit on an SM.
pub(super) fn fits(cfg: &Config, gpu: &Gpu) -> bool {
    let reserved = Sm::of(gpu.capability).reserved;
    cfg.shape.ctas_per_sm * (cfg.shared_bytes() + reserved) <= gpu.shared_bytes + reserved
}

/// Up to this dim, this tile.
pub(super) struct Row {
    pub(super) dim: usize,
    pub(super) shape: Shape,
    pub(super) why: &'static str,
}

/// A shape with two stages; any of the table's first row until [`with_shape`] chooses.
pub(super) const fn shape([warps, blocks]: [u32; 2], [tile, step]: [u32; 2], ctas_per_sm: u32) -> Shape {
    Shape { warps, blocks, tile, step, stages: 2, ctas_per_sm }
}

/// Where a search for a shape starts.
pub(super) const ANY: Shape = OF_KEYS[0].shape;

const OF_QUERIES: &[Row] = &[
    Row {
        dim: 64,
        shape: shape([4, 2], [64, 32], 2),
        why: "32 rows per warp use each fragment of K and V twice; two CTAs hide each other's waits",
    },
    Row {
        dim: 64,
        shape: shape([4, 2], [32, 32], 2),
        why: "as with 64 keys, which would leave room for one CTA only",
    },
    Row {
        dim: 128,
        shape: shape([4, 2], [32, 32], 2),
        why: "32 rows per warp use each fragment twice; dQ leaves registers for 32 keys",
    },
    Row {
        dim: 128,
        shape: shape([4, 1], [32, 32], 2),
        why: "64 rows, so that two CTAs fit in little shared memory",
    },
    Row {
        dim: 128,
        shape: shape([4, 1], [32, 32], 1),
        why: "as for two CTAs, of which there is room for one",
    },
    Row {
        dim: 256,
        shape: shape([8, 1], [32, 32], 1),
        why: "dQ takes half of the registers, so that a warp has 16 rows; one CTA fills shared memory",
    },
    Row { dim: 256, shape: shape([4, 1], [32, 32], 1), why: "64 rows, as 128 do not fit" },
    Row { dim: 256, shape: shape([4, 1], [16, 16], 1), why: "as with 32 keys, which do not fit" },
    Row {
        dim: MOST_FEATURES,
        shape: shape([8, 1], [16, 16], 1),
        why: "wide rows: two warps share a dQ of more than 256 columns",
    },
    Row {
        dim: MOST_FEATURES,
        shape: shape([4, 1], [16, 16], 1),
        why: "rows of four warps, as eight do not fit",
    },
    Row {
        dim: MOST_FEATURES,
        shape: shape([2, 1], [16, 16], 1),
        why: "rows of two warps, as four do not fit",
    },
];

const OF_KEYS: &[Row] = &[
    Row {
        dim: 64,
        shape: shape([4, 2], [64, 32], 2),
        why: "32 keys per warp use each fragment of Q and dO twice; two CTAs hide each other's waits",
    },
    Row {
        dim: 64,
        shape: shape([4, 2], [32, 32], 2),
        why: "as with 64 queries, which would leave room for one CTA only",
    },
    Row {
        dim: 64,
        shape: shape([8, 1], [64, 64], 1),
        why: "16 keys per warp, where dropout beside a bias or a cap leaves no registers for more",
    },
    Row {
        dim: 128,
        shape: shape([8, 1], [64, 64], 1),
        why: "dK and dV take half of the registers, so that a warp has 16 keys",
    },
    Row { dim: 128, shape: shape([4, 1], [32, 32], 1), why: "64 keys, as 128 do not fit" },
    Row {
        dim: 256,
        shape: shape([8, 1], [32, 32], 1),
        why: "two warps share the columns of dK and dV; both multiply queries by keys",
    },
    Row { dim: 256, shape: shape([8, 1], [16, 16], 1), why: "as with 32 queries, which do not fit" },
    Row {
        dim: MOST_FEATURES,
        shape: shape([8, 1], [16, 16], 1),
        why: "wide rows: four warps share the columns of dK and dV",
    },
    Row { dim: MOST_FEATURES, shape: shape([4, 1], [16, 16], 1), why: "16 keys, as 32 do not fit" },
];
