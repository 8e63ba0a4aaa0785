//! Every instruction is in the table and supported by the module's target and version; directives agree.

use super::{Report, Rule};
use crate::{
    ident::Name,
    inst::{Address, Base, Inst, Operand},
    module::{Length, Variable},
    op::Op,
    table::{Form, Kind, Needs, pair_operands, spec::Align},
    version::Version,
};

/// Checks each instruction by itself.
pub(super) fn check(report: &mut Report<'_>) {
    let kernel = report.kernel;
    for (statement, inst) in kernel.instructions() {
        match inst.form() {
            Ok(form) => {
                check_needs(report, statement, inst, form.needs(inst));
                check_barrier_count(report, statement, inst);
                check_bounds(report, statement, inst, &form);
            }
            Err(error) => report.at(Rule::Form, statement, error.to_string()),
        }
    }
    check_directives(report);
}

fn check_needs(report: &mut Report<'_>, statement: usize, inst: &Inst, needs: Needs) {
    let (target, version) = (report.module.target, report.module.version);
    let what = || format!("`{}{}`", inst.op, inst.mods.iter().map(|m| format!(".{m}")).collect::<String>());
    if !target.includes(needs.target) {
        report.at(Rule::Target, statement, format!("{} needs target {}, not {target}", what(), needs.target));
    }
    if version < needs.version {
        report.at(
            Rule::Version,
            statement,
            format!("{} needs .version {}, not {version}", what(), needs.version),
        );
    }
}

/// A named barrier that waits for more threads than a CTA has never opens.
fn check_barrier_count(report: &mut Report<'_>, statement: usize, inst: &Inst) {
    let count = match inst.op {
        Op::BarSync | Op::BarArrive | Op::BarrierSync | Op::BarrierArrive => inst.operands.get(1),
        Op::BarRed | Op::BarrierRed if inst.operands.len() == 4 => inst.operands.get(2),
        _ => None,
    };
    let Some(count) = count.and_then(Operand::as_int) else { return };
    let threads = report.kernel.directives.most_threads().and_then(|n| i64::try_from(n).ok());
    if let Some(threads) = threads.filter(|&threads| count > threads) {
        let message = format!("the barrier waits for {count} threads, but a CTA has at most {threads}");
        report.at(Rule::Directive, statement, message);
    }
}

/// A load or store through the name of a variable or parameter stays inside it.
fn check_bounds(report: &mut Report<'_>, statement: usize, inst: &Inst, form: &Form) {
    for (spec, operand) in pair_operands(form.row, inst).unwrap_or_default() {
        let Operand::Address(Address { base: Base::Symbol(name), offset }) = operand else { continue };
        let bytes = if spec.kind == Kind::Address(Align::Access) { form.access_bytes() } else { 1 };
        let Some(size) = size_of(report, name) else { continue };
        let end = offset.checked_add(bytes.into()).and_then(|end| u64::try_from(end).ok());
        if *offset < 0 || end.is_none_or(|end| end > size) {
            let message = format!(
                "bytes {offset} to {} are outside `{name}`, which has {size}",
                offset.saturating_add(bytes.into())
            );
            report.at(Rule::Bounds, statement, message);
        }
    }
}

/// The size of a variable or parameter; `None` where it is decided elsewhere.
fn size_of(report: &Report<'_>, name: &Name) -> Option<u64> {
    let mut params = report.kernel.params.iter().chain(&report.kernel.returns);
    let param = params.find(|p| p.name == *name).map(|p| u64::from(p.bytes()));
    let mut variables = report.kernel.variables.iter().chain(&report.module.variables);
    let variable =
        || variables.find(|v| v.name == *name).filter(|v| v.len != Length::Unsized).map(Variable::bytes);
    param.or_else(variable)
}

fn check_directives(report: &mut Report<'_>) {
    let (kernel, module) = (report.kernel, report.module);
    let directives = &kernel.directives;
    let least = Version::of_target(module.target);
    if module.version < least {
        let (target, version) = (module.target, module.version);
        report.on_kernel(Rule::Version, format!("target {target} needs .version {least}, not {version}"));
    }
    let needs = directives.needs();
    if !module.target.includes(needs.target) {
        report
            .on_kernel(Rule::Target, format!("clusters need target {}, not {}", needs.target, module.target));
    }
    let bounded = directives.max_threads.is_some()
        || directives.required_threads.is_some()
        || directives.max_registers.is_some();
    let regulated = kernel.instructions().find(|(_, inst)| inst.op == Op::Setmaxnreg);
    if let (false, Some((statement, _))) = (bounded, regulated) {
        let message = "setmaxnreg needs `.maxntid`, `.reqntid` or `.maxnreg`: without one of them the registers at \
                       entry are unknown and it is ignored";
        report.at(Rule::Directive, statement, message.into());
    }
    if let Some(threads) = directives.most_threads().filter(|t| !(1..=1024).contains(t)) {
        report.on_kernel(Rule::Directive, format!("{threads} threads: a CTA has from 1 to 1024"));
    }
}
