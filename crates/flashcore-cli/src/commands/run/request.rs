//! What `run` was asked to do, checked: after [`Request::parse`] only the machine can fail. And the memory for it:
//! inputs made or read straight into their element type, outputs poisoned.

use std::{
    hash::{DefaultHasher, Hasher},
    path::Path,
};

use flashcore::{
    BackendError, BackwardProblem, BackwardSpec, DType, Dims, Dropout, Layout, Lengths, Operand, PageTable,
    Problem, ProblemError, Spec, Values,
};
use flashcore_core::{BackwardCall, BackwardInputs, Data, GradientsMut, HostCall, RowTerms};
use flashcore_lab::{
    LabError,
    buffer::{Buffer, filled},
    save,
    workload::{drawn_d_out, drawn_inputs},
};
use flashcore_testkit::{Kind, Rng};

use super::flags::{CacheFlags, FileFlags, Flags};
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
    /// Its gradients, where those are asked for.
    pub backward: Option<BackwardProblem>,
    pub values: Values,
    pub source: Source,
    /// Timed runs; as many as are sensible where `None`.
    pub times: Option<usize>,
}

/// Where tensors come from.
#[derive(Debug)]
pub enum Source {
    /// Random numbers.
    Drawn { kind: Kind, seed: u64 },
    /// Files that were opened and whose headers are right.
    Files(Box<Files>),
}

/// The files of a request.
#[derive(Debug)]
pub struct Files {
    pub inputs: [ArrayFile; 3],
    d_out: Option<ArrayFile>,
    /// The result, or the gradients of Q, K and V.
    results: Vec<Target>,
    lse: Option<Target>,
    /// Whether the arrays have a batch dimension.
    batched: bool,
}

impl Request {
    /// Makes sense of flags: opens inputs, checks outputs, parses the problem.
    pub fn parse(flags: Flags) -> Result<Self, CliError> {
        let (dtype, dims, source) = match &flags.files {
            FileFlags { q: Some(q), k: Some(k), v: Some(v), .. } => {
                from_files([q, k, v], &flags.files, flags.dtype)?
            }
            _ => (
                flags.dtype.unwrap_or(USUAL_DTYPE),
                flags.tensors.dims(),
                Source::Drawn { kind: flags.kind, seed: flags.seed },
            ),
        };
        let values = cache_values(&flags, dims);
        let spec = flags.attention.spec(dtype, page_dims(&flags.cache, dims))?;
        let (sinks, dropout) = (spec.sinks, flags.dropout.map(Dropout::new));
        let problem = Spec { sinks, dropout, ..spec.with(&values) }.parse()?;
        values.check(&problem)?;
        let backward = flags.backward.then(|| gradients(&problem, &source)).transpose()?;
        Ok(Self { problem, backward, values, source, times: flags.iters.map(|n| n as usize) })
    }

    /// Bytes of all tensors together.
    pub fn bytes(&self) -> u64 {
        let p = &self.problem;
        let spans = [p.q(), p.k(), p.v(), p.out()].map(|layout| layout.span() as u64);
        let elements = spans.into_iter().fold(0, u64::saturating_add);
        let lse = (p.rows() as u64).saturating_mul(size_of::<f32>() as u64);
        // Of gradients: as much again, and what was kept while others are judged.
        let elements = elements.saturating_mul(if self.backward.is_some() { 3 } else { 1 });
        elements.saturating_mul(p.dtype().bytes() as u64).saturating_add(lse)
    }

    /// Writes results where they were asked for.
    pub fn save(&self, tensors: &Tensors) -> Result<(), FileError> {
        let Source::Files(files) = &self.source else { return Ok(()) };
        let shape = |dims: Dims| dims.array()[usize::from(!files.batched)..].to_vec();
        if let Some(lse) = &files.lse {
            let rows = shape(self.problem.out().dims());
            lse.save(&rows[..rows.len() - 1], Data::F32(&tensors.lse))?;
        }
        let layouts = match &self.backward {
            Some(problem) => vec![problem.dq(), problem.dk(), problem.dv()],
            None => vec![self.problem.out()],
        };
        let mut results = files.results.iter().zip(layouts).zip(tensors.results());
        results.try_for_each(|((target, layout), data)| target.save(&shape(layout.dims()), data.data()))
    }

