//! Which kernel computes a problem on a GPU: pure data in, pure data out, with the reasons.
//!
//! [`plan`] tries the kernel families from the most specific to the most general and records why one was skipped. The
//! numbers of a tile are in one table per family, each row with its reason. A [`Plan`] holds no pointers; it builds
//! its program once and launches it for every problem of the same kind.

mod append;
mod backward;
mod backward_general;
mod backward_hopper;
mod backward_single;
mod choice;
mod decode;
mod error;
mod fit;
mod general;
mod grouped;
pub(crate) mod hopper;
mod merge;
mod mixed;
mod moe;
mod narrow;
mod quantise;
mod single;
mod split;
mod tile;
pub mod tuned;

use std::fmt;

pub use append::plan_append;
pub use backward::{Form, plan_backward, plan_backward_by, plan_backward_general, plan_backward_tiles};
pub use choice::{Choice, Family, UnknownKernel};
pub use error::PlanError;
pub use fit::{Misfit, plan_tile};
pub use grouped::{plan_grouped, plan_grouped_tile};
pub use merge::plan_merge;
pub use moe::{plan_moe, plan_moe_tiles};
pub use narrow::NarrowForm;
pub use quantise::plan_quantise;
pub use tile::Tile;
use tuned::Table;

use flashcore_core::{DType, Layout, Problem, Scales};
use flashcore_ptx::{launch::Workspace, target::Target};
use flashcore_tile::{Element, Half, shared_limit};

use crate::{
    decode::Keys,
    forward_sm80::{self, Access},
    forward_sm90,
    launch::{KernelConfig, Launch, Subject},
    parts::{
        bias::BiasKind,
        lengths::LengthsKind,
        mask::{MAX_SEQUENCE, Sides},
        schedule::Side,
        share::Share,
    },
};

/// Most features of a head that any kernel takes: of values, and of queries and keys, which may have a position beside what
/// values are made of.
const MOST_FEATURES: usize = 512;
const MOST_KEY_FEATURES: usize = MOST_FEATURES + 64;

/// What device memory from an allocator is aligned to, and more than any kernel asks for.
pub const ALLOCATED_ALIGNMENT: u64 = 256;

/// What a plan needs to know about a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Gpu {
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Most shared memory of a CTA in bytes.
    pub shared_bytes: u32,
}

impl Gpu {
    /// An H100 or H200 with all its multiprocessors, for plans without a GPU.
    pub const HOPPER: Self = Self { capability: (9, 0), sms: 132, shared_bytes: shared_limit(Target::Sm90a) };
    /// A T4, for plans without a GPU.
    pub const TURING: Self = Self { capability: (7, 5), sms: 40, shared_bytes: shared_limit(Target::Sm75) };
    /// An A100, for plans without a GPU.
    pub const AMPERE: Self = Self { capability: (8, 0), sms: 108, shared_bytes: shared_limit(Target::Sm80) };
    /// A GPU for workstations with little shared memory (RTX 3090), for plans without a GPU.
    pub const CONSUMER: Self = Self { capability: (8, 6), sms: 82, shared_bytes: shared_limit(Target::Sm86) };
    /// An RTX 4090, for plans without a GPU.
    pub const ADA: Self = Self { capability: (8, 9), sms: 128, shared_bytes: shared_limit(Target::Sm89) };
    /// A B200, for plans without a GPU.
    pub const BLACKWELL: Self =
        Self { capability: (10, 0), sms: 148, shared_bytes: shared_limit(Target::Sm100) };
    /// An RTX 5090, for plans without a GPU.
    pub const BLACKWELL_RTX: Self =
        Self { capability: (12, 0), sms: 170, shared_bytes: shared_limit(Target::Sm120) };
}

/// How a problem will be computed, and why so.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// In order; each begins when the one before has ended.
    launches: Vec<Launch>,
    /// Which of them does most of the work.
    main: usize,
    gpu: Gpu,
    why: &'static str,
    passed_over: Vec<String>,
    /// The row of a table that it comes from, in words.
    row: Option<String>,
}

impl Plan {
    fn single(kernel: KernelConfig, problem: &Problem, gpu: &Gpu, why: &'static str) -> Self {
        if let KernelConfig::Sm90(cfg) = kernel
            && cfg.narrow()
        {
            return Self::narrow(cfg, problem, gpu, why);
        }
        if let KernelConfig::Sm80(cfg) = kernel
            && let Some(parts) = cfg.parts
        {
            return split::plan_of(cfg, parts, problem, gpu, why);
        }
        Self::of(vec![Self::launch(kernel, problem, gpu)], gpu, why)
    }

