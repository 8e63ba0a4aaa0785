//! Happens-before over shared memory: the last write of each word, and the last read of it by each agent.
//!
//! An access is legal if the accessor knows the last write, and, if it writes, all reads since. For accesses of
//! the async proxy, generic writes must also be fenced. Asynchronous operations record their accesses when issued,
//! under an agent whose clock nobody knows until the operation's completion is observed: so the same rule covers
//! touching memory in flight.

use super::{
    awareness::Peer,
    clock::{AgentKind, Agents, Knowledge},
};
use std::ops::Range;

/// Bytes of a word of the shadow.
const WORD: usize = 4;

/// Which proxy an access goes through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Proxy {
    Generic,
    Async,
    /// The cache of memory that nobody writes: `ld.global.nc`.
    NonCoherent,
}

/// Who accesses, and what they know.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Accessor<'a> {
    pub(crate) knowledge: &'a Knowledge,
    /// Under whose name the access is recorded, and when.
    pub(crate) agent: u32,
    pub(crate) clock: u32,
    /// The warp that issues it.
    pub(crate) home: u32,
    pub(crate) lane: u8,
    /// The issuing warp's last warp-wide synchronisation.
    pub(crate) synced: u32,
    /// The last of that warp's groups of `cp.async` that were waited for before it.
    pub(crate) copies: u32,
    /// What else the lane knows of others of its warp.
    pub(crate) peer: Option<&'a Peer>,
    pub(crate) proxy: Proxy,
    pub(crate) strong: bool,
    /// The instruction.
    pub(crate) pc: u32,
}

/// Why an access is not legal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Conflict {
    /// No order with a write of `other`, by the instruction at `pc`; whether that was an atomic or its like.
    Written { other: AgentKind, pc: u32, strong: bool },
    /// No order with a read of `other`, by the instruction at `pc`.
    Read { other: AgentKind, pc: u32 },
    /// A write of another lane of the same warp, without warp-wide synchronisation.
    Lanes { other: u8, pc: u32 },
    /// A read of other lanes of the same warp, without warp-wide synchronisation.
    LanesRead { pc: u32 },
    /// A generic write was not fenced for the async proxy.
    Unfenced { writer: AgentKind, pc: u32 },
    /// A generic read was not fenced for the async proxy.
    UnfencedRead,
}

#[derive(Clone, Copy, Default, Debug)]
struct LastWrite {
    agent: u16,
    lane: u8,
    /// Bits 0..4: which bytes; then the flags below.
    flags: u8,
    clock: u32,
    pc: u32,
}

#[derive(Clone, Copy, Default, Debug)]
struct LastRead {
    clock: u32,
    /// The instruction; below it the lane, or that there were several; below that, which bytes.
    place: u32,
}

/// Bits of the bytes of a word, and of a lane; its last numbers stand for several lanes, and for lanes that have read
/// different bytes, of which nobody knows who read what.
const BYTE_BITS: u32 = 4;
const LANE_BITS: u32 = 6;
const SEVERAL: u32 = (1 << LANE_BITS) - 1;
const MIXED: u32 = SEVERAL - 1;

impl LastRead {
    const fn pc(self) -> u32 {
        self.place >> (LANE_BITS + BYTE_BITS)
    }

    const fn lane(self) -> u32 {
        self.place >> BYTE_BITS & SEVERAL
    }

    /// Whether any of these bytes was read.
    const fn meets(self, bytes: u8) -> bool {
        self.place & bytes as u32 != 0
    }

    /// The same after a read of some bytes by `who`: of the lanes that have read since they met, one or several, and all
    /// bytes that were read since.
    fn and(self, who: &Accessor<'_>, bytes: u8) -> Self {
        let (own, recent) = (u32::from(who.lane), self.clock > who.synced);
        let before = if recent { self.place & ((1 << BYTE_BITS) - 1) } else { 0 };
        let lane = match self.lane() {
            _ if before != 0 && before != u32::from(bytes) => MIXED,
            MIXED if recent => MIXED,
            other if recent && other != own => SEVERAL,
            _ => own,
        };
        let bytes = before | u32::from(bytes);
        Self { clock: who.clock, place: who.pc << (LANE_BITS + BYTE_BITS) | lane << BYTE_BITS | bytes }
    }
}

