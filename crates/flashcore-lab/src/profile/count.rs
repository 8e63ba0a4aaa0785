//! What a launch does, counted by the simulator: for reviewing a change where there is no GPU.

use std::{collections::BTreeMap, sync::Arc};

use flashcore_kernels::{Gpu, tuned::Table};
use serde::Serialize;

use crate::{
    error::LabError,
    simulator::{Simulator, judge},
    task::Task,
    workload::Workload,
};

/// Multiply-adds beyond which a problem takes the simulator too long: about half a minute.
const MOST_WORK: f64 = 4e7;

/// Counts of one launch.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Counts {
    /// Warp instructions in all.
    pub instructions: u64,
    /// Warp instructions by kind of work.
    pub by_class: BTreeMap<String, u64>,
    /// Passes that shared memory needed.
    pub shared_wavefronts: u64,
    /// Passes beyond those that a conflict-free access would have needed.
    pub bank_conflicts: u64,
    /// 32-byte sectors of global memory.
    pub global_sectors: u64,
    /// Bytes moved by asynchronous copies.
    pub async_bytes: u64,
    /// Multiply-adds on tensor cores.
    pub tensor_macs: u64,
    /// Multiply-adds that the problem needs.
    pub needed_macs: u64,
}

/// Runs `task` as on `gpu`, planned with `table`; `None` where that would take too long or there is nothing to compute.
pub fn count(task: &Task, gpu: Gpu, table: Arc<Table>) -> Result<Option<Counts>, LabError> {
    let needed = task.flops() / 2.0;
    if needed > MOST_WORK {
        return Ok(None);
    }
    let workload = Workload::new(task.clone(), 0)?;
    let mut outputs = workload.outputs()?;
    let simulator = Simulator::new(gpu).with_table(table);
    let plan = simulator.plan(task.problem())?;
    let Some(outcome) = simulator.launch(&mut workload.call(&mut outputs, false)?, &plan)? else {
        return Ok(None);
    };
    judge(&outcome)?;
    let counters = outcome.counters;
    Ok(Some(Counts {
        instructions: counters.total_instructions(),
        by_class: counters
            .instructions
            .iter()
            .map(|(class, n)| (format!("{class:?}").to_lowercase(), *n))
            .collect(),
        shared_wavefronts: counters.shared_wavefronts,
        bank_conflicts: counters.bank_conflicts,
        global_sectors: counters.global_sectors,
        async_bytes: counters.async_bytes,
        tensor_macs: counters.tensor_macs,
        needed_macs: needed as u64,
    }))
}
