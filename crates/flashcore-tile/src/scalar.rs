//! Arithmetic, comparison and conversion on single registers.

use flashcore_ptx::{
    inst::Operand,
    op::{Mod, Op},
    types::ScalarType,
};

use crate::{
    builder::{Builder, join},
    error::FaultKind,
    scope::Scope,
    value::{B16, B32, Bits, F32, Integer, Number, Pred, Reg, S32, Type, U32, U64, Val},
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
    /// The PTX type of one value.
    pub const fn ptx(self) -> ScalarType {
        match self {
            Self::F16 => ScalarType::F16,
            Self::Bf16 => ScalarType::Bf16,
        }
    }

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
    const fn modifier(self) -> Mod {
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
    fn op<T: Type, const N: usize>(&mut self, op: Op, mods: &[Mod], args: [Val<T>; N]) -> Reg<T> {
        let dst = self.fresh::<T>(join(args));
        self.op_into(dst, op, mods, args);
        dst
    }

    #[track_caller]
    fn op_into<T: Type, const N: usize>(&mut self, dst: Reg<T>, op: Op, mods: &[Mod], args: [Val<T>; N]) {
        self.check_set(dst, join(args));
        let operands: Vec<_> = std::iter::once(dst.operand()).chain(args.map(Val::operand)).collect();
        self.emit(op, mods, operands);
    }

    /// A register with the given value, which [`set`](Self::set) may change.
    #[track_caller]
    pub fn var<T: Type>(&mut self, value: impl Into<Val<T>>) -> Reg<T> {
        self.op(Op::Mov, &[Mod::Type(T::PTX)], [value.into()])
    }

    /// A variable that may later hold values that agree in `scope` only.
    #[track_caller]
    pub fn var_in<T: Type>(&mut self, scope: Scope, value: impl Into<Val<T>>) -> Reg<T> {
        let var = self.var(value);
        var.assume(var.scope().min(scope))
    }

    /// Gives a variable a new value.
    #[track_caller]
    pub fn set<T: Type>(&mut self, var: Reg<T>, value: impl Into<Val<T>>) {
        self.op_into(var, Op::Mov, &[Mod::Type(T::PTX)], [value.into()]);
    }

    /// Refuses to give a variable a value, or in a place, less uniform than those who read it believe.
    #[track_caller]
    fn check_set<T>(&mut self, var: Reg<T>, value: Scope) {
        if value.min(self.converged) < var.scope() {
            let (var, here) = (var.scope(), self.converged);
            self.fault(FaultKind::Variable { var, value, here });
        }
    }

    /// `x + y`.
    #[track_caller]
    pub fn add<T: Number>(&mut self, x: impl Into<Val<T>>, y: impl Into<Val<T>>) -> Reg<T> {
        self.op(Op::Add, &[Mod::Type(T::PTX)], [x.into(), y.into()])
    }

    /// `var += y`.
    #[track_caller]
    pub fn add_to<T: Number>(&mut self, var: Reg<T>, y: impl Into<Val<T>>) {
        let sum = self.add(var, y);
        self.set(var, sum);
    }

    /// `x - y`.
    #[track_caller]
    pub fn sub<T: Number>(&mut self, x: impl Into<Val<T>>, y: impl Into<Val<T>>) -> Reg<T> {
        self.op(Op::Sub, &[Mod::Type(T::PTX)], [x.into(), y.into()])
    }

    /// `x * y`, the low half for integers.
    #[track_caller]
    pub fn mul<T: Number>(&mut self, x: impl Into<Val<T>>, y: impl Into<Val<T>>) -> Reg<T> {
        let mods = if T::PTX.is_float() { vec![Mod::Type(T::PTX)] } else { vec![Mod::Lo, Mod::Type(T::PTX)] };
        self.op(Op::Mul, &mods, [x.into(), y.into()])
    }

    /// `x * y + z` for integers, the low half.
    #[track_caller]
    pub fn mad<T: Integer>(
        &mut self,
        x: impl Into<Val<T>>,
        y: impl Into<Val<T>>,
        z: impl Into<Val<T>>,
    ) -> Reg<T> {
        self.op(Op::Mad, &[Mod::Lo, Mod::Type(T::PTX)], [x.into(), y.into(), z.into()])
    }

    /// The full 64-bit product of two 32-bit numbers.
    #[track_caller]
    pub fn mul_wide(&mut self, x: impl Into<Val<U32>>, y: impl Into<Val<U32>>) -> Reg<U64> {
        let (x, y) = (x.into(), y.into());
        let dst = self.fresh::<U64>(join([x, y]));
        self.emit(
            Op::Mul,
            &[Mod::Wide, Mod::Type(ScalarType::U32)],
            [dst.operand(), x.operand(), y.operand()],
        );
        dst
    }

    /// `x / y` for integers.
    #[track_caller]
    pub fn div<T: Integer>(&mut self, x: impl Into<Val<T>>, y: impl Into<Val<T>>) -> Reg<T> {
        let y = self.divisor(y.into());
        self.op(Op::Div, &[Mod::Type(T::PTX)], [x.into(), y])
    }

    /// `x mod y` for integers.
    #[track_caller]
    pub fn rem<T: Integer>(&mut self, x: impl Into<Val<T>>, y: impl Into<Val<T>>) -> Reg<T> {
        let y = self.divisor(y.into());
        self.op(Op::Rem, &[Mod::Type(T::PTX)], [x.into(), y])
    }

    #[track_caller]
    fn divisor<T: Integer>(&mut self, y: Val<T>) -> Val<T> {
        if y.operand().as_int() == Some(0) {
            self.fault(FaultKind::DivisionByZero);
        }
        y
    }

    /// `ceil(x / y)` for a constant `y`.
    #[track_caller]
    pub fn div_ceil(&mut self, x: impl Into<Val<U32>>, y: u32) -> Reg<U32> {
        let up = self.add(x, y.saturating_sub(1));
        if y.is_power_of_two() { self.shr(up, y.trailing_zeros()) } else { self.div(up, y) }
    }

    /// The smaller of two.
    #[track_caller]
    pub fn min<T: Number>(&mut self, x: impl Into<Val<T>>, y: impl Into<Val<T>>) -> Reg<T> {
        self.op(Op::Min, &[Mod::Type(T::PTX)], [x.into(), y.into()])
    }

    /// The larger of two; a NaN gives way to the other.
    #[track_caller]
    pub fn max<T: Number>(&mut self, x: impl Into<Val<T>>, y: impl Into<Val<T>>) -> Reg<T> {
        self.op(Op::Max, &[Mod::Type(T::PTX)], [x.into(), y.into()])
    }

    /// `-x`.
    #[track_caller]
    pub fn neg(&mut self, x: impl Into<Val<F32>>) -> Reg<F32> {
        self.op(Op::Neg, &[Mod::Type(ScalarType::F32)], [x.into()])
    }

    /// `x & y`.
    #[track_caller]
    pub fn and<T: Bits>(&mut self, x: impl Into<Val<T>>, y: impl Into<Val<T>>) -> Reg<T> {
        self.op(Op::And, &[Mod::Type(T::BITS)], [x.into(), y.into()])
    }

    /// `x | y`.
    #[track_caller]
    pub fn or<T: Bits>(&mut self, x: impl Into<Val<T>>, y: impl Into<Val<T>>) -> Reg<T> {
        self.op(Op::Or, &[Mod::Type(T::BITS)], [x.into(), y.into()])
    }

    /// `x ^ y`.
    #[track_caller]
    pub fn xor<T: Bits>(&mut self, x: impl Into<Val<T>>, y: impl Into<Val<T>>) -> Reg<T> {
        self.op(Op::Xor, &[Mod::Type(T::BITS)], [x.into(), y.into()])
    }

    /// `x << bits`.
    #[track_caller]
    pub fn shl(&mut self, x: impl Into<Val<U32>>, bits: impl Into<Val<U32>>) -> Reg<U32> {
        self.op(Op::Shl, &[Mod::Type(ScalarType::B32)], [x.into(), bits.into()])
    }

    /// `x >> bits`.
    #[track_caller]
    pub fn shr(&mut self, x: impl Into<Val<U32>>, bits: impl Into<Val<U32>>) -> Reg<U32> {
        self.op(Op::Shr, &[Mod::Type(ScalarType::U32)], [x.into(), bits.into()])
    }

    /// `x * y + z` with one rounding.
    #[track_caller]
    pub fn fma(
        &mut self,
        x: impl Into<Val<F32>>,
        y: impl Into<Val<F32>>,
        z: impl Into<Val<F32>>,
    ) -> Reg<F32> {
        self.op(Op::Fma, &[Mod::Rn, Mod::Type(ScalarType::F32)], [x.into(), y.into(), z.into()])
    }

    /// `dst = x * y + z`, in place.
    #[track_caller]
    pub fn fma_into(
        &mut self,
        dst: Reg<F32>,
        x: impl Into<Val<F32>>,
        y: impl Into<Val<F32>>,
        z: impl Into<Val<F32>>,
    ) {
        let mods = [Mod::Rn, Mod::Type(ScalarType::F32)];
        self.op_into(dst, Op::Fma, &mods, [x.into(), y.into(), z.into()]);
    }

    /// `dst = x * y`, in place.
    #[track_caller]
    pub fn mul_into(&mut self, dst: Reg<F32>, x: impl Into<Val<F32>>, y: impl Into<Val<F32>>) {
        self.op_into(dst, Op::Mul, &[Mod::Type(ScalarType::F32)], [x.into(), y.into()]);
    }

    /// `dst = 2^x`, in place; as [`exp2`](Self::exp2).
    #[track_caller]
    pub fn exp2_into(&mut self, dst: Reg<F32>, x: impl Into<Val<F32>>) {
        self.op_into(dst, Op::Ex2, &APPROX, [x.into()]);
    }

    /// `2^x`, at most 2 ulp off; 2^-inf is 0.
    #[track_caller]
    pub fn exp2(&mut self, x: impl Into<Val<F32>>) -> Reg<F32> {
        self.op(Op::Ex2, &APPROX, [x.into()])
    }

    /// Base-2 logarithm, approximate; of 0 it is -inf.
    #[track_caller]
    pub fn log2(&mut self, x: impl Into<Val<F32>>) -> Reg<F32> {
        self.op(Op::Lg2, &APPROX, [x.into()])
    }

    /// `1 / x`, approximate.
    #[track_caller]
    pub fn rcp(&mut self, x: impl Into<Val<F32>>) -> Reg<F32> {
        self.op(Op::Rcp, &APPROX, [x.into()])
    }

    /// `tanh x`, relative error about 2^-11.
    #[track_caller]
    pub fn tanh(&mut self, x: impl Into<Val<F32>>) -> Reg<F32> {
        self.op(Op::Tanh, &[Mod::Approx, Mod::Type(ScalarType::F32)], [x.into()])
    }

    /// `dst = tanh x`, in place; as [`tanh`](Self::tanh).
    #[track_caller]
    pub fn tanh_into(&mut self, dst: Reg<F32>, x: impl Into<Val<F32>>) {
        self.op_into(dst, Op::Tanh, &[Mod::Approx, Mod::Type(ScalarType::F32)], [x.into()]);
    }

    /// The condition `x cmp y`.
    #[track_caller]
    pub fn test<T: Number>(&mut self, cmp: Cmp, x: impl Into<Val<T>>, y: impl Into<Val<T>>) -> Pred {
        let (x, y) = (x.into(), y.into());
        let dst = self.fresh_pred(join([x, y]));
        let operands = [Operand::Reg(dst.id), x.operand(), y.operand()];
        self.emit(Op::Setp, &[cmp.modifier(), Mod::Type(T::PTX)], operands);
        dst
    }

    /// `then` where the condition holds, else `otherwise`.
    #[track_caller]
    pub fn select<T: Type>(
        &mut self,
        cond: Pred,
        then: impl Into<Val<T>>,
        otherwise: impl Into<Val<T>>,
    ) -> Reg<T> {
        let (then, otherwise) = (then.into(), otherwise.into());
        let dst = self.fresh::<T>(join([then, otherwise]).min(cond.scope));
        self.select_into(dst, cond, then, otherwise);
        dst
    }

    /// As [`select`](Self::select), into an existing register.
    #[track_caller]
    pub fn select_into<T: Type>(
        &mut self,
        dst: Reg<T>,
        cond: Pred,
        then: impl Into<Val<T>>,
        otherwise: impl Into<Val<T>>,
    ) {
        let (mut then, mut otherwise) = (then.into(), otherwise.into());
        self.check_set(dst, join([then, otherwise]).min(cond.scope));
        if cond.negated {
            std::mem::swap(&mut then, &mut otherwise);
        }
        let operands = [dst.operand(), then.operand(), otherwise.operand(), Operand::Reg(cond.id)];
        self.emit(Op::Selp, &[Mod::Type(T::PTX)], operands);
    }

    /// Both conditions.
    #[track_caller]
    pub fn both(&mut self, x: Pred, y: Pred) -> Pred {
        self.combine(Op::And, x, y)
    }

    /// Either condition.
    #[track_caller]
    pub fn either(&mut self, x: Pred, y: Pred) -> Pred {
        self.combine(Op::Or, x, y)
    }

    #[track_caller]
    fn combine(&mut self, op: Op, x: Pred, y: Pred) -> Pred {
        let (x, y) = (self.positive(x), self.positive(y));
        let dst = self.fresh_pred(x.scope.min(y.scope));
        self.emit(op, &[Mod::Type(ScalarType::Pred)], [dst.id, x.id, y.id].map(Operand::Reg));
        dst
    }

    #[track_caller]
    fn positive(&mut self, x: Pred) -> Pred {
        if !x.negated {
            return x;
        }
        let dst = self.fresh_pred(x.scope);
        self.emit(Op::Not, &[Mod::Type(ScalarType::Pred)], [dst.id, x.id].map(Operand::Reg));
        dst
    }

    /// Two f32 rounded to `half` and packed, `low` in the low half.
    #[track_caller]
    pub fn pack(&mut self, half: Half, low: impl Into<Val<F32>>, high: impl Into<Val<F32>>) -> Reg<B32> {
        let (low, high) = (low.into(), high.into());
        let dst = self.fresh::<B32>(join([low, high]));
        self.pack_into(dst, half, low, high);
        dst
    }

    /// As [`pack`](Self::pack), into an existing register.
    #[track_caller]
    pub fn pack_into(
        &mut self,
        dst: Reg<B32>,
        half: Half,
        low: impl Into<Val<F32>>,
        high: impl Into<Val<F32>>,
    ) {
        // The first source goes to the upper half (PTX ISA, cvt).
        let (low, high) = (low.into(), high.into());
        self.check_set(dst, join([low, high]));
        let operands = [dst.operand(), high.operand(), low.operand()];
        self.emit(Op::Cvt, &[Mod::Rn, Mod::Type(half.packed()), Mod::Type(ScalarType::F32)], operands);
    }

    /// The two values that are packed in `word`, widened to f32, the low half first.
    #[track_caller]
    pub fn unpack(&mut self, half: Half, word: Reg<U32>) -> [Reg<F32>; 2] {
        match half {
            // A bf16 is the upper half of an f32.
            Half::Bf16 => {
                let (low, high) = (self.shl(word, 16), self.and(word, 0xffff_0000));
                [low, high].map(|bits| {
                    let dst = self.fresh::<F32>(bits.scope());
                    self.emit(Op::Mov, &[Mod::Type(ScalarType::B32)], [dst.operand(), bits.operand()]);
                    dst
                })
            }
            Half::F16 => {
                let halves = [(); 2].map(|()| self.fresh::<B16>(word.scope()));
                let both = Operand::Vector(halves.map(Reg::operand).to_vec());
                self.emit(Op::Mov, &[Mod::Type(ScalarType::B32)], [both, word.operand()]);
                halves.map(|half| {
                    let dst = self.fresh::<F32>(half.scope());
                    let mods = [Mod::Type(ScalarType::F32), Mod::Type(ScalarType::F16)];
                    self.emit(Op::Cvt, &mods, [dst.operand(), half.operand()]);
                    dst
                })
            }
        }
    }

    /// The same bits, read as signed.
    pub fn signed(&mut self, x: Reg<U32>) -> Reg<S32> {
        Reg::new(x.id(), x.scope())
    }

    /// The same bits, read as unsigned.
    pub fn unsigned(&mut self, x: Reg<S32>) -> Reg<U32> {
        Reg::new(x.id(), x.scope())
    }

    /// Widens to 64 bits.
    #[track_caller]
    pub fn widen(&mut self, x: Reg<U32>) -> Reg<U64> {
        self.mul_wide(x, 1)
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
