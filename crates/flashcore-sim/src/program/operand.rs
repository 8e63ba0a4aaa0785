//! Operands become slots and numbers here; variables and parameters get their places.

use super::{
    RegisterCounts,
    uop::{Addr, Dst, Reg, Space, Src},
};
use flashcore_ptx::{
    inst::{Address, Base, Imm, Operand, RegId},
    module::{Kernel, Length, Module, Space as VarSpace, Variable},
    types::{ScalarType, SpecialReg},
};
use std::collections::BTreeMap;

/// Where a CTA's own shared memory starts; the first KiB belongs to the system, as on sm_90.
pub(crate) const SHARED_BASE: u32 = 1024;

/// Where a name lies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Param(u32),
    Shared(u32),
    /// An offset into the module's global or constant image, relocated at load.
    Global(u64),
    Const(u64),
    Local(u32),
}

/// Places and sizes of variables and parameters.
#[derive(Clone, Default, Debug)]
pub(crate) struct Layout {
    places: BTreeMap<String, Place>,
    /// Bytes of the parameter block, and the offset of each parameter.
    pub(crate) param_bytes: u32,
    pub(crate) param_offsets: Vec<u32>,
    /// Bytes of static shared memory from [`SHARED_BASE`] on.
    pub(crate) static_shared: u32,
    /// Bytes of local memory of each thread.
    pub(crate) local_bytes: u32,
    /// Initial image of module-scope global variables, at [`crate::memory::MODULE_GLOBALS`].
    pub(crate) globals: Vec<u8>,
    /// Initial image of constant memory.
    pub(crate) constants: Vec<u8>,
}

impl Layout {
    /// Gives every variable and parameter its place.
    pub(crate) fn new(module: &Module, kernel: &Kernel) -> Self {
        let (param_offsets, param_bytes) = kernel.param_layout();
        let mut layout = Self { param_bytes, param_offsets, ..Self::default() };
        for (param, &offset) in kernel.params.iter().zip(&layout.param_offsets) {
            layout.places.insert(param.name.to_string(), Place::Param(offset));
        }
        let variables = module.variables.iter().chain(&kernel.variables);
        let (dynamic, fixed): (Vec<_>, Vec<_>) = variables.partition(|v| v.len == Length::Unsized);
        fixed.into_iter().for_each(|v| layout.place(v));
        dynamic.into_iter().for_each(|v| layout.place(v));
        layout
    }

    /// Where `name` lies.
    pub(crate) fn place_of(&self, name: &str) -> Option<Place> {
        self.places.get(name).copied()
    }

    fn place(&mut self, variable: &Variable) {
        let align = variable.alignment();
        let bytes = variable.bytes();
        let place = match variable.space {
            VarSpace::Shared => {
                let start = (SHARED_BASE + self.static_shared).next_multiple_of(align);
                self.static_shared = start - SHARED_BASE + bytes as u32;
                Place::Shared(start)
            }
            VarSpace::Local => {
                let start = self.local_bytes.next_multiple_of(align);
                self.local_bytes = start + bytes as u32;
                Place::Local(start)
            }
            VarSpace::Global => Place::Global(append(&mut self.globals, variable)),
            VarSpace::Const => Place::Const(append(&mut self.constants, variable)),
        };
        self.places.insert(variable.name.to_string(), place);
    }
}

/// Appends a variable's initial bytes to an image; returns where they start.
fn append(image: &mut Vec<u8>, variable: &Variable) -> u64 {
    let start = image.len().next_multiple_of(variable.alignment() as usize);
    image.resize(start, 0);
    let width = variable.ty.bytes() as usize;
    for value in &variable.init {
        image.extend_from_slice(&initial_bits(*value, variable.ty).to_le_bytes()[..width]);
    }
    image.resize(start + variable.bytes() as usize, 0);
    start as u64
}

/// A literal as the bits of a variable, which may be wider than any register that holds literals.
fn initial_bits(imm: Imm, ty: ScalarType) -> u128 {
    match (imm, ty) {
        (Imm::Int(value), ScalarType::B128) => i128::from(value) as u128,
        _ => imm_bits(imm, ty).into(),
    }
}

