//! One instruction as data: guard, operation, modifiers, operands.
//!
//! [`Inst::new`] checks the instruction against its row in [`crate::table`]; builders use it, so a malformed
//! instruction fails at the Rust line that made it. The parser and the verifier use the same rows.

use crate::{
    ident::Name,
    op::{Mod, Op},
    table::{self, Form, FormError},
    types::{ScalarType, SpecialReg},
};

/// A virtual register: its declared type and its number among the registers of that type.
///
/// Its text is derived (`%r12`, `%f3`, `%rd1`, `%p2`) unless the kernel keeps a foreign name for it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RegId {
    /// The declared type.
    pub ty: ScalarType,
    /// The number among registers of that type.
    pub index: u32,
}

/// The predicate under which an instruction executes: `@p` or `@!p`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Guard {
    /// A predicate register.
    pub reg: RegId,
    /// Whether the instruction executes where the predicate is false.
    pub negated: bool,
}

/// A literal; floats are kept as bits, so that every NaN survives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Imm {
    /// An integer; values of `u64` above `i64::MAX` wrap.
    Int(i64),
    /// The bits of an `f32` (`0f3F800000`).
    F32(u32),
    /// The bits of an `f64` (`0d3FF0000000000000`).
    F64(u64),
}

/// Where an address starts.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Base {
    /// A register.
    Reg(RegId),
    /// A variable or parameter.
    Symbol(Name),
    /// Nothing: the offset is the address.
    Absolute,
}

/// `[base+offset]`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Address {
    /// Where it starts.
    pub base: Base,
    /// Bytes added.
    pub offset: i64,
}

/// `[map, {c0, c1, …}]`: a box of the tensor that `map` describes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TensorAddress {
    /// Address of the tensor map.
    pub map: Address,
    /// Coordinates of the box, innermost first: registers or immediates.
    pub coords: Vec<Operand>,
}

/// One operand.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Operand {
    /// A register.
    Reg(RegId),
    /// A negated predicate, `!p`.
    Not(RegId),
    /// A literal.
    Imm(Imm),
    /// A special register.
    Special(SpecialReg),
    /// The address of a variable or parameter, as a value.
    Symbol(Name),
    /// `name+8`: the same, some bytes further on.
    Offset(Name, i64),
    /// A place in memory.
    Address(Address),
    /// A box of a tensor.
    Tensor(TensorAddress),
    /// `{a, b, …}`.
    Vector(Vec<Operand>),
    /// `(a, b, …)`: arguments or results of a call.
    Group(Vec<Operand>),
    /// `a|b`: two results.
    Pair(Box<(Operand, Operand)>),
    /// A branch target.
    Label(Name),
    /// `_`: a discarded result.
    Sink,
}

/// One instruction.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Inst {
    /// The predicate it executes under.
    pub guard: Option<Guard>,
    /// What it does.
    pub op: Op,
    /// How, in the order of the text.
    pub mods: Vec<Mod>,
    /// With what, destinations first.
    pub operands: Vec<Operand>,
}

impl RegId {
    /// The register of type `ty` numbered `index`.
    pub const fn new(ty: ScalarType, index: u32) -> Self {
        Self { ty, index }
    }
}

impl Imm {
    /// A single-precision literal.
    pub fn f32(value: f32) -> Self {
        Self::F32(value.to_bits())
    }

    /// A double-precision literal.
    pub fn f64(value: f64) -> Self {
        Self::F64(value.to_bits())
    }

    /// The integer, if it is one.
    pub const fn as_int(self) -> Option<i64> {
        if let Self::Int(value) = self { Some(value) } else { None }
    }
}

impl Address {
    /// `[reg+offset]`.
    pub const fn reg(reg: RegId, offset: i64) -> Self {
        Self { base: Base::Reg(reg), offset }
    }

    /// `[symbol+offset]`.
    pub fn symbol(name: impl Into<Name>, offset: i64) -> Self {
        Self { base: Base::Symbol(name.into()), offset }
    }
}

impl Operand {
    /// An integer literal.
    pub const fn int(value: i64) -> Self {
        Self::Imm(Imm::Int(value))
    }

