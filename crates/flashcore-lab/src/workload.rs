//! A task with its data: the same inputs for every competitor, in memory and, where another process needs them, in
//! files.

use std::{borrow::Cow, cell::OnceCell, fs, path::Path};

use flashcore_core::{
    Backend, BackwardCall, BackwardInputs, BackwardProblem, Data, GradientsMut, HostCall, Ids, Instance,
    MoeCall, MoeInputs, MoeProblem, Problem, Ran, Routed, RowTerms, Values,
};
use flashcore_kernels::{host_values, slots};
use flashcore_testkit::{Kind, Rng, kinds::Part};
use tempfile::TempDir;

use crate::{
    buffer::{Buffer, filled},
    error::LabError,
    judge::gradients,
    task::{Operation, Task},
};

/// Elements of the block of random numbers that weights repeat: an odd number, so that no two experts are alike.
const BLOCK: usize = (16 << 20) + 1031;

/// A task and its inputs.
#[derive(Debug)]
pub struct Workload {
    task: Task,
    values: Values,
    inputs: Inputs,
    files: OnceCell<TempDir>,
}

/// Tensors, by operation.
#[derive(Debug)]
enum Inputs {
    Attention {
        qkv: [Buffer; 3],
        /// Of gradients: the output's gradient, and what it is when results are judged.
        d_out: Option<[Buffer; 2]>,
    },
    Experts {
        /// Tokens and both matrices of the experts.
        tensors: [Buffer; 3],
        /// Experts of each token, one routing after another.
        ids: Vec<i32>,
        weights: Vec<f32>,
    },
}

/// What a competitor computed.
#[derive(Clone, PartialEq, Debug)]
pub struct Outputs {
    /// The result, or the gradients of Q, K and V.
    pub tensors: Vec<Buffer>,
    /// The LSE of each row, where the competitor gives it.
    pub lse: Option<Vec<f32>>,
}

/// Which inputs a call takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    /// Those that are judged.
    Judged,
    /// Those of the n-th call that is timed.
    Timed(usize),
}

/// An input as bytes.
pub struct Array<'a> {
    pub name: &'static str,
    pub bytes: Cow<'a, [u8]>,
    /// How often the bytes are to lie in device memory, one after another.
    pub copies: usize,
    /// Sets in all of it that calls take in turn.
    pub sets: usize,
}

impl<'a> Array<'a> {
    fn one(name: &'static str, bytes: impl Into<Cow<'a, [u8]>>) -> Self {
        Self { name, bytes: bytes.into(), copies: 1, sets: 1 }
    }
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

/// A normal gradient of the output.
pub fn drawn_d_out(problem: &BackwardProblem, seed: u64) -> Result<Buffer, LabError> {
    let (dtype, dims) = (problem.forward().out_dtype(), problem.d_out().dims());
    Buffer::drawn(dtype, dims, Kind::Normal, Part::Q, seed.wrapping_mul(3).wrapping_add(1 << 40))
}

impl Workload {
    /// Inputs of the task's kind of data, sinks included.
    pub fn new(task: Task, seed: u64) -> Result<Self, LabError> {
        let (kind, values) = (task.spec().kind(), task.values(seed));
        let attention = |problem: &Problem, d_out| -> Result<Inputs, LabError> {
            values.check(problem)?;
            Ok(Inputs::Attention { qkv: drawn_inputs(problem, kind, seed)?, d_out })
        };
        let inputs = match task.operation() {
            Operation::Forward(problem) => attention(problem, None)?,
            Operation::Backward(problem) => {
                let d_out = drawn_d_out(problem, seed)?;
                let mut judged = d_out.clone();
                gradients::keep_rows(&mut judged, problem);
                attention(problem.forward(), Some([d_out, judged]))?
            }
            Operation::Experts(problem) => experts(problem, task.sets(), seed)?,
        };
        Ok(Self { task, values, inputs, files: OnceCell::new() })
    }

    /// The task.
    pub fn task(&self) -> &Task {
        &self.task
    }

    /// The attention that it is about, with its lengths and sinks.
    pub fn instance(&self) -> Option<Instance<'_>> {
        let problem = match self.task.operation() {
            Operation::Forward(problem) => problem,
            Operation::Backward(problem) => problem.forward(),
            Operation::Experts(_) => return None,
        };
        Some(Instance::new(problem, &self.values).expect("checked when the workload was made"))
    }

