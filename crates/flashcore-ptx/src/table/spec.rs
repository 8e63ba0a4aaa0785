//! The vocabulary in which rows of the table are written. Everything is `const`, so the table is plain data.

use crate::{
    op::{Mod, Op},
    target::Target,
    types::ScalarType,
    version::{V7_0, Version},
};

/// One form of one instruction, as a line of the ISA manual.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The operation.
    pub op: Op,
    /// Modifiers in order.
    pub slots: &'static [Slot],
    /// Operands in order.
    pub operands: &'static [OperandSpec],
    /// The oldest target that has it.
    pub target: Target,
    /// The lowest `.version` that has it (modifiers may ask for more, see [`Needs`](super::Needs)).
    pub version: Version,
    /// What kind of work it is.
    pub class: Class,
    /// Who must execute it together.
    pub converge: Converge,
    /// What it does to memory.
    pub memory: Memory,
    /// Who completes it, and when.
    pub completion: Completion,
    /// Whether control never passes to the next statement (unless guarded).
    pub terminator: bool,
}

/// One place for a modifier.
#[derive(Clone, Copy, Debug)]
pub enum Slot {
    /// Exactly one of these.
    One(&'static [Mod]),
    /// One of these or none.
    Opt(&'static [Mod]),
    /// One of the first and one of the second, or none of both.
    OptPair(&'static [Mod], &'static [Mod]),
    /// One of these types, which binds a type variable.
    Type(Var, &'static [ScalarType]),
    /// `m64nNk…` with N = 8, 16, … 256, for the given k.
    WgmmaShape(u16),
    /// The same for bytes: N = 8, 16, 24, 32, 48, … 256.
    WgmmaByteShape(u16),
}

/// A type variable of a row: the first, second, … type slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Var(pub u8);

/// The type of an operand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ty {
    /// What the variable stands for.
    Var(Var),
    /// The integer twice as wide as the variable.
    Wide(Var),
    /// What the variable stands for, in a register that may be wider (`ld`, `st`, `cvt`).
    Loose(Var),
    /// Always this.
    Is(ScalarType),
    /// A 32- or 64-bit integer or untyped register: an address.
    Pointer,
}

/// The first type variable.
pub const T: Ty = Ty::Var(Var(0));
/// The second type variable.
pub const U: Ty = Ty::Var(Var(1));

/// How an operand is used.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// Written.
    Dst,
    /// Read.
    Src,
    /// Read and written.
    InOut,
}

/// How many elements a vector operand has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Count {
    /// As many as given here.
    Is(u16),
    /// As `.v2`/`.v4`/`.v8` says; a plain operand where there is none.
    VecMod,
    /// As `.x1`/`.x2`/`.x4` says.
    XMod,
    /// N of the shape divided by this (wgmma accumulators).
    ShapeN(u16),
}

/// What a constant offset must be a multiple of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Align {
    /// Bytes.
    Bytes(u32),
    /// The size of the accessed type, vector included.
    Access,
    /// The immediate in the operand with this index (`cp.async`).
    Operand(u8),
}

/// What an operand may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A register.
    Reg(Ty),
    /// A register or `_`.
    RegOrSink(Ty),
    /// A register, or a pair of a register and a predicate.
    RegOrPair(Ty),
    /// A pair of a register (or `_`) and a predicate (or `_`).
    Pair(Ty),
    /// A register or a literal.
    Value(Ty),
    /// A register, or a literal in a range: lowest, highest, step.
    Ranged(Ty, i64, i64, i64),
    /// `_`.
    Sink,
    /// A register, a literal, a special register or the address of a symbol.
    Movable(Ty),
    /// `{a, b, …}` whose elements together are as wide as the type.
    Packed(Ty),
    /// The same as a source, where some elements may be literals.
    PackedValues(Ty),
    /// `{a, b, …}` of elements of the type.
    Vector(Ty, Count),
    /// A predicate, possibly negated.
    Pred,
    /// A predicate or a literal 0 or 1.
    Bool,
    /// One predicate or two (`p|q`).
    PredPair,
    /// An integer literal: lowest, highest, step.
    Imm(i64, i64, i64),
    /// One of these literals.
    OneOf(&'static [i64]),
    /// An address, whose provable part must be aligned.
    Address(Align),
    /// A tensor map and as many coordinates as `.1d` … `.5d` says.
    Tensor,
    /// A branch target.
    Label,
    /// The name of a function.
    Function,
    /// The name of a list of branch or call targets.
    Targets,
    /// `(a, b, …)`: arguments or results of a call, by name.
    Group,
}

/// One operand of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OperandSpec {
    /// Read or written.
    pub access: Access,
    /// What it may be.
    pub kind: Kind,
    /// Whether it may, or must, be omitted.
    pub presence: Presence,
}

/// Whether an operand must be there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presence {
    /// Yes.
    Always,
    /// It may be omitted.
    Optional,
    /// It is there if, and only if, the modifier is.
    With(Mod),
}

