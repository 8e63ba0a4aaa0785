//! Finding the row that an instruction is an instance of, and saying why there is none.

use super::{
    rows_of,
    spec::{Access, Count, Kind, OperandSpec, Presence, Row, Slot, Ty},
};
use crate::{
    inst::{Base, Imm, Inst, Operand, RegId},
    op::{Mod, Op, Shape},
    types::{ScalarType, TypeKind},
};
use std::fmt;

/// A row with its type variables bound by the modifiers of one instruction.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// The row.
    pub row: &'static Row,
    types: [Option<ScalarType>; 2],
    shape: Option<Shape>,
    vector: u16,
    dims: u16,
}

/// Why an instruction is not in the table.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormError {
    /// The modifiers fit no form.
    #[error("no form of `{op}` is written `{op}{mods}`; expected {expected} after `{op}{matched}`")]
    Modifiers {
        /// The operation.
        op: Op,
        /// Its modifiers, each with its dot.
        mods: String,
        /// Those that fitted the best form.
        matched: String,
        /// What that form wants next.
        expected: String,
    },
    /// Too many or too few operands.
    #[error("`{op}{mods}` takes {expected} operands, not {found}")]
    OperandCount {
        /// The operation.
        op: Op,
        /// Its modifiers, each with its dot.
        mods: String,
        /// How many it takes.
        expected: String,
        /// How many there are.
        found: usize,
    },
    /// One operand does not fit.
    #[error("operand {} of `{op}{mods}` must be {expected}, not {found}", .index + 1)]
    Operand {
        /// The operation.
        op: Op,
        /// Its modifiers, each with its dot.
        mods: String,
        /// Which operand, from 0.
        index: usize,
        /// What it may be.
        expected: Expected,
        /// What it is.
        found: String,
    },
    /// More than 16 bytes in one access.
    #[error("`{op}{mods}` moves {bytes} bytes at once; the most is 16")]
    TooWide {
        /// The operation.
        op: Op,
        /// Its modifiers, each with its dot.
        mods: String,
        /// How many it would move.
        bytes: u32,
    },
    /// The guard is no predicate.
    #[error("guard `{0}` is not a predicate register")]
    Guard(String),
}

/// What an operand may be, in words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Expected(String);

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The row of `inst` with its variables bound.
pub fn form_of(inst: &Inst) -> Result<Form, FormError> {
    if let Some(guard) = inst.guard.filter(|g| g.reg.ty != ScalarType::Pred) {
        return Err(FormError::Guard(Operand::Reg(guard.reg).to_string()));
    }
    let mut best: Option<FormError> = None;
    for row in rows_of(inst.op) {
        match Form::bind(row, &inst.mods).and_then(|form| form.check_operands(inst).map(|()| form)) {
            Ok(form) => return Ok(form),
            Err(error) if best.as_ref().is_none_or(|b| error.progress() > b.progress()) => best = Some(error),
            Err(_) => {}
        }
    }
    Err(best.unwrap_or_else(|| modifier_error(inst.op, &inst.mods, 0, "nothing known".into())))
}

impl FormError {
    /// How far the match came: the error of the row that came furthest is reported.
    fn progress(&self) -> (u8, usize) {
        match self {
            Self::Modifiers { matched, .. } => (0, matched.len()),
            Self::TooWide { .. } => (1, 0),
            Self::OperandCount { .. } => (1, 1),
            Self::Operand { index, .. } => (2, *index),
            Self::Guard(_) => (3, 0),
        }
    }
}

fn dotted(mods: &[Mod]) -> String {
    mods.iter().map(|m| format!(".{m}")).collect()
}

fn modifier_error(op: Op, mods: &[Mod], matched: usize, expected: String) -> FormError {
    FormError::Modifiers { op, mods: dotted(mods), matched: dotted(&mods[..matched]), expected }
}

/// The operands of a row, paired with those of an instruction; `None` if their number does not fit.
///
/// Operands that belong to a modifier are there with it; further optional ones are filled from the left.
pub fn pair_operands<'i>(
    row: &'static Row,
    inst: &'i Inst,
) -> Option<Vec<(&'static OperandSpec, &'i Operand)>> {
    let specs: Vec<_> = present_specs(row, &inst.mods).collect();
    let required = specs.iter().filter(|s| s.presence != Presence::Optional).count();
    let mut spare = inst.operands.len().checked_sub(required)?;
    let mut operands = inst.operands.iter();
    let mut pairs = Vec::with_capacity(inst.operands.len());
    for spec in specs {
        if spec.presence == Presence::Optional {
            if spare == 0 {
                continue;
            }
            spare -= 1;
        }
        pairs.push((spec, operands.next()?));
    }
    (spare == 0).then_some(pairs)
}

