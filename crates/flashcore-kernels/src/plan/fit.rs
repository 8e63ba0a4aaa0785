//! Whether a tile can be built and launched: the only gate between a table or a search and a kernel.
//!
//! [`Tile::check`] knows only numbers; [`plan_tile`] knows the problem and the GPU too; [`Plan::check_build`] builds.

use flashcore_core::Problem;
use flashcore_ptx::sm::Sm;
use flashcore_tile::{Element, RegisterBudget};

use super::{
    Gpu, Plan, PlanError, Tile, access, check, decode, decode_config, general_config, hopper, hopper_config,
    narrow,
};
use crate::{
    backward_rows, backward_sm80, backward_sm90,
    decode::{self as few_queries, Copies, Order},
    forward_sm80,
    forward_sm90::{self, Order as TileOrder},
    launch::KernelConfig,
    merge, moe,
    parts::schedule::Side,
};

/// Registers of a consumer for addresses, masks and the state of softmax: what shipped kernels need at least.
const OTHER_REGISTERS: u32 = 16;

/// Why a tile cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Misfit {
    /// A number out of its range.
    #[error("{field} is {given}, but must be {allowed}")]
    Value {
        /// Which.
        field: &'static str,
        /// What it is.
        given: u32,
        /// What it may be.
        allowed: &'static str,
    },
    /// The kernel family cannot take the problem.
    #[error("{kernel}: {reason}")]
    Kernel {
        /// The family.
        kernel: &'static str,
        /// Why not.
        reason: String,
    },
    /// No kernel takes the problem.
    #[error(transparent)]
    Problem(#[from] PlanError),
    /// Too much shared memory.
    #[error("it needs {bytes} bytes of shared memory, but only {most} are available")]
    SharedMemory {
        /// Bytes for all CTAs of a multiprocessor.
        bytes: u64,
        /// Bytes there.
        most: u64,
    },
    /// Too many registers.
    #[error("a thread needs about {needed} registers, but has only {most}")]
    Registers {
        /// Values that are alive at once.
        needed: u32,
        /// Registers there.
        most: u32,
    },
    /// Too many CTAs for one launch.
    #[error("{ctas} CTAs are more than one launch can index")]
    Grid {
        /// CTAs.
        ctas: u64,
    },
    /// The builder refused.
    #[error("it cannot be built: {0}")]
    Build(String),
}

/// A number, its multiple and its range.
type Rule = (&'static str, u32, u32, std::ops::RangeInclusive<u32>, &'static str);

fn check_rules(rules: &[Rule]) -> Result<(), Misfit> {
    let broken = rules
        .iter()
        .find(|(_, given, unit, range, _)| !range.contains(given) || !given.is_multiple_of(*unit));
    broken.map_or(Ok(()), |&(field, given, _, _, allowed)| Err(Misfit::Value { field, given, allowed }))
}

/// A number that divides only powers of two.
const fn unit_of_powers(given: u32) -> u32 {
    if given.is_power_of_two() { 1 } else { u32::MAX }
}

impl Tile {
    /// Whether its numbers are such as kernels are made for.
    pub fn check(&self) -> Result<(), Misfit> {
        match self {
            Self::Sm80(shape) => check_general(shape),
            Self::Sm90(shape) => check_hopper(shape),
            Self::Decode(shape) => check_decode(shape),
            Self::Merge(merge::Shape { width, lanes })
            | Self::BackwardRows(backward_rows::Shape { width, lanes }) => check_rules(&[
                ("width", *width, unit_of_powers(*width), 1..=8, "1, 2, 4 or 8"),
                ("lanes", *lanes, unit_of_powers(*lanes), 1..=32, "a power of two up to 32"),
            ]),
            Self::Append(shape) => check_rules(&[("warps", shape.warps, 1, 1..=8, "1 to 8")]),
            Self::BackwardSinks | Self::BackwardSums | Self::Combine | Self::TurnValues | Self::Quantise => {
                Ok(())
            }
            Self::BackwardSm80(shape) => check_backward(shape),
            Self::BackwardSm90(shape) => check_backward_hopper(shape),
            Self::Moe(None) | Self::Grouped(None) => Ok(()),
            Self::Moe(Some(moe::Cut::General(shape))) => check_experts(shape),
            Self::Grouped(Some(moe::Cut::General(shape))) => {
                check_rules(&[("lines", shape.lines, 1, 1..=1, "1")])?;
                check_experts(shape)
            }
            Self::Grouped(Some(moe::Cut::Sm90(shape))) => {
                let others = u32::from(shape.turns) + u32::from(shape.pair) + u32::from(shape.turned());
                check_rules(&[("turns, pair and few rows", others, 1, 0..=0, "none of them")])?;
                check_experts_hopper(shape)
            }
            Self::Moe(Some(moe::Cut::Sm90(shape))) => check_experts_hopper(shape),
        }
    }
}

