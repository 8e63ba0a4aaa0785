//! Functions of a module, and the lists that indirect branches and calls name. Part of [`crate::module`].

use crate::{
    ident::Name,
    module::{Kernel, KernelParam, Linkage},
};

/// A function: `.func`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Function {
    /// Who sees it.
    pub linkage: Linkage,
    /// Whether it never comes back.
    pub noreturn: bool,
    /// Whether its body is here; else it is only declared.
    pub defined: bool,
    /// Name, parameters, results and body.
    pub code: Kernel,
}

/// A named list inside a kernel or function.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Targets {
    /// Its name.
    pub name: Name,
    /// What it lists.
    pub list: TargetList,
}

/// What a named list says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TargetList {
    /// `.branchtargets`: labels.
    Branch(Vec<Name>),
    /// `.calltargets`: functions.
    Call(Vec<Name>),
    /// `.callprototype`: what an indirect call passes and receives.
    Prototype {
        /// Results.
        returns: Vec<KernelParam>,
        /// Parameters.
        params: Vec<KernelParam>,
        /// Whether it never comes back.
        noreturn: bool,
    },
}

impl Kernel {
    /// The list of that name.
    pub fn targets_of(&self, name: &Name) -> Option<&TargetList> {
        self.targets.iter().find(|targets| targets.name == *name).map(|targets| &targets.list)
    }

    /// The labels that a `.branchtargets` of that name lists.
    pub fn branch_targets(&self, name: &Name) -> &[Name] {
        match self.targets_of(name) {
            Some(TargetList::Branch(labels)) => labels,
            _ => &[],
        }
    }
}