const BY_ASYNC: u8 = 0x10;
const STRONG: u8 = 0x20;

/// The shadow of one CTA's shared memory.
#[derive(Debug)]
pub(crate) struct SharedShadow {
    agents: Agents,
    writes: Vec<LastWrite>,
    /// For each reading agent, its last read of each word; empty where it never read.
    reads: Vec<Vec<LastRead>>,
    /// The latest of those clocks.
    latest: Vec<u32>,
}

impl SharedShadow {
    pub(crate) fn new(bytes: usize, agents: Agents) -> Self {
        let readers = agents.readers() as usize;
        Self {
            agents,
            writes: vec![LastWrite::default(); bytes.div_ceil(WORD)],
            reads: vec![Vec::new(); readers],
            latest: vec![0; readers],
        }
    }

    /// A read: checked, then recorded.
    pub(crate) fn read(&mut self, range: Range<usize>, who: &Accessor<'_>) -> Result<(), Conflict> {
        let verdict = self.check_writes(&range, who);
        let words = words_of(&range);
        let agent = who.agent as usize;
        // strong reads conflict with no strong write, and weak writes near them are reported on their side
        if agent < self.reads.len() && !who.strong {
            let reads = &mut self.reads[agent];
            if reads.is_empty() {
                reads.resize(self.writes.len(), LastRead::default());
            }
            let whole = range.start.is_multiple_of(WORD) && range.end.is_multiple_of(WORD);
            if whole && who.agent != who.home {
                // lanes matter for what warps read themselves
                reads[words].fill(LastRead::default().and(who, 0xf));
            } else {
                for word in words {
                    reads[word] = reads[word].and(who, if whole { 0xf } else { bytes_of(&range, word) });
                }
            }
            self.latest[agent] = self.latest[agent].max(who.clock);
        }
        verdict
    }

    /// A write: checked, then recorded.
    pub(crate) fn write(&mut self, range: Range<usize>, who: &Accessor<'_>) -> Result<(), Conflict> {
        let verdict = self.check_writes(&range, who).and_then(|()| self.check_reads(&range, who));
        let mut flags = if who.proxy == Proxy::Async { BY_ASYNC } else { 0 };
        if who.strong {
            flags |= STRONG;
        }
        for word in words_of(&range) {
            self.writes[word] = LastWrite {
                agent: who.agent as u16,
                lane: who.lane,
                flags: flags | bytes_of(&range, word),
                clock: who.clock,
                pc: who.pc,
            };
        }
        verdict
    }

    /// What an agent has read there no longer counts.
    pub(crate) fn forget_reads(&mut self, range: Range<usize>, agent: u32) {
        if let Some(reads) =
            self.reads.get_mut(agent as usize).and_then(|reads| reads.get_mut(words_of(&range)))
        {
            reads.fill(LastRead::default());
        }
    }

    fn check_writes(&self, range: &Range<usize>, who: &Accessor<'_>) -> Result<(), Conflict> {
        let mut passed = (0, 0, 0);
        for word in words_of(range) {
            let last = self.writes[word];
            // neighbouring words mostly come from one access
            if last.clock == 0 || (last.agent, last.clock, last.lane) == passed {
                continue;
            }
            if last.flags & bytes_of(range, word) == 0 || (who.strong && last.flags & STRONG != 0) {
                continue;
            }
            self.judge(last, who)?;
            passed = (last.agent, last.clock, last.lane);
        }
        Ok(())
    }

