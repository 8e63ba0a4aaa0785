//! What is checked on which backend: the table of backends and the groups of checks.

use std::sync::Arc;

use flashcore::cuda::{self, Cuda};
use flashcore_core::{Backend, BackendError, DType, Problem};
use flashcore_cpu::Cpu;
use flashcore_kernels::{Choice, Gpu};
use flashcore_testkit::{
    Case, Tag, append,
    backward::{self, laws},
    cases::{self, Cost},
    merge, moe,
    properties::{self, Property},
    random,
};

use super::Scope;
use crate::simulator::Simulator;

/// A backend under test: built first, then run.
pub trait Candidate: Backend {
    /// Plans and compiles what the problem needs.
    fn build(&self, _: &Problem) -> Result<(), BackendError> {
        Ok(())
    }
}

/// Opens a backend; what decides about kernels is for those that have some.
pub type Open = fn(Choice) -> Result<Box<dyn Candidate>, BackendError>;

/// One row of the table of backends.
pub struct Target {
    pub name: &'static str,
    pub open: Open,
    /// Most work of a case, for each [`Extent`](super::Extent).
    pub costs: [Cost; 3],
    /// Random problems, likewise.
    pub random: [u64; 3],
    /// Checks of a group, likewise; evenly spaced ones are taken of more.
    pub most: [usize; 3],
    pub dtypes: &'static [DType],
}

impl Target {
    /// Whether it runs GPU kernels, one of which can be named.
    pub fn has_kernels(&self) -> bool {
        self.name != CPU.name
    }
}

/// The CPU.
pub const CPU: Target = Target {
    name: "cpu",
    open: |_| Ok(Box::new(Cpu::new())),
    costs: [Cost::Small, Cost::Huge, Cost::Huge],
    random: [60, 1000, 1000],
    most: [usize::MAX; 3],
    dtypes: &DType::COMMON,
};

/// Most work of a case whose gradients are checked, for each extent: their oracle is several times that of the output.
const GRADIENTS: [Cost; 3] = [Cost::Tiny, Cost::Small, Cost::Large];

/// The kernels of a large Hopper in the simulator.
const SIM: Target = Target {
    name: "sim",
    open: |choice| simulated(Gpu::HOPPER, choice),
    costs: [Cost::Tiny, Cost::Tiny, Cost::Huge],
    random: [8, 60, 1000],
    most: [6, usize::MAX, usize::MAX],
    dtypes: &DType::COMMON,
};

/// Every backend that can be verified.
pub const TARGETS: &[Target] = &[
    CPU,
    SIM,
    // A Hopper with more tiles than SMs, whose kernels are persistent.
    Target { name: "sim-busy", open: |choice| simulated(Gpu { sms: 3, ..Gpu::HOPPER }, choice), ..SIM },
    // The kernel that runs on every GPU, and its form for Turing.
    Target { name: "sim-general", open: |choice| simulated(Gpu::AMPERE, choice), ..SIM },
    Target {
        name: "sim-turing",
        open: |choice| simulated(Gpu::TURING, choice),
        dtypes: &[DType::F16],
        ..SIM
    },
    Target {
        name: "cuda",
        open: |choice| Ok(Box::new(Cuda::open(0).map_err(cuda::Error::on_opening)?.choosing(choice))),
        ..CPU
    },
];

/// The backend of that name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

impl Candidate for Cpu {}

fn simulated(gpu: Gpu, choice: Choice) -> Result<Box<dyn Candidate>, BackendError> {
    Ok(Box::new(Simulator::new(gpu).choosing(choice)))
}

impl Candidate for Simulator {
    fn build(&self, problem: &Problem) -> Result<(), BackendError> {
        self.program(self.plan(problem)?.kernel()).map(drop)
    }
}

impl Candidate for Cuda {
    fn build(&self, problem: &Problem) -> Result<(), BackendError> {
        match self.prepare(problem) {
            Ok(_) => Ok(()),
            Err(cuda::Error::Plan(refusal)) => Err(BackendError::Unsupported {
                backend: "cuda",
                what: "this problem".to_owned(),
                instead: refusal.to_string(),
            }),
            Err(other) => Err(BackendError::Failed { backend: "cuda", source: Box::new(other) }),
        }
    }
}

/// Checks that share a child process.
pub struct Group {
    pub name: String,
    pub checks: Vec<Check>,
}