    /// A launch of a forward kernel.
    fn launch(kernel: KernelConfig, problem: &Problem, gpu: &Gpu) -> Launch {
        let extent = match &kernel {
            KernelConfig::Sm80(cfg) => forward_sm80::extent(cfg, problem),
            KernelConfig::Sm90(cfg) => Some(forward_sm90::extent(*cfg, problem, gpu.sms)),
            KernelConfig::Decode(cfg) => crate::decode::extent(cfg, problem, gpu.sms),
            KernelConfig::Combine(cfg) => crate::combine::extent(cfg, problem),
            // Kernels of other operations have plans of their own.
            _ => None,
        };
        Launch { kernel, subject: Subject::Forward(Box::new(problem.clone())), extent }
    }

    fn of(launches: Vec<Launch>, gpu: &Gpu, why: &'static str) -> Self {
        Self { launches: sharing(launches), main: 0, gpu: *gpu, why, passed_over: Vec::new(), row: None }
    }

    /// The same kernels for another problem of their kind.
    #[must_use]
    pub fn rebound(&self, problem: &Problem) -> Self {
        if let KernelConfig::Sm90(cfg) = *self.kernel()
            && cfg.narrow()
        {
            return Self { launches: narrow::launches(cfg, problem, &self.gpu), ..self.clone() };
        }
        let again = |launch: &Launch| Self::launch(launch.kernel, problem, &self.gpu);
        Self { launches: sharing(self.launches.iter().map(again).collect()), ..self.clone() }
    }

    /// The same problem by another kernel that takes it: for experiments.
    #[must_use]
    pub fn by(&self, kernel: KernelConfig, problem: &Problem) -> Self {
        Self::single(kernel, problem, &self.gpu, "asked for")
    }

    /// The kernel that does most of the work.
    pub fn kernel(&self) -> &KernelConfig {
        self.launches[self.main].kernel()
    }

    /// Why this kernel and this tile.
    pub const fn why(&self) -> &'static str {
        self.why
    }

    /// The row of a table of measured tiles that it comes from, in words; `None` where the rules decided.
    pub fn row(&self) -> Option<&str> {
        self.row.as_deref()
    }

    /// Kernels that would have been preferred, and why they cannot take the problem.
    pub fn passed_over(&self) -> &[String] {
        &self.passed_over
    }

    /// What is launched, in order. There is at least one launch, which may have nothing to compute.
    pub fn launches(&self) -> &[Launch] {
        &self.launches
    }

    /// Scratch memory that the launches share, in bytes.
    pub fn workspace_bytes(&self) -> u64 {
        let extents = self.launches.iter().filter_map(|launch| launch.extent.as_ref());
        let bytes = extents.map(|extent| extent.workspace.iter().map(|workspace| workspace.bytes).sum());
        bytes.max().unwrap_or(0)
    }

    /// The names of the kernels, in order.
    fn names(&self) -> String {
        let names: Vec<_> = self.launches.iter().map(|launch| launch.kernel.name()).collect();
        names.join(", then ")
    }

    /// The choice in words, one line for the kernel and one for each that was rejected.
    pub fn explain(&self) -> String {
        let mut text = format!("{}: {}", self.names(), self.why);
        if let Some(row) = &self.row {
            text.push_str("\nby ");
            text.push_str(row);
        }
        for reason in &self.passed_over {
            text.push_str("\nnot ");
            text.push_str(reason);
        }
        text
    }
}

/// Launches of a plan share their scratch memory: each that wants any names all of it, as large as anyone wants it.
fn sharing(mut launches: Vec<Launch>) -> Vec<Launch> {
    let mut all: Vec<Workspace> = Vec::new();
    for want in launches.iter().filter_map(|launch| launch.extent.as_ref()).flat_map(|own| &own.workspace) {
        match all.iter_mut().find(|known| known.slot == want.slot) {
            Some(known) => known.bytes = known.bytes.max(want.bytes),
            None => all.push(*want),
        }
    }
    let own = launches.iter_mut().filter_map(|launch| launch.extent.as_mut());
    own.filter(|own| !own.workspace.is_empty()).for_each(|own| own.workspace.clone_from(&all));
    launches
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.explain())
    }
}

/// Like [`plan`], but a row of `table` decides where it has one for the problem whose tile fits.
pub fn plan_by(problem: &Problem, gpu: &Gpu, alignment: u64, table: &Table) -> Result<Plan, PlanError> {
    match table.plan(problem, gpu, alignment) {
        Some(plan) => Ok(plan),
        None => plan(problem, gpu, alignment),
    }
}

