//! Operands become slots and numbers here; variables and parameters get their addresses.

use super::{
    RegisterCounts,
    routine::{find, function_address},
    uop::{Addr, Dst, Piece, Reg, Space, Src},
};
use crate::memory::{CONST_WINDOW, MODULE_GLOBALS, SHARED_WINDOW};
use flashcore_ptx::{
    inst::{Address, Base, Imm, Operand, RegId},
    module::{Initial, Kernel, KernelParam, Length, Module, Space as VarSpace, Variable},
    op::Mod,
    types::{ScalarType, SpecialReg},
};
use std::collections::BTreeMap;

/// Where a CTA's own shared memory starts; the first KiB belongs to the system, as on sm_90.
pub(crate) const SHARED_BASE: u32 = 1024;
/// What kernels that ask for the system's part of shared memory (`%reserved_smem_offset_…`) get of it.
pub(crate) const RESERVED_BYTES: u32 = 1024;
/// What a thread may take of its stack by `alloca`.
const ALLOCA_BYTES: u32 = 64 * 1024;

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

/// Names of one body, with what lies in the frames of its threads.
#[derive(Clone, Default, Debug)]
pub(super) struct Scope {
    /// Where each lies, and how many bytes it has.
    places: BTreeMap<String, (Place, u32)>,
    /// Bytes of a frame.
    pub(super) frame_bytes: u32,
    /// Whether frames begin anywhere: those of a kernel begin at 0.
    is_function: bool,
}

/// Frames begin at multiples of this.
pub(super) const FRAME_ALIGN: u32 = 16;

impl Scope {
    /// Gives bytes of the frame to a name.
    fn push(&mut self, name: String, align: u32, bytes: u32) {
        let start = self.frame_bytes.next_multiple_of(align);
        self.places.insert(name, (Place::Local(start), bytes));
        self.frame_bytes = start.saturating_add(bytes);
    }

    fn push_params(&mut self, params: &[KernelParam]) -> Vec<Piece> {
        let piece = |param: &KernelParam| {
            self.push(param.name.to_string(), param.alignment(), param.bytes());
            Piece { offset: self.frame_bytes - param.bytes(), bytes: param.bytes() }
        };
        params.iter().map(piece).collect()
    }
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
    /// Bytes of it at its start that are the system's: zeros that the kernel may use.
    pub(crate) reserved_shared: u32,
    /// Bytes of local memory of each thread.
    pub(crate) local_bytes: u32,
    /// Where those begin that `alloca` gives away.
    pub(crate) alloca_base: u32,
    /// Initial image of module-scope global variables, at [`crate::memory::MODULE_GLOBALS`].
    pub(crate) globals: Vec<u8>,
    /// Initial image of constant memory.
    pub(crate) constants: Vec<u8>,
}

impl Layout {
    /// Assigns addresses to the module's and the kernel's variables. Variables without a size come last.
    pub(super) fn new(
        module: &Module,
        kernel: &Kernel,
        functions: &[usize],
    ) -> (Self, Scope, Vec<FunctionScope>) {
        let (param_offsets, param_bytes) = kernel.param_layout();
        let mut layout = Self { param_bytes, param_offsets, ..Self::default() };
        let bodies = || std::iter::once(kernel).chain(functions.iter().map(|&i| &module.functions[i].code));
        if bodies().any(uses_reserved) {
            layout.reserved_shared = RESERVED_BYTES;
            layout.static_shared = RESERVED_BYTES;
        }
        let is_fixed = |v: &&Variable| v.len != Length::Unsized;
        let (fixed, dynamic): (Vec<_>, Vec<_>) = module.variables.iter().partition(is_fixed);
        fixed.into_iter().for_each(|v| layout.place_global(v));
        let mut scope = Scope::default();
        for (param, &offset) in kernel.params.iter().zip(&layout.param_offsets) {
            scope.places.insert(param.name.to_string(), (Place::Param(offset), param.bytes()));
        }
        kernel.variables.iter().filter(is_fixed).for_each(|v| layout.place(&mut scope, v));
        let function = |&index: &usize| layout.function(&module.functions[index].code);
        let functions = functions.iter().map(function).collect();
        dynamic.into_iter().for_each(|v| layout.place_global(v));
        kernel.variables.iter().filter(|v| !is_fixed(v)).for_each(|v| layout.place(&mut scope, v));
        layout.relocate(module);
        (layout, scope, functions)
    }

