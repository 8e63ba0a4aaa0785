//! A call made ready: which problems on which parts of the tensors; kept per thread, found again by what the call looks like.
//!
//! Most calls are one problem. Batches whose keys start at different places (left padding) are one problem for each run
//! of batch entries with the same keys: K and V are simply looked at from another row on.

use std::{cell::RefCell, sync::Arc};

use flashcore::{DType, Layout, Lengths, Problem, cuda::Ready};
use flashcore_core::{Dims, Spec};

use crate::{
    array::{Array, Place, View},
    device,
    direct::Recipe,
    error::CallError,
    options::Asked,
};

/// Jobs kept by each thread; the oldest gives way.
const KEPT: usize = 32;
/// Widest alignment of addresses that any kernel makes use of, in bytes.
pub(crate) const WIDEST: usize = 16;

/// What makes two calls the same job.
#[derive(Clone, Debug)]
pub(crate) struct Key {
    place: Place,
    dtype: DType,
    inputs: [View; 3],
    /// `None` where the output is made by the job's own [`Recipe`].
    out: Option<View>,
    /// What all addresses are multiples of, in bytes.
    alignment: usize,
    asked: Arc<Asked>,
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.inputs == other.inputs
            && self.out == other.out
            && (self.place, self.dtype, self.alignment) == (other.place, other.dtype, other.alignment)
            && (Arc::ptr_eq(&self.asked, &other.asked) || self.asked == other.asked)
    }
}

/// The problems that a call computes.
pub(crate) struct Job {
    key: Key,
    /// Bytes from the first to the last element of q, k, v and out.
    spans: [usize; 4],
    /// Extents of the log-sum-exp: batch, heads, sequence.
    pub(crate) lse: [usize; 3],
    pub(crate) steps: Vec<Step>,
    /// How to make the output of a call that brings none.
    pub(crate) recipe: Option<Recipe>,
}

/// One problem on a part of the tensors.
pub(crate) struct Step {
    /// Where the parts of q, k, v, out and lse start, in bytes.
    pub(crate) offsets: [usize; 5],
    pub(crate) work: Work,
}

pub(crate) enum Work {
    Host(Box<Problem>),
    Device(Arc<Ready>),
}

thread_local! {
    static JOBS: RefCell<Vec<Arc<Job>>> = const { RefCell::new(Vec::new()) };
}

impl Key {
    /// Without `out` the output will be made, aligned to [`WIDEST`].
    pub(crate) fn new(
        inputs: [&Array; 3],
        out: Option<&Array>,
        place: Place,
        asked: &Arc<Asked>,
    ) -> Result<Self, CallError> {
        let (dtype, mut bits) = (inputs[0].dtype, WIDEST);
        for array in inputs.into_iter().chain(out) {
            if array.dtype != dtype {
                return Err(CallError::dtypes(array.operand, array.dtype, dtype));
            }
            bits |= array.address;
        }
        let alignment = 1 << bits.trailing_zeros();
        let (inputs, out) = (inputs.map(|array| array.view), out.map(|out| out.view));
        Ok(Self { place, dtype, inputs, out, alignment, asked: asked.clone() })
    }
}

/// The job of a call that this thread made before.
pub(crate) fn find(key: &Key) -> Option<Arc<Job>> {
    JOBS.with_borrow_mut(|jobs| {
        let at = jobs.iter().position(|job| job.key == *key)?;
        jobs[..=at].rotate_right(1);
        Some(jobs[0].clone())
    })
}

/// Makes a call ready and keeps it.
#[cold]
pub(crate) fn prepare(key: Key, arrays: [&Array; 4], recipe: Option<Recipe>) -> Result<Arc<Job>, CallError> {
    let order = key.asked.order;
    let job = Arc::new(Job::new(key, arrays, recipe).map_err(|error| error.in_order(order))?);
    JOBS.with_borrow_mut(|jobs| {
        jobs.insert(0, job.clone());
        jobs.truncate(KEPT);
    });
    Ok(job)
}

impl Job {
    fn new(key: Key, arrays: [&Array; 4], recipe: Option<Recipe>) -> Result<Self, CallError> {
        let spec = spec(&key.asked, key.dtype, arrays)?;
        let Dims { batch, heads, seq, .. } = spec.q.dims();
        let layouts = [spec.q, spec.k, spec.v, spec.out.unwrap_or(spec.q)];
        let spans = layouts.map(|layout| layout.span() * key.dtype.bytes());
        let parts = match (&key.asked.starts, &key.asked.ends) {
            (None, ends) => vec![Part::whole(Spec { lengths: lengths(ends), ..spec })],
            (Some(starts), ends) => split(spec, starts, ends.as_deref())?,
        };
        let steps = parts.into_iter().map(|part| part.ready(&key)).collect::<Result<_, CallError>>()?;
        Ok(Self { key, spans, lse: [batch, heads, seq], steps, recipe })
    }

