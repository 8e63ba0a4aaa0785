//! What a launch did wrong: kinds, places, and the collector that keeps one finding for each distinct place.

use std::{collections::BTreeMap, fmt};

/// The kind of fault.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum FindingKind {
    /// An access outside of every allocation, or past the end of one.
    OutOfBounds,
    /// An address that is not a multiple of what the access needs.
    Misaligned,
    /// A register read before it was written.
    UninitRegister,
    /// Shared memory read before it was written.
    UninitShared,
    /// Global memory read before it was written.
    UninitGlobal,
    /// Conflicting accesses to shared memory without order between them.
    SharedRace,
    /// Conflicting accesses to global memory without order between them.
    GlobalRace,
    /// `ld.global.nc` of memory that the launch has written.
    NonCoherentRead,
    /// Lanes of one warp communicate through memory without `bar.warp.sync`.
    WarpRace,
    /// Threads write one value to one place without order between them (a note).
    SameValueRace,
    /// A wgmma reads what `cp.async` wrote, without a proxy fence.
    UnfencedCopy,
    /// Generic writes reach the async proxy without `fence.proxy.async`.
    MissingProxyFence,
    /// An asynchronous copy overwrites what was read through the generic proxy, without a fence (a note).
    UnfencedRead,
    /// Memory of an unfinished asynchronous operation is touched.
    InFlightMemory,
    /// A register of an unfinished wgmma is touched.
    InFlightRegister,
    /// wgmma meets registers touched since the last `wgmma.fence`.
    MissingWgmmaFence,
    /// An accumulator was set by a move between `wgmma.fence` and its wgmma (a note).
    UnfencedInit,
    /// Any operation on an mbarrier that was not initialised.
    MbarrierUninit,
    /// An mbarrier is initialised again while alive.
    MbarrierReinit,
    /// More arrivals than the phase expects.
    MbarrierOverArrival,
    /// An arrival by somebody who does not know that the phase before is complete: it may count for that one.
    MbarrierWrongPhase,
    /// A wait on a phase that is not the current or the preceding one.
    MbarrierParityAlias,
    /// A count, a transaction count or an address outside of what mbarriers allow.
    MbarrierMisuse,
    /// Transaction bytes left over when the CTA ends.
    MbarrierLeftover,
    /// An ordinary access to the bytes of a live mbarrier.
    MbarrierAccess,
    /// Warps name different thread counts for one barrier, or an impossible one.
    BarrierCount,
    /// A warp arrives again before it can know that its last arrival was used.
    BarrierRecycled,
    /// A cluster barrier is used out of turn.
    ClusterBarrier,
    /// An `.aligned` instruction, or a `.sync` one, that its lanes or warps do not reach together.
    DivergentAligned,
    /// A member mask that does not fit the lanes that execute it.
    BadMask,
    /// Data is read from a lane that does not take part.
    InactiveLane,
    /// Warps of a warpgroup disagree about descriptors.
    DescriptorMismatch,
    /// A descriptor, a tensor map or a size that the hardware rejects.
    BadDescriptor,
    /// `setmaxnreg` beyond the CTA's pool, in the wrong direction, or different ones in a warpgroup.
    RegisterPool,
    /// Asynchronous work unfinished when its warp or CTA ends.
    Undrained,
    /// Shared memory of a CTA that may have ended is used by another one of the cluster.
    EndedPeer,
    /// No warp can make progress.
    Deadlock,
    /// `trap` was executed.
    Trap,
    /// An `assert` of the kernel failed.
    AssertFailed,
    /// A call or a branch through a table that leads nowhere, or to a function of another signature.
    BadCall,
    /// Code that the simulator cannot execute, and that this launch did not reach or ended at (a note).
    NotJudged,
}

/// How much a finding weighs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Severity {
    /// Counted, worth a look, but not wrong in itself.
    Note,
    /// Wrong.
    Error,
}