    fn function(&mut self, code: &Kernel) -> FunctionScope {
        let mut scope = Scope { is_function: true, ..Scope::default() };
        let params = scope.push_params(&code.params);
        let result = scope.push_params(&code.returns).first().copied();
        code.variables.iter().for_each(|v| self.place(&mut scope, v));
        scope.frame_bytes = scope.frame_bytes.next_multiple_of(FRAME_ALIGN);
        FunctionScope { scope, params, result }
    }

    /// Gives threads a stack of that size, and behind it what `alloca` may take.
    pub(super) fn set_stack(&mut self, bytes: u32, allocates: bool) {
        self.alloca_base = bytes.next_multiple_of(FRAME_ALIGN);
        self.local_bytes = if allocates { self.alloca_base + ALLOCA_BYTES } else { bytes };
    }

    /// Where `name`, a variable of the module, lies.
    fn place_of(&self, name: &str) -> Option<Place> {
        self.places.get(name).copied()
    }

    fn place_global(&mut self, variable: &Variable) {
        let mut scope = Scope::default();
        self.place(&mut scope, variable);
        let named = scope.places.into_iter().map(|(name, (place, _))| (name, place));
        self.places.extend(named);
    }

    fn place(&mut self, scope: &mut Scope, variable: &Variable) {
        let (align, bytes) = (variable.alignment(), variable.bytes() as u32);
        let place = match variable.space {
            VarSpace::Shared => {
                let start = (SHARED_BASE + self.static_shared).next_multiple_of(align);
                self.static_shared = start - SHARED_BASE + bytes;
                Place::Shared(start)
            }
            VarSpace::Local | VarSpace::Param => {
                return scope.push(variable.name.to_string(), align, bytes);
            }
            VarSpace::Global => Place::Global(append(&mut self.globals, variable)),
            VarSpace::Const => Place::Const(append(&mut self.constants, variable)),
        };
        scope.places.insert(variable.name.to_string(), (place, bytes));
    }

    /// Fills in addresses among the initial values, once everything has its place.
    fn relocate(&mut self, module: &Module) {
        for variable in &module.variables {
            let place = self.place_of(variable.name.as_str());
            let (Some(Place::Global(start) | Place::Const(start)), width) =
                (place, variable.ty.bytes() as usize)
            else {
                continue;
            };
            for (i, value) in variable.init.iter().enumerate() {
                let Initial::Address { name, offset, generic } = value else { continue };
                let address = self.address(module, name.as_str(), *generic).wrapping_add_signed(*offset);
                let image =
                    if variable.space == VarSpace::Const { &mut self.constants } else { &mut self.globals };
                let at = start as usize + i * width;
                if let Some(bytes) = image.get_mut(at..at + width.min(8)) {
                    bytes.copy_from_slice(&address.to_le_bytes()[..width.min(8)]);
                }
            }
        }
    }

    /// The address of a variable or function of the module; 0 where there is none.
    fn address(&self, module: &Module, name: &str, generic: bool) -> u64 {
        let window = |window: u64, offset: u64| if generic { window + offset } else { offset };
        match self.place_of(name) {
            Some(Place::Global(start)) => MODULE_GLOBALS + start,
            Some(Place::Const(start)) => window(CONST_WINDOW, start),
            Some(Place::Shared(start)) => window(SHARED_WINDOW, start.into()),
            Some(Place::Local(_) | Place::Param(_)) => 0,
            None => find(module, name).map_or(0, function_address),
        }
    }
}

/// Whether a body asks where the system's part of shared memory is.
fn uses_reserved(code: &Kernel) -> bool {
    use SpecialReg as S;
    let asks = |operand: &Operand| {
        let Operand::Special(special) = operand else { return false };
        matches!(
            special,
            S::ReservedSmemBegin
                | S::ReservedSmemEnd
                | S::ReservedSmemCap
                | S::ReservedSmem0
                | S::ReservedSmem1
        )
    };
    code.instructions().any(|(_, inst)| inst.operands.iter().any(asks))
}

