//! Whether an operand is what its row requires, and what that is in words.

use super::{
    form::{Expected, Form, FormError, dotted, pair_operands, present_specs},
    spec::{Count, Kind, Presence, Ty},
};
use crate::{
    inst::{Base, Imm, Inst, Operand, RegId},
    types::{ScalarType, TypeKind},
};

impl Form {
    pub(super) fn check_operands(&self, inst: &Inst) -> Result<(), FormError> {
        let bytes = self.access_bytes();
        if bytes > 16 {
            return Err(FormError::TooWide { op: inst.op, mods: dotted(&inst.mods), bytes });
        }
        let pairs = pair_operands(self.row, inst).ok_or_else(|| self.count_error(inst))?;
        for (index, (spec, operand)) in pairs.into_iter().enumerate() {
            if !self.fits(spec.kind, operand) {
                return Err(FormError::Operand {
                    op: inst.op,
                    mods: dotted(&inst.mods),
                    index,
                    expected: Expected(self.describe(spec.kind)),
                    found: describe_operand(operand),
                });
            }
        }
        Ok(())
    }

    fn count_error(&self, inst: &Inst) -> FormError {
        let specs: Vec<_> = present_specs(self.row, &inst.mods).collect();
        let least = specs.iter().filter(|s| s.presence != Presence::Optional).count();
        let most = specs.len();
        let expected = if least == most { least.to_string() } else { format!("{least} to {most}") };
        FormError::OperandCount {
            op: inst.op,
            mods: dotted(&inst.mods),
            expected,
            found: inst.operands.len(),
        }
    }

    fn fits(&self, kind: Kind, operand: &Operand) -> bool {
        match kind {
            Kind::Reg(ty) => self.is_reg(ty, operand),
            Kind::RegOrSink(ty) => *operand == Operand::Sink || self.is_reg(ty, operand),
            Kind::RegOrPair(ty) => self.is_reg(ty, operand) || self.is_pair(ty, operand),
            Kind::Pair(ty) => self.is_pair(ty, operand),
            Kind::Value(ty) => self.is_value(ty, operand),
            Kind::Movable(ty) => self.is_movable(ty, operand),
            Kind::Packed(ty) => self.is_packed(ty, operand, false),
            Kind::PackedValues(ty) => self.is_packed(ty, operand, true),
            Kind::Vector(ty, count) => self.is_vector(ty, count, operand),
            Kind::Pred => {
                matches!(operand, Operand::Reg(reg) | Operand::Not(reg) if reg.ty == ScalarType::Pred)
            }
            Kind::Bool => matches!(operand.as_int(), Some(0 | 1)) || self.fits(Kind::Pred, operand),
            Kind::PredPair => {
                let pred = Ty::Is(ScalarType::Pred);
                self.is_reg(pred, operand) || self.is_pair(pred, operand)
            }
            Kind::Imm(low, high, step) => is_in_range(operand, low, high, step),
            Kind::Ranged(ty, low, high, step) => {
                is_in_range(operand, low, high, step) || self.is_reg(ty, operand)
            }
            Kind::OneOf(values) => operand.as_int().is_some_and(|v| values.contains(&v)),
            Kind::Sink => *operand == Operand::Sink,
            Kind::Address(_) => matches!(operand, Operand::Address(address) if is_base(&address.base)),
            Kind::Tensor => self.is_tensor(operand),
            Kind::Label => matches!(operand, Operand::Label(_)),
            Kind::Function | Kind::Targets => matches!(operand, Operand::Symbol(_)),
            Kind::Group => is_group(operand),
        }
    }

    fn is_reg(&self, ty: Ty, operand: &Operand) -> bool {
        operand.as_reg().is_some_and(|reg| self.takes_reg(ty, reg))
    }

