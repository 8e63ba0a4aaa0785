//! Which kernel computes a problem on a GPU: pure data in, pure data out, with the reasons.
//!
//! [`plan`] tries the kernel families from the most special to the most general and remembers why one was passed over.
//! The numbers of a tile stand in one table per family, each row with its reason. A [`Plan`] holds no pointers; it
//! builds its program once and launches it for every problem of the same kind.

mod general;

use std::fmt;

use flashcore_core::{DType, Layout, Lengths, Problem};
use flashcore_ptx::{launch::LaunchSpec, target::Target};
use flashcore_tile::{BuildError, Half, Program, RegisterBudget, shared_limit};

use crate::{
    forward_sm80,
    forward_sm90::{self, Staging},
    shared::{
        load::Access,
        mask::{MAX_SEQUENCE, Sides},
        schedule::LengthsKind,
    },
};

/// What a plan needs to know of a GPU.
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
    /// An A100, for plans without a GPU.
    pub const AMPERE: Self = Self { capability: (8, 0), sms: 108, shared_bytes: shared_limit(Target::Sm80) };
    /// A GPU for workstations with little shared memory (RTX 3090), for plans without a GPU.
    pub const CONSUMER: Self = Self { capability: (8, 6), sms: 82, shared_bytes: shared_limit(Target::Sm86) };
    /// A B200, for plans without a GPU.
    pub const BLACKWELL: Self =
        Self { capability: (10, 0), sms: 148, shared_bytes: shared_limit(Target::Sm100) };
}

/// The config of a kernel of one family.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum KernelConfig {
    /// `mma.sync`, from sm_80 on.
    Sm80(forward_sm80::Config),
    /// TMA and wgmma, sm_90a.
    Sm90(forward_sm90::Config),
}

impl KernelConfig {
    /// The kernel's name.
    pub fn name(&self) -> String {
        match self {
            Self::Sm80(cfg) => cfg.name().to_string(),
            Self::Sm90(cfg) => cfg.name().to_string(),
        }
    }

    /// The architecture the kernel is built for.
    pub const fn target(&self) -> Target {
        match self {
            Self::Sm80(cfg) => cfg.target,
            Self::Sm90(_) => Target::Sm90a,
        }
    }

    /// Most registers of a thread when the kernel starts.
    pub const fn register_budget(&self) -> u32 {
        match self {
            Self::Sm80(cfg) => cfg.shape.registers(),
            Self::Sm90(cfg) => cfg.registers_at_entry(),
        }
    }

    /// Builds the kernel.
    pub fn program(&self) -> Result<Program<Problem>, BuildError> {
        match self {
            Self::Sm80(cfg) => forward_sm80::forward_sm80(cfg),
            Self::Sm90(cfg) => forward_sm90::forward_sm90(*cfg),
        }
    }
}

/// How a problem will be computed, and why so.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    kernel: KernelConfig,
    gpu: Gpu,
    why: &'static str,
    passed_over: Vec<String>,
}

/// A problem that no kernel takes.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The GPU is too old.
    #[error("kernels need compute capability 8.0 or later, but the GPU has {}.{}; use the CPU backend", .0.0, .0.1)]
    Capability((u32, u32)),
    /// The element type has no kernel.
    #[error("GPU kernels take f16 and bf16, not {0}; convert the tensors or use the CPU backend")]
    DType(DType),
    /// The features of a head do not fit the kernels.
    #[error(
        "GPU kernels take head dims that are multiples of 8 up to 256, not {qk} (q, k) and {v} (v); pad or use the CPU"
    )]
    HeadDim {
        /// Features of queries and keys.
        qk: usize,
        /// Features of values.
        v: usize,
    },
    /// A sequence is too long.
    #[error(
        "GPU kernels take sequences up to {max} rows, not {given}; split the problem or use the CPU backend"
    )]
    Sequence {
        /// Rows of the longest tensor.
        given: usize,
        /// Most rows.
        max: usize,
    },
    /// Too many tiles for one launch.
    #[error("the problem has more row tiles than one launch can number; split it along the batch")]
    Tiles,
    /// A kind of lengths that kernels do not know.
    #[error("GPU kernels do not know this kind of sequence lengths; use the CPU backend")]
    Lengths,
    /// Shared memory that no shape of tile fits in.
    #[error(
        "no tile for head dims {qk} and {v} fits in {shared_bytes} bytes of shared memory; use the CPU backend"
    )]
    SharedMemory {
        /// Features of queries and keys.
        qk: usize,
        /// Features of values.
        v: usize,
        /// Shared memory of a CTA.
        shared_bytes: u32,
    },
}