    fn judge(&self, last: LastWrite, who: &Accessor<'_>) -> Result<(), Conflict> {
        let (agent, pc) = (u32::from(last.agent), last.pc);
        if agent == who.home {
            // lanes of one instruction may meet: which of them wins is open, but it is no race of instructions
            let same_instruction = who.agent == agent && last.clock == who.clock;
            let from_peers =
                || who.peer.is_some_and(|peer| last.clock <= peer.writes[usize::from(last.lane)]);
            let told =
                last.clock <= who.synced || last.clock <= who.knowledge.lanes.get(agent) || from_peers();
            if last.lane != who.lane && !told && !same_instruction {
                return Err(Conflict::Lanes { other: last.lane, pc });
            }
        } else if who.knowledge.seen.get(agent) < last.clock {
            let strong = last.flags & STRONG != 0;
            return Err(Conflict::Written { other: self.agents.kind(agent), pc, strong });
        } else if self.agents.kind(agent) == AgentKind::CpAsync(who.home) && last.lane != who.lane {
            // `cp.async.wait_group` tells a lane of its own copies alone.
            let copies = who.peer.map_or(0, |peer| peer.copies).max(who.copies);
            let told = last.clock <= copies || last.clock <= who.knowledge.lanes.get(agent);
            if !told {
                return Err(Conflict::Lanes { other: last.lane, pc });
            }
        }
        let crosses = who.proxy == Proxy::Async && last.flags & BY_ASYNC == 0;
        if crosses && who.knowledge.fenced.get(agent) < last.clock {
            return Err(Conflict::Unfenced { writer: self.agents.kind(agent), pc });
        }
        Ok(())
    }

    /// Whether other lanes of the own warp may still read what is written.
    fn check_lanes(
        &self,
        reads: &[LastRead],
        range: &Range<usize>,
        who: &Accessor<'_>,
    ) -> Result<(), Conflict> {
        if who.proxy != Proxy::Generic || who.agent != who.home || who.strong {
            return Ok(());
        }
        let told = |read: &LastRead| {
            let known = who.synced.max(who.knowledge.lanes.get(who.home));
            let of_lane = |peer: &Peer| peer.writes.get(read.lane() as usize).copied().unwrap_or(u32::MAX);
            read.clock <= known.max(who.peer.map_or(0, of_lane)) || read.clock == who.clock
        };
        let is_other = |read: &LastRead| ![who.lane.into(), MIXED].contains(&read.lane()) && !told(read);
        match met(reads, range, is_other) {
            Some(read) => Err(Conflict::LanesRead { pc: read.pc() }),
            None => Ok(()),
        }
    }

    fn check_reads(&self, range: &Range<usize>, who: &Accessor<'_>) -> Result<(), Conflict> {
        let mut unfenced = false;
        for (agent, reads) in self.reads.iter().enumerate().filter(|(_, reads)| !reads.is_empty()) {
            let agent_number = agent as u32;
            let latest = self.latest[agent];
            let after = |clock| met(reads, range, move |read| read.clock > clock);
            if agent_number == who.home && latest > who.synced {
                self.check_lanes(reads, range, who)?;
            }
            let known = match agent_number {
                own if own == who.home => u32::MAX,
                other => who.knowledge.seen.get(other),
            };
            if latest > known
                && let Some(read) = after(known)
            {
                return Err(Conflict::Read { other: self.agents.kind(agent_number), pc: read.pc() });
            }
            if who.proxy == Proxy::Async && matches!(self.agents.kind(agent_number), AgentKind::Warp(_)) {
                let fenced = who.knowledge.fenced.get(agent_number);
                unfenced |= latest > fenced && after(fenced).is_some();
            }
        }
        if unfenced { Err(Conflict::UnfencedRead) } else { Ok(()) }
    }
}

