//! What a program requires: the oldest target and the lowest `.version` that support all of it.

use super::Form;
use crate::{
    inst::{Inst, Operand},
    module::{Directives, Kernel, Module},
    op::{Mod, Op},
    target::Target,
    types::ScalarType,
    version::{V7_0, V7_4, V7_7, V7_8, V8_0, V8_4, V8_6, Version},
};

/// A target and a language version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Needs {
    /// The oldest target that works.
    pub target: Target,
    /// The lowest version that works.
    pub version: Version,
}

impl Needs {
    /// What every program needs.
    pub const NOTHING: Self = Self { target: Target::Sm75, version: V7_0 };

    /// What both need. Targets are ordered by age, and the only architecture-specific one is the newest of its kind.
    pub fn and(self, other: Self) -> Self {
        Self { target: self.target.max(other.target), version: self.version.max(other.version) }
    }
}

const fn needs(target: Target, version: Version) -> Needs {
    Needs { target, version }
}

/// What a modifier needs beyond its row.
fn modifier_needs(op: Op, modifier: Mod) -> Needs {
    match modifier {
        Mod::SharedCluster | Mod::Cluster => needs(Target::Sm90, V7_8),
        Mod::Relu | Mod::NaN => needs(Target::Sm80, V7_0),
        Mod::Relaxed if matches!(op, Op::MbarrierExpectTx | Op::MbarrierCompleteTx) => {
            needs(Target::Sm90, V8_0)
        }
        Mod::Relaxed if is_mbarrier(op) => needs(Target::Sm90, V8_6),
        Mod::Relaxed | Mod::Acquire | Mod::Release if is_barrier(op) => needs(Target::Sm80, V8_0),
        Mod::SharedCta => needs(Target::Sm75, V7_8),
        Mod::Param if op == Op::Cvta => needs(Target::Sm75, V7_7),
        Mod::Type(ScalarType::B128) if op != Op::Mov => needs(Target::Sm80, V8_4),
        Mod::L1EvictNormal | Mod::L1EvictUnchanged | Mod::L1EvictFirst | Mod::L1EvictLast => {
            needs(Target::Sm75, V7_4)
        }
        Mod::L1NoAllocate | Mod::L2B64 | Mod::L2B128 => needs(Target::Sm75, V7_4),
        Mod::L2CacheHint | Mod::L2B256 => needs(Target::Sm80, V7_4),
        _ => Needs::NOTHING,
    }
}

fn is_mbarrier(op: Op) -> bool {
    op.text().starts_with("mbarrier.")
}

fn is_barrier(op: Op) -> bool {
    is_mbarrier(op) || matches!(op, Op::BarrierClusterArrive | Op::BarrierClusterWait)
}

fn operand_needs(operand: &Operand) -> Needs {
    match operand {
        Operand::Special(special) if special.needs_clusters() => needs(Target::Sm90, V7_8),
        _ => Needs::NOTHING,
    }
}

impl Form {
    /// What `inst`, an instance of this form, needs.
    pub fn needs(&self, inst: &Inst) -> Needs {
        let mods = inst.mods.iter().map(|&m| modifier_needs(inst.op, m));
        let operands = inst.operands.iter().map(operand_needs);
        mods.chain(operands).fold(needs(self.row.target, self.row.version), Needs::and)
    }
}

impl Directives {
    /// What the directives need.
    pub fn needs(&self) -> Needs {
        let clusters =
            self.explicit_cluster || self.required_cluster.is_some() || self.max_cluster_rank.is_some();
        if clusters { needs(Target::Sm90, V7_8) } else { Needs::NOTHING }
    }
}

impl Kernel {
    /// What the kernel needs; instructions without a row count for nothing.
    pub fn needs(&self) -> Needs {
        let each = self.instructions().filter_map(|(_, inst)| Some(inst.form().ok()?.needs(inst)));
        each.fold(self.directives.needs(), Needs::and)
    }
}

impl Module {
    /// The lowest `.version` that serves the target and every body. Drivers refuse versions newer than
    /// themselves, so this is what to print.
    pub fn lowest_version(&self) -> Version {
        let units = self.units().map(|(_, unit)| unit.needs().version);
        units.fold(Version::of_target(self.target), Version::max)
    }
}
