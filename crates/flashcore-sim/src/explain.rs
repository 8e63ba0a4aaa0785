//! What each kind of finding means, and what to do about it. Quoted by findings and by `flashcore sim --explain`.

use crate::finding::FindingKind;

/// Every kind with its meaning and its cure.
#[rustfmt::skip]
const EXPLANATIONS: &[(FindingKind, &str, &str)] = &[
    (
        FindingKind::OutOfBounds,
        "An address is in no buffer, or past the end of one. A CTA's shared memory and a thread's local memory have bounds too, each as a whole: an index that runs from one array into the next is not found.",
        "Check the index against the size you allocated: a missing `if (i < n)`, a stride in bytes instead of elements, or --smem too small.",
    ),
    (
        FindingKind::Misaligned,
        "An access of n bytes must start at a multiple of n bytes.",
        "Align the pointer or the row stride to the width of the access, or use narrower loads and stores.",
    ),
    (
        FindingKind::UninitRegister,
        "A value that depends on a register the lane never wrote is stored, used as an address, or decides a branch. Merely moving such values is not reported.",
        "Initialise the variable on every path that leads here; the lane named took a path that skips it.",
    ),
    (
        FindingKind::UninitShared,
        "Shared memory is read before anything was written to it, and what was read is used.",
        "Write it first, and put a barrier between writer and reader: often the writer simply has not run yet.",
    ),
    (
        FindingKind::UninitGlobal,
        "Memory of an output is read before the kernel has written it.",
        "Pass the array as `inout:` if it holds a value already, or write it before it is read.",
    ),
    (
        FindingKind::SharedRace,
        "Two warps touch the same shared memory, one of them writes, and nothing orders the accesses.",
        "Put `bar.sync` (`__syncthreads()`), an mbarrier arrive and wait, or a release and acquire between them.",
    ),
    (
        FindingKind::GlobalRace,
        "Two CTAs or warps touch the same global memory, one of them writes, and nothing orders the accesses.",
        "Use atomics, or a release store and an acquire load of a flag, or split the work over two launches.",
    ),
    (
        FindingKind::NonCoherentRead,
        "`ld.global.nc` reads through a cache that does not see writes of the same launch, whatever orders them.",
        "Use a plain `ld.global`; in CUDA no `__ldg()`, and no `const __restrict__` for memory that the kernel writes.",
    ),
    (
        FindingKind::WarpRace,
        "Lanes of one warp exchange data through memory; lanes need not run together.",
        "Put `bar.warp.sync` (`__syncwarp()`) between the store and the load, and between a load and the next store.",
    ),
    (
        FindingKind::SameValueRace,
        "Threads write the same value to the same address, and nothing orders the writes: formally a race, but with only one outcome.",
        "Nothing, if it is intended (compilers do this); otherwise let one thread write.",
    ),
    (
        FindingKind::MissingProxyFence,
        "What ordinary stores have written to shared or global memory is accessed by a bulk copy or a wgmma, which see memory through another proxy.",
        "Execute `fence.proxy.async` after the stores and before the barrier that hands the memory over; for a tensor map that the kernel has changed, `fence.proxy.tensormap::generic.acquire` before the copy.",
    ),
    (
        FindingKind::UnfencedCopy,
        "The async proxy (a wgmma) reads what `cp.async` wrote, complete and ordered before it, without a proxy fence.",
        "Nothing, if a compiler wrote it (Triton does); a `fence.proxy.async` before the barrier makes it formally correct.",
    ),
    (
        FindingKind::UnfencedRead,
        "A bulk copy overwrites memory that ordinary loads have read, ordered after them but without a proxy fence.",
        "Nothing on today's hardware; a `fence.proxy.async` before the copy makes it formally correct.",
    ),
    (
        FindingKind::InFlightMemory,
        "Memory is accessed that a copy, possibly unfinished, reads or writes.",
        "Wait for the copy first: `cp.async.wait_group`, the mbarrier's phase, or `cp.async.bulk.wait_group`; then a barrier for other threads.",
    ),
    (
        FindingKind::InFlightRegister,
        "A register of an unfinished wgmma is read or written.",
        "Wait first: `wgmma.wait_group 0`, or keep fewer groups pending.",
    ),
    (
        FindingKind::MissingWgmmaFence,
        "Registers of a wgmma were accessed by other instructions since the last `wgmma.fence`.",
        "Execute `wgmma.fence.sync.aligned` after the last access and before the wgmma.",
    ),
    (
        FindingKind::UnfencedInit,
        "An accumulator is set by a move between `wgmma.fence` and the wgmma that reads it. Compilers write this, and assemblers move it up.",
        "Nothing in compiler-generated code; by hand, set accumulators before `wgmma.fence`, or let the first wgmma ignore them (scale-d false).",
    ),
    (
        FindingKind::MbarrierUninit,
        "An mbarrier is used that was never initialised by `mbarrier.init`.",
        "Initialise it in one thread, then `fence.mbarrier_init` or a barrier, then use it; check the address.",
    ),
    (
        FindingKind::MbarrierReinit,
        "An mbarrier is initialised while it is alive.",
        "Initialise once, or `mbarrier.inval` first.",
    ),
    (
        FindingKind::MbarrierOverArrival,
        "More threads arrive than the phase expects.",
        "Make the count of `mbarrier.init` the number of arrivals of one phase.",
    ),
    (
        FindingKind::MbarrierWrongPhase,
        "A thread arrives without knowing that the previous phase is complete, so its arrival may count towards that phase.",
        "Wait for the previous phase, in this thread or in one that this thread is ordered after.",
    ),
    (
        FindingKind::MbarrierParityAlias,
        "A wait names a phase that is neither the current one nor the previous one, so its parity matches the wrong phase.",
        "Flip the parity once for each use of the barrier, and wait for every phase; where one lane releases a slot for its \
         warp, put `bar.warp.sync` (`__syncwarp()`) before that, so that no lane is left behind.",
    ),
    (
        FindingKind::MbarrierMisuse,
        "A count, a byte count or an address that mbarriers do not allow.",
        "Counts are 1 to 2^20-1; addresses are multiples of 8 in shared memory; waits are for the CTA's own barriers.",
    ),
    (
        FindingKind::MbarrierLeftover,
        "A CTA ends while an mbarrier still expects bytes, or has received more than it expected.",
        "Make `expect_tx` name exactly the bytes that copies deliver: a box counts in full, even where it extends past the tensor's edge.",
    ),
    (
        FindingKind::MbarrierAccess,
        "An ordinary load or store accesses a live mbarrier.",
        "Keep the eight bytes of an mbarrier to `mbarrier` instructions; check for overlapping shared memory.",
    ),
    (
        FindingKind::BarrierCount,
        "Warps name different thread counts for one barrier, or one that is not a multiple of 32.",
        "Use one count for each barrier id: the threads of all warps that meet there.",
    ),
    (
        FindingKind::BarrierRecycled,
        "A warp arrives again at a barrier before it can know that its last arrival was counted.",
        "Put a barrier in the other direction between two `bar.arrive`, or alternate between two ids.",
    ),
    (
        FindingKind::ClusterBarrier,
        "`barrier.cluster.arrive` and `.wait` do not alternate.",
        "Each thread arrives once, then waits once.",
    ),
    (
        FindingKind::DivergentAligned,
        "An instruction for a whole warp or warpgroup is reached by only part of it, or by lanes at different places.",
        "Move it out of the branch, or make the condition the same for the whole warp; name in the mask only lanes that arrive.",
    ),
    (
        FindingKind::BadMask,
        "A member mask leaves out a lane that executes the instruction.",
        "Name every lane that executes it: take `__activemask()` before the branch, or the full mask outside it.",
    ),
    (
        FindingKind::InactiveLane,
        "Data is read from a lane that does not take part.",
        "Read only from lanes in the mask; check the lane number against the active ones.",
    ),
    (
        FindingKind::DescriptorMismatch,
        "Lanes disagree about a descriptor, an address or a flag that they must share.",
        "Compute it from values that are the same in all lanes.",
    ),
    (
        FindingKind::BadDescriptor,
        "A descriptor, a tensor map or a size that the hardware rejects.",
        "Check strides (multiples of 16), box (at most 256 each, a row within the swizzle), alignment (128 bytes in shared memory).",
    ),
    (
        FindingKind::RegisterPool,
        "`setmaxnreg` asks for registers that no warpgroup has released, changes the count in the wrong direction, or names different counts in one warpgroup.",
        "The sum over the warpgroups must not exceed the registers of the launch; decrease in some before others increase. `inc` must not name fewer than the warp has (`.maxnreg`, or what fits for the threads of the launch), `dec` not more.",
    ),
    (
        FindingKind::Undrained,
        "A warp or CTA ends while one of its copies or wgmmas is unfinished.",
        "Wait for it before the end: `cp.async.wait_all`, the mbarrier, `wgmma.wait_group 0`.",
    ),
    (
        FindingKind::EndedPeer,
        "Shared memory of another CTA of the cluster is used, but that CTA does not wait for it: it may have ended, and its memory with it.",
        "Let all CTAs of the cluster meet after the last such use: `barrier.cluster.arrive` and `.wait` (`cluster.sync()`) before the end.",
    ),
    (
        FindingKind::Deadlock,
        "No warp can make progress; the message lists what each warp waits for.",
        "Find the barrier whose arrivals or bytes fall short: a warp that left early, a wrong count, a phase never flipped.",
    ),
    (
        FindingKind::Trap,
        "The kernel executed `trap`.",
        "The kernel stopped on purpose; look at the condition before it.",
    ),
    (
        FindingKind::AssertFailed,
        "An `assert` or `tl.device_assert` of the kernel failed.",
        "The message names the condition and its line.",
    ),
    (
        FindingKind::BadCall,
        "A call through a pointer reaches no function or one with another signature, or a branch table has no such entry.",
        "Check the pointer or the index; functions must be in the same PTX file.",
    ),
    (
        FindingKind::NotJudged,
        "The kernel contains an instruction that the simulator cannot execute. This launch did not reach it, or ended there with its findings so far; the code after it was not checked.",
        "Nothing, if that code is not meant to run with these arguments; a launch that executes it is refused.",
    ),
];

impl FindingKind {
    /// Every kind.
    pub fn all() -> impl Iterator<Item = Self> {
        EXPLANATIONS.iter().map(|(kind, ..)| *kind)
    }

    /// The kind of that name, capital letters or not.
    pub fn parse(name: &str) -> Option<Self> {
        Self::all().find(|kind| kind.to_string().eq_ignore_ascii_case(name))
    }

    /// What it means.
    pub fn meaning(self) -> &'static str {
        self.explanation().0
    }

    /// What to do about it.
    pub fn cure(self) -> &'static str {
        self.explanation().1
    }

    fn explanation(self) -> (&'static str, &'static str) {
        let found = EXPLANATIONS.iter().find(|(kind, ..)| *kind == self);
        found.map_or(("", ""), |(_, meaning, cure)| (meaning, cure))
    }
}

impl std::fmt::Display for FindingKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(self, f)
    }
}
