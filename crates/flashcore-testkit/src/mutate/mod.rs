//! Single faults that a kernel could have, made automatically: what the simulator's checkers must find.
//!
//! Each [`Fault`] looks for the places in a kernel where it could be made and makes a [`Mutant`] of each. A test
//! runs them all: a mutant that no checker reports and whose results are right shows a hole in the checkers.
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

use flashcore_ptx::module::Module;

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
    /// Makes it wherever the first kernel of a module allows it.
    apply: fn(&Module) -> Vec<Change>,
}

/// One changed module and where it was changed.
struct Change {
    site: (usize, String),
    module: Module,
}

impl Fault {
    /// Every mutant of the module's first kernel with this fault; `None` where the kernel has no place for it.
    pub fn mutants(&self, module: &Module) -> Option<Vec<Mutant>> {
        let mutant = |change: Change| Mutant { fault: self.name, site: change.site, module: change.module };
        let mutants: Vec<_> = (self.apply)(module).into_iter().map(mutant).collect();
        (!mutants.is_empty()).then_some(mutants)
    }
}

/// Every fault.
pub fn faults() -> impl Iterator<Item = &'static Fault> {
    barriers::FAULTS.iter().chain(copies::FAULTS).chain(tensor::FAULTS)
}

/// Every mutant of the module's first kernel.
pub fn mutants(module: &Module) -> Vec<Mutant> {
    faults().filter_map(|fault| fault.mutants(module)).flatten().collect()
}

/// At most `per_fault` mutants of each fault, at places that a run has executed, spread over the kernel.
pub fn sampled(module: &Module, executions: &[u64], per_fault: usize) -> Vec<Mutant> {
    let executed = |mutant: &Mutant| executions.get(mutant.site.0).is_some_and(|&count| count > 0);
    let sample = |fault: &Fault| {
        let all: Vec<_> = fault.mutants(module).into_iter().flatten().filter(executed).collect();
        let step = all.len().div_ceil(per_fault.max(1)).max(1);
        all.into_iter().step_by(step).collect::<Vec<_>>()
    };
    faults().flat_map(sample).collect()
}
