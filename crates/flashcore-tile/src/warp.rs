//! Exchange inside a warp: shuffles, votes, broadcasts.

use flashcore_ptx::{
    inst::Operand,
    op::{Mod, Op},
    target::Target,
    types::ScalarType,
};

use crate::{
    builder::Builder,
    expr::Expr,
    scope::{Scope, Warp},
    value::{Bits, F32, Pred, Reg, Type, U32, U64},
};

const ALL_LANES: i64 = 0xffff_ffff;
const B32_TYPE: Mod = Mod::Type(ScalarType::B32);

impl Builder {
    /// The value of the lane whose number differs in the bits of `mask`.
    #[track_caller]
    pub fn shuffle_xor(&mut self, x: Reg<F32>, mask: u32) -> Reg<F32> {
        self.require("shfl.sync over a full warp", Scope::Warp);
        let dst = self.fresh::<F32>(Scope::Lane);
        let operands = [dst.operand(), x.operand(), int(mask), int(31), Operand::int(ALL_LANES)];
        self.emit(Op::ShflSync, &[Mod::Bfly, B32_TYPE], operands);
        dst
    }

    /// The value of lane number `lane`.
    #[track_caller]
    pub fn shuffle<T: Bits>(&mut self, x: Reg<T>, lane: Reg<U32>) -> Reg<T> {
        self.require("shfl.sync over a full warp", Scope::Warp);
        let dst = self.fresh::<T>(Scope::Lane);
        let operands = [dst.operand(), x.operand(), lane.operand(), int(31), Operand::int(ALL_LANES)];
        self.emit(Op::ShflSync, &[Mod::Idx, B32_TYPE], operands);
        dst
    }

    /// The 64-bit value of lane number `lane`.
    #[track_caller]
    pub fn shuffle_wide(&mut self, x: Reg<U64>, lane: Reg<U32>) -> Reg<U64> {
        self.require("shfl.sync over a full warp", Scope::Warp);
        let wide = Mod::Type(ScalarType::B64);
        let halves = [(); 2].map(|()| self.fresh::<U32>(Scope::Lane));
        self.emit(Op::Mov, &[wide], [Operand::Vector(halves.map(Reg::operand).to_vec()), x.operand()]);
        let theirs = halves.map(|half| {
            let dst = self.fresh::<U32>(Scope::Lane);
            let operands = [dst.operand(), half.operand(), lane.operand(), int(31), Operand::int(ALL_LANES)];
            self.emit(Op::ShflSync, &[Mod::Idx, B32_TYPE], operands);
            dst.operand()
        });
        let dst = self.fresh::<U64>(Scope::Lane);
        self.emit(Op::Mov, &[wide], [dst.operand(), Operand::Vector(theirs.to_vec())]);
        dst
    }

    /// The value of lane 0, which tells hardware and builder that the warp agrees on it.
    ///
    /// `scope` may be wider than a warp where the caller knows that every warp of it computes the same value.
    #[track_caller]
    pub fn broadcast<T: Type>(&mut self, x: Reg<T>, scope: Scope) -> Reg<T> {
        self.require("shfl.sync over a full warp", Scope::Warp);
        let dst = self.fresh::<T>(scope);
        let operands = [dst.operand(), x.operand(), int(0), int(31), Operand::int(ALL_LANES)];
        self.emit(Op::ShflSync, &[Mod::Idx, B32_TYPE], operands);
        dst
    }

    /// The same value in a register that hardware knows to be warp-uniform.
    ///
    /// For values that all lanes hold alike but the compiler cannot see that (loads): uniform registers save vector
    /// registers and let loops branch without reconvergence barriers.
    #[track_caller]
    pub fn uniform_register(&mut self, x: impl Into<Expr<U32>>) -> Reg<U32> {
        if !self.target.includes(Target::Sm80) {
            let x = self.let_(x.into());
            return self.broadcast(x, x.scope());
        }
        self.require("redux.sync over a full warp", Scope::Warp);
        let x = self.arg(x);
        let dst = self.fresh::<U32>(x.scope);
        self.emit(Op::ReduxSync, &[Mod::Or, B32_TYPE], [dst.operand(), x.operand, Operand::int(ALL_LANES)]);
        dst
    }

    /// The sum over all lanes of the warp (sm_80 on).
    #[track_caller]
    pub fn warp_sum(&mut self, x: Reg<U32>) -> Reg<U32> {
        self.require("redux.sync over a full warp", Scope::Warp);
        let dst = self.fresh::<U32>(Scope::Warp);
        let mods = [Mod::Add, Mod::Type(ScalarType::U32)];
        self.emit(Op::ReduxSync, &mods, [dst.operand(), x.operand(), Operand::int(ALL_LANES)]);
        dst
    }

    /// Whether the condition holds in any lane of the warp.
    #[track_caller]
    pub fn any(&mut self, cond: Pred) -> crate::control::Uniform<Warp> {
        self.vote(Mod::Any, cond)
    }

    /// Whether the condition holds in every lane of the warp.
    #[track_caller]
    pub fn all(&mut self, cond: Pred) -> crate::control::Uniform<Warp> {
        self.vote(Mod::All, cond)
    }

    #[track_caller]
    fn vote(&mut self, mode: Mod, cond: Pred) -> crate::control::Uniform<Warp> {
        self.require("vote.sync over a full warp", Scope::Warp);
        let dst = self.fresh_pred(Scope::Warp);
        let source = if cond.negated { Operand::Not(cond.id) } else { Operand::Reg(cond.id) };
        let operands = [Operand::Reg(dst.id), source, Operand::int(ALL_LANES)];
        self.emit(Op::VoteSync, &[mode, Mod::Type(ScalarType::Pred)], operands);
        self.uniform(dst)
    }

    /// Waits for all lanes of the warp; what they wrote to memory before is visible after.
    #[track_caller]
    pub fn sync_warp(&mut self) {
        self.require("bar.warp.sync over a full warp", Scope::Warp);
        self.emit(Op::BarWarpSync, &[], [Operand::int(ALL_LANES)]);
    }
}

fn int(value: u32) -> Operand {
    Operand::int(i64::from(value))
}
