//! Arithmetic, comparison and conversion on single registers.

use flashcore_ptx::{
    inst::Operand,
    op::{Mod, Op},
    types::ScalarType,
};

use crate::{
    builder::Builder,
    error::FaultKind,
    expr::{Cond, Expr},
    lower::{Arg, join},
    scope::Scope,
    value::{Bits, F32, Integer, Number, Pred, Reg, S32, Type, U32, U64},
};

/// A 16-bit float type that tensor cores multiply.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Half {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl Half {
    /// The PTX type of two packed values.
    pub const fn packed(self) -> ScalarType {
        match self {
            Self::F16 => ScalarType::F16x2,
            Self::Bf16 => ScalarType::Bf16x2,
        }
    }
}

/// A comparison.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cmp {
    /// Equal.
    Eq,
    /// Not equal.
    Ne,
    /// Less.
    Lt,
    /// Less or equal.
    Le,
    /// Greater.
    Gt,
    /// Greater or equal.
    Ge,
}

impl Cmp {
    pub(crate) const fn modifier(self) -> Mod {
        match self {
            Self::Eq => Mod::Eq,
            Self::Ne => Mod::Ne,
            Self::Lt => Mod::Lt,
            Self::Le => Mod::Le,
            Self::Gt => Mod::Gt,
            Self::Ge => Mod::Ge,
        }
    }
}

impl Builder {
    #[track_caller]
    pub(crate) fn op<T: Type, const N: usize>(&mut self, op: Op, mods: &[Mod], args: [Arg; N]) -> Reg<T> {
        let dst = self.fresh::<T>(join(&args));
        self.op_into(dst, op, mods, args);
        dst
    }

    #[track_caller]
    pub(crate) fn op_into<T: Type, const N: usize>(
        &mut self,
        dst: Reg<T>,
        op: Op,
        mods: &[Mod],
        args: [Arg; N],
    ) {
        self.check_set(dst, join(&args));
        let operands: Vec<_> = std::iter::once(dst.operand()).chain(args.map(|arg| arg.operand)).collect();
        self.emit(op, mods, operands);
    }

    /// A register with the given value, which [`set`](Self::set) may change.
    #[track_caller]
    pub fn var<T: Type>(&mut self, value: impl Into<Expr<T>>) -> Reg<T> {
        let value = self.arg(value);
        self.op(Op::Mov, &[Mod::Type(T::PTX)], [value])
    }

    /// A variable that may later hold values that agree in `scope` only.
    #[track_caller]
    pub fn var_in<T: Type>(&mut self, scope: Scope, value: impl Into<Expr<T>>) -> Reg<T> {
        let var = self.var(value);
        var.assume(var.scope().min(scope))
    }

    /// Gives a variable a new value.
    #[track_caller]
    pub fn set<T: Type>(&mut self, var: Reg<T>, value: impl Into<Expr<T>>) {
        let value = self.arg(value);
        self.op_into(var, Op::Mov, &[Mod::Type(T::PTX)], [value]);
    }

    /// Refuses to give a variable a value, or in a place, less uniform than those who read it believe.
    #[track_caller]
    pub(crate) fn check_set<T>(&mut self, var: Reg<T>, value: Scope) {
        if value.min(self.converged) < var.scope() {
            let (var, here) = (var.scope(), self.converged);
            self.fault(FaultKind::Variable { var, value, here });
        }
    }

    /// `x + y`.
    #[track_caller]
    pub fn add<T: Number>(&mut self, x: impl Into<Expr<T>>, y: impl Into<Expr<T>>) -> Reg<T> {
        self.let_(x.into() + y)
    }

    /// `var += y`.
    #[track_caller]
    pub fn add_to<T: Number>(&mut self, var: Reg<T>, y: impl Into<Expr<T>>) {
        self.set(var, var + y);
    }