    fn takes_reg(&self, ty: Ty, reg: RegId) -> bool {
        match (ty, self.resolve(ty)) {
            (Ty::Pointer, _) => is_pointer(reg),
            (Ty::Loose(_), Some(wanted)) => wanted.accepts_wider(reg.ty),
            (_, Some(wanted)) => wanted.accepts(reg.ty),
            (_, None) => false,
        }
    }

    fn is_value(&self, ty: Ty, operand: &Operand) -> bool {
        match operand {
            Operand::Imm(imm) => self.resolve(ty).is_some_and(|wanted| takes_imm(wanted, *imm)),
            other => self.is_reg(ty, other),
        }
    }

    fn is_movable(&self, ty: Ty, operand: &Operand) -> bool {
        let bits = self.resolve(ty).map_or(0, ScalarType::bits);
        match operand {
            Operand::Special(special) => {
                special.ty().bits() == bits || (bits == 64 && special.ty().bits() == 32)
            }
            Operand::Symbol(_) | Operand::Offset(..) => bits == 32 || bits == 64,
            other => self.is_value(ty, other),
        }
    }

    fn is_packed(&self, ty: Ty, operand: &Operand, literals: bool) -> bool {
        let Operand::Vector(items) = operand else { return false };
        let Some(whole) = self.resolve(ty).map(ScalarType::bits) else { return false };
        let regs: Vec<_> = items.iter().filter_map(Operand::as_reg).collect();
        let part = whole.checked_div(items.len() as u32).unwrap_or(0);
        let is_part = |item: &Operand| match item {
            Operand::Reg(_) | Operand::Sink => true,
            Operand::Imm(Imm::Int(value)) => literals && fits_width(*value, part),
            _ => false,
        };
        let fits = regs.iter().all(|reg| reg.ty.bits() == part && reg.ty != ScalarType::Pred);
        items.iter().all(is_part)
            && !regs.is_empty()
            && part >= 8
            && part * items.len() as u32 == whole
            && fits
    }

    fn is_vector(&self, ty: Ty, count: Count, operand: &Operand) -> bool {
        let wanted = usize::from(self.count(count));
        let element = |o: &Operand| *o == Operand::Sink || self.is_value(ty, o);
        match operand {
            Operand::Vector(items) => items.len() == wanted && items.iter().all(element),
            scalar => wanted == 1 && count != Count::Is(1) && self.is_value(ty, scalar),
        }
    }

    fn is_pair(&self, ty: Ty, operand: &Operand) -> bool {
        let Operand::Pair(pair) = operand else { return false };
        let first = pair.0 == Operand::Sink || self.is_reg(ty, &pair.0);
        first && (pair.1 == Operand::Sink || self.is_reg(Ty::Is(ScalarType::Pred), &pair.1))
    }

    fn is_tensor(&self, operand: &Operand) -> bool {
        let Operand::Tensor(tensor) = operand else { return false };
        let coordinate = |o: &Operand| self.is_value(Ty::Is(ScalarType::S32), o);
        is_base(&tensor.map.base)
            && tensor.coords.len() == usize::from(self.dims)
            && tensor.coords.iter().all(coordinate)
    }

