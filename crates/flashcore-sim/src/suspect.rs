//! Plain reads of global memory that race with a write, and whether their values are used.
//!
//! Compilers let threads read what they do not need: if a Triton block has fewer elements than threads, several threads
//! read an element and one of them writes it back. Such a read is harmless unless its value is stored, used in an address,
//! or decides a branch. If the write came first, the value is undefined from then on, and any use is reported. If the read
//! came first, its value may already have been used when the write happens: the read is a suspect, and the launch runs
//! once more, exactly as before, with values of suspects undefined.

use crate::{check::clock::AgentKind, machine::Machine, step::Step};
use std::collections::BTreeSet;

/// A warp at a time: its cluster's number, its agent in it, its clock.
type Reader = (u32, u32, u32);

/// Reads of words of global memory.
pub(crate) type Suspects = BTreeSet<(Reader, u64)>;

/// Most runs of one launch; suspects of the last one are reported. Each run finds one reader of a word at least.
pub(crate) const MOST_RUNS: u32 = 32;

impl Step<'_, '_> {
    /// Whether the warp's read of these bytes is known to race.
    pub(crate) fn is_suspect(&self, address: u64, len: usize, clock: u32) -> bool {
        let suspects = &self.machine.context.suspects;
        if suspects.is_empty() || !self.tolerant {
            return false;
        }
        let reader = (self.cluster_number(), self.machine.warps[self.warp].agent, clock);
        words(address, len).any(|word| suspects.contains(&(reader, word)))
    }

    /// The read raced: it is reported where its value is used.
    pub(crate) fn tolerate(&mut self, address: u64, writer: &str) {
        let what = self.machine.global.describe(address);
        let text = format!("read of global memory written by {writer}, without order between: {what}");
        self.machine.races.entry(self.pc).or_insert(text);
        self.raced = true;
    }

    /// A write met a read; false if that is to be reported now.
    pub(crate) fn suspect(&mut self, reader: Reader, address: u64, len: usize) -> bool {
        let context = self.machine.context;
        let agents = self.machine.clusters[self.machine.ctas[self.cta].cluster].agents;
        if !context.may_run_again || !matches!(agents.kind(reader.1), AgentKind::Warp(_)) {
            return false;
        }
        self.machine.suspects.extend(words(address, len).map(|word| (reader, word)));
        true
    }
}

impl Machine<'_> {
    /// The suspects of a run.
    pub(crate) fn take_suspects(&mut self) -> Suspects {
        std::mem::take(&mut self.suspects)
    }
}

fn words(address: u64, len: usize) -> std::ops::Range<u64> {
    address / 4..(address + len as u64).div_ceil(4)
}