/// The first of the reads of a range for which something holds.
fn met(reads: &[LastRead], range: &Range<usize>, holds: impl Fn(&LastRead) -> bool) -> Option<LastRead> {
    let words = words_of(range);
    let mut touched = words.clone().zip(&reads[words]);
    // Few hold: only of those it matters which bytes they were.
    let found = touched.find(|(word, read)| holds(read) && read.meets(bytes_of(range, *word)));
    found.map(|(_, read)| *read)
}

fn words_of(range: &Range<usize>) -> Range<usize> {
    range.start / WORD..range.end.div_ceil(WORD)
}

/// Which bytes of `word` lie in the range.
fn bytes_of(range: &Range<usize>, word: usize) -> u8 {
    let start = range.start.max(word * WORD) - word * WORD;
    let end = range.end.min((word + 1) * WORD) - word * WORD;
    ((0xfu8 >> (WORD - (end - start))) << start) & 0xf
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who(knowledge: &Knowledge, agent: u32, clock: u32) -> Accessor<'_> {
        Accessor {
            knowledge,
            agent,
            clock,
            home: agent,
            lane: 0,
            synced: clock.saturating_sub(1),
            copies: 0,
            peer: None,
            proxy: Proxy::Generic,
            strong: false,
            pc: 7,
        }
    }

    #[test]
    fn order_silences_a_conflict_and_distinct_bytes_never_meet() {
        let mut shadow = SharedShadow::new(64, Agents::new(2, 1));
        let (nothing, mut informed) = (Knowledge::default(), Knowledge::default());
        informed.seen.raise(0, 1);
        assert_eq!(shadow.write(0..2, &who(&nothing, 0, 1)), Ok(()));
        assert_eq!(shadow.read(2..4, &who(&nothing, 1, 1)), Ok(()));
        let expected = Conflict::Written { other: AgentKind::Warp(0), pc: 7, strong: false };
        assert_eq!(shadow.read(0..4, &who(&nothing, 1, 1)), Err(expected));
        assert_eq!(shadow.read(0..4, &who(&informed, 1, 1)), Ok(()));
        let expected = Conflict::Read { other: AgentKind::Warp(1), pc: 7 };
        assert_eq!(shadow.write(0..4, &who(&nothing, 0, 2)), Err(expected));
        assert_eq!(shadow.read(8..9, &who(&nothing, 1, 1)), Ok(()));
        assert_eq!(shadow.write(9..12, &who(&nothing, 0, 2)), Ok(()));
    }

    #[test]
    fn lanes_that_read_their_own_bytes_may_write_them() {
        let mut shadow = SharedShadow::new(64, Agents::new(1, 1));
        let nothing = Knowledge::default();
        let lane = |lane, clock| Accessor { lane, synced: 0, ..who(&nothing, 0, clock) };
        for own in 0..4 {
            assert_eq!(shadow.read(own..own + 1, &lane(own as u8, 1)), Ok(()));
            assert_eq!(shadow.read(8..12, &lane(own as u8, 1)), Ok(()));
        }
        assert_eq!(shadow.write(2..3, &lane(2, 2)), Ok(()));
        assert_eq!(shadow.write(8..12, &lane(2, 2)), Err(Conflict::LanesRead { pc: 7 }));
    }

    #[test]
    fn the_async_proxy_needs_a_fence() {
        let mut shadow = SharedShadow::new(64, Agents::new(2, 1));
        let mut knowledge = Knowledge::default();
        knowledge.seen.raise(0, 3);
        assert_eq!(shadow.write(0..16, &who(&knowledge, 0, 3)), Ok(()));
        let reader = Accessor { proxy: Proxy::Async, home: 1, ..who(&knowledge, 3, 1) };
        let expected = Conflict::Unfenced { writer: AgentKind::Warp(0), pc: 7 };
        assert_eq!(shadow.read(0..16, &reader), Err(expected));
        let mut fenced = knowledge.clone();
        fenced.fenced.raise(0, 3);
        assert_eq!(shadow.read(0..16, &Accessor { knowledge: &fenced, ..reader }), Ok(()));
    }
}