    /// Q, K and V, or tokens and both matrices of the experts.
    pub fn inputs(&self) -> [Data<'_>; 3] {
        match &self.inputs {
            Inputs::Attention { qkv: tensors, .. } | Inputs::Experts { tensors, .. } => {
                tensors.each_ref().map(Buffer::data)
            }
        }
    }

    /// The output's gradient, where the task is about gradients.
    pub fn d_out(&self, turn: Turn) -> Option<Data<'_>> {
        let Inputs::Attention { d_out: Some([timed, judged]), .. } = &self.inputs else { return None };
        Some(if turn == Turn::Judged { judged.data() } else { timed.data() })
    }

    /// What a mixture of experts reads.
    pub fn experts(&self, turn: Turn) -> Option<MoeInputs<'_>> {
        let (Inputs::Experts { ids, weights, .. }, [x, gate_up, down]) = (&self.inputs, self.inputs()) else {
            return None;
        };
        let set = if let Turn::Timed(n) = turn { n % self.task.sets() } else { 0 };
        let ids = Ids::I32(&ids[set * weights.len()..][..weights.len()]);
        let routed = Routed::Given { ids, weights: Data::F32(weights) };
        Some(MoeInputs { x, gate_up, down, biases: None, shared: None, routed })
    }

    /// Poisoned outputs, with room for the LSE of forward.
    pub fn outputs(&self) -> Result<Outputs, LabError> {
        let dtype = self.task.dtype();
        let poisoned = |spans: &[usize]| -> Result<Vec<_>, LabError> {
            spans.iter().map(|&span| Buffer::poisoned(dtype, span)).collect()
        };
        Ok(match self.task.operation() {
            Operation::Forward(p) => {
                Outputs { tensors: poisoned(&[p.out().span()])?, lse: Some(filled(f32::NAN, p.rows())?) }
            }
            Operation::Backward(p) => {
                let spans = [p.dq(), p.dk(), p.dv()].map(|layout| layout.span());
                Outputs { tensors: poisoned(&spans)?, lse: None }
            }
            Operation::Experts(p) => Outputs { tensors: poisoned(&[p.out().span()])?, lse: None },
        })
    }

    /// What a backend keeps of forward for gradients; nothing where the task is not about them.
    pub fn saved(&self, backend: &dyn Backend) -> Result<Option<Outputs>, LabError> {
        let Operation::Backward(problem) = self.task.operation() else { return Ok(None) };
        let p = problem.forward();
        let out = Buffer::poisoned(p.out_dtype(), p.out().span())?;
        let mut saved = Outputs { tensors: vec![out], lse: Some(filled(f32::NAN, p.rows())?) };
        backend.forward(&mut self.bound(p, &mut saved, true)?)?;
        Ok(Some(saved))
    }

    fn bound<'a>(
        &'a self,
        problem: &'a Problem,
        outputs: &'a mut Outputs,
        lse: bool,
    ) -> Result<HostCall<'a>, LabError> {
        let Outputs { tensors, lse: rows } = outputs;
        let (out, rows) = (tensors[0].data_mut(), rows.as_deref_mut().filter(|_| lse));
        Ok(HostCall::bind_erased(problem, &self.values, self.inputs(), out, rows)?)
    }

    /// Forward attention bound to memory: what a backend takes.
    pub fn call<'a>(&'a self, outputs: &'a mut Outputs) -> Result<HostCall<'a>, LabError> {
        self.bound(self.task.forward()?, outputs, true)
    }

    /// Lets a backend compute; `saved` is what it kept of forward. Only what is judged has an LSE.
    pub fn compute(
        &self,
        backend: &dyn Backend,
        saved: Option<&Outputs>,
        outputs: &mut Outputs,
        turn: Turn,
    ) -> Result<Ran, LabError> {
        match (self.task.operation(), saved, self.d_out(turn), self.experts(turn)) {
            (Operation::Forward(p), ..) => {
                Ok(backend.forward(&mut self.bound(p, outputs, turn == Turn::Judged)?)?)
            }
            (Operation::Backward(p), Some(saved), Some(d_out), _) => {
                Ok(backend.backward(&mut self.gradients(p, saved, d_out, outputs)?)?)
            }
            (Operation::Experts(p), .., Some(inputs)) => {
                Ok(backend.moe(&mut MoeCall::bind(p, inputs, outputs.tensors[0].data_mut())?)?)
            }
            _ => unreachable!("gradients have what was saved, and experts their inputs"),
        }
    }

    fn gradients<'a>(
        &'a self,
        problem: &'a BackwardProblem,
        saved: &'a Outputs,
        d_out: Data<'a>,
        outputs: &'a mut Outputs,
    ) -> Result<BackwardCall<'a>, LabError> {
        let lse = saved.lse.as_deref().unwrap_or_default();
        let terms = RowTerms::Out(saved.tensors[0].data());
        let inputs = BackwardInputs { qkv: self.inputs(), lse, terms, d_out };
        let [dq, dk, dv] = &mut outputs.tensors[..] else { unreachable!("three gradients") };
        let qkv = [dq, dk, dv].map(Buffer::data_mut);
        Ok(BackwardCall::bind(problem, &self.values, inputs, GradientsMut { qkv, sinks: None })?)
    }

    /// Every input as bytes, by name.
    pub fn arrays(&self) -> Vec<Array<'_>> {
        let [first, second, third] = self.inputs().map(|data| Array::one("", data.bytes()));
        let sets = self.task.sets();
        match &self.inputs {
            Inputs::Experts { ids, weights, .. } => {
                let ids = bytemuck::cast_slice(ids);
                vec![
                    Array { name: "x", ..first },
                    Array { name: "gate_up", ..second },
                    Array { name: "down", ..third },
                    Array { sets, ..Array::one("ids", ids) },
                    Array::one("weights", bytemuck::cast_slice(weights)),
                ]
            }
            Inputs::Attention { d_out, .. } => {
                let [k, v] = [("k", second), ("v", third)].map(|(name, array)| Array {
                    name,
                    copies: sets,
                    sets,
                    ..array
                });
                let mut arrays = vec![Array { name: "q", ..first }, k, v];
                let given = d_out.iter().flatten().zip(["d_out", "d_judged"]);
                arrays.extend(given.map(|(tensor, name)| Array::one(name, tensor.data().bytes())));
                arrays.extend(self.instance().into_iter().flat_map(host_values).filter_map(
                    |(slot, bytes)| {
                        let (_, name) = NUMBERS.into_iter().find(|(known, _)| *known == slot)?;
                        Some(Array::one(name, bytes))
                    },
                ));
                arrays
            }
        }
    }

    /// A folder that holds every input as raw bytes in a file of its name; in memory where the system has such.
    pub fn folder(&self) -> Result<&Path, LabError> {
        if let Some(folder) = self.files.get() {
            return Ok(folder.path());
        }
        // Memory may have no room for gigabytes of weights.
        let memory = self.written_to(Path::new("/dev/shm"));
        let folder = memory.or_else(|_| self.written_to(&std::env::temp_dir()))?;
        Ok(self.files.get_or_init(|| folder).path())
    }

    fn written_to(&self, parent: &Path) -> Result<TempDir, LabError> {
        let folder = tempfile::Builder::new().prefix("flashcore-").tempdir_in(parent);
        let folder = folder.map_err(LabError::io("make a folder in", parent))?;
        for Array { name, bytes, .. } in self.arrays() {
            let path = folder.path().join(name);
            fs::write(&path, bytes).map_err(LabError::io("write", path))?;
        }
        Ok(folder)
    }
}