    /// `x - y`.
    #[track_caller]
    pub fn sub<T: Number>(&mut self, x: impl Into<Expr<T>>, y: impl Into<Expr<T>>) -> Reg<T> {
        self.let_(x.into() - y)
    }

    /// `x * y`, the low half for integers.
    #[track_caller]
    pub fn mul<T: Number>(&mut self, x: impl Into<Expr<T>>, y: impl Into<Expr<T>>) -> Reg<T> {
        self.let_(x.into() * y)
    }

    /// `x * y + z` for integers, the low half.
    #[track_caller]
    pub fn mad<T: Integer>(
        &mut self,
        x: impl Into<Expr<T>>,
        y: impl Into<Expr<T>>,
        z: impl Into<Expr<T>>,
    ) -> Reg<T> {
        self.let_(x.into() * y + z)
    }

    /// The full 64-bit product of two 32-bit numbers.
    #[track_caller]
    pub fn mul_wide(&mut self, x: impl Into<Expr<U32>>, y: impl Into<Expr<U32>>) -> Reg<U64> {
        self.let_(x.into().mul_wide(y))
    }

    /// The upper half of the 64-bit product of two 32-bit numbers.
    #[track_caller]
    pub fn mul_hi(&mut self, x: impl Into<Expr<U32>>, y: impl Into<Expr<U32>>) -> Reg<U32> {
        let args = [self.arg(x), self.arg(y)];
        self.op(Op::Mul, &[Mod::Hi, Mod::Type(U32::PTX)], args)
    }

    /// `x / y` for integers.
    #[track_caller]
    pub fn div<T: Integer>(&mut self, x: impl Into<Expr<T>>, y: impl Into<Expr<T>>) -> Reg<T> {
        self.let_(x.into() / y)
    }

    /// `x mod y` for integers.
    #[track_caller]
    pub fn rem<T: Integer>(&mut self, x: impl Into<Expr<T>>, y: impl Into<Expr<T>>) -> Reg<T> {
        self.let_(x.into() % y)
    }

    /// `ceil(x / y)` for a constant `y`.
    #[track_caller]
    pub fn div_ceil(&mut self, x: impl Into<Expr<U32>>, y: u32) -> Reg<U32> {
        self.let_(x.into().div_ceil(y))
    }

    /// The smaller of two.
    #[track_caller]
    pub fn min<T: Number>(&mut self, x: impl Into<Expr<T>>, y: impl Into<Expr<T>>) -> Reg<T> {
        self.let_(x.into().min(y))
    }

    /// The larger of two; a NaN gives way to the other.
    #[track_caller]
    pub fn max<T: Number>(&mut self, x: impl Into<Expr<T>>, y: impl Into<Expr<T>>) -> Reg<T> {
        self.let_(x.into().max(y))
    }

    /// `-x`.
    #[track_caller]
    pub fn neg(&mut self, x: impl Into<Expr<F32>>) -> Reg<F32> {
        self.let_(-x.into())
    }

    /// `x & y`.
    #[track_caller]
    pub fn and<T: Bits>(&mut self, x: impl Into<Expr<T>>, y: impl Into<Expr<T>>) -> Reg<T> {
        self.let_(x.into() & y)
    }

    /// `x | y`.
    #[track_caller]
    pub fn or<T: Bits>(&mut self, x: impl Into<Expr<T>>, y: impl Into<Expr<T>>) -> Reg<T> {
        self.let_(x.into() | y)
    }

    /// `x ^ y`.
    #[track_caller]
    pub fn xor<T: Bits>(&mut self, x: impl Into<Expr<T>>, y: impl Into<Expr<T>>) -> Reg<T> {
        self.let_(x.into() ^ y)
    }

    /// `x << bits`.
    #[track_caller]
    pub fn shl(&mut self, x: impl Into<Expr<U32>>, bits: impl Into<Expr<U32>>) -> Reg<U32> {
        self.let_(x.into() << bits)
    }

