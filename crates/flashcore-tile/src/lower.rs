//! From expressions to instructions: depth first, left to right, one instruction per operator.

use std::iter::once;

use flashcore_ptx::{
    inst::Operand,
    op::{Mod, Op},
    types::ScalarType,
};

use crate::{
    builder::Builder,
    error::FaultKind,
    expr::{Binary, Cond, Expr, Node},
    scope::Scope,
    value::{Pred, Reg, Type},
};

/// What [`Builder::let_`] gives a register to: an expression or a condition.
pub trait Term {
    /// The register.
    type Value;
    /// Computes it.
    #[track_caller]
    fn evaluate(self, b: &mut Builder) -> Self::Value;
}

impl<T: Type> Term for Expr<T> {
    type Value = Reg<T>;

    fn evaluate(self, b: &mut Builder) -> Reg<T> {
        let arg = b.value(self.node);
        match arg.operand {
            Operand::Reg(id) => Reg::new(id, arg.scope),
            _ => b.op(Op::Mov, &[Mod::Type(T::PTX)], [arg]),
        }
    }
}

impl<T: Type> Term for Reg<T> {
    type Value = Self;

    fn evaluate(self, _: &mut Builder) -> Self {
        self
    }
}

impl Term for Cond {
    type Value = Pred;

    fn evaluate(self, b: &mut Builder) -> Pred {
        b.condition(self.node)
    }
}

impl Term for Pred {
    type Value = Self;

    fn evaluate(self, _: &mut Builder) -> Self {
        self
    }
}

/// A value that an instruction takes.
#[derive(Clone, Debug)]
pub(crate) struct Arg {
    pub(crate) operand: Operand,
    pub(crate) scope: Scope,
}

impl Arg {
    pub(crate) fn constant(value: u32) -> Self {
        Self { operand: Operand::int(i64::from(value)), scope: Scope::Grid }
    }

    fn of(pred: Pred) -> Self {
        let operand = if pred.negated { Operand::Not(pred.id) } else { Operand::Reg(pred.id) };
        Self { operand, scope: pred.scope }
    }

    /// A condition's register, where it is one.
    fn pred(&self) -> Option<Pred> {
        let (id, negated) = match self.operand {
            Operand::Reg(id) => (id, false),
            Operand::Not(id) => (id, true),
            _ => return None,
        };
        Some(Pred { id, scope: self.scope, negated })
    }

    /// The exponent of a constant power of two.
    fn log2(&self) -> Option<u32> {
        let value = u32::try_from(self.operand.as_int()?).ok()?;
        value.is_power_of_two().then(|| value.trailing_zeros())
    }
}

impl<T> From<Arg> for Expr<T> {
    fn from(arg: Arg) -> Self {
        Self::new(match arg.operand {
            Operand::Reg(id) => Node::Reg(id, arg.scope),
            Operand::Imm(imm) => Node::Const(imm),
            other => unreachable!("{other:?} is neither a register nor a constant"),
        })
    }
}

/// The smallest scope among values.
pub(crate) fn join(args: &[Arg]) -> Scope {
    args.iter().map(|arg| arg.scope).min().unwrap_or(Scope::Grid)
}

impl Builder {
    /// Computes an expression or a condition, now and once: its register may be used as often as needed.
    #[track_caller]
    pub fn let_<E: Term>(&mut self, term: E) -> E::Value {
        term.evaluate(self)
    }

    /// A value as an operand.
    #[track_caller]
    pub(crate) fn arg<T: Type>(&mut self, x: impl Into<Expr<T>>) -> Arg {
        self.value(x.into().node)
    }

    /// A condition as a predicate.
    #[track_caller]
    pub(crate) fn pred(&mut self, cond: impl Into<Cond>) -> Pred {
        self.let_(cond.into())
    }

    #[track_caller]
    fn value(&mut self, node: Node) -> Arg {
        match node {
            Node::Reg(id, scope) => Arg { operand: Operand::Reg(id), scope },
            Node::Const(imm) => Arg { operand: Operand::Imm(imm), scope: Scope::Grid },
            Node::Neg(x) => {
                let x = self.value(*x);
                self.result(ScalarType::F32, Op::Neg, &[Mod::Type(ScalarType::F32)], &[x])
            }
            Node::Not(x) => {
                let x = self.condition(*x);
                Arg::of(x.not())
            }
            Node::Binary(op, ScalarType::Pred, args) => self.joined(op, *args),
            Node::Binary(op, ty, args) => self.binary(op, ty, *args),
            Node::Compare(cmp, ty, args) => {
                let args = self.values(*args);
                self.result(ScalarType::Pred, Op::Setp, &[cmp.modifier(), Mod::Type(ty)], &args)
            }
            Node::Select(ty, args) => self.selected(ty, *args),
        }
    }

    #[track_caller]
    fn values<const N: usize>(&mut self, nodes: [Node; N]) -> [Arg; N] {
        // A loop, because a closure would not pass the caller's line on.
        let mut args = [(); N].map(|()| Arg::constant(0));
        for (arg, node) in args.iter_mut().zip(nodes) {
            *arg = self.value(node);
        }
        args
    }