impl Plan {
    /// The kernel.
    pub const fn kernel(&self) -> &KernelConfig {
        &self.kernel
    }

    /// Why this kernel and this tile.
    pub const fn why(&self) -> &'static str {
        self.why
    }

    /// Kernels that would have been preferred, and why they cannot take the problem.
    pub fn passed_over(&self) -> &[String] {
        &self.passed_over
    }

    /// The launch of the plan's program for a problem; `None` where there is nothing to compute.
    pub fn launch(&self, program: &Program<Problem>, problem: &Problem) -> Option<LaunchSpec> {
        let extent = match &self.kernel {
            KernelConfig::Sm80(cfg) => forward_sm80::extent(cfg, problem)?,
            KernelConfig::Sm90(cfg) => forward_sm90::extent(*cfg, problem, self.gpu.sms),
        };
        Some(program.launch(problem, extent))
    }

    /// The choice in words, one line for the kernel and one for each that was passed over.
    pub fn explain(&self) -> String {
        let mut text = format!("{}: {}", self.kernel.name(), self.why);
        for reason in &self.passed_over {
            text.push_str("\nnot ");
            text.push_str(reason);
        }
        text
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.explain())
    }
}

/// Chooses a kernel for `problem`; `alignment` is what all its addresses are multiples of, in bytes.
pub fn plan(problem: &Problem, gpu: &Gpu, alignment: u64) -> Result<Plan, PlanError> {
    let half = check(problem, gpu)?;
    let lengths = LengthsKind::of(problem).ok_or(PlanError::Lengths)?;
    let access = access(problem, alignment);
    let hopper = hopper_refusal(problem, gpu, access);
    if hopper.is_none() {
        let (shape, why) = hopper_shape(problem, gpu);
        let kernel = KernelConfig::Sm90(forward_sm90::Config {
            half,
            dim_qk: problem.dim_qk() as u32,
            dim_v: problem.dim_v() as u32,
            mask: Sides::of(problem),
            used: lengths == LengthsKind::Used,
            softcap: problem.softcap().is_some(),
            sinks: problem.sinks().is_some(),
            shape,
        });
        return Ok(Plan { kernel, gpu: *gpu, why, passed_over: Vec::new() });
    }
    let (shape, why) = general::shape(problem, gpu)?;
    let kernel = KernelConfig::Sm80(forward_sm80::Config {
        target: general::target(gpu),
        half,
        dim_qk: problem.dim_qk() as u32,
        dim_v: problem.dim_v() as u32,
        shape,
        mask: Sides::of(problem),
        lengths,
        softcap: problem.softcap().is_some(),
        sinks: problem.sinks().is_some(),
        access,
    });
    let passed_over = hopper.into_iter().map(|reason| format!("forward_sm90: {reason}")).collect();
    Ok(Plan { kernel, gpu: *gpu, why, passed_over })
}

/// What every kernel asks of a problem.
fn check(problem: &Problem, gpu: &Gpu) -> Result<Half, PlanError> {
    if gpu.capability < (8, 0) {
        return Err(PlanError::Capability(gpu.capability));
    }
    let half = match problem.dtype() {
        DType::F16 => Half::F16,
        DType::BF16 => Half::Bf16,
        other => return Err(PlanError::DType(other)),
    };
    let (qk, v) = (problem.dim_qk(), problem.dim_v());
    if [qk, v].into_iter().any(|dim| !dim.is_multiple_of(8) || dim > 256) {
        return Err(PlanError::HeadDim { qk, v });
    }
    let given = problem.seq_q().max(problem.seq_kv());
    if given > MAX_SEQUENCE {
        return Err(PlanError::Sequence { given, max: MAX_SEQUENCE });
    }
    // The smallest tile of any kernel has 64 rows.
    let planes = problem.sequences().saturating_mul(problem.heads_q());
    if planes.saturating_mul(problem.seq_q().div_ceil(64)) > i32::MAX as usize {
        return Err(PlanError::Tiles);
    }
    Ok(half)
}