/// Kinds of work, for counters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Class {
    /// Integer and logic.
    Integer,
    /// Single and double precision.
    Float,
    /// Half precision.
    Half,
    /// The special-function unit: exponentials, logarithms, reciprocals.
    Special,
    /// Moves, selects, permutes.
    Move,
    /// Type conversions.
    Convert,
    /// Loads.
    Load,
    /// Stores.
    Store,
    /// Atomics and reductions.
    Atomic,
    /// Copies that run on their own.
    AsyncCopy,
    /// Barriers and fences.
    Barrier,
    /// Exchange inside a warp.
    Warp,
    /// Tensor cores and their fences.
    Tensor,
    /// Branches and the like.
    Control,
}

/// Who must execute an instruction together.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Converge {
    /// Every lane for itself.
    None,
    /// The lanes named in a mask wait for each other.
    Mask,
    /// A whole warp, if the text says `.aligned`.
    WarpIfAligned,
    /// A whole warp.
    Warp,
    /// A whole warpgroup.
    Warpgroup,
}

/// What an instruction does to memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Memory {
    /// Nothing.
    None,
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Reads and writes.
    ReadWrite,
}

/// Who completes an instruction, and when.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Completion {
    /// The instruction itself.
    Now,
    /// A `cp.async` group.
    CpAsyncGroup,
    /// A bulk group or an mbarrier, as the modifiers say.
    Bulk,
    /// A wgmma group.
    WgmmaGroup,
}

/// A row with the defaults: sm_75, PTX 7.0, no convergence, no memory.
pub const fn row(class: Class, op: Op, slots: &'static [Slot], operands: &'static [OperandSpec]) -> Row {
    Row {
        op,
        slots,
        operands,
        target: Target::Sm75,
        version: V7_0,
        class,
        converge: Converge::None,
        memory: Memory::None,
        completion: Completion::Now,
        terminator: false,
    }
}

impl Row {
    /// Needs sm_80.
    pub const fn since_sm80(self) -> Self {
        self.since(Target::Sm80, V7_0)
    }

    /// Needs this target and this `.version`.
    pub const fn since(mut self, target: Target, version: Version) -> Self {
        self.target = target;
        self.version = version;
        self
    }

    /// Is executed together.
    pub const fn converge(mut self, converge: Converge) -> Self {
        self.converge = converge;
        self
    }

    /// Touches memory.
    pub const fn memory(mut self, memory: Memory) -> Self {
        self.memory = memory;
        self
    }

    /// Completes later.
    pub const fn completes(mut self, completion: Completion) -> Self {
        self.completion = completion;
        self
    }

    /// Control never continues past it.
    pub const fn terminator(mut self) -> Self {
        self.terminator = true;
        self
    }
}

/// Exactly one of the modifiers.
pub const fn one(mods: &'static [Mod]) -> Slot {
    Slot::One(mods)
}

/// One of the modifiers or none.
pub const fn opt(mods: &'static [Mod]) -> Slot {
    Slot::Opt(mods)
}

/// One of the first and one of the second, or none of both.
pub const fn opt_pair(first: &'static [Mod], second: &'static [Mod]) -> Slot {
    Slot::OptPair(first, second)
}

/// The type slot that binds [`T`].
pub const fn t(types: &'static [ScalarType]) -> Slot {
    Slot::Type(Var(0), types)
}

/// The type slot that binds [`U`].
pub const fn u(types: &'static [ScalarType]) -> Slot {
    Slot::Type(Var(1), types)
}

/// A fixed type as a modifier.
pub const fn is(ty: ScalarType) -> Ty {
    Ty::Is(ty)
}

/// An operand of any kind.
pub const fn operand(access: Access, kind: Kind) -> OperandSpec {
    OperandSpec { access, kind, presence: Presence::Always }
}

/// A destination register.
pub const fn d(ty: Ty) -> OperandSpec {
    operand(Access::Dst, Kind::Reg(ty))
}

/// A source: register or literal.
pub const fn s(ty: Ty) -> OperandSpec {
    operand(Access::Src, Kind::Value(ty))
}

/// A source that must be a register.
pub const fn r(ty: Ty) -> OperandSpec {
    operand(Access::Src, Kind::Reg(ty))
}

/// A source of the given kind.
pub const fn src(kind: Kind) -> OperandSpec {
    operand(Access::Src, kind)
}

/// A destination of the given kind.
pub const fn dst(kind: Kind) -> OperandSpec {
    operand(Access::Dst, kind)
}

/// An address whose constant part is aligned to `bytes`.
pub const fn at(bytes: u32) -> OperandSpec {
    operand(Access::Src, Kind::Address(Align::Bytes(bytes)))
}

/// An address aligned to the access.
pub const fn mem() -> OperandSpec {
    operand(Access::Src, Kind::Address(Align::Access))
}

/// An integer literal in a range.
pub const fn imm(low: i64, high: i64, step: i64) -> OperandSpec {
    operand(Access::Src, Kind::Imm(low, high, step))
}

/// A register, or an integer literal in a range.
pub const fn ranged(ty: Ty, low: i64, high: i64, step: i64) -> OperandSpec {
    operand(Access::Src, Kind::Ranged(ty, low, high, step))
}

impl OperandSpec {
    /// The same, but it may be omitted.
    pub const fn maybe(mut self) -> Self {
        self.presence = Presence::Optional;
        self
    }

    /// The same, but it requires a modifier.
    pub const fn with(mut self, modifier: Mod) -> Self {
        self.presence = Presence::With(modifier);
        self
    }
}
