//! The builder: collects the instructions of one kernel, the Rust line of each, and every fault.
//!
//! Kernels call its methods, which are grouped by subject: arithmetic in `scalar`, branches in
//! `control`, memory in `memory`, barriers in `barrier`, matrices in `wgmma` and `mma`. All of them end in
//! [`Builder::emit`], which checks the instruction against the table of `flashcore-ptx`.

use std::panic::Location;

use flashcore_ptx::{
    ident::{Ident, Name},
    inst::{Inst, Operand, RegId},
    module::{Kernel, Length, Linkage, Module, Space, Statement, Variable},
    op::{Mod, Op},
    sm::Sm,
    target::Target,
    types::{ScalarType, SpecialReg},
};

use crate::{
    error::{Fault, FaultKind},
    roles::WARPGROUP,
    scope::Scope,
    value::{Pred, Reg, Type, U32},
    wgmma::Groups,
};

/// Most threads of a CTA.
const MAX_THREADS: u32 = 1024;
/// Most CTAs of a cluster; above 8 the launch must allow it.
const MAX_CLUSTER: u32 = 16;

/// Most shared memory a CTA can have on the target.
pub const fn shared_limit(target: Target) -> u32 {
    Sm::of(target.capability()).most_shared()
}

/// One kernel under construction.
#[derive(Debug)]
pub struct Builder {
    pub(crate) target: Target,
    pub(crate) kernel: Kernel,
    pub(crate) lines: Vec<&'static Location<'static>>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) threads: u32,
    /// Threads that may execute what is being built: fewer than the CTA has where a role is.
    pub(crate) executing: u32,
    pub(crate) guard: Option<Pred>,
    pub(crate) converged: Scope,
    pub(crate) groups: Groups,
    pub(crate) shared_bytes: u32,
    pub(crate) named_barriers: u32,
    author: Option<&'static Location<'static>>,
    shared_base: Reg<U32>,
    labels: u32,
}

impl Builder {
    /// Starts a kernel of `threads` threads; its registers are capped so that `ctas_per_sm` CTAs fit on one SM.
    #[track_caller]
    pub fn new(target: Target, name: &Ident, threads: u32, ctas_per_sm: u32) -> Self {
        let mut kernel = Kernel::new(name);
        kernel.directives.max_threads = Some([threads, 1, 1]);
        kernel.directives.min_ctas_per_sm = Some(ctas_per_sm);
        // Read once, before any branch, so that every use is reached by it.
        let shared_base = Reg::new(kernel.registers.add(ScalarType::U32), Scope::Grid);
        let mut builder = Self {
            target,
            kernel,
            lines: Vec::new(),
            faults: Vec::new(),
            threads,
            executing: threads,
            guard: None,
            converged: Scope::Grid,
            groups: Groups::default(),
            shared_bytes: 0,
            named_barriers: 0,
            author: None,
            shared_base,
            labels: 0,
        };
        let base = [shared_base.operand(), Operand::Symbol(shared_symbol())];
        builder.emit(Op::Mov, &[Mod::Type(ScalarType::U32)], base);
        if !(1..=MAX_THREADS).contains(&threads) {
            builder.fault(FaultKind::Threads { threads });
        }
        builder
    }

    /// The architecture the kernel is built for.
    pub const fn target(&self) -> Target {
        self.target
    }

    /// Threads of a CTA.
    pub const fn threads(&self) -> u32 {
        self.threads
    }

    /// Says that the kernel runs in clusters of `ctas` CTAs along x.
    #[track_caller]
    pub fn cluster(&mut self, ctas: u32) {
        if !(1..=MAX_CLUSTER).contains(&ctas) || !self.target.includes(Target::Sm90) {
            self.fault(FaultKind::Cluster { ctas, target: self.target });
        }
        self.kernel.directives.explicit_cluster = true;
        self.kernel.directives.required_cluster = Some([ctas, 1, 1]);
    }

    /// A new register, unwritten.
    pub(crate) fn fresh<T: Type>(&mut self, scope: Scope) -> Reg<T> {
        Reg::new(self.kernel.registers.add(T::PTX), scope.min(self.converged))
    }

    pub(crate) fn fresh_id(&mut self, ty: ScalarType) -> RegId {
        self.kernel.registers.add(ty)
    }

    pub(crate) fn fresh_pred(&mut self, scope: Scope) -> Pred {
        let scope = scope.min(self.converged);
        Pred { id: self.kernel.registers.add(ScalarType::Pred), scope, negated: false }
    }

    /// Adds one instruction under the current predicate.
    #[track_caller]
    pub(crate) fn emit(&mut self, op: Op, mods: &[Mod], operands: impl Into<Vec<Operand>>) {
        match Inst::new(op, mods, operands) {
            Ok(inst) => self.push(Statement::Inst(match self.guard {
                Some(guard) => inst.guarded(guard.id, guard.negated),
                None => inst,
            })),
            Err(error) => self.fault(FaultKind::Form(error.to_string())),
        }
    }

    #[track_caller]
    pub(crate) fn push(&mut self, statement: Statement) {
        self.kernel.body.push(statement);
        self.lines.push(self.line());
    }