    #[track_caller]
    fn condition(&mut self, node: Node) -> Pred {
        self.value(node).pred().expect("a condition is a predicate")
    }

    /// One instruction with its result in a new register.
    #[track_caller]
    fn result(&mut self, ty: ScalarType, op: Op, mods: &[Mod], args: &[Arg]) -> Arg {
        let scope = join(args).min(self.converged);
        let dst = Operand::Reg(self.fresh_id(ty));
        let operands: Vec<_> = once(dst.clone()).chain(args.iter().map(|arg| arg.operand.clone())).collect();
        self.emit(op, mods, operands);
        Arg { operand: dst, scope }
    }

    #[track_caller]
    fn binary(&mut self, op: Binary, ty: ScalarType, args: [Node; 2]) -> Arg {
        match (op, args) {
            (Binary::Add, [Node::Binary(Binary::Mul, _, factors), z]) if !ty.is_float() => {
                let [x, y] = self.values(*factors);
                let z = self.value(z);
                self.result(ty, Op::Mad, &[Mod::Lo, Mod::Type(ty)], &[x, y, z])
            }
            (Binary::Add, [z, Node::Binary(Binary::Mul, _, factors)]) if !ty.is_float() => {
                let z = self.value(z);
                let [x, y] = self.values(*factors);
                self.result(ty, Op::Mad, &[Mod::Lo, Mod::Type(ty)], &[x, y, z])
            }
            (op, args) => {
                let args = self.values(args);
                self.instruction(op, ty, args)
            }
        }
    }

    #[track_caller]
    fn instruction(&mut self, op: Binary, ty: ScalarType, [x, y]: [Arg; 2]) -> Arg {
        let (op, y) = match (op, y.log2()) {
            (Binary::Div, Some(bits)) if ty == ScalarType::U32 => (Binary::Shr, Arg::constant(bits)),
            (Binary::Rem, Some(bits)) if ty == ScalarType::U32 => {
                (Binary::And, Arg::constant((1 << bits) - 1))
            }
            _ => (op, y),
        };
        if matches!(op, Binary::Div | Binary::Rem) && y.operand.as_int() == Some(0) {
            self.fault(FaultKind::DivisionByZero);
        }
        let (op, mods, result) = form(op, ty);
        self.result(result, op, &mods, &[x, y])
    }

    /// Both conditions, or either.
    #[track_caller]
    fn joined(&mut self, op: Binary, [x, y]: [Node; 2]) -> Arg {
        let (x, y) = (self.condition(x), self.condition(y));
        let args = [self.positive(x), self.positive(y)].map(Arg::of);
        let op = if op == Binary::And { Op::And } else { Op::Or };
        self.result(ScalarType::Pred, op, &[Mod::Type(ScalarType::Pred)], &args)
    }

    /// Instructions that compute with predicates take no negated ones.
    #[track_caller]
    fn positive(&mut self, x: Pred) -> Pred {
        if !x.negated {
            return x;
        }
        let x = Arg::of(x.not());
        let not = self.result(ScalarType::Pred, Op::Not, &[Mod::Type(ScalarType::Pred)], &[x]);
        not.pred().expect("a result is a register")
    }

    #[track_caller]
    fn selected(&mut self, ty: ScalarType, [cond, then, otherwise]: [Node; 3]) -> Arg {
        let cond = self.condition(cond);
        let [then, otherwise] = self.values([then, otherwise]);
        let [then, otherwise] = if cond.negated { [otherwise, then] } else { [then, otherwise] };
        let cond = Arg::of(Pred { negated: false, ..cond });
        self.result(ty, Op::Selp, &[Mod::Type(ty)], &[then, otherwise, cond])
    }
}

/// Instruction, modifiers and type of the result.
fn form(op: Binary, ty: ScalarType) -> (Op, Vec<Mod>, ScalarType) {
    let bits = if ty == ScalarType::U64 { ScalarType::B64 } else { ScalarType::B32 };
    let (op, mods) = match op {
        Binary::Add => (Op::Add, vec![Mod::Type(ty)]),
        Binary::Sub => (Op::Sub, vec![Mod::Type(ty)]),
        Binary::Mul if ty.is_float() => (Op::Mul, vec![Mod::Type(ty)]),
        Binary::Mul => (Op::Mul, vec![Mod::Lo, Mod::Type(ty)]),
        Binary::MulWide => return (Op::Mul, vec![Mod::Wide, Mod::Type(ty)], ScalarType::U64),
        Binary::Div => (Op::Div, vec![Mod::Type(ty)]),
        Binary::Rem => (Op::Rem, vec![Mod::Type(ty)]),
        Binary::Min => (Op::Min, vec![Mod::Type(ty)]),
        Binary::Max => (Op::Max, vec![Mod::Type(ty)]),
        Binary::And => (Op::And, vec![Mod::Type(bits)]),
        Binary::Or => (Op::Or, vec![Mod::Type(bits)]),
        Binary::Xor => (Op::Xor, vec![Mod::Type(bits)]),
        Binary::Shl => (Op::Shl, vec![Mod::Type(bits)]),
        Binary::Shr => (Op::Shr, vec![Mod::Type(ty)]),
    };
    (op, mods, ty)
}
