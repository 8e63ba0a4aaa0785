//! A finished program: PTX, where each instruction came from, and how to launch it for given arguments.
//!
//! Parameters are declared once, with the PTX type and the host's value side by side, so that the two cannot differ.

use std::{fmt, ops::Deref, sync::Arc};

use flashcore_ptx::{
    ident::Ident,
    inst::Operand,
    launch::{LaunchSpec, Param, Slot, TensorMapSpec, Workspace},
    module::{KernelParam, Module},
    op::{Mod, Op},
    provenance::Provenance,
    types::ScalarType,
    verify::{grouped, grouped_messages, verify},
};

use crate::{
    builder::Builder,
    error::{BuildError, Fault, FaultKind},
    scope::Scope,
    tma::TensorMap,
    value::{F32, Reg, Type, U32, U64},
};

type HostValue<A> = Arc<dyn Fn(&A) -> Param + Send + Sync>;

/// The parameters of a kernel whose host side is described by `A`.
pub struct Params<A> {
    values: Vec<HostValue<A>>,
}

impl<A> Default for Params<A> {
    fn default() -> Self {
        Self { values: Vec::new() }
    }
}

impl<A> fmt::Debug for Params<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Params({})", self.values.len())
    }
}

impl<A> Params<A> {
    /// A 32-bit integer.
    #[track_caller]
    pub fn u32(
        &mut self,
        b: &mut Builder,
        name: &str,
        value: impl Fn(&A) -> u32 + Send + Sync + 'static,
    ) -> Reg<U32> {
        self.scalar(b, name, move |a| Param::U32(value(a)))
    }

    /// A 64-bit integer.
    #[track_caller]
    pub fn u64(
        &mut self,
        b: &mut Builder,
        name: &str,
        value: impl Fn(&A) -> u64 + Send + Sync + 'static,
    ) -> Reg<U64> {
        self.scalar(b, name, move |a| Param::U64(value(a)))
    }

    /// A float.
    #[track_caller]
    pub fn f32(
        &mut self,
        b: &mut Builder,
        name: &str,
        value: impl Fn(&A) -> f32 + Send + Sync + 'static,
    ) -> Reg<F32> {
        self.scalar(b, name, move |a| Param::F32(value(a)))
    }

    /// The address of a buffer.
    #[track_caller]
    pub fn buffer(&mut self, b: &mut Builder, name: &str, slot: Slot) -> Reg<U64> {
        self.scalar(b, name, move |_| Param::Buffer(slot))
    }

    /// A tensor map.
    #[track_caller]
    pub fn tensor_map(
        &mut self,
        b: &mut Builder,
        name: &str,
        value: impl Fn(&A) -> TensorMapSpec + Send + Sync + 'static,
    ) -> TensorMap {
        let name = self.declare(b, name, |name| KernelParam::bytes_array(name, 64, 128));
        self.values.push(Arc::new(move |a| Param::TensorMap(value(a))));
        let place = b.fresh::<U64>(Scope::Grid);
        b.emit(Op::Mov, &[Mod::Type(ScalarType::U64)], [place.operand(), Operand::Symbol((&name).into())]);
        let address = b.fresh::<U64>(Scope::Grid);
        b.emit(Op::Cvta, &[Mod::Param, Mod::Type(ScalarType::U64)], [address.operand(), place.operand()]);
        TensorMap { address }
    }

    #[track_caller]
    fn scalar<T: Type>(
        &mut self,
        b: &mut Builder,
        name: &str,
        value: impl Fn(&A) -> Param + Send + Sync + 'static,
    ) -> Reg<T> {
        let name = self.declare(b, name, |name| KernelParam::scalar(name, T::PTX));
        self.values.push(Arc::new(value));
        let [reg] = b.load(&[Mod::Param], Operand::at_symbol(&name, 0), Scope::Grid);
        reg
    }

