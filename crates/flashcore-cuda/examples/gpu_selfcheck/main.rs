//! Proves the driver layer on a real GPU: run it on a machine that has one, with no other file at hand.
//!
//! `gpu_selfcheck [device]` prints a table of checks and exits with 1 if one failed. Faulty kernels run in child
//! processes of the same program (`gpu_selfcheck --fault`), because they cost the process its GPU.

mod bare;
mod bench;
mod checks;
mod faults;
mod order;
mod speed;

use bench::{Bench, Outcome};
use std::process::ExitCode;

type Check = (&'static str, fn(&Bench) -> Outcome);

const CHECKS: [Check; 18] = [
    ("driver and device", checks::device),
    ("caller's context restored", checks::context_restored),
    ("PTX that is wrong is refused with a log", checks::bad_ptx),
    ("ptxas, JIT and cache give one result", speed::routes),
    ("first call by JIT under 1 s", speed::first_call_jit),
    ("first call from the cache under 20 ms", speed::first_call_cached),
    ("build report against the driver's attributes", checks::report),
    ("parameters, buffers, copies", checks::scale),
    ("parameter mismatch is refused", checks::parameter_mismatch),
    ("TMA load through a swizzled tensor map", checks::tma),
    ("tensor map follows a new address", checks::tma_moved),
    ("cluster launch and occupancy", checks::cluster),
    ("programmatic dependent launch keeps order", order::chain),
    ("two streams and a graph replay at once", order::tickets),
    ("another program's stream", order::foreign_stream),
    ("host cost of a launch with new pointers under 5 us", speed::host_cost),
    ("out of memory is recoverable", faults::out_of_memory),
    ("sticky errors are blamed and stay", faults::sticky),
];

fn main() -> ExitCode {
    let argument = std::env::args().nth(1);
    if argument.as_deref() == Some("--fault") {
        return faults::child();
    }
    let index = argument.and_then(|text| text.parse().ok()).unwrap_or(0);
    let bench = match Bench::new(index) {
        Ok(bench) => bench,
        Err(error) => {
            eprintln!("FAIL  start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let failed = CHECKS.iter().filter(|(name, check)| !report(name, check(&bench))).count();
    let leaks = bench.device.take_drop_errors();
    let clean = report(
        "no error in any drop",
        if leaks.is_empty() { Ok("".into()) } else { Err(format!("{leaks:?}").into()) },
    );
    println!("{} checks, {} failed", CHECKS.len() + 1, failed + usize::from(!clean));
    if failed == 0 && clean { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn report(name: &str, outcome: Outcome) -> bool {
    match &outcome {
        Ok(detail) => println!("ok    {name:<52} {detail}"),
        Err(error) => println!("FAIL  {name:<52} {error}"),
    }
    outcome.is_ok()
}