/// What every row of every tensor is aligned to.
fn access(problem: &Problem, alignment: u64) -> Access {
    let strides = |layout: &Layout| {
        let dims = layout.dims().array();
        let used = dims.into_iter().zip(layout.strides()).take(3).filter(|&(extent, _)| extent > 1);
        used.fold(0, |bits, (_, stride)| bits | (stride * problem.dtype().bytes()) as u64)
    };
    let layouts = [problem.q(), problem.k(), problem.v(), problem.out()];
    let bits = layouts.into_iter().fold(alignment, |bits, layout| bits | strides(layout));
    Access::widest_for(bits).unwrap_or(Access::B2)
}

/// Why the Hopper kernel cannot take a problem.
fn hopper_refusal(problem: &Problem, gpu: &Gpu, access: Access) -> Option<String> {
    let no = |reason: &str| Some(reason.to_owned());
    if gpu.capability != (9, 0) {
        return Some(format!(
            "it runs on compute capability 9.0, not {}.{}",
            gpu.capability.0, gpu.capability.1
        ));
    }
    if matches!(problem.lengths(), Lengths::Ragged { .. }) {
        return no("packed sequences have no tensor map");
    }
    if access != Access::B16 {
        return no("tensor copies need addresses and strides at multiples of 16 bytes");
    }
    if problem.rows() == 0 || problem.seq_kv() == 0 {
        return no("tensor maps cannot be empty");
    }
    let far = |layout: &Layout| layout.strides().into_iter().any(|s| s * problem.dtype().bytes() >= 1 << 40);
    if [problem.q(), problem.k(), problem.v(), problem.out()].into_iter().any(far) {
        return no("strides of 2^40 bytes and more do not fit in a tensor map");
    }
    None
}

/// The tile of the Hopper kernel, and why.
fn hopper_shape(problem: &Problem, gpu: &Gpu) -> (forward_sm90::Shape, &'static str) {
    use forward_sm90::Order;
    if let Some(small) = few_tiles(problem, gpu) {
        return small;
    }
    let (qk, v) = (problem.dim_qk() as u32, problem.dim_v() as u32);
    let row =
        HOPPER.iter().find(|row| qk <= row.dim_qk && v <= row.dim_v).unwrap_or(&HOPPER[HOPPER.len() - 1]);
    let uneven = problem.mask().right().is_some() || matches!(problem.lengths(), Lengths::Used { .. });
    let order = if uneven { Order::Atomic } else { Order::Static };
    if v <= 64 && qk <= 64 && three_consumers_pay(problem, gpu) {
        let shape = forward_sm90::Shape { consumers: 3, budget: Some(THREE_CONSUMERS), order, ..row.shape };
        return (shape, "three consumers of 64 rows read K and V a third less often");
    }
    (forward_sm90::Shape { order, ..row.shape }, row.why)
}

/// Whether tiles of 192 rows beat tiles of 128: they need registers that options would take, rows that the diagonal
/// does not waste, and as many rounds of tiles over the GPU as make up for their length.
fn three_consumers_pay(problem: &Problem, gpu: &Gpu) -> bool {
    let mask = problem.mask();
    let optioned =
        problem.softcap().is_some() || mask.left().is_some() || problem.lengths() != &Lengths::Uniform;
    if optioned || (mask.right().is_some() && problem.seq_q() < LONG_CAUSAL) {
        return false;
    }
    if problem.batch_invariant() {
        return true;
    }
    let planes = problem.heads_q() * problem.batch();
    let rounds = |rows: usize| (problem.seq_q().div_ceil(rows) * planes).div_ceil(gpu.sms as usize) * rows;
    rounds(192) * 15 <= rounds(128) * 16
}