fn check_general(shape: &forward_sm80::Shape) -> Result<(), Misfit> {
    check_rules(&[
        ("warps", shape.warps, unit_of_powers(shape.warps), 2..=8, "2, 4 or 8"),
        ("blocks", shape.blocks, 1, 1..=2, "1 or 2"),
        ("step_n", shape.step_n, 16, 16..=128, "a multiple of 16 up to 128"),
        ("tile_n", shape.tile_n, shape.step_n.max(1), 16..=256, "a multiple of step_n up to 256"),
        ("stages", shape.stages, 1, 2..=4, "2 to 4"),
        ("ctas_per_sm", shape.ctas_per_sm, 1, 1..=4, "1 to 4"),
    ])
}

fn check_experts(shape: &moe::product::Shape) -> Result<(), Misfit> {
    let [along, across] = shape.warps;
    check_rules(&[
        ("tile_m", shape.tile_m, unit_of_powers(shape.tile_m), 16..=128, "16, 32, 64 or 128"),
        ("tile_n", shape.tile_n, unit_of_powers(shape.tile_n), 32..=256, "32, 64, 128 or 256"),
        ("warps along rows", along, unit_of_powers(along), 1..=4, "1, 2 or 4"),
        ("warps across rows", across, unit_of_powers(across), 1..=4, "1, 2 or 4"),
        ("stages", shape.stages, 1, 2..=8, "2 to 8"),
        ("ctas_per_sm", shape.ctas_per_sm, 1, 1..=4, "1 to 4"),
        ("lines", shape.lines, unit_of_powers(shape.lines), 1..=4, "1, 2 or 4"),
    ])
}

fn check_experts_hopper(shape: &moe::product_sm90::Shape) -> Result<(), Misfit> {
    let most = if shape.turns { 192 } else { 256 };
    if shape.turned() {
        let others = u32::from(shape.turns) + u32::from(shape.pair);
        // One warpgroup has no registers for the sums of 64 rows × 256 features.
        let most = if shape.rows > 32 { 128 } else { 256 };
        return check_rules(&[
            ("rows", shape.rows, unit_of_powers(shape.rows), 16..=64, "16, 32, 64 or 128"),
            ("tile_n", shape.tile_n, 128, 128..=most, "128 past few rows, or 256 past up to 32"),
            ("turns and pair", others, 1, 0..=0, "neither, past few rows"),
            ("stages", shape.stages, 1, 3..=8, "3 to 8"),
        ]);
    }
    check_rules(&[
        ("rows", shape.rows, 1, 128..=128, "16, 32, 64 or 128"),
        ("tile_n", shape.tile_n, 64, 64..=most, "a multiple of 64 up to 256, or to 192 in turns"),
        ("stages", shape.stages, 1, 3..=8, "3 to 8"),
    ])
}

fn check_backward(shape: &backward_sm80::Shape) -> Result<(), Misfit> {
    check_rules(&[
        ("warps", shape.warps, unit_of_powers(shape.warps), 2..=8, "2, 4 or 8"),
        ("blocks", shape.blocks, 1, 1..=2, "1 or 2"),
        ("step", shape.step, 16, 16..=128, "a multiple of 16 up to 128"),
        // Each row of a tile has a thread that brings its terms.
        ("tile", shape.tile, shape.step.max(1), 16..=shape.threads(), "a multiple of step up to the threads"),
        ("stages", shape.stages, 1, 2..=4, "2 to 4"),
        ("ctas_per_sm", shape.ctas_per_sm, 1, 1..=4, "1 to 4"),
    ])
}

fn check_decode(shape: &few_queries::Shape) -> Result<(), Misfit> {
    check_rules(&[
        ("warps", shape.warps, unit_of_powers(shape.warps), 1..=8, "1, 2, 4 or 8"),
        ("blocks", shape.blocks, 1, 1..=2, "1 or 2"),
        ("tile_n", shape.tile_n, 16, 16..=64, "a multiple of 16 up to 64"),
        ("stages", shape.stages, 1, 1..=8, "1 to 8"),
        ("ctas_per_sm", shape.ctas_per_sm, 1, 1..=8, "1 to 8"),
        ("splits", shape.splits.unwrap_or(1), 1, 1..=1024, "1 to 1024"),
    ])
}

