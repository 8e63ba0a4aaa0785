//! Single faults that a kernel could have, injected automatically: the simulator's checkers must find them.
//!
//! Each [`Fault`] finds the places in a kernel where it could occur and makes a [`Mutant`] for each. A test runs
//! them all: a mutant that no checker reports and whose results are right reveals a gap in the checkers.
//!
//! | file | faults in |
//! | --- | --- |
//! | `barriers` | barriers, fences, mbarriers, phases |
//! | `copies` | asynchronous copies, their groups, coordinates, bounds |
//! | `tensor` | wgmma, mma, fragments, shuffles |
//! | `edit` | the ways to change a kernel |

mod barriers;
mod copies;
mod edit;
mod tensor;

use self::edit::Edit;
use flashcore_ptx::{inst::Inst, module::Module};

/// A kernel with one fault.
#[derive(Clone, Debug)]
pub struct Mutant {
    pub fault: &'static str,
    /// The statement that was changed, by its index in the body before the change, and its text.
    pub site: (usize, String),
    /// The module with the fault.
    pub module: Module,
}

/// A kind of fault.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub name: &'static str,
    /// Whether it can be made at an instruction.
    fits: fn(&Inst) -> bool,
    edit: Edit,
}

const fn fault(name: &'static str, fits: fn(&Inst) -> bool, edit: Edit) -> Fault {
    Fault { name, fits, edit }
}

impl Fault {
    /// Every mutant of the module's first kernel with this fault.
    pub fn mutants(&self, module: &Module) -> Vec<Mutant> {
        let sites = edit::sites(module, self.fits);
        let mutant = |(edit, (index, inst)): (Edit, &(usize, &Inst))| {
            let mut copy = module.clone();
            edit.apply(copy.kernels.first_mut()?, *index, (*inst).clone())?;
            Some(Mutant { fault: self.name, site: (*index, inst.to_string()), module: copy })
        };
        let edits = self.edit.each().into_iter();
        edits.flat_map(|edit| sites.iter().map(move |site| (edit, site))).filter_map(mutant).collect()
    }
}

/// Every fault.
pub fn faults() -> impl Iterator<Item = &'static Fault> {
    barriers::FAULTS.iter().chain(copies::FAULTS).chain(tensor::FAULTS)
}

/// Every mutant of the module's first kernel.
pub fn mutants(module: &Module) -> Vec<Mutant> {
    faults().flat_map(|fault| fault.mutants(module)).collect()
}

/// At most `per_fault` mutants of each fault, at places that a run has executed, spread over the kernel.
pub fn sampled(module: &Module, executions: &[u64], per_fault: usize) -> Vec<Mutant> {
    let executed = |mutant: &Mutant| executions.get(mutant.site.0).is_some_and(|&count| count > 0);
    let sample = |fault: &Fault| {
        let all: Vec<_> = fault.mutants(module).into_iter().filter(executed).collect();
        let step = all.len().div_ceil(per_fault.max(1)).max(1);
        all.into_iter().step_by(step).collect::<Vec<_>>()
    };
    faults().flat_map(sample).collect()
}
