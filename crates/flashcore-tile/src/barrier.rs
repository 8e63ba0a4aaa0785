//! Barriers and fences: named barriers, mbarriers, cluster barriers, proxy fences, typed so that ids and byte
//! offsets never appear as numbers in a kernel.

use flashcore_ptx::{
    inst::Operand,
    op::{Mod, Op},
    types::ScalarType,
};

use crate::{
    builder::Builder,
    error::FaultKind,
    expr::Expr,
    lower::Arg,
    memory::Shared,
    scope::Scope,
    value::{Reg, U32},
};

/// Most arrivals, and most bytes, that an mbarrier counts in one phase (PTX ISA, "mbarrier").
const MAX_COUNT: u32 = (1 << 20) - 1;
/// Bytes of an mbarrier.
pub(crate) const MBARRIER_BYTES: u32 = 8;
const B64: Mod = Mod::Type(ScalarType::B64);

/// One of the sixteen hardware barriers of a CTA, for a fixed number of threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NamedBarrier {
    id: u32,
    threads: u32,
}

/// An mbarrier in shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Mbarrier {
    pub(crate) at: Shared,
}

impl Builder {
    /// Waits for all threads of the CTA.
    #[track_caller]
    pub fn sync_cta(&mut self) {
        self.require("bar.sync over the CTA", Scope::Cta);
        self.emit(Op::BarSync, &[], [Operand::int(0)]);
    }

    /// Reserves a hardware barrier for `threads` threads.
    #[track_caller]
    pub fn named_barrier(&mut self, threads: u32) -> NamedBarrier {
        // Barrier 0 is the one of `sync_cta`.
        self.named_barriers += 1;
        if self.named_barriers > 15 {
            self.fault(FaultKind::NamedBarriers);
        }
        if threads == 0 || !threads.is_multiple_of(32) || threads > self.threads {
            self.fault(FaultKind::BarrierCount { threads, block: self.threads });
        }
        NamedBarrier { id: self.named_barriers, threads }
    }

    /// Waits until all threads of a named barrier have come.
    #[track_caller]
    pub fn sync(&mut self, barrier: NamedBarrier) {
        self.require("bar.sync", Scope::Warp);
        self.emit(Op::BarSync, &[], barrier.operands());
    }

    /// Counts at a named barrier without waiting.
    #[track_caller]
    pub fn arrive(&mut self, barrier: NamedBarrier) {
        self.require("bar.arrive", Scope::Warp);
        self.emit(Op::BarArrive, &[], barrier.operands());
    }

    /// Makes earlier writes of this thread to shared memory visible to copies and matrix products that follow.
    #[track_caller]
    pub fn fence_async(&mut self) {
        self.emit(Op::FenceProxy, &[Mod::Async, Mod::SharedCta], []);
    }

    /// Publishes initialised mbarriers; a barrier of the CTA or cluster must follow.
    #[track_caller]
    pub fn fence_mbarrier_init(&mut self) {
        self.emit(Op::FenceMbarrierInit, &[Mod::Release, Mod::Cluster], []);
    }

    /// Waits for all threads of the cluster.
    #[track_caller]
    pub fn sync_cluster(&mut self) {
        self.arrive_cluster();
        self.wait_cluster();
    }

    /// Tells the cluster that this thread has come this far; [`wait_cluster`](Self::wait_cluster) must follow.
    #[track_caller]
    pub fn arrive_cluster(&mut self) {
        self.require("barrier.cluster", Scope::Warp);
        self.emit(Op::BarrierClusterArrive, &[Mod::Release, Mod::Aligned], []);
    }

    /// Like [`arrive_cluster`](Self::arrive_cluster), but publishes nothing: for what is ordered by other means.
    /// Publishing to a cluster costs a fence of the whole GPU.
    #[track_caller]
    pub fn arrive_cluster_relaxed(&mut self) {
        self.require("barrier.cluster", Scope::Warp);
        self.emit(Op::BarrierClusterArrive, &[Mod::Relaxed, Mod::Aligned], []);
    }

    /// Waits for all threads of the cluster that have not ended.
    #[track_caller]
    pub fn wait_cluster(&mut self) {
        self.require("barrier.cluster", Scope::Warp);
        self.emit(Op::BarrierClusterWait, &[Mod::Acquire, Mod::Aligned], []);
    }

    /// Waits for what the previous kernel in the stream wrote.
    #[track_caller]
    pub fn wait_for_predecessor(&mut self) {
        self.emit(Op::Griddepcontrol, &[Mod::Wait], []);
    }

