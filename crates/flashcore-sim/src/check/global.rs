//! Happens-before over global memory, between CTAs above all: last write and last read of each word.
//!
//! What threads have written reaches the async proxy through a fence, and the non-coherent cache not at all.

use super::{clock::Knowledge, race::Proxy};
use std::ops::Range;

const WORD: usize = 4;
const PAGE_WORDS: usize = 1024;

/// An access to global memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GlobalAccess<'a> {
    pub(crate) knowledge: &'a Knowledge,
    pub(crate) cluster: u32,
    pub(crate) agent: u32,
    pub(crate) clock: u32,
    /// The warp that issues it.
    pub(crate) home: u32,
    pub(crate) strong: bool,
    /// Strong for the own CTA alone.
    pub(crate) within_cta: bool,
    pub(crate) proxy: Proxy,
}

/// Why an access is not legal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GlobalFault {
    Unordered(GlobalConflict),
    /// A generic write of that cluster was not fenced for the async proxy.
    Unfenced {
        cluster: u32,
    },
    /// The non-coherent cache may hold what was there before a write of that cluster.
    Stale {
        cluster: u32,
    },
}

/// An earlier access without order to this one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GlobalConflict {
    pub(crate) cluster: u32,
    pub(crate) agent: u32,
    pub(crate) clock: u32,
    pub(crate) was_write: bool,
    /// Whether it was an atomic or its like.
    pub(crate) was_strong: bool,
}

#[derive(Clone, Copy, Default, Debug)]
struct Event {
    /// 0: never.
    clock: u32,
    cluster: u32,
    agent: u16,
    strong: bool,
    within_cta: bool,
}

#[derive(Clone, Copy, Default, Debug)]
struct Word {
    write: Event,
    read: Event,
    /// The last plain read by a warp other than the last reader, which may be the one that writes next.
    other_read: Event,
    /// Bytes written so far.
    bytes: u8,
    /// Whether the last write came through the async proxy.
    by_async: bool,
}

/// The shadow of one allocation; pages come into being when touched.
#[derive(Default, Debug)]
pub(crate) struct GlobalShadow {
    pages: Vec<Option<Box<[Word; PAGE_WORDS]>>>,
}

impl GlobalShadow {
    fn word(&mut self, index: usize) -> &mut Word {
        let page = index / PAGE_WORDS;
        if self.pages.len() <= page {
            self.pages.resize_with(page + 1, || None);
        }
        let words = self.pages[page].get_or_insert_with(|| Box::new([Word::default(); PAGE_WORDS]));
        &mut words[index % PAGE_WORDS]
    }

    pub(crate) fn read(&mut self, range: Range<usize>, who: &GlobalAccess<'_>) -> Result<(), GlobalFault> {
        let mut verdict = Ok(());
        for index in range.start / WORD..range.end.div_ceil(WORD) {
            let word = self.word(index);
            if word.bytes & bytes_of(&range, index) != 0 {
                verdict = verdict.and(word.after_write(who));
            }
            // An atomic reads as well: it must not hide a plain read that its write conflicts with.
            if !who.strong || word.read.clock == 0 || word.read.strong {
                word.remember_read(who.event());
            }
        }
        verdict
    }

    pub(crate) fn write(&mut self, range: Range<usize>, who: &GlobalAccess<'_>) -> Result<(), GlobalFault> {
        let mut verdict = Ok(());
        for index in range.start / WORD..range.end.div_ceil(WORD) {
            let word = self.word(index);
            let bytes = bytes_of(&range, index);
            if word.bytes & bytes != 0 {
                verdict = verdict.and(word.after_write(who));
            }
            if bytes == 0xf {
                verdict = verdict.and(word.read.against(who, false));
                verdict = verdict.and(word.other_read.against(who, false));
            }
            let by_async = who.proxy == Proxy::Async;
            *word = Word { write: who.event(), bytes: bytes | word.bytes, by_async, ..Word::default() };
        }
        verdict
    }
}

impl GlobalShadow {
    /// Takes over what another part of the launch has touched; false if one has written what the other has touched.
    pub(crate) fn join(&mut self, other: Self) -> bool {
        if self.pages.len() < other.pages.len() {
            self.pages.resize_with(other.pages.len(), || None);
        }
        self.pages.iter_mut().zip(other.pages).all(|(own, other)| match (own, other) {
            (_, None) => true,
            (own @ None, other) => {
                *own = other;
                true
            }
            (Some(own), Some(other)) => own.iter_mut().zip(other.iter()).all(|(own, other)| own.join(other)),
        })
    }
}

impl Word {
    fn remember_read(&mut self, event: Event) {
        let same = (self.read.cluster, self.read.agent) == (event.cluster, event.agent);
        if !same && self.read.clock != 0 && !self.read.strong {
            self.other_read = self.read;
        }
        self.read = event;
    }

    /// Whether what was written here may be accessed: in order, and by the proxy of the access.
    fn after_write(&self, who: &GlobalAccess<'_>) -> Result<(), GlobalFault> {
        self.write.against(who, true)?;
        let Event { cluster, agent, clock, .. } = self.write;
        let passed = || {
            self.by_async
                || self.write.is_morally_strong(who)
                || who.knowledge.has_passed(cluster, agent.into(), clock)
        };
        match who.proxy {
            _ if clock == 0 => Ok(()),
            Proxy::Async if !passed() => Err(GlobalFault::Unfenced { cluster }),
            Proxy::NonCoherent => Err(GlobalFault::Stale { cluster }),
            _ => Ok(()),
        }
    }

    /// Like [`GlobalShadow::join`]. Reads are known by words, so that a write next to one counts as well.
    const fn join(&mut self, other: &Self) -> bool {
        let met = self.bytes & other.bytes != 0
            || (self.bytes != 0 && other.read.clock != 0)
            || (self.read.clock != 0 && other.bytes != 0);
        self.bytes |= other.bytes;
        if self.read.clock == 0 {
            self.read = other.read;
        }
        !met
    }
}

impl GlobalAccess<'_> {
    fn event(&self) -> Event {
        let GlobalAccess { clock, cluster, strong, within_cta, .. } = *self;
        Event { clock, cluster, agent: self.agent as u16, strong, within_cta }
    }
}

impl Event {
    /// Whether both are strong, and each within the other's scope.
    const fn is_morally_strong(self, who: &GlobalAccess<'_>) -> bool {
        let apart = (self.within_cta || who.within_cta) && self.cluster != who.cluster;
        self.strong && who.strong && !apart
    }

    fn known_to(self, who: &GlobalAccess<'_>) -> bool {
        let own = self.cluster == who.cluster && u32::from(self.agent) == who.home;
        own || who.knowledge.knows(who.cluster, self.cluster, self.agent.into(), self.clock)
    }

    fn against(self, who: &GlobalAccess<'_>, was_write: bool) -> Result<(), GlobalFault> {
        if self.clock == 0 || self.is_morally_strong(who) || self.known_to(who) {
            return Ok(());
        }
        let met = who.strong && who.knowledge.has_met(self.cluster, self.agent.into(), self.clock);
        if met && was_write {
            return Ok(());
        }
        Err(GlobalFault::Unordered(GlobalConflict {
            cluster: self.cluster,
            agent: self.agent.into(),
            clock: self.clock,
            was_write,
            was_strong: self.strong,
        }))
    }
}

fn bytes_of(range: &Range<usize>, word: usize) -> u8 {
    let start = range.start.max(word * WORD) - word * WORD;
    let end = range.end.min((word + 1) * WORD) - word * WORD;
    ((0xfu8 >> (WORD - (end - start))) << start) & 0xf
}
