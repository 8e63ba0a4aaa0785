//! Attention forward for Hopper (sm_90a): TMA, wgmma, warp specialisation, a persistent tile schedule.
//!
//! One producer thread keeps the tensor-copy engine busy; each consumer warpgroup owns 64 query rows of a tile. A
//! consumer issues the next tile's QKᵀ together with this tile's PV and does its softmax while the tensor cores work;
//! the first QKᵀ of the next tile is issued behind the last PV of this one, so that the epilogue is covered too.
//!
//! Features are padded inside the kernel: tensor copies fill columns beyond the tensor with zeros and clip them on the
//! way out, and products run over no more than the features there are.

mod consumer;
mod epilogue;
mod merge;
mod producer;
mod schedule;
mod single;
mod turns;
mod values;

use flashcore_core::{DType, Problem};
use flashcore_ptx::{
    ident::Ident,
    launch::{Slot, TensorElement, TensorMapSpec, Workspace},
    layout::Swizzle,
    target::Target,
};
use flashcore_tile::{
    BuildError, Builder, Cmp, Extent, Half, NamedBarrier, Params, Pipeline, Program, Reg, RegisterBudget,
    Roles, SmemTile, TensorMap, U32, U64, WARPGROUP,
};
use serde::{Deserialize, Serialize};

use crate::{
    shared::{
        lengths::{LengthArguments, LengthsKind},
        mask::{Mask, Sides},
        scale::Scale,
        schedule::TensorArgument,
        sinks::{SinkArgument, sink_name},
    },
    slots,
};
pub use schedule::Order;

/// Rows that one consumer warpgroup owns.
pub(crate) const ROWS_PER_GROUP: u32 = 64;
/// Warps of a warpgroup; each releases a stage for itself.
const WARPS_PER_GROUP: u32 = 4;
/// Rows of the output that one warp writes.
const ROWS_PER_WARP: u32 = 16;
/// Columns of a slab: 128 bytes, the widest swizzle.
const SLAB_COLS: u32 = 64;
/// Strides of tensor maps are multiples of this many bytes.
const STRIDE_UNIT: u64 = 16;

/// Everything that decides the text of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// Element type.
    pub half: Half,
    /// Features of queries and keys: a multiple of 8.
    pub dim_qk: u32,
    /// Features of values: a multiple of 8.
    pub dim_v: u32,
    /// Which bounds the mask has.
    pub mask: Sides,
    /// How the rows of sequences are told; never packed.
    pub lengths: LengthsKind,
    /// Scores are limited by a hyperbolic tangent.
    pub softcap: bool,
    /// Element type of every head's extra logit, if there is one.
    pub sinks: Option<DType>,
    /// Query heads of a group that share a tile, row by row: a power of two up to 64; 1 where rows of one head fill it.
    pub pack: u32,
    /// How the work is cut.
    pub shape: Shape,
}

/// Tile, warpgroups and pipeline of a kernel: what tuning changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Consumer warpgroups; the tile has 64 rows for each.
    pub consumers: u32,
    /// Keys of a tile: a multiple of 16.
    pub tile_n: u32,
    /// K and V tiles in flight.
    pub stages: u32,
    /// Q tiles in flight: with two, the next tile's Q is there before this tile ends.
    pub q_stages: u32,
    /// How a warp's rows of the output leave.
    pub staging: Staging,
    /// Registers of producer and consumers; `None` where all threads keep what the launch gave them.
    #[serde(rename = "registers", with = "registers")]
    pub budget: Option<RegisterBudget>,
    /// In which order CTAs take tiles.
    pub order: Order,
    /// CTAs that share an SM; caps the registers.
    pub ctas_per_sm: u32,
    /// Whole key tiles in one turn of the loop: two are scheduled better, but take longer to fetch at first.
    pub turn: u32,
}

/// Where a warp gathers its rows of the output before tensor copies take them away.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Staging {
    /// Columns that leave together: a multiple of 64.
    pub cols: u32,
    /// Places for that many columns: with two, one is filled while the other leaves.
    pub places: u32,
}

/// A budget in tables: registers of a producer and of a consumer, or null.
mod registers {
    use flashcore_tile::RegisterBudget;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(
        budget: &Option<RegisterBudget>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        budget.map(|RegisterBudget { producer, consumer }| [producer, consumer]).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<RegisterBudget>, D::Error> {
        let pair = <Option<[u32; 2]>>::deserialize(from)?;
        Ok(pair.map(|[producer, consumer]| RegisterBudget { producer, consumer }))
    }
}

impl Config {
    /// Query rows of a tile.
    pub const fn tile_m(&self) -> u32 {
        self.shape.consumers * ROWS_PER_GROUP
    }

