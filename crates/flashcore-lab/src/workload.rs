//! A task with its data: the same inputs for every competitor, in memory and, where another process needs them, in
//! files.

use std::{cell::OnceCell, fs, path::Path};

use flashcore_core::{Data, HostCall, Instance, Problem, Values};
use flashcore_testkit::{Kind, kinds::Part};
use tempfile::TempDir;

use crate::{
    buffer::{Buffer, filled},
    error::LabError,
    task::Task,
};

/// A task and its inputs.
#[derive(Debug)]
pub struct Workload {
    task: Task,
    values: Values,
    inputs: [Buffer; 3],
    files: OnceCell<TempDir>,
}

/// What a competitor computed.
#[derive(Clone, PartialEq, Debug)]
pub struct Outputs {
    pub out: Buffer,
    /// The LSE of each row, where the competitor gives it.
    pub lse: Option<Vec<f32>>,
}

/// Q, K and V of `problem`, whose tensors are dense.
pub fn drawn_inputs(problem: &Problem, kind: Kind, seed: u64) -> Result<[Buffer; 3], LabError> {
    let draw = |part: Part| {
        let layout = [problem.q(), problem.k(), problem.v()][part as usize];
        let seed = seed.wrapping_mul(3).wrapping_add(part as u64);
        Buffer::drawn(problem.dtype(), layout.dims(), kind, part, seed)
    };
    let [q, k, v] = Part::ALL.map(draw);
    Ok([q?, k?, v?])
}

impl Workload {
    /// Inputs of the task's kind of data, sinks included.
    pub fn new(task: Task, seed: u64) -> Result<Self, LabError> {
        let inputs = drawn_inputs(task.problem(), task.spec().kind, seed)?;
        let values = task.values(seed);
        values.check(task.problem())?;
        Ok(Self { task, values, inputs, files: OnceCell::new() })
    }

    /// The task.
    pub fn task(&self) -> &Task {
        &self.task
    }

    /// The task's problem with its sinks.
    pub fn instance(&self) -> Instance<'_> {
        Instance::new(self.task.problem(), &self.values).expect("checked when the workload was made")
    }

    /// Q, K and V.
    pub fn inputs(&self) -> [Data<'_>; 3] {
        self.inputs.each_ref().map(Buffer::data)
    }

    /// Poisoned outputs, with room for the LSE.
    pub fn outputs(&self) -> Result<Outputs, LabError> {
        let p = self.task.problem();
        let out = Buffer::poisoned(p.dtype(), p.out().span())?;
        Ok(Outputs { out, lse: Some(filled(f32::NAN, p.rows())?) })
    }

    /// The task bound to memory: what a backend takes.
    pub fn call<'a>(&'a self, outputs: &'a mut Outputs, lse: bool) -> Result<HostCall<'a>, LabError> {
        let lse = outputs.lse.as_deref_mut().filter(|_| lse);
        Ok(HostCall::bind_erased(
            self.task.problem(),
            &self.values,
            self.inputs(),
            outputs.out.data_mut(),
            lse,
        )?)
    }

    /// A folder that holds Q, K and V as raw bytes in files `q`, `k` and `v`; in memory where the system has such.
    pub fn folder(&self) -> Result<&Path, LabError> {
        if let Some(folder) = self.files.get() {
            return Ok(folder.path());
        }
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let folder = tempfile::Builder::new().prefix("flashcore-").tempdir_in(&parent);
        let folder = folder.map_err(LabError::io("make a folder in", parent))?;
        for (name, data) in ["q", "k", "v"].into_iter().zip(self.inputs()) {
            let path = folder.path().join(name);
            fs::write(&path, data.bytes()).map_err(LabError::io("write", path))?;
        }
        Ok(self.files.get_or_init(|| folder).path())
    }
}
