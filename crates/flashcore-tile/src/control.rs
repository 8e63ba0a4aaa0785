//! Structured control flow: blocks that run under a condition, and loops.
//!
//! A block under a per-thread condition knows that its threads may have diverged, and refuses convergent
//! instructions; [`Uniform`] conditions keep a warp, a warpgroup or a CTA together.

use std::marker::PhantomData;

use flashcore_ptx::{
    ident::Name,
    inst::{Inst, Operand},
    module::Statement,
    op::{Mod, Op},
};

use crate::{
    builder::Builder,
    error::FaultKind,
    expr::Cond,
    scope::{Scope, UniformScope},
    value::Pred,
};

/// A condition on which all threads of `S` agree.
#[derive(Clone, Copy, Debug)]
pub struct Uniform<S> {
    pred: Pred,
    scope: PhantomData<S>,
}

impl<S: UniformScope> Uniform<S> {
    /// The opposite condition.
    #[must_use]
    pub const fn not(self) -> Self {
        Self { pred: self.pred.not(), ..self }
    }

    /// The condition itself.
    pub const fn pred(self) -> Pred {
        self.pred
    }
}

impl Builder {
    /// Claims that all threads of `S` agree on a condition; refused where the builder does not know it.
    #[track_caller]
    pub fn uniform<S: UniformScope>(&mut self, cond: impl Into<Cond>) -> Uniform<S> {
        let pred = self.pred(cond);
        if pred.scope < S::SCOPE {
            self.fault(FaultKind::NotUniform { needed: S::SCOPE, actual: pred.scope });
        }
        Uniform { pred, scope: PhantomData }
    }

    /// Runs `body` in the threads where the condition holds.
    #[track_caller]
    pub fn if_(&mut self, cond: impl Into<Cond>, body: impl FnOnce(&mut Self)) {
        let cond = self.pred(cond);
        let end = self.label("end");
        self.branch(Some(cond.not()), &end);
        self.block(cond.scope, body);
        self.place(&end);
    }

    /// Runs `body` if the condition holds; all threads of `S` stay together.
    #[track_caller]
    pub fn if_uniform<S: UniformScope>(&mut self, cond: Uniform<S>, body: impl FnOnce(&mut Self)) {
        self.if_(cond.pred, body);
    }

    /// Runs one of two blocks; all threads of `S` stay together.
    #[track_caller]
    pub fn if_else<S: UniformScope>(
        &mut self,
        cond: Uniform<S>,
        then: impl FnOnce(&mut Self),
        otherwise: impl FnOnce(&mut Self),
    ) {
        let (second, end) = (self.label("else"), self.label("end"));
        self.branch(Some(cond.pred.not()), &second);
        self.block(cond.pred.scope, then);
        self.branch(None, &end);
        self.place(&second);
        self.block(cond.pred.scope, otherwise);
        self.place(&end);
    }

    /// Executes each instruction of `body` only where the condition holds, without a branch.
    #[track_caller]
    pub fn predicated(&mut self, cond: impl Into<Cond>, body: impl FnOnce(&mut Self)) {
        let cond = self.pred(cond);
        let (guard, converged) = (self.guard, self.converged);
        let both = guard.map_or(cond, |outer| {
            self.guard = None;
            self.both(outer, cond)
        });
        self.guard = Some(both);
        self.converged = converged.min(cond.scope);
        body(self);
        self.guard = guard;
        self.converged = converged;
    }

    /// Repeats `body` as long as `cond`, evaluated before each turn, holds.
    #[track_caller]
    pub fn while_<C: Into<Cond>>(&mut self, cond: impl FnOnce(&mut Self) -> C, body: impl FnOnce(&mut Self)) {
        let (head, exit) = (self.label("while"), self.label("done"));
        self.place(&head);
        let again = cond(self);
        let again = self.pred(again);
        self.branch(Some(again.not()), &exit);
        let around = self.enter(again.scope);
        body(self);
        self.branch(None, &head);
        self.leave(around);
        self.place(&exit);
    }

    /// Runs `body` once, and again as long as the condition it returns holds.
    #[track_caller]
    pub fn do_while<S: UniformScope>(&mut self, body: impl FnOnce(&mut Self) -> Uniform<S>) {
        let head = self.label("loop");
        self.place(&head);
        let around = self.enter(S::SCOPE);
        let again = body(self);
        self.branch(Some(again.pred), &head);
        self.leave(around);
    }

    /// Like [`do_while`](Self::do_while), with a value that goes round: it must come back in the registers, and
    /// with the matrix groups in flight, with which it entered.
    #[track_caller]
    pub fn do_while_carrying<S: UniformScope, C: Carried>(
        &mut self,
        start: C,
        body: impl FnOnce(&mut Self, C) -> (Uniform<S>, C),
    ) -> C {
        let head = self.label("loop");
        let entered = start.identity(self);
        self.place(&head);
        let around = self.enter(S::SCOPE);
        let (again, carried) = body(self, start);
        if carried.identity(self) != entered {
            self.fault(FaultKind::Carried);
        }
        self.branch(Some(again.pred), &head);
        self.leave(around);
        carried
    }

