//! Expressions over registers: arithmetic that reads as arithmetic.
//!
//! Operators on [`Reg`], [`Val`] and [`Expr`] build a tree and emit nothing; [`Builder::let_`](crate::Builder::let_), and
//! every method that takes a value, evaluate it depth first, left to right. An expression can be used once: name it with
//! `let_` if it is needed twice, so that no instruction is emitted twice by accident. Registers are read when an
//! expression is evaluated, not when it is written.
//!
//! ```
//! # use flashcore_tile::{Builder, Reg, U32, U64};
//! fn address(b: &mut Builder, start: Reg<U64>, pitch: Reg<U32>) -> Reg<U64> {
//!     let thread = b.thread();
//!     let warp = b.let_((thread >> 5) & 3);
//!     let index = b.let_(warp * pitch + thread % 32);
//!     b.let_(start + index.mul_wide(4))
//! }
//! ```
//!
//! Two forms are chosen by cost: an integer product plus an addend becomes one `mad`, and unsigned
//! division by a constant power of two a shift or a mask.

use std::{
    marker::PhantomData,
    ops::{Add, BitAnd, BitOr, BitXor, Div, Mul, Neg, Not, Rem, Shl, Shr, Sub},
};

use flashcore_ptx::{
    inst::{Imm, RegId},
    types::ScalarType,
};

use crate::{
    scalar::Cmp,
    scope::Scope,
    value::{B16, B32, Bits, F32, Integer, Number, Pred, Reg, S32, Type, U32, U64, Val},
};

/// Operators on two values of one type; the result has that type too, except that of `MulWide`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Binary {
    Add,
    Sub,
    Mul,
    MulWide,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
    Xor,
    Shl,
    Shr,
}

/// An expression without its type in Rust; operators know the type they work on.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Node {
    /// A register, and the threads that agree on it.
    Reg(RegId, Scope),
    Const(Imm),
    /// Minus a float.
    Neg(Box<Node>),
    /// The opposite condition.
    Not(Box<Node>),
    Binary(Binary, ScalarType, Box<[Node; 2]>),
    Compare(Cmp, ScalarType, Box<[Node; 2]>),
    /// The second where the first holds, else the third.
    Select(ScalarType, Box<[Node; 3]>),
}

/// A value of type `T` that is computed where it is used.
#[must_use = "an expression emits nothing until it is used"]
#[derive(Debug)]
pub struct Expr<T> {
    pub(crate) node: Node,
    ty: PhantomData<T>,
}

impl<T> Expr<T> {
    pub(crate) const fn new(node: Node) -> Self {
        Self { node, ty: PhantomData }
    }
}

impl<T: Type> Expr<T> {
    fn binary(op: Binary, x: impl Into<Self>, y: impl Into<Self>) -> Self {
        Self::new(Node::Binary(op, T::PTX, Box::new([x.into().node, y.into().node])))
    }
}

/// A condition that is computed where it is used.
#[must_use = "a condition emits nothing until it is used"]
#[derive(Debug)]
pub struct Cond {
    pub(crate) node: Node,
}

impl Cond {
    pub(crate) fn compare<T: Number>(cmp: Cmp, x: impl Into<Expr<T>>, y: impl Into<Expr<T>>) -> Self {
        Self { node: Node::Compare(cmp, T::PTX, Box::new([x.into().node, y.into().node])) }
    }

    fn join(op: Binary, x: Self, y: Self) -> Self {
        Self { node: Node::Binary(op, ScalarType::Pred, Box::new([x.node, y.node])) }
    }

    /// `then` where the condition holds, else `otherwise`.
    pub fn select<T: Type>(self, then: impl Into<Expr<T>>, otherwise: impl Into<Expr<T>>) -> Expr<T> {
        let args = [self.node, then.into().node, otherwise.into().node];
        Expr::new(Node::Select(T::PTX, Box::new(args)))
    }
}

impl From<Pred> for Cond {
    fn from(pred: Pred) -> Self {
        let node = Node::Reg(pred.id, pred.scope);
        if pred.negated { !Self { node } } else { Self { node } }
    }
}

impl Not for Cond {
    type Output = Self;
    fn not(self) -> Self {
        Self { node: Node::Not(Box::new(self.node)) }
    }
}

impl Not for Pred {
    type Output = Self;
    fn not(self) -> Self {
        Self::not(self)
    }
}

macro_rules! conditions {
    ($($ty:ident),*) => {
        $(impl<C: Into<Cond>> BitAnd<C> for $ty {
            type Output = Cond;
            fn bitand(self, other: C) -> Cond {
                Cond::join(Binary::And, self.into(), other.into())
            }
        }

        impl<C: Into<Cond>> BitOr<C> for $ty {
            type Output = Cond;
            fn bitor(self, other: C) -> Cond {
                Cond::join(Binary::Or, self.into(), other.into())
            }
        })*
    };
}

conditions!(Pred, Cond);

impl<T> From<Reg<T>> for Expr<T> {
    fn from(reg: Reg<T>) -> Self {
        Self::new(Node::Reg(reg.id(), reg.scope()))
    }
}