    fn describe(&self, kind: Kind) -> String {
        let ty = |ty: Ty| match (ty, self.resolve(ty)) {
            (Ty::Loose(_), Some(t)) => format!("`.{t}` or wider"),
            (_, Some(t)) => format!("`.{t}`"),
            (_, None) => "32- or 64-bit".into(),
        };
        match kind {
            Kind::Reg(t) => format!("a register of type {}", ty(t)),
            Kind::RegOrSink(t) => format!("a register of type {} or `_`", ty(t)),
            Kind::RegOrPair(t) => format!("a register of type {}, with or without `|p`", ty(t)),
            Kind::Pair(t) => format!("`d|p` with d of type {} and a predicate", ty(t)),
            Kind::Value(t) => format!("a register or literal of type {}", ty(t)),
            Kind::Movable(t) => format!("a register, literal, special register or symbol of type {}", ty(t)),
            Kind::Packed(t) => format!("`{{…}}` of registers that together fill {}", ty(t)),
            Kind::PackedValues(t) => format!("`{{…}}` of registers or literals that together fill {}", ty(t)),
            Kind::Vector(t, count) if self.count(count) == 1 && count != Count::Is(1) => {
                format!("a register of type {}", ty(t))
            }
            Kind::Vector(t, count) => format!("`{{…}}` of {} registers of type {}", self.count(count), ty(t)),
            Kind::Pred => "a predicate".into(),
            Kind::Bool => "a predicate, 0 or 1".into(),
            Kind::PredPair => "a predicate or `p|q`".into(),
            Kind::Imm(low, high, 1) => format!("a literal from {low} to {high}"),
            Kind::Imm(low, high, step) => format!("a literal from {low} to {high} in steps of {step}"),
            Kind::Ranged(t, low, high, 1) => {
                format!("a register of type {} or a literal from {low} to {high}", ty(t))
            }
            Kind::Ranged(t, low, high, step) => {
                format!("a register of type {} or a literal from {low} to {high} in steps of {step}", ty(t))
            }
            Kind::OneOf(values) => format!("one of {values:?}"),
            Kind::Sink => "`_`".into(),
            Kind::Address(_) => "an address `[…]`".into(),
            Kind::Tensor => format!("`[map, {{…}}]` with {} coordinates", self.dims),
            Kind::Label => "a label".into(),
            Kind::Function => "the name of a function".into(),
            Kind::Targets => "the name of a list of targets or of a prototype".into(),
            Kind::Group => "`(…)` of `.param` variables".into(),
        }
    }
}

fn describe_operand(operand: &Operand) -> String {
    match operand {
        Operand::Reg(reg) => format!("`{operand}` of type `.{}`", reg.ty),
        Operand::Vector(items) => format!("{} elements `{operand}`", items.len()),
        Operand::Symbol(_) => format!("`{operand}`, which is not declared as a register"),
        other => format!("`{other}`"),
    }
}

/// Whether the operand is `(…)` of names: registers as arguments belong to an older way to call.
fn is_group(operand: &Operand) -> bool {
    matches!(operand, Operand::Group(items) if items.iter().all(|i| matches!(i, Operand::Symbol(_))))
}

fn is_in_range(operand: &Operand, low: i64, high: i64, step: i64) -> bool {
    operand.as_int().is_some_and(|v| (low..=high).contains(&v) && (v - low) % step == 0)
}

fn is_pointer(reg: RegId) -> bool {
    matches!(reg.ty.bits(), 32 | 64) && !reg.ty.is_float()
}

fn is_base(base: &Base) -> bool {
    match base {
        Base::Reg(reg) => is_pointer(*reg),
        Base::Symbol(_) | Base::Absolute => true,
    }
}

/// Whether a literal may stand where the type is wanted: integers for integers and bits, if they fit; floats for
/// floats of their width, and for untyped operands.
fn takes_imm(wanted: ScalarType, imm: Imm) -> bool {
    match (imm, wanted.kind()) {
        (Imm::Int(value), TypeKind::Pred) => matches!(value, -1..=1),
        (Imm::Int(value), TypeKind::Bits | TypeKind::Unsigned | TypeKind::Signed) => {
            fits_width(value, wanted.bits())
        }
        (Imm::Int(_), TypeKind::Float) => false,
        (Imm::F32(_), TypeKind::Float | TypeKind::Bits) => wanted.bits() == 32 && wanted != ScalarType::F16x2,
        (Imm::F64(_), TypeKind::Float | TypeKind::Bits) => wanted.bits() == 64,
        (Imm::F32(_) | Imm::F64(_), _) => false,
    }
}

/// Whether the value fits as signed or as unsigned integer of that width.
fn fits_width(value: i64, bits: u32) -> bool {
    bits >= 64 || (-(1i64 << (bits - 1))..1i64 << bits).contains(&value)
}
