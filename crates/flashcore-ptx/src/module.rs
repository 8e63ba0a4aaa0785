//! A PTX file as data: header, variables, functions, kernels. Built by `flashcore-tile` and by the parser; input of the
//! printer, the verifier and the simulator.

pub use crate::function::{Function, TargetList, Targets};

use crate::{
    ident::{Ident, Name},
    inst::{Guard, Imm, Inst, RegId},
    provenance::Unit,
    target::Target,
    types::ScalarType,
    version::Version,
};
use std::collections::BTreeMap;

/// A whole PTX file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Module {
    /// The language version it declares.
    pub version: Version,
    /// The architecture it is for.
    pub target: Target,
    /// Variables outside of kernels.
    pub variables: Vec<Variable>,
    /// Functions that kernels call, in order.
    pub functions: Vec<Function>,
    /// The kernels, in order.
    pub kernels: Vec<Kernel>,
}

/// A kernel: `.visible .entry`. A function has the same parts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Kernel {
    /// The name the host knows.
    pub name: Name,
    /// The parameters, in order.
    pub params: Vec<KernelParam>,
    /// What a function returns; a kernel returns nothing.
    pub returns: Vec<KernelParam>,
    /// What the kernel tells the compiler about its launch.
    pub directives: Directives,
    /// The registers.
    pub registers: Registers,
    /// Variables inside the kernel.
    pub variables: Vec<Variable>,
    /// Lists that indirect branches and calls name.
    pub targets: Vec<Targets>,
    /// Labels and instructions.
    pub body: Vec<Statement>,
}

/// One parameter of a kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KernelParam {
    /// Its name.
    pub name: Name,
    /// Its type, or that of its elements.
    pub ty: ScalarType,
    /// Declared alignment in bytes.
    pub align: Option<u32>,
    /// Number of elements, for arrays such as a tensor map.
    pub len: Option<u32>,
}

/// What a kernel tells the compiler about its launch.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Directives {
    /// `.maxntid`: most threads of a CTA.
    pub max_threads: Option<[u32; 3]>,
    /// `.reqntid`: exactly that many threads.
    pub required_threads: Option<[u32; 3]>,
    /// `.minnctapersm`: CTAs that must fit on one SM.
    pub min_ctas_per_sm: Option<u32>,
    /// `.maxnreg`: most registers of a thread.
    pub max_registers: Option<u32>,
    /// `.explicitcluster`: only launched with clusters.
    pub explicit_cluster: bool,
    /// `.reqnctapercluster`: exactly that many CTAs in a cluster.
    pub required_cluster: Option<[u32; 3]>,
    /// `.maxclusterrank`: most CTAs in a cluster.
    pub max_cluster_rank: Option<u32>,
}

/// Where a variable lives.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Space {
    /// Global memory.
    Global,
    /// Shared memory of the CTA.
    Shared,
    /// Constant memory.
    Const,
    /// Memory of one thread.
    Local,
    /// Arguments and results of a call, inside a kernel or function.
    Param,
}

/// Who else sees a variable.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Linkage {
    /// This module alone.
    Private,
    /// `.visible`.
    Visible,
    /// `.extern`: defined elsewhere; for shared memory, sized at launch.
    Extern,
    /// `.weak`.
    Weak,
}

/// A variable.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Variable {
    /// Who sees it.
    pub linkage: Linkage,
    /// Where it lives.
    pub space: Space,
    /// Declared alignment in bytes.
    pub align: Option<u32>,
    /// Type of an element.
    pub ty: ScalarType,
    /// Its name.
    pub name: Name,
    /// Scalar, array or array sized elsewhere.
    pub len: Length,
    /// Initial values, in order; missing ones are zero.
    pub init: Vec<Initial>,
}

/// An initial value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Initial {
    /// A number.
    Value(Imm),
    /// The address of a variable or function.
    Address {
        /// Whose.
        name: Name,
        /// Bytes added.
        offset: i64,
        /// Whether it is an address of the generic space: `generic(name)`.
        generic: bool,
    },
}