    /// Floating-point operations.
    pub fn flops(&self) -> f64 {
        self.backward.as_ref().map_or_else(|| self.problem.flops(), BackwardProblem::flops)
    }

    /// Files that [`Request::save`] writes.
    pub fn outputs(&self) -> Vec<&Path> {
        let Source::Files(files) = &self.source else { return Vec::new() };
        files.results.iter().chain(&files.lse).map(Target::path).collect()
    }
}

/// Sinks, lengths and pages of drawn tensors, and what decides about dropout.
fn cache_values(flags: &Flags, [q, k, _]: [Dims; 3]) -> Values {
    let (cache, seed) = (&flags.cache, flags.dropout.map(|_| flags.dropout_seed.unwrap_or(flags.seed)));
    let values = Values { seed, ..flags.attention.values(q.heads, flags.seed) };
    let given = (!cache.lengths.is_empty()).then(|| cache.lengths.clone());
    let Some(size) = cache.page_size else {
        return Values { lengths: given.map_or(Lengths::Uniform, Lengths::keys), ..values };
    };
    let lengths = given.unwrap_or_else(|| vec![u32::try_from(k.seq).unwrap_or(u32::MAX); k.batch]);
    let columns = k.seq.div_ceil(size.max(1));
    let order = Rng::new(flags.seed).permutation(k.batch.saturating_mul(columns).min(MOST_PAGES));
    let numbers: Vec<i32> = order.into_iter().map(|page| page as i32).collect();
    Values { lengths: Lengths::keys(lengths), table: Some(PageTable::new(numbers, columns)), ..values }
}

/// Extents of Q, and of K and V as they lie in memory.
fn page_dims(cache: &CacheFlags, [q, k, v]: [Dims; 3]) -> [Dims; 3] {
    let Some(size) = cache.page_size else { return [q, k, v] };
    let pages = k.batch.saturating_mul(k.seq.div_ceil(size.max(1)));
    let paged = |dims: Dims| Dims { batch: pages, seq: size, ..dims };
    [q, paged(k), paged(v)]
}

/// Most pages that are given numbers: what flags say must not decide how much memory is taken.
const MOST_PAGES: usize = 1 << 24;

fn from_files(
    [q, k, v]: [&TensorPath; 3],
    flags: &FileFlags,
    expected: Option<DType>,
) -> Result<(DType, [Dims; 3], Source), CliError> {
    let open = |path: &TensorPath, usual| ArrayFile::open(path, usual, expected);
    let inputs = [open(q, "q")?, open(k, "k")?, open(v, "v")?];
    let dtype = common_dtype(&inputs)?;
    if let Some(expected) = expected.filter(|&expected| expected != dtype) {
        return Err(FileError::DType { path: q.path().to_owned(), got: dtype, expected }.into());
    }
    let dims = [inputs[0].dims()?, inputs[1].dims()?, inputs[2].dims()?];
    let save_lse = |path: &TensorPath| Target::check(path, "lse", DType::F32, flags.force);
    let named = [(&flags.out, "out"), (&flags.dq, "dq"), (&flags.dk, "dk"), (&flags.dv, "dv")];
    let results = named.into_iter().filter_map(|(path, name)| Some((path.as_ref()?, name)));
    let results = results.map(|(path, name)| Target::check(path, name, dtype, flags.force));
    let files = Files {
        batched: inputs[0].rank() == 4,
        d_out: flags.d_out.as_ref().map(|path| open(path, "d_out")).transpose()?,
        results: results.collect::<Result<_, _>>()?,
        lse: flags.lse.as_ref().map(save_lse).transpose()?,
        inputs,
    };
    let targets: Vec<&Target> = files.results.iter().chain(&files.lse).collect();
    for (n, target) in targets.iter().enumerate() {
        if targets[..n].iter().any(|other| save::same(target.path(), other.path())) {
            let path = target.path().to_owned();
            let flags = if files.d_out.is_some() { "--dq, --dk, --dv and --lse" } else { "--out and --lse" };
            return Err(FileError::SameFile { flags, path }.into());
        }
    }
    Ok((dtype, dims, Source::Files(Box::new(files))))
}