    /// Keys of a tile.
    pub const fn tile_n(&self) -> u32 {
        self.shape.tile_n
    }

    /// The kernel's name: all of the config is in it but the producer's registers.
    pub fn name(&self) -> Ident {
        let half = if self.half == Half::F16 { "f16" } else { "bf16" };
        let Shape { consumers, tile_n, stages, q_stages, staging, budget, order, ctas_per_sm, turn } =
            self.shape;
        let mut name = format!(
            "fc_forward_sm_90a_{half}_d{}v{}_g{consumers}n{tile_n}s{stages}q{q_stages}o{}x{}r{}c{ctas_per_sm}t{turn}_{}_{}",
            self.dim_qk,
            self.dim_v,
            staging.places,
            staging.cols,
            budget.map_or(0, |budget| budget.consumer),
            order.name(),
            self.mask.name()
        );
        let used = format!("_{}", self.lengths.name());
        let options = [
            (self.used(), used.as_str()),
            (self.softcap, "_cap"),
            (self.sinks.is_some(), sink_name(self.sinks)),
        ];
        options.into_iter().filter(|(on, _)| *on).for_each(|(_, text)| name.push_str(text));
        if self.pack > 1 {
            name.push_str(&format!("_pack{}", self.pack));
        }
        Ident::new(name).expect("made of legal parts")
    }

    /// Registers of a thread before the roles share them.
    pub const fn registers_at_entry(&self) -> u32 {
        self.roles().registers_at_entry(self.shape.ctas_per_sm)
    }

    /// Whether consumers pass over key tiles that only the rows of others see.
    ///
    /// There is at most one such tile at either end: while the last values of a row tile are multiplied, two tiles of
    /// keys can be given back before the producer has to wait for these values.
    const fn passes(&self) -> bool {
        let (tile_m, tile_n) = (self.tile_m(), self.tile_n());
        let one_at_most = tile_m - ROWS_PER_GROUP <= tile_n;
        // A diagonal crosses the last key tile of all consumers where that is as wide as the rows are many.
        let bounded = (self.mask.left || self.mask.right) && tile_n < tile_m;
        // Unused values are cleared by all consumers together, so that all work through the same tiles.
        bounded && one_at_most && !self.lengths.cuts_keys()
    }

    /// Whether consumers multiply in turn: at 64 features that is 2 to 12 % faster, at 128 and more 3 to 16 % slower. A
    /// softcap would hold the turn while hyperbolic tangents are taken.
    const fn multiplies_in_turn(&self) -> bool {
        self.shape.consumers > 1 && self.dim_qk <= 64 && self.dim_v <= 64 && !self.softcap
    }

    /// Whether a step waits for both of its products at once. Where it waits for scores first, the assembler takes
    /// exponentials until PV has ended, into registers of their own. PV of narrow heads is too short for that: up to 48
    /// features are up to 14 % faster without, and do not spill. Two tiles that share a CTA are 3 % faster.
    const fn waits_once(&self) -> bool {
        let narrow = self.dim_qk <= 48 && self.dim_v <= 48;
        narrow || (self.multiplies_in_turn() && matches!(self.shape.order, Order::Single { .. }))
    }

    /// Whether only the producer waits for the kernel before: consumers then touch nothing of its that did not come
    /// through the producer, which knows by then where its copies start.
    const fn producer_waits(&self) -> bool {
        matches!(self.shape.order, Order::Single { .. }) && !self.used() && self.sinks.is_none()
    }

    /// Whether batch entries use only their first rows.
    const fn used(&self) -> bool {
        self.lengths.cuts_queries() || self.lengths.cuts_keys()
    }

