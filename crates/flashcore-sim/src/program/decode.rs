//! From the instructions of a kernel to a [`Program`]: resolves labels, decodes each statement, names what it cannot.

use super::{
    Code, Origin, Program, control, convert, copy, float, half, integer, logic, matrix, memory,
    operand::{Context, Decoded, Layout, OperandError, RegisterMap, refuse},
    sync,
    uop::{LaneFn, Lanes, Reg, Uop},
};
use crate::error::SimError;
use flashcore_ptx::{
    inst::Inst,
    module::{Kernel, Module, Space, Statement},
    op::Op,
    types::{ScalarType, TypeKind},
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
    pub(crate) fn decode(module: &Module, entry: &str) -> Result<Self, SimError> {
        let kernel = module.kernel(entry).ok_or_else(|| no_kernel(module, entry))?;
        check_sizes(module, kernel)?;
        let layout = Layout::new(module, kernel);
        let registers = RegisterMap::new(kernel);
        let labels = labels_of(kernel);
        let context = Context { registers: &registers, layout: &layout, labels: &labels };
        let (mut code, mut origins) = (Vec::new(), Vec::new());
        for (statement, inst) in kernel.instructions() {
            let fail = |error| explain(kernel, statement, inst, error);
            let (decoded, origin) = one(&context, inst, statement).map_err(fail)?;
            code.push(decoded);
            origins.push(origin);
        }
        Ok(Self { kernel: entry.into(), code, origins, registers: registers.counts, layout })
    }
}

/// Refuses declarations that the hardware could not hold, before anything is allocated for them.
fn check_sizes(module: &Module, kernel: &Kernel) -> Result<(), SimError> {
    let check = |what: &str, bytes: u64, most: u64| {
        let reason = || format!("{bytes} bytes of {what}; at most {most} can be simulated");
        let fail = || SimError::Geometry { kernel: kernel.name.to_string(), reason: reason() };
        if bytes > most { Err(fail()) } else { Ok(()) }
    };
    for (space, what, most) in [
        (Space::Shared, "shared variables", MOST_BYTES),
        (Space::Local, "local variables", MOST_LOCAL),
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

/// The program counter behind each label.
fn labels_of(kernel: &Kernel) -> BTreeMap<String, u32> {
    let (mut labels, mut pc) = (BTreeMap::new(), 0);
    for statement in &kernel.body {
        match statement {
            Statement::Label(name) => drop(labels.insert(name.to_string(), pc)),
            Statement::Inst(_) => pc += 1,
        }
    }
    labels
}

fn explain(kernel: &Kernel, statement: usize, inst: &Inst, error: OperandError) -> SimError {
    let kernel = kernel.name.to_string();
    match error {
        OperandError::Undeclared(name) => SimError::Undeclared { kernel, statement, name },
        OperandError::Unsupported(reason) => {
            SimError::Unsupported { kernel, statement, text: inst.to_string(), reason }
        }
    }
}

fn one(cx: &Context<'_>, inst: &Inst, statement: usize) -> Decoded<(Code, Origin)> {
    let form = inst.form().or_else(|e| refuse(e.to_string()))?;
    let guard = match inst.guard {
        None => None,
        Some(guard) => match cx.registers.slot(guard.reg) {
            Some(Reg::Predicate(slot)) => Some((slot, guard.negated)),
            _ => return refuse("the guard is not a predicate register"),
        },
    };
    let code = Code { guard, uop: uop(cx, inst)? };
    Ok((code, Origin { statement, class: form.row.class, text: inst.to_string() }))
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
        | Op::Createpolicy => memory::decode(cx, inst),
        Op::CpAsync
        | Op::CpAsyncCommitGroup
        | Op::CpAsyncWaitGroup
        | Op::CpAsyncWaitAll
        | Op::CpAsyncMbarrierArrive
        | Op::CpAsyncBulk
        | Op::StAsync
        | Op::CpAsyncBulkCommitGroup
        | Op::CpAsyncBulkWaitGroup
        | Op::CpAsyncBulkPrefetch
        | Op::CpAsyncBulkTensor
        | Op::CpAsyncBulkPrefetchTensor
        | Op::CpReduceAsyncBulk
        | Op::CpReduceAsyncBulkTensor => copy::decode(cx, inst),
        Op::MmaSync | Op::WgmmaMmaAsync | Op::WgmmaFence | Op::WgmmaCommitGroup | Op::WgmmaWaitGroup => {
            matrix::decode(cx, inst)
        }
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
        Op::Cvt | Op::Mov | Op::Cvta | Op::Isspacep | Op::Mapa | Op::Getctarank => convert::decode(cx, inst),
        Op::Setp => logic::setp(cx, inst),
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
    let Some(f) = found else { return refuse("no such operation on these types") };
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