/// The gradients of a problem, whose output's gradient may lie in a file.
fn gradients(problem: &Problem, source: &Source) -> Result<BackwardProblem, CliError> {
    let mut spec = BackwardSpec::new(problem.spec().clone());
    if let Source::Files(files) = source
        && let Some(file) = &files.d_out
    {
        let (got, expected) = (file.dtype(), problem.out_dtype());
        if got != expected {
            return Err(ProblemError::OtherDType { operand: Operand::DOut, got, expected }.into());
        }
        spec.d_out = Some(Layout::bhsd(file.dims()?)?);
    }
    Ok(spec.parse()?)
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

/// Inputs and outputs of a problem.
#[derive(Debug)]
pub struct Tensors {
    inputs: [Buffer; 3],
    pub values: Values,
    pub out: Buffer,
    /// The log-sum-exp of each row.
    pub lse: Vec<f32>,
    /// The gradient of the result, and those of Q, K and V, where they are asked for.
    pub backward: Option<(Buffer, [Buffer; 3])>,
}

impl Tensors {
    /// Makes or reads the inputs and allocates the outputs.
    pub fn prepare(request: &mut Request) -> Result<Self, CliError> {
        let p = &request.problem;
        let inputs = match &mut request.source {
            Source::Drawn { kind, seed } => drawn_inputs(p, *kind, *seed)?,
            Source::Files(files) => {
                let [q, k, v] = &mut files.inputs;
                [q.read()?, k.read()?, v.read()?]
            }
        };
        let out = Buffer::poisoned(p.dtype(), p.out().span())?;
        let lse = filled(f32::NAN, p.rows())?;
        let backward = match &request.backward {
            None => None,
            Some(problem) => {
                let d_out = match &mut request.source {
                    Source::Files(files) if files.d_out.is_some() => {
                        files.d_out.as_mut().map(ArrayFile::read).transpose()?
                    }
                    Source::Drawn { seed, .. } => Some(drawn_d_out(problem, *seed)?),
                    Source::Files(_) => Some(drawn_d_out(problem, 0)?),
                };
                let poisoned = |layout: &Layout| Buffer::poisoned(problem.grad_dtype(), layout.span());
                let [dq, dk, dv] = [problem.dq(), problem.dk(), problem.dv()].map(poisoned);
                d_out.map(|d_out| Ok::<_, LabError>((d_out, [dq?, dk?, dv?]))).transpose()?
            }
        };
        Ok(Self { inputs, values: request.values.clone(), out, lse, backward })
    }

    /// What was asked for: the result, or the gradients.
    pub fn results(&self) -> Vec<&Buffer> {
        match &self.backward {
            Some((_, gradients)) => gradients.iter().collect(),
            None => vec![&self.out],
        }
    }

    /// Hands everything to whoever computes the gradients.
    pub fn gradients<T>(
        &mut self,
        problem: &BackwardProblem,
        compute: impl FnOnce(&mut BackwardCall<'_>) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let qkv = self.inputs.each_ref().map(Buffer::data);
        let Some((d_out, [dq, dk, dv])) = &mut self.backward else {
            unreachable!("gradients have their memory")
        };
        let (terms, lse, d_out) = (RowTerms::Out(self.out.data()), &self.lse[..], d_out.data());
        let inputs = BackwardInputs { qkv, lse, terms, d_out };
        let gradients = GradientsMut { qkv: [dq, dk, dv].map(Buffer::data_mut), sinks: None };
        compute(&mut BackwardCall::bind(problem, &self.values, inputs, gradients)?)
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

    /// Q, K and V.
    pub fn inputs(&self) -> [Data<'_>; 3] {
        self.inputs.each_ref().map(Buffer::data)
    }

    /// A number that tells whether two runs gave the same bits.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.results().iter().for_each(|result| hasher.write(result.data().bytes()));
        hasher.write(Data::F32(&self.lse).bytes());
        hasher.finish()
    }
}
