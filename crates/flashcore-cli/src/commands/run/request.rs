//! What `run` was asked to do, checked: after [`Request::parse`] only the machine can fail. And the memory for it:
//! inputs made or read straight into their element type, outputs poisoned.

use std::{
    hash::{DefaultHasher, Hasher},
    path::Path,
};

use flashcore::{
    BackendError, DType, Dims, Lengths, Operand, PageTable, Problem, ProblemError, Spec, Values,
};
use flashcore_core::{Data, HostCall};
use flashcore_lab::{
    buffer::{Buffer, filled},
    save,
    workload::drawn_inputs,
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
    out: Target,
    lse: Option<Target>,
    /// Whether the arrays have a batch dimension.
    batched: bool,
}

impl Request {
    /// Makes sense of flags: opens inputs, checks outputs, parses the problem.
    pub fn parse(flags: Flags) -> Result<Self, CliError> {
        let (dtype, dims, source) = match &flags.files {
            FileFlags { q: Some(q), k: Some(k), v: Some(v), out: Some(out), .. } => {
                from_files([q, k, v], out, &flags.files, flags.dtype)?
            }
            _ => (
                flags.dtype.unwrap_or(USUAL_DTYPE),
                flags.tensors.dims(),
                Source::Drawn { kind: flags.kind, seed: flags.seed },
            ),
        };
        let values = cache_values(&flags, dims);
        let spec = flags.attention.spec(dtype, page_dims(&flags.cache, dims))?;
        let sinks = spec.sinks;
        let problem = Spec { sinks, ..spec.with(&values) }.parse()?;
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
            lse.save(&shape[..shape.len() - 1], Data::F32(&tensors.lse))?;
        }
        files.out.save(shape, tensors.out.data())
    }

    /// Files that [`Request::save`] writes.
    pub fn outputs(&self) -> Vec<&Path> {
        let Source::Files(files) = &self.source else { return Vec::new() };
        [Some(&files.out), files.lse.as_ref()].into_iter().flatten().map(Target::path).collect()
    }
}

/// Sinks, lengths and pages of drawn tensors.
fn cache_values(flags: &Flags, [q, k, _]: [Dims; 3]) -> Values {
    let (values, cache) = (flags.attention.values(q.heads, flags.seed), &flags.cache);
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
    out: &TensorPath,
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
    let files = Files {
        batched: inputs[0].rank() == 4,
        out: Target::check(out, "out", dtype, flags.force)?,
        lse: flags.lse.as_ref().map(save_lse).transpose()?,
        inputs,
    };
    if let Some(lse) = files.lse.as_ref().filter(|lse| save::same(lse.path(), files.out.path())) {
        let (flags, path) = ("--out and --lse", lse.path().to_owned());
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

/// Inputs and outputs of a problem.
#[derive(Debug)]
pub struct Tensors {
    inputs: [Buffer; 3],
    pub values: Values,
    pub out: Buffer,
    /// The log-sum-exp of each row.
    pub lse: Vec<f32>,
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
        Ok(Self { inputs, values: request.values.clone(), out, lse: filled(f32::NAN, p.rows())? })
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
        hasher.write(self.out.data().bytes());
        hasher.write(Data::F32(&self.lse).bytes());
        hasher.finish()
    }
}
