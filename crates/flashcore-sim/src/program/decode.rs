//! From the instructions of a kernel to a [`Program`]: resolves labels, decodes each statement, names unsupported ones.

use super::{
    Code, Origin, Program, RegisterCounts, call, carry, control, convert, copy, float, half, integer, logic,
    matrix, memory,
    operand::{Context, Decoded, FunctionScope, Layout, OperandError, RegisterMap, Scope, refuse},
    routine::{CallGraph, Routine},
    sync,
    uop::{LaneFn, Lanes, Reg, Uop},
    wmma,
};
use crate::error::SimError;
use flashcore_ptx::{
    inst::{Guard, Inst, Operand},
    module::{Kernel, Module, Space, Statement, Unknown},
    op::Op,
    provenance::{Provenance, Unit},
    table::Class,
    types::{ScalarType, SpecialReg, TypeKind},
};
use std::{array::from_fn, collections::BTreeMap};

/// Most bytes of the variables of a space.
const MOST_BYTES: u64 = 1 << 28;
/// Most bytes of local variables: what a thread may have.
const MOST_LOCAL: u64 = 512 * 1024;
/// Most registers that a kernel may declare.
const MOST_REGISTERS: u64 = 1 << 18;

impl Program {
    /// Decodes the kernel `entry` of `module`.
    pub(crate) fn decode(
        module: &Module,
        provenance: Option<&Provenance>,
        entry: &str,
    ) -> Result<Self, SimError> {
        let kernel = module.kernel(entry).ok_or_else(|| no_kernel(module, entry))?;
        check_sizes(module, kernel)?;
        let graph = CallGraph::new(module);
        let functions = graph.reachable(kernel);
        for &index in &functions {
            check_sizes(module, &module.functions[index].code)?;
        }
        let (mut layout, scope, scopes) = Layout::new(module, kernel, &functions);
        let frames: Vec<_> = scopes.iter().map(|s| s.scope.frame_bytes).collect();
        let bodies = || std::iter::once(kernel).chain(functions.iter().map(|&i| &module.functions[i].code));
        let allocates = bodies().any(|code| code.instructions().any(|(_, inst)| inst.op == Op::Alloca));
        let cooperative = bodies().any(|code| code.instructions().any(|(_, inst)| asks_for_grid(inst)));
        layout.set_stack(graph.stack_bytes(&functions, &frames, scope.frame_bytes), allocates);
        let index = module.kernels.iter().position(|k| k.name.as_str() == entry).unwrap_or(0);
        let mut decoder = Decoder::new(module, provenance, &functions, &layout);
        for (number, function) in scopes.into_iter().enumerate() {
            decoder.routine(&graph, number, function)?;
        }
        let entry = decoder.code.len() as u32;
        decoder.body(Unit::Kernel(index), kernel, &scope, None)?;
        let Decoder { code, origins, registers, routines, .. } = decoder;
        let kernel = kernel.name.to_string();
        Ok(Self { kernel, code, origins, registers, entry, routines, layout, cooperative })
    }
}

/// Whether an instruction reads where the barrier of the grid is.
fn asks_for_grid(inst: &Inst) -> bool {
    inst.operands
        .iter()
        .any(|operand| matches!(operand, Operand::Special(SpecialReg::Envreg1 | SpecialReg::Envreg2)))
}

/// A program in the making.
struct Decoder<'a> {
    module: &'a Module,
    /// Lines of its statements, where known.
    provenance: Option<&'a Provenance>,
    functions: &'a [usize],
    layout: &'a Layout,
    code: Vec<Code>,
    origins: Vec<Origin>,
    registers: RegisterCounts,
    routines: Vec<Routine>,
}

impl<'a> Decoder<'a> {
    fn new(
        module: &'a Module,
        provenance: Option<&'a Provenance>,
        functions: &'a [usize],
        layout: &'a Layout,
    ) -> Self {
        let (code, origins, routines) = (Vec::new(), Vec::new(), Vec::new());
        let registers = RegisterCounts::default();
        Self { module, provenance, functions, layout, code, origins, registers, routines }
    }

