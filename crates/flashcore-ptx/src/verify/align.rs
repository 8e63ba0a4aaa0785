//! Addresses that are provably misaligned: what is known about each register modulo a power of two.

use super::{
    Report, Rule,
    dataflow::{Analysis, visit},
    flow::{Flow, Step},
    init::for_each_write,
};
use crate::{
    inst::{Address, Base, Inst, Operand, RegId},
    module::{Kernel, Module},
    op::{Mod, Op},
    print::operand_text,
    table::{Kind, pair_operands, spec::Align},
};
use std::collections::HashMap;

/// A value is `residue` modulo `1 << bits`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Congruence {
    bits: u32,
    residue: u64,
}

const UNKNOWN: Congruence = Congruence { bits: 0, residue: 0 };
/// More than any alignment that PTX asks for.
const MAX_BITS: u32 = 20;

impl Congruence {
    fn new(bits: u32, residue: u64) -> Self {
        let bits = bits.min(MAX_BITS);
        Self { bits, residue: residue & ((1 << bits) - 1) }
    }

    fn constant(value: i64) -> Self {
        Self::new(MAX_BITS, value as u64)
    }

    fn aligned(bytes: u32) -> Self {
        Self::new(bytes.trailing_zeros(), 0)
    }

    /// Trailing zeros that the value surely has.
    fn zeros(self) -> u32 {
        if self.residue == 0 { self.bits } else { self.residue.trailing_zeros() }
    }

    fn add(self, other: Self) -> Self {
        Self::new(self.bits.min(other.bits), self.residue.wrapping_add(other.residue))
    }

    fn negate(self) -> Self {
        Self::new(self.bits, self.residue.wrapping_neg())
    }

    /// If a = r modulo 2^i and b = s modulo 2^j, then ab = rs modulo 2^min(i + zeros(b), j + zeros(a)).
    fn multiply(self, other: Self) -> Self {
        let bits = (self.bits + other.zeros()).min(other.bits + self.zeros());
        Self::new(bits, self.residue.wrapping_mul(other.residue))
    }

    fn shift_left(self, by: u32) -> Self {
        Self::new(self.bits + by, self.residue << by.min(MAX_BITS))
    }

    fn join(self, other: Self) -> Self {
        let differ = (self.residue ^ other.residue).trailing_zeros();
        Self::new(self.bits.min(other.bits).min(differ), self.residue)
    }
}

struct Residues<'m> {
    kernel: &'m Kernel,
    /// Alignment of variables and parameters.
    symbols: HashMap<&'m str, u32>,
}

impl<'m> Residues<'m> {
    fn new(module: &'m Module, kernel: &'m Kernel) -> Self {
        let variables =
            module.variables.iter().chain(&kernel.variables).map(|v| (v.name.as_str(), v.alignment()));
        let params = kernel.params.iter().map(|p| (p.name.as_str(), p.alignment()));
        Self { kernel, symbols: variables.chain(params).collect() }
    }

    fn reg(&self, facts: &[Congruence], reg: RegId) -> Congruence {
        facts[self.kernel.registers.dense(reg)]
    }

    fn value(&self, facts: &[Congruence], operand: Option<&Operand>) -> Congruence {
        match operand {
            Some(Operand::Reg(reg)) => self.reg(facts, *reg),
            Some(Operand::Imm(imm)) => imm.as_int().map_or(UNKNOWN, Congruence::constant),
            Some(Operand::Symbol(name)) => self.symbol(name.as_str()),
            _ => UNKNOWN,
        }
    }

    fn symbol(&self, name: &str) -> Congruence {
        self.symbols.get(name).map_or(UNKNOWN, |&align| Congruence::aligned(align))
    }

    fn address(&self, facts: &[Congruence], address: &Address) -> Congruence {
        let base = match &address.base {
            Base::Reg(reg) => self.reg(facts, *reg),
            Base::Symbol(name) => self.symbol(name.as_str()),
            Base::Absolute => Congruence::constant(0),
        };
        base.add(Congruence::constant(address.offset))
    }

    /// What an instruction leaves in its first operand.
    fn result(&self, facts: &[Congruence], inst: &Inst) -> Congruence {
        let operand = |i: usize| self.value(facts, inst.operands.get(i));
        let literal = |i: usize| inst.operands.get(i).and_then(Operand::as_int);
        let integer = inst.mods.last().and_then(|m| m.as_type()).is_some_and(|ty| !ty.is_float());
        match inst.op {
            _ if !integer => UNKNOWN,
            Op::Mov | Op::Cvta => operand(1),
            Op::Cvt if inst.ty(0).map(|t| t.bits()) >= Some(32) => operand(1),
            Op::Add => operand(1).add(operand(2)),
            Op::Sub => operand(1).add(operand(2).negate()),
            Op::Mul if !inst.has(Mod::Hi) => operand(1).multiply(operand(2)),
            Op::Mad if !inst.has(Mod::Hi) => operand(1).multiply(operand(2)).add(operand(3)),
            Op::Shl => literal(2).map_or(UNKNOWN, |by| operand(1).shift_left(by.clamp(0, 64) as u32)),
            Op::And => literal(2).map_or(UNKNOWN, |mask| masked(operand(1), mask as u64)),
            _ => UNKNOWN,
        }
    }
}

/// `value & mask`: low zeros of the mask are known zeros.
fn masked(value: Congruence, mask: u64) -> Congruence {
    let known_zeros = mask.trailing_zeros();
    if known_zeros >= value.bits {
        return Congruence::new(known_zeros, 0);
    }
    Congruence::new(value.bits, value.residue & mask)
}

impl Analysis for Residues<'_> {
    type Facts = Vec<Congruence>;

    fn at_entry(&self) -> Self::Facts {
        vec![UNKNOWN; self.kernel.registers.len()]
    }

    fn join(&self, into: &mut Self::Facts, other: &Self::Facts) {
        into.iter_mut().zip(other).for_each(|(a, b)| *a = a.join(*b));
    }

    fn step(&self, facts: &mut Self::Facts, step: &Step<'_>, _: usize) {
        let result = self.result(facts, step.inst);
        for_each_write(step, |reg| {
            let fact = &mut facts[self.kernel.registers.dense(reg)];
            *fact = if step.inst.guard.is_some() { fact.join(result) } else { result };
        });
    }
}

/// Reports addresses whose known low bits contradict the alignment that their instruction needs.
pub(super) fn check(flow: &Flow<'_>, report: &mut Report<'_>) {
    let residues = Residues::new(report.module, report.kernel);
    visit(flow, &residues, |facts, step, _| {
        for (spec, operand) in pair_operands(step.form.row, step.inst).unwrap_or_default() {
            let (Kind::Address(align), Operand::Address(address)) = (spec.kind, operand) else { continue };
            let bytes = match align {
                Align::Bytes(bytes) => bytes,
                Align::Access => step.form.access_bytes(),
                Align::Operand(i) => size_literal(step.inst, i),
            };
            let known = residues.address(facts, address);
            let low = known.residue & u64::from(bytes.max(1) - 1);
            if low != 0 {
                let text = operand_text(operand, &flow.kernel.registers);
                let message = format!("`{text}` is {low} modulo {bytes}, but must be a multiple of {bytes}");
                report.at(Rule::Alignment, step.statement, message);
            }
        }
    });
}

fn size_literal(inst: &Inst, operand: u8) -> u32 {
    let size = inst.operands.get(usize::from(operand)).and_then(Operand::as_int);
    size.and_then(|s| u32::try_from(s).ok()).filter(|s| s.is_power_of_two()).unwrap_or(1)
}