    /// The Rust line to blame: the caller's, or that of the author in whose name a closure of this crate builds.
    #[track_caller]
    fn line(&self) -> &'static Location<'static> {
        match self.author {
            Some(author) => author,
            None => Location::caller(),
        }
    }

    /// Builds in the name of `author`, for closures of this crate, which cannot pass their caller's line on.
    pub(crate) fn in_name_of<R>(
        &mut self,
        author: &'static Location<'static>,
        body: impl FnOnce(&mut Self) -> R,
    ) -> R {
        let outer = self.author.replace(author);
        let result = body(self);
        self.author = outer;
        result
    }

    /// Records a fault at the caller's line; building goes on, so that all faults are reported together.
    #[track_caller]
    pub(crate) fn fault(&mut self, kind: FaultKind) {
        let at = self.line();
        self.faults.push(Fault { at, kind });
    }

    /// Demands that all threads of `needed` are here together, and that the CTA consists of whole groups of them.
    #[track_caller]
    pub(crate) fn require(&mut self, what: &'static str, needed: Scope) {
        let group = match needed {
            Scope::Lane | Scope::Cta | Scope::Grid => 1,
            Scope::Warp => 32,
            Scope::Warpgroup => WARPGROUP,
        };
        if !self.executing.is_multiple_of(group) {
            self.fault(FaultKind::PartialGroup { what, needed, threads: self.executing });
        }
        if self.converged < needed {
            self.fault(FaultKind::Divergent { what, needed, here: self.converged });
        }
    }

    pub(crate) fn label(&mut self, hint: &str) -> Name {
        self.labels += 1;
        Ident::new(format!("L{}_{hint}", self.labels)).map(Name::from).expect("a label is a legal name")
    }

    #[track_caller]
    pub(crate) fn place(&mut self, label: &Name) {
        self.push(Statement::Label(label.clone()));
    }

    /// Reads a special register.
    #[track_caller]
    pub(crate) fn special(&mut self, special: SpecialReg, scope: Scope) -> Reg<U32> {
        let dst = self.fresh::<U32>(scope);
        self.emit(Op::Mov, &[Mod::Type(ScalarType::U32)], [dst.operand(), Operand::Special(special)]);
        dst
    }

    /// Index of the thread in its CTA.
    #[track_caller]
    pub fn thread(&mut self) -> Reg<U32> {
        self.special(SpecialReg::TidX, Scope::Lane)
    }

    /// Index of the CTA along x.
    #[track_caller]
    pub fn cta(&mut self) -> Reg<U32> {
        self.special(SpecialReg::CtaidX, Scope::Cta)
    }

    /// Index of the CTA along x, y and z.
    #[track_caller]
    pub fn cta_xyz(&mut self) -> [Reg<U32>; 3] {
        [SpecialReg::CtaidX, SpecialReg::CtaidY, SpecialReg::CtaidZ]
            .map(|index| self.special(index, Scope::Cta))
    }

    /// Number of CTAs along x.
    #[track_caller]
    pub fn ctas(&mut self) -> Reg<U32> {
        self.special(SpecialReg::NctaidX, Scope::Grid)
    }

    /// Number of CTAs along y.
    #[track_caller]
    pub fn ctas_y(&mut self) -> Reg<U32> {
        self.special(SpecialReg::NctaidY, Scope::Grid)
    }

    /// Rank of the CTA in its cluster.
    #[track_caller]
    pub fn cluster_rank(&mut self) -> Reg<U32> {
        self.special(SpecialReg::ClusterCtarank, Scope::Cta)
    }

    /// Index of the thread in its warp.
    #[track_caller]
    pub fn lane(&mut self) -> Reg<U32> {
        let thread = self.thread();
        self.let_(thread % 32)
    }

    /// Index of the warp in the CTA, the same in all lanes of the warp.
    #[track_caller]
    pub fn warp(&mut self) -> Reg<U32> {
        let thread = self.thread();
        let warp = self.let_(thread / 32);
        self.broadcast(warp, Scope::Warp)
    }

    /// Index of the warpgroup in the CTA, the same in all its threads.
    #[track_caller]
    pub fn warpgroup(&mut self) -> Reg<U32> {
        let thread = self.thread();
        let group = self.let_(thread / WARPGROUP);
        self.broadcast(group, Scope::Warpgroup)
    }

    /// Address of the kernel's dynamic shared memory.
    pub const fn shared_base(&self) -> Reg<U32> {
        self.shared_base
    }

    /// The module around the finished kernel.
    pub(crate) fn module(&self) -> Module {
        let mut module = Module::new(self.target);
        module.variables.push(Variable {
            linkage: Linkage::Extern,
            space: Space::Shared,
            align: Some(1024),
            ty: ScalarType::B8,
            name: shared_symbol(),
            len: Length::Unsized,
            init: Vec::new(),
        });
        module.kernels.push(self.kernel.clone());
        module
    }
}

fn shared_symbol() -> Name {
    Ident::new("fc_shared").map(Name::from).expect("a constant name is legal")
}