    /// A statement in words: its line, or its number where lines are not known.
    fn place(&self, unit: Unit, statement: usize) -> String {
        let line = self.provenance.and_then(|table| table.location(unit, statement));
        line.map_or_else(|| format!("statement {statement}"), |line| line.to_string())
    }

    /// Decodes the function with that number among those of the program.
    fn routine(
        &mut self,
        graph: &CallGraph<'_>,
        number: usize,
        scope: FunctionScope,
    ) -> Result<(), SimError> {
        let function = self.functions[number];
        let code = &self.module.functions[function].code;
        let (entry, before) = (self.code.len() as u32, self.registers);
        self.body(Unit::Function(function), code, &scope.scope, Some(number))?;
        // Control that reaches the end of a function returns.
        self.code.push(Code { guard: None, uop: Uop::Return { routine: number } });
        let (unit, statement) = (Unit::Function(function), code.body.len());
        self.origins.push(Origin {
            unit,
            statement,
            class: Class::Control,
            text: "the end of the function".into(),
        });
        self.routines.push(Routine {
            function,
            name: code.name.to_string(),
            entry,
            params: scope.params,
            result: scope.result,
            registers: (before, self.registers),
            recursive: graph.is_recursive(function),
        });
        Ok(())
    }

    fn body(
        &mut self,
        unit: Unit,
        kernel: &Kernel,
        scope: &Scope,
        routine: Option<usize>,
    ) -> Result<(), SimError> {
        let registers = RegisterMap::after(self.registers, kernel);
        self.registers = registers.counts;
        let labels = labels_of(kernel, self.code.len() as u32);
        let cx = Context {
            module: self.module,
            routines: self.functions,
            registers: &registers,
            layout: self.layout,
            scope,
            labels: &labels,
        };
        for (statement, inst) in kernel.body.iter().enumerate() {
            let (code, class, text) = match inst {
                Statement::Label(_) => continue,
                Statement::Unknown(inst) => (unknown(&cx, kernel, inst), Class::Control, inst.text.clone()),
                Statement::Inst(inst) => {
                    let fail = |error| explain(kernel, self.place(unit, statement), inst, error);
                    let form = inst.form().or_else(|e| refuse(e.to_string())).map_err(fail)?;
                    let uop = match (inst.op, routine) {
                        (Op::Ret, Some(routine)) => Ok(Uop::Return { routine }),
                        (Op::BrxIdx, _) => call::branch_to(&cx, kernel, inst),
                        _ => uop(&cx, inst),
                    };
                    let guard = guard(&cx, inst.guard).map_err(fail)?;
                    let uop = postponed(uop.map_err(fail))?;
                    (Code { guard, uop }, form.row.class, inst.to_string())
                }
            };
            self.code.push(code);
            self.origins.push(Origin { unit, statement, class, text });
        }
        Ok(())
    }
}

/// What cannot be simulated fails where it is executed: most launches never get there.
fn postponed(uop: Result<Uop, SimError>) -> Result<Uop, SimError> {
    match uop {
        Err(error @ (SimError::Unsupported { .. } | SimError::Invalid { .. })) => {
            Ok(Uop::Refused(Box::new(error)))
        }
        other => other,
    }
}

/// An instruction that the table lacks. Its guard was read where it could be, and else holds.
fn unknown(cx: &Context<'_>, kernel: &Kernel, inst: &Unknown) -> Code {
    let (kernel, line) = (kernel.name.to_string(), inst.line);
    let (text, reason) = (inst.text.clone(), inst.reason.clone());
    let error = match inst.invalid {
        true => SimError::Invalid { kernel, place: format!("line {line}"), text, reason },
        false => SimError::Unknown { kernel, line, text, reason },
    };
    Code { guard: guard(cx, inst.guard).unwrap_or(None), uop: Uop::Refused(Box::new(error)) }
}