/// What a problem requires of a tile.
fn check_decode_for(problem: &Problem, gpu: &Gpu, shape: &few_queries::Shape) -> Result<(), Misfit> {
    let rows = few_queries::rows(problem) as u32;
    check_rules(&[("blocks", shape.blocks, 1, rows.div_ceil(16)..=2, "enough for all rows")])?;
    if let Order::Cluster { parts } = shape.order {
        check_rules(&[("parts", parts, unit_of_powers(parts), 2..=8, "2, 4 or 8")])?;
    }
    if problem.batch_invariant() && !few_queries::SPAN.is_multiple_of(shape.warps * shape.tile_n) {
        let reason = format!("keys are split every {}, at ends of turns", few_queries::SPAN);
        return Err(Misfit::Kernel { kernel: "decode", reason });
    }
    let newer = shape.copies == Copies::Tensor || matches!(shape.order, Order::Cluster { .. });
    if newer && gpu.capability < (9, 0) {
        let reason = "tensor copies and clusters need compute capability 9.0 or later".to_owned();
        return Err(Misfit::Kernel { kernel: "decode", reason });
    }
    if shape.copies == Copies::Tensor && problem.kv_dtype().is_narrow() {
        let reason = "lanes copy keys of 8 bits".to_owned();
        return Err(Misfit::Kernel { kernel: "decode", reason });
    }
    let Some(size) = problem.page_size() else { return Ok(()) };
    let (tile_n, size) = (shape.tile_n, size as u32);
    match shape.copies {
        // A lane looks up one key.
        Copies::Lanes => {
            check_rules(&[("tile_n", tile_n, unit_of_powers(tile_n), 16..=32, "16 or 32 over pages")])
        }
        Copies::Tensor => check_rules(&[(
            "page size",
            size,
            tile_n,
            1..=u32::MAX,
            "a multiple of tile_n for tensor copies",
        )]),
    }
}

fn check_hopper(shape: &forward_sm90::Shape) -> Result<(), Misfit> {
    let RegisterBudget { producer, consumer } =
        shape.budget.unwrap_or(RegisterBudget { producer: 24, consumer: 24 });
    check_rules(&[
        ("consumers", shape.consumers, 1, 1..=3, "1 to 3"),
        ("tile_n", shape.tile_n, 16, 16..=256, "a multiple of 16 up to 256"),
        ("stages", shape.stages, 1, 2..=8, "2 to 8"),
        ("q_stages", shape.q_stages, 1, 1..=2, "1 or 2"),
        ("staging.cols", shape.staging.cols, 64, 64..=256, "a multiple of 64 up to 256"),
        ("staging.places", shape.staging.places, 1, 1..=2, "1 or 2"),
        ("registers of a producer", producer, 8, 24..=248, "a multiple of 8 from 24 on"),
        ("registers of a consumer", consumer, 8, 24..=248, "a multiple of 8 up to 248"),
        ("turn", shape.turn, 1, 1..=2, "1 or 2"),
        ("ctas_per_sm", shape.ctas_per_sm, 1, 1..=4, "1 to 4"),
    ])?;
    let TileOrder::Single { parts } = shape.order else {
        // Persistent CTAs take all of an SM, unless they have so few rows that two hide each other's waits.
        let most = if shape.consumers == 1 { 2 } else { 1 };
        let allowed = "1 where CTAs are persistent, or 2 with one consumer";
        return check_rules(&[("ctas_per_sm", shape.ctas_per_sm, 1, 1..=most, allowed)]);
    };
    check_rules(&[
        ("parts", parts, unit_of_powers(parts), 1..=8, "1, 2, 4 or 8"),
        ("q_stages", shape.q_stages, 1, 1..=1, "1 where each CTA has one tile"),
    ])
}

fn check_backward_hopper(shape: &backward_sm90::Shape) -> Result<(), Misfit> {
    let ([first, second], [producer, consumer]) = (shape.stages, shape.registers);
    check_rules(&[
        ("consumers", shape.consumers, 1, 1..=3, "1 to 3"),
        ("step", shape.step, 16, 16..=256, "a multiple of 16 up to 256"),
        ("stages of queries or keys", first, 1, 2..=8, "2 to 8"),
        ("stages of dO or values", second, 1, 1..=8, "1 to 8"),
        (
            "places",
            shape.places,
            1,
            u32::from(shape.paired)..=4,
            "up to 4, at least 1 where consumers are paired",
        ),
        ("registers of a producer", producer, 8, 24..=248, "a multiple of 8 from 24 on"),
        ("registers of a consumer", consumer, 8, 24..=248, "a multiple of 8 up to 248"),
        ("registers of a mover", shape.mover.unwrap_or(24), 8, 24..=248, "a multiple of 8 from 24 on"),
    ])
}