    #[track_caller]
    fn declare(&mut self, b: &mut Builder, name: &str, param: impl Fn(&Ident) -> KernelParam) -> Ident {
        let checked = match Ident::new(format!("p_{name}")) {
            Ok(checked) => checked,
            Err(bad) => {
                b.fault(FaultKind::Name(bad));
                Ident::new("p_refused").expect("a constant name is legal")
            }
        };
        let param = param(&checked);
        if b.kernel.params.iter().any(|other| other.name == param.name) {
            b.fault(FaultKind::ParameterTwice(name.to_owned()));
        }
        b.kernel.params.push(param);
        checked
    }
}

/// The shape of a launch: what is not a parameter.
#[derive(Clone, PartialEq, Debug)]
pub struct Extent {
    /// CTAs along x, y, z.
    pub grid: [u32; 3],
    /// Memory that belongs to the launch.
    pub workspace: Vec<Workspace>,
    /// Whether the kernel may start before its predecessor has ended.
    pub dependent: bool,
}

/// A kernel as it ships, whatever its arguments.
#[derive(Clone, Debug)]
pub struct Code {
    entry: Ident,
    module: Module,
    text: String,
    provenance: Provenance,
    threads: u32,
    cluster: [u32; 3],
    shared_bytes: u32,
}

/// A kernel that can be launched for any arguments `A`.
#[derive(Clone)]
pub struct Program<A> {
    code: Code,
    values: Vec<HostValue<A>>,
}

impl<A> fmt::Debug for Program<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Program({})", self.code.entry)
    }
}

impl<A> Deref for Program<A> {
    type Target = Code;

    fn deref(&self) -> &Code {
        &self.code
    }
}

impl Code {
    /// The kernel's name.
    pub const fn entry(&self) -> &Ident {
        &self.entry
    }

    /// The program as data.
    pub const fn module(&self) -> &Module {
        &self.module
    }

    /// The program as text: exactly what ships.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The Rust line that built each statement of the kernel; beside the text, so that moving a line changes no hash.
    pub const fn provenance(&self) -> &Provenance {
        &self.provenance
    }

    /// Dynamic shared memory of a CTA in bytes.
    pub const fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }

    /// Threads of a CTA.
    pub const fn threads(&self) -> u32 {
        self.threads
    }
}

impl<A> Program<A> {
    /// The launch for given arguments.
    pub fn launch(&self, args: &A, extent: Extent) -> LaunchSpec {
        LaunchSpec {
            entry: self.code.entry.clone(),
            grid: extent.grid,
            block: [self.code.threads, 1, 1],
            cluster: self.code.cluster,
            shared_bytes: self.code.shared_bytes,
            dependent: extent.dependent,
            params: self.values.iter().map(|value| value(args)).collect(),
            workspace: extent.workspace,
        }
    }
}

impl Builder {
    /// Ends the kernel: a program, or every fault with its Rust line.
    #[track_caller]
    pub fn finish<A>(mut self, name: &Ident, params: Params<A>) -> Result<Program<A>, BuildError> {
        self.exit();
        self.check_interface(name, params.values.len());
        let mut module = self.module();
        module.version = module.lowest_version();
        let provenance = self.provenance();
        let mut faults = grouped_messages(self.faults.iter().map(Fault::said));
        if faults.is_empty() {
            faults = grouped(&verify(&module, &provenance));
        }
        if !faults.is_empty() {
            return Err(BuildError { kernel: name.to_string(), faults });
        }
        let code = Code {
            entry: name.clone(),
            text: module.to_string(),
            module,
            provenance,
            threads: self.threads,
            cluster: self.kernel.directives.required_cluster.unwrap_or([1, 1, 1]),
            shared_bytes: self.shared_bytes,
        };
        Ok(Program { code, values: params.values })
    }

    /// The program's name and arguments must be those with which the kernel was built.
    #[track_caller]
    fn check_interface(&mut self, name: &Ident, values: usize) {
        let (built, declared) = (self.kernel.name.clone(), self.kernel.params.len());
        if built.as_str() != name.as_str() || declared != values {
            let built = built.to_string();
            self.fault(FaultKind::Interface { built, declared, name: name.to_string(), values });
        }
    }

    fn provenance(&self) -> Provenance {
        let mut provenance = Provenance::default();
        for (statement, line) in self.lines.iter().enumerate() {
            provenance.record(0, statement, line.file(), line.line());
        }
        provenance
    }
}