/// A literal as the bits of `ty`.
pub(super) fn imm_bits(imm: Imm, ty: ScalarType) -> u64 {
    match (imm, ty) {
        (Imm::Int(value), ScalarType::F32) => u64::from((value as f32).to_bits()),
        (Imm::Int(value), ScalarType::F64) => (value as f64).to_bits(),
        (Imm::Int(value), _) => value as u64,
        (Imm::F32(bits), ScalarType::F64) => f64::from(f32::from_bits(bits)).to_bits(),
        (Imm::F32(bits), _) => bits.into(),
        (Imm::F64(bits), ScalarType::F32) => u64::from((f64::from_bits(bits) as f32).to_bits()),
        (Imm::F64(bits), _) => bits,
    }
}

/// Slots of the kernel's registers.
#[derive(Clone, Debug)]
pub(super) struct RegisterMap {
    first: BTreeMap<ScalarType, u32>,
    pub(super) counts: RegisterCounts,
}

impl RegisterMap {
    pub(super) fn new(kernel: &Kernel) -> Self {
        let mut map = Self { first: BTreeMap::new(), counts: RegisterCounts::default() };
        for (ty, count) in kernel.registers.types() {
            let (counter, slots) = match ty.bits() {
                1 => (&mut map.counts.predicates, count),
                64 => (&mut map.counts.wide, count),
                128 => (&mut map.counts.wide, 2 * count),
                _ => (&mut map.counts.narrow, count),
            };
            map.first.insert(ty, *counter);
            *counter += slots;
        }
        map
    }

    /// The two slots of a register of 128 bits, lower half first; `None` of another.
    fn halves(&self, operand: &Operand) -> Option<[Reg; 2]> {
        let Operand::Reg(reg) = operand else { return None };
        let first = self.first.get(&reg.ty).filter(|_| reg.ty.bits() == 128)? + 2 * reg.index;
        Some([Reg::Wide(first), Reg::Wide(first + 1)])
    }

    /// The slot of a register; `None` where it is not declared or 128 bits wide.
    pub(super) fn slot(&self, reg: RegId) -> Option<Reg> {
        let slot = self.first.get(&reg.ty)? + reg.index;
        match reg.ty.bits() {
            1 => Some(Reg::Predicate(slot)),
            64 => Some(Reg::Wide(slot)),
            128 => None,
            _ => Some(Reg::Narrow(slot)),
        }
    }
}

/// Why an operand cannot be decoded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum OperandError {
    Undeclared(String),
    Unsupported(String),
}

pub(super) type Decoded<T> = Result<T, OperandError>;

/// A refusal with its reason.
pub(super) fn refuse<T>(reason: impl Into<String>) -> Decoded<T> {
    Err(OperandError::Unsupported(reason.into()))
}

/// What operands are decoded with.
pub(super) struct Context<'a> {
    pub(super) registers: &'a RegisterMap,
    pub(super) layout: &'a Layout,
    pub(super) labels: &'a BTreeMap<String, u32>,
}

