//! Plain reads that meet atomics, and what excuses them: a compare-and-swap of the same word by the same warp.
//!
//! Loops that build an atomic out of `atom.cas` begin with a plain read; the value may be stale, which the swap then
//! detects. A warp that never swaps has used a possibly stale value: that is reported when the launch ends.

use crate::{finding::Finding, machine::Machine, step::Step};

/// A warp, by its cluster's number and its agent in it.
type Reader = (u32, u32);
/// A word of memory: the resident CTA whose shared memory it is in, or none for global memory; then its number.
type Word = (Option<usize>, u64);

/// A finding that a compare-and-swap would excuse.
#[derive(Debug)]
pub(crate) struct Deferred {
    reader: Reader,
    word: Word,
    findings: Vec<Finding>,
}

/// Most findings kept back at once; more of them are no loop of a few words.
const MOST: usize = 4096;

impl Step<'_, '_> {
    /// Lets `report` speak; where a plain read met an atomic, keeps what it said until the reader has swapped or ended.
    pub(crate) fn defer_or(&mut self, reader: Option<Reader>, word: Word, report: impl FnOnce(&mut Self)) {
        let Some(reader) = reader.filter(|_| self.machine.deferred.len() < MOST) else { return report(self) };
        let kept = std::mem::take(&mut self.machine.findings);
        report(self);
        let said = std::mem::replace(&mut self.machine.findings, kept);
        self.machine.deferred.push(Deferred { reader, word, findings: said.into_list() });
    }

    /// This warp swaps a word: what it has read there before is excused.
    pub(crate) fn excuse(&mut self, reader: Reader, word: Word, bytes: u64) {
        let (home, first) = word;
        let covers = |at: u64| (first..first + bytes.div_ceil(4)).contains(&at);
        self.machine.deferred.retain(|d| !(d.reader == reader && d.word.0 == home && covers(d.word.1)));
    }
}

impl Machine<'_> {
    /// Reports what was not excused.
    pub(crate) fn report_deferred(&mut self) {
        for finding in std::mem::take(&mut self.deferred).into_iter().flat_map(|d| d.findings) {
            self.findings.add(finding);
        }
    }
}
