//! What `run` was asked to do, checked: after [`Request::parse`] only the machine can fail.

use std::path::{Path, PathBuf};

use flashcore::{DType, Dims, Operand, Problem, ProblemError, Values};
use flashcore_core::Data;
use flashcore_lab::save;

use super::{
    flags::{FileNames, Flags},
    tensors::Tensors,
};
use crate::{
    error::CliError,
    files::{ArrayFile, FileError, Target, TensorPath},
};

/// The element type of made tensors unless another is asked for.
const USUAL_DTYPE: DType = DType::F16;

/// A problem, where its tensors come from, where results go, and how often to run it.
#[derive(Debug)]
pub struct Request {
    pub problem: Problem,
    pub values: Values,
    pub source: Source,
    /// Timed runs; as many as are sensible where `None`.
    pub times: Option<usize>,
}

/// Where tensors come from.
#[derive(Debug)]
pub enum Source {
    /// Standard normal numbers.
    Seed(u64),
    /// Files that were opened and whose headers are right.
    Files(Box<Files>),
}

/// The files of a request.
#[derive(Debug)]
pub struct Files {
    pub inputs: [ArrayFile; 3],
    out: Target,
    lse: Option<Target>,
    /// Whether the arrays have a batch dimension.
    batched: bool,
}

impl Request {
    /// Makes sense of flags: opens inputs, checks outputs, parses the problem.
    pub fn parse(flags: Flags) -> Result<Self, CliError> {
        let (dtype, dims, source) = match flags.files.names() {
            Some(names) => from_files(&names, flags.dtype)?,
            None => (flags.dtype.unwrap_or(USUAL_DTYPE), flags.tensors.dims(), Source::Seed(flags.seed)),
        };
        let problem = flags.attention.problem(dtype, dims)?;
        let values = flags.attention.values(problem.heads_q(), flags.seed);
        values.check(&problem)?;
        Ok(Self { problem, values, source, times: flags.iters.map(|n| n as usize) })
    }

    /// Bytes of all tensors together.
    pub fn bytes(&self) -> u64 {
        let p = &self.problem;
        let spans = [p.q(), p.k(), p.v(), p.out()].map(|layout| layout.span() as u64);
        let elements = spans.into_iter().fold(0, u64::saturating_add);
        let lse = (p.rows() as u64).saturating_mul(size_of::<f32>() as u64);
        elements.saturating_mul(p.dtype().bytes() as u64).saturating_add(lse)
    }

    /// Writes results where they were asked for.
    pub fn save(&self, tensors: &Tensors) -> Result<(), FileError> {
        let Source::Files(files) = &self.source else { return Ok(()) };
        let dims = self.problem.out().dims().array();
        let shape = if files.batched { &dims[..] } else { &dims[1..] };
        if let Some(lse) = &files.lse {
            lse.save(&shape[..shape.len() - 1], Data::F32(tensors.lse()))?;
        }
        files.out.save(shape, tensors.out())
    }

    /// Files that [`Request::save`] writes.
    pub fn outputs(&self) -> Vec<&Path> {
        match &self.source {
            Source::Seed(_) => Vec::new(),
            Source::Files(files) => {
                [Some(&files.out), files.lse.as_ref()].into_iter().flatten().map(Target::path).collect()
            }
        }
    }
}

fn from_files(names: &FileNames, expected: Option<DType>) -> Result<(DType, [Dims; 3], Source), CliError> {
    let open = |path: &TensorPath, usual| ArrayFile::open(path, usual, expected);
    let inputs = [open(&names.q, "q")?, open(&names.k, "k")?, open(&names.v, "v")?];
    let dtype = common_dtype(&inputs)?;
    if let Some(expected) = expected.filter(|&expected| expected != dtype) {
        return Err(FileError::DType { path: names.q.path().to_owned(), got: dtype, expected }.into());
    }
    let [q, k, v] = &inputs;
    let dims = [q.dims()?, k.dims()?, v.dims()?];
    let save_lse = |path: &TensorPath| Target::check(path, "lse", DType::F32, names.force);
    let files = Files {
        batched: q.rank() == 4,
        out: Target::check(&names.out, "out", dtype, names.force)?,
        lse: names.lse.as_ref().map(save_lse).transpose()?,
        inputs,
    };
    if let Some(lse) = files.lse.as_ref().filter(|lse| save::same(lse.path(), files.out.path())) {
        let (flags, path) = ("--out and --lse", PathBuf::from(lse.path()));
        return Err(FileError::SameFile { flags, path }.into());
    }
    Ok((dtype, dims, Source::Files(Box::new(files))))
}

fn common_dtype([q, k, v]: &[ArrayFile; 3]) -> Result<DType, ProblemError> {
    let expected = q.dtype();
    for (operand, file) in [(Operand::K, k), (Operand::V, v)] {
        if file.dtype() != expected {
            return Err(ProblemError::DType { operand, got: file.dtype(), expected });
        }
    }
    Ok(expected)
}
