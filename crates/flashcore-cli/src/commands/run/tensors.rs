//! The memory of one request: inputs made or read straight into their element type, outputs poisoned.

use std::hash::{DefaultHasher, Hasher};

use flashcore_core::{Backend, BackendError, Data, HostCall, Problem, Ran, Values};
use flashcore_lab::{
    buffer::{Buffer, filled},
    workload::normal_inputs,
};

use super::request::{Request, Source};
use crate::error::CliError;

/// Inputs and outputs of a problem.
#[derive(Debug)]
pub struct Tensors {
    inputs: [Buffer; 3],
    values: Values,
    out: Buffer,
    lse: Vec<f32>,
}

impl Tensors {
    /// Makes or reads the inputs and allocates the outputs.
    pub fn prepare(request: &mut Request) -> Result<Self, CliError> {
        let p = &request.problem;
        let inputs = match &mut request.source {
            Source::Seed(seed) => normal_inputs(p, *seed)?,
            Source::Files(files) => {
                let [q, k, v] = &mut files.inputs;
                [q.read()?, k.read()?, v.read()?]
            }
        };
        let out = Buffer::poisoned(p.dtype(), p.out().span())?;
        Ok(Self { inputs, values: request.values.clone(), out, lse: filled(f32::NAN, p.rows())? })
    }

    /// Computes the outputs.
    pub fn forward(&mut self, backend: &dyn Backend, problem: &Problem) -> Result<Ran, BackendError> {
        self.call(problem, |call| backend.forward(call))
    }

    /// Hands the tensors to whoever computes the outputs.
    pub fn call<T>(
        &mut self,
        problem: &Problem,
        compute: impl FnOnce(&mut HostCall<'_>) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let inputs = self.inputs.each_ref().map(Buffer::data);
        let (values, out, lse) = (&self.values, self.out.data_mut(), Some(&mut self.lse[..]));
        compute(&mut HostCall::bind_erased(problem, values, inputs, out, lse)?)
    }

    /// Lengths and sinks.
    pub fn values(&self) -> &Values {
        &self.values
    }

    /// Q, K and V.
    pub fn inputs(&self) -> [Data<'_>; 3] {
        self.inputs.each_ref().map(Buffer::data)
    }

    /// The result.
    pub fn out(&self) -> Data<'_> {
        self.out.data()
    }

    /// The log-sum-exp of each row.
    pub fn lse(&self) -> &[f32] {
        &self.lse
    }

    /// A number that tells whether two runs gave the same bits.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        hasher.write(self.out.data().bytes());
        hasher.write(Data::F32(&self.lse).bytes());
        hasher.finish()
    }
}