/// Names of a function, and where its arguments and its result lie in its frame.
#[derive(Debug)]
pub(super) struct FunctionScope {
    pub(super) scope: Scope,
    pub(super) params: Vec<Piece>,
    pub(super) result: Option<Piece>,
}

/// Appends a variable's initial bytes to an image; returns where they start.
fn append(image: &mut Vec<u8>, variable: &Variable) -> u64 {
    let start = image.len().next_multiple_of(variable.alignment() as usize);
    image.resize(start, 0);
    let width = variable.ty.bytes() as usize;
    for value in &variable.init {
        let bits = if let Initial::Value(imm) = value { initial_bits(*imm, variable.ty) } else { 0 };
        image.extend_from_slice(&bits.to_le_bytes()[..width]);
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
    /// Slots behind those that `counts` are taken.
    pub(super) fn after(counts: RegisterCounts, kernel: &Kernel) -> Self {
        let mut map = Self { first: BTreeMap::new(), counts };
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
    /// No assembler accepts it.
    Invalid(String),
}

pub(super) type Decoded<T> = Result<T, OperandError>;

/// A refusal with its reason.
pub(super) fn refuse<T>(reason: impl Into<String>) -> Decoded<T> {
    Err(OperandError::Unsupported(reason.into()))
}

/// The same for what no assembler accepts.
pub(super) fn invalid<T>(reason: impl Into<String>) -> Decoded<T> {
    Err(OperandError::Invalid(reason.into()))
}

/// What operands are decoded with.
pub(super) struct Context<'a> {
    pub(super) module: &'a Module,
    /// Functions of the program, by index in the module.
    pub(super) routines: &'a [usize],
    pub(super) registers: &'a RegisterMap,
    pub(super) layout: &'a Layout,
    pub(super) scope: &'a Scope,
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
                _ => refuse("`!` before a register that is not a predicate"),
            },
            Operand::Imm(imm) => Ok(Src::Imm(imm_bits(*imm, ty))),
            Operand::Special(special) => Ok(special_src(*special)),
            Operand::Symbol(name) => self.symbol(name.as_str(), 0),
            Operand::Offset(name, offset) => self.symbol(name.as_str(), *offset),
            other => refuse(format!("{other} as a source")),
        }
    }

    /// An integer or predicate source.
    pub(super) fn value(&self, operand: &Operand) -> Decoded<Src> {
        self.src(operand, ScalarType::U64)
    }

    /// Where `name` lies and how many bytes it has; of the module's variables the size is not kept.
    pub(super) fn place_of(&self, name: &str) -> Option<(Place, u32)> {
        let global = || self.layout.place_of(name).map(|place| (place, 0));
        self.scope.places.get(name).copied().or_else(global)
    }

    fn symbol(&self, name: &str, offset: i64) -> Decoded<Src> {
        let Some((place, _)) = self.place_of(name) else {
            let function = find(self.module, name).ok_or_else(|| OperandError::Undeclared(name.into()))?;
            return Ok(Src::Imm(function_address(function).wrapping_add_signed(offset)));
        };
        Ok(match place {
            Place::Shared(start) => Src::Shared(start.wrapping_add_signed(offset as i32)),
            Place::Local(start) if self.scope.is_function => {
                Src::Frame(start.wrapping_add_signed(offset as i32))
            }
            Place::Param(start) | Place::Local(start) => {
                Src::Imm(u64::from(start).wrapping_add_signed(offset))
            }
            Place::Global(start) => Src::Imm((MODULE_GLOBALS + start).wrapping_add_signed(offset)),
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

    /// The space that an access to `operand` means: what a call passes and returns lies in the thread's frame.
    pub(super) fn space_of(&self, mods: &[Mod], operand: &Operand) -> Space {
        let in_frame = match operand {
            Operand::Address(Address { base: Base::Symbol(name), .. }) | Operand::Symbol(name) => {
                matches!(self.place_of(name.as_str()), Some((Place::Local(_), _)))
            }
            _ => self.scope.is_function,
        };
        match space_of(mods) {
            Space::Param if in_frame => Space::Local,
            named => named,
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
pub(super) fn space_of(mods: &[Mod]) -> Space {
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