/// Refuses declarations that the hardware could not hold, before anything is allocated for them.
fn check_sizes(module: &Module, kernel: &Kernel) -> Result<(), SimError> {
    let check = |what: &str, bytes: u64, most: u64| {
        let reason = || format!("{bytes} bytes of {what}; the simulator takes at most {most}");
        let fail = || SimError::Geometry { kernel: kernel.name.to_string(), reason: reason() };
        if bytes > most { Err(fail()) } else { Ok(()) }
    };
    for (space, what, most) in [
        (Space::Shared, "shared variables", MOST_BYTES),
        (Space::Local, "local variables", MOST_LOCAL),
        (Space::Param, "arguments of calls", MOST_LOCAL),
        (Space::Global, "global variables", MOST_BYTES),
        (Space::Const, "constants", MOST_BYTES),
    ] {
        let variables = module.variables.iter().chain(&kernel.variables).filter(|v| v.space == space);
        // Each with what may lie unused before it.
        let bytes = variables.map(|v| v.bytes().saturating_add((v.alignment() - 1).into()));
        check(what, bytes.fold(0, u64::saturating_add), most)?;
    }
    const REGISTER_BYTES: u64 = 128;
    let registers = kernel.registers.len() as u64;
    check("registers", registers * REGISTER_BYTES, MOST_REGISTERS * REGISTER_BYTES)
}

fn no_kernel(module: &Module, entry: &str) -> SimError {
    let names: Vec<_> = module.kernels.iter().map(|k| k.name.as_str()).collect();
    SimError::NoKernel(entry.into(), names.join(", "))
}

/// The program counter behind each label of a body that begins at `start`.
fn labels_of(kernel: &Kernel, start: u32) -> BTreeMap<String, u32> {
    let (mut labels, mut pc) = (BTreeMap::new(), start);
    for statement in &kernel.body {
        match statement {
            Statement::Label(name) => drop(labels.insert(name.to_string(), pc)),
            Statement::Inst(_) | Statement::Unknown(_) => pc += 1,
        }
    }
    labels
}

fn explain(kernel: &Kernel, place: String, inst: &Inst, error: OperandError) -> SimError {
    let (kernel, text) = (kernel.name.to_string(), inst.to_string());
    match error {
        OperandError::Undeclared(name) => SimError::Undeclared { kernel, place, name },
        OperandError::Unsupported(reason) => SimError::Unsupported { kernel, place, text, reason },
        OperandError::Invalid(reason) => SimError::Invalid { kernel, place, text, reason },
    }
}

fn guard(cx: &Context<'_>, guard: Option<Guard>) -> Decoded<Option<(u32, bool)>> {
    let Some(guard) = guard else { return Ok(None) };
    match cx.registers.slot(guard.reg) {
        Some(Reg::Predicate(slot)) => Ok(Some((slot, guard.negated))),
        _ => refuse("the guard is not a predicate register"),
    }
}

