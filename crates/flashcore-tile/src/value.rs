//! Typed registers and constants: operands and results of instructions.
//!
//! A [`Reg`] knows its PTX type at compile time and, while the program is built, the [`Scope`] in which all threads
//! hold the same value; results inherit the smallest scope of their operands.

use std::marker::PhantomData;

use flashcore_ptx::{
    inst::{Imm, Operand, RegId},
    types::ScalarType,
};

use crate::scope::Scope;

/// A PTX type as a Rust type.
pub trait Type: Copy + 'static {
    /// The type that instructions name.
    const PTX: ScalarType;
    /// What a constant of this type is in Rust.
    type Host: Copy;
    /// A constant as an operand.
    fn imm(value: Self::Host) -> Imm;
}

/// A type that `add`, `mul`, `min`, `setp` and their like take.
pub trait Number: Type {}

/// A 32- or 64-bit integer.
pub trait Integer: Number {}

/// A type whose bits may be combined by `and`, `or`, `xor` and shifts.
pub trait Bits: Type {}

macro_rules! types {
    ($($(#[$meta:meta])* $name:ident($host:ty) $ptx:ident, $imm:expr;)*) => {
        $($(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name;

        impl Type for $name {
            const PTX: ScalarType = ScalarType::$ptx;
            type Host = $host;
            fn imm(value: $host) -> Imm {
                $imm(value)
            }
        }

        impl From<$host> for Val<$name> {
            fn from(value: $host) -> Self {
                Self::Const(value)
            }
        })*
    };
}

types! {
    /// Unsigned 32-bit integer.
    U32(u32) U32, |v| Imm::Int(i64::from(v));
    /// Signed 32-bit integer.
    S32(i32) S32, |v| Imm::Int(i64::from(v));
    /// Unsigned 64-bit integer, also a global address.
    U64(u64) U64, |v: u64| Imm::Int(v as i64);
    /// Single precision.
    F32(f32) F32, |v: f32| Imm::F32(v.to_bits());
    /// A 16-bit value.
    B16(u16) B16, |v: u16| Imm::Int(i64::from(v));
    /// Two packed 16-bit values.
    B32(Packed) B32, |v: Packed| Imm::Int(i64::from(v.0));
}

/// A constant of two packed 16-bit values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packed(pub u32);

impl Number for U32 {}
impl Number for S32 {}
impl Number for U64 {}
impl Number for F32 {}
impl Integer for U32 {}
impl Integer for S32 {}
impl Integer for U64 {}

impl Bits for U32 {}
impl Bits for S32 {}
impl Bits for B32 {}
impl Bits for U64 {}

/// A register of type `T`.
#[derive(Debug)]
pub struct Reg<T> {
    id: RegId,
    scope: Scope,
    ty: PhantomData<T>,
}

impl<T> Clone for Reg<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Reg<T> {}

impl<T> Reg<T> {
    pub(crate) const fn new(id: RegId, scope: Scope) -> Self {
        Self { id, scope, ty: PhantomData }
    }

    /// The register itself.
    pub const fn id(self) -> RegId {
        self.id
    }

    /// The threads that are known to hold the same value.
    pub const fn scope(self) -> Scope {
        self.scope
    }

    /// The same register, known to the builder's author to agree in `scope`.
    pub(crate) const fn assume(self, scope: Scope) -> Self {
        Self { scope, ..self }
    }

    pub(crate) fn operand(self) -> Operand {
        Operand::Reg(self.id)
    }
}

/// A predicate: one truth value per thread.
#[derive(Clone, Copy, Debug)]
pub struct Pred {
    pub(crate) id: RegId,
    pub(crate) scope: Scope,
    pub(crate) negated: bool,
}

impl Pred {
    /// The threads that are known to agree.
    pub const fn scope(self) -> Scope {
        self.scope
    }

    /// The opposite condition, at no cost.
    #[must_use]
    pub const fn not(self) -> Self {
        Self { negated: !self.negated, ..self }
    }
}

/// A register or a constant.
#[derive(Clone, Copy, Debug)]
pub enum Val<T: Type> {
    /// A register.
    Reg(Reg<T>),
    /// A constant.
    Const(T::Host),
}

impl<T: Type> Val<T> {
    pub(crate) fn operand(self) -> Operand {
        match self {
            Self::Reg(reg) => reg.operand(),
            Self::Const(value) => Operand::Imm(T::imm(value)),
        }
    }

    /// The threads that are known to hold the same value.
    pub const fn scope(self) -> Scope {
        match self {
            Self::Reg(reg) => reg.scope,
            Self::Const(_) => Scope::Grid,
        }
    }
}

impl<T: Type> From<Reg<T>> for Val<T> {
    fn from(reg: Reg<T>) -> Self {
        Self::Reg(reg)
    }
}