    /// Allows the next kernel in the stream to start.
    #[track_caller]
    pub fn launch_dependents(&mut self) {
        self.emit(Op::Griddepcontrol, &[Mod::LaunchDependents], []);
    }
}

impl NamedBarrier {
    fn operands(self) -> [Operand; 2] {
        [self.id, self.threads].map(|n| Operand::int(i64::from(n)))
    }
}

#[track_caller]
fn check_count(b: &mut Builder, what: &'static str, count: u32) {
    if !(1..=MAX_COUNT).contains(&count) {
        b.fault(FaultKind::MbarrierCount { what, count, most: MAX_COUNT });
    }
}

impl Mbarrier {
    /// Of a row of barriers that begins with this one, the one with this number.
    #[must_use]
    pub const fn nth(self, number: u32) -> Self {
        Self { at: self.at.at(MBARRIER_BYTES * number) }
    }

    /// Like [`nth`](Self::nth), with a number that is not known before the kernel runs.
    #[track_caller]
    pub fn number(self, b: &mut Builder, number: Reg<U32>) -> Self {
        let bytes = b.mul(number, MBARRIER_BYTES);
        Self { at: self.at.plus(b, bytes) }
    }

    /// Prepares the barrier for `arrivals` arrivals per phase.
    #[track_caller]
    pub fn init(self, b: &mut Builder, arrivals: u32) {
        check_count(b, "arrivals", arrivals);
        let operands = [self.at.operand(), Operand::int(i64::from(arrivals))];
        b.emit(Op::MbarrierInit, &[Mod::SharedCta, B64], operands);
    }

    /// Counts one arrival.
    #[track_caller]
    pub fn arrive(self, b: &mut Builder) {
        b.emit(Op::MbarrierArrive, &[Mod::SharedCta, B64], [Operand::Sink, self.at.operand()]);
    }

    /// Counts one arrival at the same barrier of CTA `rank` of the cluster. It tells of reads, not of stores: publishing to a
    /// cluster costs a fence of the whole GPU.
    #[track_caller]
    pub fn arrive_at_peer(self, b: &mut Builder, rank: Reg<U32>) {
        let address = self.address(b);
        let there = b.peer_address(address, rank);
        let operands = [Operand::Sink, Shared::from(there).operand()];
        b.emit(Op::MbarrierArrive, &[Mod::SharedCluster, B64], operands);
    }

    /// Counts one arrival and announces `bytes` that copies will deliver.
    #[track_caller]
    pub fn arrive_expecting(self, b: &mut Builder, bytes: u32) {
        check_count(b, "bytes", bytes);
        let operands = [Operand::Sink, self.at.operand(), Operand::int(i64::from(bytes))];
        b.emit(Op::MbarrierArrive, &[Mod::ExpectTx, Mod::SharedCta, B64], operands);
    }

    /// As [`arrive_expecting`](Self::arrive_expecting), with a number that is not known before the kernel runs.
    #[track_caller]
    pub fn arrive_expecting_some(self, b: &mut Builder, bytes: Reg<U32>) {
        let operands = [Operand::Sink, self.at.operand(), bytes.operand()];
        b.emit(Op::MbarrierArrive, &[Mod::ExpectTx, Mod::SharedCta, B64], operands);
    }

    /// The address of the barrier.
    #[track_caller]
    pub fn address(self, b: &mut Builder) -> Reg<U32> {
        self.at.address(b)
    }

    /// Waits until the phase of the given parity has completed.
    #[track_caller]
    pub fn wait(self, b: &mut Builder, parity: impl Into<Expr<U32>>) {
        let parity = b.arg(parity);
        self.wait_seeing(b, parity, &[]);
    }

    /// Like [`wait`](Self::wait), where the phase tells of stores by other CTAs of the cluster.
    #[track_caller]
    pub fn wait_for_peers(self, b: &mut Builder, parity: impl Into<Expr<U32>>) {
        let parity = b.arg(parity);
        self.wait_seeing(b, parity, &[Mod::Acquire, Mod::Cluster]);
    }

    #[track_caller]
    fn wait_seeing(self, b: &mut Builder, parity: Arg, whose: &[Mod]) {
        let again = b.label("wait");
        b.place(&again);
        // Lanes may see the phase flip at different times, so that they may part here; all leave in the same phase.
        let done = b.fresh_pred(parity.scope.min(self.at.base.scope()));
        let operands = [Operand::Reg(done.id), self.at.operand(), parity.operand];
        let mods = [&[Mod::Parity], whose, &[Mod::SharedCta, B64]].concat();
        b.emit(Op::MbarrierTryWait, &mods, operands);
        b.spin(done, &again);
    }
}