/// The plan that computes `problem` with exactly this tile; for tuning and for tables.
pub fn plan_tile(problem: &Problem, gpu: &Gpu, alignment: u64, tile: Tile) -> Result<Plan, Misfit> {
    tile.check()?;
    let input = check(problem, gpu)?;
    let access = access(problem, alignment);
    let kernel = match tile {
        Tile::Sm80(_) if input.bytes() == 1 => {
            let reason = "it needs elements of 16 bits or more".to_owned();
            return Err(Misfit::Kernel { kernel: "forward_sm80", reason });
        }
        Tile::Sm80(shape) => {
            narrow::check_cache(problem, gpu, alignment)?;
            general_config(problem, gpu, input, access, shape)?
        }
        Tile::Decode(shape) => {
            let half = decode::accept(problem, input, gpu, access)
                .map_err(|reason| Misfit::Kernel { kernel: "decode", reason })?;
            check_decode_for(problem, gpu, &shape)?;
            decode_config(problem, gpu, half, shape)?
        }
        Tile::Sm90(shape) => {
            hopper::accept(problem, input, gpu, access)
                .map_err(|reason| Misfit::Kernel { kernel: "forward_sm90", reason })?;
            if input.bytes() == 1 {
                let reason = "tiles of 8-bit tensors are not tuned".to_owned();
                return Err(Misfit::Kernel { kernel: "forward_sm90", reason });
            }
            if hopper::is_packed(problem) && matches!(shape.order, TileOrder::Single { .. }) {
                let reason = "the device decides how many tiles packed sequences have".to_owned();
                return Err(Misfit::Kernel { kernel: "forward_sm90", reason });
            }
            check_rules(&[(
                "staging.cols",
                shape.staging.cols,
                64,
                64..=slabs(problem),
                "no wider than the output",
            )])?;
            hopper_config(problem, input, shape)?
        }
        other => {
            let reason = "it does not compute attention".to_owned();
            return Err(Misfit::Kernel { kernel: other.family(), reason });
        }
    };
    let why = "asked for";
    let plan = Plan::single(kernel, problem, gpu, why);
    plan.check_resources(problem)?;
    Ok(plan)
}

/// What a tile needs of a multiprocessor, as far as it is known without building.
struct Demand {
    /// Registers of a thread that are in use at once, about.
    registers: u32,
    /// Registers that a thread has.
    most_registers: u32,
    /// Shared memory of a CTA, at least.
    shared_bytes: u64,
    ctas_per_sm: u32,
    /// Query rows of a tile.
    tile_m: u32,
    /// CTAs of a tile.
    parts: u32,
}

impl Demand {
    /// Kernels of other operations have plans of their own, which ask for what there is.
    const fn of_others(registers: u32) -> Self {
        Self { registers, most_registers: registers, shared_bytes: 0, ctas_per_sm: 1, tile_m: 1, parts: 1 }
    }

    /// Products of experts take what their shape says, other steps nothing that is scarce.
    fn of_experts(cfg: &moe::Config) -> Self {
        let registers = cfg.registers();
        let (shared_bytes, ctas_per_sm, tile_m) = match cfg {
            moe::Config::Product(cfg) => {
                (cfg.shape.shared_bytes().into(), cfg.shape.ctas_per_sm, cfg.shape.tile_m)
            }
            moe::Config::ProductSm90(cfg) => {
                (cfg.shape.shared_bytes().into(), cfg.shape.ctas_per_sm(), cfg.shape.rows)
            }
            _ => (0, 1, 1),
        };
        Self { registers, most_registers: registers, shared_bytes, ctas_per_sm, tile_m, parts: 1 }
    }

    fn of_general(cfg: &forward_sm80::Config, qk: u32, v: u32) -> Self {
        let shape = &cfg.shape;
        let single = cfg.input == Element::F32;
        // A block of 16 rows keeps half as many sums as columns, half as many scores as keys (which f32 has in two
        // parts) and, if asked to, Q.
        let scores = if single { shape.step_n } else { shape.step_n / 2 };
        let q = if shape.q_in_registers { qk * cfg.input.bytes() / 8 } else { 0 };
        Self {
            registers: shape.blocks * (v.min(cfg.warp_columns()) / 2 + scores + q),
            most_registers: shape.registers(),
            shared_bytes: cfg.shared_bytes().into(),
            ctas_per_sm: shape.ctas_per_sm,
            tile_m: cfg.tile_m(),
            parts: 1,
        }
    }