impl FindingKind {
    /// How much findings of this kind weigh.
    pub const fn severity(self) -> Severity {
        match self {
            Self::UnfencedRead
            | Self::UnfencedInit
            | Self::UnfencedCopy
            | Self::SameValueRace
            | Self::NotJudged => Severity::Note,
            _ => Severity::Error,
        }
    }

    /// Whether the launch ends here: what follows would have no meaning.
    pub(crate) const fn is_fatal(self) -> bool {
        matches!(
            self,
            Self::OutOfBounds
                | Self::Misaligned
                | Self::Deadlock
                | Self::Trap
                | Self::AssertFailed
                | Self::BadCall
                | Self::DivergentAligned
                | Self::BadDescriptor
                | Self::MbarrierUninit
                | Self::MbarrierMisuse
                | Self::RegisterPool
        )
    }
}

/// Where something happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Site {
    /// The function it stands in, if it is not the kernel itself.
    pub function: Option<String>,
    /// Index of the statement in that body.
    pub statement: usize,
    /// The instruction.
    pub text: String,
    /// The source line that made it, where known.
    pub source: Option<String>,
}

/// One fault.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Finding {
    /// What kind.
    pub kind: FindingKind,
    /// The kernel.
    pub kernel: String,
    /// The CTA's index in the grid.
    pub cta: [u32; 3],
    /// The warp in the CTA.
    pub warp: u32,
    /// The lowest lane concerned.
    pub lane: u32,
    /// The instruction at fault; `None` where there is none (a deadlock, an end without draining).
    pub site: Option<Site>,
    /// What exactly.
    pub message: String,
    /// How often it happened at this place.
    pub count: u64,
}

impl Finding {
    /// How much it weighs.
    pub const fn severity(&self) -> Severity {
        self.kind.severity()
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if self.severity() == Severity::Error { "error" } else { "note" };
        let [x, y, z] = self.cta;
        writeln!(f, "{word}: {:?}: {}", self.kind, self.message)?;
        if let Some(site) = &self.site {
            writeln!(f, "  at   {}", site.text)?;
            if let Some(source) = &site.source {
                writeln!(f, "  from {source}")?;
            }
        }
        let function = self.site.as_ref().and_then(|site| site.function.as_deref());
        let through = function.map(|name| format!("{name}, called by ")).unwrap_or_default();
        write!(f, "  in   {through}{} CTA ({x},{y},{z}) warp {} lane {}", self.kernel, self.warp, self.lane)?;
        if self.count > 1 {
            write!(f, ", {} times", self.count)?;
        }
        write!(f, "\n  fix  {}", self.kind.cure())
    }
}

/// The function that a statement stands in, if it is not the kernel itself, and its index there.
type Statement = (Option<String>, usize);

/// Collects findings: one for each kind, instruction and message template.
#[derive(Default, Debug)]
pub(crate) struct Findings {
    list: Vec<Finding>,
    known: BTreeMap<(FindingKind, Option<Statement>), usize>,
}

impl Findings {
    /// Adds a finding, or counts one more of the same kind at the same instruction.
    pub(crate) fn add(&mut self, finding: Finding) {
        let key = (finding.kind, finding.site.as_ref().map(|s| (s.function.clone(), s.statement)));
        match self.known.get(&key) {
            Some(&at) => self.list[at].count += finding.count,
            None => {
                self.known.insert(key, self.list.len());
                self.list.push(finding);
            }
        }
    }

    /// Adds what another part of the launch has found.
    pub(crate) fn join(&mut self, other: Self) {
        other.list.into_iter().for_each(|finding| self.add(finding));
    }

    /// Whether anything is wrong so far.
    pub(crate) fn has_errors(&self) -> bool {
        self.list.iter().any(|finding| finding.severity() == Severity::Error)
    }

    /// What was found, in order.
    pub(crate) fn into_list(self) -> Vec<Finding> {
        self.list
    }
}