/// Chooses a kernel for `problem` by the rules; `alignment` is what all its addresses are multiples of, in bytes.
pub fn plan(problem: &Problem, gpu: &Gpu, alignment: u64) -> Result<Plan, PlanError> {
    match plan_few(problem, gpu, alignment)? {
        Ok(plan) => Ok(plan),
        Err(_) => match mixed::plan(problem, gpu, alignment)? {
            Some(plan) => Ok(plan),
            None => {
                let many = plan_many(problem, gpu, alignment)?;
                Ok(split::plan(&many, problem, gpu).unwrap_or(many))
            }
        },
    }
}

/// The plan for few queries over many keys, or why there is none.
fn plan_few(problem: &Problem, gpu: &Gpu, alignment: u64) -> Result<Result<Plan, String>, PlanError> {
    let input = check(problem, gpu)?;
    let half = match decode::accept(problem, input, gpu, access(problem, alignment)) {
        Ok(half) => half,
        Err(reason) => return Ok(Err(reason)),
    };
    let first = decode::shape(problem, gpu);
    let mut best = (decode_config(problem, gpu, half, first.0)?, first.1);
    let mut least = f64::INFINITY;
    for (shape, why) in decode::others(problem, gpu, first.0) {
        let config = decode_config(problem, gpu, half, shape)?;
        let cost = decode::cost(problem, gpu, &config);
        if cost < least {
            (best, least) = ((config, why), cost);
        }
    }
    Ok(Ok(Plan::single(best.0, problem, gpu, best.1)))
}

/// Like [`plan`], but always a kernel for many queries.
fn plan_many(problem: &Problem, gpu: &Gpu, alignment: u64) -> Result<Plan, PlanError> {
    let input = check(problem, gpu)?;
    match hopper::accept(problem, input, gpu, access(problem, alignment)) {
        Ok(()) => {
            let (shape, why) = hopper::shape(problem, gpu);
            Ok(Plan::single(hopper_config(problem, input, shape)?, problem, gpu, why))
        }
        Err(reason) if input.bytes() == 1 => Err(narrow::refused(&reason)),
        Err(reason) => {
            let passed_over = vec![format!("forward_sm90: {reason}")];
            Ok(Plan { passed_over, ..plan_general(problem, gpu, alignment)? })
        }
    }
}

/// Like [`plan`], but always the general kernel: for comparing it with others.
pub fn plan_general(problem: &Problem, gpu: &Gpu, alignment: u64) -> Result<Plan, PlanError> {
    let input = check(problem, gpu)?;
    if input.bytes() == 1 {
        return Err(narrow::refused("the general kernel needs elements of 16 bits or more"));
    }
    let access = access(problem, alignment);
    narrow::check_cache(problem, gpu, alignment)?;
    let (shape, why) = general::shape(problem, input, gpu)?;
    if Side::Queries.tile_count(problem, shape.tile_m(problem.dim_v() as u32)) > i32::MAX as u64 {
        return Err(PlanError::Tiles);
    }
    let kernel = general_config(problem, gpu, input, access, shape)?;
    Ok(Plan::single(kernel, problem, gpu, why))
}

/// The kernel for few queries, with tile `shape`.
fn decode_config(
    problem: &Problem,
    gpu: &Gpu,
    half: Half,
    shape: crate::decode::Shape,
) -> Result<KernelConfig, PlanError> {
    Ok(KernelConfig::Decode(crate::decode::Config {
        target: general::target(gpu),
        input: half,
        cache: narrow::cache(problem, half.element()),
        scaled: problem.scales().is_some(),
        output: output(problem, half.element()),
        dim_qk: problem.dim_qk() as u32,
        dim_v: problem.dim_v() as u32,
        shape,
        rows: decode::rows_of(problem, &shape),
        messages: decode::messages(problem, &shape),
        invariant: problem.batch_invariant(),
        share: Share::All,
        mask: Sides::of(problem),
        lengths: LengthsKind::of(problem).ok_or(PlanError::Lengths)?,
        keys: if problem.pages().is_some() { Keys::Paged } else { Keys::Together },
        softcap: problem.softcap().is_some(),
        sinks: problem.sinks(),
    }))
}