/// How many elements a variable has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Length {
    /// One.
    Scalar,
    /// That many.
    Array(u64),
    /// Decided at launch: `[]`.
    Unsized,
}

/// A label or an instruction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Statement {
    /// `name:`
    Label(Name),
    /// An instruction.
    Inst(Inst),
    /// An instruction that the table lacks; only [`parse_lenient`](crate::parse::parse_lenient) keeps them.
    Unknown(Unknown),
}

/// An instruction that has no row of the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unknown {
    /// The predicate it executes under.
    pub guard: Option<Guard>,
    /// Its text behind the guard, without a semicolon.
    pub text: String,
    /// Its line in the text, from 1.
    pub line: u32,
    /// What the parser has to say about it.
    pub reason: String,
    /// Whether its name is in the table and its operands are wrong: then the text is at fault, not the table.
    pub invalid: bool,
}

/// The registers of a kernel: how many of each type, and foreign names where there are any.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Registers {
    /// In order of type.
    counts: Vec<(ScalarType, u32)>,
    names: BTreeMap<RegId, Name>,
}

impl Module {
    /// An empty module for `target`, in the lowest language version that knows it.
    pub fn new(target: Target) -> Self {
        Self::with_version(Version::of_target(target), target)
    }

    /// An empty module for `target` in that language version.
    pub const fn with_version(version: Version, target: Target) -> Self {
        Self { version, target, variables: Vec::new(), functions: Vec::new(), kernels: Vec::new() }
    }

    /// Everything with a body: kernels, then functions.
    pub fn units(&self) -> impl Iterator<Item = (Unit, &Kernel)> {
        let kernels = self.kernels.iter().enumerate().map(|(i, kernel)| (Unit::Kernel(i), kernel));
        let defined = self.functions.iter().enumerate().filter(|(_, function)| function.defined);
        kernels.chain(defined.map(|(i, function)| (Unit::Function(i), &function.code)))
    }

    /// The kernel of that name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|k| k.name.as_str() == name)
    }
}

impl Kernel {
    /// A kernel without parameters, registers or code.
    pub fn new(name: &Ident) -> Self {
        Self::empty(name.into())
    }

    /// Like [`new`](Self::new), under any name PTX allows.
    pub fn empty(name: Name) -> Self {
        Self {
            name,
            params: Vec::new(),
            returns: Vec::new(),
            directives: Directives::default(),
            registers: Registers::default(),
            variables: Vec::new(),
            targets: Vec::new(),
            body: Vec::new(),
        }
    }

    /// The instructions with their statement index.
    pub fn instructions(&self) -> impl Iterator<Item = (usize, &Inst)> {
        self.body.iter().enumerate().filter_map(|(i, s)| match s {
            Statement::Inst(inst) => Some((i, inst)),
            Statement::Label(_) | Statement::Unknown(_) => None,
        })
    }

    /// The parameter of that name.
    pub fn param(&self, name: &str) -> Option<&KernelParam> {
        self.params.iter().find(|p| p.name.as_str() == name)
    }

    /// Byte offset of each parameter in the parameter block, and the block's size.
    pub fn param_layout(&self) -> (Vec<u32>, u32) {
        let mut end = 0u32;
        let offset = |p: &KernelParam| {
            let start = end.next_multiple_of(p.alignment());
            end = start.saturating_add(p.bytes());
            start
        };
        let offsets = self.params.iter().map(offset).collect();
        (offsets, end)
    }
}

impl Directives {
    /// Most threads of a CTA, if the kernel says.
    pub fn most_threads(&self) -> Option<u64> {
        let threads = self.required_threads.or(self.max_threads)?;
        Some(threads.iter().map(|&n| u64::from(n)).fold(1, u64::saturating_mul))
    }
}

impl KernelParam {
    /// A scalar parameter.
    pub fn scalar(name: &Ident, ty: ScalarType) -> Self {
        Self { name: name.into(), ty, align: None, len: None }
    }