    /// Runs `body` if the condition holds, on a value that comes out in the registers in which it went in.
    #[track_caller]
    pub fn if_carrying<S: UniformScope, C: Carried>(
        &mut self,
        cond: Uniform<S>,
        value: C,
        body: impl FnOnce(&mut Self, C) -> C,
    ) -> C {
        let entered = value.identity(self);
        let mut out = None;
        self.if_uniform(cond, |b| out = Some(body(b, value)));
        let out = out.expect("the body has run");
        if out.identity(self) != entered {
            self.fault(FaultKind::Carried);
        }
        out
    }

    /// Runs one of two blocks on a value that comes out of either in the registers in which it went in.
    #[track_caller]
    pub fn if_else_carrying<S: UniformScope, C: Carried>(
        &mut self,
        cond: Uniform<S>,
        value: C,
        then: impl FnOnce(&mut Self, C) -> C,
        otherwise: impl FnOnce(&mut Self, C) -> C,
    ) -> C {
        let entered = value.identity(self);
        let twin = value.twin();
        let (mut one, mut other) = (None, None);
        self.if_else(cond, |b| one = Some(then(b, value)), |b| other = Some(otherwise(b, twin)));
        let [one, other] = [one, other].map(|out| out.expect("both blocks have been built"));
        if [&one, &other].into_iter().any(|out| out.identity(self) != entered) {
            self.fault(FaultKind::Carried);
        }
        one
    }

    /// Ends the thread.
    #[track_caller]
    pub fn exit(&mut self) {
        self.emit(Op::Ret, &[], []);
    }

    /// Stops the kernel with an error.
    #[track_caller]
    pub fn trap(&mut self) {
        self.emit(Op::Trap, &[], []);
    }

    #[track_caller]
    fn block(&mut self, scope: Scope, body: impl FnOnce(&mut Self)) {
        let around = self.enter(scope);
        body(self);
        self.leave(around);
    }

    /// Starts a block in which only the threads of `scope` are sure to be together; says what holds around it.
    fn enter(&mut self, scope: Scope) -> Around {
        let around = Around { converged: self.converged, in_flight: self.groups.in_flight() };
        self.converged = around.converged.min(scope);
        around
    }

    /// Ends a block, which must have as many matrix groups in flight as at its start.
    #[track_caller]
    fn leave(&mut self, around: Around) {
        self.converged = around.converged;
        let (before, after) = (around.in_flight, self.groups.in_flight());
        if before != after {
            self.fault(FaultKind::Unbalanced { before, after });
        }
    }

    /// Goes back to `again` until `done` holds; the lanes of a warp may see that at different times.
    #[track_caller]
    pub(crate) fn spin(&mut self, done: Pred, again: &Name) {
        self.jump(Some(done.not()), again, &[]);
    }

    #[track_caller]
    fn branch(&mut self, cond: Option<Pred>, to: &Name) {
        let uniform = cond.is_none_or(|c| c.scope >= Scope::Warp) && self.converged >= Scope::Warp;
        self.jump(cond, to, if uniform { &[Mod::Uni] } else { &[] });
    }

    #[track_caller]
    fn jump(&mut self, cond: Option<Pred>, to: &Name, mods: &[Mod]) {
        match Inst::new(Op::Bra, mods, [Operand::Label(to.clone())]) {
            Ok(inst) => {
                let inst = match cond {
                    Some(cond) => inst.guarded(cond.id, cond.negated),
                    None => inst,
                };
                self.push(Statement::Inst(inst));
            }
            Err(error) => self.fault(FaultKind::Form(error.to_string())),
        }
    }
}

/// What holds around a block.
#[derive(Clone, Copy)]
struct Around {
    converged: Scope,
    in_flight: usize,
}

/// Something that goes round a loop, or through a block, in fixed registers.
pub trait Carried {
    /// The registers and the age of groups in flight, to compare.
    fn identity(&self, b: &Builder) -> Vec<u64>;
    /// The same registers, for the other one of two blocks.
    #[must_use]
    fn twin(&self) -> Self;
}

impl<X: Carried, Y: Carried> Carried for (X, Y) {
    fn identity(&self, b: &Builder) -> Vec<u64> {
        [self.0.identity(b), self.1.identity(b)].concat()
    }

    fn twin(&self) -> Self {
        (self.0.twin(), self.1.twin())
    }
}

impl<X: Carried, Y: Carried, Z: Carried> Carried for (X, Y, Z) {
    fn identity(&self, b: &Builder) -> Vec<u64> {
        [self.0.identity(b), self.1.identity(b), self.2.identity(b)].concat()
    }

    fn twin(&self) -> Self {
        (self.0.twin(), self.1.twin(), self.2.twin())
    }
}
