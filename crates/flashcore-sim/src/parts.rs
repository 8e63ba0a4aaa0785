//! A grid on all cores: parts of it, each on a copy of global memory, if CTAs are independent of each other.
//!
//! That is checked afterwards: if one part wrote what another touched, the results are discarded, and the grid runs
//! again in one piece. Called by `launch.rs`. How a grid is split, and so the outcome, depends on no machine.

use crate::{
    error::SimError,
    machine::{Context, Machine},
    memory::GlobalMemory,
};
use flashcore_ptx::{
    inst::{Inst, Operand},
    module::Module,
    op::{Mod, Op},
    types::SpecialReg,
};
use std::{
    ops::Range,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

/// Most parts of a grid.
const MOST: u32 = 16;
/// Fewest clusters of a part.
const FEWEST: u32 = 4;
/// Bytes of global memory beyond which copies would cost more than they save.
const MOST_BYTES: usize = 32 << 20;

/// Runs a launch to its end, on as many cores as it allows.
pub(crate) fn run<'m>(
    context: &'m Context<'m>,
    module: &Module,
    global: GlobalMemory,
) -> Result<Machine<'m>, SimError> {
    let whole = 0..context.geometry.clusters;
    let parts = (whole.end / FEWEST).min(MOST);
    // The shadow by which races are found is also what tells whether parts have met.
    let may = context.options.checks.race && global.bytes() <= MOST_BYTES && !communicates(module);
    if parts >= 2 && may {
        let bound = |part: u32| (u64::from(whole.end) * u64::from(part) / u64::from(parts)) as u32;
        let ranges: Vec<_> = (0..parts).map(|part| bound(part)..bound(part + 1)).collect();
        if let Some(machine) = joined(run_all(context, &global, &ranges)?, &global) {
            return Ok(machine);
        }
    }
    let mut machine = Machine::new(context, global, whole);
    machine.run()?;
    Ok(machine)
}

/// Runs each range of clusters on its own memory; ranges behind one that a finding ended may be missing.
fn run_all<'m>(
    context: &'m Context<'m>,
    global: &GlobalMemory,
    ranges: &[Range<u32>],
) -> Result<Vec<Machine<'m>>, SimError> {
    let (next, last) = (AtomicUsize::new(0), AtomicUsize::new(ranges.len()));
    let done = Mutex::new(Vec::new());
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(range) = ranges.get(at).filter(|_| at <= last.load(Ordering::Relaxed)) else { return };
            let mut machine = Machine::new(context, global.copy(), range.clone());
            let result = machine.run();
            if result.is_err() || machine.halted {
                last.fetch_min(at, Ordering::Relaxed);
            }
            if let Ok(mut done) = done.lock() {
                done.push((at, result.map(|()| machine)));
            }
        }
    };
    let workers = thread::available_parallelism().map_or(1, usize::from).min(ranges.len());
    // The caller works too: it may be the thread that interrupts come to.
    thread::scope(|scope| {
        (1..workers).for_each(|_| drop(scope.spawn(work)));
        work();
    });
    let mut done = done.into_inner().unwrap_or_default();
    done.sort_by_key(|(at, _)| *at);
    done.truncate(last.into_inner().saturating_add(1));
    done.into_iter().map(|(_, machine)| machine).collect()
}

/// One machine with what all have done, unless two have met.
fn joined<'m>(machines: Vec<Machine<'m>>, original: &GlobalMemory) -> Option<Machine<'m>> {
    let mut machines = machines.into_iter();
    let mut first = machines.next()?;
    for machine in machines {
        if !first.global.join(machine.global, original) {
            return None;
        }
        first.findings.join(machine.findings);
        first.counters.join(&machine.counters);
        first.hits.join(&machine.hits);
        first.printed += &machine.printed;
        first.suspects.extend(machine.suspects);
        first.halted |= machine.halted;
    }
    Some(first)
}

/// Whether CTAs may have to do with each other, or see how they are run.
fn communicates(module: &Module) -> bool {
    let meets = |inst: &Inst| {
        let shared = [Mod::Shared, Mod::SharedCta, Mod::SharedCluster].iter().any(|space| inst.has(*space));
        let strong = [Mod::Volatile, Mod::Relaxed, Mod::Acquire, Mod::Release].iter().any(|o| inst.has(*o));
        match inst.op {
            Op::Atom | Op::Red => !shared,
            Op::Ld | Op::St => strong && !shared,
            Op::CpReduceAsyncBulk | Op::CpReduceAsyncBulkTensor => true,
            _ => inst.operands.iter().any(watches),
        }
    };
    module.units().any(|(_, unit)| unit.instructions().any(|(_, inst)| meets(inst)))
}

fn watches(operand: &Operand) -> bool {
    use SpecialReg as S;
    let Operand::Special(special) = operand else { return false };
    matches!(
        special,
        S::Clock
            | S::Clock64
            | S::Globaltimer
            | S::GlobaltimerLo
            | S::Smid
            | S::Nsmid
            | S::Envreg1
            | S::Envreg2
    )
}
