//! What is wrong with a module, all of it at once.
//!
//! Each file checks one thing and adds to the same list: `names` (declared, once), `forms` (table, target,
//! version, directives), and over the control flow of `flow`, solved by `dataflow`: `init` (registers read
//! before any write), `align` (addresses provably misaligned), `uniform` (`.aligned` under divergence), and
//! `wgmma` (fences, commits, registers in flight). They only see the text: tokens and roles of the builder are
//! gone by then, so mistakes of the builder are found too. `group` prints findings of one cause as one line.

mod align;
mod dataflow;
mod flow;
mod forms;
mod group;
mod init;
mod names;
mod uniform;
mod wgmma;

use crate::{
    inst::Inst,
    module::{Kernel, Module, Statement},
    print::inst_text,
    provenance::{Provenance, Unit},
};
use flow::Flow;
use std::fmt;

pub use group::{Group, grouped, grouped_messages};

/// Which rule a module breaks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum Rule {
    /// The instruction has no row in the table.
    Form,
    /// The target lacks it.
    Target,
    /// The `.version` lacks it.
    Version,
    /// Something is not declared.
    Undeclared,
    /// Something is declared twice, or shadows something else.
    Duplicate,
    /// A directive is missing or contradicts another.
    Directive,
    /// An address is provably misaligned.
    Alignment,
    /// An address is provably outside of its variable.
    Bounds,
    /// A register is read before any write.
    Uninitialised,
    /// Unreachable code.
    Unreachable,
    /// Control falls off the end of a kernel.
    Terminator,
    /// An instruction for a whole warp or warpgroup is where lanes may have diverged.
    Divergence,
    /// A register was touched after the last `wgmma.fence`.
    WgmmaFence,
    /// A register is touched while a wgmma owns it.
    WgmmaInFlight,
    /// A wgmma is not committed, or not waited for.
    WgmmaCommit,
}

/// One thing that is wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// The rule that is broken.
    pub rule: Rule,
    /// The kernel it is in; empty for the module itself.
    pub kernel: String,
    /// The statement, by index, if it is one.
    pub statement: Option<usize>,
    /// The statement as text.
    pub text: String,
    /// Where it came from: `file:line`.
    pub location: Option<String>,
    /// What is wrong, and what would be right.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(location) = &self.location {
            write!(f, "{location}: ")?;
        }
        write!(f, "{}", self.message)?;
        if !self.text.is_empty() {
            write!(f, "\n    {}", self.text)?;
        }
        match self.statement {
            Some(statement) => write!(f, "\n    in kernel `{}`, statement {statement}", self.kernel),
            None if self.kernel.is_empty() => Ok(()),
            None => write!(f, "\n    in kernel `{}`", self.kernel),
        }
    }
}

/// Everything that is wrong with `module`, body by body in order of statements; empty if nothing is.
pub fn verify(module: &Module, provenance: &Provenance) -> Vec<Finding> {
    let mut findings = Vec::new();
    names::check_module(module, &mut findings);
    for (unit, kernel) in module.units() {
        let mut report = Report { module, kernel, unit, provenance, findings: Vec::new() };
        check_kernel(&mut report);
        report.findings.sort_by_key(|f| f.statement);
        report.findings.dedup();
        findings.append(&mut report.findings);
    }
    findings
}

fn check_kernel(report: &mut Report<'_>) {
    names::check(report);
    forms::check(report);
    if report.findings.iter().any(|f| matches!(f.rule, Rule::Form | Rule::Undeclared)) {
        // The analyses below need to know what each instruction reads and writes, and where it goes.
        return;
    }
    let flow = Flow::of(report.kernel);
    flow::check(&flow, report);
    init::check(&flow, report);
    align::check(&flow, report);
    if matches!(report.unit, Unit::Kernel(_)) {
        // Of a function nobody knows here who is together when it is called.
        uniform::check(&flow, report);
    }
    wgmma::check(&flow, report);
}

/// Findings of one kernel, and what is needed to phrase them.
struct Report<'m> {
    module: &'m Module,
    kernel: &'m Kernel,
    unit: Unit,
    provenance: &'m Provenance,
    findings: Vec<Finding>,
}

impl Report<'_> {
    /// Something about a statement.
    fn at(&mut self, rule: Rule, statement: usize, message: String) {
        let text = match self.kernel.body.get(statement) {
            Some(Statement::Inst(inst)) => self.text(inst),
            Some(Statement::Label(name)) => format!("{name}:"),
            Some(Statement::Unknown(unknown)) => unknown.text.clone(),
            None => String::new(),
        };
        let location = self.provenance.location(self.unit, statement).map(|l| l.to_string());
        self.findings.push(Finding {
            rule,
            kernel: self.kernel.name.to_string(),
            statement: Some(statement),
            text,
            location,
            message,
        });
    }

    /// Something about the kernel as a whole.
    fn on_kernel(&mut self, rule: Rule, message: String) {
        let kernel = self.kernel.name.to_string();
        self.findings.push(Finding {
            rule,
            kernel,
            statement: None,
            text: String::new(),
            location: None,
            message,
        });
    }

    fn text(&self, inst: &Inst) -> String {
        inst_text(inst, &self.kernel.registers)
    }

    fn name(&self, reg: crate::inst::RegId) -> String {
        self.kernel.registers.name(reg)
    }
}