/// Names of what a call brings beside tensors.
const NUMBERS: [(slots::Slot, &str); 4] = [
    (slots::LENGTHS_Q, "lengths_q"),
    (slots::LENGTHS_KV, "lengths_kv"),
    (slots::TABLE, "table"),
    (slots::SINKS, "sinks"),
];

/// Tokens, weights and routings of a layer.
fn experts(problem: &MoeProblem, routings: usize, seed: u64) -> Result<Inputs, LabError> {
    let (dtype, seed) = (problem.dtype(), seed.wrapping_mul(3));
    let weights = |span: usize, cols: usize, seed: u64| {
        // Products keep the size of what they multiply.
        Buffer::repeated(dtype, span, BLOCK, 1.0 / (cols as f32).sqrt(), seed)
    };
    let tensors = [
        Buffer::repeated(dtype, problem.x().span(), BLOCK, 1.0, seed)?,
        weights(problem.gate_up().span(), problem.hidden(), seed.wrapping_add(1))?,
        weights(problem.down().span(), problem.intermediate(), seed.wrapping_add(2))?,
    ];
    let mut rng = Rng::new(seed);
    let mut ids = Vec::with_capacity(routings * problem.entries());
    for _ in 0..routings * problem.tokens() {
        let chosen = rng.permutation(problem.experts()).into_iter().take(problem.top_k());
        ids.extend(chosen.map(|expert| expert as i32));
    }
    let weights = (0..problem.entries()).map(|_| rng.uniform() / problem.top_k() as f32).collect();
    Ok(Inputs::Experts { tensors, ids, weights })
}