fn uop(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    match inst.op {
        Op::Ld
        | Op::St
        | Op::Atom
        | Op::Red
        | Op::Ldmatrix
        | Op::Stmatrix
        | Op::Prefetch
        | Op::Prefetchu
        | Op::Applypriority
        | Op::Discard
        | Op::Createpolicy => memory::decode(cx, inst),
        Op::CpAsync
        | Op::CpAsyncCommitGroup
        | Op::CpAsyncWaitGroup
        | Op::CpAsyncWaitAll
        | Op::CpAsyncMbarrierArrive
        | Op::CpAsyncBulk
        | Op::StAsync
        | Op::RedAsync
        | Op::CpAsyncBulkCommitGroup
        | Op::CpAsyncBulkWaitGroup
        | Op::CpAsyncBulkPrefetch
        | Op::CpAsyncBulkTensor
        | Op::CpAsyncBulkPrefetchTensor
        | Op::CpReduceAsyncBulk
        | Op::CpReduceAsyncBulkTensor
        | Op::TensormapReplace
        | Op::TensormapCpFenceproxy => copy::decode(cx, inst),
        Op::MmaSync
        | Op::MmaSp
        | Op::MmaSpOrdered
        | Op::WgmmaMmaAsync
        | Op::WgmmaFence
        | Op::WgmmaCommitGroup
        | Op::WgmmaWaitGroup => matrix::decode(cx, inst),
        Op::Bra
        | Op::Ret
        | Op::Exit
        | Op::Trap
        | Op::Brkpt
        | Op::Nanosleep
        | Op::Setmaxnreg
        | Op::Griddepcontrol
        | Op::ShflSync
        | Op::VoteSync
        | Op::Match
        | Op::ReduxSync
        | Op::ElectSync
        | Op::Activemask
        | Op::BarWarpSync => control::decode(cx, inst),
        Op::WmmaLoadA | Op::WmmaLoadB | Op::WmmaLoadC | Op::WmmaStoreD | Op::WmmaMma => {
            wmma::decode(cx, inst)
        }
        Op::Movmatrix => wmma::movmatrix(cx, inst),
        Op::Alloca | Op::Stacksave | Op::Stackrestore => call::stack(cx, inst),
        Op::Call => call::call(cx, inst),
        Op::Cvt | Op::CvtPack | Op::Mov | Op::Cvta | Op::Isspacep | Op::Mapa | Op::Getctarank => {
            convert::decode(cx, inst)
        }
        Op::Setp => logic::setp(cx, inst),
        _ if carry::is_carry(inst) => carry::decode(cx, inst),
        op if op.text().starts_with("mbarrier")
            || op.text().starts_with("fence")
            || op.text().starts_with("bar")
            || op == Op::Membar =>
        {
            sync::decode(cx, inst)
        }
        _ => alu(cx, inst),
    }
}

/// Everything that is a pure function of its sources.
fn alu(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let ty = operand_type(inst)?;
    let found = match ty.kind() {
        _ if matches!(inst.op, Op::Selp | Op::Slct | Op::Set) => logic::select(inst, ty),
        TypeKind::Float if ty.bits() == 16 || matches!(ty, ScalarType::F16x2 | ScalarType::Bf16x2) => {
            half::lane_fn(inst, ty)
        }
        TypeKind::Float => float::lane_fn(inst, ty),
        _ => logic::lane_fn(inst, ty).or_else(|| integer::lane_fn(inst, ty)),
    };
    let Some(f) = found else { return refuse("these types do not have this operation") };
    let dst = cx.dst(&inst.operands[0])?;
    let sources = inst.operands[1..].iter().take(4);
    let srcs = sources.map(|o| cx.src(o, ty)).collect::<Decoded<_>>()?;
    Ok(Uop::Alu { f, dst, srcs })
}

/// The type that says what the operation means; for `set` that of the sources.
fn operand_type(inst: &Inst) -> Decoded<ScalarType> {
    let index = usize::from(inst.op == Op::Set);
    inst.ty(index).map_or_else(|| refuse("no type"), Ok)
}

/// A lane function of one source.
pub(super) fn map1(f: impl Fn(u64) -> u64 + Send + Sync + 'static) -> LaneFn {
    Box::new(move |s: &[Lanes; 4]| from_fn(|i| f(s[0][i])))
}

/// A lane function of two sources.
pub(super) fn map2(f: impl Fn(u64, u64) -> u64 + Send + Sync + 'static) -> LaneFn {
    Box::new(move |s: &[Lanes; 4]| from_fn(|i| f(s[0][i], s[1][i])))
}

/// A lane function of three sources.
pub(super) fn map3(f: impl Fn(u64, u64, u64) -> u64 + Send + Sync + 'static) -> LaneFn {
    Box::new(move |s: &[Lanes; 4]| from_fn(|i| f(s[0][i], s[1][i], s[2][i])))
}

/// A lane function of four sources.
pub(super) fn map4(f: impl Fn(u64, u64, u64, u64) -> u64 + Send + Sync + 'static) -> LaneFn {
    Box::new(move |s: &[Lanes; 4]| from_fn(|i| f(s[0][i], s[1][i], s[2][i], s[3][i])))
}
