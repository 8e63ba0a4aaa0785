//! The config: everything that determines the text of a grouped product for Hopper.

use flashcore_ptx::ident::Ident;
use flashcore_tile::Half;

use super::super::Divided;
use crate::moe::product_sm90::{Shape, TILE_M};

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// Element type of all tensors.
    pub half: Half,
    /// What is divided.
    pub divided: Divided,
    /// Whether lines of either factor run along the depth.
    pub along: [bool; 2],
    /// Whether the transpose is computed: neighbouring rows of a tile are neighbours in memory, instead of columns.
    pub turned: bool,
    /// How the work is cut: consumers share tiles, and CTAs nothing.
    pub shape: Shape,
}

impl Config {
    /// The kernel's name: every field of the config that may differ is in it.
    pub fn name(&self) -> Ident {
        let Self { half, divided, along, turned, shape: Shape { tile_n, stages, .. } } = self;
        let [rows, columns] = along.map(|along| if along { "along" } else { "across" });
        let turned = if *turned { "_turned" } else { "" };
        let name = format!(
            "fc_grouped_sm_90a_{}_{}_{rows}_{columns}{turned}_m{TILE_M}n{tile_n}s{stages}",
            half.element().name(),
            divided.name(),
        );
        Ident::new(name).expect("made of legal parts")
    }
}