impl Context<'_> {
    pub(super) fn reg(&self, operand: &Operand) -> Decoded<Reg> {
        match operand {
            Operand::Reg(reg) => self.slot(*reg),
            other => refuse(format!("{other} is not a register")),
        }
    }

    fn slot(&self, reg: RegId) -> Decoded<Reg> {
        let wide = || OperandError::Unsupported(format!("{} registers", reg.ty));
        self.registers.slot(reg).ok_or_else(wide)
    }

    pub(super) fn dst(&self, operand: &Operand) -> Decoded<Dst> {
        match operand {
            Operand::Sink => Ok(None),
            Operand::Pair(pair) => self.dst(&pair.0),
            other => self.reg(other).map(Some),
        }
    }

    /// The second result of `a|b`.
    pub(super) fn second(&self, operand: &Operand) -> Decoded<Dst> {
        match operand {
            Operand::Pair(pair) => self.dst(&pair.1),
            _ => Ok(None),
        }
    }

    /// A source of type `ty`.
    pub(super) fn src(&self, operand: &Operand, ty: ScalarType) -> Decoded<Src> {
        match operand {
            Operand::Reg(reg) => self.slot(*reg).map(Src::Reg),
            Operand::Not(reg) => match self.slot(*reg)? {
                Reg::Predicate(slot) => Ok(Src::Not(slot)),
                _ => refuse("`!` before a register that is no predicate"),
            },
            Operand::Imm(imm) => Ok(Src::Imm(imm_bits(*imm, ty))),
            Operand::Special(special) => Ok(special_src(*special)),
            Operand::Symbol(name) => self.symbol(name.as_str(), 0),
            // `mov.u32 r, smem+16` is parsed as an address by some printers
            Operand::Address(address) => {
                let addr = self.address_of(address)?;
                match addr.base {
                    Src::Imm(value) => Ok(Src::Imm(value.wrapping_add_signed(addr.offset))),
                    Src::Shared(start) => Ok(Src::Shared(start.wrapping_add_signed(addr.offset as i32))),
                    _ => refuse(format!("{operand} as a value")),
                }
            }
            other => refuse(format!("{other} as a source")),
        }
    }

    /// An integer or predicate source.
    pub(super) fn value(&self, operand: &Operand) -> Decoded<Src> {
        self.src(operand, ScalarType::U64)
    }

    fn symbol(&self, name: &str, offset: i64) -> Decoded<Src> {
        let place = self.layout.place_of(name).ok_or_else(|| OperandError::Undeclared(name.into()))?;
        Ok(match place {
            Place::Shared(start) => Src::Shared(start.wrapping_add_signed(offset as i32)),
            Place::Param(start) | Place::Local(start) => {
                Src::Imm(u64::from(start).wrapping_add_signed(offset))
            }
            Place::Global(start) => {
                Src::Imm((crate::memory::MODULE_GLOBALS + start).wrapping_add_signed(offset))
            }
            Place::Const(start) => Src::Imm(start.wrapping_add_signed(offset)),
        })
    }

    fn address_of(&self, address: &Address) -> Decoded<Addr> {
        let base = match &address.base {
            Base::Reg(reg) => Src::Reg(self.slot(*reg)?),
            Base::Symbol(name) => self.symbol(name.as_str(), 0)?,
            Base::Absolute => Src::Imm(0),
        };
        let narrow = matches!(base, Src::Reg(Reg::Narrow(_)) | Src::Shared(_));
        Ok(Addr { base, offset: address.offset, narrow })
    }

    /// A memory operand.
    pub(super) fn addr(&self, operand: &Operand) -> Decoded<Addr> {
        match operand {
            Operand::Address(address) => self.address_of(address),
            other => refuse(format!("{other} is not an address")),
        }
    }

    /// The elements of `{…}`, or a plain operand as the only one.
    pub(super) fn elements<'o>(&self, operand: &'o Operand) -> &'o [Operand] {
        match operand {
            Operand::Vector(items) => items,
            other => std::slice::from_ref(other),
        }
    }

    pub(super) fn regs(&self, operand: &Operand) -> Decoded<Vec<Reg>> {
        self.elements(operand).iter().map(|o| self.reg(o)).collect()
    }

    /// Destinations; a register of 128 bits is two.
    pub(super) fn dsts(&self, operand: &Operand) -> Decoded<Vec<Dst>> {
        match self.registers.halves(operand) {
            Some(halves) => Ok(halves.map(Some).to_vec()),
            None => self.elements(operand).iter().map(|o| self.dst(o)).collect(),
        }
    }

    /// Sources; a register of 128 bits is two.
    pub(super) fn srcs(&self, operand: &Operand, ty: ScalarType) -> Decoded<Vec<Src>> {
        match self.registers.halves(operand) {
            Some(halves) => Ok(halves.map(Src::Reg).to_vec()),
            None => self.elements(operand).iter().map(|o| self.src(o, ty)).collect(),
        }
    }
}

/// Special registers that are constants of the launch stay special: their values are known to the machine alone.
fn special_src(special: SpecialReg) -> Src {
    Src::Special(special)
}

/// The space that the modifiers name; generic where they name none.
pub(super) fn space_of(mods: &[flashcore_ptx::op::Mod]) -> Space {
    use flashcore_ptx::op::Mod;
    let named = mods.iter().find_map(|m| match m {
        Mod::Global => Some(Space::Global),
        Mod::Shared | Mod::SharedCta => Some(Space::SharedCta),
        Mod::SharedCluster => Some(Space::SharedCluster),
        Mod::Local => Some(Space::Local),
        Mod::Const => Some(Space::Const),
        Mod::Param => Some(Space::Param),
        _ => None,
    });
    named.unwrap_or(Space::Generic)
}