    /// A single-precision literal.
    pub fn f32(value: f32) -> Self {
        Self::Imm(Imm::f32(value))
    }

    /// `{a, b, …}` of registers.
    pub fn regs(regs: impl IntoIterator<Item = RegId>) -> Self {
        Self::Vector(regs.into_iter().map(Self::Reg).collect())
    }

    /// `[reg+offset]`.
    pub const fn at(reg: RegId, offset: i64) -> Self {
        Self::Address(Address::reg(reg, offset))
    }

    /// `[symbol+offset]`.
    pub fn at_symbol(name: impl Into<Name>, offset: i64) -> Self {
        Self::Address(Address::symbol(name, offset))
    }

    /// `[map, {coords}]` with the map's address in a register.
    pub fn tensor(map: RegId, coords: impl IntoIterator<Item = Self>) -> Self {
        Self::Tensor(TensorAddress { map: Address::reg(map, 0), coords: coords.into_iter().collect() })
    }

    /// `a|b`.
    pub fn pair(first: impl Into<Self>, second: impl Into<Self>) -> Self {
        Self::Pair(Box::new((first.into(), second.into())))
    }

    /// The register, if this operand is one.
    pub const fn as_reg(&self) -> Option<RegId> {
        if let Self::Reg(reg) = self { Some(*reg) } else { None }
    }

    /// The integer literal, if this operand is one.
    pub const fn as_int(&self) -> Option<i64> {
        if let Self::Imm(imm) = self { imm.as_int() } else { None }
    }

    /// Calls `visit` for every register in this operand, address bases included.
    pub fn for_each_reg(&self, visit: &mut impl FnMut(RegId)) {
        match self {
            Self::Reg(reg) | Self::Not(reg) => visit(*reg),
            Self::Address(address) => address.base.for_each_reg(visit),
            Self::Tensor(tensor) => {
                tensor.map.base.for_each_reg(visit);
                tensor.coords.iter().for_each(|c| c.for_each_reg(visit));
            }
            Self::Vector(items) | Self::Group(items) => items.iter().for_each(|o| o.for_each_reg(visit)),
            Self::Pair(pair) => {
                pair.0.for_each_reg(visit);
                pair.1.for_each_reg(visit);
            }
            Self::Imm(_)
            | Self::Special(_)
            | Self::Symbol(_)
            | Self::Offset(..)
            | Self::Label(_)
            | Self::Sink => {}
        }
    }
}

impl Base {
    fn for_each_reg(&self, visit: &mut impl FnMut(RegId)) {
        if let Self::Reg(reg) = self {
            visit(*reg);
        }
    }
}

impl From<RegId> for Operand {
    fn from(reg: RegId) -> Self {
        Self::Reg(reg)
    }
}

impl From<Imm> for Operand {
    fn from(imm: Imm) -> Self {
        Self::Imm(imm)
    }
}

impl From<SpecialReg> for Operand {
    fn from(special: SpecialReg) -> Self {
        Self::Special(special)
    }
}

impl From<Address> for Operand {
    fn from(address: Address) -> Self {
        Self::Address(address)
    }
}

impl Inst {
    /// An unguarded instruction, checked against the table.
    pub fn new(
        op: Op,
        mods: impl Into<Vec<Mod>>,
        operands: impl Into<Vec<Operand>>,
    ) -> Result<Self, FormError> {
        let inst = Self { guard: None, op, mods: mods.into(), operands: operands.into() };
        inst.form()?;
        Ok(inst)
    }

    /// The same instruction under `@reg` or `@!reg`.
    pub fn guarded(self, reg: RegId, negated: bool) -> Self {
        Self { guard: Some(Guard { reg, negated }), ..self }
    }

    /// The row of the table that this instruction is an instance of, with what its type variables stand for.
    pub fn form(&self) -> Result<Form, FormError> {
        table::form_of(self)
    }

    /// Whether the modifier is there.
    pub fn has(&self, modifier: Mod) -> bool {
        self.mods.contains(&modifier)
    }

    /// The `n`-th type among the modifiers.
    pub fn ty(&self, n: usize) -> Option<ScalarType> {
        self.mods.iter().filter_map(|m| m.as_type()).nth(n)
    }
}