/// One thing to check.
#[derive(Clone, Debug)]
pub struct Check {
    pub subject: Subject,
    pub dtype: DType,
    pub seed: u64,
}

/// What a check is about.
#[derive(Clone, Debug)]
pub enum Subject {
    /// The stages, on one case.
    Case(Arc<Case>),
    Law(&'static Property),
    /// The stages, on the gradients of one case.
    Gradients(Arc<backward::Case>),
    GradientLaw(&'static laws::Law),
    /// The stages, on a mixture of experts.
    Experts(Box<moe::Case>),
    /// The stages, on partial results that are merged into another type, perhaps.
    Merge(merge::Case, DType),
    /// The stages, on new rows of a cache.
    Append(append::Case),
}

impl Check {
    /// What it is called in reports and by filters.
    pub fn name(&self) -> String {
        let subject = match &self.subject {
            Subject::Case(case) => case.to_string(),
            Subject::Law(law) => format!("law: {}", law.name),
            Subject::Gradients(case) => case.to_string(),
            Subject::GradientLaw(law) => format!("law: {}", law.name),
            Subject::Experts(case) => case.to_string(),
            Subject::Merge(case, out) => format!("{case} to {out}"),
            Subject::Append(case) => case.to_string(),
        };
        format!("{subject} {} seed {}", self.dtype, self.seed)
    }
}

/// The groups of a backend, without those that the filter leaves empty.
pub fn groups(target: &Target, scope: &Scope) -> Vec<Group> {
    let extent = scope.extent as usize;
    let cost = target.costs[extent];
    let mut groups: Vec<Group> = Vec::new();
    for case in cases::up_to(cost) {
        let (name, case) = (tag_name(case.tag), Arc::new(case));
        let checks = over_seeds(scope, &case);
        match groups.iter_mut().find(|group| group.name == name) {
            Some(group) => group.checks.extend(checks),
            None => groups.push(Group { name, checks }),
        }
    }
    groups.push(Group { name: "laws".to_owned(), checks: laws() });
    let count = target.random[extent];
    groups.push(Group { name: "random".to_owned(), checks: randoms(count) });
    groups.push(Group { name: "moe".to_owned(), checks: experts(count) });
    groups.push(Group { name: "merge".to_owned(), checks: merges() });
    groups.push(Group { name: "append".to_owned(), checks: appends() });
    let most = GRADIENTS[extent].min(cost);
    groups.push(Group { name: "gradients".to_owned(), checks: gradients(most, count) });
    for group in &mut groups {
        let Group { name, checks } = group;
        checks.retain(|check| target.dtypes.contains(&check.dtype) && is_wanted(scope, name, check));
        *checks = evenly(checks, target.most[extent]);
    }
    groups.retain(|group| !group.checks.is_empty());
    groups
}

/// At most `most` of the checks, over their whole range.
fn evenly(checks: &[Check], most: usize) -> Vec<Check> {
    let count = most.min(checks.len());
    (0..count).map(|n| checks[n * checks.len() / count].clone()).collect()
}

fn is_wanted(scope: &Scope, group: &str, check: &Check) -> bool {
    scope.filter.as_deref().is_none_or(|part| format!("{group}/{}", check.name()).contains(part))
}

fn over_seeds(scope: &Scope, case: &Arc<Case>) -> Vec<Check> {
    // Cases of gigabytes are about addresses, not numbers.
    let seeds = if case.cost() == Cost::Huge { 1 } else { scope.seeds };
    let check = |dtype, seed| Check { subject: Subject::Case(case.clone()), dtype, seed };
    (1..=seeds)
        .flat_map(|seed| case.dtypes.iter().map(move |&dtype| (dtype, seed)))
        .map(|(d, s)| check(d, s))
        .collect()
}

fn laws() -> Vec<Check> {
    let check = |law, dtype| Check { subject: Subject::Law(law), dtype, seed: 1 };
    properties::ALL.iter().flat_map(|law| DType::COMMON.map(|dtype| check(law, dtype))).collect()
}

fn randoms(count: u64) -> Vec<Check> {
    let check = |index| Check {
        subject: Subject::Case(Arc::new(random::any(1, index, random::Limits::SMALL))),
        dtype: DType::COMMON[index as usize % 3],
        seed: index,
    };
    (0..count).map(check).collect()
}

fn gradients(cost: Cost, random: u64) -> Vec<Check> {
    let case = |case: backward::Case, dtype, seed| Check {
        subject: Subject::Gradients(Arc::new(case)),
        dtype,
        seed,
    };
    let law = |law, dtype| Check { subject: Subject::GradientLaw(law), dtype, seed: 1 };
    let named = backward::cases(cost).into_iter();
    let named = named.flat_map(|of| of.forward.dtypes.iter().map(move |&dtype| case(of.clone(), dtype, 1)));
    let random = (0..random).map(|n| case(backward::random_case(1, n), DType::COMMON[n as usize % 3], n));
    let laws = laws::LAWS.iter().flat_map(|of| DType::COMMON.map(|dtype| law(of, dtype)));
    named.chain(random).chain(laws).collect()
}

/// Mixtures of experts: every case, and random ones.
fn experts(random: u64) -> Vec<Check> {
    let check =
        |case: moe::Case, dtype, seed| Check { subject: Subject::Experts(Box::new(case)), dtype, seed };
    let named = moe::cases().into_iter().flat_map(|case| DType::COMMON.map(|dtype| check(case, dtype, 1)));
    let random = (0..random).map(|n| check(moe::random(1, n), DType::COMMON[n as usize % 3], n));
    named.chain(random).collect()
}

/// Merges of every case, each from one of the types.
fn merges() -> Vec<Check> {
    let pairs = merge::cases().into_iter().zip(merge::dtypes().collect::<Vec<_>>().into_iter().cycle());
    pairs.map(|(case, [dtype, out])| Check { subject: Subject::Merge(case, out), dtype, seed: 1 }).collect()
}

fn appends() -> Vec<Check> {
    let check = |case, dtype| Check { subject: Subject::Append(case), dtype, seed: 1 };
    append::cases().into_iter().flat_map(|case| DType::COMMON.map(|dtype| check(case, dtype))).collect()
}

/// `UsedLengths` becomes `used-lengths`.
fn tag_name(tag: Tag) -> String {
    let mut name = String::new();
    for letter in format!("{tag:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('-');
        }
        name.extend(letter.to_lowercase());
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::Extent;

    fn scope(extent: Extent, filter: Option<&str>) -> Scope {
        Scope { filter: filter.map(str::to_owned), seeds: 2, runs: 2, extent, kernel: None }
    }

    #[test]
    fn groups_hold_every_case_in_every_type() {
        let groups = groups(&TARGETS[0], &scope(Extent::Usual, None));
        let names: Vec<_> = groups.iter().map(|group| group.name.as_str()).collect();
        for expected in ["named", "used-lengths", "big-offsets", "ragged", "pages", "sinks", "laws", "random"]
        {
            assert!(names.contains(&expected), "{names:?}");
        }
        for target in TARGETS {
            let groups = super::groups(target, &scope(Extent::Quick, None));
            for expected in ["moe", "merge", "append", "gradients"] {
                assert!(groups.iter().any(|group| group.name == expected), "{} on {}", expected, target.name);
            }
        }
        let named = groups.iter().find(|group| group.name == "named").unwrap();
        assert_eq!(named.checks.len(), cases::tagged(Tag::Named).len() * 2 * 3);
        assert!(named.checks.len() > super::groups(&TARGETS[0], &scope(Extent::Quick, None))[0].checks.len());
    }

    #[test]
    fn filters_pick_checks() {
        let groups = groups(&TARGETS[0], &scope(Extent::Quick, Some("gqa/gqa 3/1 70x90")));
        assert_eq!((groups.len(), groups[0].checks.len()), (1, 6));
        assert!(super::groups(&TARGETS[0], &scope(Extent::Quick, Some("no such case"))).is_empty());
    }

    #[test]
    fn all_means_every_case_on_every_backend() {
        let expected: usize = cases::all().iter().map(|case| case.dtypes.len()).sum();
        let others = ["laws", "random", "moe", "merge", "append", "gradients"];
        for target in TARGETS.iter().filter(|target| target.dtypes == DType::COMMON) {
            let groups = groups(target, &Scope { seeds: 1, ..scope(Extent::All, None) });
            let cases = groups.iter().filter(|group| !others.contains(&group.name.as_str()));
            assert_eq!(cases.map(|group| group.checks.len()).sum::<usize>(), expected, "{}", target.name);
        }
    }
}