/// Rows from which on the diagonal wastes little of a 192-row tile.
const LONG_CAUSAL: usize = 4096;

/// Where tiles of 64 rows do not even fill the GPU, the CTAs of a cluster share the keys of a tile.
fn few_tiles(problem: &Problem, gpu: &Gpu) -> Option<(forward_sm90::Shape, &'static str)> {
    let dim = problem.dim_qk().max(problem.dim_v());
    let tiles = problem.seq_q().div_ceil(64) * problem.heads_q() * problem.batch();
    if problem.batch_invariant() || dim > 128 || tiles > gpu.sms as usize {
        return None;
    }
    let key_tiles = problem.seq_kv().div_ceil(FEW_TILES_KEYS as usize);
    let fits = |parts: &u32| tiles * *parts as usize <= gpu.sms as usize && *parts as usize <= key_tiles;
    let parts = [8, 4, 2].into_iter().find(fits).unwrap_or(1);
    let narrow = dim <= 64;
    let shape = forward_sm90::Shape {
        consumers: 1,
        tile_n: FEW_TILES_KEYS,
        stages: if narrow { 4 } else { 2 },
        q_stages: 1,
        staging: if narrow { WHOLE_64 } else { WHOLE_128 },
        budget: None,
        order: forward_sm90::Order::Single { parts },
        ctas_per_sm: if narrow { 2 } else { 1 },
    };
    Some((
        shape,
        "fewer tiles of 64 rows than SMs: a cluster shares the keys of each, all loads start at once",
    ))
}

/// Keys of a tile where there are few tiles: the first product starts after a short copy.
const FEW_TILES_KEYS: u32 = 64;

/// Registers of one producer and two consumers: what 384 threads have.
const TWO_CONSUMERS: RegisterBudget = RegisterBudget { producer: 24, consumer: 240 };
/// Registers of one producer and three consumers: what 512 threads have.
const THREE_CONSUMERS: RegisterBudget = RegisterBudget { producer: 32, consumer: 160 };

/// All columns of a narrow output at once.
const WHOLE_64: Staging = Staging { cols: 64, places: 1 };
/// All columns of a wider one.
const WHOLE_128: Staging = Staging { cols: 128, places: 1 };
/// One slab at a time: all that fits beside K and V.
const SLAB: Staging = Staging { cols: 64, places: 1 };
/// One slab leaves while the next is gathered.
const SLABS: Staging = Staging { cols: 64, places: 2 };

/// One row of the Hopper table: up to these dims, this tile.
struct HopperRow {
    dim_qk: u32,
    dim_v: u32,
    shape: forward_sm90::Shape,
    why: &'static str,
}

const fn hopper(tile_n: u32, q_stages: u32, staging: Staging) -> forward_sm90::Shape {
    forward_sm90::Shape {
        consumers: 2,
        tile_n,
        stages: 2,
        q_stages,
        staging,
        budget: Some(TWO_CONSUMERS),
        order: forward_sm90::Order::Static,
        ctas_per_sm: 1,
    }
}

/// Tiles of the Hopper kernel, narrowest heads first.
const HOPPER: &[HopperRow] = &[
    HopperRow {
        dim_qk: 64,
        dim_v: 64,
        shape: hopper(128, 2, WHOLE_64),
        why: "two consumers leave registers for masks; the next tile's first product covers the epilogue",
    },
    HopperRow {
        dim_qk: 128,
        dim_v: 128,
        shape: hopper(128, 2, WHOLE_128),
        why: "128 x 128 fills the registers; the next tile's first product covers the epilogue",
    },
    HopperRow {
        dim_qk: 192,
        dim_v: 128,
        shape: hopper(128, 1, SLAB),
        why: "128 keys still fit beside one Q tile; two would not",
    },
    HopperRow {
        dim_qk: 192,
        dim_v: 192,
        shape: hopper(96, 1, SLABS),
        why: "96 keys are what two stages of K and V leave room for",
    },
    HopperRow {
        dim_qk: 256,
        dim_v: 256,
        shape: hopper(64, 1, SLABS),
        why: "the output takes half of the registers and Q a quarter of shared memory; 64 keys fit beside them",
    },
];
