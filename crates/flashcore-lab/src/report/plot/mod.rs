//! Plots as SVG, by a few functions of our own: [`scale`] places values, [`frame`] draws axes, [`mark`] draws points;
//! [`sweep`], [`dots`], [`roofline`] and [`history`] are the plots; [`figure`] puts panels on a page or into a file.

pub mod dots;
pub mod figure;
pub mod frame;
pub mod history;
pub mod mark;
pub mod roofline;
pub mod scale;
pub mod sweep;

use self::mark::Slot;
use crate::report::{run::Run, series::Series};

/// Colours of plots, in light and dark.
pub const PALETTE: &str = include_str!("palette.css");

/// Who has which colour and shape, the same in every plot of a report.
#[derive(Debug)]
pub struct Cast {
    peers: Vec<String>,
}

impl Cast {
    /// Everybody in `series`, in order of appearance.
    pub fn of(series: &[Series]) -> Self {
        let mut peers: Vec<String> = Vec::new();
        for peer in series.iter().flat_map(Series::runs).flat_map(|run| &run.peers) {
            if !peers.contains(peer) {
                peers.push(peer.clone());
            }
        }
        Self { peers }
    }

    /// The colour and shape of a competitor.
    pub fn slot(&self, run: &Run, arm: &str) -> Slot {
        let peer = || Slot::peer(self.peers.iter().position(|peer| peer == arm).unwrap_or(0));
        if run.is_ours(arm) { Slot::OURS } else { peer() }
    }

    /// Names with their colours and shapes, ours first.
    pub fn legend(&self, run: &Run) -> Vec<(Slot, String)> {
        run.arms().map(|arm| (self.slot(run, arm), run.title(arm))).collect()
    }
}
