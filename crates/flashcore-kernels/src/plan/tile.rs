//! What tuning changes about a kernel, as a value and as JSON; tables hold it, `fit` checks it.

use serde::{Deserialize, Serialize};

use crate::{
    append, backward_rows, backward_sm80, backward_sm90, decode, forward_sm80, forward_sm90, grouped,
    launch::KernelConfig, merge, moe,
};

/// The tile of one kernel family.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[non_exhaustive]
pub enum Tile {
    /// The general GPU kernel.
    #[serde(rename = "forward_sm80")]
    Sm80(forward_sm80::Shape),
    /// The Hopper kernel.
    #[serde(rename = "forward_sm90")]
    Sm90(forward_sm90::Shape),
    /// The kernel for few queries over many keys.
    #[serde(rename = "decode")]
    Decode(decode::Shape),
    /// What puts parts of rows together, which knows one way.
    #[serde(rename = "combine")]
    Combine,
    /// The merge of partial results.
    #[serde(rename = "merge")]
    Merge(merge::Shape),
    /// New rows of a cache.
    #[serde(rename = "append")]
    Append(append::Shape),
    /// What kernels of gradients need to know about each row.
    #[serde(rename = "backward_rows")]
    BackwardRows(backward_rows::Shape),
    /// Gradients of sinks, which know one way.
    #[serde(rename = "backward_sinks")]
    BackwardSinks,
    /// Transposing values has nothing to tune.
    TurnValues,
    /// Nothing is tuned where tensors are rounded to 8 bits.
    #[serde(rename = "quantise")]
    Quantise,
    /// Gradients on every GPU.
    #[serde(rename = "backward_sm80")]
    BackwardSm80(backward_sm80::Shape),
    /// Gradients on a Hopper.
    #[serde(rename = "backward_sm90")]
    BackwardSm90(backward_sm90::Shape),
    /// The end of sums, which knows one way.
    #[serde(rename = "backward_sums")]
    BackwardSums,
    /// A product of experts, or one of their steps that has only one tile.
    #[serde(rename = "moe")]
    Moe(Option<moe::Cut>),
    /// Grouped products, or what goes before them.
    #[serde(rename = "grouped")]
    Grouped(Option<moe::Cut>),
}

impl Tile {
    /// The name of the kernels with such tiles.
    pub(super) const fn family(&self) -> &'static str {
        match self {
            Self::Sm80(_) => "forward_sm80",
            Self::Sm90(_) => "forward_sm90",
            Self::Decode(_) => "decode",
            Self::Combine => "combine",
            Self::Merge(_) => "merge",
            Self::Append(_) => "append",
            Self::BackwardRows(_) => "backward_rows",
            Self::BackwardSinks => "backward_sinks",
            Self::TurnValues => "turn_values",
            Self::Quantise => "quantise",
            Self::BackwardSm80(_) => "backward_sm80",
            Self::BackwardSm90(_) => "backward_sm90",
            Self::BackwardSums => "backward_sums",
            Self::Moe(_) => "moe",
            Self::Grouped(_) => "grouped",
        }
    }
}

impl KernelConfig {
    /// What tuning changes about it.
    pub const fn tile(&self) -> Tile {
        match self {
            Self::Sm80(cfg) => Tile::Sm80(cfg.shape),
            Self::Sm90(cfg) => Tile::Sm90(cfg.shape),
            Self::Decode(cfg) => Tile::Decode(cfg.shape),
            Self::Combine(_) => Tile::Combine,
            Self::Merge(cfg) => Tile::Merge(cfg.shape),
            Self::Append(cfg) => Tile::Append(cfg.shape),
            Self::BackwardRows(cfg) => Tile::BackwardRows(cfg.shape),
            Self::BackwardSinks(_) => Tile::BackwardSinks,
            Self::TurnValues(_) => Tile::TurnValues,
            Self::Quantise(_) => Tile::Quantise,
            Self::BackwardSm80(cfg) => Tile::BackwardSm80(cfg.shape),
            Self::BackwardSm90(cfg) => Tile::BackwardSm90(cfg.shape),
            Self::BackwardSums(_) => Tile::BackwardSums,
            Self::Moe(moe::Config::Product(cfg)) => Tile::Moe(Some(moe::Cut::General(cfg.shape))),
            Self::Moe(moe::Config::ProductSm90(cfg)) => Tile::Moe(Some(moe::Cut::Sm90(cfg.shape))),
            Self::Moe(_) => Tile::Moe(None),
            Self::Grouped(grouped::Config::Product(cfg)) => Tile::Grouped(Some(moe::Cut::General(cfg.shape))),
            Self::Grouped(grouped::Config::ProductSm90(cfg)) => {
                Tile::Grouped(Some(moe::Cut::Sm90(cfg.shape)))
            }
            Self::Grouped(grouped::Config::Index(_)) => Tile::Grouped(None),
        }
    }
}