    /// Demands that elements lie where elements may, and that nothing is read from what is written.
    pub(crate) fn check_memory(&self, arrays: [&Array; 4]) -> Result<(), CallError> {
        let bytes = self.key.dtype.bytes();
        let range = |at: usize| arrays[at].address..arrays[at].address + self.spans[at];
        let out = range(3);
        for (at, array) in arrays.into_iter().enumerate().filter(|&(at, _)| self.spans[at] > 0) {
            let Array { operand, address, .. } = *array;
            if !address.is_multiple_of(bytes) {
                return Err(CallError::Unaligned { operand, address, bytes });
            }
            if at < 3 && range(at).start < out.end && out.start < range(at).end {
                return Err(CallError::Shared { operand });
            }
        }
        Ok(())
    }
}

fn spec(asked: &Asked, dtype: DType, arrays: [&Array; 4]) -> Result<Spec, CallError> {
    let layout = |array: &Array| array.layout(asked.order);
    let [q, k, v, out] = arrays;
    let inputs = Spec::new(dtype, layout(q)?, layout(k)?, layout(v)?);
    Ok(Spec {
        out: Some(layout(out)?),
        mask: asked.mask,
        scale: asked.scale,
        softcap: asked.softcap,
        sinks: asked.sinks.clone(),
        ..inputs
    })
}

fn lengths(ends: &Option<Arc<[u32]>>) -> Lengths {
    ends.as_ref().map_or(Lengths::Uniform, |ends| Lengths::keys(ends.clone()))
}

/// A problem and where its tensors start, in bytes.
struct Part {
    spec: Spec,
    offsets: [usize; 5],
}

impl Part {
    fn whole(spec: Spec) -> Self {
        Self { spec, offsets: [0; 5] }
    }

    fn ready(self, key: &Key) -> Result<Step, CallError> {
        let (alignment, offsets) = (self.alignment(key.alignment), self.offsets);
        let problem = self.spec.parse()?;
        let work = match key.place {
            Place::Host => Work::Host(Box::new(problem)),
            Place::Cuda(index) => Work::Device(device::prepare(index, &problem, alignment)?),
        };
        Ok(Step { offsets, work })
    }

    /// What the part's addresses are multiples of, given that for the whole tensors.
    fn alignment(&self, whole: usize) -> u64 {
        let [q, k, v, out, _] = self.offsets;
        1 << (whole | q | k | v | out).trailing_zeros()
    }

    /// The batch entries `entries` of a problem, with the keys `keys` alone.
    fn of(
        spec: &Spec,
        entries: std::ops::Range<usize>,
        keys: std::ops::Range<usize>,
    ) -> Result<Self, CallError> {
        let bytes = spec.dtype.bytes();
        let rows = |layout: &Layout, batch: usize, seq: usize| Dims { batch, seq, ..layout.dims() };
        let cut = |layout: &Layout, seq: usize| {
            Layout::strided(rows(layout, entries.len(), seq), layout.strides()).map_err(CallError::from)
        };
        let out = spec.out.unwrap_or(spec.q);
        let Dims { heads, seq, .. } = spec.q.dims();
        let from = |layout: &Layout, row: usize| layout.row(entries.start, 0, row) * bytes;
        let lse = entries.start * heads * seq * size_of::<f32>();
        Ok(Self {
            offsets: [
                from(&spec.q, 0),
                from(&spec.k, keys.start),
                from(&spec.v, keys.start),
                from(&out, 0),
                lse,
            ],
            spec: Spec {
                q: cut(&spec.q, seq)?,
                k: cut(&spec.k, keys.len())?,
                v: cut(&spec.v, keys.len())?,
                out: Some(cut(&out, seq)?),
                ..spec.clone()
            },
        })
    }
}

/// One part for each run of batch entries with the same keys.
fn split(spec: Spec, starts: &[u32], ends: Option<&[u32]>) -> Result<Vec<Part>, CallError> {
    // The whole must be a problem before parts of it are looked at.
    let whole = spec.parse()?;
    let (batch, seq) = (whole.batch(), whole.seq_kv());
    let all: Vec<u32>;
    let ends = match ends {
        Some(ends) => ends,
        None => {
            all = vec![seq as u32; batch];
            &all
        }
    };
    for given in [starts.len(), ends.len()] {
        if given != batch {
            return Err(CallError::RangeCount { given, batch });
        }
    }
    let ranges: Vec<_> = starts.iter().copied().zip(ends.iter().copied()).collect();
    if let Some(entry) = ranges.iter().position(|&(start, end)| start > end || end as usize > seq) {
        let (start, end) = ranges[entry];
        return Err(CallError::Range { entry, start, end, seq });
    }
    let mut entry = 0;
    let parts = ranges.chunk_by(|a, b| a == b).map(|run| {
        let entries = entry..entry + run.len();
        entry = entries.end;
        let (start, end) = run[0];
        Part::of(whole.spec(), entries, start as usize..end as usize)
    });
    parts.collect()
}
