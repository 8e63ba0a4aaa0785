//! Every fault of the mutation library, in two hand-written kernels: unchanged kernels are silent and right under
//! every schedule; changed ones are reported by a checker, or give wrong results. The table of what killed each
//! mutant is printed.

mod kernels;

use flashcore_ptx::module::Module;
use flashcore_sim::{Launch, Options};
use flashcore_testkit::mutate::{Mutant, mutants};
use kernels::Kernel;
use std::collections::BTreeMap;

/// What is wrong with a run, if anything.
fn fault_of(kernel: &Kernel, module: &Module, options: &Options) -> Option<String> {
    let launch = Launch { module, provenance: None, spec: &kernel.spec, buffers: kernel.buffers.clone() };
    let outcome = match launch.run(options) {
        Ok(outcome) => outcome,
        Err(error) => return Some(error.to_string()),
    };
    let first = outcome.errors().next().map(|finding| format!("{:?}", finding.kind));
    first.or_else(|| kernel.mismatch(&outcome).map(|_| "wrong result".into()))
}

fn ways() -> Vec<Options> {
    let two = |seed| Options::gauntlet(seed).into_iter();
    let ways: Vec<_> = [Options::new()].into_iter().chain(two(1)).chain(two(2)).collect();
    ways.into_iter().map(kernels::small_steps).collect()
}

/// What is wrong with a module under any way of running any of a kernel's launches.
fn killer(launches: &[Kernel], module: &Module) -> Option<String> {
    let runs = launches.iter().flat_map(|kernel| ways().into_iter().map(move |options| (kernel, options)));
    runs.into_iter().find_map(|(kernel, options)| fault_of(kernel, module, &options))
}

fn check(launches: &[Kernel]) {
    let kernel = &launches[0];
    assert_eq!(killer(launches, &kernel.module), None, "{} unchanged", kernel.name);
    let mut table: BTreeMap<(&str, String), usize> = BTreeMap::new();
    let mut survivors = Vec::new();
    for Mutant { fault, site, module } in mutants(&kernel.module) {
        match killer(launches, &module) {
            Some(killer) => *table.entry((fault, first_words(&killer))).or_default() += 1,
            None => survivors.push(format!("{fault} at {}: {}", site.0, site.1)),
        }
    }
    println!("{}", kernel.name);
    for ((fault, killer), count) in &table {
        println!("  {fault:40} {killer:30} {count}");
    }
    let faults: std::collections::BTreeSet<_> = table.keys().map(|(fault, _)| *fault).collect();
    println!(
        "  {} faults, {} mutants, {} survivors",
        faults.len(),
        table.values().sum::<usize>(),
        survivors.len()
    );
    assert!(survivors.is_empty(), "{} mutants survive:\n{}", survivors.len(), survivors.join("\n"));
}

fn first_words(text: &str) -> String {
    text.chars().take(30).collect()
}

#[test]
fn mma_gemm_with_cp_async() {
    // the last row lies in the upper or in the lower half of a warp's tile
    check(&[kernels::mma_gemm(61), kernels::mma_gemm(53)]);
}

#[test]
fn wgmma_gemm_with_tma() {
    check(&[kernels::wgmma_gemm()]);
}
