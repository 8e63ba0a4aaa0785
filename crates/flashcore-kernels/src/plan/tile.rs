//! What tuning changes about a kernel, as a value and as JSON; tables hold it, `fit` checks it.

use serde::{Deserialize, Serialize};

use crate::{forward_sm80, forward_sm90, launch::KernelConfig, merge, moe};

/// How the work of one kernel family is cut.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[non_exhaustive]
pub enum Tile {
    /// The general GPU kernel.
    #[serde(rename = "forward_sm80")]
    Sm80(forward_sm80::Shape),
    /// The Hopper kernel.
    #[serde(rename = "forward_sm90")]
    Sm90(forward_sm90::Shape),
    /// The merge of partial results.
    #[serde(rename = "merge")]
    Merge(merge::Shape),
    /// A product of experts, or a step of theirs that is cut in one way alone.
    #[serde(rename = "moe")]
    Moe(Option<moe::product::Shape>),
}

impl KernelConfig {
    /// What tuning changes about it.
    pub const fn tile(&self) -> Tile {
        match self {
            Self::Sm80(cfg) => Tile::Sm80(cfg.shape),
            Self::Sm90(cfg) => Tile::Sm90(cfg.shape),
            Self::Merge(cfg) => Tile::Merge(cfg.shape),
            Self::Moe(moe::Config::Product(cfg)) => Tile::Moe(Some(cfg.shape)),
            Self::Moe(_) => Tile::Moe(None),
        }
    }
}
