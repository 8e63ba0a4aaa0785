//! Every register, label and symbol is declared, and only once.

use super::{Finding, Report, Rule};
use crate::{
    ident::Name,
    inst::{Base, Operand},
    module::{Module, Statement},
    types::SpecialReg,
};
use std::collections::HashSet;

/// Names of the module itself.
pub(super) fn check_module(module: &Module, findings: &mut Vec<Finding>) {
    let mut seen = HashSet::new();
    let variables = module.variables.iter().map(|v| &v.name);
    let names = variables.chain(module.units().map(|(_, unit)| &unit.name));
    for name in names {
        if !seen.insert(name.as_str()) {
            findings.push(Finding {
                rule: Rule::Duplicate,
                kernel: String::new(),
                statement: None,
                text: String::new(),
                location: None,
                message: format!("`{name}` is declared twice"),
            });
        }
    }
}

/// Names of one kernel.
pub(super) fn check(report: &mut Report<'_>) {
    check_register_names(report);
    let labels = check_labels(report);
    let symbols = check_symbols(report);
    let kernel = report.kernel;
    for (statement, inst) in kernel.instructions() {
        let mut missing = Vec::new();
        let mut look = |reg| {
            if !kernel.registers.contains(reg) {
                missing.push(format!("undeclared register `{}`", kernel.registers.name(reg)));
            }
        };
        inst.guard.iter().for_each(|g| look(g.reg));
        inst.operands.iter().for_each(|o| o.for_each_reg(&mut look));
        missing.extend(inst.operands.iter().filter_map(|o| unknown_name(o, &labels, &symbols)));
        missing.into_iter().for_each(|message| report.at(Rule::Undeclared, statement, message));
    }
}

fn check_register_names(report: &mut Report<'_>) {
    let special: HashSet<_> = SpecialReg::ALL.iter().filter_map(|s| s.text().split('.').next()).collect();
    let mut seen = HashSet::new();
    for reg in report.kernel.registers.iter() {
        let name = report.name(reg);
        if special.contains(name.as_str()) {
            report.on_kernel(
                Rule::Duplicate,
                format!("register `{name}` hides the special register of that name"),
            );
        }
        if !seen.insert(name.clone()) {
            report.on_kernel(Rule::Duplicate, format!("register `{name}` is declared twice"));
        }
    }
}

fn check_labels<'k>(report: &mut Report<'k>) -> HashSet<&'k Name> {
    let mut labels = HashSet::new();
    for (statement, label) in report.kernel.body.iter().enumerate() {
        if let Statement::Label(name) = label
            && !labels.insert(name)
        {
            report.at(Rule::Duplicate, statement, format!("label `{name}` is declared twice"));
        }
    }
    labels
}

fn check_symbols<'m>(report: &mut Report<'m>) -> HashSet<&'m Name> {
    let (module, kernel) = (report.module, report.kernel);
    let mut symbols = HashSet::new();
    let params = kernel.params.iter().chain(&kernel.returns).map(|p| &p.name);
    let lists = kernel.targets.iter().map(|t| &t.name);
    let own = params.chain(kernel.variables.iter().map(|v| &v.name)).chain(lists);
    for name in own {
        if !symbols.insert(name) {
            report.on_kernel(Rule::Duplicate, format!("`{name}` is declared twice"));
        }
    }
    symbols.extend(module.variables.iter().map(|v| &v.name));
    symbols.extend(module.functions.iter().map(|f| &f.code.name));
    symbols
}

fn unknown_name(operand: &Operand, labels: &HashSet<&Name>, symbols: &HashSet<&Name>) -> Option<String> {
    let unknown_symbol =
        |name: &Name| (!symbols.contains(name)).then(|| format!("undeclared symbol `{name}`"));
    let base = |base: &Base| if let Base::Symbol(name) = base { unknown_symbol(name) } else { None };
    match operand {
        Operand::Label(name) => (!labels.contains(name)).then(|| format!("undeclared label `{name}`")),
        Operand::Symbol(name) | Operand::Offset(name, _) => unknown_symbol(name),
        Operand::Group(items) => items.iter().find_map(|item| unknown_name(item, labels, symbols)),
        Operand::Address(address) => base(&address.base),
        Operand::Tensor(tensor) => base(&tensor.map.base),
        _ => None,
    }
}