    /// A byte array, such as a tensor map.
    pub fn bytes_array(name: &Ident, align: u32, len: u32) -> Self {
        Self { name: name.into(), ty: ScalarType::B8, align: Some(align), len: Some(len) }
    }

    /// Its size.
    pub fn bytes(&self) -> u32 {
        self.ty.bytes().saturating_mul(self.len.unwrap_or(1))
    }

    /// Its alignment, declared or natural.
    pub fn alignment(&self) -> u32 {
        self.align.unwrap_or(self.ty.bytes()).max(1)
    }
}

impl Variable {
    /// Its size; 0 where it is decided at launch.
    pub fn bytes(&self) -> u64 {
        let count = match self.len {
            Length::Scalar => 1,
            Length::Array(n) => n,
            Length::Unsized => 0,
        };
        count.saturating_mul(self.ty.bytes().into())
    }

    /// Its alignment, declared or natural.
    pub fn alignment(&self) -> u32 {
        self.align.unwrap_or(self.ty.bytes()).max(1)
    }
}

impl Registers {
    /// A new register.
    pub fn add(&mut self, ty: ScalarType) -> RegId {
        let count = self.count_mut(ty);
        *count += 1;
        RegId { ty, index: *count - 1 }
    }

    /// Several new registers with consecutive numbers.
    pub fn add_many(&mut self, ty: ScalarType, count: u32) -> impl Iterator<Item = RegId> + use<> {
        let entry = self.count_mut(ty);
        let first = *entry;
        *entry = first.saturating_add(count);
        (first..*entry).map(move |index| RegId { ty, index })
    }

    /// A new register that is printed as `name`.
    pub fn add_named(&mut self, ty: ScalarType, name: Name) -> RegId {
        let reg = self.add(ty);
        if derived_name(reg) != name.as_str() {
            self.names.insert(reg, name);
        }
        reg
    }

    fn count_mut(&mut self, ty: ScalarType) -> &mut u32 {
        let at = self.counts.binary_search_by_key(&ty, |&(known, _)| known).unwrap_or_else(|at| {
            self.counts.insert(at, (ty, 0));
            at
        });
        &mut self.counts[at].1
    }

    /// How many registers of the type there are.
    pub fn count(&self, ty: ScalarType) -> u32 {
        self.counts.iter().find(|(known, _)| *known == ty).map_or(0, |&(_, n)| n)
    }

    /// How many registers there are.
    pub fn len(&self) -> usize {
        self.counts.iter().map(|&(_, n)| n as usize).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Types with their number of registers.
    pub fn types(&self) -> impl Iterator<Item = (ScalarType, u32)> {
        self.counts.iter().copied().filter(|&(_, n)| n > 0)
    }

    /// Every register, by type and number.
    pub fn iter(&self) -> impl Iterator<Item = RegId> {
        self.types().flat_map(|(ty, n)| (0..n).map(move |index| RegId { ty, index }))
    }

    /// Whether the register is declared.
    pub fn contains(&self, reg: RegId) -> bool {
        reg.index < self.count(reg.ty)
    }

    /// The place of the register in [`iter`](Self::iter)'s order: a dense index for a register file.
    pub fn dense(&self, reg: RegId) -> usize {
        let before: u32 = self.counts.iter().take_while(|(ty, _)| *ty < reg.ty).map(|(_, n)| n).sum();
        (before + reg.index) as usize
    }

    /// Whether any register of the type has its own name.
    pub fn has_names(&self, ty: ScalarType) -> bool {
        let range = RegId::new(ty, 0)..=RegId::new(ty, u32::MAX);
        self.names.range(range).next().is_some()
    }

    /// The text of a register.
    pub fn name(&self, reg: RegId) -> String {
        self.names.get(&reg).map_or_else(|| derived_name(reg), ToString::to_string)
    }
}

/// The text of a register without its own name.
pub fn derived_name(reg: RegId) -> String {
    format!("{}{}", reg.ty.register_prefix(), reg.index)
}