    /// `x >> bits`.
    #[track_caller]
    pub fn shr(&mut self, x: impl Into<Expr<U32>>, bits: impl Into<Expr<U32>>) -> Reg<U32> {
        self.let_(x.into() >> bits)
    }

    /// How many of the upper bits are 0 before the first that is not.
    #[track_caller]
    pub fn leading_zeros(&mut self, x: impl Into<Expr<U32>>) -> Reg<U32> {
        let x = self.arg(x);
        self.op(Op::Clz, &[Mod::Type(ScalarType::B32)], [x])
    }

    /// `x * y + z` with one rounding.
    #[track_caller]
    pub fn fma(
        &mut self,
        x: impl Into<Expr<F32>>,
        y: impl Into<Expr<F32>>,
        z: impl Into<Expr<F32>>,
    ) -> Reg<F32> {
        let args = [self.arg(x), self.arg(y), self.arg(z)];
        self.op(Op::Fma, &[Mod::Rn, Mod::Type(ScalarType::F32)], args)
    }

    /// `dst = x * y + z`, in place.
    #[track_caller]
    pub fn fma_into(
        &mut self,
        dst: Reg<F32>,
        x: impl Into<Expr<F32>>,
        y: impl Into<Expr<F32>>,
        z: impl Into<Expr<F32>>,
    ) {
        let mods = [Mod::Rn, Mod::Type(ScalarType::F32)];
        let args = [self.arg(x), self.arg(y), self.arg(z)];
        self.op_into(dst, Op::Fma, &mods, args);
    }

    /// `dst = x * y`, in place.
    #[track_caller]
    pub fn mul_into(&mut self, dst: Reg<F32>, x: impl Into<Expr<F32>>, y: impl Into<Expr<F32>>) {
        let args = [self.arg(x), self.arg(y)];
        self.op_into(dst, Op::Mul, &[Mod::Type(ScalarType::F32)], args);
    }

    /// `dst = 2^x`, in place; as [`exp2`](Self::exp2).
    #[track_caller]
    pub fn exp2_into(&mut self, dst: Reg<F32>, x: impl Into<Expr<F32>>) {
        let x = self.arg(x);
        self.op_into(dst, Op::Ex2, &APPROX, [x]);
    }

    /// `2^x`, at most 2 ulp off; 2^-inf is 0.
    #[track_caller]
    pub fn exp2(&mut self, x: impl Into<Expr<F32>>) -> Reg<F32> {
        let x = self.arg(x);
        self.op(Op::Ex2, &APPROX, [x])
    }

    /// `|x|`.
    #[track_caller]
    pub fn abs(&mut self, x: impl Into<Expr<F32>>) -> Reg<F32> {
        let x = self.arg(x);
        self.op(Op::Abs, &[Mod::Type(ScalarType::F32)], [x])
    }

    /// Base-2 logarithm, approximate; of 0 it is -inf.
    #[track_caller]
    pub fn log2(&mut self, x: impl Into<Expr<F32>>) -> Reg<F32> {
        let x = self.arg(x);
        self.op(Op::Lg2, &APPROX, [x])
    }

    /// `x / y`, rounded to nearest.
    #[track_caller]
    pub fn divide(&mut self, x: impl Into<Expr<F32>>, y: impl Into<Expr<F32>>) -> Reg<F32> {
        let args = [self.arg(x), self.arg(y)];
        self.op(Op::Div, &[Mod::Rn, Mod::Type(ScalarType::F32)], args)
    }

    /// `1 / x`, approximate.
    #[track_caller]
    pub fn rcp(&mut self, x: impl Into<Expr<F32>>) -> Reg<F32> {
        let x = self.arg(x);
        self.op(Op::Rcp, &APPROX, [x])
    }

    /// `tanh x`, relative error about 2^-11.
    #[track_caller]
    pub fn tanh(&mut self, x: impl Into<Expr<F32>>) -> Reg<F32> {
        let x = self.arg(x);
        self.op(Op::Tanh, &[Mod::Approx, Mod::Type(ScalarType::F32)], [x])
    }