    fn of_decode(cfg: &few_queries::Config) -> Self {
        let shape = &cfg.shape;
        let q = if shape.q_in_registers { cfg.dim_qk / 4 } else { 0 };
        Self {
            registers: shape.blocks * (cfg.dim_v / 2 + shape.tile_n / 2 + q),
            most_registers: shape.registers(),
            shared_bytes: cfg.shared_bytes().into(),
            ctas_per_sm: shape.ctas_per_sm,
            tile_m: shape.rows(),
            parts: 1,
        }
    }

    fn of_hopper(cfg: &forward_sm90::Config, v: u32) -> Self {
        let shape = &cfg.shape;
        Self {
            // Sums, scores, and probabilities that are half as wide.
            registers: v / 2 + shape.tile_n / 2 + shape.tile_n / 4 + OTHER_REGISTERS,
            most_registers: shape.budget.map_or(cfg.registers_at_entry(), |budget| budget.consumer),
            shared_bytes: cfg.shared_bytes().into(),
            ctas_per_sm: shape.ctas_per_sm,
            tile_m: cfg.tile_m(),
            parts: shape.order.parts(),
        }
    }
}

impl Plan {
    fn demand(&self, problem: &Problem) -> Demand {
        let (qk, v) = (problem.dim_qk() as u32, problem.dim_v() as u32);
        match self.kernel() {
            KernelConfig::Sm80(cfg) => Demand::of_general(cfg, qk, v),
            KernelConfig::Sm90(cfg) => Demand::of_hopper(cfg, v),
            KernelConfig::Decode(cfg) => Demand::of_decode(cfg),
            KernelConfig::Moe(cfg) => Demand::of_experts(cfg),
            other => Demand::of_others(other.register_budget()),
        }
    }

    /// Registers, shared memory and CTAs.
    pub(super) fn check_resources(&self, problem: &Problem) -> Result<(), Misfit> {
        let demand = self.demand(problem);
        let (needed, most) = (demand.registers, demand.most_registers);
        if needed > most {
            return Err(Misfit::Registers { needed, most });
        }
        self.check_shared(demand.shared_bytes, demand.ctas_per_sm)?;
        check_grid(problem, demand.tile_m, demand.parts)?;
        self.check_planes(problem)
    }

    /// Few tiles are numbered along all axes of the grid, two of which are short.
    fn check_planes(&self, problem: &Problem) -> Result<(), Misfit> {
        const MOST: usize = 65535;
        let KernelConfig::Sm90(cfg) = self.kernel() else { return Ok(()) };
        let ctas = problem.heads_q().max(problem.batch());
        match cfg.shape.order {
            TileOrder::Single { .. } if ctas > MOST => Err(Misfit::Grid { ctas: ctas as u64 }),
            _ => Ok(()),
        }
    }

    fn check_shared(&self, bytes: u64, ctas: u32) -> Result<(), Misfit> {
        // One CTA may take all that the driver leaves.
        let reserved = u64::from(Sm::of(self.gpu.capability).reserved);
        let (bytes, most) =
            ((bytes + reserved) * u64::from(ctas), u64::from(self.gpu.shared_bytes) + reserved);
        if bytes > most { Err(Misfit::SharedMemory { bytes, most }) } else { Ok(()) }
    }

    /// Whether the kernel can be built and its launch fits on the GPU.
    pub fn check_build(&self, problem: &Problem) -> Result<(), Misfit> {
        let program = self.kernel().program().map_err(|e| Misfit::Build(e.to_string()))?;
        let Some(launch) = self.launches()[0].spec(&program) else { return Ok(()) };
        self.check_shared(launch.shared_bytes.into(), self.demand(problem).ctas_per_sm)
    }
}

/// Columns of the output in whole slabs.
fn slabs(problem: &Problem) -> u32 {
    (problem.dim_v() as u32).next_multiple_of(64)
}

fn check_grid(problem: &Problem, tile_m: u32, parts: u32) -> Result<(), Misfit> {
    let ctas = Side::Queries.tile_count(problem, tile_m).saturating_mul(u64::from(parts));
    if ctas > i32::MAX as u64 { Err(Misfit::Grid { ctas }) } else { Ok(()) }
}