    const fn roles(&self) -> Roles {
        Roles { consumers: self.shape.consumers, budget: self.shape.budget }
    }
}

/// What the host passes, as registers.
#[derive(Debug)]
pub(crate) struct Arguments {
    q: TensorMap,
    k: TensorMap,
    v: TensorMap,
    out: TensorMap,
    lse: Reg<U64>,
    tile_counter: Option<Reg<U64>>,
    /// The output by address, for tiles whose keys are split over a cluster.
    out_rows: Option<TensorArgument>,
    heads: Reg<U32>,
    group: Reg<U32>,
    row_tiles: Reg<U32>,
    tiles: Reg<U32>,
    section: Reg<U32>,
    scale: Scale,
    sinks: Option<SinkArgument>,
    lengths: LengthArguments,
    mask: Mask,
}

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<Problem>, cfg: Config) -> Self {
        let (tile_m, tile_n) = (cfg.tile_m(), cfg.tile_n());
        let q = params.tensor_map(b, "q", move |p| packed_map(p, p.q(), slots::Q, tile_m, cfg.pack));
        let k = params.tensor_map(b, "k", move |p| map(p, p.k(), slots::K, tile_n));
        let v = params.tensor_map(b, "v", move |p| map(p, p.v(), slots::V, tile_n));
        let out =
            params.tensor_map(b, "out", move |p| packed_map(p, p.out(), slots::OUT, ROWS_PER_WARP, cfg.pack));
        let lse = params.buffer(b, "lse", slots::LSE);
        let tile_counter =
            (cfg.shape.order == Order::Atomic).then(|| params.buffer(b, "tile_counter", slots::TILE_COUNTER));
        let out_rows = (cfg.shape.order.parts() > 1)
            .then(|| TensorArgument::declare(b, params, "out_rows", slots::OUT, Problem::out));
        let seq_q = params.u32(b, "seq_q", |p| p.seq_q() as u32);
        let seq_kv = params.u32(b, "seq_kv", |p| p.seq_kv() as u32);
        Self {
            q,
            k,
            v,
            out,
            lse,
            tile_counter,
            out_rows,
            heads: params.u32(b, "heads", move |p| packed_heads(p, cfg)),
            group: params.u32(b, "group", move |p| p.group() as u32 / cfg.pack),
            row_tiles: params.u32(b, "row_tiles", move |p| row_tiles(p, cfg)),
            tiles: params.u32(b, "tiles", move |p| tiles(p, cfg)),
            section: params.u32(b, "section", move |p| schedule::section(p, cfg)),
            scale: Scale::declare(b, params, cfg.softcap),
            sinks: SinkArgument::declare(b, params, cfg.sinks),
            lengths: LengthArguments::declare(b, params, cfg.lengths, [seq_q, seq_kv]),
            mask: Mask::declare(b, params, cfg.mask),
        }
    }
}

/// What lives in shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    q: Pipeline,
    k: Pipeline,
    v: Pipeline,
    /// Where each warp gathers its rows of the output.
    staging: SmemTile,
    /// Which tile each Q stage belongs to.
    tile_info: u32,
    /// Where consumers wait for each other.
    consumers: NamedBarrier,
    /// Where the CTAs of a cluster exchange their parts of a tile, if there are several.
    mail: Option<merge::Mail>,
    /// Where consumers say whose turn it is, if they multiply in turn.
    turns: Option<turns::Turns>,
}

impl Layout {
    fn new(b: &mut Builder, cfg: Config) -> Self {
        let Shape { consumers, tile_n, stages, q_stages, staging, order, .. } = cfg.shape;
        let warps = consumers * WARPS_PER_GROUP;
        // Parts are merged without staging.
        let places = if order.parts() > 1 { 0 } else { warps * staging.places };
        let q = b.smem_tile(cfg.tile_m(), padded(cfg.dim_qk), Swizzle::B128, q_stages);
        let k = b.smem_tile(tile_n, padded(cfg.dim_qk), Swizzle::B128, stages);
        let v = b.smem_tile(tile_n, padded(cfg.dim_v), Swizzle::B128, stages);
        let staging = b.smem_tile(ROWS_PER_WARP, staging.cols, Swizzle::B128, places);
        Self {
            q: Pipeline::new(b, q, q_stages, warps),
            k: Pipeline::new(b, k, stages, warps),
            v: Pipeline::new(b, v, stages, warps),
            staging,
            tile_info: b.shared(q_stages * schedule::INFO_BYTES, 16),
            consumers: b.named_barrier(consumers * WARPGROUP),
            mail: merge::Mail::reserve(b, cfg),
            turns: turns::Turns::reserve(b, cfg),
        }
    }

    /// Initialises the barriers and makes them known to the CTA, and to the cluster by the time it is waited for.
    fn init(&self, b: &mut Builder, cfg: Config) {
        let thread = b.thread();
        let first = b.test(Cmp::Eq, thread, 0);
        b.if_(first, |b| {
            [self.q, self.k, self.v].iter().for_each(|pipeline| pipeline.init(b));
            self.mail.iter().for_each(|mail| mail.init(b, cfg));
            self.turns.iter().for_each(|turns| turns.init(b));
            b.fence_mbarrier_init();
        });
        if cfg.shape.order.parts() > 1 {
            b.arrive_cluster_relaxed();
        }
        b.sync_cta();
    }
}