    /// `dst = tanh x`, in place; as [`tanh`](Self::tanh).
    #[track_caller]
    pub fn tanh_into(&mut self, dst: Reg<F32>, x: impl Into<Expr<F32>>) {
        let x = self.arg(x);
        self.op_into(dst, Op::Tanh, &[Mod::Approx, Mod::Type(ScalarType::F32)], [x]);
    }

    /// The condition `x cmp y`.
    #[track_caller]
    pub fn test<T: Number>(&mut self, cmp: Cmp, x: impl Into<Expr<T>>, y: impl Into<Expr<T>>) -> Pred {
        self.let_(Cond::compare(cmp, x, y))
    }

    /// `then` where the condition holds, else `otherwise`.
    #[track_caller]
    pub fn select<T: Type>(
        &mut self,
        cond: impl Into<Cond>,
        then: impl Into<Expr<T>>,
        otherwise: impl Into<Expr<T>>,
    ) -> Reg<T> {
        self.let_(cond.into().select(then, otherwise))
    }

    /// Like [`select`](Self::select), into an existing register.
    #[track_caller]
    pub fn select_into<T: Type>(
        &mut self,
        dst: Reg<T>,
        cond: impl Into<Cond>,
        then: impl Into<Expr<T>>,
        otherwise: impl Into<Expr<T>>,
    ) {
        let (cond, then, otherwise) = (self.pred(cond), self.arg(then), self.arg(otherwise));
        self.check_set(dst, join(&[then.clone(), otherwise.clone()]).min(cond.scope));
        let (then, otherwise) = if cond.negated { (otherwise, then) } else { (then, otherwise) };
        let operands = [dst.operand(), then.operand, otherwise.operand, Operand::Reg(cond.id)];
        self.emit(Op::Selp, &[Mod::Type(T::PTX)], operands);
    }

    /// Both conditions.
    #[track_caller]
    pub fn both(&mut self, x: impl Into<Cond>, y: impl Into<Cond>) -> Pred {
        self.let_(x.into() & y)
    }

    /// Either condition.
    #[track_caller]
    pub fn either(&mut self, x: impl Into<Cond>, y: impl Into<Cond>) -> Pred {
        self.let_(x.into() | y)
    }

    /// The bits of a float as a number: of two floats that are not negative, the larger has the larger bits.
    #[track_caller]
    pub fn float_bits(&mut self, x: Reg<F32>) -> Reg<S32> {
        self.same_bits(x)
    }

    /// The float with these bits.
    #[track_caller]
    pub fn float_of_bits(&mut self, bits: Reg<S32>) -> Reg<F32> {
        self.same_bits(bits)
    }

    #[track_caller]
    pub(crate) fn same_bits<T: Type, U: Type>(&mut self, from: Reg<T>) -> Reg<U> {
        let dst = self.fresh::<U>(from.scope());
        self.emit(Op::Mov, &[Mod::Type(ScalarType::B32)], [dst.operand(), from.operand()]);
        dst
    }

    /// Widens to 64 bits.
    #[track_caller]
    pub fn widen(&mut self, x: impl Into<Expr<U32>>) -> Reg<U64> {
        self.let_(x.into().widen())
    }

    /// The nearest f32 of an unsigned integer.
    #[track_caller]
    pub fn to_f32(&mut self, x: Reg<U32>) -> Reg<F32> {
        let dst = self.fresh::<F32>(x.scope());
        let mods = [Mod::Rn, Mod::Type(ScalarType::F32), Mod::Type(ScalarType::U32)];
        self.emit(Op::Cvt, &mods, [dst.operand(), x.operand()]);
        dst
    }
}

const APPROX: [Mod; 3] = [Mod::Approx, Mod::Ftz, Mod::Type(ScalarType::F32)];
