//! Finds the row that an instruction is an instance of, or says why there is none. Modifiers are matched here,
//! operands in [`super::fit`].

use super::{
    rows_of,
    spec::{Access, Count, OperandSpec, Presence, Row, Slot, Ty},
};
use crate::{
    inst::{Inst, Operand},
    op::{Mod, Op, Shape},
    types::ScalarType,
};
use std::fmt;

/// A row with its type variables bound by the modifiers of one instruction.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// The row.
    pub row: &'static Row,
    pub(super) types: [Option<ScalarType>; 2],
    shape: Option<Shape>,
    vector: u16,
    pub(super) dims: u16,
}

/// Why an instruction is not in the table.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormError {
    /// The modifiers match no form.
    #[error("no form of `{op}` is written `{op}{mods}`; expected {expected} after `{op}{matched}`")]
    Modifiers {
        /// The operation.
        op: Op,
        /// Its modifiers, each with its dot.
        mods: String,
        /// Those that fitted the best form.
        matched: String,
        /// What that form expects next.
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
    #[error("`{op}{mods}` moves {bytes} bytes at once; at most 16 are possible")]
    TooWide {
        /// The operation.
        op: Op,
        /// Its modifiers, each with its dot.
        mods: String,
        /// How many it would move.
        bytes: u32,
    },
    /// The guard is not a predicate.
    #[error("guard `{0}` is not a predicate register")]
    Guard(String),
}

/// What an operand may be, in words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Expected(pub(super) String);

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Where the modifiers of an instruction part from a row. Most instructions try several rows, so that putting it into
/// words is left to whoever reports it.
struct Misfit {
    /// How many modifiers fitted.
    matched: usize,
    /// What the row expects next, if anything.
    wanted: Option<&'static Slot>,
}

impl Misfit {
    /// What the row expects, each alternative in words.
    fn words(&self) -> Vec<String> {
        self.wanted.map_or_else(|| vec!["nothing".into()], Slot::words)
    }
}

/// The row of `inst` with its variables bound.
pub fn form_of(inst: &Inst) -> Result<Form, FormError> {
    if let Some(guard) = inst.guard.filter(|g| g.reg.ty != ScalarType::Pred) {
        return Err(FormError::Guard(Operand::Reg(guard.reg).to_string()));
    }
    let fits = |row| Form::fit(row, &inst.mods).ok().filter(|form| form.check_operands(inst).is_ok());
    rows_of(inst.op).iter().copied().find_map(fits).map_or_else(|| Err(best_error(inst)), Ok)
}

/// Why none of the rows fits: what the one that comes furthest says.
#[cold]
fn best_error(inst: &Inst) -> FormError {
    let mut best: Option<FormError> = None;
    for row in rows_of(inst.op) {
        match Form::bind(row, &inst.mods).and_then(|form| form.check_operands(inst).map(|()| form)) {
            Err(error) if best.as_ref().is_none_or(|b| error.progress() > b.progress()) => best = Some(error),
            Ok(_) | Err(_) => {}
        }
    }
    match best {
        Some(FormError::Modifiers { matched, .. }) => misfit_error(inst, &matched),
        Some(error) => error,
        None => modifier_error(inst.op, &inst.mods, 0, "nothing known".into()),
    }
}

/// What all rows that fit up to `matched` expect behind it.
fn misfit_error(inst: &Inst, matched: &str) -> FormError {
    let misfits = rows_of(inst.op).iter().filter_map(|row| Form::fit(row, &inst.mods).err());
    let furthest: Vec<Misfit> =
        misfits.filter(|misfit| dotted(&inst.mods[..misfit.matched]) == matched).collect();
    let mut words: Vec<String> = Vec::new();
    for word in furthest.iter().flat_map(Misfit::words) {
        if !words.contains(&word) {
            words.push(word);
        }
    }
    let count = furthest.first().map_or(0, |misfit| misfit.matched);
    modifier_error(inst.op, &inst.mods, count, words.join(" or "))
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

pub(super) fn dotted(mods: &[Mod]) -> String {
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

pub(super) fn present_specs(row: &'static Row, mods: &[Mod]) -> impl Iterator<Item = &'static OperandSpec> {
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
            Self::WgmmaByteShape(k) => {
                let whole = |n: u16| n.is_multiple_of(16) || n == 8 || n == 24;
                modifier.as_shape().is_some_and(|s| whole(s.n)) && Self::WgmmaShape(*k).takes(modifier)
            }
        }
    }

    /// What it takes, each alternative in words.
    fn words(&self) -> Vec<String> {
        match self {
            Self::One(choices) | Self::Opt(choices) | Self::OptPair(_, choices) => {
                choices.iter().map(|modifier| format!("`.{modifier}`")).collect()
            }
            Self::Type(_, types) => types.iter().map(|ty| format!("`.{ty}`")).collect(),
            Self::WgmmaShape(k) => vec![format!("`.m64nNk{k}` with N = 8, 16, … 256")],
            Self::WgmmaByteShape(k) => vec![format!("`.m64nNk{k}` with N = 8, 16, 24, 32, 48, … 256")],
        }
    }
}

impl Form {
    /// Matches the modifiers against the row's slots, in order.
    pub fn bind(row: &'static Row, mods: &[Mod]) -> Result<Self, FormError> {
        Self::fit(row, mods)
            .map_err(|misfit| modifier_error(row.op, mods, misfit.matched, misfit.words().join(" or ")))
    }

    fn fit(row: &'static Row, mods: &[Mod]) -> Result<Self, Misfit> {
        let mut form = Self { row, types: [None; 2], shape: None, vector: 1, dims: 0 };
        let mut next = 0;
        for slot in row.slots {
            match mods.get(next) {
                Some(&found) if slot.takes(found) => {
                    form.take(slot, found);
                    next += 1;
                    if let Slot::OptPair(_, seconds) = slot {
                        if !mods.get(next).is_some_and(|second| seconds.contains(second)) {
                            return Err(Misfit { matched: next, wanted: Some(slot) });
                        }
                        next += 1;
                    }
                }
                _ if matches!(slot, Slot::Opt(_) | Slot::OptPair(..)) => {}
                _ => return Err(Misfit { matched: next, wanted: Some(slot) }),
            }
        }
        if next < mods.len() {
            return Err(Misfit { matched: next, wanted: None });
        }
        Ok(form)
    }

    fn take(&mut self, slot: &Slot, found: Mod) {
        match (slot, found) {
            (Slot::Type(var, _), Mod::Type(ty)) => self.types[usize::from(var.0)] = Some(ty),
            (_, Mod::Shape(shape)) => self.shape = Some(shape),
            (_, Mod::V2 | Mod::X2) => self.vector = 2,
            (_, Mod::V4 | Mod::X4) => self.vector = 4,
            (_, Mod::V8) => self.vector = 8,
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
}