fn present_specs(row: &'static Row, mods: &[Mod]) -> impl Iterator<Item = &'static OperandSpec> {
    row.operands.iter().filter(|spec| match spec.presence {
        Presence::With(modifier) => mods.contains(&modifier),
        Presence::Always | Presence::Optional => true,
    })
}

impl Slot {
    fn takes(&self, modifier: Mod) -> bool {
        match self {
            Self::One(choices) | Self::Opt(choices) | Self::OptPair(choices, _) => {
                choices.contains(&modifier)
            }
            Self::Type(_, types) => modifier.as_type().is_some_and(|ty| types.contains(&ty)),
            Self::WgmmaShape(k) => modifier
                .as_shape()
                .is_some_and(|s| s.m == 64 && s.k == *k && s.n % 8 == 0 && (8..=256).contains(&s.n)),
        }
    }

    fn describe(&self) -> String {
        let list =
            |words: Vec<String>| words.iter().map(|w| format!("`.{w}`")).collect::<Vec<_>>().join(" or ");
        match self {
            Self::One(choices) | Self::Opt(choices) | Self::OptPair(_, choices) => {
                list(choices.iter().map(ToString::to_string).collect())
            }
            Self::Type(_, types) => list(types.iter().map(ToString::to_string).collect()),
            Self::WgmmaShape(k) => format!("`.m64nNk{k}` with N = 8, 16, … 256"),
        }
    }
}

impl Form {
    /// Matches the modifiers against the row's slots, in order.
    pub fn bind(row: &'static Row, mods: &[Mod]) -> Result<Self, FormError> {
        let mut form = Self { row, types: [None; 2], shape: None, vector: 1, dims: 0 };
        let mut next = 0;
        for slot in row.slots {
            match mods.get(next) {
                Some(&found) if slot.takes(found) => {
                    form.take(slot, found);
                    next += 1;
                    if let Slot::OptPair(_, seconds) = slot {
                        if !mods.get(next).is_some_and(|second| seconds.contains(second)) {
                            return Err(modifier_error(row.op, mods, next, slot.describe()));
                        }
                        next += 1;
                    }
                }
                _ if matches!(slot, Slot::Opt(_) | Slot::OptPair(..)) => {}
                _ => return Err(modifier_error(row.op, mods, next, slot.describe())),
            }
        }
        if next < mods.len() {
            return Err(modifier_error(row.op, mods, next, "nothing".into()));
        }
        Ok(form)
    }

    fn take(&mut self, slot: &Slot, found: Mod) {
        match (slot, found) {
            (Slot::Type(var, _), Mod::Type(ty)) => self.types[usize::from(var.0)] = Some(ty),
            (_, Mod::Shape(shape)) => self.shape = Some(shape),
            (_, Mod::V2 | Mod::X2) => self.vector = 2,
            (_, Mod::V4 | Mod::X4) => self.vector = 4,
            (_, Mod::D1) => self.dims = 1,
            (_, Mod::D2) => self.dims = 2,
            (_, Mod::D3) => self.dims = 3,
            (_, Mod::D4) => self.dims = 4,
            (_, Mod::D5) => self.dims = 5,
            _ => {}
        }
    }

    /// The scalar type that `ty` stands for; `None` for addresses.
    pub fn resolve(&self, ty: Ty) -> Option<ScalarType> {
        match ty {
            Ty::Var(var) | Ty::Loose(var) => self.types[usize::from(var.0)],
            Ty::Wide(var) => self.types[usize::from(var.0)].and_then(ScalarType::wide),
            Ty::Is(ty) => Some(ty),
            Ty::Pointer => None,
        }
    }

    /// Elements of a vector operand.
    pub fn count(&self, count: Count) -> u16 {
        match count {
            Count::Is(n) => n,
            Count::VecMod | Count::XMod => self.vector,
            Count::ShapeN(per) => self.shape.map_or(0, |s| s.n / per),
        }
    }

    /// Coordinates of a tensor operand.
    pub fn dims(&self) -> u16 {
        self.dims
    }

    /// Bytes that one lane accesses: the first type times the vector length.
    pub fn access_bytes(&self) -> u32 {
        self.types[0].map_or(1, ScalarType::bytes) * u32::from(self.vector)
    }

    /// The operands with how they are used.
    pub fn accesses<'i>(&self, inst: &'i Inst) -> Vec<(Access, &'i Operand)> {
        let pairs = pair_operands(self.row, inst).unwrap_or_default();
        pairs.into_iter().map(|(spec, operand)| (spec.access, operand)).collect()
    }

    fn check_operands(&self, inst: &Inst) -> Result<(), FormError> {
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
            Kind::Packed(ty) => self.is_packed(ty, operand),
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
            Operand::Symbol(_) => bits == 32 || bits == 64,
            other => self.is_value(ty, other),
        }
    }

    fn is_packed(&self, ty: Ty, operand: &Operand) -> bool {
        let Operand::Vector(items) = operand else { return false };
        let Some(whole) = self.resolve(ty).map(ScalarType::bits) else { return false };
        let regs: Vec<_> = items.iter().filter_map(Operand::as_reg).collect();
        let only_regs_and_sinks = items.iter().all(|i| matches!(i, Operand::Reg(_) | Operand::Sink));
        let part = whole.checked_div(items.len() as u32).unwrap_or(0);
        let fits = regs.iter().all(|reg| reg.ty.bits() == part && reg.ty != ScalarType::Pred);
        only_regs_and_sinks && !regs.is_empty() && part >= 8 && part * items.len() as u32 == whole && fits
    }

    fn is_vector(&self, ty: Ty, count: Count, operand: &Operand) -> bool {
        let wanted = usize::from(self.count(count));
        let element = |o: &Operand| *o == Operand::Sink || self.is_value(ty, o);
        match operand {
            Operand::Vector(items) => {
                let braces_allowed = count != Count::VecMod || wanted > 1;
                braces_allowed && items.len() == wanted && items.iter().all(element)
            }
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
        }
    }
}

fn describe_operand(operand: &Operand) -> String {
    match operand {
        Operand::Reg(reg) => format!("`{operand}` of type `.{}`", reg.ty),
        Operand::Vector(items) => format!("{} elements `{operand}`", items.len()),
        other => format!("`{other}`"),
    }
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
        (Imm::Int(value), TypeKind::Pred) => matches!(value, 0 | 1),
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