/// Builds the kernel.
pub fn forward_sm90(cfg: Config) -> Result<Program<Problem>, BuildError> {
    let (name, roles) = (cfg.name(), cfg.roles());
    let mut b = Builder::new(Target::Sm90a, &name, roles.threads(), cfg.shape.ctas_per_sm);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    let layout = Layout::new(&mut b, cfg);
    layout.init(&mut b, cfg);
    // What lies before the predecessor's results are waited for overlaps with its end.
    b.launch_dependents();
    prefetch_maps(&mut b, &args);
    if !cfg.producer_waits() {
        b.wait_for_predecessor();
    }
    if let Order::Single { parts } = cfg.shape.order {
        b.cluster(parts);
    }
    b.specialise(
        roles,
        |b| match cfg.shape.order {
            Order::Single { .. } => single::producer(b, cfg, &args, &layout),
            _ => producer::run(b, cfg, &args, &layout),
        },
        |b, group| match cfg.shape.order {
            Order::Single { .. } => single::consumer(b, cfg, &args, &layout, group),
            _ => consumer::run(b, cfg, &args, &layout, group),
        },
    );
    b.finish(&name, params)
}

/// Fetches the tensor maps ahead of their first use.
fn prefetch_maps(b: &mut Builder, args: &Arguments) {
    let thread = b.thread();
    let first = b.test(Cmp::Eq, thread, 0);
    b.if_(first, |b| [args.q, args.k, args.v, args.out].into_iter().for_each(|map| b.tma_prefetch(map)));
}

/// The launch that computes `problem` on a GPU of `sms` multiprocessors.
pub fn extent(cfg: Config, problem: &Problem, sms: u32) -> Extent {
    let tiles = tiles(problem, cfg);
    let counter = Workspace { slot: slots::TILE_COUNTER, bytes: 4, zeroed: true };
    let (grid, workspace) = match cfg.shape.order {
        Order::Static => ([tiles.min(sms), 1, 1], Vec::new()),
        Order::Atomic => ([tiles.min(sms), 1, 1], vec![counter]),
        Order::Single { parts } => {
            let grid = [row_tiles(problem, cfg) * parts, packed_heads(problem, cfg), problem.batch() as u32];
            (grid, Vec::new())
        }
    };
    Extent { grid, workspace, dependent: true }
}

/// Columns of a tile for `dim` features: whole slabs.
const fn padded(dim: u32) -> u32 {
    dim.next_multiple_of(SLAB_COLS)
}

/// Row tiles of a head, or of as many heads as share a tile.
fn row_tiles(problem: &Problem, cfg: Config) -> u32 {
    (problem.seq_q() as u32 * cfg.pack).div_ceil(cfg.tile_m())
}

/// Query heads, or groups of them that share a tile.
fn packed_heads(problem: &Problem, cfg: Config) -> u32 {
    problem.heads_q() as u32 / cfg.pack
}

fn tiles(problem: &Problem, cfg: Config) -> u32 {
    row_tiles(problem, cfg) * packed_heads(problem, cfg) * problem.batch() as u32
}

/// As [`map`], over the rows of `pack` heads: those of one position one after another, then those of the next.
fn packed_map(
    problem: &Problem,
    layout: &flashcore_core::Layout,
    slot: Slot,
    rows: u32,
    pack: u32,
) -> TensorMapSpec {
    let mut spec = map(problem, layout, slot, rows);
    if pack > 1 {
        let [row, head, batch] = [spec.strides[0], spec.strides[1], spec.strides[2]];
        let members = pack.min(rows);
        spec.dims.splice(1..3, [u64::from(pack), spec.dims[1], spec.dims[2] / u64::from(pack)]);
        spec.strides = vec![head, row, head * u64::from(pack), batch];
        spec.box_dims = vec![SLAB_COLS, members, rows / members, 1, 1];
    }
    spec
}

/// A tensor map over one of the problem's tensors, moving slabs of `rows` rows.
fn map(problem: &Problem, layout: &flashcore_core::Layout, slot: Slot, rows: u32) -> TensorMapSpec {
    let dims = layout.dims();
    let [batch, head, seq, _] = layout.strides();
    let element = match problem.dtype() {
        DType::F16 => TensorElement::F16,
        _ => TensorElement::BF16,
    };
    // The stride of a single row, head or entry is never taken, but must be one that the driver accepts.
    let stride = |(extent, stride): (usize, usize)| match extent {
        1 => STRIDE_UNIT,
        _ => stride as u64 * u64::from(element.bytes()),
    };
    TensorMapSpec {
        slot,
        element,
        dims: [dims.dim, dims.seq, dims.heads, dims.batch].map(|n| n as u64).to_vec(),
        strides: [(dims.seq, seq), (dims.heads, head), (dims.batch, batch)].map(stride).to_vec(),
        box_dims: vec![SLAB_COLS, rows, 1, 1],
        swizzle: Swizzle::B128,
    }
}