impl<T: Type> From<Val<T>> for Expr<T> {
    fn from(value: Val<T>) -> Self {
        match value {
            Val::Reg(reg) => reg.into(),
            Val::Const(value) => Self::new(Node::Const(T::imm(value))),
        }
    }
}

macro_rules! constants {
    ($($ty:ident),*) => {
        $(impl From<<$ty as Type>::Host> for Expr<$ty> {
            fn from(value: <$ty as Type>::Host) -> Self {
                Val::<$ty>::Const(value).into()
            }
        })*
    };
}

constants!(U32, S32, U64, F32, B16, B32);

/// Operators and methods of a register, a register or constant, and an expression.
macro_rules! arithmetic {
    ($($ty:ident),*) => {
        $(arithmetic! { $ty:
            Add add Number Add, Sub sub Number Sub, Mul mul Number Mul, Div div Integer Div, Rem rem Integer Rem,
            BitAnd bitand Bits And, BitOr bitor Bits Or, BitXor bitxor Bits Xor
        }

        impl<R: Into<Expr<U32>>> Shl<R> for $ty<U32> {
            type Output = Expr<U32>;
            fn shl(self, bits: R) -> Expr<U32> {
                Expr::binary(Binary::Shl, self, bits)
            }
        }

        impl<R: Into<Expr<U32>>> Shr<R> for $ty<U32> {
            type Output = Expr<U32>;
            fn shr(self, bits: R) -> Expr<U32> {
                Expr::binary(Binary::Shr, self, bits)
            }
        }

        impl Neg for $ty<F32> {
            type Output = Expr<F32>;
            fn neg(self) -> Expr<F32> {
                Expr::new(Node::Neg(Box::new(Expr::from(self).node)))
            }
        }

        impl<T: Number> $ty<T> {
            /// The smaller of two.
            pub fn min(self, other: impl Into<Expr<T>>) -> Expr<T> {
                Expr::binary(Binary::Min, self, other)
            }

            /// The larger of two; a NaN gives way to the other.
            pub fn max(self, other: impl Into<Expr<T>>) -> Expr<T> {
                Expr::binary(Binary::Max, self, other)
            }
        }

        arithmetic! { compare $ty:
            /// Whether the two are equal.
            eq Eq,
            /// Whether the two differ.
            ne Ne,
            /// Whether this is less.
            lt Lt,
            /// Whether this is less or equal.
            le Le,
            /// Whether this is greater.
            gt Gt,
            /// Whether this is greater or equal.
            ge Ge
        }

        impl $ty<U32> {
            /// The full 64-bit product.
            pub fn mul_wide(self, other: impl Into<Expr<U32>>) -> Expr<U64> {
                let args = [Expr::from(self).node, other.into().node];
                Expr::new(Node::Binary(Binary::MulWide, ScalarType::U32, Box::new(args)))
            }

            /// The same number in 64 bits.
            pub fn widen(self) -> Expr<U64> {
                self.mul_wide(1)
            }

            /// This over a constant, rounded up.
            pub fn div_ceil(self, by: u32) -> Expr<U32> {
                (self + by.saturating_sub(1)) / by
            }
        })*
    };
    ($ty:ident: $($name:ident $method:ident $bound:ident $op:ident),*) => {
        $(impl<T: $bound, R: Into<Expr<T>>> $name<R> for $ty<T> {
            type Output = Expr<T>;
            fn $method(self, other: R) -> Expr<T> {
                Expr::binary(Binary::$op, self, other)
            }
        })*
    };
    (compare $ty:ident: $($(#[$doc:meta])* $method:ident $cmp:ident),*) => {
        impl<T: Number> $ty<T> {
            $($(#[$doc])*
            pub fn $method(self, other: impl Into<Expr<T>>) -> Cond {
                Cond::compare(Cmp::$cmp, self, other)
            })*
        }
    };
}

arithmetic!(Reg, Val, Expr);

impl Reg<U32> {
    /// The same bits, read as signed.
    pub const fn signed(self) -> Reg<S32> {
        Reg::new(self.id(), self.scope())
    }
}

impl Reg<U32> {
    /// The same bits, read as no number at all.
    pub const fn bits(self) -> Reg<B32> {
        Reg::new(self.id(), self.scope())
    }
}

impl Reg<S32> {
    /// The same bits, read as unsigned.
    pub const fn unsigned(self) -> Reg<U32> {
        Reg::new(self.id(), self.scope())
    }
}

impl Expr<U32> {
    /// The same bits, read as signed.
    pub fn signed(self) -> Expr<S32> {
        Expr::new(match self.node {
            Node::Const(Imm::Int(value)) => Node::Const(S32::imm(value as i32)),
            node => node,
        })
    }
}

impl Expr<S32> {
    /// The same bits, read as unsigned.
    pub fn unsigned(self) -> Expr<U32> {
        Expr::new(match self.node {
            Node::Const(Imm::Int(value)) => Node::Const(U32::imm(value as u32)),
            node => node,
        })
    }
}
