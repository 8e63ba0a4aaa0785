//! Every instruction is in the table, and the module's target and version have it; directives agree.

use super::{Report, Rule};
use crate::{inst::Inst, op::Op, table::Needs, version::Version};

/// Checks each instruction by itself.
pub(super) fn check(report: &mut Report<'_>) {
    let kernel = report.kernel;
    for (statement, inst) in kernel.instructions() {
        match inst.form() {
            Ok(form) => check_needs(report, statement, inst, form.needs(inst)),
            Err(error) => report.at(Rule::Form, statement, error.to_string()),
        }
    }
    check_directives(report);
}

fn check_needs(report: &mut Report<'_>, statement: usize, inst: &Inst, needs: Needs) {
    let (target, version) = (report.module.target, report.module.version);
    let what = format!("`{}{}`", inst.op, inst.mods.iter().map(|m| format!(".{m}")).collect::<String>());
    if !target.includes(needs.target) {
        report.at(Rule::Target, statement, format!("{what} needs target {}, not {target}", needs.target));
    }
    if version < needs.version {
        report.at(
            Rule::Version,
            statement,
            format!("{what} needs .version {}, not {version}", needs.version),
        );
    }
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
    let threads = directives.required_threads.or(directives.max_threads);
    if let Some([x, y, z]) =
        threads.filter(|t| t.contains(&0) || t.iter().map(|&n| u64::from(n)).product::<u64>() > 1024)
    {
        report.on_kernel(Rule::Directive, format!("{x}×{y}×{z} threads: a CTA has from 1 to 1024"));
    }
}