/// The Hopper kernel for a problem, with tile `shape`.
fn hopper_config(
    problem: &Problem,
    input: Element,
    shape: forward_sm90::Shape,
) -> Result<KernelConfig, PlanError> {
    let lengths = LengthsKind::of(problem).ok_or(PlanError::Lengths)?;
    Ok(KernelConfig::Sm90(hopper::with_policy(forward_sm90::Config {
        input,
        scaled: problem.scales().is_some(),
        blocks: matches!(problem.scales(), Some(Scales::PerBlock { .. })),
        settles: narrow::settles(problem, &shape),
        output: output(problem, input),
        accumulate: problem.accumulate(),
        dim_qk: problem.dim_qk() as u32,
        dim_v: problem.dim_v() as u32,
        mask: Sides::of(problem),
        lengths,
        page_rows: hopper::page_rows(problem, &shape),
        share: Share::All,
        softcap: problem.softcap().is_some(),
        sinks: problem.sinks(),
        pack: hopper::pack(problem),
        shape,
        policy: forward_sm90::Policy::default(),
    })))
}

/// The general kernel for a problem, with tile `shape`.
fn general_config(
    problem: &Problem,
    gpu: &Gpu,
    input: Element,
    access: Access,
    shape: forward_sm80::Shape,
) -> Result<KernelConfig, PlanError> {
    Ok(KernelConfig::Sm80(forward_sm80::Config {
        target: general::target(gpu),
        input,
        cache: narrow::cache(problem, input),
        scaled: problem.scales().is_some(),
        output: output(problem, input),
        accumulate: problem.accumulate(),
        dim_qk: problem.dim_qk() as u32,
        dim_v: problem.dim_v() as u32,
        shape,
        mask: Sides::of(problem),
        lengths: LengthsKind::of(problem).ok_or(PlanError::Lengths)?,
        softcap: problem.softcap().is_some(),
        sinks: problem.sinks(),
        bias: BiasKind::of(problem),
        dropout: problem.dropout().is_some(),
        access,
        paged: problem.pages().is_some(),
        share: Share::All,
        parts: None,
    }))
}

/// Element type of the output.
fn output(problem: &Problem, input: Element) -> Element {
    match problem.out_dtype() {
        DType::F32 => Element::F32,
        DType::F16 => Element::F16,
        DType::BF16 => Element::Bf16,
        _ => input,
    }
}

/// Whether the GPU is new enough.
fn check_capability(gpu: &Gpu, needed: (u32, u32)) -> Result<(), PlanError> {
    let given = gpu.capability;
    if given < needed { Err(PlanError::Capability { given, needed }) } else { Ok(()) }
}

/// What every kernel requires of a problem; returns the element type of Q, K and V.
fn check(problem: &Problem, gpu: &Gpu) -> Result<Element, PlanError> {
    check_capability(gpu, (7, 5))?;
    let input = match problem.dtype() {
        DType::F16 => Element::F16,
        dtype @ (DType::BF16 | DType::F32) if gpu.capability < (8, 0) => {
            return Err(PlanError::Turing(dtype));
        }
        DType::BF16 => Element::Bf16,
        DType::F32 => Element::F32,
        DType::E4M3 => Element::E4m3,
        other => return Err(PlanError::DType(other)),
    };
    let (qk, v) = (problem.dim_qk(), problem.dim_v());
    if qk > MOST_KEY_FEATURES || v > MOST_FEATURES {
        return Err(PlanError::HeadDim { qk, v });
    }
    let given = problem.seq_q().max(problem.seq_kv());
    if given > MAX_SEQUENCE {
        return Err(PlanError::Sequence { given, max: MAX_SEQUENCE });
    }
    // The smallest tile of the Hopper kernel has 64 rows.
    if Side::Queries.tile_count(problem, 64) > i32::MAX as u64 {
        return Err(PlanError::Tiles);
    }
    Ok(input)
}

/// What every row of every tensor is aligned to.
fn access(problem: &Problem, alignment: u64) -> Access {
    let kv = [problem.k(), problem.v()].map(|layout| (layout, problem.kv_dtype()));
    let others = [(problem.q(), problem.dtype()), (problem.out(), problem.out_dtype())];
    access_to(kv.into_iter().chain(others), alignment)
}

/// What every row of these tensors is aligned to.
fn access_to<'a>(tensors: impl IntoIterator<Item = (&'a Layout, DType)>, alignment: u64) -> Access {
    let strides = |(layout, dtype): (&Layout, DType)| {
        let dims = layout.dims().array();
        let used = dims.into_iter().zip(layout.strides()).take(3).filter(|&(extent, _)| extent > 1);
        used.fold(0, |bits, (_, stride)| bits | (stride * dtype.bytes()) as u64)
    };
    let bits = tensors.into_iter().fold(alignment, |bits, tensor| bits | strides(tensor));
    Access::widest_for(bits).unwrap_or(Access::B2)
}
